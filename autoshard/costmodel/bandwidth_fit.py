"""Links of a cluster, fitted to a table of bus bandwidths of all-reduces over groups of different shapes.

A row is what nccl-tests, and with it Galvatron's hardware profiler, report for one group while the others rest: the
mean over some buffer sizes N of the bus bandwidth 2 (n-1)/n N / time. The n devices of a group are neighbours, or
strided: one device in every (all / n). What a row says of the cluster goes through `axis_group` and
`collective_time_s`:

    neighbours, in a node        link in the node
    over nodes, m in each        network, times a share that depends on m (`Link.efficiency_by_members`)

The share stands for what the closed forms do not know, e.g. that a library runs one ring where level by level would be
faster. The network's rate is each device's own: a group with one member in a node shows it. As groups run alone, such
a table cannot tell how much a node's devices reach together; that needs all groups at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from autoshard.cluster import DEVICE_PRESETS, Cluster, DeviceSpec, GroupLinks, Level, Link, Node, axis_group
from autoshard.costmodel.collectives import collective_time_s
from autoshard.costmodel.least_squares import FitError, Vector, check_measured, fit_error, fit_relative
from autoshard.costmodel.protocol_fit import TOLERANCE
from autoshard.errors import ArgumentError, explain

_ANY_DEVICE = DEVICE_PRESETS["a100"].device
"""Groups are made of links only; the device of a cluster that serves to find them does not matter."""

_INSIDE, _BETWEEN = Link(2.0, 0.0), Link(1.0, 0.0)
"""Marks for the link in a node and the network."""


@final
@dataclass(frozen=True, slots=True)
class GroupBandwidth:
    """One measurement.

    Attributes:
      nodes: of the cluster.
      devices_per_node: in each.
      size: devices of the group.
      strided: one device in every (all / size), else neighbours.
      bus_bytes_per_s: 2 (n-1)/n N / time of an all-reduce, a mean over sizes.

    Raises:
      ArgumentError: the groups do not divide the devices, or have one member.
    """

    nodes: int
    devices_per_node: int
    size: int
    strided: bool
    bus_bytes_per_s: float

    def __post_init__(self) -> None:
        total = self.nodes * self.devices_per_node
        if self.size < 2 or total < 1 or total % self.size:
            raise ArgumentError(
                explain(
                    f"groups of {self.size} of {self.nodes} nodes of {self.devices_per_node}",
                    "two members or more, and groups that divide the devices",
                    "correct the row",
                )
            )

    @property
    def members(self) -> int:
        """Members of the first group in its first node."""
        step = self.nodes * self.devices_per_node // self.size if self.strided else 1
        return sum(device < self.devices_per_node for device in range(0, self.size * step, step))

    def group(self, cluster: Cluster) -> GroupLinks:
        """Links of the group in a cluster of this row's shape."""
        groups = cluster.size // self.size
        mesh = (("group", self.size), ("rest", groups)) if self.strided else (("rest", groups), ("group", self.size))
        return axis_group(cluster, mesh, ("group",))


@final
@dataclass(frozen=True, slots=True)
class BandwidthFit:
    """The fitted links; see the module.

    Attributes:
      link: in a node.
      network: between nodes, None where no group spans nodes; each device's own.
      sizes: bytes of the buffers that a bandwidth is the mean over.
      error: on the fitted rows.
    """

    link: Link
    network: Link | None
    sizes: tuple[float, ...]
    error: FitError

    @property
    def parameters(self) -> int:
        """How many figures were fitted: rates and shares."""
        return 1 + (0 if self.network is None else 1 + len(self.network.efficiency_by_members))

    def cluster(self, name: str, device: DeviceSpec, nodes: int, devices_per_node: int) -> Cluster:
        """A cluster of these links: `axis_group` and `collective_time_s` give the fitted figures again.

        Raises:
          ClusterError: several nodes, and no network was fitted.
        """
        return Cluster(name, (Node(device, devices_per_node, self.link),) * nodes, self.network)

    def bus_bytes_per_s(self, row: GroupBandwidth) -> float:
        """Predicted bus bandwidth of a row's group."""
        group = row.group(self.cluster("fitted", _ANY_DEVICE, row.nodes, row.devices_per_node))
        return _bus_bytes_per_s(group, self.sizes)

    def error_on(self, rows: Sequence[GroupBandwidth]) -> FitError:
        """The error on other rows.

        Raises:
          ArgumentError: no rows, or a bandwidth that is not above 0.
          ClusterError: a row spans nodes, and no network was fitted.
        """
        check_measured("bandwidth", [r.bus_bytes_per_s for r in rows], 0)
        return fit_error([self.bus_bytes_per_s(r) for r in rows], [r.bus_bytes_per_s for r in rows])


