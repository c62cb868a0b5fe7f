"""How long planning takes, tracing included, compiling not: GPT-2 124M and GPT-3 175B's shape.

    python -m bench.plan_time [--repeat 3] [--untied] [--json FILE]

GPT-2 is planned for 8 H100s on a (2, 4) mesh, GPT-3 with 12 and with its 96 layers for 1,024 on (128, 8), without a
memory limit (as written, without remat, batch 1024 fits no such cluster). Median of the repetitions; "growth" is
that of the time after tracing from 12 to 96 layers. `--untied` plans 96 layers of GPT-2's width on (2, 4) once with
like layers tied, as always, and once with every layer free to choose, and compares the step times.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final
from unittest import mock

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autoshard import autoshard
from autoshard.ir import trace
from autoshard.search import make_plan
from bench.gpt import GPT2, GPT3, Size, make_step

LIMITS_S = {"GPT-2 124M": 10.0, "GPT-3 175B": 60.0}
"""Most seconds planning may take on 2 cores."""

UNTIED_LAYERS = 96

GROWTH = 2.0
"""Most that the time after tracing may grow from 12 to 96 layers."""


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One step.

    Attributes:
      name: of the model.
      layers: number of them.
      mesh: sizes.
      total_s: tracing, planning and recording.
      traced_s: seconds of that for tracing.
      solver: how the plan was found.
    """

    name: str
    layers: int
    mesh: tuple[int, ...]
    total_s: float
    traced_s: float
    solver: str


def measure(name: str, size: Size, batch: int, devices: str, mesh: tuple[int, ...]) -> Row:
    """Plans once."""
    step, state, inputs = make_step(size, batch)
    planned = autoshard(devices=devices, mesh=mesh, memory_limit="100TB")(step)
    traced: list[float] = []

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        graph = trace(*args)
        traced.append(time.perf_counter() - start)
        return graph

    start = time.perf_counter()
    with mock.patch("autoshard.runtime.planning.trace", timed):
        plan = planned.plan(state, inputs)
    return Row(name, size.layers, mesh, time.perf_counter() - start, sum(traced), plan.solver)


def compare_untied(layers: int) -> tuple[float, float, str]:
    """Estimated step time untied over tied, seconds of planning untied, and how that plan was found."""
    step, state, inputs = make_step(dataclasses.replace(GPT2, layers=layers), 64)
    times: list[float] = []
    took, solver = 0.0, ""
    for tie in (True, False):
        search = functools.partial(make_plan, tie=tie)
        planned = autoshard(devices="h100x8", mesh=(2, 4), memory_limit="100TB", budget=120.0)(step)
        start = time.perf_counter()
        with mock.patch.object(planned, "_search", search):
            plan = planned.plan(state, inputs)
        took, solver = time.perf_counter() - start, plan.solver
        times.append(plan.time_s)
    return times[1] / times[0], took, solver


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan time.")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [
        ("GPT-2 124M", GPT2, 64, "h100x8", (2, 4)),
        ("GPT-3 175B, 12 layers", dataclasses.replace(GPT3, layers=12), 1024, "h100x1024", (128, 8)),
        ("GPT-3 175B", GPT3, 1024, "h100x1024", (128, 8)),
    ]
    runs = [[measure(*case) for case in cases] for _ in track(range(args.repeat), "planning")]
    table = Table("model", "layers", "mesh", "total s", "of it tracing", "allowed", "solver")
    rows: list[Row] = []
    for each in zip(*runs, strict=True):
        total, traced = (statistics.median(getattr(r, f) for r in each) for f in ("total_s", "traced_s"))
        row = dataclasses.replace(each[0], total_s=total, traced_s=traced)
        rows.append(row)
        mesh = "x".join(str(n) for n in row.mesh)
        limit = LIMITS_S.get(row.name)
        table.add_row(
            row.name,
            str(row.layers),
            mesh,
            f"{total:.1f}",
            f"{traced:.1f}",
            f"{limit:.0f}" if limit else "",
            row.solver,
        )
    growth = statistics.median((r[2].total_s - r[2].traced_s) / (r[1].total_s - r[1].traced_s) for r in runs)
    console = Console()
    console.print(table)
    console.print(f"after tracing, 96 layers take {growth:.2f} times as long as 12 (allowed {GROWTH:.0f})")
    untied = None
    if args.untied:
        ratio, took, solver = compare_untied(UNTIED_LAYERS)
        untied = {"layers": UNTIED_LAYERS, "ratio": ratio, "seconds": took, "solver": solver}
        console.print(
            f"{UNTIED_LAYERS} untied layers: {ratio:.6f} of the tied plan's step time, {took:.0f} s; {solver}"
        )
    if args.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        record = {"versions": versions, "rows": [asdict(row) for row in rows], "growth": growth, "untied": untied}
        args.json.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
