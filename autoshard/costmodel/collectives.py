"""Time of collectives: alpha-beta over the group's links, hierarchical over nodes.

Notation: n devices, N bytes of the whole buffer (see `collective_time_s`), a latency of one step, b bytes a second a
device moves in each direction. Standard forms (Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", 2005; the same in NVIDIA/nccl, src/graph/tuning.cc):

    ring all-gather, reduce-scatter    (n-1) a + (n-1)/n N/b
    ring all-reduce                    both, 2 (n-1) a + 2 (n-1)/n N/b
    tree all-reduce                    2 ceil(log2 n) a + 2 N/b, pipelined in chunks
    all-to-all, pairwise               (n-1) a + (n-1)/n (N/n)/b
    permute                            a + (N/n)/b

Over levels (m in a node, k nodes) each can run flat, as one ring that passes every node once on each of the m adapters,
b = min(b_node, m b_network), or level by level: reduce-scatter in the node, the rest across on 1/m of the bytes,
all-gather in the node. The faster one counts, as NCCL and XLA choose by their own models.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

from autoshard.cluster import GroupLinks, Level

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
)

TREE_EFFICIENCY = 0.9
"""NCCL's own discount of the tree's bandwidth against the ring's (NVIDIA/nccl, src/graph/tuning.cc: busBw*.9)."""


def collective_time_s(kind: CollectiveKind, nbytes: float, group: GroupLinks) -> float:
    """Time of one collective, without what launching it costs (`DeviceSpec.collective_launch_s`).

    Args:
      kind: the collective.
      nbytes: bytes of the buffer of one group, not split along the group: for all_reduce the operand of one device
        (= its result), for all_gather the result of one device, for reduce_scatter the operand of one device, for
        all_to_all and permute the array whose n-th part each device holds.
      group: who takes part.

    Returns:
      Seconds; 0 for a group of one, and for no bytes.
    """
    if group.size == 1 or nbytes <= 0:
        return 0.0
    levels = group.levels
    match kind:
        case "all_reduce":
            return _all_reduce_s(nbytes, levels)
        case "all_gather" | "reduce_scatter":
            return _half_all_reduce_s(nbytes, levels)
        case "all_to_all":
            return _all_to_all_s(nbytes, group)
        case "permute":
            slowest = min(level.link.rate_bytes_per_s for level in levels)
            return max(level.link.latency_s for level in levels) + nbytes / group.size / slowest
        case _:
            assert_never(kind)


def wire_bytes(kind: CollectiveKind, nbytes: float, group: GroupLinks) -> float:
    """Bytes one device sends (`nbytes` as in `collective_time_s`), by the bandwidth-optimal algorithm."""
    n = group.size
    if n == 1:
        return 0.0
    match kind:
        case "all_reduce":
            return 2 * (n - 1) / n * nbytes
        case "all_gather" | "reduce_scatter":
            return (n - 1) / n * nbytes
        case "all_to_all":
            return (n - 1) / n * nbytes / n
        case "permute":
            return nbytes / n
        case _:
            assert_never(kind)


def _half_all_reduce_s(nbytes: float, levels: tuple[Level, ...]) -> float:
    """All-gather or reduce-scatter, the faster of flat and level by level."""
    flat = _ring_s(nbytes, levels)
    if len(levels) == 1:
        return flat
    inner, outer = levels[0], levels[1:]
    return min(flat, _ring_s(nbytes, (inner,)) + _half_all_reduce_s(nbytes / inner.size, outer))


def _all_reduce_s(nbytes: float, levels: tuple[Level, ...]) -> float:
    """All-reduce, the fastest of ring, tree and level by level."""
    best = min(2 * _ring_s(nbytes, levels), _tree_s(nbytes, levels))
    if len(levels) == 1:
        return best
    inner, outer = levels[0], levels[1:]
    return min(best, 2 * _ring_s(nbytes, (inner,)) + _all_reduce_s(nbytes / inner.size, outer))


def _ring_s(nbytes: float, levels: tuple[Level, ...]) -> float:
    """(n-1) steps over all levels as one ring; between outer groups it passes once each on every adapter."""
    size = math.prod(level.size for level in levels)
    rate = _flat_rate(levels)
    # Steps over a level: what one turn of the ring has of it. NCCL counts the same (nInterSteps).
    latency, groups = 0.0, size
    for level in levels:
        groups //= level.size
        latency += (level.size - 1) * groups * level.link.latency_s
    return latency + (size - 1) / size * nbytes / rate


def _tree_s(nbytes: float, levels: tuple[Level, ...]) -> float:
    """Reduce up and broadcast down a tree, in chunks, so that the bytes move once each way."""
    latency = sum(math.ceil(math.log2(level.size)) * level.link.latency_s for level in levels)
    return 2 * latency + 2 * nbytes / (_flat_rate(levels) * TREE_EFFICIENCY)


def _flat_rate(levels: tuple[Level, ...]) -> float:
    """Bytes a second through one place of a ring over all levels: outer levels are crossed by all members at once."""
    rate, inside = math.inf, 1
    for level in levels:
        rate = min(rate, inside * level.rate_bytes_per_s)
        inside *= level.size
    return rate


def _all_to_all_s(nbytes: float, group: GroupLinks) -> float:
    """Pairwise exchange; levels move their share at the same time."""
    share = nbytes / group.size  # what one device holds; each of the n devices gets an equal part of it
    latency, time, inside = 0.0, 0.0, 1
    for level in group.levels:
        peers = inside * (level.size - 1)
        latency += peers * level.link.latency_s
        time = max(time, share * peers / group.size / level.rate_bytes_per_s)
        inside *= level.size
    return latency + time
