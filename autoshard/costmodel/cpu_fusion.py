"""Which kernels XLA:CPU makes of a graph, and what each reads and writes.

An estimate of XLA:CPU's fusion (openxla/xla, xla/service/cpu/cpu_instruction_fusion.cc, xla/service/
instruction_fusion.cc), as seen in compiled programs of jax 0.10.1:

    loop   elementwise, broadcast, slice, gather, ...    fused into all who read it, computed again in each
    alone  dot, convolution, reduction, scatter, concatenation, ...    operands and results are in memory

A sum takes the product it sums into its kernel, if nobody else reads that. A loop value is stored instead of fused if
it leaves the graph, if a reader is alone, or if it is expensive (a function, a division) and has several readers. There
is no fusion of kernels side by side.

A product that contracts several leading dimensions (a weight's gradient over batch and time) reads its first operand
transposed: the loop that makes the operand runs once more in that order, an element at a time. So do those that make
the operands of a convolution for a kernel's gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import final

from autoshard.costmodel.fusion import FusionClass, fusion_class
from autoshard.costmodel.primitives import CUMULATIVE, RANDOM, REDUCTIONS, SCATTERS, TRANSCENDENTAL, WINDOWS
from autoshard.costmodel.work import equation_work
from autoshard.ir import Apply, Equation, Graph, Value

_ALONE = REDUCTIONS | CUMULATIVE | SCATTERS | RANDOM | WINDOWS | {"concatenate", "dynamic_update_slice"}
_EXPENSIVE = frozenset(TRANSCENDENTAL) | {"div", "rem", "integer_pow"}
_MOST_COPIES = 8
"""Kernels that one loop is computed again in at most. Nominal."""


@final
@dataclass(frozen=True, slots=True)
class EquationKernels:
    """What an equation has of the kernels of a graph.

    Attributes:
      reads: for each operand how many kernels read it from memory for this equation, in order.
      strided_reads: how many read it in transposed order.
      writes: for each result whether it is written.
      launches: kernels this equation ends.
      copies: kernels it is computed in.
      strided: of them those that run in transposed order.
      fused: whether a reduction is one kernel with the loop that makes its operand.
    """

    reads: tuple[int, ...]
    strided_reads: tuple[int, ...]
    writes: tuple[bool, ...]
    launches: int
    copies: int
    strided: int
    fused: bool = False


def cpu_kernels(graph: Graph) -> dict[int, EquationKernels]:
    """For each equation, by its `id`, what it has of the kernels; bodies of control flow included."""
    found = _kernels(graph)
    for equation in graph.equations:
        for body in equation.graphs if isinstance(equation, Apply) else ():
            found.update(cpu_kernels(body))
    return found


def _class(equation: Equation, products: set[Value]) -> FusionClass:
    if isinstance(equation, Apply):
        if equation.name in _ALONE:
            return FusionClass.ALONE
        # The transpose of a product is the product of its operands the other way round.
        if equation.name == "transpose" and equation.inputs[0] in products:
            return FusionClass.ALIAS
    return fusion_class(equation)


def _kernels(graph: Graph) -> dict[int, EquationKernels]:
    products: set[Value] = set()
    for equation in graph.equations:
        if isinstance(equation, Apply) and equation.name == "dot_general":
            products.update(equation.outputs)
    classes = [_class(equation, products) for equation in graph.equations]
    uses = Counter(v for e in graph.equations for v in e.inputs if isinstance(v, Value))
    uses.update(v for v in graph.outputs if isinstance(v, Value))
    product = {v for e in graph.equations if isinstance(e, Apply) and e.name == "mul" for v in e.outputs}
    fused: set[int] = set()
    source = _aliases(graph, classes)
    kept = (*graph.inputs, *(v for v, _ in graph.constants), *graph.outputs)
    stored = {source.get(v, v) for v in kept if isinstance(v, Value)}
    readers: dict[Value, set[int]] = {}  # kernels that read a value in registers
    alone: set[Value] = set()  # values some reader needs in memory
    direct: dict[Value, set[int]] = {}  # kernels that copy the value in transposed order
    kernels: list[frozenset[int]] = [frozenset()] * len(classes)
    strided: set[int] = set()
    extra = len(classes)
    for index in reversed(range(len(classes))):
        equation, kind = graph.equations[index], classes[index]
        values = [source.get(v, v) for v in equation.inputs if isinstance(v, Value)]
        if kind is FusionClass.ALIAS:
            continue
        if kind is FusionClass.LOOP:
            around = set[int]().union(*(readers.get(v, ()) for v in equation.outputs))
            name = equation.name if isinstance(equation, Apply) else ""
            need = any(v in stored or v in alone for v in equation.outputs)
            if need or not around or len(around - strided) > (1 if name in _EXPENSIVE else _MOST_COPIES):
                stored.update(equation.outputs)
                around = {index}
            around |= set[int]().union(*(direct.get(v, ()) for v in equation.outputs))
            kernels[index] = frozenset(around)
            for value in values:
                readers.setdefault(value, set()).update(around)
        else:
            stored.update(equation.outputs)
            kernels[index] = frozenset((index,))
            operand = equation.inputs[0] if equation.inputs else None
            if _sums(equation) and isinstance(operand, Value) and operand in product and uses[operand] == 1:
                fused.add(index)
                readers.setdefault(operand, set()).add(index)
                values = values[1:]
            alone.update(values)
            for operand in _transposed(equation):
                direct.setdefault(source.get(operand, operand), set()).add(extra)
                strided.add(extra)
                extra += 1
    found = _count(graph, classes, source, stored, kernels, strided)
    for index in fused:
        found[id(graph.equations[index])] = replace(found[id(graph.equations[index])], fused=True)
    return found


def _aliases(graph: Graph, classes: list[FusionClass]) -> dict[Value, Value]:
    source: dict[Value, Value] = {}
    for equation, kind in zip(graph.equations, classes, strict=True):
        if kind is not FusionClass.ALIAS:
            continue
        for value, atom in zip(equation.outputs, equation.inputs, strict=False):
            if isinstance(atom, Value):
                source[value] = source.get(atom, atom)
    return source


def _sums(equation: Equation) -> bool:
    return isinstance(equation, Apply) and equation.name == "reduce_sum"


def _transposed(equation: Equation) -> tuple[Value, ...]:
    """Operands that are read in transposed order."""
    if not isinstance(equation, Apply) or equation.name not in ("dot_general", "conv_general_dilated"):
        return ()
    if equation_work(equation).form != "weights":
        return ()
    count = 1 if equation.name == "dot_general" else 2
    return tuple(v for v in equation.inputs[:count] if isinstance(v, Value))


def _count(
    graph: Graph,
    classes: list[FusionClass],
    source: dict[Value, Value],
    stored: set[Value],
    kernels: list[frozenset[int]],
    strided: set[int],
) -> dict[int, EquationKernels]:
    seen: set[tuple[Value, int]] = set()
    last: dict[int, int] = {}
    rows: list[EquationKernels] = []
    for index, equation in enumerate(graph.equations):
        for kernel in kernels[index]:
            last[kernel] = index
        reads: list[int] = []
        across: list[int] = []
        for atom in equation.inputs:
            base = source.get(atom, atom) if isinstance(atom, Value) else None
            fresh: set[tuple[Value, int]] = set()
            if base is not None and base in stored:
                fresh = {(base, k) for k in kernels[index]} - seen
            seen |= fresh
            crossing = sum(k in strided for _, k in fresh)
            reads.append(len(fresh) - crossing)
            across.append(crossing)
        mine = kernels[index]
        writes = tuple(classes[index] is not FusionClass.ALIAS and v in stored for v in equation.outputs)
        rows.append(EquationKernels(tuple(reads), tuple(across), writes, 0, len(mine), len(mine & strided)))
        seen |= {(value, kernel) for value in equation.outputs for kernel in mine}
    ends = [0] * len(rows)
    for index in last.values():
        ends[index] += 1
    return {
        id(equation): replace(row, launches=launches)
        for equation, row, launches in zip(graph.equations, rows, ends, strict=True)
    }
