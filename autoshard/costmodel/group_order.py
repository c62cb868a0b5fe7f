"""Orders and clusters of the devices of a group, from the wires that join them.

The distance of two devices is the time a byte holds wires on its way, the sum of 1/bandwidth (and a thousandth of the
latency, to decide between equals). Short rings leave bandwidth to others: the order is found by nearest neighbour and
2-opt (Croes, "A method for solving traveling-salesman problems", 1958). Clusters are those of single linkage, which
cuts where bytes take longest: a cheap stand-in for the recursive minimum cuts of SPP (Luo et al., INFOCOM 2022).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from autoshard.cluster import Routes

Array = np.ndarray[Any, np.dtype[Any]]
Group = tuple[int, ...]

SMALL_GRAPH = 300
"""Vertices up to which all distances are computed; above, only linkage over the wires."""

_PASSES = 8
_LEVELS = 4
"""Partitions of a group that are tried at most."""


def ring_order(routes: Routes, group: Group) -> Group:
    """An order in which neighbours are near each other, the last and the first too."""
    if len(group) <= 3:
        return group
    if routes.vertices > SMALL_GRAPH:
        return _linkage(routes, group)[0]
    distances = _distances(routes)[np.ix_(group, group)]
    place = {device: k for k, device in enumerate(group)}
    starts = [list(range(len(group))), _nearest(distances), [place[device] for device in _linkage(routes, group)[0]]]
    best = min(starts, key=lambda order: _length(distances, order))
    return tuple(group[k] for k in _two_opt(distances, best))


def partitions(routes: Routes, groups: Sequence[Group]) -> tuple[tuple[tuple[Group, ...], ...], ...]:
    """Ways to cut every group into clusters of one size, finest first; members keep their order in the group.

    Returns:
      Partitions; of each, for every group its clusters.
    """
    linked = [_linkage(routes, group) for group in groups]
    found: list[tuple[tuple[Group, ...], ...]] = []
    for height in sorted({gap for _, gaps in linked for gap in gaps}):
        cut = tuple(_cut(group, order, gaps, height) for group, (order, gaps) in zip(groups, linked, strict=True))
        sizes = {len(cluster) for clusters in cut for cluster in clusters}
        if len(sizes) == 1 and 1 < min(sizes) < len(groups[0]) and cut not in found:
            found.append(cut)
    return tuple(found[:_LEVELS])


def _cut(group: Group, order: Group, gaps: Sequence[float], height: float) -> tuple[Group, ...]:
    place = {device: k for k, device in enumerate(group)}
    clusters = [[order[0]]]
    for device, gap in zip(order[1:], gaps, strict=True):
        if gap > height:
            clusters.append([])
        clusters[-1].append(device)
    ordered = [tuple(sorted(cluster, key=place.__getitem__)) for cluster in clusters]
    return tuple(sorted(ordered, key=lambda cluster: place[cluster[0]]))


@functools.lru_cache(maxsize=16)
def _distances(routes: Routes) -> Array:
    """Between all vertices (Floyd and Warshall), in units of the slowest wire's time for a byte."""
    slowest = float(routes.rates.min())
    latency = float(routes.latencies_s.max())
    distances: Array = np.full((routes.vertices, routes.vertices), math.inf)
    np.fill_diagonal(distances, 0.0)
    lengths = slowest / routes.rates + (1e-3 * routes.latencies_s / latency if latency > 0 else 0.0)
    distances[routes.sources, routes.targets] = lengths
    for vertex in range(routes.vertices):
        distances = np.minimum(distances, distances[:, vertex, None] + distances[None, vertex])
    return np.round(distances, 9)


@functools.lru_cache(maxsize=4096)
def _linkage(routes: Routes, group: Group) -> tuple[Group, tuple[float, ...]]:
    """Single linkage: an order in which clusters are together, and between neighbours the distance that joins them."""
    if routes.vertices <= SMALL_GRAPH:
        distances = _distances(routes)[np.ix_(group, group)]
        rows, columns = np.triu_indices(len(group), 1)
        order, gaps = _merge(len(group), rows, columns, distances[rows, columns])
        return tuple(group[k] for k in order), gaps
    order, gaps = _linked_wires(routes)
    members = set(group)
    places = [k for k, vertex in enumerate(order) if vertex in members]
    return tuple(order[k] for k in places), tuple(max(gaps[a:b]) for a, b in pairwise(places))


@functools.lru_cache(maxsize=16)
def _linked_wires(routes: Routes) -> tuple[Group, tuple[float, ...]]:
    return _merge(routes.vertices, routes.sources[::2], routes.targets[::2], 1.0 / routes.rates[::2])


def _merge(count: int, rows: Array, columns: Array, heights: Array) -> tuple[Group, tuple[float, ...]]:
    home = list(range(count))
    runs: dict[int, list[int]] = {k: [k] for k in range(count)}
    gaps: dict[int, list[float]] = {k: [] for k in range(count)}
    for edge in np.argsort(heights, kind="stable").tolist():
        kept, moved = sorted((home[int(rows[edge])], home[int(columns[edge])]))
        if kept == moved:
            continue
        for each in runs[moved]:
            home[each] = kept
        runs[kept] += runs.pop(moved)
        gaps[kept] += [float(heights[edge]), *gaps.pop(moved)]
    assert len(runs) == 1, "the wires join all devices"
    return tuple(runs[0]), tuple(gaps[0])


def _nearest(distances: Array) -> list[int]:
    order = [0]
    left: Array = np.ones(len(distances), bool)
    left[0] = False
    while left.any():
        order.append(int(np.argmin(np.where(left, distances[order[-1]], math.inf))))
        left[order[-1]] = False
    return order


def _length(distances: Array, order: Sequence[int]) -> float:
    return float(distances[np.array(order), np.roll(np.array(order), -1)].sum())


def _two_opt(distances: Array, order: Sequence[int]) -> list[int]:
    """Turns parts of the ring round as long as that shortens it."""
    ring: Array = np.array(order)
    count = len(ring)
    for _ in range(_PASSES):
        better = False
        for i in range(count - 2):
            after = np.roll(ring, -1)
            j = np.arange(i + 2, count if i else count - 1)
            if not len(j):
                continue
            gain = (
                distances[ring[i], after[i]]
                + distances[ring[j], after[j]]
                - distances[ring[i], ring[j]]
                - distances[after[i], after[j]]
            )
            best = int(np.argmax(gain))
            if gain[best] > 1e-9:
                ring[i + 1 : int(j[best]) + 1] = ring[i + 1 : int(j[best]) + 1][::-1].copy()
                better = True
        if not better:
            break
    return [int(k) for k in ring]
