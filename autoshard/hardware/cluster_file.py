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

Units are bytes, seconds and operations a second; 80e9 and 80_000_000_000 are the same.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast, final

from autoshard.errors import ClusterError, explain
from autoshard.hardware.device import FLOPS_CLASSES, DeviceSpec, GpuTarget, Link, Node
from autoshard.hardware.presets import DEVICE_PRESETS, default_link

T = TypeVar("T")

_REQUIRED_FIGURES = ("memory_bytes", "memory_bytes_per_s")
_OPTIONAL_FIGURES = ("l2_bytes", "kernel_launch_s", "collective_launch_s", "matmul_efficiency", "memory_efficiency")
_BYTE_COUNTS = ("memory_bytes", "l2_bytes")
_MAY_BE_ZERO = ("l2_bytes", "kernel_launch_s", "collective_launch_s", "latency_s")


@final
@dataclass(frozen=True, slots=True)
class ClusterParts:
    """What a cluster file says, or what goes into one."""

    name: str
    nodes: tuple[Node, ...]
    network: Link | None
    shared_network: bool


@final
@dataclass(frozen=True, slots=True)
class _Table:
    """One table of the file, with its name for messages."""

    file: str
    where: str
    data: Mapping[str, Any]

    def fail(self, given: str, expected: str, todo: str) -> ClusterError:
        return ClusterError(explain(f"{self.file}: {self.where}: {given}", expected, todo))

    def only(self, *names: str) -> None:
        """Refuses names that mean nothing."""
        for name in self.data:
            if name in names:
                continue
            close = difflib.get_close_matches(name, names, 1)
            todo = f"did you mean {close[0]!r}?" if close else "remove it"
            raise self.fail(f"{name!r} is not known", "one of " + ", ".join(names), todo)

    def has(self, name: str) -> bool:
        return name in self.data

    def need(self, name: str) -> Any:
        if name not in self.data:
            raise self.fail(f"{name!r} is missing", f"a value for {name}", f"add a line {name} = ...")
        return self.data[name]

    def table(self, name: str) -> _Table:
        value = self.data.get(name, {})
        where = f"[{name}]" if self.where == "the file" else f"{self.where[:-1]}.{name}]"
        if not isinstance(value, dict):
            raise self.fail(f"{name} = {value!r}", f"a table {where}", f"write {where} and its fields below it")
        return _Table(self.file, where, cast("dict[str, Any]", value))

    def text(self, name: str) -> str:
        value = self.need(name)
        if not isinstance(value, str):
            raise self.fail(f"{name} = {value!r}", "a text in quotes", f"correct {name}")
        return value

    def boolean(self, name: str) -> bool:
        value = self.need(name)
        if not isinstance(value, bool):
            raise self.fail(f"{name} = {value!r}", "true or false", f"correct {name}")
        return value

    def number(self, name: str) -> float:
        value = self.need(name)
        zero = name in _MAY_BE_ZERO
        expected = "a finite number, 0 or more" if zero else "a finite number above 0"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(f"{name} = {value!r}", expected, f"correct {name}")
        if value < 0 or (value == 0 and not zero):
            raise self.fail(f"{name} = {value!r}", expected, f"correct {name}")
        return value

    def integer(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise self.fail(f"{name} = {value!r}", "a whole number", f"correct {name}")
        return int(value)


def read_cluster_file(path: Path) -> ClusterParts:
    """The cluster a file describes.

    Raises:
      ClusterError: the file is missing, is no TOML, or a field is wrong; the message names file, table and field.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(
            explain(f"cluster file {path}: {error.strerror}", "a readable file", "check the path")
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(
            explain(f"cluster file {path} is no TOML: {error}", "a TOML file", "correct that line")
        ) from error
    top = _Table(str(path), "the file", data)
    top.only("name", "devices", "links", "network", "nodes")
    links = {name: _link(top.table("links").table(name)) for name in top.table("links").data}
    devices = {name: _device(name, top.table("devices").table(name)) for name in top.table("devices").data}
    nodes = _nodes(top, devices, links)
    network, shared = _network(top, links)
    if len(nodes) > 1 and network is None:
        raise top.fail(
            f"{len(nodes)} nodes and no [network]", "a network between nodes", 'add [network] with link = "..."'
        )
    name = top.text("name") if top.has("name") else path.stem
    return ClusterParts(name, nodes, network, shared)


def _link(table: _Table) -> Link:
    table.only("bytes_per_s", "latency_s", "efficiency", "efficiency_by_members")
    efficiency = table.number("efficiency") if table.has("efficiency") else 1.0
    if efficiency > 1:
        raise table.fail(f"efficiency = {efficiency}", "a share above 0 and at most 1", "correct efficiency")
    shares = _shares(table) if table.has("efficiency_by_members") else ()
    return Link(float(table.number("bytes_per_s")), float(table.number("latency_s")), float(efficiency), shares)


def _shares(table: _Table) -> tuple[tuple[int, float], ...]:
    rows = table.need("efficiency_by_members")
    shares: list[tuple[int, float]] = []
    for row in cast("list[Any]", rows) if isinstance(rows, list) else [rows]:
        match row:
            case [int(members), int() | float() as share] if members >= 1 and 0 < share <= 1:
                shares.append((members, float(share)))
            case _:
                raise table.fail(
                    f"efficiency_by_members = {rows!r}",
                    "pairs of members and a share above 0 and at most 1, e.g. [[4, 0.7]]",
                    "correct efficiency_by_members",
                )
    return tuple(shares)


def _device(name: str, table: _Table) -> DeviceSpec:
    figures = (*_REQUIRED_FIGURES, *_OPTIONAL_FIGURES)
    table.only("name", "preset", "kind", "flops_per_s", "reduce_scatter", "target", *figures)
    given: dict[str, Any] = {}
    for field in figures:
        if table.has(field):
            given[field] = table.integer(field) if field in _BYTE_COUNTS else float(table.number(field))
    for field in ("matmul_efficiency", "memory_efficiency"):
        if given.get(field, 1.0) > 1:
            raise table.fail(f"{field} = {given[field]}", "a share above 0 and at most 1", f"correct {field}")
    if table.has("reduce_scatter"):
        given["reduce_scatter"] = table.boolean("reduce_scatter")
    if table.has("flops_per_s"):
        rates = table.table("flops_per_s")
        rates.only(*FLOPS_CLASSES)
        given["flops_per_s"] = {key: float(rates.number(key)) for key in rates.data}
    if table.has("target"):
        given["target"] = _target(table.table("target"))
    if table.has("preset"):
        base = DEVICE_PRESETS.get(table.text("preset"))
        if base is None:
            raise table.fail(
                f"preset = {table.text('preset')!r}", "one of " + ", ".join(DEVICE_PRESETS), "correct preset"
            )
        if table.has("name"):
            given["name"] = table.text("name")
        return dataclasses.replace(base.device, **given)
    for field in ("kind", "flops_per_s", *_REQUIRED_FIGURES):
        table.need(field)
    kind = table.text("kind")
    if kind not in ("gpu", "cpu", "tpu"):
        raise table.fail(f"kind = {kind!r}", "gpu, cpu or tpu", "correct kind")
    if "f32" not in given["flops_per_s"]:
        raise table.fail("flops_per_s has no f32", "the vector unit's f32 rate, always", "add f32 to flops_per_s")
    given.setdefault("reduce_scatter", kind != "cpu")
    label = table.text("name") if table.has("name") else name
    return DeviceSpec(name=label, kind=kind, **given)


def _target(table: _Table) -> GpuTarget:
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


def _capability(table: _Table) -> tuple[int, int]:
    match table.need("capability"):
        case [int(major), int(minor)]:
            return major, minor
        case value:
            raise table.fail(f"capability = {value!r}", "[major, minor], e.g. [9, 0]", "correct capability")


def _nodes(top: _Table, devices: Mapping[str, DeviceSpec], links: Mapping[str, Link]) -> tuple[Node, ...]:
    rows = top.need("nodes")
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in cast("list[Any]", rows))):
        raise top.fail("no [[nodes]]", "at least one node", 'add [[nodes]] with device = "..." and count = ...')
    known = {**{name: preset.device for name, preset in DEVICE_PRESETS.items()}, **devices}
    nodes: list[Node] = []
    for index, row in enumerate(cast("list[Any]", rows)):
        table = _Table(top.file, f"[[nodes]] number {index + 1}", cast("dict[str, Any]", row))
        table.only("device", "count", "link", "repeat")
        device = _pick(table, "device", known, "devices")
        repeat = table.integer("repeat") if table.has("repeat") else 1
        if table.has("link"):
            link = _pick(table, "link", links, "links")
        elif device.name in DEVICE_PRESETS:
            link = default_link(device)
        else:
            raise table.fail("'link' is missing", "what joins devices of the node", "add link = ... and [links.NAME]")
        nodes.extend([Node(device, table.integer("count"), link)] * repeat)
    return tuple(nodes)


def _network(top: _Table, links: Mapping[str, Link]) -> tuple[Link | None, bool]:
    if not top.has("network"):
        return None, False
    table = top.table("network")
    table.only("link", "shared")
    shared = table.boolean("shared") if table.has("shared") else False
    return _pick(table, "link", links, "links"), shared


def _pick(table: _Table, field: str, known: Mapping[str, T], tables: str) -> T:
    name = table.text(field)
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, 1)
    raise table.fail(
        f"{field} = {name!r} is not defined",
        "one of " + (", ".join(known) or f"the [{tables}.NAME] tables (there are none)"),
        f"did you mean {close[0]!r}?" if close else f"add a table [{tables}.{name}]",
    )


def write_cluster_file(parts: ClusterParts) -> str:
    """The text of a file that reads back as the same cluster: every figure written out, no preset needed."""
    devices = _named([node.device for node in parts.nodes], [node.device.name for node in parts.nodes])
    inner = [node.link for node in parts.nodes]
    links = _named([*inner, *([parts.network] if parts.network else [])], ["link"] * (len(inner) + 1))
    lines = [f"name = {json.dumps(parts.name)}"]
    for name, device in devices:
        lines += ["", f"[devices.{json.dumps(name)}]", *_device_lines(device)]
        if device.target is not None:
            lines += ["", f"[devices.{json.dumps(name)}.target]", *_field_lines(device.target)]
    for name, link in links:
        lines += ["", f"[links.{json.dumps(name)}]", *_field_lines(link)]
    device_names = {device: name for name, device in devices}
    link_names = {link: name for name, link in links}
    for node, same in groupby(parts.nodes):
        lines += ["", "[[nodes]]", f"device = {json.dumps(device_names[node.device])}", f"count = {node.count}"]
        lines += [f"link = {json.dumps(link_names[node.link])}", f"repeat = {len(list(same))}"]
    if parts.network is not None:
        lines += ["", "[network]", f"link = {json.dumps(link_names[parts.network])}"]
        lines += [f"shared = {_toml(parts.shared_network)}"]
    return "\n".join(lines) + "\n"


def _named(items: Sequence[T], wishes: Sequence[str]) -> list[tuple[str, T]]:
    """Distinct items in order, each with a name of its own."""
    result: dict[T, str] = {}
    for item, wish in zip(items, wishes, strict=False):
        if item in result:
            continue
        taken = set(result.values())
        number = 1
        name = wish
        while name in taken:
            number += 1
            name = f"{wish}-{number}"
        result[item] = name
    return [(name, item) for item, name in result.items()]


def _device_lines(device: DeviceSpec) -> list[str]:
    return [line for line in _field_lines(device) if not line.startswith("target =")]


def _field_lines(record: Any) -> list[str]:
    return [f"{field.name} = {_toml(getattr(record, field.name))}" for field in dataclasses.fields(record)]


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value)
        case tuple():
            return "[" + ", ".join(_toml(item) for item in cast("tuple[Any, ...]", value)) + "]"
        case dict():
            items = cast("dict[str, Any]", value).items()
            return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in items) + " }"
        case _:
            return repr(value)
