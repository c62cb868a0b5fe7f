"""Time of collectives: alpha-beta over the group's links, hierarchical over nodes.

Notation: n devices, N bytes of the whole buffer (see `collective_time_s`), a latency of one step, b bytes a second a
device moves in each direction. Standard forms (Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", 2005; the same in NVIDIA/nccl, src/graph/tuning.cc):

    ring all-gather, reduce-scatter    (n-1) a + (n-1)/n N/b
    ring all-reduce                    both, 2 (n-1) a + 2 (n-1)/n N/b
    recursive halving and doubling     all-reduce of 2^k devices, 2 log2(n) a + 2 (n-1)/n N/b
    tree all-reduce                    2 ceil(log2 n) a + 2 N/b, pipelined in chunks
    all-to-all, pairwise               (n-1) a + (n-1)/n (N/n)/b
    permute                            a + (N/n)/b

Over levels (m in a node, k nodes) each can run flat, as one ring that passes every node once on each of the m adapters,
b = min(b_node, m b_network), or level by level: reduce-scatter in the node, the rest across on 1/m of the bytes,
all-gather in the node. The fastest one counts, as NCCL and XLA choose by their own models; `best_algorithm` names it.
Where a cluster lists its wires, link_graph.py answers instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import assert_never

from autoshard.cluster import GroupLinks, Level
from autoshard.costmodel.algorithms import TREE_EFFICIENCY, Algorithm, CollectiveKind, quickest, useful
from autoshard.costmodel.link_graph import graph_algorithms


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
    return best_algorithm(kind, nbytes, group)[1]


def best_algorithm(kind: CollectiveKind, nbytes: float, group: GroupLinks) -> tuple[str, float]:
    """The quickest algorithm for a size, and its time (arguments as for `collective_time_s`).

    Returns:
      Its name, e.g. "ring" or "hierarchical(ring, tree)" for one inside and one across, and seconds; "none" and 0 for
      a group of one, and for no bytes.
    """
    if group.size == 1 or nbytes <= 0:
        return "none", 0.0
    if group.graph is not None:
        algorithms = graph_algorithms(kind, group.graph)
    else:
        algorithms = _level_algorithms(kind, group.levels)
    best = quickest(algorithms, nbytes)
    return best.name, best.time_s(nbytes)


@functools.lru_cache(maxsize=1024)
def _level_algorithms(kind: CollectiveKind, levels: tuple[Level, ...]) -> tuple[Algorithm, ...]:
    match kind:
        case "all_reduce":
            return useful(_all_reduces(levels))
        case "all_gather" | "reduce_scatter":
            return useful(_halves(levels))
        case "all_to_all":
            return (_all_to_all(levels),)
        case "permute":
            slowest = min(level.link.rate_bytes_per_s for level in levels)
            size = math.prod(level.size for level in levels)
            return (Algorithm("direct", max(level.link.latency_s for level in levels), 1 / size / slowest),)
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


def _halves(levels: tuple[Level, ...]) -> Iterator[Algorithm]:
    """All-gather or reduce-scatter: flat, or level by level."""
    yield _ring(levels)
    if len(levels) > 1:
        inside = _ring(levels[:1])
        for across in _halves(levels[1:]):
            yield inside.then(across, 1 / levels[0].size).named(f"hierarchical({inside.name}, {across.name})")


def _all_reduces(levels: tuple[Level, ...]) -> Iterator[Algorithm]:
    """All-reduce: ring, recursive doubling and tree, or level by level."""
    yield _ring(levels).then(_ring(levels))
    yield _tree(levels)
    if len(levels) == 1:
        yield from (half.then(half) for half in _doublings(levels[0]))
        return
    for inside in (_ring(levels[:1]), *_doublings(levels[0])):
        for across in _all_reduces(levels[1:]):
            both = inside.then(inside).then(across, 1 / levels[0].size)
            yield both.named(f"hierarchical({inside.name}, {across.name})")


def _ring(levels: tuple[Level, ...]) -> Algorithm:
    """(n-1) steps over all levels as one ring; between outer groups it passes once each on every adapter."""
    size = math.prod(level.size for level in levels)
    # Steps over a level: what one turn of the ring has of it. NCCL counts the same (nInterSteps).
    latency, groups = 0.0, size
    for level in levels:
        groups //= level.size
        latency += (level.size - 1) * groups * level.link.latency_s
    return Algorithm("ring", latency, (size - 1) / size / _flat_rate(levels))


def _doublings(level: Level) -> Iterator[Algorithm]:
    """Half of an all-reduce by recursive halving and doubling, where the size is a power of two."""
    n = level.size
    if n & (n - 1) == 0:
        bandwidth = level.rate_bytes_per_s
        yield Algorithm("recursive doubling", math.log2(n) * level.link.latency_s, (n - 1) / n / bandwidth)


def _tree(levels: tuple[Level, ...]) -> Algorithm:
    """Reduce up and broadcast down a tree, in chunks, so that the bytes move once each way."""
    latency = sum(math.ceil(math.log2(level.size)) * level.link.latency_s for level in levels)
    return Algorithm("tree", 2 * latency, 2 / (_flat_rate(levels) * TREE_EFFICIENCY))


def _flat_rate(levels: tuple[Level, ...]) -> float:
    """Bytes a second through one place of a ring over all levels: outer levels are crossed by all members at once."""
    rate, inside = math.inf, 1
    for level in levels:
        rate = min(rate, inside * level.rate_bytes_per_s)
        inside *= level.size
    return rate


def _all_to_all(levels: tuple[Level, ...]) -> Algorithm:
    """Pairwise exchange; levels move their share at the same time."""
    size = math.prod(level.size for level in levels)  # each device holds N/n and sends an equal part of it to each
    latency, per_byte, inside = 0.0, 0.0, 1
    for level in levels:
        peers = inside * (level.size - 1)
        latency += peers * level.link.latency_s
        per_byte = max(per_byte, peers / size**2 / level.rate_bytes_per_s)
        inside *= level.size
    return Algorithm("pairwise", latency, per_byte)
