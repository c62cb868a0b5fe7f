"""Memory as the solver sees it: bytes by time and choice, for the times that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from autoshard.costmodel import Lives
from autoshard.ir import Spec, Value, local_bytes
from autoshard.search.model import Model
from autoshard.search.problem import Floats, Problem


@final
@dataclass(frozen=True, slots=True, eq=False)
class MemoryTable:
    """Lives as arrays, with the bytes of each by choice.

    Attributes:
      steps: number of times.
      start, end: of each life.
      row: for each life its line of `sizes`.
      variable: for each line the variable that decides it.
      sizes: for each line the bytes under each choice of its variable.
    """

    steps: int
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    row: NDArray[np.int64]
    variable: tuple[int, ...]
    sizes: tuple[Floats, ...]

    def curve(self, answer: Sequence[int]) -> Floats:
        """Bytes on one device at each time under an answer."""
        line = np.array([s[answer[v]] for s, v in zip(self.sizes, self.variable, strict=True)])
        change = np.zeros(self.steps + 2)
        np.add.at(change, self.start, line[self.row])
        np.add.at(change, self.end, -line[self.row])
        return np.cumsum(change)[: self.steps + 1]

    def constrain(self, problem: Problem, times: Sequence[int], limit: float) -> Problem:
        """The problem with one memory row for each of `times`."""
        wanted = np.array(sorted(set(times)))
        usages = [np.zeros((len(wanted), len(c))) for c in problem.costs]
        alive = (self.start[:, None] <= wanted) & (wanted < self.end[:, None])
        count = np.zeros((len(self.sizes), len(wanted)))
        np.add.at(count, self.row, alive)
        for line, (size, v) in enumerate(zip(self.sizes, self.variable, strict=True)):
            usages[v] += count[line][:, None] * size
        return Problem(problem.costs, problem.edges, tuple(usages), np.zeros(len(wanted)), limit)


def memory_table(model: Model, lives: Lives, sizes: Mapping[str, int]) -> MemoryTable:
    """Tabulates the lives of a graph on one mesh."""
    lines: dict[tuple[int, int], int] = {}
    variables: list[int] = []
    tables: list[Floats] = []
    rows: list[int] = []
    kept = [life for life in lives.lives if life.value in model.ops.maker]
    for life in kept:
        op, result = model.ops.maker[life.value]
        kind = model.kinds.kind[op.index]
        if (kind, result) not in lines:
            lines[kind, result] = len(lines)
            variables.append(model.variable[kind])
            tables.append(_bytes_of(life.value, [c.results[result] for c in model.choices[kind]], sizes))
        rows.append(lines[kind, result])
    start = np.array([life.start for life in kept], np.int64)
    end = np.array([life.end for life in kept], np.int64)
    return MemoryTable(lives.steps, start, end, np.array(rows, np.int64), tuple(variables), tuple(tables))


def peak_times(curve: Floats, count: int) -> list[int]:
    """Times of the highest local peaks of a usage curve, highest first."""
    padded = np.concatenate(([-1.0], curve, [-1.0]))
    peaks = np.flatnonzero((padded[1:-1] >= padded[:-2]) & (padded[1:-1] > padded[2:]))
    return [int(t) for t in peaks[np.argsort(-curve[peaks], kind="stable")][:count]]


def _bytes_of(value: Value, specs: Sequence[Spec], sizes: Mapping[str, int]) -> Floats:
    known = {spec: local_bytes(value.aval, spec, sizes) for spec in dict.fromkeys(specs)}
    return np.array([known[spec] for spec in specs], float)
