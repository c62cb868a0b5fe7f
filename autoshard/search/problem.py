"""The sharding problem: one choice a node, costs of nodes and of pairs, memory over time.

    minimise    sum_i c_i[x_i] + sum_(i,j) E_ij[x_i, x_j]
    subject to  base_t + sum_(lives l of i with start_l <= t < end_l) u_l[x_i] <= limit        for every time t

The same problem as in Zheng et al. (Alpa, OSDI 2022, section 4.2) and the IOPDDL contest (ASPLOS 2025), where each node
has one life. Costs of three and more nodes become a node of their own (`contest`). Infinite costs mean "not allowed".
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

SLACK = 1e-12
"""Part of the limit by which rounding may exceed it."""


GAP = 1e-9
"""Relative distance of cost and bound up to which an answer counts as optimal: rounding."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """What one node holds from one time until before another.

    Attributes:
      node: whose choice decides.
      start, end: times, the last excluded.
      nbytes: bytes under each choice of the node.
    """

    node: int
    start: int
    end: int
    nbytes: Floats


@final
@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One instance.

    Attributes:
      costs: for each node the cost of each choice, seconds.
      edges: for pairs i < j the cost of each pair of choices, seconds; shape (choices of i, choices of j).
      usages: what nodes hold, and when; a node may have several, or none.
      base: bytes held at each time whatever is chosen.
      limit: most bytes at any time, None for no limit.
    """

    costs: tuple[Floats, ...]
    edges: Mapping[Edge, Floats]
    usages: tuple[Usage, ...]
    base: Floats
    limit: float | None

    def cost(self, choice: Sequence[int]) -> float:
        """Objective of a full choice."""
        nodes = sum(float(c[x]) for c, x in zip(self.costs, choice, strict=True))
        return nodes + sum(float(e[choice[i], choice[j]]) for (i, j), e in self.edges.items())

    def usage(self, choice: Sequence[int]) -> Floats:
        """Bytes held at each time."""
        change = np.zeros(len(self.base) + 1)
        for u in self.usages:
            held = u.nbytes[choice[u.node]]
            change[u.start] += held
            change[u.end] -= held
        return self.base + np.cumsum(change)[:-1]

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether the limit holds at every time."""
        return self.limit is None or bool(np.all(self.usage(choice) <= self.limit * (1 + SLACK)))


@final
class Result(enum.Enum):
    """How a search ended; the values are messages."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible, not proved optimal within the time limit"
    INFEASIBLE = "no choice meets the memory limit"
    UNKNOWN = "no choice that meets the memory limit was found within the time limit; there may be one"


@final
@dataclass(frozen=True, slots=True)
class Shortage:
    """What is missing where nothing fits.

    Attributes:
      time: at which most is missing.
      nbytes: how much. On small problems the least that the limit has to be raised by. On large ones what this time
        alone is short of whatever is chosen; or else by how much the best answer found misses.
    """

    time: int
    nbytes: float


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
      shortage: if there is no choice, by how much the limit is missed; None where the limit is not the reason.
    """

    choice: tuple[int, ...]
    result: Result
    cost: float
    bound: float
    stats: Mapping[str, Any]
    shortage: Shortage | None = None

    @property
    def gap(self) -> float:
        """Relative distance between cost and bound."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / max(abs(self.cost), 1e-30)


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is.

    Attributes:
      seconds: since it began.
      cost: of the best legal answer; infinite if there is none.
      bound: lower bound of every answer's cost.
    """

    seconds: float
    cost: float
    bound: float


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
