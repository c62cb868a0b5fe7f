"""A 6.7B GPT as a pipeline on 16 H100 that need not be here: bytes that were estimated beside what XLA says.

    python -m bench.pipeline_deviceless [--stages 4] [--batch 64] [--layers 32] [--json FILE]

GPT-3 6.7B (Brown et al., 2020, table 2.1; vocabulary padded to 50,304), context 2048, bfloat16 with float32 state of
AdamW, two nodes of eight. The batch is cut into 8 microbatches; the devices of a stage are a mesh data x model, two of
them by two for four stages. Forward passes are computed again. XLA's GPU compiler compiles every program of every
stage. A stage's bytes are put together from those of its programs (autoshard/runtime/stage_costs.py).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from rich.console import Console
from rich.table import Table

from autoshard import autoshard
from autoshard.plan import Plan
from autoshard.runtime import StageReport
from bench.gpt import Size, make_step

GPT_6_7B = Size(32, 4096, 32, vocabulary=50304, context=2048)
DEVICES, MICROBATCHES = 16, 8


def rows_of(plan: Plan, reports: tuple[StageReport, ...]) -> list[dict[str, Any]]:
    """A line for each program; bytes on one device."""
    rows: list[dict[str, Any]] = []
    for each in reports:
        memory, estimate = each.report.memory, each.estimate
        rows.append(
            {
                "stage": each.stage,
                "mesh": "x".join(str(n) for _, n in each.report.mesh),
                "program": each.program,
                "estimate": estimate.peak_bytes,
                "estimated_temporaries": estimate.temporary_bytes,
                "arguments": memory.arguments,
                "own_outputs": memory.outputs - memory.aliased,
                "temporaries": memory.temporaries,
                "peak": memory.arguments + memory.outputs - memory.aliased + memory.temporaries,
                "xla_peak": memory.peak,
                "compile_s": each.report.compile_s,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    names = (
        "stage",
        "mesh",
        "program",
        "estimated",
        "XLA",
        "ratio",
        "arguments",
        "results",
        "temporaries",
        "estimated",
    )
    table = Table(*names, title="GB on one device")
    for r in rows:
        sizes = [f"{r[k] / 1e9:.2f}" for k in ("arguments", "own_outputs", "temporaries", "estimated_temporaries")]
        table.add_row(
            str(r["stage"]),
            r["mesh"],
            r["program"],
            f"{r['estimate'] / 1e9:.2f}",
            f"{r['peak'] / 1e9:.2f}",
            f"{r['estimate'] / r['peak']:.2f}",
            *sizes,
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=GPT_6_7B.layers)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=120)
    step, state, batch = make_step(replace(GPT_6_7B, layers=options.layers), options.batch)
    start = time.perf_counter()
    plan = autoshard(
        devices=f"h100x{DEVICES}",
        stages=options.stages,
        microbatches=MICROBATCHES,
        mesh={"data": 2, "model": DEVICES // options.stages // 2},
        remat=True,
    )(step).plan(state, batch)
    assert plan.pipeline is not None, "it was asked for"
    console.print(
        f"planned in {time.perf_counter() - start:.0f} s: a step {plan.time_s:.3f} s, {plan.pipeline.schedule}"
    )
    start = time.perf_counter()
    reports = plan.compile(on_progress=None, timeout_s=3600)
    rows = rows_of(plan, reports)
    show(rows, console)
    console.print(f"{len(rows)} programs, compiled in {time.perf_counter() - start:.0f} s")
    if options.json:
        record = {"rows": rows, "jax": jax.__version__, "batch": options.batch, "layers": options.layers}
        record |= {"device": f"h100x{DEVICES}", "planned_s": plan.time_s, "seed": 0}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
