"""What was measured, kept while measuring and written into the cluster file.

The cache is a JSON-lines file beside the output: first what was measured on, then a line for each quantity. A run that
finds the cache of the same devices goes on after its last line.

    {"setup": {"jax": "0.10.1", "device": "cpu", "devices": 1, ...}}
    {"key": "matmul.f32@512", "median": 0.0029, "low": 0.0029, "spread": 0.01, "count": 27, "unit": "s"}
"""
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, final

import jax
import numpy as np

from autoshard.calibrate.clock import Measured, usable_cores
from autoshard.errors import ArgumentError, explain

SUITE = 1
"""Changes with what `kernels.py` and `wires.py` measure under a key: older measurements are then worth nothing."""


def describe_setup(quick: bool) -> dict[str, Any]:
    """What figures depend on: kind and number of devices, cores, versions. No names of hosts, no paths."""
    return {
        "device": str(jax.devices()[0].device_kind),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cores": usable_cores(),
        "processor": _processor(),
        "system": platform.system(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "quick": quick,
        "suite": SUITE,
    }


def _processor() -> str:
    """The processor's name as the system tells it, e.g. "AMD EPYC"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@final
class Cache:
    """Measurements of a run, on disk as soon as they are made.

    Attributes:
      found: by key.
    """

    def __init__(self, path: Path | None, setup: Mapping[str, Any], fresh: bool) -> None:
        self.path = path
        self.found: dict[str, Measured] = {}
        if path is None:
            return
        lines = [] if fresh or not path.exists() else path.read_text(encoding="utf-8").splitlines()
        if lines and _parse(path, 1, lines[0]).get("setup") == dict(setup):
            for number, line in enumerate(lines[1:], 2):
                if number == len(lines) and not line.endswith("}"):
                    break  # cut off while it was written
                row = _parse(path, number, line)
                key = _checked_key(path, number, row)
                self.found[key] = Measured(**row)
        self._rewrite(setup)

    def add(self, key: str, measured: Measured) -> None:
        """Keeps one measurement."""
        self.found[key] = measured
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(key, measured))
                file.flush()
                os.fsync(file.fileno())

    def _rewrite(self, setup: Mapping[str, Any]) -> None:
        assert self.path is not None, "only a cache on disk is rewritten"
        text = json.dumps({"setup": dict(setup)}) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text + "".join(_line(k, m) for k, m in self.found.items()), encoding="utf-8")


def _line(key: str, measured: Measured) -> str:
    return json.dumps({"key": key, **asdict(measured)}) + "\n"


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ArgumentError(
            explain(f"{path}, line {number}: {error}", "measurements of an earlier run", "remove it, or pass --fresh")
        ) from error
    if not isinstance(row, dict):
        raise ArgumentError(explain(f"{path}, line {number}: {line}", "an object", "remove it, or pass --fresh"))
    return cast("dict[str, Any]", row)


def _checked_key(path: Path, number: int, row: dict[str, Any]) -> str:
    """Takes the key out of a row."""
    fields = {field.name for field in dataclasses.fields(Measured)}
    if set(row) != {"key", *fields}:
        given, wanted = ", ".join(row), ", ".join(("key", *fields))
        raise ArgumentError(explain(f"{path}, line {number} has {given}", wanted, "remove it, or pass --fresh"))
    return str(row.pop("key"))


@final
@dataclass(frozen=True, slots=True)
class Record:
    """Where a cluster's figures come from.

    Attributes:
      setup: devices, cores, versions.
      measured: by key.
      errors: of each fit, mean relative error.
      date: of the measurement, ISO.
    """

    setup: Mapping[str, Any]
    measured: Mapping[str, Measured]
    errors: Mapping[str, float]
    date: str

    @classmethod
    def today(cls, setup: Mapping[str, Any], measured: Mapping[str, Measured], errors: Mapping[str, float]) -> Record:
        """A record of this day."""
        return cls(setup, measured, errors, datetime.datetime.now(datetime.UTC).date().isoformat())

    def to_toml(self) -> str:
        """The table [measured] of a cluster file."""
        lines = ["[measured]", f"date = {json.dumps(self.date)}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in self.setup.items()]
        lines += ["", "[measured.fit_errors]"]
        lines += [f"{json.dumps(key)} = {value:.4g}" for key, value in self.errors.items()]
        lines += ["", "[measured.times]", "# median, lowest tenth, interquartile range over median, calls"]
        for key, m in self.measured.items():
            fields = f"median = {m.median:.6g}, low = {m.low:.6g}, spread = {m.spread:.3g}, count = {m.count}"
            fields += f", unit = {json.dumps(m.unit)}"
            lines.append(f"{json.dumps(key)} = {{ {fields} }}")
        return "\n".join(lines) + "\n"
