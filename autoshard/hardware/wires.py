"""The [[wires]] of a cluster file: `ends` to wires and back.

    ends   ::= [ end, end ]
    end    ::= number of a device | "number" | "first-last" | name of a switch, which starts with a letter

A range stands for one wire each; two ranges are joined pair by pair, "0-3" with "4-7" is 0-4, 1-5, 2-6, 3-7.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from autoshard.hardware.device import Link, Wire
from autoshard.hardware.routes import Routes
from autoshard.hardware.toml_table import TomlTable

End = int | str

_FORM = 'two ends, each the number of a device, a range such as "0-7", or the name of a switch (a letter first)'


def read_wires(top: TomlTable, devices: int, links: Mapping[str, Link]) -> tuple[Wire, ...]:
    """The wires a file lists, none where it lists none.

    Raises:
      ClusterError: an end, a link or a field is wrong, or a device is not reachable.
    """
    wires: list[Wire] = []
    lines: dict[int, TomlTable] = {}  # of devices
    tables = top.rows("wires", "ends = [..., ...] and link = ...")
    for table in tables:
        table.only("ends", "link")
        link = table.pick("link", links, "links")
        for first, second in _ends(table, devices):
            if first == second:
                raise table.fail("ends", f"ends: {first!r} is joined to itself", "two ends that differ", "correct ends")
            wires.append(Wire(first, second, link))
            for end in (first, second):
                if isinstance(end, int):
                    lines.setdefault(end, table)
    if not wires:
        return ()
    lost = Routes(devices, wires).unreachable()
    if lost is not None:
        lines.setdefault(lost, tables[0])
        raise lines[lost].fail("ends", *unreachable_text(wires, lost))
    return tuple(wires)


def unreachable_text(wires: Sequence[Wire], device: int) -> tuple[str, str, str]:
    """The message's parts: what was given, what was expected, what to do."""
    uses = Counter(end for wire in wires for end in (wire.first, wire.second) if isinstance(end, str))
    single = [repr(name) for name, times in uses.items() if times == 1]
    hint = f"; on one wire only, so maybe misspelt: {', '.join(single)}" if single else ""
    return (
        f"device {device} is not reachable from device 0",
        "wires that join all devices, directly, over switches or over other devices",
        f'add a [[wires]] with the end "{device}", or correct the ends of those there are{hint}',
    )


def wire_lines(wires: Sequence[Wire], link_names: Mapping[Link, str]) -> list[str]:
    """Lines of a file that read back as these wires, in their order."""
    lines: list[str] = []
    start = 0
    while start < len(wires):
        stop = _run(wires, start)
        first, last = wires[start], wires[stop - 1]
        ends = [_end_text(first.first, last.first), _end_text(first.second, last.second)]
        lines += ["", "[[wires]]", f"ends = [{', '.join(ends)}]", f"link = {json.dumps(link_names[first.link])}"]
        start = stop
    return lines


def _ends(table: TomlTable, devices: int) -> list[tuple[End, End]]:
    value = table.need("ends")
    if not isinstance(value, list) or len(cast("list[Any]", value)) != 2:
        raise table.fail("ends", f"ends = {value!r}", _FORM, "correct ends")
    first, second = (_end(table, each, devices) for each in cast("list[Any]", value))
    if isinstance(first, range) and isinstance(second, range):
        if len(first) != len(second):
            raise table.fail(
                "ends",
                f"ends = {value!r}: {len(first)} and {len(second)} devices",
                "ranges of one length, which are joined pair by pair",
                "correct ends, or join each range to a switch",
            )
        return list(zip(first, second, strict=True))
    if isinstance(first, range):
        assert not isinstance(second, range), "two ranges are joined above"
        return [(device, second) for device in first]
    return [(first, device) for device in second] if isinstance(second, range) else [(first, second)]


def _end(table: TomlTable, value: Any, devices: int) -> End | range:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not text:
        raise table.fail("ends", f"ends has {value!r}", _FORM, "correct ends")
    if text[0].isalpha():
        return text
    match = re.fullmatch(r"([0-9]+)(?: *- *([0-9]+))?", text)
    if match is None:
        raise table.fail("ends", f"ends has {value!r}", _FORM, "correct ends")
    numbers = [int(group) for group in match.groups() if group is not None]
    if numbers[0] > numbers[-1]:
        raise table.fail("ends", f"ends has {value!r}", "a range that counts up", "correct ends")
    if numbers[-1] >= devices:
        raise table.fail(
            "ends",
            f"ends has {value!r}: device {numbers[-1]} is not defined",
            f"a device from 0 to {devices - 1}, as the [[nodes]] have {devices}",
            "correct ends, or count in [[nodes]]",
        )
    return numbers[0] if len(numbers) == 1 else range(numbers[0], numbers[1] + 1)


def _run(wires: Sequence[Wire], start: int) -> int:
    """Where the wires that one table can stand for end: alike, each end the same switch or counting up."""
    stop = start + 1
    while stop < len(wires):
        before, wire = wires[stop - 1], wires[stop]
        pairs = ((before.first, wire.first), (before.second, wire.second))
        if wire.link != before.link or not all(_follows(old, new) for old, new in pairs):
            break
        if all(isinstance(end, str) for end in (wire.first, wire.second)):
            break
        stop += 1
    return stop


def _follows(old: End, new: End) -> bool:
    return new == old + 1 if isinstance(old, int) and isinstance(new, int) else new == old


def _end_text(first: End, last: End) -> str:
    return json.dumps(str(first) if first == last else f"{first}-{last}")
