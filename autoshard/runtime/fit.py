"""Whether a planned program fits once XLA has compiled it; one that does not is planned again for less.

The planner's peak is an estimate. Where it comes close to the limit the program is compiled before its first run and
XLA's own count decides:

    limit of the next estimate  =  estimate * limit / what XLA counted
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autoshard.errors import InfeasibleError, explain
from autoshard.runtime.compiled import Compiled, Planned, structs_of
from autoshard.show import size_text

CLOSE = 0.75
"""From this part of the limit on an estimate is checked: over the zoo the lowest was 0.77 of XLA's count
(`python -m bench.memory`, CPU, 2x4)."""

ROUNDS = 3
"""How often a step is planned again. Ours: each round costs a search and a compilation."""

MARGIN = 0.99
"""Of the limit, for the next estimate; another plan's error is not quite the same. Ours."""


def compiled_peak(compiled: Compiled) -> int | None:
    """Bytes on one device as XLA counts them; None where the backend does not say. Compiles the program."""
    lowered = compiled.lower(structs_of(compiled.planned.avals), None)
    stats: Any = lowered.compile().memory_analysis()
    if stats is None:
        return None
    kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.argument_size_in_bytes + kept + stats.temp_size_in_bytes)


def fitting(
    planned: Planned,
    make: Callable[[Planned], Compiled],
    peak_of: Callable[[Compiled], int | None] = compiled_peak,
) -> Compiled:
    """The program of a plan, or of the next one that fits; devices of another kind than planned for are not asked.

    Args:
      planned: the signature.
      make: builds its program.
      peak_of: bytes on one device that XLA counts.

    Raises:
      InfeasibleError: no plan fits once compiled.
    """
    limit = planned.plan.memory_limit
    allowed = float(limit)
    peaks: list[int] = []
    compiled = make(planned)
    here = compiled.mesh.devices.flat[0].platform == planned.target.cluster.device(0).kind
    while here and planned.again is not None and planned.plan.memory.peak_bytes > CLOSE * allowed:
        peak = peak_of(compiled)
        if peak is None or peak <= limit:
            break
        peaks.append(peak)
        allowed = MARGIN * min(allowed, planned.plan.memory.peak_bytes * limit / peak)
        if len(peaks) > ROUNDS:
            raise InfeasibleError(_too_large(planned, peaks, limit))
        try:
            plan, graph = planned.again(int(allowed))
        except InfeasibleError as error:
            raise InfeasibleError(_too_large(planned, peaks, limit)) from error
        line = f"planned again: XLA counted {size_text(peak)} for the plan before, the limit is {size_text(limit)}"
        plan = dataclasses.replace(plan, memory_limit=limit, why=(*plan.why, line))
        planned = dataclasses.replace(planned, plan=plan, graph=graph)
        compiled = make(planned)
    return compiled


def _too_large(planned: Planned, peaks: list[int], limit: int) -> str:
    least = min(peaks)
    return explain(
        f"the step needs {size_text(least)} on each device once compiled, on {planned.target.cluster.name}; "
        f"the limit is {size_text(limit)}",
        f"a plan that XLA compiles within the limit ({len(peaks)} tried)",
        "raise memory_limit, use more devices or devices with more memory, a smaller batch, or jax.checkpoint",
    )
