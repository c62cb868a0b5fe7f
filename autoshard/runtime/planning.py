"""One signature planned: trace, names and roles, pins, search; known plans of the same program are used again."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax

from autoshard import jax_compat
from autoshard.cluster import Cluster, mesh_size
from autoshard.errors import ArgumentError, InfeasibleError, MeshError, MicrobatchError, PlanError, explain
from autoshard.ir import Graph, MeshShape, Spec, StepInfo, trace
from autoshard.passes import Microbatches, Remat, forward_cuts, microbatched, run_passes
from autoshard.plan import Alternative, Plan, fingerprint
from autoshard.runtime.arguments import Call
from autoshard.runtime.compiled import Planned
from autoshard.runtime.likeness import with_runtime
from autoshard.runtime.microbatches import split_batch
from autoshard.runtime.one_program import pipeline_compiler
from autoshard.runtime.options import Options
from autoshard.runtime.outputs import FlatFunction
from autoshard.runtime.pairing import describe
from autoshard.runtime.pins import check_pin, matches, resolve_pins
from autoshard.runtime.pjit import auto_mesh
from autoshard.runtime.plan_compile import compile_plan
from autoshard.runtime.stage_planning import Skeleton, Staged, plan_stages, restage, stage_devices
from autoshard.runtime.stage_search import FIRST, Outline, PipelineSearch, find_units, likely, stage_counts
from autoshard.runtime.target import Target, is_explicit
from autoshard.search import collection_paused, make_plan, prepare
from autoshard.show import size_text

MOST_CHOSEN = 64
"""Microbatches that are tried where a step does not fit; more are for the user to ask for. Ours."""

MERGED = "remat=True: nothing is computed again, XLA's CPU compiler would merge it with the first time"
"""Seen with jax 0.10.1 and jax.checkpoint as well: the same temporary memory with and without."""

WORTH = 0.95
"""More microbatches are tried while twice as many need no more than this part of the memory. Ours."""

LARGE = 6_000
"""Equations of a step above which pipelines and plans for one mesh are estimated first, and the best one is planned.
Ours, for plan time: below it the plan for one mesh is always made, with all templates."""

MOST_PLANNED = 2
"""Pipelines, by their estimate, that are planned. Ours."""

FAR = 1.3
"""A large step is not planned for one mesh where that is estimated to take so many times as long as a pipeline. Ours:
estimates were seen to be off by 15 %."""

MOST_TRIED = 4
"""Outlines that are tried, those that turn out not to fit included. Ours."""

WORTH_STAGES = 0.97
"""A pipeline is taken where it needs no more than this part of the time on one mesh. Ours: estimates are no better."""

OnEvent = Callable[[str, Any], None]


@final
@dataclass(frozen=True, slots=True)
class Way:
    """How a program comes from the step.

    Attributes:
      microbatches: into how many parts the batch is cut.
      remat: whether parts of the forward pass are computed again.
    """

    microbatches: int = 1
    remat: bool = False

    def __str__(self) -> str:
        cut = f"{self.microbatches} microbatches" if self.microbatches > 1 else ""
        again = "recomputing" if self.remat else ""
        return " and ".join(part for part in (cut, again) if part) or "as written"


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
    ) -> Plan: ...


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
    with _automatic_axes():
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

    def make_on(shape: MeshShape | None, way: Way, memory_limit: int | None, suggest: bool) -> Plan:
        prepared = programs.prepared(way)
        plan = search(
            prepared,
            info,
            target.cluster,
            shape,
            pins=pins,
            memory_limit=memory_limit,
            budget_s=options.budget_s,
            seed=options.seed,
            on_event=on_event,
            suggest=suggest,
        )
        compiler = functools.partial(compile_plan, prepared, target.cluster)
        return dataclasses.replace(plan, microbatches=way.microbatches, remat=way.remat, compiler=compiler)

    merged = target.cluster.device(0).kind == "cpu"
    asked = (options.microbatches, False if merged else options.remat)

    def choose(memory_limit: int | None) -> tuple[Plan, Graph]:
        plan = choose_way(lambda way, suggest: make_on(target.shape, way, memory_limit, suggest), *asked)
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
    elif plan is None and options.stages is None and target.shape is None and target.cluster.size > 1:
        plan, staged = _with_or_without_stages(
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
    return Planned(call.template, call.avals, call.paths, outputs, info, prepared, plan, target, again, staged)


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
    refused = ""
    for count in tried:
        way = Way(count, remat)
        try:
            split = programs.split(way)
        except MicrobatchError as error:
            if count == tried[-1]:
                raise
            refused = refused or f"not {count} microbatches: {str(error).splitlines()[0]}"
            continue
        shape = None if target.shape is None else target.shape[1:]
        skeleton = Skeleton(stages, options.schedule, shape)
        known = programs.fingerprint(None)
        plan, staged = plan_stages(split, known, info, skeleton, options, pins, target, search, on_event)
        why = (*plan.why, refused) if refused else plan.why
        return dataclasses.replace(plan, remat=remat, why=why), staged
    raise AssertionError("every number of microbatches is planned or refused")


def _with_or_without_stages(
    programs: Programs,
    choose: Callable[[int | None], tuple[Plan, Graph]],
    make_on: Callable[[MeshShape | None, Way, int | None, bool], Plan],
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
        if one is not None and not likely(WORTH_STAGES * one.time_s, programs.traced, cluster):
            return one, None
    outlines, why = _outlines(programs, asked, info, options, target, search, large, on_event)
    found: list[tuple[Plan, Staged | None]] = [] if one is None else [(one, None)]
    more, tries, planned = 1.0, 0, set[int]()  # by how much outlines so far needed more memory than estimated
    for outline in _one_mesh_first(outlines, limit):
        quickest = min((plan.time_s for plan, _ in found), default=float("inf"))
        stages = outline.skeleton.stages
        if (
            outline.time_s >= WORTH_STAGES * quickest
            or len(planned - {1}) == (1 if large else MOST_PLANNED)
            or tries == MOST_TRIED
        ):
            break
        if more * outline.peak_bytes > limit or stages in planned:
            continue
        tries += 1
        way = Way(outline.microbatches, outline.remat)
        try:
            if stages == 1:
                found.append((make_on(outline.skeleton.mesh, way, options.memory_limit, False), None))
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
        raise error
    best, staged = min(found, key=lambda each: each[0].time_s)
    others = [_alternative(plan, best) for plan, _ in found if plan is not best]
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
    units = find_units(split, info)
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


def _alternative(plan: Plan, best: Plan) -> Alternative:
    stages = 1 if plan.pipeline is None else len(plan.pipeline.stages)
    shape = "x".join(str(n) for _, n in plan.mesh)
    name = f"one mesh {shape}" if stages == 1 else f"{stages} stages, mesh {shape}"
    name += "" if way_of(plan) == Way() else f", {way_of(plan)}"
    return Alternative(name, plan.time_s, plan.memory.peak_bytes, f"{plan.time_s / best.time_s:.2f}x the time")


def way_of(plan: Plan) -> Way:
    """How the plan's program comes from the step."""
    return Way(plan.microbatches, plan.remat)


