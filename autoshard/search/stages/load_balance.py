"""Splits of a graph over devices by the largest load (Tarnawski et al., NeurIPS 2020): throughput of a full pipeline.

    load of a device    seconds of its nodes + cost of each node whose result leaves the device, once,
                        + cost of each node of another device whose result enters it, once
    load of a slow one  its seconds for its nodes (a host with all data at hand)

Nodes of one group stay together (a backward node with its forward node), and so do groups that need each other. Two
searches:

    contiguous   the optimum over stages that are differences of ideals I (sets of forward groups that hold with each
                 group all it needs):   L(I, d) = min over J in I of max{ L(J, d-1), load(I minus J) }
    local        any split: from a start, groups move off the most loaded device while the sorted loads get less, with
                 random kicks; it finds better splits that are not contiguous
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from autoshard.errors import ArgumentError, explain

MOST_IDEALS = 20_000
"""The search takes time and memory by their square; the published layer graphs have up to some thousands."""


@final
@dataclass(frozen=True, slots=True)
class LoadNode:
    """A node of the graph.

    Attributes:
      seconds: on a device; slow_seconds: on a slow one.
      nbytes: memory it takes.
      send_s: seconds to send its result, or to receive it.
      group: nodes of one group stay together.
      backward: whether it is of the backward pass, and sets no order.
    """

    seconds: float
    slow_seconds: float
    nbytes: float
    send_s: float
    group: int
    backward: bool = False


@final
@dataclass(frozen=True, slots=True)
class LoadProblem:
    """A graph to split.

    Attributes:
      nodes: of the graph.
      edges: pairs of nodes.
      devices: number of them; slow_devices: of slow ones.
      memory_bytes: of each device; slow ones have no limit.

    Raises:
      ArgumentError: no nodes or devices, or an edge of a node that is none.
    """

    nodes: tuple[LoadNode, ...]
    edges: tuple[tuple[int, int], ...]
    devices: int
    slow_devices: int = 0
    memory_bytes: float = float("inf")

    def __post_init__(self) -> None:
        size = len(self.nodes)
        if not size or min(self.devices, self.slow_devices) < 0 or self.devices + self.slow_devices < 1:
            given = f"{size} nodes on {self.devices} devices and {self.slow_devices} slow ones"
            raise ArgumentError(explain(given, "at least one of each", "add one"))
        for edge in self.edges:
            if not all(0 <= end < size for end in edge):
                raise ArgumentError(explain(f"edge {edge}", f"two of nodes 0 to {size - 1}", "correct it"))


@final
@dataclass(frozen=True, slots=True)
class Split:
    """A split.

    Attributes:
      device: of each node; slow devices come after the others.
      load_s: largest load.
    """

    device: tuple[int, ...]
    load_s: float


def loads_s(problem: LoadProblem, device: Sequence[int]) -> list[float]:
    """The load in seconds of each device under a split, slow devices last.

    Raises:
      ArgumentError: a split that is none of the graph over these devices.
    """
    _check_split(problem, device)
    load = [0.0] * (problem.devices + problem.slow_devices)
    for node, d in zip(problem.nodes, device, strict=True):
        load[d] += node.seconds if d < problem.devices else node.slow_seconds
    for k, users in enumerate(_users(problem)):
        others = {device[u] for u in users} - {device[k]}
        for d in (others | {device[k]}) if others else ():
            if d < problem.devices:
                load[d] += problem.nodes[k].send_s
    return load


def _check_split(problem: LoadProblem, device: Sequence[int]) -> None:
    count = problem.devices + problem.slow_devices
    if len(device) != len(problem.nodes) or not all(0 <= d < count for d in device):
        given = f"a split of {len(device)} nodes over devices {sorted(set(device))}"
        raise ArgumentError(explain(given, f"{len(problem.nodes)} nodes, devices 0 to {count - 1}", "correct it"))


def split_contiguous(problem: LoadProblem) -> Split:
    """The contiguous split of least largest load.

    Raises:
      ArgumentError: there are too many ideals, or memory is too small.
    """
    classes = _Classes(problem)
    ideals = classes.ideals()
    best, came = _least(problem, classes, ideals)
    row, fast, slow = len(ideals) - 1, problem.devices, problem.slow_devices
    if not np.isfinite(best[fast, slow, row]):
        raise ArgumentError(explain("no split fits into memory", "devices that hold the graph", "use more devices"))
    device = [0] * len(problem.nodes)
    while row:
        below, on_slow = (int(x) for x in came[fast, slow, row])
        slow, fast = slow - on_slow, fast - (1 - on_slow)
        for c in np.flatnonzero(ideals[row] & ~ideals[below]):
            for k in classes.members[int(c)]:
                device[k] = problem.devices + slow if on_slow else fast
        row = below
    return Split(tuple(device), max(loads_s(problem, device)))


def _least(
    problem: LoadProblem, classes: _Classes, ideals: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """L(I, d) for each number of devices and slow ones; the best J for each, and whether the rest is on a slow one."""
    count = len(ideals)
    seconds, slow, nbytes = (ideals @ column for column in (classes.seconds, classes.slow, classes.nbytes))
    inside = ideals.astype(np.int16) @ classes.touches.T.astype(np.int16)  # (ideal, result): its groups in the ideal
    size = classes.touches.sum(axis=1).astype(np.int16)
    packed = np.packbits(ideals, axis=1)
    shape = (problem.devices + 1, problem.slow_devices + 1, count)
    best, came = np.full(shape, np.inf), np.zeros((*shape, 2), np.int64)
    best[:, :, 0] = 0.0
    for i in range(1, count):
        below = np.flatnonzero(~np.any(packed & ~packed[i], axis=1))
        gap = inside[i] - inside[below]
        cut = ((gap > 0) & (gap < size)) @ classes.send_s
        load = seconds[i] - seconds[below] + cut
        load[nbytes[i] - nbytes[below] > problem.memory_bytes] = np.inf
        host = slow[i] - slow[below]
        for f, s in np.ndindex(shape[:2]):
            for on_slow, (before_f, before_s), more in ((0, (f - 1, s), load), (1, (f, s - 1), host)):
                if before_f >= 0 and before_s >= 0:
                    value = np.maximum(best[before_f, before_s, below], more)
                    at = int(value.argmin())
                    if value[at] < best[f, s, i]:
                        best[f, s, i], came[f, s, i] = value[at], (below[at], on_slow)
    return best, came


@final
class _Classes:
    """Groups as columns: costs, members, the forward order, and which groups each result touches."""

    __slots__ = ("members", "nbytes", "order", "seconds", "send_s", "slow", "touches")

    def __init__(self, problem: LoadProblem) -> None:
        of, self.order = _joined_groups(problem)
        count = len(self.order)
        self.members: list[list[int]] = [[] for _ in range(count)]
        for k, c in enumerate(of):
            self.members[c].append(k)
        self.seconds, self.slow, self.nbytes = (
            np.bincount(of, weights=column, minlength=count)
            for column in (
                [node.seconds for node in problem.nodes],
                [node.slow_seconds for node in problem.nodes],
                [node.nbytes for node in problem.nodes],
            )
        )
        results: dict[frozenset[int], float] = {}
        for k, users in enumerate(_users(problem)):
            groups = frozenset((of[k], *(of[u] for u in users)))
            if len(groups) > 1:
                results[groups] = results.get(groups, 0.0) + problem.nodes[k].send_s
        self.send_s = np.array(list(results.values()), np.float64)
        self.touches = np.zeros((len(results), count), bool)
        for r, groups in enumerate(results):
            self.touches[r, list(groups)] = True

    def ideals(self) -> NDArray[np.bool_]:
        """All of them, a row each, from the empty to the whole."""
        needs = [sum(1 << c for c in self.order.predecessors(k)) for k in range(len(self.members))]
        found = {0}
        todo = [0]
        while todo:
            ideal = todo.pop()
            if len(found) > MOST_IDEALS:
                given = f"a graph with more than {MOST_IDEALS} ideals"
                raise ArgumentError(explain(given, "fewer", "join its nodes, or use split_local"))
            for k, need in enumerate(needs):
                larger = ideal | 1 << k
                if larger not in found and not need & ~ideal:
                    found.add(larger)
                    todo.append(larger)
        rows = sorted(found, key=lambda ideal: (ideal.bit_count(), ideal))
        return np.array([[ideal >> k & 1 for k in range(len(needs))] for ideal in rows], bool)


def _joined_groups(problem: LoadProblem) -> tuple[list[int], nx.DiGraph[int]]:
    """The column of each node, and the order of the columns; groups that need each other in a circle are one column.

    Forward edges set the order; for groups without a forward node the backward edges do, reversed.
    """
    of = [node.group for node in problem.nodes]
    forward = {node.group for node in problem.nodes if not node.backward}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(sorted(set(of)))
    for a, b in problem.edges:
        both = problem.nodes[a].backward, problem.nodes[b].backward
        if both == (False, False):
            graph.add_edge(of[a], of[b])
        elif both == (True, True) and not {of[a], of[b]} <= forward:
            graph.add_edge(of[b], of[a])
    parts = [sorted(part) for part in nx.strongly_connected_components(graph)]
    column = {group: c for c, part in enumerate(sorted(parts)) for group in part}
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(parts)))
    order.add_edges_from((column[a], column[b]) for a, b in graph.edges if column[a] != column[b])
    return [column[group] for group in of], order


def _users(problem: LoadProblem) -> list[set[int]]:
    users: list[set[int]] = [set() for _ in problem.nodes]
    for a, b in problem.edges:
        users[a].add(b)
    return users


def split_local(problem: LoadProblem, start: Split, *, seed: int = 0, kicks: int = 200) -> Split:
    """A split of any form, no worse than the start: less too much memory, or as much and a smaller largest load.

    Args:
      problem: the graph.
      start: where to begin, for instance `split_contiguous`.
      seed: of the kicks.
      kicks: how often some groups are moved at random and improved again.

    Raises:
      ArgumentError: a start that is no split of the graph, or separates nodes that stay together.
    """
    draw = random.Random(seed)
    _check_split(problem, start.device)
    search = _Local(problem, start.device)
    if search.devices() != list(start.device):
        given = "a start that separates nodes of a group, or groups that need each other"
        raise ArgumentError(explain(given, "such nodes on one device", "start from split_contiguous"))
    first = search.value()
    best = search.descend()
    kept = list(search.place)
    for _ in range(kicks):
        search.put(kept)
        for _ in range(draw.randrange(2, 6)):
            search.move(draw.randrange(len(kept)), draw.randrange(problem.devices + problem.slow_devices))
        found = search.descend()
        if found <= best:
            best, kept = found, list(search.place)
    search.put(kept)
    device = search.devices()
    return Split(tuple(device), max(loads_s(problem, device))) if best[:2] < first[:2] else start


@final
class _Local:
    """Loads kept up to date under moves of groups."""

    __slots__ = ("classes", "count", "load", "nbytes", "near", "place", "problem", "unit_s", "users")

    def __init__(self, problem: LoadProblem, device: Sequence[int]) -> None:
        self.problem, self.classes = problem, _Classes(problem)
        groups = len(self.classes.members)
        self.count = problem.devices + problem.slow_devices
        self.users = [tuple(np.flatnonzero(row).tolist()) for row in self.classes.touches]
        self.near: list[list[int]] = [[] for _ in range(groups)]
        for r, groups_of in enumerate(self.users):
            for c in groups_of:
                self.near[c].append(r)
        self.place = [device[members[0]] for members in self.classes.members]
        self.load: list[float] = []
        self.nbytes: list[float] = []
        self.put(self.place)
        self.unit_s = 1e-9 * sum(node.seconds + node.slow_seconds for node in problem.nodes) or 1.0

    def devices(self) -> list[int]:
        """The device of each node."""
        device = [0] * len(self.problem.nodes)
        for c, members in enumerate(self.classes.members):
            for k in members:
                device[k] = self.place[c]
        return device

    def put(self, place: Sequence[int]) -> None:
        """Another split."""
        self.place = list(place)
        self.load, self.nbytes = [0.0] * self.count, [0.0] * self.count
        for c, d in enumerate(place):
            self._own(c, d, 1.0)
        for r in range(len(self.users)):
            self._cut(r, 1.0)

    def _own(self, c: int, d: int, sign: float) -> None:
        fast = d < self.problem.devices
        self.load[d] += sign * float((self.classes.seconds if fast else self.classes.slow)[c])
        self.nbytes[d] += sign * float(self.classes.nbytes[c])

    def _cut(self, r: int, sign: float) -> None:
        """What a result adds to the loads of the devices it touches."""
        touched = {self.place[c] for c in self.users[r]}
        if len(touched) > 1:
            for d in touched:
                if d < self.problem.devices:
                    self.load[d] += sign * float(self.classes.send_s[r])

    def move(self, c: int, d: int) -> None:
        """A group to a device."""
        for r in self.near[c]:
            self._cut(r, -1.0)
        self._own(c, self.place[c], -1.0)
        self.place[c] = d
        self._own(c, d, 1.0)
        for r in self.near[c]:
            self._cut(r, 1.0)

    def value(self) -> tuple[float, ...]:
        """Memory too much, then loads from the largest on, in units that hide the error of sums kept up to date."""
        limit = self.problem.memory_bytes
        over = sum(max(0.0, n - limit) for n in self.nbytes[: self.problem.devices])
        return (over, *sorted((round(x / self.unit_s) for x in self.load), reverse=True))

    def descend(self) -> tuple[float, ...]:
        """Moves groups off the most loaded device while that makes the value less."""
        value = self.value()
        better = True
        while better:
            better = False
            worst = max(range(self.count), key=lambda d: self.load[d])
            for c in [c for c, d in enumerate(self.place) if d == worst]:
                for d in range(self.count):
                    if d == worst:
                        continue
                    self.move(c, d)
                    found = self.value()
                    if found < value:
                        value, better = found, True
                        break
                    self.move(c, worst)
                if better:
                    break
        return value
