"""What choices and reshardings cost on one mesh of one cluster; every answer is remembered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from autoshard.cluster import Cluster, axis_group
from autoshard.costmodel import (
    CollectiveKind,
    Work,
    collective_time_s,
    equation_work,
    path_collectives,
    reshard_path,
    work_time_s,
)
from autoshard.ir import MeshShape, Spec, Value, axes_size, local_bytes, spec_axes
from autoshard.search.choices import Choice
from autoshard.search.ops import Op, OpKind


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
      traffic: its collectives.
      time_s: seconds of all of them.
    """

    path: tuple[Spec, ...]
    traffic: tuple[Traffic, ...]
    time_s: float


HERE = Route((), (), 0.0)


@final
class Pricer:
    """Costs on one mesh.

    Attributes:
      cluster: the devices and links.
      mesh: axes and sizes.
      sizes: the same as a mapping.
    """

    def __init__(self, cluster: Cluster, mesh: MeshShape, materialized: Callable[[Value], bool]) -> None:
        self.cluster = cluster
        self.mesh = mesh
        self.sizes = dict(mesh)
        self._device = cluster.device(0)
        self._materialized = materialized
        self._routes: dict[Any, Route] = {}
        self._groups: dict[tuple[str, ...], Any] = {}
        self._times: dict[Traffic, float] = {}
        self._work: dict[int, Work] = {}

    def traffic_s(self, traffic: Traffic) -> float:
        """Seconds of one collective."""
        if traffic not in self._times:
            if traffic.axes not in self._groups:
                self._groups[traffic.axes] = axis_group(self.cluster, self.mesh, traffic.axes)
            seconds = collective_time_s(traffic.kind, traffic.nbytes, self._groups[traffic.axes])
            self._times[traffic] = seconds + self._device.collective_launch_s
        return self._times[traffic]

    def times(self) -> dict[Traffic, float]:
        """Seconds of every collective asked for so far."""
        return dict(self._times)

    def reshard(self, value: Value, source: Spec, target: Spec) -> Route:
        """How a value gets from one spec to another, and what that costs."""
        if source == target:
            return HERE
        key = (value.shape, value.dtype, source, target)
        if key not in self._routes:
            item = max(value.nbytes // max(math.prod(value.shape), 1), 1)
            path = reshard_path(
                value.shape,
                source,
                target,
                self.mesh,
                lambda kind, elements, axes: self.traffic_s(Traffic(kind, elements * item, axes)),
            )
            moves = path_collectives(value.shape, source, path, self.mesh)
            traffic = tuple(Traffic(kind, elements * item, axes) for kind, elements, axes in moves)
            self._routes[key] = Route(path, traffic, sum(self.traffic_s(t) for t in traffic))
        return self._routes[key]

    def sums(self, op: Op, choice: Choice) -> tuple[Traffic, ...]:
        """Collectives that combine an op's partial results."""
        if not choice.partial:
            return ()
        found: list[Traffic] = []
        for value, spec in zip(op.results, choice.results, strict=True):
            base = tuple(tuple(a for a in axes if a not in choice.scattered) for axes in spec)
            nbytes = local_bytes(value.aval, base, self.sizes)
            whole = set(choice.scattered) == set(choice.partial)
            kind = "reduce_scatter" if whole and self._device.reduce_scatter else "all_reduce"
            found.append(Traffic(kind, nbytes, choice.partial))
        return tuple(found)

    def compute_s(self, op: Op, choice: Choice) -> float:
        """Seconds of an op's own work on one device, collectives apart."""
        if op.kind is not OpKind.APPLY or op.equation is None:
            return 0.0
        if op.index not in self._work:
            self._work[op.index] = equation_work(op.equation)
        work = self._work[op.index]
        moved = 0.0
        for k, (atom, spec) in enumerate(zip(op.operands, choice.operands, strict=True)):
            if isinstance(atom, Value) and self._materialized(atom):
                moved += work.operand_bytes[k] / axes_size(spec_axes(spec), self.sizes)
        for k, (value, spec) in enumerate(zip(op.results, choice.results, strict=True)):
            if self._materialized(value):
                moved += work.result_bytes[k] / axes_size(spec_axes(spec), self.sizes)
        share = 1.0 / axes_size(choice.split_axes, self.sizes)
        fused = not any(self._materialized(value) for value in op.results)
        return work_time_s(work, share, moved, self._device, fused=fused)
