"""The child process that measures: `python -m autoshard.costmodel.learned.worker CORE`.

One core, one thread, calls that run where they are made, no automatic return of memory to the system. Reads lines of
seeds, writes one line of JSON for each seed. The environment is set by `collect.py`, before XLA starts.

A shared machine is slow for seconds at a time. So the programs of a line are compiled one after the other, and each is
visited `VISITS` times, with what is compiled in between; a visit times whole calls, then traces kernels.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autoshard.costmodel.learned.hlo_graph import pack_text
from autoshard.costmodel.learned.kernel_times import kernel_times
from autoshard.costmodel.learned.program_steps import make_step
from autoshard.costmodel.learned.programs import structure
from autoshard.costmodel.learned.untyped import jax

VISITS = 5
BLOCK_S = 0.001
"""Least length of a timed block: shorter than a scheduler's slice, so that most blocks are not interrupted."""

LEAST_BLOCKS, MOST_BLOCKS = 5, 30
PASS_S = 0.04
"""A pass ends after so many blocks or, once it has `LEAST_BLOCKS`, so many seconds of CPU time."""

NOISY = 0.1
"""Largest difference of the two fastest visits, as a part of the fastest; above it its time is left out."""


def measure(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A record of each program."""
    records: list[dict[str, Any]] = []
    calls: list[Callable[[], Any]] = []
    for seed in seeds:
        try:
            call, record = _compile(seed)
        except Exception as error:  # one program that fails does not end the collection
            records.append({"seed": seed, "error": f"{type(error).__name__}: {error}"[:500]})
            calls.append(lambda: None)
            continue
        calls.append(call)
        records.append(record)
        _visit_all(calls, records)
    for _ in range(VISITS - 1):
        _visit_all(calls, records)
    for record in records:
        if "error" not in record:
            times = sorted(record["passes_s"])
            record["time_s"], record["noisy"] = times[0], times[1] / times[0] - 1 > NOISY
    return records


def _compile(seed: int) -> tuple[Callable[[], Any], dict[str, Any]]:
    program = make_step(seed)
    record: dict[str, Any] = {"seed": seed, "family": program.family, "structure": structure(program.graph())}
    begun = time.perf_counter()
    compiled: Any = jax.jit(program.fun).lower(*program.avals).compile()
    record |= {"compile_s": time.perf_counter() - begun, "hlo": pack_text(compiled.as_text())}
    arguments = [jax.device_put(a) for a in program.arguments()]
    return lambda: compiled(*arguments), record | {"passes_s": [], "wall_s": [], "kernels": {}, "measure_s": 0.0}


def _visit_all(calls: Sequence[Callable[[], Any]], records: Sequence[dict[str, Any]]) -> None:
    for call, record in zip(calls, records, strict=True):
        if "error" in record or len(record["passes_s"]) == VISITS:
            continue
        begun = time.perf_counter()
        cpu, wall = _pass(call)
        record["passes_s"].append(cpu)
        record["wall_s"].append(wall)
        for name, (runs, quartile) in kernel_times(call, cpu).items():
            record["kernels"].setdefault(name, [runs]).append(quartile)
        record["measure_s"] += time.perf_counter() - begun


def _pass(call: Callable[[], Any]) -> tuple[float, float]:
    """Lowest quartile of seconds a call: by CPU time, which other processes do not count into, and by wall."""
    for _ in range(2):
        jax.block_until_ready(call())
    start = time.process_time()
    jax.block_until_ready(call())
    count = max(int(BLOCK_S / max(time.process_time() - start, 1e-7)), 1)
    begun = time.process_time()
    cpu: list[float] = []
    wall: list[float] = []
    while len(cpu) < LEAST_BLOCKS or (len(cpu) < MOST_BLOCKS and time.process_time() - begun < PASS_S):
        w, c = time.perf_counter(), time.process_time()
        for _ in range(count):
            jax.block_until_ready(call())
        cpu.append((time.process_time() - c) / count)
        wall.append((time.perf_counter() - w) / count)
    return max(float(np.percentile(cpu, 25)), 1e-9), float(np.percentile(wall, 25))


def main(core: int) -> None:
    """Measures what stdin names until it ends."""
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for line in sys.stdin:
        for record in measure([int(seed) for seed in line.split()]):
            print(json.dumps(record))
        sys.stdout.flush()
        jax.clear_caches()


if __name__ == "__main__":
    main(int(sys.argv[1]))
