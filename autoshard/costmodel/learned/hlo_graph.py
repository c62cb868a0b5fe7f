"""A compiled program as a graph of kernels, from its optimized HLO text.

    kernel  ::= Kernel(instruction, body: Instruction*, trips, operands: producing kernels)

A kernel is what the backend launches: a fusion with the instructions inside it, or an instruction of its own.
Parameters, constants, tuples and bitcasts run nothing. Bodies of `while` count as often as XLA says
(`known_trip_count`), with one kernel for the loop's own test; a `call` stands for what it calls.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from autoshard.errors import ArgumentError, explain

FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
)

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4} | {
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
    "c128": 16,
    "token": 0,
}


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """One array.

    Attributes:
      dtype: HLO's name of it.
      dims: sizes, as written.
      order: dimensions, minor first.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES.get(self.dtype, 4)

    @property
    def packed(self) -> tuple[int, ...]:
        """Dimensions of more than one element, minor first."""
        return tuple(d for d in self.order if self.dims[d] > 1)

    def stride(self, dim: int) -> int:
        """Elements between neighbours along a dimension."""
        stride = 1
        for d in self.order:
            if d == dim:
                return stride
            stride *= self.dims[d]
        return stride


@final
@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of HLO.

    Attributes:
      name: without the percent sign.
      opcode: HLO's.
      shapes: of the results; several for a tuple.
      operands: names.
      attributes: the text after the operands; a parameter's starts with its number.
      root: whether it is its computation's result.
      region: operations that it applies to each element, such as a reduction's; of bf16 sums that is rounding as well.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool
    region: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The first (mostly the only) result."""
        return self.shapes[0] if self.shapes else Shape("token", (), ())

    @property
    def nbytes(self) -> int:
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def position(self) -> int:
        """Of a parameter."""
        return int(re.split(r"\D", self.attributes, maxsplit=1)[0])

    def numbers(self, key: str) -> tuple[int, ...]:
        """Of an attribute such as dimensions={0,2}."""
        found = re.search(rf"\b{key}=\{{([\d, ]*)\}}", self.attributes)
        return tuple(int(n) for n in found[1].split(",") if n.strip()) if found else ()


Computation = Mapping[str, Instruction]


@final
@dataclass(frozen=True, slots=True)
class Kernel:
    """What is launched at once.

    Attributes:
      instruction: as it stands in its computation.
      inputs: shapes of its operands.
      body: instructions of a fusion by name; the instruction itself otherwise.
      trips: how often it runs in one call of the program.
      sources: for each operand the kernels (by index) it comes from; -1 - i is the program's argument i.
    """

    instruction: Instruction
    inputs: tuple[Shape, ...]
    body: Computation
    trips: float
    sources: tuple[frozenset[int], ...]

    @property
    def name(self) -> str:
        """Of its instruction."""
        return self.instruction.name

    @property
    def producers(self) -> tuple[tuple[int, int], ...]:
        """Kernels whose results it reads, and the bytes of each."""
        found: dict[int, int] = {}
        for shape, sources in zip(self.inputs, self.sources, strict=True):
            for index in sources:
                if index >= 0:
                    found[index] = max(found.get(index, 0), shape.nbytes)
        return tuple(sorted(found.items()))


@final
@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program.

    Attributes:
      kernels: in the order they run.
      arguments, results: shapes of the entry's parameters and results.
    """

    kernels: tuple[Kernel, ...]
    arguments: tuple[Shape, ...]
    results: tuple[Shape, ...]


_LINE = re.compile(r"^\s+(ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*?)\)(.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)[^}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_TARGET = re.compile(r"(?:calls|to_apply)=%?([^\s,}]+)")