@final
@dataclass(frozen=True, slots=True)
class BandwidthOptions:
    """Options of `fit_bandwidths`.

    Attributes:
      sizes: bytes of the buffers that each bandwidth is the mean over. Without latencies they do not matter.
      latency_s: of a step in a node; not fitted, as a mean bandwidth does not show it.
      network_latency_s: of a step between nodes.
      tolerance: worst relative error at which no further share is added.
    """

    sizes: tuple[float, ...] = (float(2**26),)
    latency_s: float = 0.0
    network_latency_s: float = 0.0
    tolerance: float = TOLERANCE


def fit_bandwidths(rows: Sequence[GroupBandwidth], options: BandwidthOptions | None = None) -> BandwidthFit:
    """Fits the link in a node and, where groups span nodes, the network and as few shares as meet the table.

    Args:
      rows: of clusters whose nodes are alike; more than parameters. One at least has its group in one node.
      options: sizes, latencies, tolerance.

    Returns:
      The first fit within the tolerance, else the best found.

    Raises:
      ArgumentError: too few rows, none in one node, or a bandwidth that is not above 0.
    """
    options = options or BandwidthOptions()
    measured = [r.bus_bytes_per_s for r in rows]
    spread = [r for r in rows if r.members < r.size]
    check_measured("bandwidth", measured, 2 if spread else 1)
    inside = [r.bus_bytes_per_s for r in rows if r.members == r.size]
    if not inside:
        raise ArgumentError(
            explain("no group that lies in one node", "one at least", "measure neighbours in a node as well")
        )
    if not spread:
        return _fit(rows, [inside[0]], (), options)
    members = sorted({r.members for r in spread})
    network = max(r.bus_bytes_per_s / r.members for r in spread)
    best = _fit(rows, [inside[0], network], (), options)
    while best.error.worst > options.tolerance and len(rows) > best.parameters + 1:
        assert best.network is not None, "groups that span nodes were given"
        known = tuple(count for count, _ in best.network.efficiency_by_members)
        # A share from the fewest members on is the network's rate itself.
        trials = [tuple(sorted({*known, count})) for count in members[1:] if count not in known]
        fits = [_fit(rows, [inside[0], network, *(0.7,) * len(trial)], trial, options) for trial in trials]
        better = min(fits, key=lambda fit: fit.error.worst, default=best)
        if better.error.worst >= best.error.worst:
            break
        best = better
    return best


def _fit(
    rows: Sequence[GroupBandwidth], start: Sequence[float], counts: tuple[int, ...], options: BandwidthOptions
) -> BandwidthFit:
    """One descent from the link's rate, the network's rate, and a share for each count of members."""
    measured = [r.bus_bytes_per_s for r in rows]
    # Which link a level is does not depend on the figures: found once, as finding groups is slow.
    shapes = [
        r.group(Cluster("shape", (Node(_ANY_DEVICE, r.devices_per_node, _INSIDE),) * r.nodes, _BETWEEN)) for r in rows
    ]

    def build(figures: Vector) -> BandwidthFit:
        shares = tuple((m, min(1.0, float(share))) for m, share in zip(counts, figures[2:], strict=True))
        network = Link(float(figures[1]), options.network_latency_s, 1.0, shares) if len(figures) > 1 else None
        return BandwidthFit(Link(float(figures[0]), options.latency_s), network, options.sizes, FitError(0.0, 0.0, 0))

    def predict(figures: Vector) -> Vector:
        fit = build(figures)
        groups = [_with_links(shape, r.members, fit) for shape, r in zip(shapes, rows, strict=True)]
        return np.array([_bus_bytes_per_s(group, fit.sizes) for group in groups], dtype=np.float64)

    fit = build(fit_relative(predict, start, measured, "worst"))
    return dataclasses.replace(fit, error=fit.error_on(rows))


def _with_links(shape: GroupLinks, members: int, fit: BandwidthFit) -> GroupLinks:
    """A group of the fitted links in place of the marks, as `axis_group` makes it."""
    levels: list[Level] = []
    for level in shape.levels:
        if level.link == _INSIDE:
            levels.append(Level(level.size, fit.link))
        else:
            assert fit.network is not None, "a group that spans nodes is fitted with a network"
            levels.append(Level(level.size, fit.network, fit.network.share_of_members(members)))
    return GroupLinks(shape.size, tuple(levels))


def _bus_bytes_per_s(group: GroupLinks, sizes: Sequence[float]) -> float:
    """Mean over sizes N of 2 (n-1)/n N / time."""
    factor = 2 * (group.size - 1) / group.size
    return float(np.mean([factor * n / collective_time_s("all_reduce", n, group) for n in sizes]))
