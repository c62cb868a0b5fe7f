"""The sharding problem: one choice a node, costs of nodes and of pairs, memory over time.

    minimise    sum_i c_i[x_i] + sum_(i,j) E_ij[x_i, x_j]
    subject to  base_t + sum_i u_i[t, x_i] <= limit        for every time t

The same problem as in Zheng et al. (Alpa, OSDI 2022, section 4.2) and the IOPDDL contest (ASPLOS 2025), for pairs.
Infinite costs mean "not allowed".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Edge = tuple[int, int]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One instance.

    Attributes:
      costs: for each node the cost of each choice, seconds.
      edges: for pairs i < j the cost of each pair of choices, seconds; shape (choices of i, choices of j).
      usages: for each node the bytes each choice holds at each time; shape (times, choices).
      base: bytes held at each time whatever is chosen.
      limit: most bytes at any time, None for no limit.
    """

    costs: tuple[Floats, ...]
    edges: Mapping[Edge, Floats]
    usages: tuple[Floats, ...]
    base: Floats
    limit: float | None

    def cost(self, choice: Sequence[int]) -> float:
        """Objective of a full choice."""
        nodes = sum(float(c[x]) for c, x in zip(self.costs, choice, strict=True))
        return nodes + sum(float(e[choice[i], choice[j]]) for (i, j), e in self.edges.items())

    def usage(self, choice: Sequence[int]) -> Floats:
        """Bytes held at each time."""
        total = self.base.copy()
        for u, x in zip(self.usages, choice, strict=True):
            total += u[:, x]
        return total

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether the limit holds at every time."""
        return self.limit is None or bool(np.all(self.usage(choice) <= self.limit * (1 + 1e-12)))


@final
class Result(enum.Enum):
    """How a search ended; the values are messages."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible, not proved optimal within the time limit"
    INFEASIBLE = "no choice meets the memory limit"


@final
@dataclass(frozen=True, slots=True)
class Solution:
    """What a search found.

    Attributes:
      choice: one index a node; empty if infeasible.
      result: how it ended.
      cost: objective, seconds.
      bound: a lower bound of the optimum, seconds.
      stats: engine and sizes, for the plan's "why".
    """

    choice: tuple[int, ...]
    result: Result
    cost: float
    bound: float
    stats: Mapping[str, Any]

    @property
    def gap(self) -> float:
        """Relative distance between cost and bound."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / max(abs(self.cost), 1e-30)


def neighbours(problem: Problem) -> list[list[int]]:
    """For each node the nodes it shares an edge with."""
    found: list[list[int]] = [[] for _ in problem.costs]
    for i, j in problem.edges:
        found[i].append(j)
        found[j].append(i)
    return found


def pair(problem: Problem, i: int, j: int) -> Floats:
    """The edge between i and j, shape (choices of i, choices of j)."""
    return problem.edges[i, j] if i < j else problem.edges[j, i].T