def parse_module(text: str) -> Module:
    """The kernels of a module.

    Raises:
      ArgumentError: the text is no HLO module.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _LINE.match(line)):
            operands = () if found[4] == "constant" else tuple(re.findall(r"%([^\s,)]+)", found[5]))
            attributes = found[5] + found[6] if found[4] == "parameter" else found[6]
            made = Instruction(found[2], found[4], _shapes(found[3]), operands, attributes, bool(found[1]))
            current[made.name] = made
    if not entry:
        raise ArgumentError(
            explain("the text has no ENTRY computation", "an optimized HLO module", "pass compiled.as_text()")
        )
    computations = {name: _with_regions(each, computations) for name, each in computations.items()}
    flat = _Flat(computations)
    parameters = sorted((i for i in computations[entry].values() if i.opcode == "parameter"), key=lambda i: i.position)
    flat.add(entry, 1.0, {k: frozenset((-1 - k,)) for k in range(len(parameters))})
    arguments = [i.shape for i in parameters]
    results = next((i.shapes for i in computations[entry].values() if i.root), ())
    return Module(tuple(flat.kernels), tuple(arguments), results)


def _with_regions(computation: Computation, all_: Mapping[str, Computation]) -> dict[str, Instruction]:
    """The same instructions, with what those that have a region apply to each element."""
    made = dict(computation)
    for name, instruction in computation.items():
        if "to_apply=" not in instruction.attributes or instruction.opcode == "call":
            continue
        target = _TARGET.search(instruction.attributes)
        if target is not None and target[1] in all_:
            region = tuple(i.opcode for i in all_[target[1]].values() if i.opcode not in FREE)
            made[name] = dataclasses.replace(instruction, region=region)
    return made


@functools.lru_cache(maxsize=4096)
def _shapes(text: str) -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    for dtype, dims, order in _SHAPE.findall(text):
        sizes = tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)
        layout = tuple(int(n) for n in order.split(",") if n) or tuple(reversed(range(len(sizes))))
        shapes.append(Shape(dtype, sizes, layout))
    return tuple(shapes)


@final
class _Flat:
    """Kernels of all computations that run, gathered."""

    def __init__(self, computations: Mapping[str, Computation]) -> None:
        self.computations = computations
        self.kernels: list[Kernel] = []

    def add(self, name: str, trips: float, inputs: Mapping[int, frozenset[int]]) -> frozenset[int]:
        """Adds a computation's kernels; returns those its result comes from."""
        computation = self.computations[name]
        made: dict[str, frozenset[int]] = {}
        last = frozenset[int]()
        for instruction in computation.values():
            sources = frozenset[int]().union(*(made.get(o, frozenset()) for o in instruction.operands))
            match instruction.opcode:
                case "parameter":
                    made[instruction.name] = inputs.get(instruction.position, frozenset())
                case opcode if opcode in FREE:
                    made[instruction.name] = sources
                case "call":
                    target = _TARGET.search(instruction.attributes)
                    given = {k: made.get(o, frozenset[int]()) for k, o in enumerate(instruction.operands)}
                    made[instruction.name] = self.add(target[1], trips, given) if target else sources
                case "while":
                    made[instruction.name] = self._while(instruction, computation, trips, sources)
                case "conditional":
                    names = re.findall(r"%([^\s,}]+)", instruction.attributes)
                    branches = [n for n in names if n in self.computations]
                    own = self._kernel(instruction, computation, trips, made)
                    ends = [self.add(n, trips / len(branches), {0: sources}) for n in branches]
                    made[instruction.name] = own.union(*ends)
                case _:
                    made[instruction.name] = self._kernel(instruction, computation, trips, made)
            last = made[instruction.name] if instruction.root else last
        return last

    def _while(
        self, instruction: Instruction, computation: Computation, trips: float, sources: frozenset[int]
    ) -> frozenset[int]:
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
        times = trips * (float(count[1]) if count else 1.0)
        own = self._kernel(instruction, computation, times, dict.fromkeys(instruction.operands, sources))
        ends = own
        for key in ("condition", "body"):
            target = re.search(rf"{key}=%?([^\s,}}]+)", instruction.attributes)
            if target is not None:
                ends |= self.add(target[1], times, {0: sources})
        return ends

    def _kernel(
        self, instruction: Instruction, computation: Computation, trips: float, made: Mapping[str, frozenset[int]]
    ) -> frozenset[int]:
        known = [computation[o] for o in instruction.operands if o in computation]
        target = _TARGET.search(instruction.attributes) if instruction.opcode == "fusion" else None
        body = self.computations[target[1]] if target else {i.name: i for i in (*known, instruction)}
        inputs = tuple(shape for operand in known for shape in operand.shapes)
        sources = tuple(made.get(operand.name, frozenset[int]()) for operand in known for _ in operand.shapes)
        self.kernels.append(Kernel(instruction, inputs, body, trips, sources))
        return frozenset((len(self.kernels) - 1,))


def pack_text(hlo: str) -> str:
    """Text of a module without where its instructions come from, compressed: what a collection keeps."""
    text = re.sub(r", metadata=\{[^}]*\}", "", hlo)
    text = re.sub(r"(?s)\nFileNames\n.*?(?=\n\n\n)", "", text)
    return base64.b85encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpack_text(packed: str) -> str:
    """The text again."""
    return gzip.decompress(base64.b85decode(packed)).decode()
