"""Ways through the wires of a cluster: which wires a message takes from one device to another.

Vertices are the devices 0 to n-1, then the switches; devices pass messages on, as in a ring of NVLinks. Every wire is
two directed ones, 2w and 2w + 1. Wires between the same two ends count as one that has their bandwidth together and the
lowest of their latencies. Two ways are known for each pair:

    widest      the largest bandwidth of the narrowest wire (a path in the maximum spanning forest, Hu, "The maximum
                capacity route problem", 1961), of these the lowest latency, of these the fewest wires
    quickest    the lowest latency, of these the fewest wires

Where several ways are equally good, messages are split evenly at every fork.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import numpy as np
from scipy.sparse import csr_array  # pyright: ignore[reportMissingTypeStubs]
from scipy.sparse.csgraph import dijkstra  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from autoshard.hardware.device import Link, Wire

Array = np.ndarray[Any, np.dtype[Any]]
WayChoice = Literal["widest", "quickest"]

_TICKS_PER_S = 1e12
_TICK = 4096.0
"""Lengths of paths are whole numbers, so that equal ones are equal in floats: 4096 for each picosecond, 1 for each
wire. Exact up to 2^53, for paths of 2.2 s and fewer than 4096 wires."""

_TRIED = 64
"""Equally wide ways that are compared by their latency."""


@final
@dataclass(frozen=True, slots=True)
class Route:
    """A way.

    Attributes:
      latency_s: of its wires together.
      shares: directed wires and the part of the message that each carries.
    """

    latency_s: float
    shares: tuple[tuple[int, float], ...]


@final
class Routes:
    """The wires of a cluster as a graph; answers are remembered.

    Attributes:
      devices: how many; vertices from there on are switches.
      wires: as given.
      vertices: devices and switches.
      rates: bytes a second of each directed wire.
      sources: the vertex each directed wire leaves.
      targets: the vertex it reaches.
      latencies_s: of each directed wire.
      leaving: the directed wires that leave each vertex.
    """

    def __init__(self, devices: int, wires: Sequence[Wire]) -> None:
        self.devices = devices
        self.wires = tuple(wires)
        self._hash = hash((devices, self.wires))
        switches: dict[str, int] = {}
        joined: dict[tuple[int, int], tuple[float, float]] = {}
        for wire in self.wires:
            ends = [
                end if isinstance(end, int) else switches.setdefault(end, devices + len(switches))
                for end in (wire.first, wire.second)
            ]
            rate, latency = joined.get((min(ends), max(ends)), (0.0, math.inf))
            joined[min(ends), max(ends)] = rate + wire.link.rate_bytes_per_s, min(latency, wire.link.latency_s)
        self.vertices = devices + len(switches)
        pairs = [pair for first, second in joined for pair in ((first, second), (second, first))]
        figures = [figure for figure in joined.values() for _ in range(2)]
        self.sources: Array = np.array([first for first, _ in pairs], np.int64)
        self.targets: Array = np.array([second for _, second in pairs], np.int64)
        self.rates: Array = np.array([rate for rate, _ in figures], np.float64)
        self.latencies_s: Array = np.array([latency for _, latency in figures], np.float64)
        self._lengths: Array = np.round(self.latencies_s * _TICKS_PER_S) * _TICK + 1.0
        self._leaving = self._incidence(self.sources)
        self._reaching = self._incidence(self.targets)
        self.leaving = tuple(tuple(np.flatnonzero(self.sources == vertex).tolist()) for vertex in range(self.vertices))
        self._into: list[Array] = [np.flatnonzero(self.targets == vertex) for vertex in range(self.vertices)]
        self._widths: Array = self._find_widths()
        self._distances: dict[float, Array] = {}
        self._routes: dict[tuple[int, int, WayChoice], Route] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routes) and (self.devices, self.wires) == (other.devices, other.wires)

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_forest(self) -> bool:
        """Whether there is one way at most between any two devices."""
        return len(self.rates) // 2 < self.vertices

    def unreachable(self) -> int | None:
        """The first device that no way joins to device 0."""
        alone = np.flatnonzero(self._widths[0, 1:] == 0)
        return int(alone[0]) + 1 if len(alone) else None

    def width(self, source: int, target: int) -> float:
        """Bytes a second through the narrowest wire of the widest way."""
        return float(self._widths[source, target])

    def link(self, source: int, target: int) -> Link:
        """The widest way as a link: its narrowest wire's bandwidth (efficiency counted in), its whole latency."""
        return Link(self.width(source, target), self.route(source, target, "widest").latency_s)

    def best_link(self, first: int, count: int) -> Link | None:
        """The widest way between two of `count` devices from `first` on, of these the quickest.

        For one device the best way to another; None where there is no other.
        """
        inside = range(first, first + count)
        others = inside if count > 1 else range(self.devices)
        pairs = [(source, target) for source in inside for target in others if source != target]
        if not pairs:
            return None
        widest = max(self.width(*pair) for pair in pairs)
        ways = [pair for pair in pairs if self.width(*pair) == widest]
        return min((self.link(*pair) for pair in ways[:_TRIED]), key=lambda link: link.latency_s)

    def route(self, source: int, target: int, choice: WayChoice) -> Route:
        """The way from one device to another."""
        key = (source, target, choice)
        if key not in self._routes:
            least = self.width(source, target) if choice == "widest" else 0.0
            self._routes[key] = self._trace(source, target, least)
        return self._routes[key]

    def all_pairs(self, groups: Sequence[Sequence[int]], choice: WayChoice) -> tuple[float, Array]:
        """Every device of each group sends one byte to every other one of its group.

        Returns:
          The largest sum of latencies of what one device sends, and the bytes each directed wire carries.
        """
        wanted: Array = np.zeros((self.devices, self.devices), bool)
        for group in groups:
            wanted[np.ix_(group, group)] = True
        np.fill_diagonal(wanted, False)
        least: Array = np.where(wanted, self._widths if choice == "widest" else 0.0, -1.0)
        loads: Array = np.zeros(len(self.rates))
        latencies: Array = np.zeros(self.devices)
        for level in np.unique(least[wanted]):
            asked = least == level
            distances = self._distances_at(float(level))
            ticks = np.where(asked, np.floor(distances[:, : self.devices] / _TICK), 0.0)
            latencies += ticks.sum(axis=1) / _TICKS_PER_S
            loads += self._spread(asked, distances, float(level))
        return float(latencies.max()), loads

    def _spread(self, asked: Array, distances: Array, least: float) -> Array:
        """Bytes on each directed wire: what reaches a vertex came over the last wires of its shortest ways."""
        on_way: Array = (distances[:, self.sources] + self._lengths == distances[:, self.targets]) & (
            self.rates >= least
        )
        forks: Array = np.maximum((self._reaching @ on_way.T.astype(float)).T[:, self.targets], 1.0)
        passing: Array = np.zeros((self.devices, self.vertices))
        passing[:, : self.devices] = asked
        hops: Array = np.where(np.isfinite(distances), distances, 0.0) % _TICK
        loads: Array = np.zeros(len(self.rates))
        for hop in range(int(hops.max()), 0, -1):
            now = on_way & (hops[:, self.targets] == hop)
            carried: Array = np.where(now, passing[:, self.targets] / forks, 0.0)
            passing += (self._leaving @ carried.T).T
            loads += carried.sum(axis=0)
        return loads

    def _trace(self, source: int, target: int, least: float) -> Route:
        distance = self._distances_at(least)[source]
        shares: dict[int, float] = {}
        front = {target: 1.0}
        while front:
            vertex = max(front, key=lambda each: float(distance[each]))
            share = front.pop(vertex)
            if vertex == source:
                continue
            into = self._into[vertex]
            good = into[
                (distance[self.sources[into]] + self._lengths[into] == distance[vertex]) & (self.rates[into] >= least)
            ]
            for wire in good.tolist():
                shares[wire] = shares.get(wire, 0.0) + share / len(good)
                before = int(self.sources[wire])
                front[before] = front.get(before, 0.0) + share / len(good)
        return Route(self._latency_s(target, source, shares), tuple(shares.items()))

    def _latency_s(self, target: int, source: int, shares: Mapping[int, float]) -> float:
        latency, vertex = 0.0, target
        while vertex != source:
            wire = next(wire for wire in self._into[vertex].tolist() if wire in shares)
            latency += float(self.latencies_s[wire])
            vertex = int(self.sources[wire])
        return latency

    def _incidence(self, ends: Array) -> Any:
        """Vertices times wires: 1 where a wire ends."""
        wires = np.arange(len(ends))
        return csr_array((np.ones(len(ends)), (ends, wires)), (self.vertices, len(ends)))

    def _distances_at(self, least: float) -> Array:
        """Lengths from every device (row) to every vertex over wires of at least a bandwidth."""
        if least not in self._distances:
            used = self.rates >= least
            graph = csr_array(
                (self._lengths[used], (self.sources[used], self.targets[used])), (self.vertices, self.vertices)
            )
            self._distances[least] = cast("Array", dijkstra(graph, indices=np.arange(self.devices)))
        return self._distances[least]

    def _find_widths(self) -> Array:
        """For every pair of devices the bandwidth at which a maximum spanning forest first joins them (Kruskal)."""
        widths: Array = np.zeros((self.devices, self.devices))
        np.fill_diagonal(widths, math.inf)
        home = list(range(self.vertices))
        members = {vertex: [vertex] for vertex in home}
        for wire in np.argsort(-self.rates[::2], kind="stable").tolist():
            kept, moved = home[int(self.sources[2 * wire])], home[int(self.targets[2 * wire])]
            if kept == moved:
                continue
            if len(members[kept]) < len(members[moved]):
                kept, moved = moved, kept
            one, two = ([each for each in members[side] if each < self.devices] for side in (kept, moved))
            widths[np.ix_(one, two)] = widths[np.ix_(two, one)] = self.rates[2 * wire]
            for vertex in members[moved]:
                home[vertex] = kept
            members[kept] += members.pop(moved)
        return widths


def loads_of(flows: Iterable[tuple[Route, float]]) -> Mapping[int, float]:
    """What each directed wire carries of messages that go at the same time."""
    loads: dict[int, float] = defaultdict(float)
    for route, nbytes in flows:
        for wire, share in route.shares:
            loads[wire] += share * nbytes
    return loads
