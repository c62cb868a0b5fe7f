"""Text of a cluster file: every figure written out, no preset needed (format: cluster_file.py)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeVar, cast

from autoshard.hardware.cluster_file import ClusterParts
from autoshard.hardware.device import DeviceSpec
from autoshard.hardware.wires import wire_lines

T = TypeVar("T")


def write_cluster_file(parts: ClusterParts) -> str:
    """The text of a file that reads back as the same cluster."""
    devices = _named([node.device for node in parts.nodes], [node.device.name for node in parts.nodes])
    inner = [node.link for node in parts.nodes]
    outer = [*([parts.network] if parts.network else []), *(wire.link for wire in parts.wires)]
    links = _named([*inner, *outer], ["link"] * (len(inner) + len(outer)))
    lines = [f"name = {json.dumps(parts.name)}"]
    for name, device in devices:
        lines += ["", f"[devices.{json.dumps(name)}]", *_device_lines(device)]
        if device.target is not None:
            lines += ["", f"[devices.{json.dumps(name)}.target]", *_field_lines(device.target)]
        if device.efficiency:
            curves = (f"{json.dumps(key)} = {_toml(points)}" for key, points in device.efficiency.items())
            lines += ["", f"[devices.{json.dumps(name)}.efficiency]", *curves]
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
    lines += wire_lines(parts.wires, link_names)
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
    return [line for line in _field_lines(device) if not line.startswith(("target =", "efficiency ="))]


def _field_lines(record: Any) -> list[str]:
    fields = [field.name for field in dataclasses.fields(record) if field.init]
    return [f"{name} = {_toml(getattr(record, name))}" for name in fields]


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
