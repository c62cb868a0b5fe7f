"""What the pipeline's driver costs: a step against the same programs called with arrays that are there already.

    python -m bench.pipeline_driver [--width N] [--rounds N] [--json FILE]

A chain of like layers in two stages on two CPU devices, one thread each as far as XLA goes. In turn, `rounds` times:

    driven    the pipeline: programs in the schedule's order, `jax.device_put` between stages
    replayed  every program of a step again, with the arrays it had, in the same order and nothing in between

The overhead is the median of driven over the median of replayed, less one. Nothing is donated in either, for arrays are
used again. Prints how long a program of a stage takes, and whether anything was compiled after the first step.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import typer

from autoshard import autoshard
from autoshard.runtime import build_pipeline, running_mesh

MICROBATCHES = 8


def step(weights: Any, batch: Any) -> Any:
    """Four layers, mean square, SGD."""

    def loss(weights: Any) -> Any:
        h = batch
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def timed(call: Callable[[], Any]) -> float:
    """Seconds until all results are there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def main(
    width: Annotated[int, typer.Option(help="Of the layers; sets how long a stage takes.")] = 512,
    rounds: Annotated[int, typer.Option(help="Steps of each kind.")] = 20,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Measures and prints a table."""
    jax.config.update("jax_num_cpu_devices", 2)
    draw = np.random.default_rng(0)
    weights = [(draw.normal(size=(width, width)) / width**0.5).astype("f4") for _ in range(4)]
    batch = draw.normal(size=(MICROBATCHES * width, width)).astype("f4")
    decorated = autoshard(step, stages=2, microbatches=MICROBATCHES, mesh=(1,), donate_argnums=())
    decorated.plan(weights, batch)
    (planned,) = decorated._planned.values()
    assert planned.staged is not None, "two stages were asked for"
    mesh = running_mesh(planned.target, planned.plan.mesh)
    compiled, pipeline = build_pipeline(planned, planned.staged, mesh, "bench", donate=False)
    flat = [jax.device_put(a, place) for a, place in zip([*weights, batch], compiled.inputs, strict=True)]
    calls: list[tuple[Callable[..., Any], Sequence[Any]]] = []

    def drive() -> Any:
        return compiled.run_flat(flat, None)

    jax.block_until_ready(drive())
    pipeline.record(calls)
    jax.block_until_ready(drive())
    pipeline.record(None)

    def replay() -> list[Any]:
        return [call(*args) for call, args in calls]

    jax.block_until_ready(replay())
    driven, replayed = [], []
    for _ in range(rounds):
        driven.append(timed(drive))
        replayed.append(timed(replay))
    each = statistics.median(timed(lambda c=c, a=a: c(*a)) for c, a in calls)
    programs: dict[int, Any] = {id(c): c for c, _ in calls}
    compiled_again = [c for c in programs.values() if c._cache_size() != 1]
    overhead = statistics.median(driven) / statistics.median(replayed) - 1
    figures = {
        "driven_ms": 1e3 * statistics.median(driven),
        "replayed_ms": 1e3 * statistics.median(replayed),
        "overhead": overhead,
        "median_program_ms": 1e3 * each,
        "programs_a_step": len(calls),
        "programs_compiled_more_than_once": len(compiled_again),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "device": str(jax.devices()[0]),
        "seed": 0,
    }
    for name, value in figures.items():
        print(f"{name:34} {value:.4g}" if isinstance(value, float) else f"{name:34} {value}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)
