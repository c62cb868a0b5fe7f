"""Cluster files: a cluster as TOML.

    name = "two-racks"

    [devices.big]                   # a preset with changes ...
    preset = "h200"
    memory_bytes = 120e9

    [devices.small]                 # ... or all figures
    kind = "gpu"                    # gpu | cpu | tpu
    flops_per_s = { bf16 = 312e12, f32 = 19.5e12 }
    memory_bytes = 40e9
    memory_bytes_per_s = 1555e9
    # may be left out: name (the table's), l2_bytes, reduce_scatter, kernel_launch_s, collective_launch_s,
    # matmul_efficiency, memory_efficiency, and a table [devices.small.target] for XLA's deviceless GPU compiler

    [devices.small.efficiency]      # measured shares of the peak rates: [size, share] by operator class
    "matmul.f32" = [[64, 0.6], [1024, 0.95]]

    [links.nvlink]                  # bandwidth per device and direction
    bytes_per_s = 450e9
    latency_s = 2e-6
    efficiency = 0.8                # may be left out: 1
    efficiency_by_members = []      # of a network, may be left out: [[4, 0.7]] is 0.7 of that from 4 members a node on

    [links.infiniband]
    bytes_per_s = 50e9
    latency_s = 4e-6

    [[nodes]]                       # in the order of the devices
    device = "big"                  # a table above, or a preset
    count = 8
    link = "nvlink"                 # may be left out for a preset and for devices made from one
    repeat = 4                      # may be left out: 1

    [[nodes]]
    device = "small"
    count = 4
    link = "nvlink"

    [network]                       # needed for more than one node
    link = "infiniband"
    shared = false                  # true: the bandwidth is the whole node's, not each device's; may be left out

Instead of a link in each node and a network, or beside them, a file may list the wires themselves (wires.py). Then
times are computed from the wires alone:

    [[wires]]
    ends = ["0-7", "switch-a"]      # device numbers, ranges (one wire each), or names of switches
    link = "nvlink"                 # full duplex

A table [measured], written by `autoshard calibrate`, says where figures come from; planning does not read it.

Units are bytes, seconds and operations a second; 80e9 and 80_000_000_000 are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from autoshard.hardware.device import DEVICE_KINDS, FLOPS_CLASSES, DeviceSpec, GpuTarget, Link, Node, Wire
from autoshard.hardware.efficiency import Points, check_efficiency
from autoshard.hardware.presets import DEVICE_PRESETS, DevicePreset, default_link
from autoshard.hardware.routes import Routes
from autoshard.hardware.toml_table import TomlTable, read_toml
from autoshard.hardware.wires import read_wires

_REQUIRED_FIGURES = ("memory_bytes", "memory_bytes_per_s")
_OPTIONAL_FIGURES = ("l2_bytes", "kernel_launch_s", "collective_launch_s")
_SHARES = ("matmul_efficiency", "memory_efficiency")
_BYTE_COUNTS = ("memory_bytes", "l2_bytes")


@final
@dataclass(frozen=True, slots=True)
class ClusterParts:
    """What a cluster file says, or what goes into one."""

    name: str
    nodes: tuple[Node, ...]
    network: Link | None
    shared_network: bool
    wires: tuple[Wire, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class _Known:
    """A device a node may name, and what joins such devices where the node does not say."""

    device: DeviceSpec
    link: Link | None


@final
@dataclass(frozen=True, slots=True)
class _Row:
    """A node as the file gives it."""

    device: DeviceSpec
    count: int
    link: Link | None


def read_cluster_file(path: Path) -> ClusterParts:
    """The cluster a file describes.

    Raises:
      ClusterError: the file is missing, is no TOML, or a field is wrong; the message names file, line, table and field.
    """
    top = read_toml(path)
    top.only("name", "devices", "links", "network", "nodes", "wires", "measured")
    links = {name: _link(table) for name, table in top.tables("links")}
    known = {name: _of_preset(preset) for name, preset in DEVICE_PRESETS.items()}
    known |= {name: _device(name, table) for name, table in top.tables("devices")}
    rows = _nodes(top, known, links)
    wires = read_wires(top, sum(row.count for row in rows), links)
    nodes = _with_links(rows, wires)
    network, shared = _network(top, links)
    if len(nodes) > 1 and network is None and not wires:
        raise top.fail(
            "nodes",
            f"{len(nodes)} nodes and no [network]",
            "a network between nodes, or [[wires]]",
            'add [network] with link = "..."',
        )
    name = top.text("name") if top.has("name") else path.stem
    return ClusterParts(name, nodes, network, shared, wires)


def _of_preset(preset: DevicePreset) -> _Known:
    return _Known(preset.device, preset.link)


def _link(table: TomlTable) -> Link:
    table.only("bytes_per_s", "latency_s", "efficiency", "efficiency_by_members")
    efficiency = table.share("efficiency") if table.has("efficiency") else 1.0
    shares = _shares(table) if table.has("efficiency_by_members") else ()
    return Link(float(table.number("bytes_per_s")), float(table.number("latency_s")), efficiency, shares)


def _shares(table: TomlTable) -> tuple[tuple[int, float], ...]:
    rows = table.need("efficiency_by_members")
    shares: list[tuple[int, float]] = []
    for row in cast("list[Any]", rows) if isinstance(rows, list) else [rows]:
        match row:
            case [int(members), int() | float() as share] if members >= 1 and 0 < share <= 1:
                shares.append((members, float(share)))
            case _:
                raise table.fail(
                    "efficiency_by_members",
                    f"efficiency_by_members = {rows!r}",
                    "pairs of members and a share above 0 and at most 1, e.g. [[4, 0.7]]",
                    "correct efficiency_by_members",
                )
    return tuple(shares)


def _device(name: str, table: TomlTable) -> _Known:
    figures = (*_REQUIRED_FIGURES, *_OPTIONAL_FIGURES)
    table.only("name", "preset", "kind", "flops_per_s", "reduce_scatter", "target", "efficiency", *figures, *_SHARES)
    given: dict[str, Any] = {}
    for field in figures:
        if table.has(field):
            given[field] = table.integer(field) if field in _BYTE_COUNTS else float(table.number(field))
    given |= {field: table.share(field) for field in _SHARES if table.has(field)}
    if table.has("name"):
        given["name"] = table.text("name")
    if table.has("kind"):
        given["kind"] = _kind(table)
    if table.has("reduce_scatter"):
        given["reduce_scatter"] = table.boolean("reduce_scatter")
    if table.has("flops_per_s"):
        given["flops_per_s"] = _rates(table)
    if table.has("target"):
        given["target"] = _target(table.table("target"))
    if table.has("efficiency"):
        given["efficiency"] = _efficiency(table.table("efficiency"))
    if table.has("preset"):
        base = DEVICE_PRESETS.get(table.text("preset"))
        if base is None:
            raise table.fail(
                "preset", f"preset = {table.text('preset')!r}", "one of " + ", ".join(DEVICE_PRESETS), "correct preset"
            )
        return _Known(dataclasses.replace(base.device, **given), base.link)
    for field in ("kind", "flops_per_s", *_REQUIRED_FIGURES):
        table.need(field)
    given.setdefault("name", name)
    given.setdefault("reduce_scatter", given["kind"] != "cpu")
    return _Known(DeviceSpec(**given), None)


def _kind(table: TomlTable) -> str:
    kind = table.text("kind")
    if kind not in DEVICE_KINDS:
        raise table.fail("kind", f"kind = {kind!r}", "one of " + ", ".join(DEVICE_KINDS), "correct kind")
    return kind


def _rates(table: TomlTable) -> dict[str, float]:
    rates = table.table("flops_per_s")
    rates.only(*FLOPS_CLASSES)
    if not rates.has("f32"):
        raise table.fail(
            "flops_per_s", "flops_per_s has no f32", "the vector unit's f32 rate, always", "add f32 to flops_per_s"
        )
    return {key: float(rates.number(key)) for key in rates.data}


def _efficiency(table: TomlTable) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, rows in table.data.items():
        try:
            found[name] = tuple((float(size), float(share)) for size, share in rows)
        except (TypeError, ValueError) as error:
            raise table.fail(name, f"{name} = {rows!r}", "a list of pairs [size, share]", f"correct {name}") from error
        check_efficiency(f"{table.file}:{table.line(name)}: {table.where}:", {name: found[name]}, FLOPS_CLASSES)
    return found


def _target(table: TomlTable) -> GpuTarget:
    names = [field.name for field in dataclasses.fields(GpuTarget)]
    table.only(*names)
    values: dict[str, Any] = {}
    for name in names:
        if name in ("device_name", "model"):
            values[name] = table.text(name)
        elif name == "clock_rate_ghz":
            values[name] = float(table.number(name))
        elif name == "capability":
            values[name] = _capability(table)
        else:
            values[name] = table.integer(name)
    return GpuTarget(**values)


def _capability(table: TomlTable) -> tuple[int, int]:
    match table.need("capability"):
        case [int(major), int(minor)] if type(major) is type(minor) is int and major > 0 and minor >= 0:
            return major, minor
        case value:
            raise table.fail(
                "capability", f"capability = {value!r}", "[major, minor], e.g. [9, 0]", "correct capability"
            )


def _nodes(top: TomlTable, known: Mapping[str, _Known], links: Mapping[str, Link]) -> tuple[_Row, ...]:
    rows = top.rows("nodes", 'device = "..." and a count')
    if not rows:
        raise top.fail(
            "nodes", "'nodes' is missing", "at least one node", 'add [[nodes]] with device = "..." and a count'
        )
    wired = bool(top.data.get("wires"))
    nodes: list[_Row] = []
    for table in rows:
        table.only("device", "count", "link", "repeat")
        picked = table.pick("device", known, "devices")
        link = table.pick("link", links, "links") if table.has("link") else picked.link
        if link is None and not wired:
            raise table.fail(
                "", "'link' is missing", "what joins devices of the node", "add link = ... and [links.NAME]"
            )
        repeat = table.integer("repeat") if table.has("repeat") else 1
        if not table.has("link") and wired:
            link = None  # the wires say it better than the preset
        nodes.extend([_Row(picked.device, table.integer("count"), link)] * repeat)
    return tuple(nodes)


def _with_links(rows: Sequence[_Row], wires: Sequence[Wire]) -> tuple[Node, ...]:
    """Nodes; one that gives no link gets that of the best way over the wires between its devices."""
    routes = Routes(sum(row.count for row in rows), wires) if wires else None
    nodes: list[Node] = []
    first = 0
    for row in rows:
        best = routes.best_link(first, row.count) if routes else None
        link = row.link or best or default_link(row.device)
        nodes.append(Node(row.device, row.count, link))
        first += row.count
    return tuple(nodes)


def _network(top: TomlTable, links: Mapping[str, Link]) -> tuple[Link | None, bool]:
    if not top.has("network"):
        return None, False
    table = top.table("network")
    table.only("link", "shared")
    shared = table.boolean("shared") if table.has("shared") else False
    return table.pick("link", links, "links"), shared
