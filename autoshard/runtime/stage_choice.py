"""With stages or without: the quicker of the plan for one mesh and the best pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from autoshard.cluster import Cluster
from autoshard.errors import ArgumentError, InfeasibleError, MeshError, MicrobatchError
from autoshard.ir import Graph, MeshShape, Spec, StepInfo
from autoshard.passes import Microbatches
from autoshard.plan import Alternative, Plan
from autoshard.runtime.options import Options
from autoshard.runtime.programs import OnEvent, Programs, Way, way_of
from autoshard.runtime.stage_planning import Staged, plan_stages
from autoshard.runtime.stage_search import FIRST, Outline, PipelineSearch, find_units, likely, stage_counts
from autoshard.runtime.target import Target
from autoshard.search import Schedule

LARGE = 12_000
"""Equations of a step above which pipelines and plans for one mesh are estimated first, and the best one is planned.
Ours, for plan time: below it the plan for one mesh is always made, with all templates."""

LARGE_BUDGET_S = 10.0
"""Seconds for the search of a large step's plan for one mesh, templates included, where no budget is given. Ours: for
GPT-3 on 1,024 devices nothing better was found in 20."""

MOST_PLANNED = 2
"""Pipelines, by their estimate, that are planned. Ours."""

FAR = 2.5
"""A large step is not planned for one mesh where that is estimated to take so many times as long as a pipeline. Ours: a
unit by itself does not show gradients that travel during the rest of the backward pass. With 1.3 GPT-2's plan for one
mesh of 16 V100 was passed over, which takes 0.7 of the time of the pipeline that was taken."""

MOST_TRIED = 4
"""Outlines that are tried, those that turn out not to fit included. Ours."""

WORTH_STAGES = 1.15
"""Outlines are planned that are estimated to need no more than this times the quickest plan so far. Ours: estimates
were seen to be off by as much. Of a large step, for plan time, those that are estimated to be quicker."""


@runtime_checkable
class MakePlan(Protocol):
    """The search, as `autoshard.search.make_plan`."""

    def __call__(
        self,
        graph: Graph,
        info: StepInfo,
        cluster: Cluster,
        mesh: MeshShape | None,
        *,
        pins: dict[int, Spec],
        memory_limit: int | None,
        budget_s: float | None,
        seed: int,
        on_event: OnEvent | None = None,
        suggest: bool = True,
        on_schedule: Callable[[Schedule], None] | None = None,
        compare: bool = True,
        hoist: bool = True,
        split: Mapping[int, int] = ...,
        arriving: Mapping[int, float] = ...,
        known: Any = None,
    ) -> Plan: ...


def with_or_without_stages(
    programs: Programs,
    choose: Callable[[int | None], tuple[Plan, Graph]],
    make_on: Callable[[MeshShape | None, Way, int | None, bool, float | None], Plan],
    asked: tuple[int | None, bool | None],
    info: StepInfo,
    options: Options,
    pins: Mapping[int, Spec],
    target: Target,
    search: MakePlan,
    on_event: OnEvent | None,
) -> tuple[Plan, Staged | None]:
    """The quicker of a plan for one mesh and the best pipelines; a large step is first estimated either way.

    Raises:
      InfeasibleError: nothing fits; the error is that for one mesh.
    """
    cluster, limit = target.cluster, options.memory_limit or target.cluster.memory_bytes
    one: Plan | None = None
    error: InfeasibleError | None = None
    large = len(programs.traced.equations) > LARGE
    if not large:
        try:
            one, _ = choose(options.memory_limit)
        except InfeasibleError as refused:
            error = refused
        if one is not None and not likely(one.time_s, programs.traced, cluster):
            return one, None
    outlines, why = _outlines(programs, asked, info, options, target, search, large, on_event)
    found: list[tuple[Plan, Staged | None]] = [] if one is None else [(one, None)]
    more, tries, planned = 1.0, 0, set[int]()  # by how much outlines so far needed more memory than estimated
    for outline in _one_mesh_first(outlines, limit):
        quickest = min((plan.time_s for plan, _ in found), default=float("inf"))
        stages = outline.skeleton.stages
        if len(planned - {1}) == MOST_PLANNED or tries == MOST_TRIED:
            break
        worth = outline.time_s < (1.0 if large else WORTH_STAGES) * quickest
        if not worth or more * outline.peak_bytes > limit or stages in planned:
            continue
        tries += 1
        way = Way(outline.microbatches, outline.remat, outline.groups)
        try:
            if stages == 1:
                budget = options.budget_s or LARGE_BUDGET_S
                found.append((make_on(outline.skeleton.mesh, way, options.memory_limit, False, budget), None))
            else:
                split, known = programs.split(way), programs.fingerprint(None)
                plan, staged = plan_stages(
                    split, known, info, outline.skeleton, options, pins, target, search, on_event
                )
                found.append((dataclasses.replace(plan, remat=way.remat), staged))
            planned.add(stages)
        except (InfeasibleError, MicrobatchError, ArgumentError, MeshError) as refused:
            why = f"{outline}: {str(refused).splitlines()[0]}"
            if on_event is not None:
                on_event("refused", why)
            if isinstance(refused, InfeasibleError) and refused.need_bytes is not None:
                more = max(more, refused.need_bytes / max(outline.peak_bytes, 1))
    if not found and large:
        return choose(options.memory_limit)[0], None
    if not found:
        assert error is not None, "a step is planned or refused"
        raise InfeasibleError(f"{error}; no pipeline: {why}" if why else str(error), error.need_bytes) from error
    best, staged = min(found, key=lambda each: each[0].time_s)
    others = [alternative(plan, best) for plan, _ in found if plan is not best]
    others += [
        Alternative(f"{o}, estimated", o.time_s, o.peak_bytes, f"{o.time_s / best.time_s:.2f}x the time")
        for o in _by_stages(outlines, limit)
        if o.skeleton.stages not in planned
    ]
    lines = (*best.why, f"no pipeline: {why}") if why and staged is None else best.why
    alternatives = tuple(sorted((*best.alternatives, *others), key=lambda a: a.time_s))
    return dataclasses.replace(best, alternatives=alternatives, why=lines), staged


def _outlines(
    programs: Programs,
    asked: tuple[int | None, bool | None],
    info: StepInfo,
    options: Options,
    target: Target,
    search: MakePlan,
    large: bool,
    on_event: OnEvent | None,
) -> tuple[list[Outline], str]:
    """Estimated pipelines, best first, or why there are none; of a large step also plans of one mesh."""
    count, remat = asked
    split: Microbatches | None = None
    refused: Exception | None = None
    for first in FIRST:
        try:
            split = programs.split(Way(first))
            break
        except MicrobatchError as error:
            refused = refused or error
    if split is None:
        return [], str(refused).splitlines()[0]
    try:
        units = find_units(split, info)
    except MicrobatchError as error:
        return [], str(error).splitlines()[0]
    if on_event is not None:
        on_event("units", f"{len(units.kind)} units of {len(set(units.kind))} kinds")
    limit = options.memory_limit or target.cluster.memory_bytes
    counts = stage_counts(target.cluster, len(units.kind))
    made = PipelineSearch(units, info, target.cluster, limit, search, options.seed)
    found = made.outlines((1, *counts) if large else counts, remat, count)
    if on_event is not None:
        for outline in _by_stages(found, limit):
            on_event("pipeline", f"{outline}: {outline.time_s:.3e} s")
    return found, ""


def _one_mesh_first(outlines: Sequence[Outline], limit: int) -> list[Outline]:
    """The outlines, of which plans for one mesh come first unless they are far behind."""
    fitting = [o for o in outlines if o.peak_bytes <= limit]
    least = min((o.time_s for o in fitting), default=0.0)
    plain = [o for o in fitting if o.skeleton.stages == 1 and o.time_s <= FAR * least]
    return [*plain, *(o for o in outlines if o.skeleton.stages > 1)]


def _by_stages(outlines: Sequence[Outline], limit: int) -> list[Outline]:
    """The best outline that fits of each number of stages."""
    found: dict[int, Outline] = {}
    for outline in outlines:
        if outline.peak_bytes <= limit:
            found.setdefault(outline.skeleton.stages, outline)
    return list(found.values())


def alternative(plan: Plan, best: Plan) -> Alternative:
    """A plan that was not taken, as a row of the one that was."""
    stages = 1 if plan.pipeline is None else len(plan.pipeline.stages)
    shape = "x".join(str(n) for _, n in plan.mesh)
    if plan.pipeline is not None:
        inner = "x".join(str(n) for n in dict(plan.mesh[1:]).values())
        shape = f"{inner}, {plan.pipeline.schedule}"
    name = f"one mesh {shape}" if stages == 1 else f"{stages} stages of {shape}"
    name += "" if way_of(plan) == Way() else f", {way_of(plan)}"
    return Alternative(name, plan.time_s, plan.memory.peak_bytes, f"{plan.time_s / best.time_s:.2f}x the time")
