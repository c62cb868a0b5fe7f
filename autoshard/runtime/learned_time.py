"""A plan's step time by a learned cost model, where that may speak; the plan says so either way.

    compute  =  the learned time of one device's kernels, collectives left out  x  devices that share a core
    step     =  compute  +  what of the collectives the analytic model does not hide

Only what a plan predicts changes: it is made before, and its alternatives and timeline stay the analytic model's.
"""

from __future__ import annotations

import dataclasses
import os

import jax

from autoshard.costmodel import LearnedModel
from autoshard.ir import Graph
from autoshard.plan import Plan
from autoshard.runtime.compiled import Planned, build, structs_of
from autoshard.runtime.pjit import emit
from autoshard.runtime.target import Target, running_mesh

USED, REFUSED = "learned model: ", "learned model not used: "

ONE_THREAD = {"xla_cpu_multi_thread_eigen": False}
"""As the programs that the model learned from were compiled."""


def learned_time(planned: Planned, model: LearnedModel, name: str, cores: int | None = None) -> Planned:
    """The planned signature, its plan's times by the model or with the reason why not; plans made again too.

    Args:
      planned: the signature. Its sharded program is compiled, unless the model may not be used.
      model: what the user gave.
      name: of the step.
      cores: that this process may use, asked for if left out.
    """
    before = planned.again
    if before is not None:

        def again(limit: int) -> tuple[Plan, Graph]:
            plan, graph = before(limit)
            other = dataclasses.replace(planned, plan=plan, graph=graph, again=None)
            return learned_time(other, model, name, cores).plan, graph

        planned = dataclasses.replace(planned, again=again)
    plan = planned.plan
    if any(line.startswith((USED, REFUSED)) for line in plan.why):
        return planned
    usable = (cores or _usable_cores()) / planned.target.cluster.size
    why = "the step is a pipeline" if plan.pipeline is not None else refusal(planned.target, model, usable)
    if why:
        return dataclasses.replace(planned, plan=dataclasses.replace(plan, why=(*plan.why, REFUSED + why)))
    mesh = running_mesh(planned.target, plan.mesh)
    program = build(planned, mesh, emit(planned.graph, plan, mesh), name)
    compiled = program.lower(structs_of(planned.avals), None).compile(ONE_THREAD)
    compute_s = model.compute_hlo_s(str(compiled.as_text())) / usable
    time_s = compute_s + max(plan.time_s - plan.compute_s, 0.0)
    line = (
        f"{USED}{time_s:.3g} s a step, {plan.time_s:.3g} s by the analytic model, which chose the plan and timed the "
        f"alternatives and the timeline ({model.why('step')})"
    )
    plan = dataclasses.replace(plan, time_s=time_s, compute_s=compute_s, why=(*plan.why, line))
    return dataclasses.replace(planned, plan=plan)


def refusal(target: Target, model: LearnedModel, usable: float) -> str:
    """Why a model may not time plans for a target, "" where it may.

    Args:
      target: the devices.
      model: the model.
      usable: cores a device.
    """
    kinds = {node.device.kind for node in target.cluster.nodes}
    if kinds != {"cpu"}:
        return f"it knows one CPU core, the plan is for {', '.join(sorted(kinds))} devices"
    if not target.real or len(target.cluster.nodes) > 1 or jax.process_count() > 1:  # pyright: ignore[reportUnknownMemberType]
        return f"it knows this process's CPU devices (devices='auto'), the plan is for {target.cluster.name!r}"
    if differs := model.differs():
        return differs
    if usable > 1:
        return f"it knows kernels of one thread, a device has {usable:g} cores"
    return "" if model.wins("step") else model.why("step")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
