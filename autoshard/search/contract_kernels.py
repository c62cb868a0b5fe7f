"""Presolve's compiled loops over all tables of a problem, laid one after the other."""

from __future__ import annotations

import numpy as np

from autoshard.search.kernels import Bytes, Floats, Ints, kernel

FINITE = 1
SPLIT = 2
FUNCTION = 3
INVERSE = 4

EXACT = 1e-9
"""Part of a table's spread up to which it counts as a sum of two costs."""


@kernel
def classify(rows: Ints, at: Ints, flat: Floats) -> Ints:
    """What each table is.

    Args:
      rows: of each table.
      at: where each begins, and the end of the last.
      flat: the entries, row-major.

    Returns:
      0 if it has infinite entries, else `FINITE`; `SPLIT` if it is a sum of a cost by row and one by column;
      `FUNCTION` if each row has one finite entry, `INVERSE` if each column has.
    """
    found = np.zeros(len(rows), np.int64)
    for e in range(len(rows)):
        m = rows[e]
        o = at[e]
        n = (at[e + 1] - o) // m
        if m == 1 or n == 1:
            found[e] = SPLIT
            continue
        finite = 0
        by_row = True
        for r in range(m):
            here = 0
            for c in range(n):
                if np.isfinite(flat[o + r * n + c]):
                    here += 1
            by_row = by_row and here == 1
            finite += here
        if finite == m * n:
            found[e] = FINITE
            low = high = flat[o]
            rest = 0.0
            for r in range(m):
                shift = flat[o + r * n] - flat[o]
                for c in range(n):
                    v = flat[o + r * n + c]
                    low = min(low, v)
                    high = max(high, v)
                    rest = max(rest, abs(v - shift - flat[o + c]))
            if rest <= EXACT * (high - low):
                found[e] = SPLIT
            continue
        if by_row:
            found[e] = FUNCTION
            continue
        by_column = True
        for c in range(n):
            here = 0
            for r in range(m):
                if np.isfinite(flat[o + r * n + c]):
                    here += 1
            if here != 1:
                by_column = False
                break
        if by_column:
            found[e] = INVERSE
    return found


@kernel
def consistent(alive: Bytes, off: Ints, ends: Ints, at: Ints, flat: Floats) -> bool:
    """Clears `alive` of choices without a finite entry at some edge among what is alive; False if a node has none left.

    Args:
      alive: whether each choice may be taken, all nodes' one after the other.
      off: where the choices of each node begin, and the end of the last.
      ends: the two nodes of each edge.
      at, flat: tables, as in `classify`.
    """
    nodes = len(off) - 1
    edges = len(ends)
    for i in range(nodes):
        some = False
        for s in range(off[i], off[i + 1]):
            some = some or alive[s] != 0
        if not some:
            return False
    holed = np.zeros(edges, np.int8)  # edges that forbid something
    first = np.zeros(nodes + 1, np.int64)
    for e in range(edges):
        for k in range(at[e], at[e + 1]):
            if not np.isfinite(flat[k]):
                holed[e] = 1
                first[ends[e, 0] + 1] += 1
                first[ends[e, 1] + 1] += 1
                break
    for i in range(nodes):
        first[i + 1] += first[i]
    where = first.copy()
    entry = np.empty(first[nodes], np.int64)
    for e in range(edges):
        if holed[e]:
            for side in range(2):
                i = ends[e, side]
                entry[where[i]] = e
                where[i] += 1
    queue = np.arange(nodes)
    queued = np.ones(nodes, np.int8)
    head = 0
    waiting = nodes
    while waiting:
        i = queue[head]
        head = (head + 1) % nodes
        waiting -= 1
        queued[i] = 0
        changed = False
        for a in range(first[i], first[i + 1]):
            e = entry[a]
            o = at[e]
            left = ends[e, 0] == i
            j = ends[e, 1] if left else ends[e, 0]
            n = off[ends[e, 1] + 1] - off[ends[e, 1]]
            for s in range(off[i + 1] - off[i]):
                if not alive[off[i] + s]:
                    continue
                supported = False
                for t in range(off[j + 1] - off[j]):
                    k = s * n + t if left else t * n + s
                    if alive[off[j] + t] and np.isfinite(flat[o + k]):
                        supported = True
                        break
                if not supported:
                    alive[off[i] + s] = 0
                    changed = True
        if not changed:
            continue
        some = False
        for s in range(off[i], off[i + 1]):
            some = some or alive[s] != 0
        if not some:
            return False
        for a in range(first[i], first[i + 1]):
            e = entry[a]
            j = ends[e, 1] if ends[e, 0] == i else ends[e, 0]
            if not queued[j]:
                queued[j] = 1
                queue[(head + waiting) % nodes] = j
                waiting += 1
    return True


@kernel
def undominated(off: Ints, cost: Floats, ends: Ints, at: Ints, flat: Floats, seg: Ints, held: Floats) -> Bytes:
    """Whether each choice is needed: dropped if an earlier-kept one of its node never costs and never holds more.

        c[a] - c[b] + sum over edges of max_t (E[a,t] - E[b,t]) <= 0   and   u[a] <= u[b] in every life

    Args:
      off, ends, at, flat: as in `consistent`.
      cost: of each choice, finite.
      seg: which lives each node has, from seg[i] until before seg[i + 1].
      held: bytes of each life by choice, life after life in the order of nodes.
    """
    nodes = len(off) - 1
    alive = np.ones(off[nodes], np.int8)
    first = np.zeros(nodes + 1, np.int64)
    for e in range(len(ends)):
        first[ends[e, 0] + 1] += 1
        first[ends[e, 1] + 1] += 1
    for i in range(nodes):
        first[i + 1] += first[i]
    where = first.copy()
    entry = np.empty(first[nodes], np.int64)
    for e in range(len(ends)):
        for side in range(2):
            entry[where[ends[e, side]]] = e
            where[ends[e, side]] += 1
    begin = 0
    for i in range(nodes):
        o, k = off[i], off[i + 1] - off[i]
        lives = seg[i + 1] - seg[i]
        # The tables with the choices of i along the rows, side by side: what is compared lies together.
        width = 0
        for q in range(first[i], first[i + 1]):
            j = ends[entry[q], 1] if ends[entry[q], 0] == i else ends[entry[q], 0]
            width += off[j + 1] - off[j]
        beside = np.empty((k, width))
        stop = np.empty(first[i + 1] - first[i], np.int64)
        column = 0
        for q in range(first[i], first[i + 1]):
            e = entry[q]
            left = ends[e, 0] == i
            j = ends[e, 1] if left else ends[e, 0]
            n = off[j + 1] - off[j]
            for s in range(k):
                for t in range(n):
                    beside[s, column + t] = flat[at[e] + (s * n + t if left else t * k + s)]
            column += n
            stop[q - first[i]] = column
        for b in range(k):
            for a in range(k):
                if a == b or not alive[o + a]:
                    continue
                more = cost[o + a] - cost[o + b]
                worse = False
                for g in range(lives):
                    if held[begin + g * k + a] > held[begin + g * k + b]:
                        worse = True
                        break
                if worse:
                    continue
                column = 0
                for q in range(len(stop)):
                    most = -np.inf
                    while column < stop[q]:
                        here = beside[b, column]
                        if here < np.inf:
                            most = max(most, beside[a, column] - here)
                        column += 1
                    if most > -np.inf:
                        more += most
                    if more == np.inf:
                        break
                if more <= 0.0:
                    alive[o + b] = 0
                    break
        begin += lives * k
    return alive
