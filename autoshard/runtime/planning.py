"""One signature planned: trace, names and roles, pins, search; known plans of the same program are used again."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from autoshard.cluster import mesh_size
from autoshard.errors import ArgumentError, InfeasibleError, MeshError, MicrobatchError, PlanError, explain
from autoshard.ir import Graph, MeshShape, Spec, StepInfo, trace
from autoshard.passes import Microbatches
from autoshard.plan import Plan
from autoshard.runtime.arguments import Call
from autoshard.runtime.compiled import Planned
from autoshard.runtime.likeness import with_runtime
from autoshard.runtime.one_program import pipeline_compiler
from autoshard.runtime.options import Options
from autoshard.runtime.outputs import FlatFunction
from autoshard.runtime.pairing import describe
from autoshard.runtime.pins import check_pin, matches, resolve_pins
from autoshard.runtime.plan_compile import compile_plan
from autoshard.runtime.programs import OnEvent, Programs, Way, automatic_axes
from autoshard.runtime.programs import way_of as way_of
from autoshard.runtime.stage_choice import MakePlan as MakePlan
from autoshard.runtime.stage_choice import alternative, with_or_without_stages
from autoshard.runtime.stage_planning import Skeleton, Staged, plan_stages, restage, stage_devices
from autoshard.runtime.target import Target
from autoshard.search import collection_paused, make_plan, named_mesh
from autoshard.show import size_text

MOST_CHOSEN = 64
"""Microbatches that are tried where a step does not fit; more are for the user to ask for. Ours."""

MERGED = "remat=True: nothing is computed again, XLA's CPU compiler would merge it with the first time"
"""Seen with jax 0.10.1 and jax.checkpoint as well: the same temporary memory with and without."""

WORTH = 0.95
"""More microbatches are tried while twice as many need no more than this part of the memory. Ours."""


SEARCH: MakePlan = make_plan


@final
@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Plans to use again.

    Attributes:
      made: by this step, with what they were made for.
      loaded: by the user; where there are any, nothing is searched.
    """

    made: Sequence[Planned] = ()
    loaded: Sequence[Plan] = ()


