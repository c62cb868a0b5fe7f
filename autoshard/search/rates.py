"""What collectives and reshardings cost on one mesh of one cluster, remembered for all steps that are planned there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np

from autoshard.cluster import Cluster, axis_group
from autoshard.costmodel import CollectiveKind, collective_time_s, path_collectives, reshard_path
from autoshard.ir import MeshShape, Spec, Value
from autoshard.search.problem import Floats

Kind = tuple[tuple[int, ...], int]
"""Values that cost the same to move: shape, bytes of an element."""


@final
@dataclass(frozen=True, slots=True)
class Traffic:
    """One collective.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
      nbytes: bytes of the whole buffer of one group, as the compiled program states it.
      axes: mesh axes it runs over.
    """

    kind: CollectiveKind
    nbytes: int
    axes: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Route:
    """A resharding.

    Attributes:
      path: the specs to go through, the target last.
      steps: the collectives of each step.
      time_s: seconds of all of them.
    """

    path: tuple[Spec, ...]
    steps: tuple[tuple[Traffic, ...], ...]
    time_s: float

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """All collectives."""
        return tuple(traffic for step in self.steps for traffic in step)


HERE = Route((), (), 0.0)


@final
class Rates:
    """Seconds of collectives and reshardings on one mesh of one cluster."""

    def __init__(self, cluster: Cluster, mesh: MeshShape) -> None:
        self._cluster, self._mesh = cluster, mesh
        self._device = cluster.device(0)
        self._groups: dict[tuple[str, ...], Any] = {}
        self._times: dict[Traffic, float] = {}
        self._steps: dict[Kind, dict[tuple[Spec, Spec], float]] = {}
        self._paths: dict[Kind, dict[tuple[Spec, Spec], tuple[Spec, ...]]] = {}
        self._routes: dict[tuple[Kind, Spec, Spec], Route] = {}
        self._tables: dict[tuple[Kind, tuple[Spec, ...], tuple[Spec, ...]], Floats] = {}

    def traffic_s(self, traffic: Traffic) -> float:
        """Seconds of one collective."""
        if traffic not in self._times:
            if traffic.axes not in self._groups:
                self._groups[traffic.axes] = axis_group(self._cluster, self._mesh, traffic.axes)
            seconds = collective_time_s(traffic.kind, traffic.nbytes, self._groups[traffic.axes])
            share = self._device.share((traffic.kind,), traffic.nbytes) or 1.0
            self._times[traffic] = seconds / share + self._device.collective_launch_s
        return self._times[traffic]

    def route(self, value: Value, source: Spec, target: Spec) -> Route:
        """How a value gets from one spec to another, and what that costs."""
        if source == target:
            return HERE
        kind = _kind_of(value)
        key = kind, source, target
        if key not in self._routes:
            path = self._path(kind, source, target)
            stops = zip((source, *path), path, strict=False)
            steps = tuple(self._collectives(kind, a, b) for a, b in stops)
            self._routes[key] = Route(path, steps, sum(self.traffic_s(t) for step in steps for t in step))
        return self._routes[key]

    def table(self, value: Value, sources: Sequence[Spec], targets: Sequence[Spec]) -> Floats:
        """Seconds from each of the sources to each of the targets, shape (sources, targets)."""
        key = _kind_of(value), tuple(sources), tuple(targets)
        if key not in self._tables:
            rows = [[self._route_s(key[0], s, t) for t in targets] for s in sources]
            self._tables[key] = np.array(rows, float).reshape(len(sources), len(targets))
        return self._tables[key]

    def _route_s(self, kind: Kind, source: Spec, target: Spec) -> float:
        if source == target:
            return 0.0
        known = self._steps.setdefault(kind, {})
        total, at = 0.0, source
        for stop in self._path(kind, source, target):
            if (at, stop) not in known:
                known[at, stop] = sum(self.traffic_s(t) for t in self._collectives(kind, at, stop))
            total, at = total + known[at, stop], stop
        return total

    def _path(self, kind: Kind, source: Spec, target: Spec) -> tuple[Spec, ...]:
        paths = self._paths.setdefault(kind, {})
        if (source, target) not in paths:
            shape, item = kind
            paths[source, target] = reshard_path(
                shape,
                source,
                target,
                self._mesh,
                lambda name, elements, axes: self.traffic_s(Traffic(name, elements * item, axes)),
                self._steps.setdefault(kind, {}),
            )
        return paths[source, target]

    def _collectives(self, kind: Kind, source: Spec, target: Spec) -> tuple[Traffic, ...]:
        shape, item = kind
        moves = path_collectives(shape, source, (target,), self._mesh)
        return tuple(Traffic(name, elements * item, axes) for name, elements, axes in moves)


def _kind_of(value: Value) -> Kind:
    return value.shape, max(value.nbytes // max(math.prod(value.shape), 1), 1)


@lru_cache(maxsize=48)
def rates(cluster: Cluster, mesh: MeshShape) -> Rates:
    """The rates of a mesh of a cluster, the same object for the last ones asked for."""
    return Rates(cluster, mesh)
