"""What decides how long one kernel runs on a CPU, as a fixed number of figures.

How many of each operation an element of the result; how memory is walked (strides of transposes, runs of slices,
gathers and concatenations, which dimension a reduction sums, which a broadcast repeats); sizes of a product or a
convolution and which way its operands lie; bytes, and how long ago they were touched (`access.py`); sizes of minor
dimensions and what is left of a vector; how strides divide by the sets of a cache. And the base time the network
corrects: a roofline in round numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from autoshard.costmodel.learned.access import Access, near_share
from autoshard.costmodel.learned.hlo_graph import FREE, ITEM_BYTES, Instruction, Kernel, Shape
from autoshard.costmodel.learned.walk import WALKS, walk_features

_OPCODES = (
    "abs add and atan2 broadcast cbrt ceil clamp compare concatenate convert convolution copy cosine divide dot "
    "dynamic-slice dynamic-update-slice erf exponential exponential-minus-one floor gather iota is-finite log "
    "log-plus-one logistic map maximum minimum multiply negate not or pad power reduce reduce-window remainder "
    "reverse rng-bit-generator round-nearest-even rsqrt scatter select shift-right-logical sign sine slice sort sqrt "
    "subtract tanh transpose xor other"
)
OPCODES = tuple(_OPCODES.split())
_NUMBER = {name: i for i, name in enumerate(OPCODES)}
_SLOW = (
    "atan2 cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic power rsqrt sine sqrt tanh "
    "divide remainder"
)
SLOW = frozenset(_SLOW.split())

MAINS = (
    "dot",
    "convolution",
    "scatter",
    "gather",
    "sort",
    "reduce-window",
    "reduce",
    "dynamic-update-slice",
    "concatenate",
    "transpose",
    "copy",
    "pad",
    "dynamic-slice",
    "slice",
    "while",
    "custom-call",
    "loop",
    "call",
)
"""What a kernel is called after: the first of these in it."""

DTYPES = ("f32", "bf16", "f16", "f64", "s32", "pred")

PATTERNS = (
    "transpose",
    "reduce_minor",
    "reduce_major",
    "broadcast_minor",
    "broadcast_row",
    "slice",
    "concatenate",
    "gather",
    "window",
    "reverse",
    "scatter",
)
"""For each: how many elements, and the mean over elements of the log of a stride, a run or a length."""

LAUNCH_S = 3e-7
BYTES_PER_S = 1.5e10
OPERATIONS_PER_S = 8e9
SLOW_PER_S = 1e9
FLOPS_PER_S = 6e10
"""The base time's figures: orders of magnitude of one core. What is wrong with them is for the network to learn."""

NEAR = (1 << 19, 1 << 22, 1 << 24)
"""Reuse distances, in bytes, that a share is counted for: within a core's cache, a share of the last one, all of it."""

SETS = 4096
"""Bytes after which addresses fall into the same set of a first-level cache of 64 sets of 64 bytes."""

PRODUCT = 26
STRIDES = 8
REUSE = 3 + len(NEAR)
PLAIN = 24
WIDTH = len(OPCODES) + len(MAINS) + len(DTYPES) + 3 * len(PATTERNS) + PRODUCT + STRIDES + WALKS + REUSE + PLAIN
REUSE_COLUMNS = (WIDTH - PLAIN - REUSE, WIDTH - PLAIN)
# Where the figures stand in a row.
PATTERNS_AT = len(OPCODES) + len(MAINS) + len(DTYPES)
PRODUCT_AT = PATTERNS_AT + 3 * len(PATTERNS)
STRIDES_AT = PRODUCT_AT + PRODUCT
WALKS_AT = STRIDES_AT + STRIDES
PLAIN_AT = WIDTH - PLAIN
PLACES = {
    **{PLAIN_AT + k: 1.0 for k in (1, 2, 3, 4, 7, 9, 10, 11)},  # elements, bytes, operations, minor dimensions
    **{PRODUCT_AT + k: 1.0 for k in (0, 1, 2, 3)},  # sizes of a product
    **{PRODUCT_AT + k: 1.0 for k in (12, 13, 15, 16, 18)},  # window, channels, strides and dilations of a convolution
    **{STRIDES_AT + k: 1.0 for k in (0, 1)},
    **{WALKS_AT + k: 0.5 for k in (0, 3, 5)},  # logarithms of strides
    **{WALKS_AT + k: 1.0 for k in (12, 13, 15, 16)},  # of walks over caches
    **{PLAIN_AT - 1 - k: 0.7 for k in range(len(NEAR))},  # parts of the bytes that are near
}
PLACE_COLUMNS, PLACE_SCALES = tuple(PLACES), tuple(PLACES.values())
"""Columns that say how far apart kernels with the same operations are, and what they count."""