@collection_paused()
def plan_call(
    fun: Callable[..., Any],
    name: str,
    call: Call,
    options: Options,
    target: Target,
    library: Library,
    search: MakePlan,
    on_event: OnEvent | None,
) -> Planned:
    """Plans one signature of a step.

    Args:
      fun: the user's step.
      name: of it.
      call: arguments, with or without data.
      options: the decorator's.
      target: where it shall run.
      library: plans to use again.
      search: makes a plan.
      on_event: called with each part of the planning.
    """
    if not call.flat:
        raise ArgumentError(
            explain(
                f"{name} was called without a single array", "arrays among the arguments", "pass the state or a batch"
            )
        )
    flat_function = FlatFunction(fun, call.template, call.slashes)
    with automatic_axes():
        graph = trace(flat_function, call.avals)
    outputs = flat_function.outputs
    assert outputs is not None, "tracing fills in the outputs"
    info = describe(call, outputs, graph)
    if on_event is not None:
        on_event("trace", graph)
    shapes = [tuple(aval.shape) for aval in call.avals]
    sizes = None if target.shape is None else dict(target.shape)
    pins = resolve_pins(options.pins, call.slashes, shapes, sizes)
    programs = Programs(lambda: FlatFunction(fun, call.template, call.slashes), call, info, graph, on_event)

    def make_on(
        shape: MeshShape | None, way: Way, memory_limit: int | None, suggest: bool, budget_s: float | None
    ) -> Plan:
        prepared = programs.prepared(way)
        plan = search(
            prepared,
            info,
            target.cluster,
            shape,
            pins=pins,
            memory_limit=memory_limit,
            budget_s=budget_s,
            seed=options.seed,
            on_event=on_event,
            suggest=suggest,
        )
        compiler = functools.partial(compile_plan, prepared, target.cluster)
        return dataclasses.replace(plan, **dataclasses.asdict(way), compiler=compiler)

    merged = target.cluster.device(0).kind == "cpu"
    asked = (options.microbatches, False if merged else options.remat)

    def choose(memory_limit: int | None) -> tuple[Plan, Graph]:
        plan = choose_way(
            lambda way, suggest: make_on(target.shape, way, memory_limit, suggest, options.budget_s),
            *asked,
            lambda plan: sums_apart(
                plan,
                _meshes(plan, target.shape is None),
                lambda mesh, way: make_on(mesh, way, memory_limit, False, options.budget_s),
            ),
        )
        if merged and options.remat:
            plan = dataclasses.replace(plan, why=(*plan.why, MERGED))
        return plan, programs.prepared(way_of(plan))

    library = _of_stages(library, options.stages, name)
    plan = known_plan(programs.fingerprint, asked, info, target, library, name)
    staged: Staged | None = None
    if plan is None and (options.stages or 1) > 1:
        plan, staged = _plan_pipeline(programs, bool(asked[1]), info, options, pins, target, search, on_event)
        if merged and options.remat:
            plan = dataclasses.replace(plan, why=(*plan.why, MERGED))
    elif plan is None and _may_choose_stages(options, target):
        plan, staged = with_or_without_stages(
            programs, choose, make_on, asked, info, options, pins, target, search, on_event
        )
    elif plan is None:
        plan, _ = choose(options.memory_limit)
    way = way_of(plan)
    prepared = programs.traced if plan.pipeline is not None else programs.prepared(way)
    if plan.pipeline is not None:
        staged = staged or restage(plan, programs.split(way), info)
        plan = with_runtime(plan, staged, info, options.pipeline_runtime)
        compiler = functools.partial(pipeline_compiler(plan), staged, info, target.cluster)
    else:
        compiler = functools.partial(compile_plan, prepared, target.cluster)
    for i, spec in pins.items():
        pattern = next(p for p in options.pins or {} if matches(p, call.slashes[i]))
        mesh = plan.mesh
        if staged is not None and plan.pipeline is not None and i in staged.stages.home:
            mesh = plan.pipeline.stages[staged.stages.home[i]].mesh
        check_pin(pattern, spec, call.slashes[i], shapes[i], dict(mesh))
    plan = dataclasses.replace(plan, compiler=compiler)
    again = None if library.loaded or staged is not None else choose
    if options.pipeline_runtime is not None and plan.pipeline is None:
        raise ArgumentError(
            explain(
                f"pipeline_runtime={options.pipeline_runtime!r} for {name}, which is planned for one mesh",
                "a pipeline",
                "give stages=, or leave pipeline_runtime out",
            )
        )
    program = functools.partial(programs.fingerprint, None)
    return Planned(call.template, call.avals, call.paths, outputs, info, prepared, plan, target, again, staged, program)


def _may_choose_stages(options: Options, target: Target) -> bool:
    """Whether stages are left open: a mesh or pins speak of one mesh."""
    return options.stages is None and target.shape is None and not options.pins and target.cluster.size > 1


def _of_stages(library: Library, stages: int | None, name: str) -> Library:
    """The library with those of the loaded plans that have the stages asked for.

    Raises:
      PlanError: plans were loaded, and none of them has.
    """
    if stages is None or not library.loaded:
        return library
    counts = [1 if plan.pipeline is None else len(plan.pipeline.stages) for plan in library.loaded]
    loaded = [plan for plan, count in zip(library.loaded, counts, strict=True) if count == stages]
    if not loaded:
        raise PlanError(
            explain(
                f"the loaded plan of {name} has {counts[-1]} stage{'s' if counts[-1] > 1 else ''}, stages={stages}",
                "a plan with as many stages as asked for",
                "leave stages out, or plan again",
            )
        )
    return Library(library.made, loaded)