@final
class Programs:
    """A step's prepared graphs, by the way they are made."""

    def __init__(
        self, fun: Callable[[], Callable[..., Any]], call: Call, info: StepInfo, graph: Graph, on_event: OnEvent | None
    ) -> None:
        self._fun, self._call, self._info, self._graph, self._on_event = fun, call, info, graph, on_event
        self._prepared: dict[Way, Graph] = {}
        self._splits: dict[Way, Microbatches] = {}
        self._fingerprints: dict[Way | None, str] = {}

    @property
    def traced(self) -> Graph:
        """The step as it was traced."""
        return self._graph

    def fingerprint(self, way: Way | None) -> str:
        """By which plans of the program are known again; None: a pipeline's, which is that of the traced step."""
        if way not in self._fingerprints:
            self._fingerprints[way] = fingerprint(self._graph if way is None else self.prepared(way))
        return self._fingerprints[way]

    def prepared(self, way: Way) -> Graph:
        """The graph that plans of this kind speak of.

        Raises:
          MicrobatchError: it cannot be cut like this.
          ArgumentError: there is nothing to compute again.
        """
        if way not in self._prepared:
            self._prepared[way] = prepare(self._make(way), self._on_event)
        return self._prepared[way]

    def split(self, way: Way) -> Microbatches:
        """The step cut into the way's microbatches.

        Raises:
          MicrobatchError, ArgumentError: it cannot be.
        """
        if way not in self._splits:
            graph, remat = self._written(way)
            with _automatic_axes():
                self._splits[way] = split_batch(
                    self._fun(), self._call.avals, self._info, graph, way.microbatches, remat.apply
                )
        return self._splits[way]

    def _written(self, way: Way) -> tuple[Graph, Remat]:
        """The step before its batch is cut, and what was done to it."""
        graph = self._graph
        remat = Remat(forward_cuts(graph) if way.remat else ())
        if way.remat and not remat.cuts:
            raise ArgumentError(
                explain(
                    "remat=True for a step without a backward pass that keeps more than it would take to compute again",
                    "a step with a gradient in it",
                    "leave remat out",
                )
            )
        if remat.cuts:
            graph = run_passes(graph, [remat], self._on_event)
        return graph, remat

    def _make(self, way: Way) -> Graph:
        if way.microbatches == 1:
            return self._written(way)[0]
        split = self.split(way)
        with _automatic_axes():
            graph = microbatched(split)
        if self._on_event is not None:
            self._on_event("microbatch", graph)
        return graph


