"""How a kernel walks its operands: bytes between what neighbouring results read.

Transposes and bitcasts inside a fusion are index maps, of which many cancel; what memory sees is the map from a result
to the operand. It is followed from the root back to each parameter, for a few results (0), their neighbours in memory
(1), and the same results one further along the dimension that a reduction sums (2).
"""

from __future__ import annotations

import math
from typing import final

import numpy as np

from autoshard.costmodel.learned.hlo_graph import ITEM_BYTES, Instruction, Kernel, Shape

Array = np.ndarray

SAMPLES = 7
WALKS = 17

LINE = 64
CACHES = ((64, 8), (1024, 16))
"""Sets and ways of the first two caches, of lines of `LINE` bytes: 32 KiB and 1 MiB, as AMD's Zen 4 has them."""


def walk_features(kernel: Kernel) -> tuple[float, ...]:
    """Strides of the operand with the most bytes, parts of the bytes by stride, what caches hold of a walk: [WALKS].

    Neighbouring results lie in the same lines of a strided operand, so that what was read for one row of results (or
    one sum) serves the next, if it is still there.
    """
    trace = _Trace(kernel)
    root = kernel.instruction
    if root.opcode == "fusion":
        root = next((i for i in kernel.body.values() if i.root), root)
        if root.opcode == "tuple" and root.operands:
            root = kernel.body.get(root.operands[0], root)
    trace.follow(root, _first(root.shape))
    found = sorted(trace.found, reverse=True)
    if not found:
        return (0.0,) * WALKS
    nbytes, step, inner, item = found[0]
    total = max(sum(n for n, *_ in found), 1.0)
    most_inner = max(i for _, _, i, _ in found)
    return (
        math.log1p(step),
        _even(step),
        float(step <= item),
        math.log1p(inner),
        _even(inner),
        math.log1p(most_inner),
        sum(n for n, s, _, _ in found if s == 0) / total,
        sum(n for n, s, _, item_ in found if s > item_) / total,
        sum(n for n, s, _, _ in found if s >= 64) / total,
        math.log1p(nbytes),
        math.log1p(sum(n for n, s, _, _ in found if s >= 64)),
        float(step > item),
        *(_overfull(step, root.shape.dims[root.shape.packed[0]] if root.shape.packed else 1)),
        float(most_inner > item),
        *(_overfull(most_inner, trace.length)),
    )


def _overfull(stride: float, steps: int) -> tuple[float, ...]:
    """For each cache: log of lines that a walk touches over lines that its sets hold, plus one."""
    lines = steps * min(stride, LINE) / LINE
    whole = stride >= LINE and stride % LINE == 0
    return tuple(
        math.log1p(lines / (ways * sets / (math.gcd(int(stride) // LINE, sets) if whole else 1)))
        for sets, ways in CACHES
    )


def _even(stride: float) -> float:
    return math.log2(max(math.gcd(int(stride), 4096), 1)) / 12


def _first(shape: Shape) -> Array:
    """Indices of a few results and their neighbours: [3, SAMPLES, rank]."""
    size = max(shape.size, 1)
    at = np.minimum((np.arange(SAMPLES) + 0.37) * size // SAMPLES, max(size - 2, 0)).astype(np.int64)
    return np.stack([_unpack(shape, at), _unpack(shape, np.minimum(at + 1, size - 1)), _unpack(shape, at)])


def _unpack(shape: Shape, offsets: Array) -> Array:
    """Indices of elements by their place in memory."""
    index = np.zeros((*offsets.shape, len(shape.dims)), np.int64)
    for d in shape.order:
        index[..., d] = offsets % shape.dims[d]
        offsets = offsets // shape.dims[d]
    return index


def _pack(shape: Shape, index: Array) -> Array:
    strides = np.array([shape.stride(d) for d in range(len(shape.dims))], np.int64)
    return (index * strides).sum(-1)


@final
class _Trace:
    """Follows indices back to operands."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.found: list[tuple[float, float, float, float]] = []
        self.seen: set[str] = set()
        self.length = 1

    def follow(self, instruction: Instruction, index: Array) -> None:
        if instruction.name in self.seen or index.shape[-1] != len(instruction.shape.dims):
            return
        self.seen.add(instruction.name)
        self.length = max(self.length, self._summed(instruction))
        if instruction.opcode == "parameter":
            self._leaf(instruction.shape, index)
            return
        for place, name in enumerate(instruction.operands):
            operand = self.kernel.body.get(name)
            if operand is None or not operand.shape.dims or operand.name == instruction.name:
                continue
            there = _operand_index(instruction, operand.shape, index, place)
            if there is None:
                continue
            if self.kernel.instruction.opcode == "fusion":
                self.follow(operand, there)
            else:
                self._leaf(operand.shape, there)

    def _summed(self, instruction: Instruction) -> int:
        """Elements of a sum."""
        source = self.kernel.body.get(instruction.operands[0]) if instruction.operands else None
        if source is None or instruction.opcode not in ("reduce", "reduce-window"):
            return 1
        rank = len(source.shape.dims)
        if instruction.opcode == "reduce-window":
            return math.prod(_window(instruction, "size", rank))
        return math.prod(source.shape.dims[d] for d in instruction.numbers("dimensions") if d < rank)

    def _leaf(self, shape: Shape, index: Array) -> None:
        item = ITEM_BYTES.get(shape.dtype, 4)
        offsets = _pack(shape, index) * item
        step, inner = (float(np.median(np.abs(offsets[k] - offsets[0]))) for k in (1, 2))
        self.found.append((float(shape.nbytes), step, inner, float(item)))


def _operand_index(instruction: Instruction, source: Shape, index: Array, place: int) -> Array | None:
    """Indices an instruction reads of an operand; None where they are not known."""
    shape, rank = instruction.shape, len(source.dims)
    match instruction.opcode:
        case "bitcast":
            return _unpack(source, _pack(shape, index)) if source.size == shape.size else None
        case "transpose":
            there = np.zeros_like(index)
            there[..., list(instruction.numbers("dimensions"))] = index
            return there
        case "broadcast":
            return index[..., list(instruction.numbers("dimensions"))]
        case "reduce" if place == 0:
            summed = instruction.numbers("dimensions")
            there = np.zeros((*index.shape[:-1], rank), np.int64)
            there[..., [d for d in range(rank) if d not in summed]] = index
            inner = next((d for d in source.packed if d in summed), None)
            if inner is not None:
                there[2, :, inner] += 1
            return there
        case "reduce-window" if place == 0:
            steps = _window(instruction, "stride", rank)
            there = index * np.array(steps)
            sizes = _window(instruction, "size", rank)
            inner = next((d for d in source.packed if sizes[d] > 1), None)
            if inner is not None:
                there[2, :, inner] += 1
            return there
        case "reduce" | "reduce-window" | "gather" | "scatter" | "dot" | "convolution" | "sort":
            return None
        case _:
            return index if rank == index.shape[-1] else None


def _window(instruction: Instruction, key: str, rank: int) -> list[int]:
    after = instruction.attributes.partition(key + "=")[2]
    text = "".join(c if c.isdigit() or c == "x" else " " for c in after).split(" ")[0]
    numbers = [int(n) for n in text.split("x") if n]
    return numbers if len(numbers) == rank else [1] * rank