def _plan_pipeline(
    programs: Programs,
    remat: bool,
    info: StepInfo,
    options: Options,
    pins: Mapping[int, Spec],
    target: Target,
    search: MakePlan,
    on_event: OnEvent | None,
) -> tuple[Plan, Staged]:
    """A step as a pipeline; the number of microbatches is asked for, or by rule."""
    stages = options.stages or 1
    stage_devices(target.cluster, options.ranks)
    tried = [options.microbatches] if options.microbatches else [4 * stages, 2 * stages, stages]
    refused, first = "", None
    for count in tried:
        way = Way(count, remat)
        try:
            split = programs.split(way)
        except MicrobatchError as error:
            first = first or error
            if count == tried[-1]:
                raise first from None
            refused = refused or f"not {count} microbatches: {str(error).splitlines()[0]}"
            continue
        plan, staged = _plan_split(programs, split, remat, info, options, pins, target, search, on_event)
        why = (*plan.why, refused) if refused else plan.why
        return dataclasses.replace(plan, why=why), staged
    raise AssertionError("every number of microbatches is planned or refused")


def _plan_split(
    programs: Programs,
    split: Microbatches,
    remat: bool,
    info: StepInfo,
    options: Options,
    pins: Mapping[int, Spec],
    target: Target,
    search: MakePlan,
    on_event: OnEvent | None,
) -> tuple[Plan, Staged]:
    """A split step as a pipeline."""
    known, shape = programs.fingerprint(None), None if target.shape is None else target.shape[1:]
    made: dict[tuple[MeshShape, int], Staged] = {}

    def make(mesh: MeshShape | None, split: Microbatches) -> Plan:
        skeleton = Skeleton(options.stages or 1, options.schedule, mesh)
        plan, staged = plan_stages(split, known, info, skeleton, options, pins, target, search, on_event)
        made[plan.mesh, plan.groups] = staged
        return dataclasses.replace(plan, remat=remat)

    plan = make(shape, split)
    plan = sums_apart(plan, _meshes(plan, shape is None), lambda mesh, way: make(mesh, programs.split(way)))
    return plan, made[plan.mesh, plan.groups]


def choose_way(
    make: Callable[[Way, bool], Plan],
    count: int | None,
    remat: bool | None,
    better: Callable[[Plan], Plan] = lambda plan: plan,
) -> Plan:
    """The plan asked for; what is left open is as the step is written if that fits, else the quickest that does.

    For 1, 2, 4, ... microbatches the step is planned as it is and recomputing, until one that does not recompute fits.

    Args:
      make: plans one way; with True its error says which larger cluster would do.
      count: microbatches asked for, None to choose.
      remat: whether to recompute, None to choose.
      better: the plan that is taken, or a quicker one with as many microbatches.

    Raises:
      InfeasibleError: nothing fits; says what was tried.
      MicrobatchError, ArgumentError: what was asked for is not possible.
    """
    if count is not None and remat is not None:
        return better(make(Way(count, remat), True))
    first = Way(count or 1, bool(remat))
    needs: dict[Way, int] = {}
    fitting: list[Plan] = []
    refused, why, m = "", "", first.microbatches
    while m <= MOST_CHOSEN:
        least = min(needs.values(), default=None)
        for recompute in (False, True) if remat is None else (remat,):
            way = Way(m, recompute)
            try:
                plan = make(way, False)
            except InfeasibleError as error:
                why = why or str(error).splitlines()[0]
                if error.need_bytes is not None:
                    needs[way] = error.need_bytes
            except (MicrobatchError, ArgumentError) as error:
                if way == first:
                    raise
                refused = refused or f"; not {way}: {str(error).splitlines()[0]}"
            else:
                if way == first:
                    return better(plan)
                fitting.append(plan)
                if not recompute:
                    break
        done = any(not plan.remat for plan in fitting) or count is not None
        stuck = least is not None and min(needs.values()) > WORTH * least
        if done or stuck or not needs:
            break
        m *= 2
    if fitting:
        plan = better(min(fitting, key=lambda p: p.time_s))
        others = ", ".join(f"{w} {size_text(n)}" for w, n in needs.items())
        line = f"{way_of(plan)}: {why} (needed at least: {others})"
        return dataclasses.replace(plan, why=(*plan.why, line))
    if len(needs) > 1:
        listed = ", ".join(f"{w}: {size_text(n)}" for w, n in needs.items() if w != first)
        refused = f"\n  tried too: {listed}{refused}"
    try:
        return make(first, True)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{refused}", error.need_bytes) from error


