"""Seconds of each kernel of a compiled program, as jax's profiler sees them on a CPU.

XLA:CPU records every thunk as an event that names its HLO instruction. Interruptions only ever slow a kernel down, so
its time is the lowest quartile of its runs. Events of `while`, `call` and `conditional` contain those of their bodies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.costmodel.learned.untyped import jax

TRACE_S = 0.1
LEAST_CALLS, MOST_CALLS = 6, 20
"""Calls in a trace: what `TRACE_S` holds, within these."""


def kernel_times(call: Callable[[], Any], step_s: float) -> dict[str, tuple[float, float]]:
    """Traces some calls of a program.

    Args:
      call: runs it once.
      step_s: about how long that takes.

    Returns:
      For each instruction: runs a call, and the lowest quartile of their seconds.
    """
    calls = int(min(max(TRACE_S / step_s, LEAST_CALLS), MOST_CALLS))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(calls):
                jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    found: dict[str, list[float]] = {}
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                name = next((value for key, value in event.stats if key == "hlo_op"), None)
                if name is not None:
                    found.setdefault(str(name), []).append(float(event.duration_ns))
    return {name: (len(runs) / calls, float(np.percentile(runs, 25)) * 1e-9) for name, runs in found.items()}
