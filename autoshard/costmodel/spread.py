"""Ways that avoid each other: messages of one step are routed one by one, each where the busiest wire stays quickest.

Greedy: a message takes the way whose largest (load + bytes) / bandwidth is the smallest, of these the one of the lowest
latency. It is tried beside fixed ways (link_graph.py), so it need not be the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autoshard.cluster import Routes

_BUDGET = 6000


def affordable(routes: Routes, flows: int) -> bool:
    """Whether spreading so many messages takes milliseconds."""
    return flows * len(routes.rates) <= _BUDGET


def spread(routes: Routes, flows: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Routes (source, target, bytes) one after the other.

    Returns:
      The largest latency of a way, and the largest load / bandwidth of a directed wire.
    """
    loads = [0.0] * len(routes.rates)
    rates: list[float] = routes.rates.tolist()
    latencies: list[float] = routes.latencies_s.tolist()
    latest = 0.0
    for source, target, nbytes in flows:
        way = _way(routes, source, target, [(load + nbytes) / r for load, r in zip(loads, rates, strict=True)])
        for wire in way:
            loads[wire] += nbytes
        latest = max(latest, sum(latencies[wire] for wire in way))
    return latest, max(load / rate for load, rate in zip(loads, rates, strict=True))


def _way(routes: Routes, source: int, target: int, busy: Sequence[float]) -> list[int]:
    """The wires from a device to another that keep the largest of `busy` smallest (Dijkstra)."""
    leaving, targets, latencies = routes.leaving, routes.targets, routes.latencies_s
    heap: list[tuple[float, float, int, int]] = [(0.0, 0.0, source, -1)]
    came: dict[int, int] = {}
    while heap:
        worst, latency, vertex, wire = heapq.heappop(heap)
        if vertex in came:
            continue
        came[vertex] = wire
        if vertex == target:
            break
        for wire in leaving[vertex]:
            after = int(targets[wire])
            if after not in came:
                heapq.heappush(heap, (max(worst, busy[wire]), latency + float(latencies[wire]), after, wire))
    way: list[int] = []
    vertex = target
    while came[vertex] >= 0:
        way.append(came[vertex])
        vertex = int(routes.sources[came[vertex]])
    return way
