"""Galvatron's LLaMA2-7B profile: predicted against measured, layer times and all-reduces.

    python -m bench.galvatron FOLDER [--json galvatron.json]

FOLDER holds the profile's files as PKU-DAIR/Hetu-Galvatron writes them. Layer time is fitted on the small batches and
predicts the large ones; the tables of all-reduces are fitted as they are, with far fewer parameters than points. The
exit status is 1 where a promise is missed: `LAYER_LIMIT`, `ALL_REDUCE_LIMIT`. Tables without a limit are told, not
promised.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from autoshard.cluster import DEVICE_PRESETS
from autoshard.costmodel import (
    BandwidthFit,
    CollectiveKind,
    CollectiveTime,
    FitError,
    GroupBandwidth,
    LayerFit,
    LayerPoint,
    ProtocolFit,
    collective_time_s,
    fit_bandwidths,
    fit_layers,
    fit_protocols,
)

LAYER_LIMIT = 0.05
"""Most that a predicted layer time may be off."""
ALL_REDUCE_LIMIT = 0.1
"""Most that an all-reduce may be off."""
FITTED_BATCHES = range(1, 7)
PREDICTED_BATCHES = range(7, 13)
MB = 2**20
"""The profiler divides nccl-tests' bytes by 1024 twice."""
NODES = (1, 2)
DEVICES_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One point.

    Attributes:
      name: what was measured.
      measured, predicted: in the unit of its section.
    """

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, with sign."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Section:
    """One table.

    Attributes:
      title: what, and the unit.
      rows: all points.
      limit: largest error promised, None where none is.
      parameters: how many figures were fitted.
      figures: what they are, with units in names.
    """

    title: str
    rows: tuple[Row, ...]
    limit: float | None
    parameters: int
    figures: dict[str, float]

    @property
    def error(self) -> FitError:
        """Over all rows."""
        errors = [abs(row.error) for row in self.rows]
        return FitError(float(max(errors)), float(sum(errors) / len(errors)), len(errors))

    @property
    def met(self) -> bool:
        """Whether the promise, if any, holds."""
        return self.limit is None or self.error.worst <= self.limit


def read_layers(folder: Path) -> list[LayerPoint]:
    """Step times of stacks of layers, in the order of layers and batch."""
    found = _matching(
        _read(folder, "computation_profiling_bf16_llama2-7b_all.json"), r"layernum\[(\d+)\]_bsz(\d+)_seq\d+"
    )
    return [LayerPoint(layers, batch, ms * 1e-3) for (layers, batch), ms in sorted(found.items())]


def read_times(folder: Path, kind: CollectiveKind) -> list[CollectiveTime]:
    """Times of all-reduces or all-to-alls in one node, by group and size."""
    word = {"all_reduce": "allreduce", "all_to_all": "all2all"}[kind]
    found = _matching(_read(folder, "sp_time_1nodes_8gpus_per_node.json"), word + r"_size_(\d+)_(\d+)MB_time")
    # nccl-tests' size of an all-to-all is what one device holds; ours is the whole array.
    whole = {size: size if kind == "all_to_all" else 1 for size, _ in found}
    return [CollectiveTime(kind, n, whole[n] * mb * MB, ms * 1e-3) for (n, mb), ms in sorted(found.items())]


def read_bandwidths(folder: Path) -> list[GroupBandwidth]:
    """Bus bandwidths of groups in one node and over two."""
    rows: list[GroupBandwidth] = []
    for nodes in NODES:
        data = _read(folder, f"allreduce_bandwidth_{nodes}nodes_{DEVICES_PER_NODE}gpus_per_node.json")
        found = _matching(data, r"allreduce_size_(\d+)_consec_(\d)")
        for (size, consecutive), rate in sorted(found.items()):
            rows.append(GroupBandwidth(nodes, DEVICES_PER_NODE, size, not consecutive, rate * 1e9))
    return rows


def read_messages(folder: Path) -> list[tuple[int, float]]:
    """(pipeline stages, bytes a second of a message between neighbouring stages) over two nodes."""
    found = _matching(_read(folder, "p2p_bandwidth_2nodes_8gpus_per_node.json"), r"pp_size_(\d+)()")
    return [(stages, rate * 1e9) for (stages, _), rate in sorted(found.items())]


def _read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _matching(data: dict[str, Any], pattern: str) -> dict[tuple[int, int], float]:
    """Figures whose whole name matches, by the two numbers in it."""
    matches = {name: re.fullmatch(pattern, name) for name in data}
    return {(int(m[1]), int(m[2] or 0)): float(data[name]) for name, m in matches.items() if m}


def layer_fit(points: Sequence[LayerPoint]) -> LayerFit:
    """Fitted on `FITTED_BATCHES` only."""
    return fit_layers([p for p in points if p.batch in FITTED_BATCHES])


def layer_sections(folder: Path) -> list[Section]:
    """Steps at `PREDICTED_BATCHES`, and the layer alone: what two stacks differ by, a layer."""
    points = read_layers(folder)
    fit = layer_fit(points)
    held = [p for p in points if p.batch in PREDICTED_BATCHES]
    figures = {
        "fixed_ms": fit.fixed_s * 1e3,
        "sample_ms": fit.sample_s * 1e3,
        "layer_ms": fit.layer_s * 1e3,
        "layer_sample_ms": fit.layer_sample_s * 1e3,
    }
    steps = tuple(
        Row(f"{p.layers} layers, batch {p.batch:g}", p.time_s * 1e3, fit.time_s(p.layers, p.batch) * 1e3) for p in held
    )
    times = {(p.layers, p.batch): p.time_s for p in held}
    few, many = min(p.layers for p in held), max(p.layers for p in held)
    alone = tuple(
        Row(f"a layer, batch {b}", (times[many, b] - times[few, b]) / (many - few) * 1e3, fit.layer_time_s(b) * 1e3)
        for b in PREDICTED_BATCHES
    )
    return [
        Section("step, ms", steps, LAYER_LIMIT, fit.parameters, figures),
        Section("layer alone, ms", alone, LAYER_LIMIT, fit.parameters, figures),
    ]


def time_section(folder: Path, kind: CollectiveKind, limit: float | None) -> Section:
    """A collective in one node over sizes and groups."""
    rows = read_times(folder, kind)
    fit: ProtocolFit = fit_protocols(rows, most=2)
    shown = tuple(
        Row(f"{r.size} devices, {_megabytes(r)} MB", r.time_s * 1e3, fit.time_s(kind, r.nbytes, r.size) * 1e3)
        for r in rows
    )
    figures = {"launch_us": fit.launch_s * 1e6}
    for number, link in enumerate(fit.links, 1):
        figures[f"latency_{number}_us"] = link.latency_s * 1e6
        figures[f"rate_{number}_GB_per_s"] = link.bytes_per_s / 1e9
    return Section(f"{kind} in one node, ms", shown, limit, fit.parameters, figures)


def _megabytes(row: CollectiveTime) -> int:
    return round(row.nbytes / MB / (row.size if row.kind == "all_to_all" else 1))


def bandwidth_sections(folder: Path) -> list[Section]:
    """All-reduces in one node and over two, and messages over two that the same links predict."""
    rows = read_bandwidths(folder)
    fit: BandwidthFit = fit_bandwidths(rows)
    figures = {"link_GB_per_s": fit.link.bytes_per_s / 1e9}
    if fit.network is not None:
        figures["network_GB_per_s"] = fit.network.bytes_per_s / 1e9
        for members, share in fit.network.efficiency_by_members:
            figures[f"share_from_{members}_members"] = share
    shown = tuple(Row(_group_name(r), r.bus_bytes_per_s / 1e9, fit.bus_bytes_per_s(r) / 1e9) for r in rows)
    cluster = fit.cluster("fitted", DEVICE_PRESETS["a100"].device, max(NODES), DEVICES_PER_NODE)
    nbytes = 1e9
    messages: list[Row] = []
    for stages, rate in read_messages(folder):
        group = GroupBandwidth(max(NODES), DEVICES_PER_NODE, stages, True, rate).group(cluster)
        time = collective_time_s("permute", nbytes * stages, group)
        messages.append(Row(f"{stages} stages", rate / 1e9, nbytes / time / 1e9))
    return [
        Section("all_reduce bus bandwidth, GB/s", shown, ALL_REDUCE_LIMIT, fit.parameters, figures),
        Section("messages over two nodes, GB/s: nothing fitted", tuple(messages), ALL_REDUCE_LIMIT, 0, {}),
    ]


def _group_name(row: GroupBandwidth) -> str:
    return f"{row.nodes} node{'s' if row.nodes > 1 else ''}, {row.size} {'strided' if row.strided else 'neighbours'}"


def sections(folder: Path) -> list[Section]:
    """Everything, in the order printed."""
    return [
        *layer_sections(folder),
        time_section(folder, "all_reduce", ALL_REDUCE_LIMIT),
        *bandwidth_sections(folder),
        time_section(folder, "all_to_all", None),
    ]


def table(section: Section) -> Table:
    """One section; its figures stand below."""
    error = section.error
    promise = "not promised" if section.limit is None else f"at most {section.limit:.0%}"
    caption = "  ".join(f"{name} {value:.4g}" for name, value in section.figures.items())
    shown = Table(
        title=f"{section.title}: worst {error.worst:.1%}, mean {error.mean:.1%} ({promise}), "
        f"{section.parameters} parameters, {error.points} points",
        caption=caption,
    )
    for column in ("", "measured", "predicted", "error"):
        shown.add_column(column, justify="left" if not column else "right")
    for row in section.rows:
        shown.add_row(row.name, f"{row.measured:.4g}", f"{row.predicted:.4g}", f"{row.error:+.1%}")
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where a promise is missed."""
    parser = argparse.ArgumentParser(description="Galvatron's profile, predicted and measured.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = sections(options.folder)
    console = Console()
    for section in found:
        console.print(table(section))
    missed = [section.title for section in found if not section.met]
    console.print(f"missed: {', '.join(missed)}" if missed else "all promises hold")
    if options.json:
        options.json.write_text(json.dumps(_record(found), indent=1))
    return 1 if missed else 0


def _record(found: Sequence[Section]) -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "device": "none: the profile's own, 8 GPUs a node",
        "seed": None,
        "sections": [asdict(section) | {"error": asdict(section.error), "met": section.met} for section in found],
    }


if __name__ == "__main__":
    sys.exit(main())