LAYOUT = f"kernels-7:{WIDTH}"
"""Names what the columns mean; a stored model says which it was trained on."""


def log1(value: float) -> float:
    """The scale of all counts."""
    return math.log1p(max(value, 0.0))


@final
class _Tally:
    """Figures of one kernel under way."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.counts = np.zeros(len(OPCODES))
        self.patterns = np.zeros((len(PATTERNS), 3))
        self.product = np.zeros(PRODUCT)
        self.strides = np.zeros(STRIDES)
        self.flops = 0.0
        self.operations = 0.0
        self.slow = 0.0

    def operand(self, instruction: Instruction, index: int) -> Shape:
        if index < len(instruction.operands):
            found = self.kernel.body.get(instruction.operands[index])
            if found is not None:
                return found.shape
            if instruction is self.kernel.instruction and index < len(self.kernel.inputs):
                return self.kernel.inputs[index]
        return Shape("f32", (), ())

    def pattern(self, name: str, elements: float, length: float, other: float = 0.0) -> None:
        row = self.patterns[PATTERNS.index(name)]
        row += (elements, elements * log1(length), elements * log1(other))

    def add(self, instruction: Instruction) -> None:
        shape = instruction.shape
        elements = float(shape.size)
        opcode = instruction.opcode
        source = self.operand(instruction, 0)
        minor = shape.packed[0] if shape.packed else -1
        match opcode:
            case "transpose" | "copy":
                order = instruction.numbers("dimensions") if opcode == "transpose" else tuple(range(len(shape.dims)))
                if minor >= 0 and len(order) == len(shape.dims):
                    first = source.packed[0] if source.packed else -1
                    stride = source.stride(order[minor])
                    back = shape.stride(order.index(first)) if first in order else 1
                    if stride > 1:
                        self.pattern("transpose", elements, stride, back)
                        self._walk(source, stride, back, shape.dims[minor])
            case "reduce":
                elements = float(source.size)
                dims = instruction.numbers("dimensions")
                length = math.prod(source.dims[d] for d in dims if d < len(source.dims))
                within = bool(source.packed) and source.packed[0] in dims
                inner = min((source.stride(d) for d in dims if d < len(source.dims)), default=1)
                run = math.prod(source.dims[d] for d in _leading(source, dims)) if within else inner
                self.pattern("reduce_minor" if within else "reduce_major", elements, length, run)
            case "reduce-window":
                window = _window(instruction)
                elements *= math.prod(window)
                length = window[source.packed[0]] if source.packed and len(window) == len(source.dims) else 1
                self.pattern("window", elements, math.prod(window), length)
            case "broadcast":
                if source.size > 1:
                    within = minor in instruction.numbers("dimensions")
                    self.pattern("broadcast_row" if within else "broadcast_minor", elements, source.size, _run(shape))
            case "slice" | "dynamic-slice" | "pad":
                steps = re.findall(r"\[\d+:\d+:(\d+)\]", instruction.attributes)
                stride = float(steps[-1]) if steps else 1.0
                self.pattern("slice", elements, _run(shape), stride - 1)
            case "concatenate":
                dims = instruction.numbers("dimensions")
                run = shape.stride(dims[0]) * source.dims[dims[0]] if dims and source.dims else 1
                self.pattern("concatenate", elements, run, len(instruction.operands))
            case "gather":
                run = math.prod(instruction.numbers("slice_sizes"))
                self.pattern("gather", elements, run, source.nbytes)
            case "scatter":
                updates = self.operand(instruction, 2)
                elements = float(updates.size)
                self.pattern("scatter", elements, _run(updates), shape.nbytes)
            case "reverse":
                self.pattern("reverse", elements, _run(shape), float(minor in instruction.numbers("dimensions")))
            case "dynamic-update-slice":
                elements = float(self.operand(instruction, 1).size)
            case "dot":
                elements = 0.0
                self._dot(instruction, source, self.operand(instruction, 1))
            case "convolution":
                elements = 0.0
                self._convolution(instruction, source, self.operand(instruction, 1))
            case "sort":
                elements *= max(math.log2(max(_run(shape), 2)), 1.0)
            case _:
                pass
        self.counts[_NUMBER.get(opcode, _NUMBER["other"])] += max(elements, 1.0)
        for applied in instruction.region:
            self.counts[_NUMBER.get(applied, _NUMBER["other"])] += elements
        if opcode in SLOW:
            self.slow += elements
        elif opcode not in ("broadcast", "iota"):
            self.operations += elements

    def _dot(self, instruction: Instruction, left: Shape, right: Shape) -> None:
        summed, others = instruction.numbers("lhs_contracting_dims"), instruction.numbers("rhs_contracting_dims")
        batches, right_batches = instruction.numbers("lhs_batch_dims"), instruction.numbers("rhs_batch_dims")
        k = math.prod(left.dims[d] for d in summed)
        batch = math.prod(left.dims[d] for d in batches)
        m = left.size // max(k * batch, 1)
        n = right.size // max(k * batch, 1)
        self._sizes(m, n, k, batch)
        self.product[8] = float(bool(left.packed) and left.packed[0] in summed)
        self.product[9] = float(bool(right.packed) and right.packed[0] in others)
        self.product[10] = float(bool(left.packed) and left.packed[0] in batches)
        self.product[11] = float(bool(right.packed) and right.packed[0] in right_batches)
        for place, shape in enumerate((left, right, instruction.shape)):
            self.strides[5 + place] = _even(_run(shape) * ITEM_BYTES.get(shape.dtype, 4))

    def _convolution(self, instruction: Instruction, left: Shape, right: Shape) -> None:
        shape = instruction.shape
        window = _window(instruction)
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
        groups = re.search(r"feature_group_count=(\d+)", instruction.attributes)
        many = int(groups[1]) if groups else 1
        out = shape.dims[labels[3].index("f")] if labels and "f" in labels[3] else 1
        inner = right.dims[labels[2].index("i")] if labels and "i" in labels[2] else 1
        self._sizes(shape.size // max(out, 1), out, inner * math.prod(window), 1)
        stride = re.search(r"stride=([\dx]+)", instruction.attributes)
        apart = [re.search(rf"{side}_dilate=([\dx]+)", instruction.attributes) for side in ("lhs", "rhs")]
        dilated, spread = (math.prod(int(n) for n in found[1].split("x")) if found else 1 for found in apart)
        self.product[12] = log1(math.prod(window))
        self.product[13] = log1(inner)
        self.product[14] = log1(many)
        self.product[15] = log1(math.prod(int(n) for n in stride[1].split("x")) if stride else 1)
        self.product[16] = log1(dilated)
        self.product[17] = float(labels is not None and labels[1].endswith("f"))
        run = inner * (window[-1] if window else 1)
        places = math.prod(shape.dims[labels[3].index(c)] for c in labels[3] if c.isdigit()) if labels else 1
        self.product[18:] = (
            log1(spread),
            inner % 4 / 4,
            inner % 8 / 8,
            log1(run),
            log1(places),
            log1(right.nbytes),
            log1(self.flops / max(dilated, 1)),
            float("reversal" in instruction.attributes),
        )

    def _walk(self, source: Shape, stride: int, back: int, rows: int) -> None:
        """A transposed walk: a stride that a power of two divides uses few sets of a cache."""
        item = ITEM_BYTES.get(source.dtype, 4)
        there, again = _even(stride * item), _even(back * item)
        if there >= self.strides[0]:
            self.strides[:5] = (there, again, float(there >= 1 - 1 / 11), float(again >= 1 - 1 / 11), log1(rows))

    def _sizes(self, m: int, n: int, k: int, batch: int) -> None:
        self.flops += 2.0 * m * n * k * batch
        self.product[:8] = (log1(m), log1(n), log1(k), log1(batch), m % 8 / 8, n % 16 / 16, k % 8 / 8, n % 64 / 64)


@final
@dataclass(frozen=True, slots=True)
class Figures:
    """Of one kernel, one run.

    Attributes:
      row: [WIDTH].
      base_s: what the network corrects.
      operations, transcendentals, moved: what the roofline asks for: operations, results of functions, bytes.
    """

    row: np.ndarray
    base_s: float
    operations: float
    transcendentals: float
    moved: float


def kernel_features(kernel: Kernel, access: Access, footprint: float) -> Figures:
    """The figures of a kernel in a program that touches `footprint` bytes."""
    tally = _Tally(kernel)
    inner = list(kernel.body.values()) if kernel.instruction.opcode == "fusion" else [kernel.instruction]
    for instruction in inner:
        if instruction.opcode not in FREE:
            tally.add(instruction)
    root = kernel.instruction.shape
    read, written = float(sum(access.read)), float(access.written)
    opcodes = {i.opcode for i in inner}
    main = kernel.instruction.opcode if kernel.instruction.opcode in MAINS else "loop"
    main = next((name for name in MAINS if name in opcodes), main)
    size = max(float(root.size), float(max((i.shape.size for i in inner), default=1)), 1.0)
    patterns = tally.patterns.copy()
    total = np.maximum(patterns[:, :1], 1.0)
    patterns[:, 1:] /= total
    patterns[:, 0] = np.log1p(patterns[:, 0] / size * 4)
    moved = read + written
    base = LAUNCH_S + moved / BYTES_PER_S + tally.operations / OPERATIONS_PER_S
    base += tally.slow / SLOW_PER_S + tally.flops / FLOPS_PER_S
    dims = [root.dims[d] for d in root.packed[:3]]
    dims += [1] * (3 - len(dims))
    packed_inputs = [shape.dims[shape.packed[0]] for shape in kernel.inputs if shape.packed]
    attributes = kernel.instruction.attributes
    plain = (
        math.log(base),
        log1(size),
        log1(float(root.size)),
        log1(read),
        log1(written),
        log1(tally.operations / size),
        log1(tally.slow / size),
        log1(tally.flops),
        log1(tally.flops / max(moved, 1.0)),
        *(log1(n) for n in dims),
        dims[0] % 8 / 8,
        dims[0] % 16 / 16,
        float(dims[0] < 16),
        log1(float(min(packed_inputs, default=1))),
        log1(len(kernel.inputs)),
        log1(len(inner)),
        log1(len(kernel.instruction.shapes)),
        float(kernel.instruction.opcode == "fusion"),
        float("ynn" in attributes),
        log1(kernel.trips),
        *(log1(extra / size) for extra in _evaluated_again(inner)),
    )
    nbytes = [sum(s.nbytes for s in (*kernel.inputs, root) if s.dtype == d) / max(moved, 1.0) for d in DTYPES]
    row = np.concatenate(
        (
            np.log1p(tally.counts / size),
            [float(name == main) for name in MAINS],
            nbytes,
            patterns.ravel(),
            tally.product,
            tally.strides,
            walk_features(kernel),
            _reuse(access, footprint),
            plain,
        )
    )
    return Figures(row.astype(np.float32), base, tally.flops + tally.operations, tally.slow, moved)


def _evaluated_again(body: Sequence[Instruction]) -> tuple[float, float]:
    """Operations and functions that a fusion evaluates more often than their values have elements.

    A fusion evaluates what stands before a broadcast for each of its results; where that does not depend on the minor
    dimension LLVM moves it out of the innermost loop.
    """
    shapes = {i.name: i.shape for i in body}
    times: dict[str, float] = {}
    operations = functions = 0.0
    for instruction in reversed(body):
        shape, opcode = instruction.shape, instruction.opcode
        count = times.get(instruction.name, float(shape.size))
        again = max(count - shape.size, 0.0)
        if opcode in SLOW:
            functions += again
        elif opcode not in FREE and opcode not in ("broadcast", "iota", "reshape", "transpose", "copy"):
            operations += again
        for place, name in enumerate(instruction.operands):
            source = shapes.get(name)
            if source is None or source.size <= 1:
                continue
            each = count
            if opcode == "broadcast" and shape.packed and shape.packed[0] not in instruction.numbers("dimensions"):
                each = count / shape.dims[shape.packed[0]]
            elif opcode == "reduce" and place == 0:
                each = count * source.size / max(shape.size, 1)
            elif opcode == "reduce-window" and place == 0:
                each = count * math.prod(_window(instruction))
            elif opcode in ("dot", "convolution", "sort", "scatter", "dynamic-update-slice", "concatenate"):
                each = float(source.size)
            times[name] = max(times.get(name, 0.0), each)
    return operations, functions


def _reuse(access: Access, footprint: float) -> tuple[float, ...]:
    logs = [log1(d) for d in access.distance]
    total = max(sum(access.read), 1)
    mean = sum(n * d for n, d in zip(access.read, logs, strict=True)) / total
    return (log1(footprint), max(logs, default=0.0), mean, *(near_share(access, limit) for limit in NEAR))


def _even(stride: int) -> float:
    """Log of the largest power of two that divides a stride in bytes, 1 for `SETS` and more."""
    return math.log2(max(math.gcd(stride, SETS), 1)) / math.log2(SETS)


def call_features(arguments: Sequence[Shape], results: Sequence[Shape], kernels: int) -> tuple[np.ndarray, float]:
    """The figures of the call itself, which hands buffers in and out."""
    row = np.zeros(WIDTH, np.float32)
    row[len(OPCODES) + MAINS.index("call")] = 1.0
    base = 5e-6 + 2e-7 * (len(arguments) + len(results))
    written = float(sum(s.nbytes for s in results))
    at = WIDTH - PLAIN
    row[at : at + 5] = (math.log(base), log1(len(arguments)), log1(len(results)), log1(kernels), log1(written))
    return row, base


def _leading(shape: Shape, dims: Sequence[int]) -> list[int]:
    """Summed dimensions that lie together at the minor end."""
    found: list[int] = []
    for d in shape.packed:
        if d not in dims:
            break
        found.append(d)
    return found


def _run(shape: Shape) -> int:
    return shape.dims[shape.packed[0]] if shape.packed else 1


def _window(instruction: Instruction) -> list[int]:
    found = re.search(r"size=([\dx]+)", instruction.attributes)
    return [int(n) for n in found[1].split("x")] if found else [1]
