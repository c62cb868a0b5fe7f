"""The solver's inner loops, compiled by numba; all work on the flat arrays of a `Network`.

Compiled once a machine and kept in numba's cache. They hold no lock, so that two searches run on two cores.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import numpy as np

from autoshard.loops import Bytes as Bytes
from autoshard.loops import Floats as Floats
from autoshard.loops import Ints as Ints
from autoshard.loops import kernel as kernel

BIG = 1e30
"""Stands for an infinite cost: sums of these stay finite."""

FAR = 1e300


@kernel
def price(
    size: Ints,
    off: Ints,
    cost: Floats,
    seg: Ints,
    start: Ints,
    end: Ints,
    at: Ints,
    held: Floats,
    prices: Floats,
    out: Floats,
) -> None:
    """out[i,s] = cost[i,s] + sum over segments of held[s] * sum of prices from start to end."""
    total = np.zeros(len(prices) + 1)
    for t in range(len(prices)):
        total[t + 1] = total[t] + prices[t]
    for i in range(len(size)):
        o = off[i]
        for s in range(size[i]):
            out[o + s] = cost[o + s]
        for g in range(seg[i], seg[i + 1]):
            w = total[end[g]] - total[start[g]]
            if w > 0.0:
                for s in range(size[i]):
                    out[o + s] += w * held[at[g] + s]


@kernel
def use_of(x: Ints, base: Floats, seg: Ints, start: Ints, end: Ints, at: Ints, held: Floats) -> Floats:
    """Bytes at each time under an answer."""
    change = np.zeros(len(base) + 1)
    for i in range(len(x)):
        for g in range(seg[i], seg[i + 1]):
            u = held[at[g] + x[i]]
            change[start[g]] += u
            change[end[g]] -= u
    out = np.empty(len(base))
    run = 0.0
    for t in range(len(base)):
        run += change[t]
        out[t] = base[t] + run
    return out


@kernel
def cost_of(x: Ints, size: Ints, off: Ints, cost: Floats, adj: Ints, other: Ints, tab: Ints, table: Floats) -> float:
    """Cost of an answer. Entry a of the adjacency of i has table[tab[a] + x_other * size_i + x_i]."""
    total = 0.0
    for i in range(len(x)):
        total += cost[off[i] + x[i]]
        for a in range(adj[i], adj[i + 1]):
            if other[a] > i:
                total += table[tab[a] + x[other[a]] * size[i] + x[i]]
    return float(total)


@kernel
def grow_forest(order: Ints, adj: Ints, other: Ints, inside: Bytes, parent: Ints, out: Ints) -> int:
    """A maximal induced forest: nodes in the given order, each if it closes no cycle; roots before their children.

    Args:
      order: all nodes.
      adj, other: adjacency.
      inside: set to whether a node is in it; parent: to its parent, -1 of roots, -2 outside.
      out: its nodes, breadth first.

    Returns:
      The number of nodes in it.
    """
    n = len(order)
    group = np.arange(n)
    mark = np.full(n, -1)
    for i in range(n):
        inside[i] = 0
        parent[i] = -2
    for q in range(n):
        v = order[q]
        fits = True
        for a in range(adj[v], adj[v + 1]):
            if not inside[other[a]]:
                continue
            r = other[a]
            while group[r] != r:
                group[r] = group[group[r]]
                r = group[r]
            if mark[r] == v:
                fits = False
                break
            mark[r] = v
        if not fits:
            continue
        inside[v] = 1
        for a in range(adj[v], adj[v + 1]):
            if inside[other[a]]:
                r = other[a]
                while group[r] != r:
                    r = group[r]
                group[r] = v
    count = 0
    for q in range(n):
        v = order[q]
        if not inside[v] or parent[v] != -2:
            continue
        parent[v] = -1
        out[count] = v
        head = count
        count += 1
        while head < count:
            w = out[head]
            head += 1
            for a in range(adj[w], adj[w + 1]):
                u = other[a]
                if inside[u] and parent[u] == -2:
                    parent[u] = w
                    out[count] = u
                    count += 1
    return count


@kernel
def move_forest(
    x: Ints,
    order: Ints,
    size: Ints,
    off: Ints,
    cost: Floats,
    adj: Ints,
    other: Ints,
    tab: Ints,
    table: Floats,
) -> None:
    """Sets the nodes of a random forest to their joint optimum, all others as they are: dynamic programming."""
    n = len(x)
    inside = np.zeros(n, np.int8)
    parent = np.empty(n, np.int64)
    nodes = np.empty(n, np.int64)
    count = grow_forest(order, adj, other, inside, parent, nodes)
    joint = np.empty(off[n])
    room = np.zeros(n + 1, np.int64)  # of each node: where its best choices by the parent's stand
    for i in range(n):
        room[i + 1] = room[i] + (size[parent[i]] if parent[i] >= 0 else 0)
    best = np.zeros(room[n], np.int32)
    for h in range(count):
        v = nodes[h]
        o, k = off[v], size[v]
        for s in range(k):
            joint[o + s] = cost[o + s]
        for a in range(adj[v], adj[v + 1]):
            if not inside[other[a]]:
                row = tab[a] + x[other[a]] * k
                for s in range(k):
                    joint[o + s] += table[row + s]
    for h in range(count - 1, -1, -1):
        v = nodes[h]
        p = parent[v]
        if p < 0:
            continue
        o, k, kp = off[v], size[v], size[p]
        entry = 0
        for a in range(adj[p], adj[p + 1]):
            if other[a] == v:
                entry = tab[a]
                break
        least = np.full(kp, FAR)
        r = room[v]
        for s in range(k):
            mine = joint[o + s]
            if mine >= BIG:
                continue
            row = entry + s * kp
            for t in range(kp):
                y = mine + table[row + t]
                if y < least[t]:
                    least[t] = y
                    best[r + t] = s
        for t in range(kp):
            joint[off[p] + t] += least[t]
    for h in range(count):
        v = nodes[h]
        if parent[v] >= 0:
            x[v] = best[room[v] + x[parent[v]]]
            continue
        o = off[v]
        now = joint[o + x[v]]
        b = 0
        for s in range(size[v]):
            if joint[o + s] < joint[o + b]:
                b = s
        if joint[o + b] < now - 1e-12 * abs(now):
            x[v] = b


@kernel
def send(
    forward: bool,
    size: Ints,
    off: Ints,
    node: Floats,
    moved: Floats,
    msg: Ints,
    back: Ints,
    adj: Ints,
    other: Ints,
    tab: Ints,
    table: Floats,
    x: Ints,
) -> None:
    """One pass of sequential message passing (SRMP), which raises the bound; reads an answer off into x.

    Args:
      forward: nodes in rising order, else falling.
      size, off: choices of nodes.
      node: reparametrised node costs, cost + sum of `moved`.
      moved: for each adjacency entry a what its edge has given to the node, from msg[a] on.
      back: the entry of the same edge at the other node.
      adj, other, tab, table: adjacency and tables.
      x: the answer.
    """
    n = len(size)
    largest = 0
    for i in range(n):
        largest = max(largest, size[i])
    least = np.empty(largest)
    for q in range(n):
        i = q if forward else n - 1 - q
        k, o = size[i], off[i]
        before = 0
        after = 0
        for a in range(adj[i], adj[i + 1]):
            j = other[a]
            if (j < i) != forward:
                after += 1
                continue
            before += 1
            theirs, mine, entry = msg[back[a]], msg[a], tab[a]
            for s in range(k):
                least[s] = FAR
            for t in range(size[j]):
                given = moved[theirs + t]
                row = entry + t * k
                for s in range(k):
                    v = table[row + s] - given
                    least[s] = min(least[s], v)
            for s in range(k):
                node[o + s] += least[s] - moved[mine + s]
                moved[mine + s] = least[s]
        for s in range(k):
            least[s] = node[o + s]
        for a in range(adj[i], adj[i + 1]):
            j = other[a]
            if (j < i) == forward:
                row, theirs, mine = tab[a] + x[j] * k, msg[back[a]], msg[a]
                for s in range(k):
                    least[s] += table[row + s] - moved[theirs + x[j]] - moved[mine + s]
        b = 0
        for s in range(k):
            if least[s] < least[b]:
                b = s
        x[i] = b
        if after:
            w = 1.0 / max(before, after)
            for a in range(adj[i], adj[i + 1]):
                if (other[a] < i) != forward:
                    for s in range(k):
                        moved[msg[a] + s] -= w * node[o + s]
            for s in range(k):
                node[o + s] *= 1.0 - w * after


@kernel
def gather(size: Ints, off: Ints, cost: Floats, moved: Floats, msg: Ints, adj: Ints, node: Floats) -> None:
    """node = cost + sum of `moved`: after prices have changed."""
    for i in range(len(size)):
        o = off[i]
        for s in range(size[i]):
            node[o + s] = cost[o + s]
        for a in range(adj[i], adj[i + 1]):
            for s in range(size[i]):
                node[o + s] += moved[msg[a] + s]


@kernel
def bound_of(
    size: Ints,
    off: Ints,
    node: Floats,
    moved: Floats,
    msg: Ints,
    back: Ints,
    adj: Ints,
    other: Ints,
    tab: Ints,
    table: Floats,
) -> float:
    """sum_i min node_i + sum_ij min (E_ij - moved): a lower bound of every answer's cost."""
    total = 0.0
    for i in range(len(size)):
        k, o = size[i], off[i]
        least = node[o]
        for s in range(k):
            least = min(least, node[o + s])
        total += least
        for a in range(adj[i], adj[i + 1]):
            j = other[a]
            if j < i:
                continue
            least = FAR
            for t in range(size[j]):
                given = moved[msg[back[a]] + t]
                row = tab[a] + t * k
                for s in range(k):
                    least = min(least, table[row + s] - given - moved[msg[a] + s])
            total += least
    return float(total)