def _meshes(plan: Plan, is_open: bool) -> list[MeshShape]:
    """Meshes (of a stage, in a pipeline) to try other ways on: the plan's; where it is open, one of one axis too."""
    mine = [plan.mesh] if plan.pipeline is None else [stage.mesh for stage in plan.pipeline.stages]
    return list(dict.fromkeys([*mine, named_mesh((mesh_size(mine[0]),))] if is_open else mine))


def sums_apart(plan: Plan, meshes: Sequence[MeshShape], make: Callable[[MeshShape, Way], Plan]) -> Plan:
    """The plan, or a quicker one that sums gradients over devices once a step instead of once a microbatch.

    Args:
      plan: of any number of microbatches.
      meshes: to try; groups are the devices along the first axis.
      make: plans for a mesh.
    """
    if plan.microbatches == 1:
        return plan
    found, refused = [plan], list[str]()
    for mesh in meshes:
        way = dataclasses.replace(way_of(plan), groups=mesh[0][1])
        if way.groups == 1:
            continue
        try:
            found.append(make(mesh, way))
        except (InfeasibleError, MicrobatchError, MeshError) as error:
            refused.append(f"not {way}: {str(error).splitlines()[0]}")
    best = min(found, key=lambda p: p.time_s)
    others = [alternative(other, best) for other in found if other is not best]
    rows = sorted((*best.alternatives, *others), key=lambda a: a.time_s)
    return dataclasses.replace(best, alternatives=tuple(rows), why=(*best.why, *refused))


def known_plan(
    known_as: Callable[[Way | None], str],
    asked: tuple[int | None, bool | None],
    info: StepInfo,
    target: Target,
    library: Library,
    name: str,
) -> Plan | None:
    """A plan of the same program for the same devices, None if it has to be searched.

    Args:
      known_as: the program's fingerprint by the way it is made, of a pipeline for None.
      asked: microbatches and recomputing asked for, None for any.
      info: names and roles.
      target: the devices.
      library: plans to use again.
      name: of the step.

    Raises:
      PlanError: the user loaded plans, and none belongs to this program here.
    """
    if not library.made and not library.loaded:
        return None
    count, remat = asked

    def belongs(plan: Plan) -> bool:
        if count not in (None, plan.microbatches) or remat not in (None, plan.remat):
            return False
        try:
            return plan.fingerprint == known_as(None if plan.pipeline is not None else way_of(plan))
        except (MicrobatchError, ArgumentError):
            return False

    for each in library.made:
        same = each.target.shape == target.shape and each.target.cluster == target.cluster and each.info == info
        if same and belongs(each.plan):
            return each.plan
    if not library.loaded:
        return None
    fitting = [plan for plan in library.loaded if belongs(plan)]
    if not fitting:
        last = library.loaded[-1]
        here = known_as(None if last.pipeline is not None else Way(count or 1, bool(remat)))
        made = f" ({way_of(last)})" if way_of(last) != Way() else ""
        raise PlanError(
            explain(
                f"the loaded plan is of program {last.fingerprint}{made}, {name} called this way is {here}",
                "a plan of this step with these shapes, dtypes and static arguments, made with this JAX version",
                "plan again with .plan(...), or .clear_cache() to forget the loaded plan",
            )
        )
    for plan in fitting:
        if (target.shape is None or plan.mesh == target.shape) and mesh_size(plan.mesh) <= target.cluster.size:
            return plan
    raise PlanError(
        explain(
            f"the loaded plan is for the mesh {dict(fitting[-1].mesh)}",
            f"the mesh {dict(target.shape)}" if target.shape else f"a mesh of at most {target.cluster.size} devices",
            "plan again, or use the plan's mesh",
        )
    )
