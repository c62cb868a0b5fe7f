"""Which runtime a pipeline gets: each stage's own programs ("mpmd"), or one program for all stages ("one-program").

One program needs stages of like structure: on one sort of mesh, and with arrays of like shapes, for each rank has
all slots of all ranks (`slots`) and fills those with zeros that it has nothing for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import final

from autoshard.errors import ArgumentError, explain
from autoshard.ir import StepInfo
from autoshard.plan import PipelinePlan, Plan
from autoshard.runtime.one_program_layout import pipeline_layout
from autoshard.runtime.options import MPMD, ONE_PROGRAM
from autoshard.runtime.stage_planning import Staged, weights_apart
from autoshard.schedules import in_ticks
from autoshard.show import seconds, size_text

MOST = 2.0
"""Most bytes on a device, fillers among them, for each byte that the fullest rank has anyway. Chosen: beyond, the
memory that a pipeline saves over one mesh is lost again to fillers."""

ALLOWED_BYTES = 64 * 2**20
"""Fillers of so many bytes on a device are never a reason. Chosen: below 1% of the memory of a GPU of 8 GB or more."""


@final
@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike the stages of a pipeline are.

    Attributes:
      reasons: why they cannot be one program; empty where they can.
      own_bytes: what the fullest rank has on a device: state, inputs, accumulators, what is held of microbatches.
      whole_bytes: what every device has as one program, fillers among it.
      time_s: seconds of the loop with all ranks in step.
    """

    reasons: tuple[str, ...]
    own_bytes: int
    whole_bytes: int
    time_s: float


def likeness(staged: Staged, pipeline: PipelinePlan, info: StepInfo) -> Likeness:
    """Whether a planned pipeline can run as one program, and at what price.

    Args:
      staged: its stages.
      pipeline: their plans.
      info: roles of the step.
    """
    if weights_apart(staged.schedule):
        why = f"schedule {staged.schedule.name!r} has backward passes in two parts (BI, BW)"
        return Likeness((why,), 0, 0, 0.0)
    time_s = in_ticks(staged.schedule).seconds(pipeline.forward_s, pipeline.backward_s)
    meshes = list(dict.fromkeys(plan.mesh for plan in pipeline.stages))
    if len(meshes) > 1:
        named = " and ".join("x".join(f"{name} {n}" for name, n in mesh) for mesh in meshes[:2])
        return Likeness((f"stages have different meshes ({named})",), 0, 0, time_s)
    layout = pipeline_layout(staged, pipeline, info)
    reasons: list[str] = []
    for stage, code in enumerate(layout.codes):
        effects = {str(effect) for program in code.programs.programs for effect in program.graph.effects}
        if effects:
            reasons.append(f"stage {stage} has effects, such as prints or callbacks ({', '.join(sorted(effects))})")
    whole, each = layout.memory_bytes(dict(meshes[0]))
    own = max(each)
    if whole > MOST * own and whole - own > ALLOWED_BYTES:
        reasons.append(
            f"stages are unlike: every device would hold {size_text(whole)}, the fullest stage has {size_text(own)} "
            f"(at most {MOST:g} times that)"
        )
    return Likeness(tuple(reasons), own, whole, time_s)


def with_runtime(plan: Plan, staged: Staged, info: StepInfo, wanted: str | None) -> Plan:
    """The plan with its runtime in it, and the reason.

    Args:
      plan: of a pipeline.
      staged: its stages.
      info: roles of the step.
      wanted: the option `pipeline_runtime`.

    Raises:
      ArgumentError: the stages cannot be one program.
    """
    pipeline = plan.pipeline
    assert pipeline is not None, "a pipeline has stages"
    runtime = wanted or pipeline.runtime
    if runtime == pipeline.runtime and (
        runtime == ONE_PROGRAM or any(line.startswith("runtime ") for line in plan.why)
    ):
        return plan
    why = tuple(line for line in plan.why if not line.startswith("runtime "))
    if runtime == MPMD:
        line = f"runtime {MPMD}: each stage's programs at their own pace"
        changed = dataclasses.replace(pipeline, runtime=MPMD)
        return dataclasses.replace(plan, pipeline=changed, why=(*why, line))
    found = likeness(staged, pipeline, info)
    if found.reasons:
        raise ArgumentError(
            explain(
                f"pipeline_runtime={ONE_PROGRAM!r}: {'; '.join(found.reasons)}",
                "stages that are alike, as the layers of a transformer, and whole backward passes",
                f"leave pipeline_runtime out, or use {MPMD!r}",
            )
        )
    loop = max((span.end_s for span in plan.timeline.spans), default=0.0)
    line = (
        f"runtime {ONE_PROGRAM}, as asked for: ranks in step take {seconds(found.time_s)} for the microbatches, "
        f"at their own pace {seconds(loop)}; every device holds slots of {size_text(found.whole_bytes)}, the fullest "
        f"stage has {size_text(found.own_bytes)}"
    )
    changed = dataclasses.replace(pipeline, runtime=ONE_PROGRAM)
    time_s = plan.time_s + max(found.time_s - loop, 0.0)
    return dataclasses.replace(plan, pipeline=changed, time_s=time_s, why=(*why, line))
