"""Memory as the solver sees it, and the peak of an answer.

rows    bytes by time and choice: what one choice alone decides, values and raw partial sums
price   seconds a byte on what two choices decide together, copies in other shardings alive at those times
peak    of a whole answer, copies included
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from autoshard.costmodel import Buffers, Lives, Sharding, find_buffers
from autoshard.ir import Equation, Graph, Spec, Value, local_bytes
from autoshard.search.choices import Choice
from autoshard.search.layout import Layout
from autoshard.search.model import Model
from autoshard.search.ops import OpKind, Ops, sized
from autoshard.search.pricing import Pricer
from autoshard.search.problem import Edge, Floats, Problem, Usage


@final
@dataclass(frozen=True, slots=True, eq=False)
class MemoryTable:
    """Lives as arrays, with the bytes of each by choice.

    Attributes:
      steps: number of times.
      start, end: of each life; parts: how many buffers of its value's size it stands for.
      row: for each life its line of `sizes`.
      variable: for each line the variable that decides it.
      sizes: for each line the bytes under each choice of its variable.
    """

    steps: int
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    parts: Floats
    row: NDArray[np.int64]
    variable: tuple[int, ...]
    sizes: tuple[Floats, ...]

    def curve(self, answer: Sequence[int]) -> Floats:
        """Bytes on one device at each time under an answer."""
        line = np.array([s[answer[v]] for s, v in zip(self.sizes, self.variable, strict=True)])
        change = np.zeros(self.steps + 2)
        np.add.at(change, self.start, self.parts * line[self.row])
        np.add.at(change, self.end, -self.parts * line[self.row])
        return np.cumsum(change)[: self.steps + 1]

    def least(self, times: Iterable[int]) -> float:
        """A lower bound of the bytes at the fullest of some times under any answer."""
        wanted = np.array(sorted(set(times)), np.int64)
        small = np.array([s.min() for s in self.sizes])[self.row] * self.parts
        alive = (self.start[:, None] <= wanted) & (wanted < self.end[:, None])
        return float((alive * small[:, None]).sum(axis=0).max(initial=0.0))

    def constrain(self, problem: Problem, times: Sequence[int], limit: float) -> Problem:
        """The problem with one memory row for each of `times`."""
        wanted = np.array(sorted(set(times)))
        starts = np.searchsorted(wanted, self.start)
        ends = np.searchsorted(wanted, self.end)
        lives: dict[tuple[int, int, int], Floats] = {}
        for life in range(len(self.row)):
            row = int(self.row[life])
            start, end = int(starts[life]), int(ends[life])
            if start < end:
                key = (self.variable[row], start, end)
                held = float(self.parts[life]) * self.sizes[row]
                lives[key] = lives[key] + held if key in lives else held
        usages = tuple(Usage(*key, held) for key, held in lives.items())
        return Problem(problem.costs, problem.edges, usages, np.zeros(len(wanted)), limit)


def memory_table(model: Model, lives: Lives, sizes: Mapping[str, int]) -> MemoryTable:
    """Tabulates the lives of a graph on one mesh."""
    lines: dict[tuple[int, int, bool], int] = {}
    variables: list[int] = []
    tables: list[Floats] = []
    found: list[tuple[int, int, float, int]] = []

    def line(value: Value, kind: int, result: int, raw: bool) -> int:
        key = (kind, result, raw)
        if key not in lines:
            lines[key] = len(lines)
            variables.append(model.variable[kind])
            bytes_of = _partial_bytes if raw else _bytes_of
            tables.append(bytes_of(value, result, model.choices[kind], sizes))
        return lines[key]

    seen: set[Value] = set()
    for life in lives.lives:
        if life.value not in model.ops.maker:
            continue
        op, result = model.ops.maker[life.value]
        kind = model.kinds.kind[op.index]
        found.append((life.start, life.end, life.parts, line(life.value, kind, result, False)))
        if life.value not in seen and any(c.partial for c in model.choices[kind]):
            found.append((life.start, life.start + 1, 1.0, line(life.value, kind, result, True)))
        seen.add(life.value)
    start, end, row = (np.array([f[i] for f in found], np.int64) for i in (0, 1, 3))
    parts = np.array([f[2] for f in found], float)
    return MemoryTable(lives.steps, start, end, parts, row, tuple(variables), tuple(tables))


def copy_bytes(model: Model, lives: Lives, times: Iterable[int], pricer: Pricer) -> dict[Edge, Floats]:
    """Bytes of copies in other shardings, for pairs of variables, of values alive at some of the times.

    Shape of an entry: (choices of the first variable, choices of the second); both are the same where one variable
    decides over the value and its reader.
    """
    wanted = sorted(set(times))
    found: dict[Edge, Floats] = {}
    seen: set[tuple[int, int, int, int]] = set()
    for life in lives.lives:
        at = bisect_left(wanted, life.start)
        if life.value not in model.ops.maker or at == len(wanted) or wanted[at] >= life.end:
            continue
        op, result = model.ops.maker[life.value]
        kind = model.kinds.kind[op.index]
        specs = [c.results[result] for c in model.choices[kind]]
        for reader, k in model.ops.readers.get(life.value, ()):
            other = model.kinds.kind[reader.index]
            if (op.index, result, other, k) in seen:
                continue
            seen.add((op.index, result, other, k))
            targets = [c.operands[k] for c in model.choices[other]]
            table = _copies(life.value, specs, targets, pricer.sizes)
            one, two = model.variable[kind], model.variable[other]
            if one == two:
                table = np.diag(np.diagonal(table))
            elif one > two:
                one, two, table = two, one, table.T
            found[one, two] = found.get((one, two), 0.0) + table
    return found


def priced(problem: Problem, extra: Mapping[Edge, Floats], price: float) -> Problem:
    """The problem with a price on the entries of `extra`."""
    costs, edges = list(problem.costs), dict(problem.edges)
    for (one, two), table in extra.items():
        if one == two:
            costs[one] = costs[one] + price * np.diagonal(table)
        else:
            edges[one, two] = edges.get((one, two), 0.0) + price * table
    return Problem(tuple(costs), edges, problem.usages, problem.base, problem.limit)


def sharding_of(graph: Graph, ops: Ops, layout: Layout, pricer: Pricer) -> Sharding:
    """A layout in the terms of the memory estimate; as `search/record.py` writes it into the plan."""
    operands: dict[tuple[Equation, int], Spec] = {}
    outputs: dict[tuple[Graph, int], Spec] = {}
    partial: dict[Equation, tuple[str, ...]] = {}
    for op in ops.ops:
        if op.equation is None:
            continue
        choice = layout.choice[op.index]
        match op.kind:
            case OpKind.APPLY:
                first = max(op.position, 0)
                for k, atom in enumerate(op.operands):
                    if sized(atom):
                        operands[op.equation, first + k] = choice.operands[k]
                if choice.partial:
                    partial[op.equation] = choice.scattered
            case OpKind.ENTER if op.position >= 0 and op.equation.name != "cond" and sized(op.operands[0]):
                operands[op.equation, op.position] = choice.operands[0]
            case OpKind.LEAVE:
                body = op.equation.graphs[-1] if op.equation.name == "while" else op.equation.graphs[0]
                if body.outputs[op.position] is op.operands[0]:
                    outputs[body, op.position] = choice.operands[0]
            case _:
                pass
    for tie in ops.ties:
        outputs[tie.body, tie.output] = layout.spec[tie.target]
    return Sharding(
        pricer.sizes,
        layout.spec,
        operands,
        outputs,
        partial,
        lambda v, source, target: pricer.reshard(v, source, target).path,
    )


def answer_buffers(
    graph: Graph,
    ops: Ops,
    layout: Layout,
    pricer: Pricer,
    donated: Sequence[tuple[int, int]],
    written: Callable[[Value], bool],
) -> Buffers:
    """The buffers of a planned graph on one device."""
    kind = pricer.cluster.device(0).kind
    return find_buffers(
        graph, donated, kind, sharding_of(graph, ops, layout, pricer), written if kind == "gpu" else None
    )


def peak_times(curve: Floats, count: int) -> list[int]:
    """Times of the highest local peaks of a usage curve, highest first."""
    padded = np.concatenate(([-1.0], curve, [-1.0]))
    peaks = np.flatnonzero((padded[1:-1] >= padded[:-2]) & (padded[1:-1] > padded[2:]))
    return [int(t) for t in peaks[np.argsort(-curve[peaks], kind="stable")][:count]]


def _bytes_of(value: Value, result: int, choices: Sequence[Choice], sizes: Mapping[str, int]) -> Floats:
    specs = [c.results[result] for c in choices]
    known = {spec: local_bytes(value.aval, spec, sizes) for spec in dict.fromkeys(specs)}
    return np.array([known[spec] for spec in specs], float)


def _copies(value: Value, specs: Sequence[Spec], targets: Sequence[Spec], sizes: Mapping[str, int]) -> Floats:
    """Bytes of a value at its target where that is not how it is made; shape (specs, targets)."""
    ours = {spec: i for i, spec in enumerate(dict.fromkeys(specs))}
    theirs = {spec: j for j, spec in enumerate(dict.fromkeys(targets))}
    row = np.array([local_bytes(value.aval, spec, sizes) for spec in theirs], float)
    table = np.array([[0.0 if s == t else row[j] for t, j in theirs.items()] for s in ours])
    return table[np.ix_([ours[s] for s in specs], [theirs[t] for t in targets])]


def _partial_bytes(value: Value, result: int, choices: Sequence[Choice], sizes: Mapping[str, int]) -> Floats:
    """Of the sum of one device's terms, before it is combined with the others'."""
    found: list[float] = []
    for c in choices:
        base = tuple(tuple(a for a in axes if a not in c.scattered) for axes in c.results[result])
        found.append(float(local_bytes(value.aval, base, sizes)) if c.partial else 0.0)
    return np.array(found)