@kernel
def accept(
    x: Ints,
    y: Ints,
    size: Ints,
    off: Ints,
    cost: Floats,
    adj: Ints,
    other: Ints,
    tab: Ints,
    table: Floats,
    use: Floats,
    limit: float,
    seg: Ints,
    start: Ints,
    end: Ints,
    at: Ints,
    held: Floats,
    heat: float,
) -> int:
    """Takes over into x each connected part of its difference from y that is cheaper and stays legal; y becomes x.

    Args:
      x: a legal answer; `use` is what it uses, kept up to date.
      y: another answer.
      size, off, cost: choices and (priced) costs of nodes.
      adj, other, tab, table: adjacency and tables.
      limit: of `use`.
      seg, start, end, at, held: memory segments.
      heat: a part is taken over too if it costs less than this much more.

    Returns:
      How many parts were taken over.
    """
    n = len(x)
    seen = np.zeros(n, np.int8)
    part = np.empty(n, np.int64)
    taken = 0
    for root in range(n):
        if seen[root] or x[root] == y[root]:
            continue
        part[0] = root
        seen[root] = 1
        head = 0
        count = 1
        change = 0.0
        while head < count:
            i = part[head]
            head += 1
            k = size[i]
            change += cost[off[i] + y[i]] - cost[off[i] + x[i]]
            for a in range(adj[i], adj[i + 1]):
                j = other[a]
                if x[j] == y[j]:
                    row = tab[a] + x[j] * k
                    change += table[row + y[i]] - table[row + x[i]]
                    continue
                if j > i:
                    change += table[tab[a] + y[j] * k + y[i]] - table[tab[a] + x[j] * k + x[i]]
                if not seen[j]:
                    seen[j] = 1
                    part[count] = j
                    count += 1
        legal = change < heat
        if legal:
            for q in range(count):
                i = part[q]
                for g in range(seg[i], seg[i + 1]):
                    more = held[at[g] + y[i]] - held[at[g] + x[i]]
                    if more != 0.0:
                        for t in range(start[g], end[g]):
                            use[t] += more
            for q in range(count):
                i = part[q]
                for g in range(seg[i], seg[i + 1]):
                    if held[at[g] + y[i]] > held[at[g] + x[i]]:
                        for t in range(start[g], end[g]):
                            if use[t] > limit:
                                legal = False
                                break
                    if not legal:
                        break
                if not legal:
                    break
            if not legal:
                for q in range(count):
                    i = part[q]
                    for g in range(seg[i], seg[i + 1]):
                        more = held[at[g] + y[i]] - held[at[g] + x[i]]
                        if more != 0.0:
                            for t in range(start[g], end[g]):
                                use[t] -= more
        for q in range(count):
            i = part[q]
            if legal:
                x[i] = y[i]
            else:
                y[i] = x[i]
        if legal:
            taken += 1
    return taken


