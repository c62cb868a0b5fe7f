"""Lower bound and pruning by reparametrisation: sequential message passing (SRMP, Kolmogorov 2015; TRW-S for pairs).

Costs are moved between nodes and edges without changing any total:

    collect at i      m(s) = min_t E_ij[s,t]      c_i += m,  E_ij -= m           for edges from earlier nodes
    distribute at i   E_ij += w c_i               c_i -= w c_i per edge          for edges to later nodes,
                                                  w = 1 / max(earlier, later)

forwards and backwards in turn. At any time sum_i min c_i + sum_ij min E_ij is a lower bound of the problem, and

    bound + (c_i[s] - min c_i) + sum_j (min_t E_ij[s,t] - min E_ij)  >  known cost

proves that choice s of node i is in no better answer: it is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from autoshard.search.problem import Edge, Floats, Problem

BIG = 1e3
"""Infinite costs become this many times the known cost: message passing needs finite numbers."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pruned:
    """What the bound left.

    Attributes:
      kept: for each node the choices that may still be in a better answer.
      bound: lower bound of the cost of all answers.
      best: the best answer met.
    """

    kept: tuple[NDArray[np.intp], ...]
    bound: float
    best: tuple[int, ...]


@final
class Dual:
    """Reparametrised costs of a problem without memory rows."""

    def __init__(self, problem: Problem, kept: Sequence[NDArray[np.intp]], best: Sequence[int]) -> None:
        self._problem = problem
        self.kept = [np.asarray(k) for k in kept]
        self.best = tuple(best)
        self.best_cost = problem.cost(best)
        self._ceiling = BIG * max(self.best_cost, 1e-12)
        self.nodes = [self._finite(c[k]) for c, k in zip(problem.costs, self.kept, strict=True)]
        self.edges: dict[Edge, Floats] = {
            (i, j): self._finite(e[np.ix_(self.kept[i], self.kept[j])]) for (i, j), e in problem.edges.items()
        }
        self._earlier: list[list[int]] = [[] for _ in self.nodes]
        self._later: list[list[int]] = [[] for _ in self.nodes]
        for i, j in self.edges:
            self._earlier[j].append(i)
            self._later[i].append(j)

    def _finite(self, costs: Floats) -> Floats:
        return np.minimum(costs, self._ceiling)

    def bound(self) -> float:
        """The lower bound as it stands."""
        return sum(float(c.min()) for c in self.nodes) + sum(float(e.min()) for e in self.edges.values())

    def sweep(self) -> None:
        """One pass forwards and one backwards; reads an answer off the forward one."""
        chosen = [0] * len(self.nodes)
        for i in range(len(self.nodes)):
            for j in self._earlier[i]:
                self._collect(i, j)
            cost = self.nodes[i].copy()
            for j in self._earlier[i]:
                cost += self.edges[j, i][chosen[j]]
            for j in self._later[i]:
                cost += self.edges[i, j].min(axis=1)
            chosen[i] = int(np.argmin(cost))
            self._distribute(i, self._later[i], self._earlier[i])
        self._offer(chosen)
        for i in reversed(range(len(self.nodes))):
            for j in self._later[i]:
                self._collect(i, j)
            self._distribute(i, self._earlier[i], self._later[i])

    def _collect(self, i: int, j: int) -> None:
        edge = self.edges[i, j] if i < j else self.edges[j, i].T
        least = edge.min(axis=1)
        edge -= least[:, None]
        self.nodes[i] += least

    def _distribute(self, i: int, to: list[int], other: list[int]) -> None:
        if not to:
            return
        share = self.nodes[i] / max(len(to), len(other))
        for j in to:
            edge = self.edges[i, j] if i < j else self.edges[j, i].T
            edge += share[:, None]
        self.nodes[i] = self.nodes[i] - share * len(to)

    def _offer(self, chosen: Sequence[int]) -> None:
        answer = tuple(int(k[s]) for k, s in zip(self.kept, chosen, strict=True))
        cost = self._problem.cost(answer)
        if cost < self.best_cost:
            self.best, self.best_cost = answer, cost

    def prune(self) -> int:
        """Drops choices that the bound excludes; returns how many."""
        spare = self.best_cost * (1 + 1e-9) - self.bound()
        dropped = 0
        for i, cost in enumerate(self.nodes):
            excess = cost - cost.min()
            for j in self._earlier[i]:
                edge = self.edges[j, i]
                excess = excess + (edge.min(axis=0) - edge.min())
            for j in self._later[i]:
                edge = self.edges[i, j]
                excess = excess + (edge.min(axis=1) - edge.min())
            alive = excess <= spare
            if alive.all() or not alive.any():
                continue
            dropped += int((~alive).sum())
            self.kept[i] = self.kept[i][alive]
            self.nodes[i] = cost[alive]
            for j in self._earlier[i]:
                self.edges[j, i] = np.ascontiguousarray(self.edges[j, i][:, alive])
            for j in self._later[i]:
                self.edges[i, j] = np.ascontiguousarray(self.edges[i, j][alive])
        return dropped


def prune(
    problem: Problem, kept: Sequence[NDArray[np.intp]], best: Sequence[int], *, deadline: float, sweeps: int
) -> Pruned:
    """Runs message passing until the bound stops rising, pruning on the way.

    Args:
      problem: memory rows are not looked at.
      kept: choices to start from.
      best: a finite answer.
      deadline: `time.monotonic` seconds.
      sweeps: most sweeps.
    """
    dual = Dual(problem, kept, best)
    bound = dual.bound()
    for sweep in range(sweeps):
        dual.sweep()
        if sweep % 5 != 4:
            continue
        dual.prune()
        risen = dual.bound()
        left = dual.best_cost - risen
        if left <= 1e-9 * abs(dual.best_cost) or time.monotonic() > deadline:
            break
        if risen - bound < 1e-3 * left and sweep > 20:
            break
        bound = risen
    dual.prune()
    return Pruned(tuple(dual.kept), min(dual.bound(), dual.best_cost), dual.best)
