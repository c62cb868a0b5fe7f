"""Exact presolve: choices that are never legal, nodes that another one decides, edges that say nothing.

    arc consistency    a choice with an infinite cost, or with no finite entry at one of its edges, is dropped
    split edges        E_ij[s,t] = a[s] + b[t] (and any edge of a node with one choice) moves into the nodes
    followers          where each choice s of i leaves j a single finite one, j = f(s):
                           c_i[s] += c_j[f(s)] + E_ij[s, f(s)],   E_ik[s,.] += E_jk[f(s),.],   memory likewise
    dominated          a choice is dropped if another one of its node never costs more and never holds more
    rows               that cannot break, or that a neighbour implies (`rows`), are dropped
    elimination        a node without memory and with at most two neighbours a, b becomes an edge of theirs:
                           E_ab[s,t] += min_r c[r] + E_a[s,r] + E_b[t,r]

until nothing changes. XLA's own problems shrink to a fifth of their nodes or less. What is left is the `Core`; its
answers are the problem's, by `Core.expand`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from autoshard.search.contract_kernels import FUNCTION, INVERSE, SPLIT, classify, consistent, undominated
from autoshard.search.eliminate import Removed
from autoshard.search.problem import Edge, Floats, Problem, Usage
from autoshard.search.rows import keep_rows, needed_rows

Choices = NDArray[np.intp]

GROWTH = 2.0
"""A node is eliminated if the table it leaves has at most this many times the entries of those that go."""


ROUNDS = 1
"""How often dominated choices are looked for: what the first round drops lets more be merged."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """What presolve left.

    Attributes:
      problem: over the nodes that still have something to decide.
      nodes: for each of them its number in the original.
      kept: for each original node the choices it had left when it was decided, merged or eliminated.
      removed: merged and eliminated nodes, in that order; scopes are original numbers, choices those kept.
      constant: cost already decided.
      times: for each row of the problem its time in the original.
    """

    problem: Problem
    nodes: tuple[int, ...]
    kept: tuple[Choices, ...]
    removed: tuple[Removed, ...]
    constant: float
    times: NDArray[np.intp]

    def expand(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The answer of the original problem."""
        local = dict(zip(self.nodes, choice, strict=True))
        for r in reversed(self.removed):
            local[r.node] = int(r.best[tuple(local.get(i, 0) for i in r.scope)])
        return tuple(int(kept[local.get(i, 0)]) for i, kept in enumerate(self.kept))

    def restrict(self, choice: Sequence[int]) -> tuple[int, ...] | None:
        """The core's part of an answer of the original problem; None where presolve excluded it."""
        found: list[int] = []
        for node in self.nodes:
            (at,) = np.nonzero(self.kept[node] == choice[node])
            if not len(at):
                return None
            found.append(int(at[0]))
        return tuple(found)


def contract(problem: Problem) -> Core | None:
    """Presolves; None where no choice of all nodes has a finite cost at every edge."""
    work = _Contraction(problem)
    for round_ in range(ROUNDS + 1):
        while work.stale or work.dirty:
            if not work.consistent():
                return None
            work.merge(work.functions())
        work.settle()
        if round_ == ROUNDS or not work.drop_dominated():
            break
    return work.core()


