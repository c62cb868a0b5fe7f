"""What is chosen, with or without stages, beside the plain choices: data parallel, ZeRO-3, Megatron, GPipe, 1F1B.

    python -m bench.pipeline_choice [--models vgg19,gnmt16,gpt2,bert48,xlnet36] [--clusters a,b,c] [--json FILE]
    python -m bench.pipeline_choice --time            how long choosing takes for Llama-2-7B's and GPT-3 175B's shape

Clusters are those of DAPPLE (Fan et al., PPoPP 2021, section 6.1): A, two servers of 8 V100 at 25 Gbit/s a server; B
and C, 16 servers of one V100 at 25 and 10 Gbit/s. Batches are its global batches, precision is float32. BERT-48 and
XLNet-36 are decoders of their layers and width (bench/gpt.py). GPipe and 1F1B are the best of 2 to 16 stages of equal
work with 4 microbatches a stage, each planned by the search on its devices. All times are estimated by one model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from autoshard import autoshard
from autoshard.cluster import Cluster, Link, Node, resolve_cluster
from autoshard.errors import AutoshardError
from autoshard.plan import Plan
from bench.gpt import GPT2, GPT3, Size, make_step
from bench.translation import GNMT16, make_translation_step
from bench.vision import vgg19

LLAMA_7B = Size(32, 4096, 32, vocabulary=32000, context=2048)

MODELS: dict[str, Callable[[], tuple[Callable[..., Any], Any, Any]]] = {
    "vgg19": lambda: vgg19(2048, jnp.float32),
    "gnmt16": lambda: make_translation_step(GNMT16, 1024),
    "gpt2": lambda: make_step(GPT2, 64, dtype=jnp.float32),
    "bert48": lambda: make_step(Size(48, 1024, 16, 30522, 512), 64, dtype=jnp.float32),
    "xlnet36": lambda: make_step(Size(36, 1024, 16, 32000, 512), 128, dtype=jnp.float32),
}

EQUAL_STAGES = (2, 4, 8, 16)


def clusters() -> dict[str, Cluster]:
    """DAPPLE's, by letter."""
    node = resolve_cluster("v100x8").nodes[0]
    one = Node(node.device, 1, node.link)
    return {
        "a": Cluster("DAPPLE A", (node, node), Link(25e9 / 8, 2e-5), True),
        "b": Cluster("DAPPLE B", (one,) * 16, Link(25e9 / 8, 2e-5)),
        "c": Cluster("DAPPLE C", (one,) * 16, Link(10e9 / 8, 2e-5)),
    }


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One model on one cluster; seconds of a step, infinite where nothing fits.

    Attributes:
      chosen: in words; chosen_s: its time; took_s: seconds of planning.
      plain_s: of each plain choice.
    """

    model: str
    cluster: str
    chosen: str
    chosen_s: float
    took_s: float
    plain_s: dict[str, float]


def describe(plan: Plan) -> str:
    """Stages, mesh, microbatches."""
    stages = 1 if plan.pipeline is None else len(plan.pipeline.stages)
    mesh = "x".join(str(n) for _, n in plan.mesh)
    return f"{stages} stages, mesh {mesh}, {plan.microbatches} microbatches{', recomputing' if plan.remat else ''}"


def measure(model: str, cluster: Cluster) -> Row:
    """Plans a model freely and in the plain ways."""
    step, state, batch = MODELS[model]()
    start = time.perf_counter()
    plan = autoshard(step, devices=cluster).plan(state, batch)
    took = time.perf_counter() - start
    plain: dict[str, float] = {}
    try:
        one = autoshard(step, devices=cluster, stages=1).plan(state, batch)
        plain["one mesh"] = one.time_s
        for each in one.alternatives:
            name = each.name.split(",")[0]
            if "does not fit" not in each.note and name != "search":
                plain[name] = min(each.time_s, plain.get(name, float("inf")))
    except AutoshardError:
        plain["one mesh"] = float("inf")
    for schedule in ("gpipe", "1f1b"):
        for stages in EQUAL_STAGES:
            try:
                made = autoshard(step, devices=cluster, stages=stages, schedule=schedule).plan(state, batch)
            except AutoshardError:
                continue
            plain[schedule] = min(made.time_s, plain.get(schedule, float("inf")))
    return Row(model, cluster.name, describe(plan), plan.time_s, took, plain)


def plan_times(console: Console) -> None:
    """Seconds until everything is chosen."""
    table = Table("model", "devices", "chosen", "step s", "GB a device", "planning s", "processor s")
    for name, size, batch, devices in (
        ("Llama-2-7B", LLAMA_7B, 256, "h100x64"),
        ("GPT-3 175B", GPT3, 1024, "h100x1024"),
    ):
        step, state, inputs = make_step(size, batch)
        start, used = time.perf_counter(), time.process_time()
        plan = autoshard(step, devices=devices).plan(state, inputs)
        took, busy = time.perf_counter() - start, time.process_time() - used
        peak = plan.memory.peak_bytes / 1e9
        table.add_row(name, devices, describe(plan), f"{plan.time_s:.3f}", f"{peak:.1f}", f"{took:.1f}", f"{busy:.1f}")
        console.print(f"{name}: {took:.1f} s")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipelines or not.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default="a,b,c")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    if args.time:
        plan_times(console)
        return
    rows: list[Row] = []
    known = clusters()
    for model in args.models.split(","):
        for letter in args.clusters.split(","):
            row = measure(model, known[letter])
            rows.append(row)
            console.print(f"{row.model} on {row.cluster}: {row.chosen} {row.chosen_s:.4f} s, {row.plain_s}")
    table = Table("model", "cluster", "chosen", "step s", "over best plain", "best plain", "planning s")
    for row in rows:
        best = min(row.plain_s, key=lambda name, r=row: r.plain_s[name])
        ratio = row.chosen_s / row.plain_s[best]
        table.add_row(
            row.model, row.cluster, row.chosen, f"{row.chosen_s:.4f}", f"{ratio:.3f}", best, f"{row.took_s:.1f}"
        )
    console.print(table)
    if args.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        args.json.write_text(json.dumps({"versions": versions, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
