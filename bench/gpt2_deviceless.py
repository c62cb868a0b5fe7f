"""GPT-2 124M, batch 64 x 1024, on 8 H100 that need not be here: our plan against hand-written shardings.

    python -m bench.gpt2_deviceless [--compile] [--json FILE]

The hand-written ones are pins on every parameter, moment and batch: data parallel, ZeRO-3 (largest dimension over all
devices) and Megatron (attention heads and the feed-forward width over 4, the batch over 2); the rest is planned.
All are costed by the same model; with --compile each is compiled by XLA's GPU compiler as well.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from autoshard import autoshard
from autoshard.errors import InfeasibleError
from bench.gpt import GPT2, make_step
from bench.pins import DATA_PARALLEL, fully_sharded

LIMITS = ("80GB", "24GB", "8GB")


def hand_written(state: Any) -> dict[str, tuple[tuple[int, ...], dict[str, P]]]:
    """Mesh and pins of each hand-written plan."""
    megatron = {
        "state/**/qkv/kernel": P(None, None, "model"),
        "state/**/qkv/bias": P(None, "model"),
        "state/**/out/kernel": P("model"),
        "state/**/out/bias": P(),
        "state/**/up/kernel": P(None, "model"),
        "state/**/up/bias": P("model"),
        "state/**/down/kernel": P("model"),
        "state/**/down/bias": P(),
    }
    return {
        "data parallel": ((8,), DATA_PARALLEL),
        "ZeRO-3": ((8,), fully_sharded(state)),
        "Megatron 2x4": ((2, 4), {**megatron, "batch/**": P("data")}),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true", help="compile each with XLA's GPU compiler (minutes)")
    parser.add_argument("--json", default="", help="write the rows here")
    options = parser.parse_args()
    step, state, batch = make_step(GPT2, 64)
    rows: list[dict[str, Any]] = []
    for name, (mesh, pins) in hand_written(state).items():
        plan = autoshard(devices="h100x8", mesh=mesh, pins=pins, memory_limit="10TB")(step).plan(state, batch)
        rows.append(row(name, plan, options.compile))
    for limit in LIMITS:
        try:
            plan = autoshard(devices="h100x8", memory_limit=limit)(step).plan(state, batch)
        except InfeasibleError as error:
            rows.append({"plan": f"ours, {limit}", "error": str(error).split("\n")[0]})
            continue
        rows.append(row(f"ours, {limit}", plan, options.compile))
    table = Table("plan", "mesh", "estimated ms", "estimated peak GB", "XLA's peak GB")
    for r in rows:
        if "error" in r:
            table.add_row(r["plan"], r["error"], "", "", "")
        else:
            table.add_row(r["plan"], r["mesh"], f"{r['time_ms']:.2f}", f"{r['peak_gb']:.2f}", f"{r['xla_gb']:.2f}")
    Console(width=110).print(table)
    if options.json:
        record = {
            "rows": rows,
            "jax": jax.__version__,
            "model": "GPT-2 124M, batch 64x1024",
            "device": "h100x8",
            "seed": 0,
        }
        Path(options.json).write_text(json.dumps(record, indent=1))


def row(name: str, plan: Any, compile_too: bool) -> dict[str, Any]:
    """One line of the table."""
    peak = plan.compile().memory.peak / 1e9 if compile_too else float("nan")
    return {
        "plan": name,
        "mesh": "x".join(str(n) for _, n in plan.mesh),
        "time_ms": plan.time_s * 1e3,
        "peak_gb": plan.memory.peak_bytes / 1e9,
        "xla_gb": peak,
    }


if __name__ == "__main__":
    main()
