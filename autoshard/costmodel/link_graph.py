"""Time of collectives over any wires, all groups of a mesh axis at once.

Notation: n devices in a group, N bytes of its whole buffer (see `collective_time_s`). An algorithm is a list of steps,
a step a set of flows (source, target, bytes) that go at the same time in all groups. Contention counts:

    time of a step  =  max over flows of the way's latency  +  max over directed wires of load / bandwidth

Both are linear in N, so an algorithm is a + b N (algorithms.py) and is worked out once for a set of groups:

    ring                  n-1 steps, each device sends N/n to the next one; all-reduce: twice
    two-way ring          the same, half of each N/n goes the other way round
    recursive doubling    all-reduce where n is a power of two, by halving and doubling: log2(n) steps in which devices
                          at distance n/2, n/4, ... 1 exchange N/2, N/4, ... N/n, and back; or the near ones first
                          (Thakur, Rabenseifner, Gropp 2005)
    tree                  all-reduce, in chunks, so that all of its wires are busy at once: two binary trees over the
                          ring's order, each for half of the buffer, leaves of one are inside the other (Sanders, Speck,
                          Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL):
                          2 (latencies from the root to the deepest leaf)
                          + max over wires of load / (bandwidth 0.9), N/2 up and N/2 down each edge of both trees
    hierarchical(x, y)    clusters of m well-joined devices: x inside, y across on N/m between the devices of one place
                          in each cluster, x inside
    pairwise              all-to-all, n-1 messages of N/n^2 from each device, one after the other without waiting for
                          the others: the sum of its latencies, and all loads together
    direct                permute: the worse of a shift by one place and by half of the group

Rings and trees are tried in the given order and in one found (group_order.py); ways are the widest, the quickest and,
in small graphs where flows meet, ones that avoid each other (spread.py). The quickest of all counts. Orders and ways
are found by rules of thumb: in a graph without any pattern a further wire may mislead them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never, final

from autoshard.cluster import Routes, WayChoice, WiredGroups, loads_of
from autoshard.costmodel.algorithms import TREE_EFFICIENCY, Algorithm, CollectiveKind, useful
from autoshard.costmodel.group_order import Group, partitions, ring_order
from autoshard.costmodel.spread import affordable, spread

Groups = tuple[Group, ...]


@final
@dataclass(frozen=True, slots=True)
class Flow:
    """A message.

    Attributes:
      source: the device that sends.
      target: the device that receives.
      share: its bytes for each byte of the whole buffer.
    """

    source: int
    target: int
    share: float


Step = tuple[Flow, ...]


@functools.lru_cache(maxsize=1024)
def graph_algorithms(kind: CollectiveKind, graph: WiredGroups) -> tuple[Algorithm, ...]:
    """The algorithms that are the quickest for some size."""
    timer = _Timer(graph.routes)
    match kind:
        case "all_reduce":
            return timer.all_reduces(graph.groups)
        case "all_gather" | "reduce_scatter":
            return timer.halves(graph.groups)
        case "all_to_all":
            return timer.all_to_alls(graph.groups)
        case "permute":
            return timer.permutes(graph.groups)
        case _:
            assert_never(kind)


def ring_step(groups: Groups, two_way: bool) -> Step:
    """What goes at once while rings turn."""
    size = len(groups[0])
    share = 1 / size / (2 if two_way else 1)
    ways = (1, -1) if two_way else (1,)
    return tuple(
        Flow(group[k], group[(k + way) % size], share) for group in groups for way in ways for k in range(size)
    )


def doubling_steps(groups: Groups, near_first: bool) -> Iterator[Step]:
    """The steps of a reduce-scatter by recursive halving; those of the all-gather are the same backwards."""
    size = len(groups[0])
    distances = [1 << k for k in range(size.bit_length() - 1)]
    share = 1.0
    for distance in distances if near_first else reversed(distances):
        share /= 2
        yield tuple(Flow(group[k], group[k ^ distance], share) for group in groups for k in range(size))


def tree_edges(size: int) -> Iterator[tuple[int, int]]:
    """(place of a child, place of its parent) of a binary tree of ceil(log2 size) levels; odd places are leaves."""
    for place in range(1, size):
        low = place & -place
        parent = (place ^ low) | (low << 1)
        yield place, parent if parent < size else place ^ low


def two_trees(group: Group) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(child, parent) of both trees: the second is the first, mirrored, or moved by a place where n is odd."""
    size = len(group)
    other = group[::-1] if size % 2 == 0 else (*group[1:], group[0])
    return tuple(tuple((order[child], order[parent]) for child, parent in tree_edges(size)) for order in (group, other))


