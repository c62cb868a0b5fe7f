"""Which values XLA writes to memory, and which live in the registers of a fused kernel.

An estimate of what XLA's GPU fusion passes do (openxla/xla, xla/service/gpu: gpu_fusible.cc, transforms/
priority_fusion.cc, multi_output_fusion.cc), without running them:

    loop   elementwise, broadcast, slice, pad, transpose, gather, ...    fused into whoever reads it
    root   reduce, scatter, random bits, ...    operands are fused into it, its own result is written
    alias  reshape, marks    the operand under another name
    alone  dot, convolution, sort, custom call, collective, control flow    operands and results are in memory

A loop value with readers in several kernels is computed again in each of them (XLA duplicates producers) if that
moves no more bytes than to write it once and read it in each:

    n readers, v bytes, r bytes read to compute it:    n r  <=  v + n v + r

Readers of the same loop shape that cannot depend on each other become one kernel with several results (multi-output
fusion): same number of `root` and `alone` equations on the longest path before them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from autoshard.costmodel.primitives import (
    CUMULATIVE,
    ELEMENTWISE,
    MOVES,
    NOTHING,
    RANDOM,
    REDUCTIONS,
    SCATTERS,
    TRANSCENDENTAL,
    VIEWS,
    WINDOWS,
)
from autoshard.ir import Atom, Equation, Graph, Reshard, Value

MAX_OPERANDS = 96
"""Most operands and results of one fusion (openxla/xla, gpu_fusible.h, MaxOperandsAndOutputsPerFusion)."""

MAX_READERS = 64
"""Kernels one value is computed again in at most. Nominal: keeps the estimate linear in the size of the graph."""


@final
class FusionClass(enum.Enum):
    """How an equation fuses; see the module."""

    LOOP = "loop"
    ROOT = "root"
    ALIAS = "alias"
    ALONE = "alone"


_LOOPS = (
    frozenset(ELEMENTWISE)
    | frozenset(TRANSCENDENTAL)
    | WINDOWS
    | NOTHING
    | (MOVES - {"copy", "copy_p"})
    | {"integer_pow", "slice", "dynamic_slice", "dynamic_update_slice", "gather"}
)
_ROOTS = REDUCTIONS | CUMULATIVE | SCATTERS | RANDOM
_ALIASES = VIEWS - {"optimization_barrier"}


def fusion_class(equation: Equation) -> FusionClass:
    """How an equation fuses. What is in no list is `ALONE`: it has its own kernel or none.

    An explicit reshard moves data between devices, so both its sides are in memory. A barrier keeps XLA from fusing
    across it, so its values are in memory too.
    """
    if isinstance(equation, Reshard):
        return FusionClass.ALONE if equation.explicit else FusionClass.ALIAS
    name = equation.name
    if name in _ALIASES:
        return FusionClass.ALIAS
    if name in _LOOPS:
        return FusionClass.LOOP
    return FusionClass.ROOT if name in _ROOTS else FusionClass.ALONE


def fusible(equation: Equation) -> bool:
    """Whether XLA computes the equation inside a kernel together with what it reads."""
    return fusion_class(equation) is not FusionClass.ALONE


@final
@dataclass(frozen=True, slots=True)
class FusionEstimate:
    """Memory traffic of a graph after fusion; one entry an equation of `graph.equations`.

    Attributes:
      in_memory: values that live in memory: inputs, constants, outputs, and what kernels write.
      reads: for each operand how many kernels read it from memory for this equation; 0 in registers, for literals,
        and where an earlier equation of the same kernel has read it already.
      writes: for each result whether this equation writes it to memory (an alias writes nothing).
      launches: kernels this equation counts for: 1 for the last equation of a kernel, else 0.
    """

    in_memory: frozenset[Value]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[bool, ...], ...]
    launches: tuple[int, ...]


def materialized(graph: Graph) -> frozenset[Value]:
    """Values of a graph that live in memory; all others stay in a fusion's registers. Bodies are not looked into."""
    return fusion_estimate(graph).in_memory


def stored_anywhere(graph: Graph) -> frozenset[Value]:
    """Values that live in memory, those of bodies of control flow included."""
    found = set(materialized(graph))
    for equation in graph.equations:
        for body in equation.graphs:
            found |= stored_anywhere(body)
    return frozenset(found)


def fusion_estimate(graph: Graph) -> FusionEstimate:
    """What XLA's fusion leaves of the memory traffic of a graph. Bodies of control flow are graphs of their own."""
    return _Estimator(graph).run()


_Kernel = int
"""A kernel, by the index of the first equation found that ends it."""