@final
class _Contraction:
    """A problem as it shrinks. `dirty` edges have changed since they were last looked at."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs: dict[int, Floats] = dict(enumerate(problem.costs))
        self.edges: dict[Edge, Floats] = dict(problem.edges)
        self.around: list[set[int]] = [set() for _ in problem.costs]
        for i, j in self.edges:
            self.around[i].add(j)
            self.around[j].add(i)
        self.kept: list[Choices] = [np.arange(len(c)) for c in problem.costs]
        self.usages: Sequence[Usage] = () if problem.limit is None else problem.usages
        self.base = problem.base
        # Since usages were last settled: which of the choices of then are left, and what was merged.
        self.since = list(self.kept)
        self.recent: list[int] = []
        self.leader: dict[int, tuple[int, Choices]] = {}
        self.order: list[int] = []
        self.followers: dict[int, list[int]] = {}
        self.dirty: set[Edge] = set(self.edges)
        self.constant = 0.0
        self.stale = True  # whether legality was not looked at since something changed

    def edge(self, i: int, j: int) -> Floats:
        """The table between two nodes, the first along the rows."""
        return self.edges[i, j] if i < j else self.edges[j, i].T

    def consistent(self) -> bool:
        """Drops what is never legal, until all of the rest may be; False if a node has nothing left."""
        self.stale = False
        off, number = self._numbers()
        cost = np.concatenate(list(self.costs.values())) if self.costs else np.zeros(0)
        alive = np.isfinite(cost).astype(np.int8)
        flat, at = _flatten(list(self.edges.values()))
        if not consistent(alive, off, self._ends(number), at, flat):
            return False
        self._keep(alive, off)
        return True

    def _drop(self, i: int, alive: NDArray[np.bool_]) -> None:
        self.costs[i] = self.costs[i][alive]
        self.kept[i] = self.kept[i][alive]
        self.since[i] = self.since[i][alive]
        for j in self.followers.get(i, ()):
            self.leader[j] = (i, self.leader[j][1][alive])
        for j in self.around[i]:
            key = (i, j) if i < j else (j, i)
            self.edges[key] = self.edges[key][alive] if i < j else self.edges[key][:, alive]
            self.dirty.add(key)

    def functions(self) -> list[tuple[int, int, Choices]]:
        """(i, j, f) of edges where i decides j; edges that say nothing are removed on the way."""
        found: list[tuple[int, int, Choices]] = []
        keys = sorted(self.dirty)
        self.dirty.clear()
        tables = [self.edges[key] for key in keys]
        flat, at = _flatten(tables)
        rows = np.array([len(t) for t in tables], np.int64)
        kinds = classify(rows, at, flat)
        for (i, j), edge, kind in zip(keys, tables, kinds.tolist(), strict=True):
            if kind == SPLIT:
                self._absorb(i, j, edge)
            elif kind == FUNCTION:
                found.append((i, j, edge.argmin(axis=1)))
            elif kind == INVERSE:
                found.append((j, i, edge.argmin(axis=0)))
        return found

    def _absorb(self, i: int, j: int, edge: Floats) -> None:
        """Moves a table that is a sum of two costs into the nodes."""
        self.costs[i] = self.costs[i] + edge[:, 0]
        if edge.shape[1] > 1:
            # In a row that is finite everywhere: an edge of a node with one choice may hold what is not allowed.
            row = edge[int(np.argmin(edge[:, 0]))]
            self.costs[j] = self.costs[j] + (row - row[0] if np.isfinite(row[0]) else row)
        del self.edges[i, j]
        self.around[i].discard(j)
        self.around[j].discard(i)

    def merge(self, functions: list[tuple[int, int, Choices]]) -> None:
        """Puts all followers of one round into the leaders at the ends of their chains."""
        chosen: dict[int, tuple[int, Choices]] = {}
        for i, j, which in functions:
            end = i
            while end in chosen:
                end = chosen[end][0]
            if j not in chosen and end != j:
                chosen[j] = (i, which)
        if not chosen:
            return
        ends: dict[int, tuple[int, Choices]] = {}
        for node in chosen:
            path: list[int] = []
            while node in chosen and node not in ends:
                path.append(node)
                node = chosen[node][0]
            for v in reversed(path):
                above, which = chosen[v]
                end, step = ends.get(above, (above, None))
                ends[v] = (end, which if step is None else which[step])
        touched = {(v, j) if v < j else (j, v) for v in ends for j in self.around[v]}
        for v, (end, which) in ends.items():
            self.costs[end] = self.costs[end] + self.costs[v][which]
            self.leader[v] = (end, which)
            self.order.append(v)
            self.recent.append(v)
            self.followers.setdefault(end, []).append(v)
        for i, j in touched:
            self._carry(i, j, ends)
        for v in ends:
            del self.costs[v]
            self.around[v].clear()
        self.stale = True

    def _carry(self, i: int, j: int, ends: dict[int, tuple[int, Choices]]) -> None:
        """One edge of a merged node becomes one of its leader."""
        edge = self.edges.pop((i, j))
        self.dirty.discard((i, j))
        self.around[i].discard(j)
        self.around[j].discard(i)
        one, two = i, j
        if i in ends:
            one, which = ends[i]
            edge = edge[which]
        if j in ends:
            two, which = ends[j]
            edge = edge[:, which]
        if one == two:
            self.costs[one] = self.costs[one] + np.diagonal(edge)
        else:
            self._add(one, two, edge)

    def _add(self, one: int, two: int, edge: Floats) -> None:
        """Adds a table to the edge of two nodes."""
        if one > two:
            one, two, edge = two, one, edge.T
        known = self.edges.get((one, two))
        self.edges[one, two] = edge if known is None else known + edge
        self.around[one].add(two)
        self.around[two].add(one)
        self.dirty.add((one, two))

    def settle(self) -> None:
        """Brings usages up to date: of nodes that are left, by the choices they have; base has what is always held."""
        ends: dict[int, tuple[int, Choices]] = {}  # of merged nodes: leader and choice by the leader's
        for v in reversed(self.recent):
            above, which = self.leader[v]
            if above in ends:
                end, step = ends[above]
                ends[v] = (end, which[step])
            else:
                ends[v] = (above, which)
        usages: list[Usage] = []
        change = np.zeros(len(self.base) + 1)
        for u in self.usages:
            nbytes = u.nbytes[self.since[u.node]]
            end = u.node
            if u.node in ends:
                end, which = ends[u.node]
                nbytes = nbytes[which]
            least = float(nbytes.min())
            change[u.start] += least
            change[u.end] -= least
            if nbytes.max() > least and u.start < u.end:
                usages.append(Usage(end, u.start, u.end, nbytes - least))
        self.usages = usages
        self.base = self.base + np.cumsum(change)[:-1]
        self.recent = []
        for i, cost in self.costs.items():
            self.since[i] = np.arange(len(cost))

    def drop_dominated(self) -> bool:
        """Drops choices that another one of the same node makes superfluous; usages must be settled.

        Returns:
          Whether there were any.
        """
        off, number = self._numbers()
        cost = np.concatenate(list(self.costs.values())) if self.costs else np.zeros(0)
        flat, at = _flatten(list(self.edges.values()))
        held = sorted(self.usages, key=lambda u: number[u.node])
        count = np.bincount([number[u.node] for u in held], minlength=len(number))
        nbytes = np.concatenate([u.nbytes for u in held]) if held else np.zeros(0)
        seg = np.concatenate(([0], np.cumsum(count))).astype(np.int64)
        alive = undominated(off, cost, self._ends(number), at, flat, seg, nbytes)
        self._keep(alive, off)
        return not alive.all()

    def _numbers(self) -> tuple[NDArray[np.int64], dict[int, int]]:
        """Where the choices of each node that is left begin, and its number among them."""
        size = [len(c) for c in self.costs.values()]
        return np.concatenate(([0], np.cumsum(size))).astype(np.int64), {i: k for k, i in enumerate(self.costs)}

    def _ends(self, number: dict[int, int]) -> NDArray[np.int64]:
        return np.array([number[i] for pair in self.edges for i in pair], np.int64).reshape(-1, 2)

    def _keep(self, alive: NDArray[np.int8], off: NDArray[np.int64]) -> None:
        """Drops the choices that are not alive."""
        if not len(alive):
            return
        nodes = list(self.costs)
        for k in np.flatnonzero(np.add.reduceat(1 - alive, off[:-1])).tolist():
            self._drop(nodes[k], alive[off[k] : off[k + 1]].astype(bool))

    def _eliminate(self, holds: set[int]) -> list[Removed]:
        """Minimises out nodes without memory and with few neighbours."""
        found: list[Removed] = []
        todo = [i for i in self.costs if i not in holds and len(self.costs[i]) > 1]
        queued = set(todo)
        while todo:
            v = todo.pop()
            queued.discard(v)
            scope = tuple(sorted(self.around[v]))
            if len(scope) > 2 or v not in self.costs:
                continue
            sizes = [len(self.costs[j]) for j in scope]
            grows = math.prod(sizes) > GROWTH * len(self.costs[v]) * sum(sizes)
            if len(scope) == 2 and scope[1] not in self.around[scope[0]] and grows:
                continue
            joint = self.costs[v]
            for k, j in enumerate(scope):
                table = self.edge(j, v)
                joint = joint + (table[:, None, :] if k == 0 and len(scope) == 2 else table)
            found.append(Removed(v, scope, np.asarray(np.argmin(joint, axis=-1))))
            least = joint.min(axis=-1)
            for j in scope:
                self.edges.pop((j, v) if j < v else (v, j))
                self.around[j].discard(v)
            self.around[v].clear()
            if len(scope) == 2:
                self._add(*scope, least)
            elif scope:
                self.costs[scope[0]] = self.costs[scope[0]] + least
            else:
                self.constant += float(least)
            del self.costs[v]
            for j in scope:
                if j not in queued and j not in holds:
                    queued.add(j)
                    todo.append(j)
        return found

    def core(self) -> Core:
        """The problem that is left, renumbered."""
        limit = self.problem.limit
        settled = tuple(self.usages)
        times = np.zeros(0, np.intp) if limit is None else needed_rows(settled, self.base, limit)
        usages, base = keep_rows(settled, self.base, times)
        merged = [Removed(v, (self.leader[v][0],), self.leader[v][1]) for v in self.order]
        merged += self._eliminate({u.node for u in usages})
        nodes = tuple(i for i in sorted(self.costs) if len(self.costs[i]) > 1)
        number = {i: k for k, i in enumerate(nodes)}
        constant = self.constant + sum(float(c[0]) for c in self.costs.values() if len(c) == 1)
        problem = Problem(
            tuple(self.costs[i] for i in nodes),
            {(number[i], number[j]): edge for (i, j), edge in self.edges.items()},
            tuple(Usage(number[u.node], u.start, u.end, u.nbytes) for u in usages),
            base,
            limit,
        )
        return Core(problem, nodes, tuple(self.kept), tuple(merged), constant, times)


def _flatten(tables: Sequence[Floats]) -> tuple[Floats, NDArray[np.int64]]:
    """All entries one table after the other, and where each begins (and the last ends)."""
    at = np.concatenate(([0], np.cumsum([t.size for t in tables]))).astype(np.int64)
    return np.concatenate([t.ravel() for t in tables]) if tables else np.zeros(0), at
