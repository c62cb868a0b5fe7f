"""Exact minimisation of the unconstrained problem by eliminating variables.

    1. A choice s of node i is dropped if another is never worse (dead-end elimination, Desmet et al. 1992):
           c_i[s'] - c_i[s] + sum_j max_t (E_ij[s',t] - E_ij[s,t]) <= 0
    2. A node v is removed by minimising it out of the sum of all tables that mention it:
           T(neighbours) = min_v sum(tables with v)
       cheapest table first, while the table stays below a size; what is left is the core.

When nothing is left the answer, read off backwards, is optimal. Memory is not seen here: price it into the costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from autoshard.search.problem import Floats, Problem, neighbours, pair

Table = tuple[tuple[int, ...], Floats]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """A node minimised out.

    Attributes:
      node: which.
      scope: the nodes its best choice depends on.
      best: its best choice for each of theirs.
    """

    node: int
    scope: tuple[int, ...]
    best: NDArray[np.intp]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """What elimination left.

    Attributes:
      kept: for each node the choices still in play.
      removed: nodes in the order they were removed.
      core: nodes that stayed.
      tables: the tables over core nodes.
      constant: cost already decided.
    """

    kept: tuple[NDArray[np.intp], ...]
    removed: tuple[Removed, ...]
    core: tuple[int, ...]
    tables: tuple[Table, ...]
    constant: float

    def complete(self, core_choice: dict[int, int]) -> tuple[int, ...]:
        """The full choice from one of the core (indices into the kept choices)."""
        chosen = dict(core_choice)
        for removed in reversed(self.removed):
            chosen[removed.node] = int(removed.best[tuple(chosen[n] for n in removed.scope)])
        return tuple(int(self.kept[i][chosen[i]]) for i in range(len(self.kept)))


def reduce(problem: Problem, max_table: int, choices: Sequence[NDArray[np.intp]]) -> Reduced:
    """Drops dominated ones among `choices`, then removes nodes while their tables stay within `max_table` entries."""
    kept = undominated(problem, choices)
    tables: dict[int, Table] = {}
    at: list[set[int]] = [set() for _ in problem.costs]

    def add(scope: tuple[int, ...], table: Floats) -> None:
        key = next(counter)
        tables[key] = (scope, table)
        for node in scope:
            at[node].add(key)

    counter = iter(range(10**9))
    single = [len(k) == 1 for k in kept]
    constant = 0.0
    for i, cost in enumerate(problem.costs):
        if single[i]:
            constant += float(cost[kept[i][0]])
        else:
            add((i,), cost[kept[i]])
    for (i, j), edge in problem.edges.items():
        part = edge[np.ix_(kept[i], kept[j])]
        scope = tuple(n for n in (i, j) if not single[n])
        if scope:
            add(scope, part.reshape([len(kept[n]) for n in scope]))
        else:
            constant += float(part[0, 0])
    left = {i for i in range(len(problem.costs)) if not single[i]}
    removed: list[Removed] = [Removed(i, (), np.zeros((), np.intp)) for i, one in enumerate(single) if one]
    sizes = [len(k) for k in kept]
    cost_of = {i: _join_size(i, at, tables, sizes) for i in left}
    while left:
        node = min(left, key=lambda i: (cost_of[i], i))
        if cost_of[node] > max_table:
            break
        keys = sorted(at[node])
        scope = tuple(sorted({n for key in keys for n in tables[key][0]} - {node}))
        joint = _join([tables[key] for key in keys], (*scope, node), sizes)
        best = np.asarray(np.argmin(joint, axis=-1))
        removed.append(Removed(node, scope, best))
        reduced = np.take_along_axis(joint, best[..., None], axis=-1)[..., 0]
        for key in keys:
            for n in tables[key][0]:
                at[n].discard(key)
            del tables[key]
        left.discard(node)
        if scope:
            add(scope, reduced)
        else:
            constant += float(reduced)
        for n in scope:
            cost_of[n] = _join_size(n, at, tables, sizes)
    core = tuple(sorted(left))
    return Reduced(tuple(kept), tuple(removed), core, tuple(tables.values()), constant)


def undominated(problem: Problem, choices: Sequence[NDArray[np.intp]]) -> list[NDArray[np.intp]]:
    """For each node those of its `choices` that no other one makes superfluous."""
    around = neighbours(problem)
    kept = list(choices)
    todo = list(range(len(problem.costs)))
    queued = set(todo)
    while todo:
        i = todo.pop()
        queued.discard(i)
        if len(kept[i]) < 2:
            continue
        alive = _filter(problem, i, around[i], kept)
        if len(alive) < len(kept[i]):
            kept[i] = alive
            for j in around[i]:
                if j not in queued:
                    queued.add(j)
                    todo.append(j)
    return kept


def _filter(problem: Problem, i: int, around: Sequence[int], kept: list[NDArray[np.intp]]) -> NDArray[np.intp]:
    """The choices of node i that are not dominated, given what its neighbours still have."""
    cost = problem.costs[i][kept[i]]
    worst = cost[:, None] - cost[None, :]
    with np.errstate(invalid="ignore"):  # both not allowed: neither is worse; each somewhere: nan, which no test passes
        for j in around:
            edge = pair(problem, i, j)[np.ix_(kept[i], kept[j])]
            difference = edge[:, None, :] - edge[None, :, :]
            difference[np.isnan(difference)] = 0.0
            worst = worst + difference.max(axis=2)
    alive = np.ones(len(cost), bool)
    for s in np.argsort(-cost, kind="stable"):
        better = (worst[:, s] <= 0) & alive
        better[s] = False
        if better.any():
            alive[s] = False
    return kept[i][alive]


def _join_size(node: int, at: list[set[int]], tables: dict[int, Table], sizes: list[int]) -> float:
    """Entries of the table that removing a node needs."""
    scope = {n for key in at[node] for n in tables[key][0]}
    size = 1.0
    for n in scope:
        size *= sizes[n]
    return size


def _join(tables: Sequence[Table], scope: tuple[int, ...], sizes: list[int]) -> Floats:
    """The sum of tables, as one table over `scope`."""
    position = {n: k for k, n in enumerate(scope)}
    total = np.zeros(tuple(sizes[n] for n in scope))
    for nodes, table in sorted(tables, key=lambda t: t[1].size):
        order = sorted(range(len(nodes)), key=lambda k: position[nodes[k]])
        shape = [1] * len(scope)
        for n in nodes:
            shape[position[n]] = sizes[n]
        total += np.transpose(table, order).reshape(shape)
    return total