@final
class _Timer:
    """Algorithms on one graph."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def halves(self, groups: Groups, doubling: bool = False) -> tuple[Algorithm, ...]:
        """All-gather or reduce-scatter."""
        found = [*self._rings(groups)]
        if doubling:
            found += self._doubling(groups)
        for inner, outer, size in self._levels(groups):
            across = self.halves(outer, doubling)
            found += [
                inside.then(other, 1 / size).named(_name(inside, other))
                for inside in self._inside(inner, doubling)
                for other in across
            ]
        return useful(found)

    def all_reduces(self, groups: Groups) -> tuple[Algorithm, ...]:
        """All-reduce."""
        found = [half.then(half) for half in (*self._rings(groups), *self._doubling(groups))]
        found += self._trees(groups)
        for inner, outer, size in self._levels(groups):
            across = self.all_reduces(outer)
            found += [
                inside.then(inside).then(other, 1 / size).named(_name(inside, other))
                for inside in self._inside(inner, True)
                for other in across
            ]
        return useful(found)

    def all_to_alls(self, groups: Groups) -> tuple[Algorithm, ...]:
        """All-to-all."""
        size = len(groups[0])
        found: list[Algorithm] = []
        for choice in self._choices():
            latency, loads = self._routes.all_pairs(groups, choice)
            found.append(Algorithm("pairwise", latency, float((loads / self._routes.rates).max()) / size**2))
        return useful(found)

    def permutes(self, groups: Groups) -> tuple[Algorithm, ...]:
        """Permute."""
        size = len(groups[0])
        steps = [
            tuple(Flow(group[k], group[(k + shift) % size], 1 / size) for group in groups for k in range(size))
            for shift in sorted({1, size // 2})
        ]
        found: list[Algorithm] = []
        for times in self._timed(steps):
            found.append(Algorithm("direct", max(a for a, _ in times), max(b for _, b in times)))
        return useful(found)

    def _levels(self, groups: Groups) -> Iterator[tuple[Groups, Groups, int]]:
        """Ways to cut groups: all clusters, what is joined across them, and the size of a cluster."""
        for cut in partitions(self._routes, groups):
            inner = tuple(cluster for clusters in cut for cluster in clusters)
            outer = tuple(
                tuple(cluster[place] for cluster in clusters) for clusters in cut for place in range(len(clusters[0]))
            )
            yield inner, outer, len(inner[0])

    def _inside(self, groups: Groups, doubling: bool) -> tuple[Algorithm, ...]:
        return useful([*self._rings(groups), *(self._doubling(groups) if doubling else ())])

    def _orders(self, groups: Groups) -> Iterator[Groups]:
        """The given order, and a found one."""
        yield groups
        found = tuple(ring_order(self._routes, group) for group in groups)
        if found != groups:
            yield found

    def _rings(self, groups: Groups) -> Iterator[Algorithm]:
        size = len(groups[0])
        for order in self._orders(groups):
            for name, two_way in (("ring", False), ("two-way ring", True)):
                if not two_way or size > 2:
                    yield from self._repeated(name, [ring_step(order, two_way)], size - 1)

    def _doubling(self, groups: Groups) -> Iterator[Algorithm]:
        """Half of an all-reduce."""
        size = len(groups[0])
        if size & (size - 1):
            return
        for order in self._orders(groups):
            for near_first in (False, True) if size > 2 else (False,):
                yield from self._repeated("recursive doubling", list(doubling_steps(order, near_first)), 1)

    def _trees(self, groups: Groups) -> Iterator[Algorithm]:
        for order in self._orders(groups):
            trees = [edges for group in order for edges in two_trees(group)]
            pairs = [pair for edges in trees for child, parent in edges for pair in ((child, parent), (parent, child))]
            step = tuple(Flow(source, target, 0.5) for source, target in pairs)
            for choice in self._choices():
                _, per_byte = self._step(step, choice)
                depth = max(self._depth_s(edges, choice) for edges in trees)
                yield Algorithm("tree", 2 * depth, per_byte / TREE_EFFICIENCY)

    def _choices(self) -> tuple[WayChoice, ...]:
        return ("widest",) if self._routes.is_forest else ("widest", "quickest")

    def _depth_s(self, edges: Sequence[tuple[int, int]], choice: WayChoice) -> float:
        """Latencies from the deepest leaf to the root."""
        parents = dict(edges)
        deepest = 0.0
        for leaf in parents:
            latency, place = 0.0, leaf
            while place in parents:
                latency += self._routes.route(place, parents[place], choice).latency_s
                place = parents[place]
            deepest = max(deepest, latency)
        return deepest

    def _repeated(self, name: str, steps: Sequence[Step], times: int) -> Iterator[Algorithm]:
        """Steps one after the other, all of them several times."""
        for taken in self._timed(steps):
            yield Algorithm(name, times * sum(a for a, _ in taken), times * sum(b for _, b in taken))

    def _timed(self, steps: Sequence[Step]) -> Iterator[list[tuple[float, float]]]:
        """Times of steps, all by one way of routing, for each way that may differ."""
        widest = [self._step(step, "widest") for step in steps]
        yield widest
        if self._routes.is_forest:
            return
        yield [self._step(step, "quickest") for step in steps]
        contends = any(self._contends(step, b) for step, (_, b) in zip(steps, widest, strict=True))
        if contends and all(affordable(self._routes, len(step)) for step in steps):
            yield [spread(self._routes, [(flow.source, flow.target, flow.share) for flow in step]) for step in steps]

    def _contends(self, step: Step, s_per_byte: float) -> bool:
        """Whether flows hinder each other."""
        return s_per_byte > max(flow.share / self._routes.width(flow.source, flow.target) for flow in step) * (1 + 1e-9)

    def _step(self, step: Step, choice: WayChoice) -> tuple[float, float]:
        """Latency, and seconds for each byte of the whole buffer."""
        ways = [(self._routes.route(flow.source, flow.target, choice), flow.share) for flow in step]
        rates = self._routes.rates
        busiest = max(load / float(rates[wire]) for wire, load in loads_of(ways).items())
        return max(way.latency_s for way, _ in ways), busiest


def _name(inside: Algorithm, across: Algorithm) -> str:
    return f"hierarchical({inside.name}, {across.name})"