@final
class _Estimator:
    """One estimate: forward for depth and bytes to recompute, backward for readers, forward for traffic."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.classes = [fusion_class(equation) for equation in graph.equations]
        self.source: dict[Value, Value] = {}  # of an alias, the value it stands for
        self.depth: dict[Value, int] = {}  # root and alone equations on the longest path before the value
        self.inputs_of: dict[Value, frozenset[Value]] = {}  # values in memory it takes to compute the value
        self.in_memory: set[Value] = set(graph.inputs) | {value for value, _ in graph.constants}
        self.readers: dict[Value, set[_Kernel]] = {}
        self.kernels: dict[int, frozenset[_Kernel]] = {}  # of an equation, the kernels it is computed in
        self.key: dict[_Kernel, tuple[int, int]] = {}  # of a kernel, its loop's size (or what it alone has) and depth
        self.parent: dict[_Kernel, _Kernel] = {}

    def run(self) -> FusionEstimate:
        self._forward()
        self._backward()
        for alias, source in self.source.items():
            if source in self.in_memory:
                self.in_memory.add(alias)
        reads, launches = self._traffic()
        writes = tuple(
            tuple(kind is not FusionClass.ALIAS and value in self.in_memory for value in equation.outputs)
            for equation, kind in zip(self.graph.equations, self.classes, strict=True)
        )
        return FusionEstimate(frozenset(self.in_memory), reads, writes, launches)

    def _base(self, value: Value) -> Value:
        return self.source.get(value, value)

    def _values(self, atoms: Iterable[Atom]) -> list[Value]:
        return [self._base(atom) for atom in atoms if isinstance(atom, Value)]

    def _forward(self) -> None:
        for value in self.in_memory:
            self.depth[value] = 0
            self.inputs_of[value] = frozenset((value,))
        for equation, kind in zip(self.graph.equations, self.classes, strict=True):
            operands = self._values(equation.inputs)
            depth = max((self.depth[value] for value in operands), default=0)
            if kind is FusionClass.ALIAS:
                self._alias(equation, operands)
                continue
            for value in equation.outputs:
                if kind is FusionClass.LOOP:
                    self.depth[value] = depth
                    self.inputs_of[value] = frozenset[Value]().union(*(self.inputs_of[v] for v in operands))
                    if len(self.inputs_of[value]) <= MAX_OPERANDS:
                        continue
                self.depth[value] = depth + (kind is not FusionClass.LOOP)
                self.inputs_of[value] = frozenset((value,))
                self.in_memory.add(value)
        for value in self._values(self.graph.outputs):
            self.in_memory.add(value)

    def _alias(self, equation: Equation, operands: list[Value]) -> None:
        """Results stand for the operands in order; one with no operand of its own (a literal, a token) is free."""
        for i, value in enumerate(equation.outputs):
            atom = equation.inputs[i] if i < len(equation.inputs) else None
            if isinstance(atom, Value):
                self.source[value] = self._base(atom)
            else:
                self.depth[value] = 0
                self.inputs_of[value] = frozenset()

    def _backward(self) -> None:
        for index in reversed(range(len(self.graph.equations))):
            equation, kind = self.graph.equations[index], self.classes[index]
            if kind is FusionClass.ALIAS:
                continue
            if kind is FusionClass.LOOP:
                kernels = self._loop(index, equation)
            else:
                operands = self._values(equation.inputs)
                size = max((_elements(value) for value in operands), default=0)
                depth = max((self.depth[value] for value in operands), default=0)
                if kind is FusionClass.ALONE:
                    size = -1 - index  # no other kernel has this shape
                kernels = frozenset((self._new_kernel(index, size, depth),))
            self.kernels[index] = kernels
            for value in self._values(equation.inputs):
                if kind is FusionClass.ALONE:
                    self.in_memory.add(value)
                self.readers.setdefault(value, set()).update(kernels)

    def _loop(self, index: int, equation: Equation) -> frozenset[_Kernel]:
        """The kernels a loop equation is computed in: its own if a result is written, those of its readers if not."""
        readers = {self._find(k) for value in equation.outputs for k in self.readers.get(value, ())}
        if not any(value in self.in_memory for value in equation.outputs):
            if self._stays(equation, readers):
                self._merge_siblings(readers)
                return frozenset(self._find(kernel) for kernel in readers)
            self.in_memory.update(equation.outputs)
        value = max(equation.outputs, key=_elements)
        kernel = self._new_kernel(index, _elements(value), self.depth[value])
        # Readers of the same loop shape join: they take the value from registers while it is written.
        for reader in readers:
            if self.key[reader] == self.key[kernel]:
                self.parent[reader] = kernel
        return frozenset((kernel,))

    def _stays(self, equation: Equation, readers: set[_Kernel]) -> bool:
        """Whether recomputing in each reader moves no more bytes than writing once and reading in each."""
        if len(readers) > MAX_READERS:
            return False
        n = len({self.key[kernel] for kernel in readers})
        if n <= 1:
            return True
        sources = frozenset[Value]().union(*(self.inputs_of[value] for value in equation.outputs))
        again = sum(value.nbytes for value in sources)
        size = sum(value.nbytes for value in equation.outputs)
        return n * again <= size + n * size + again

    def _merge_siblings(self, readers: set[_Kernel]) -> None:
        """Kernels of one loop shape and depth that share this operand become one."""
        first: dict[tuple[int, int], _Kernel] = {}
        for kernel in sorted(readers):
            kept = first.setdefault(self.key[kernel], kernel)
            if kept != kernel:
                self.parent[kernel] = kept

    def _new_kernel(self, index: int, size: int, depth: int) -> _Kernel:
        self.key[index] = (size, depth)
        return index

    def _find(self, kernel: _Kernel) -> _Kernel:
        while kernel in self.parent:
            kernel = self.parent[kernel]
        return kernel

    def _traffic(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        seen: set[tuple[Value, _Kernel]] = set()
        reads: list[tuple[int, ...]] = []
        last: dict[_Kernel, int] = {}
        for index, equation in enumerate(self.graph.equations):
            kernels = {self._find(kernel) for kernel in self.kernels.get(index, ())}
            for kernel in kernels:
                last[kernel] = index
            counts: list[int] = []
            for atom in equation.inputs:
                count = 0
                if isinstance(atom, Value) and self._base(atom) in self.in_memory:
                    fresh = {(self._base(atom), kernel) for kernel in kernels} - seen
                    seen |= fresh
                    count = len(fresh)
                counts.append(count)
            reads.append(tuple(counts))
            seen |= {(value, kernel) for value in equation.outputs for kernel in kernels}
        ends = [0] * len(reads)
        for index in last.values():
            ends[index] += 1
        return tuple(reads), tuple(ends)


def _elements(value: Value) -> int:
    size = 1
    for n in value.shape:
        size *= n
    return size
