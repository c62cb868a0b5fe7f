"""The child process that measures: `python -m autoshard.costmodel.learned.worker CORE`.

One core, one thread, calls that run where they are made, no automatic return of memory to the system. Reads lines
`kind seed`, writes one line of JSON for each. The environment is set by `collect.py`, before XLA starts.
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
from autoshard.costmodel.learned.programs import make_program, structure
from autoshard.costmodel.learned.untyped import jax, jnp

BLOCK_S = 0.001
"""Least length of a timed block: shorter than a scheduler's slice, so that most blocks are not interrupted."""

BLOCKS = 40
PASS_S = 0.06
"""A pass ends after so many blocks or, once it has `LEAST_BLOCKS`, so many seconds of CPU time."""

LEAST_BLOCKS = 5
KEPT = 3
"""A pass's time is the mean of this many fastest blocks: those that found their data in the caches."""

NOISY = 0.05
"""Largest difference of the two fastest passes, as a part of the fastest; above it there is another pass."""

PASSES = 5
PROGRAMS_BEFORE_CLEARING = 100


def measure(kind: Any, seed: int, references: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    """One program: compiled, warmed up, timed."""
    program = make_program(kind, seed)
    graph = program.graph()
    record: dict[str, Any] = {"kind": kind, "seed": seed, "family": program.family, "structure": structure(graph)}
    begun = time.perf_counter()
    compiled: Any = jax.jit(program.fun).lower(*program.avals).compile()
    record["compile_s"] = time.perf_counter() - begun
    record["hlo"] = pack_text(compiled.as_text())
    arguments = [jax.device_put(a) for a in program.arguments()]
    passes: list[tuple[float, float]] = []
    spread = 1.0
    while len(passes) < 2 or (spread > NOISY and len(passes) < PASSES):
        passes.append(_pass(lambda: compiled(*arguments)))
        if len(passes) == 1:
            record["reference_s"] = [_pass(call)[0] for call in references]
        fastest = sorted(time for time, _ in passes)
        spread = (fastest[1] - fastest[0]) / fastest[0] if len(passes) > 1 else 1.0
    times = sorted(passes)[:2]
    record |= {"time_s": sum(t for t, _ in times) / 2, "wall_s": min(w for _, w in times), "spread": spread}
    return record | {"passes": len(passes), "noisy": spread > NOISY}


def _pass(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds a call, by the process's CPU time, which other processes on the core do not count into, and by wall."""
    for _ in range(2):
        jax.block_until_ready(call())
    start = time.process_time()
    jax.block_until_ready(call())
    count = max(int(BLOCK_S / max(time.process_time() - start, 1e-7)), 1)
    begun = time.process_time()
    cpu: list[float] = []
    wall: list[float] = []
    while len(cpu) < LEAST_BLOCKS or (len(cpu) < BLOCKS and time.process_time() - begun < PASS_S):
        w, c = time.perf_counter(), time.process_time()
        result = None
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        cpu.append((time.process_time() - c) / count)
        wall.append((time.perf_counter() - w) / count)
    return max(sum(sorted(cpu)[:KEPT]) / KEPT, 1e-9), min(wall)


def references() -> list[Callable[[], Any]]:
    """A product and a stream of fixed size: how fast the machine is just now."""
    a = jnp.asarray(np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32))
    b = jnp.asarray(np.zeros(2_000_000, dtype=np.float32))
    product = jax.jit(_square).lower(a).compile()
    stream = jax.jit(_scale).lower(b).compile()
    return [lambda: product(a), lambda: stream(b)]


def _square(v: Any) -> Any:
    return v @ v


def _scale(v: Any) -> Any:
    return v * 2 + 1


def main(core: int) -> None:
    """Measures what stdin names until it ends."""
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    known = references()
    for number, line in enumerate(sys.stdin):
        kind, seed = line.split()
        try:
            record = measure(kind, int(seed), known)
        except Exception as error:  # one program that fails does not end the collection
            record = {"kind": kind, "seed": int(seed), "error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(record), flush=True)
        if number % PROGRAMS_BEFORE_CLEARING == PROGRAMS_BEFORE_CLEARING - 1:
            jax.clear_caches()
            known = references()


if __name__ == "__main__":
    main(int(sys.argv[1]))
