"""A problem as flat arrays, for the compiled loops of `kernels`.

Node i has size[i] choices, at off[i] of every array over choices. Its entries of the adjacency are adj[i] to adj[i+1];
entry a names the other node, `back` the same edge's entry over there, and both orientations of a table are kept:

    table[tab[a] + x_other * size_i + x_i]      moved[msg[a] + x_i]: what the edge has given to the node (message)

Memory in parts of the limit, infinite costs as `kernels.BIG`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from autoshard.search.kernels import BIG
from autoshard.search.problem import SLACK, Floats, Problem, Usage

Ints = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Arrays of one problem.

    Attributes:
      size, off, cost: choices of nodes.
      adj, other, back, tab, table, msg: edges.
      messages: length of an array of messages.
      seg, start, end, at, held: memory: node i has segments seg[i] to seg[i+1]; choice s of segment g holds
        held[at[g] + s] from start[g] until before end[g].
      base: held at each time whatever is chosen.
    """

    size: Ints
    off: Ints
    cost: Floats
    adj: Ints
    other: Ints
    back: Ints
    tab: Ints
    table: Floats
    msg: Ints
    messages: int
    seg: Ints
    start: Ints
    end: Ints
    at: Ints
    held: Floats
    base: Floats

    @property
    def links(self) -> tuple[Ints, Ints, Ints, Floats]:
        """Adjacency and tables, as kernels take them."""
        return self.adj, self.other, self.tab, self.table

    @property
    def memory(self) -> tuple[Ints, Ints, Ints, Ints, Floats]:
        """Memory segments, as kernels take them."""
        return self.seg, self.start, self.end, self.at, self.held


def network(problem: Problem) -> Network:
    """The arrays of a problem; its nodes must have choices."""
    size = np.array([len(c) for c in problem.costs], np.int64)
    off = _offsets(size)
    cost = np.minimum(_join(list(problem.costs)), BIG)
    keys = np.array(list(problem.edges), np.int64).reshape(-1, 2)
    tables = list(problem.edges.values())
    # Both ends of every edge, sorted by node; entries 2e and 2e + 1 before sorting are those of edge e.
    ends, others = keys.reshape(-1), keys[:, ::-1].reshape(-1)
    order = np.lexsort((others, ends))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    at = _offsets(np.array([t.size for t in tables], np.int64).repeat(2))[:-1]
    # Of (i, j) with shape (size_i, size_j): transposed for i, as it is for j.
    flat = [part.ravel() for t in tables for part in (t.T, t)]
    msg = _offsets(size[ends[order]])
    scale = 1.0 if problem.limit is None else max(problem.limit, 1.0)
    seg, start, end, held = _segments(problem.usages, len(size), scale)
    return Network(
        size,
        off,
        cost,
        _offsets(np.bincount(ends, minlength=len(size))),
        others[order],
        place[order ^ 1],
        at[order],
        np.minimum(_join(flat), BIG),
        msg[:-1],
        int(msg[-1]),
        seg,
        start,
        end,
        _offsets(np.array([len(h) for h in held], np.int64))[:-1],
        _join(held),
        problem.base / scale,
    )


def _segments(usages: tuple[Usage, ...], nodes: int, scale: float) -> tuple[Ints, Ints, Ints, list[Floats]]:
    """Usages by node; those of one node over the same times are added up."""
    merged: defaultdict[tuple[int, int, int], Floats] = defaultdict(lambda: np.zeros(()))
    for u in usages:
        if u.start < u.end:
            merged[u.node, u.start, u.end] = merged[u.node, u.start, u.end] + u.nbytes / scale
    keys = sorted(merged)
    columns = np.array(keys, np.int64).reshape(-1, 3)
    seg = _offsets(np.bincount(columns[:, 0], minlength=nodes))
    return seg, columns[:, 1].copy(), columns[:, 2].copy(), [merged[k] for k in keys]


def _offsets(sizes: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def _join(parts: list[Floats]) -> Floats:
    return np.concatenate(parts).astype(np.float64, copy=False) if parts else np.zeros(0)


CAPACITY = 1.0 + SLACK
"""The limit, in parts of itself."""