@kernel
def descend(
    x: Ints,
    order: Ints,
    size: Ints,
    off: Ints,
    cost: Floats,
    adj: Ints,
    other: Ints,
    tab: Ints,
    table: Floats,
    use: Floats,
    limit: float,
    seg: Ints,
    start: Ints,
    end: Ints,
    at: Ints,
    held: Floats,
) -> int:
    """Gives each node in turn its cheapest choice that stays legal, all others as they are; returns how many changed.

    A forest moved as a whole is refused as a whole; this takes what of it fits. Arguments as for `accept`.
    """
    largest = 0
    for i in range(len(size)):
        largest = max(largest, size[i])
    total = np.empty(largest)
    changed = 0
    for q in range(len(order)):
        i = order[q]
        k, o = size[i], off[i]
        for s in range(k):
            total[s] = cost[o + s]
        for a in range(adj[i], adj[i + 1]):
            row = tab[a] + x[other[a]] * k
            for s in range(k):
                total[s] += table[row + s]
        now = total[x[i]] - 1e-12 * abs(total[x[i]])
        while True:
            b = 0
            for s in range(k):
                if total[s] < total[b]:
                    b = s
            if total[b] >= now:
                break
            legal = True
            for g in range(seg[i], seg[i + 1]):
                more = held[at[g] + b] - held[at[g] + x[i]]
                if more > 0.0:
                    for t in range(start[g], end[g]):
                        if use[t] + more > limit:
                            legal = False
                            break
                if not legal:
                    break
            if not legal:
                total[b] = FAR
                continue
            for g in range(seg[i], seg[i + 1]):
                more = held[at[g] + b] - held[at[g] + x[i]]
                if more != 0.0:
                    for t in range(start[g], end[g]):
                        use[t] += more
            x[i] = b
            changed += 1
            break
    return changed
