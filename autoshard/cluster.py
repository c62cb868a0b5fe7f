"""The cluster a plan is made for: nodes of devices, the links in a node, the network between nodes.

Devices are numbered node by node. A mesh is laid over them row-major: the last axis varies fastest, so it stays in a
node as long as it can. The devices that differ only along some mesh axes form a communication group; `axis_group` says
over which links such a group talks:

    cluster h100x16, mesh (data=4, model=4)    model: 4 in a node        data: 2 in each of 2 nodes

Where a cluster lists its wires, these are all that counts: a group then carries the graph and all groups like it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, final

import numpy as np

from autoshard.errors import ClusterError, MeshError, explain
from autoshard.hardware import DEVICE_PRESETS as DEVICE_PRESETS
from autoshard.hardware import (
    ClusterParts,
    default_link,
    detect_nodes,
    read_cluster_file,
    unreachable_text,
    write_cluster_file,
)
from autoshard.hardware import DeviceSpec as DeviceSpec
from autoshard.hardware import GpuTarget as GpuTarget
from autoshard.hardware import Link as Link
from autoshard.hardware import Node as Node
from autoshard.hardware import Routes as Routes
from autoshard.hardware import WayChoice as WayChoice
from autoshard.hardware import Wire as Wire
from autoshard.hardware import loads_of as loads_of

MeshShape = tuple[tuple[str, int], ...]
"""Names and sizes of mesh axes, major first."""


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and what joins them.

    Attributes:
      name: for messages.
      nodes: in the order of the devices.
      network: between nodes; bandwidth per device and direction (each device has its own adapter) unless
        `shared_network`.
      shared_network: True where the network's bandwidth is that of a whole node, shared by its devices.
      wires: between devices and switches, for clusters that links and a network do not describe; then these are not
        looked at for communication.
      routes: the ways over the wires, None where there are none.

    Raises:
      ClusterError: no nodes, several and neither network nor wires, or a device that the wires do not reach.
    """

    name: str
    nodes: tuple[Node, ...]
    network: Link | None = None
    shared_network: bool = False
    wires: tuple[Wire, ...] = ()
    routes: Routes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ClusterError(explain(f"cluster {self.name!r} has no nodes", "at least one", "add a node"))
        if self.wires:
            self._find_routes()
        if len(self.nodes) > 1 and self.network is None and not self.wires:
            raise ClusterError(
                explain(
                    f"cluster {self.name!r} has {len(self.nodes)} nodes and no network",
                    "a link between nodes",
                    "give network=Link(bytes_per_s=..., latency_s=...)",
                )
            )

    def _find_routes(self) -> None:
        where = f"cluster {self.name!r}"
        ends = [end for wire in self.wires for end in (wire.first, wire.second) if isinstance(end, int)]
        if ends and max(ends) >= self.size:
            given = f"{where}: a wire ends at device {max(ends)}"
            raise ClusterError(explain(given, f"a device from 0 to {self.size - 1}", "correct the wire"))
        routes = Routes(self.size, self.wires)
        lost = routes.unreachable()
        if lost is not None:
            given, expected, todo = unreachable_text(self.wires, lost)
            raise ClusterError(explain(f"{where}: {given}", expected, todo))
        object.__setattr__(self, "routes", routes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(node.count for node in self.nodes)

    @property
    def homogeneous(self) -> bool:
        """Whether all nodes are alike."""
        return all(node == self.nodes[0] for node in self.nodes)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device."""
        return min(node.device.memory_bytes for node in self.nodes)

    def device(self, index: int) -> DeviceSpec:
        """The device of a number."""
        return self.nodes[self.node_of(index)].device

    def node_of(self, index: int) -> int:
        """The number of the node a device is in."""
        rest = index
        for number, node in enumerate(self.nodes):
            if 0 <= rest < node.count:
                return number
            rest -= node.count
        raise MeshError(
            explain(f"device {index} of cluster {self.name!r}", f"a number from 0 to {self.size - 1}", "correct it")
        )

    def link_between(self, first: int, second: int) -> Link:
        """What a message from one device to another travels over (the node's whole bandwidth if shared).

        Over wires: the bandwidth of the narrowest and the latency of all, on the widest way.
        """
        node, other = self.node_of(first), self.node_of(second)
        if self.routes is not None and first != second:
            return self.routes.link(first, second)
        if node == other:
            return self.nodes[node].link
        assert self.network is not None, "several nodes without a network are refused at construction"
        return self.network

    def part(self, first: int, count: int) -> Cluster:
        """The cluster that `count` devices from number `first` on form, e.g. those of a pipeline stage.

        It keeps the wires between them and all switches. Where these do not join all its devices, messages go through
        the other devices as before, which then are switches named "device-NUMBER".

        Raises:
          MeshError: the cluster has no such devices.
        """
        if first < 0 or count < 1 or first + count > self.size:
            raise MeshError(
                explain(
                    f"devices {first} to {first + count - 1} of cluster {self.name!r}",
                    f"one or more of its devices 0 to {self.size - 1}",
                    "use a smaller mesh or a larger cluster",
                )
            )
        if (first, count) == (0, self.size):
            return self
        nodes: list[Node] = []
        start = 0
        for node in self.nodes:
            kept = min(start + node.count, first + count) - max(start, first)
            start += node.count
            if kept > 0:
                nodes.append(Node(node.device, kept, node.link))
        name = f"{self.name}[{first}:{first + count}]"
        wires = _wires_of_part(self.wires, first, count, through=False)
        if self.wires and (not wires or Routes(count, wires).unreachable() is not None):
            wires = _wires_of_part(self.wires, first, count, through=True)
        return Cluster(name, tuple(nodes), self.network, self.shared_network, wires if count > 1 else ())

    def times(self, factor: int) -> Cluster | None:
        """A cluster of `factor` times as many of its devices: the preset's larger one, more nodes, or a larger node.

        None where nodes are unlike, or wires are listed: nobody has said how a larger one would be wired.
        """
        if not self.homogeneous or self.wires:
            return None
        node, count = self.nodes[0], self.size * factor
        if re.fullmatch(r"[a-z0-9]+?(x[0-9]+)?", self.name) and self.name.split("x")[0] == node.device.name:
            return preset_cluster(node.device.name, count)
        name = f"{count} devices like those of {self.name!r}"
        if self.network is None:
            return Cluster(name, (Node(node.device, count, node.link),))
        return Cluster(name, self.nodes * factor, self.network, self.shared_network)

    def describe(self) -> str:
        """A line a kind of node, and one for the network."""
        lines = [f"{self.name}: {self.size} device{'s' if self.size > 1 else ''}"]
        for node, same in groupby(self.nodes):
            times = len(list(same))
            device = node.device
            lines.append(
                f"  {times} node{'s' if times > 1 else ''} of {node.count} {device.name}: "
                f"{device.memory_bytes / 2**30:.1f} GiB at {device.memory_bytes_per_s / 1e9:.0f} GB/s, "
                f"{_best_rate(device)}, link {_link_text(node.link)}"
            )
        if self.wires:
            kinds = Counter(_link_text(wire.link) for wire in self.wires)
            lines += [f"  {times} wire{'s' if times > 1 else ''} of {text}" for text, times in kinds.items()]
        elif self.network is not None and len(self.nodes) > 1:
            owner = "node" if self.shared_network else "device"
            lines.append(f"  network {_link_text(self.network)} a {owner}")
        return "\n".join(lines)

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """The cluster of a file (format: `autoshard/hardware/cluster_file.py`).

        Raises:
          ClusterError: names file, table and field.
        """
        parts = read_cluster_file(Path(path))
        return cls(parts.name, parts.nodes, parts.network, parts.shared_network, parts.wires)

    def to_toml(self) -> str:
        """Text of a cluster file that reads back as this cluster."""
        return write_cluster_file(ClusterParts(self.name, self.nodes, self.network, self.shared_network, self.wires))


def _wires_of_part(wires: Sequence[Wire], first: int, count: int, through: bool) -> tuple[Wire, ...]:
    """Wires of devices `first` to `first + count - 1`, numbered from 0; other devices are left out or are switches."""
    kept: list[Wire] = []
    taken = {end for wire in wires for end in (wire.first, wire.second)}
    for wire in wires:
        ends: list[int | str] = []
        for end in (wire.first, wire.second):
            if isinstance(end, str):
                ends.append(end)
            elif first <= end < first + count:
                ends.append(end - first)
            elif through:
                name = f"device-{end}"
                while name in taken:  # a part of a part
                    name = f"outer-{name}"
                ends.append(name)
        if len(ends) == 2:
            kept.append(Wire(ends[0], ends[1], wire.link))
    return tuple(kept)


def _best_rate(device: DeviceSpec) -> str:
    name = "bf16" if "bf16" in device.flops_per_s else "f32"
    return f"{device.flops_per_s[name] / 1e12:.4g} TFLOP/s {name}"


def _link_text(link: Link) -> str:
    return f"{link.bytes_per_s / 1e9:.4g} GB/s, {link.latency_s * 1e6:.3g} us"


@final
@dataclass(frozen=True, slots=True)
class Level:
    """One level of a group: `size` members, or groups of members, joined by a link.

    Attributes:
      size: how many.
      link: bandwidth is that of one device while all members of the group use the level at once.
      efficiency: share of the link's rate that rings of this group reach (`Link.efficiency_by_members`).
    """

    size: int
    link: Link
    efficiency: float = 1.0

    @property
    def rate_bytes_per_s(self) -> float:
        """Bandwidth that collectives of all members reach, per device and direction."""
        return self.link.rate_bytes_per_s * self.efficiency


@final
@dataclass(frozen=True, slots=True)
class WiredGroups:
    """Groups that communicate at the same time over the same wires.

    Attributes:
      routes: the ways over the wires.
      groups: numbers of the devices of each, in the order of the mesh.
    """

    routes: Routes
    groups: tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True, slots=True)
class GroupLinks:
    """How a communication group is joined.

    Attributes:
      size: number of devices.
      levels: innermost first; sizes multiply to `size`. No level for a group of one.
      graph: the wires and all groups of the mesh, where the cluster lists wires; `levels` then is a single one, of the
        narrowest way between neighbours.
    """

    size: int
    levels: tuple[Level, ...]
    graph: WiredGroups | None = None

    def __post_init__(self) -> None:
        product = math.prod(level.size for level in self.levels)
        assert product == self.size, f"levels of sizes {[x.size for x in self.levels]} for a group of {self.size}"


ALONE = GroupLinks(1, ())
"""The group of a device that talks to nobody."""


def mesh_size(mesh: MeshShape) -> int:
    """Number of devices of a mesh."""
    return math.prod(size for _, size in mesh)


def axis_group(cluster: Cluster, mesh: MeshShape, axes: Sequence[str]) -> GroupLinks:
    """The communication group of devices that differ only along `axes`.

    Where the groups are not all alike (a cluster of unlike nodes, a mesh that cuts nodes), the answer holds for the
    slowest: the widest spread, the slowest link in a node. A group spread unevenly over its nodes is one flat level.

    Args:
      cluster: devices; a mesh smaller than the cluster lies on its first devices.
      mesh: axes, major first.
      axes: names of mesh axes, in any order.

    Raises:
      MeshError: an axis the mesh does not have, or a mesh larger than the cluster.
    """
    names = [name for name, _ in mesh]
    unknown = [name for name in axes if name not in names]
    if unknown:
        raise MeshError(explain(f"mesh axis {unknown[0]!r}", f"one of {', '.join(names)}", "correct the axis name"))
    count = mesh_size(mesh)
    if count > cluster.size:
        raise MeshError(
            explain(
                f"a mesh of {count} devices ({_mesh_text(mesh)}) on cluster {cluster.name!r}",
                f"at most its {cluster.size} devices",
                "use a smaller mesh or a larger cluster",
            )
        )
    size = math.prod(n for name, n in mesh if name in axes)
    if size == 1:
        return ALONE
    if cluster.routes is not None:
        return _wired_links(cluster.routes, _groups(mesh, axes))
    return _group_links(cluster, _nodes_of_groups(cluster, mesh, axes))


def _groups(mesh: MeshShape, axes: Sequence[str]) -> np.ndarray[Any, np.dtype[Any]]:
    """The devices of every group (row)."""
    sizes = [n for _, n in mesh]
    outer = [i for i, (name, _) in enumerate(mesh) if name not in axes]
    inner = [i for i, (name, _) in enumerate(mesh) if name in axes]
    groups = math.prod(sizes[i] for i in outer)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(outer + inner).reshape(groups, -1)


def _wired_links(routes: Routes, rows: np.ndarray[Any, np.dtype[Any]]) -> GroupLinks:
    groups = tuple(tuple(int(device) for device in row) for row in rows)
    pairs = [pair for group in groups for pair in pairwise(group)]
    slowest = min(pairs, key=lambda pair: routes.width(*pair))
    size = len(groups[0])
    return GroupLinks(size, (Level(size, routes.link(*slowest)),), WiredGroups(routes, groups))


def _nodes_of_groups(cluster: Cluster, mesh: MeshShape, axes: Sequence[str]) -> np.ndarray[Any, np.dtype[Any]]:
    """For every group (row) and every node (column) how many members the group has there."""
    node_of_device = np.repeat(np.arange(len(cluster.nodes)), [node.count for node in cluster.nodes])
    laid = node_of_device[_groups(mesh, axes)]
    groups = len(laid)
    slots = laid + len(cluster.nodes) * np.arange(groups)[:, None]
    counts = np.bincount(slots.ravel(), minlength=groups * len(cluster.nodes))
    return counts.reshape(groups, len(cluster.nodes))


def _group_links(cluster: Cluster, members: np.ndarray[Any, np.dtype[Any]]) -> GroupLinks:
    size = int(members[0].sum())
    spread = (members > 0).sum(axis=1)
    widest = members[spread == spread.max()]
    used = np.flatnonzero(members.sum(axis=0))
    inner = _slowest([cluster.nodes[i].link for i in used])
    nodes = int(spread.max())
    if nodes == 1:
        return GroupLinks(size, (Level(size, inner),))
    assert cluster.network is not None, "several nodes without a network are refused at construction"
    network = cluster.network
    if cluster.shared_network:
        busiest = int(members[spread > 1].sum(axis=0).max())  # devices of one node that talk across
        network = dataclasses.replace(network, bytes_per_s=network.bytes_per_s / busiest)
    most, least = int(widest.max()), int(widest[widest > 0].min())
    share = network.share_of_members(most)
    if most != least:
        flat = (Level(size, inner), Level(size, network, share))
        return GroupLinks(size, (min(flat, key=lambda level: level.rate_bytes_per_s),))
    if most == 1:
        return GroupLinks(size, (Level(size, network, share),))
    return GroupLinks(size, (Level(most, inner), Level(nodes, network, share)))


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.rate_bytes_per_s)


def _mesh_text(mesh: MeshShape) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh)


def preset_cluster(text: str, count: int | None = None) -> Cluster:
    """The cluster of a preset: `<device>x<count>`, or a device alone with `count` (1 where left out).

    Raises:
      ClusterError: no such device, or a count that contradicts `count`.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:x([0-9]+))?", text.strip().lower())
    name = match[1] if match else text
    preset = DEVICE_PRESETS.get(name)
    if match is None or preset is None:
        raise _unknown_preset(text, name)
    wanted = int(match[2]) if match[2] else (1 if count is None else count)
    if wanted < 1:
        raise ClusterError(explain(f"preset {text!r} has no device", "a count of 1 or more", f"write {name}x8"))
    full, rest = divmod(wanted, preset.per_node) if preset.per_node else (0, wanted)
    nodes = [Node(preset.device, preset.per_node, preset.link) for _ in range(full)]
    if rest:
        nodes.append(Node(preset.device, rest, preset.link))
    cluster = Cluster(f"{name}x{wanted}" if wanted > 1 else name, tuple(nodes), preset.network)
    return _with_count(cluster, count)


def _unknown_preset(text: str, name: str) -> ClusterError:
    close = difflib.get_close_matches(name.lower(), DEVICE_PRESETS, 1, 0.5)
    suffix = text[len(name) :] if text.startswith(name) else ""
    hint = f"did you mean {close[0] + suffix!r}? Otherwise pass" if close else "pass"
    return ClusterError(
        explain(
            f"cluster {text!r} is not known",
            "auto, the path of a cluster file (*.toml), or <device>x<count> with a device among "
            + ", ".join(DEVICE_PRESETS)
            + ", e.g. h100x8, a100x16, cpux8",
            f"{hint} a DeviceSpec with count, a Cluster, or a cluster file",
        )
    )


def resolve_cluster(spec: str | Path | DeviceSpec | Cluster, count: int | None = None) -> Cluster:
    """The cluster a user means.

    Args:
      spec: "auto" (the devices JAX sees), a preset ("h100x8"), the path of a cluster file, a device, or a cluster.
      count: how many devices are needed, where that is known (a mesh was given). A `DeviceSpec` becomes one node of
        that many; of a larger cluster the first `count` devices are taken.

    Raises:
      ClusterError: the spec means nothing, or has fewer devices than `count`.
    """
    match spec:
        case Cluster():
            return _with_count(spec, count)
        case DeviceSpec():
            if count is None:
                raise ClusterError(
                    explain(
                        f"DeviceSpec {spec.name!r} alone says nothing of how many there are",
                        "a count, a mesh, or a Cluster",
                        "give mesh=(...), or devices=Cluster(name, (Node(device, count, link),))",
                    )
                )
            return Cluster(f"{spec.name}x{count}", (Node(spec, count, default_link(spec)),))
        case Path():
            return _with_count(Cluster.from_toml(spec), count)
        case "auto":
            nodes, network = detect_nodes()
            return _with_count(Cluster("auto", nodes, network), count)
        case str() if spec.endswith(".toml"):
            return _with_count(Cluster.from_toml(spec), count)
        case str():
            return preset_cluster(spec, count)
        case _:
            raise ClusterError(
                explain(
                    f"devices = {spec!r}",
                    "'auto', a preset such as 'h100x8', the path of a cluster file, a DeviceSpec or a Cluster",
                    "pass one of these",
                )
            )


def _with_count(cluster: Cluster, count: int | None) -> Cluster:
    if count is None or count == cluster.size:
        return cluster
    if count > cluster.size:
        raise ClusterError(
            explain(
                f"{count} devices wanted of cluster {cluster.name!r}, which has {cluster.size}",
                f"at most {cluster.size}",
                "use a smaller mesh or a larger cluster",
            )
        )
    return cluster.part(0, count)