def choose_way(make: Callable[[Way, bool], Plan], count: int | None, remat: bool | None) -> Plan:
    """The plan asked for; what is left open is as the step is written if that fits, else the quickest that does.

    For 1, 2, 4, ... microbatches the step is planned as it is and recomputing, until one that does not recompute fits.

    Args:
      make: plans one way; with True its error says which larger cluster would do.
      count: microbatches asked for, None to choose.
      remat: whether to recompute, None to choose.

    Raises:
      InfeasibleError: nothing fits; says what was tried.
      MicrobatchError, ArgumentError: what was asked for is not possible.
    """
    if count is not None and remat is not None:
        return make(Way(count, remat), True)
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
                refused = refused or f"; {str(error).splitlines()[0]}"
            else:
                if way == first:
                    return plan
                fitting.append(plan)
                if not recompute:
                    break
        done = any(not plan.remat for plan in fitting) or count is not None
        stuck = least is not None and min(needs.values()) > WORTH * least
        if done or stuck or not needs:
            break
        m *= 2
    if fitting:
        plan = min(fitting, key=lambda p: p.time_s)
        others = ", ".join(f"{w} {size_text(n)}" for w, n in needs.items())
        line = f"{way_of(plan)}: {why} (needed at least: {others})"
        return dataclasses.replace(plan, why=(*plan.why, line))
    if len(needs) > 1:
        listed = ", ".join(f"{w}: {size_text(n)}" for w, n in needs.items() if w != first)
        refused = f"; nor does it otherwise ({listed}){refused}"
    try:
        return make(first, True)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{refused}", error.need_bytes) from error


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


@contextlib.contextmanager
def _automatic_axes() -> Any:
    """A step is traced with automatic axes: types then carry no shardings, which are the plan's to choose."""
    around = jax_compat.ambient_mesh()[1]
    if around is None or not is_explicit(around):
        yield
        return
    with jax.sharding.use_abstract_mesh(auto_mesh(around).abstract_mesh):
        yield
