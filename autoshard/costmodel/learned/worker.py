"""The child process that measures: `python -m autoshard.costmodel.learned.worker CORE`.

One core, one thread, calls that run where they are made, no automatic return of memory to the system. Reads lines
`kind seed`, writes one line of JSON for each. The environment is set by `collect.py`, before XLA starts.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.costmodel.learned.programs import make_program, structure

BLOCK_S = 0.005
"""Least length of one timed block: thousands of times the clock's resolution."""

BLOCKS = 9
KEPT = 3
"""The time is the mean of this many fastest blocks."""

NOISY = 0.05
"""Largest spread of the kept blocks, as a part of the fastest; above it the program is measured again."""

TRIES = 3
PROGRAMS_BEFORE_CLEARING = 100


def measure(kind: Any, seed: int, references: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    """One program: compiled, warmed up, timed."""
    program = make_program(kind, seed)
    graph = program.graph()
    record: dict[str, Any] = {"kind": kind, "seed": seed, "family": program.family, "structure": structure(graph)}
    begun = time.perf_counter()
    compiled: Any = jax.jit(program.fun).lower(*program.avals).compile()  # pyright: ignore[reportUnknownMemberType]
    record["compile_s"] = time.perf_counter() - begun
    record["hlo"] = pack(compiled.as_text())
    arguments = [jax.device_put(a) for a in program.arguments()]  # pyright: ignore[reportUnknownMemberType]
    best: dict[str, Any] = {}
    for attempt in range(TRIES):
        found = _timed(lambda: compiled(*arguments))
        if not best or found["spread"] < best["spread"]:
            best = found | {"tries": attempt + 1}
        if best["spread"] <= NOISY:
            break
    record["reference_s"] = [_timed(call, 0.001, 5)["time_s"] for call in references]
    return record | best | {"noisy": best["spread"] > NOISY}


def _timed(call: Callable[[], Any], block_s: float = BLOCK_S, blocks: int = BLOCKS) -> dict[str, Any]:
    """Seconds a call, by the process's CPU time, which other processes on the core do not count into, and by wall."""
    for _ in range(2):
        jax.block_until_ready(call())  # pyright: ignore[reportUnknownMemberType]
    start = time.process_time()
    jax.block_until_ready(call())  # pyright: ignore[reportUnknownMemberType]
    once = max(time.process_time() - start, 1e-7)
    count = max(int(block_s / once), 1)
    if once > 4 * block_s:
        blocks = 6
    cpu: list[float] = []
    wall: list[float] = []
    for _ in range(blocks):
        w, c = time.perf_counter(), time.process_time()
        result = None
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)  # pyright: ignore[reportUnknownMemberType]
        cpu.append((time.process_time() - c) / count)
        wall.append((time.perf_counter() - w) / count)
    fastest = sorted(cpu)[:KEPT]
    return {
        "time_s": sum(fastest) / len(fastest),
        "spread": (fastest[-1] - fastest[0]) / max(fastest[0], 1e-9),
        "wall_s": min(wall),
        "calls": count,
    }


def references() -> list[Callable[[], Any]]:
    """A product and a stream of fixed size: how fast the machine is just now."""
    a = jnp.asarray(np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32))
    b = jnp.asarray(np.zeros(2_000_000, dtype=np.float32))
    product: Any = jax.jit(lambda v: v @ v).lower(a).compile()  # pyright: ignore[reportUnknownMemberType, reportUnknownLambdaType]
    stream: Any = jax.jit(lambda v: v * 2 + 1).lower(b).compile()  # pyright: ignore[reportUnknownMemberType, reportUnknownLambdaType]
    return [lambda: product(a), lambda: stream(b)]


def pack(hlo: str) -> str:
    """Text of a module without where its instructions come from, compressed."""
    text = re.sub(r", metadata=\{[^}]*\}", "", hlo)
    text = re.sub(r"(?s)\nFileNames\n.*?(?=\n\n\n)", "", text)
    return base64.b85encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpack(packed: str) -> str:
    return gzip.decompress(base64.b85decode(packed)).decode()


def main(core: int) -> None:
    """Measures what stdin names until it ends."""
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # pyright: ignore[reportUnknownMemberType]
    known = references()
    for number, line in enumerate(sys.stdin):
        kind, seed = line.split()
        try:
            record = measure(kind, int(seed), known)
        except Exception as error:  # one program that fails does not end the collection
            record = {"kind": kind, "seed": int(seed), "error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(record), flush=True)
        if number % PROGRAMS_BEFORE_CLEARING == PROGRAMS_BEFORE_CLEARING - 1:
            jax.clear_caches()  # pyright: ignore[reportUnknownMemberType]
            known = references()


if __name__ == "__main__":
    main(int(sys.argv[1]))
