"""A step planned as a pipeline: cut into stages, each planned on its rank's devices, timed by simulating the schedule.

microbatches -> cut -> a graph a stage -> a plan a stage -> schedule -> Plan with a PipelinePlan
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from autoshard.cluster import Cluster
from autoshard.costmodel import (
    Simulation,
)
from autoshard.errors import ArgumentError, InfeasibleError, MeshError, explain
from autoshard.ir import (
    Graph,
    MeshShape,
    Spec,
    StepInfo,
    Value,
    aval_bytes,
    replicated,
    short_type,
)
from autoshard.passes import (
    LoopStep,
    Microbatches,
    Phase,
    StageGraph,
    Stages,
    cut_stages,
    equation_kinds,
    loop_step,
    stage_graphs,
)
from autoshard.plan import Argument, Memory, PipelinePlan, Plan, fingerprint
from autoshard.runtime.options import Options
from autoshard.runtime.stage_costs import PhaseTimer, StageNeeds, overlaps, stage_needs
from autoshard.runtime.step_clock import step_time
from autoshard.runtime.target import STAGE, Target
from autoshard.schedules import (
    Kind,
    Schedule,
    eager_one_f_one_b,
    gpipe,
    one_f_one_b,
    read_schedule,
    verify,
    zb_h1,
    zb_h2,
)
from autoshard.search import choose_cuts, describe_cuts, prepare
from autoshard.show import size_text
from autoshard.timeline import Lane, MemoryCurve, Span, Timeline

SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}
"""Schedules by the name that the option takes."""

ATTEMPTS = 3
"""Memory limits that a stage is planned with until its plan fits in pieces. Ours."""

MOST_ACTIONS = 2048
"""Stages times microbatches up to which other schedules than 1F1B are simulated too. Ours, for plan time."""

WORTH = 0.99
"""A schedule other than 1F1B, which holds least, is taken where it needs no more than this part of the time. Ours."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A step in stages, ready to be emitted.

    Attributes:
      stages: their graphs, and what goes between them.
      graphs: each stage's prepared graph, which its plan speaks of.
      schedule: who does what in which order.
    """

    stages: Stages
    graphs: tuple[Graph, ...]
    schedule: Schedule


def make_schedule(wanted: Any, stages: int, microbatches: int) -> Schedule:
    """The schedule of the option: a name, a table (text or lists), a `Schedule`, or None for 1F1B.

    Raises:
      ArgumentError: an unknown name, a table that cannot run, or one for other stages or microbatches.
    """
    if wanted is None:
        return one_f_one_b(stages, microbatches)
    if isinstance(wanted, str) and wanted in SCHEDULES:
        return SCHEDULES[wanted](stages, microbatches)
    if isinstance(wanted, str) and not wanted.strip().startswith("F"):
        near = difflib.get_close_matches(wanted, SCHEDULES, 1)
        raise ArgumentError(
            explain(
                f"schedule={wanted!r}",
                f"one of {', '.join(SCHEDULES)}, a Schedule of autoshard.schedules such as interleaved(2, 8, 2), or a "
                "table (a line for each rank)",
                f"did you mean {near[0]!r}?" if near else "correct the name, or make the schedule with its function",
            )
        )
    schedule = wanted if isinstance(wanted, Schedule) else read_schedule(wanted)
    verify(schedule)
    if (schedule.stages, schedule.microbatches) != (stages, microbatches):
        raise ArgumentError(
            explain(
                f"schedule {schedule.name!r} of {schedule.stages} stages and {schedule.microbatches} microbatches",
                f"{stages} stages and {microbatches} microbatches, as the options say",
                "change stages= and microbatches=, or the schedule",
            )
        )
    return schedule


def weights_apart(schedule: Schedule) -> bool:
    """Whether a schedule has backward passes in two parts."""
    return any(a.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) for row in schedule.rows for a in row)


def stage_devices(cluster: Cluster, ranks: int) -> int:
    """Devices of each of so many ranks.

    Raises:
      MeshError: the devices cannot be shared out evenly.
    """
    if cluster.size % ranks:
        raise MeshError(
            explain(
                f"{ranks} pipeline ranks (one a stage, or as the schedule has) on {cluster.size} devices of "
                f"{cluster.name}",
                f"a number that divides the devices: {', '.join(str(n) for n in _divisors(cluster.size))}",
                "use another number of stages, or part of the devices (a jax.sharding.Mesh)",
            )
        )
    return cluster.size // ranks


def _divisors(n: int) -> list[int]:
    """Numbers above 1 that divide n, ascending."""
    return [k for k in range(2, n + 1) if n % k == 0]


def cut_step(step: LoopStep, info: StepInfo, cuts: Sequence[int], schedule: Schedule) -> Stages:
    """The step in stages that begin at these forward equations."""
    return stage_graphs(cut_stages(step, cuts, info.pairs), info.pairs, weights_apart(schedule))


@final
@dataclass(frozen=True, slots=True)
class Skeleton:
    """What is decided of a pipeline before its stages are planned.

    Attributes:
      stages: how many.
      schedule: as the option says it; None: the quickest of those by name that fits.
      mesh: of every rank; None: chosen for each stage.
      cuts: numbers of the forward equations that begin a stage; None: balanced by roofline time.
      forward: how many forward equations the step has of which the cuts speak.
    """

    stages: int
    schedule: Any = None
    mesh: MeshShape | None = None
    cuts: tuple[int, ...] | None = None
    forward: int = 0


def plan_stages(
    split: Microbatches,
    program: str,
    info: StepInfo,
    skeleton: Skeleton,
    options: Options,
    pins: Mapping[int, Spec],
    target: Target,
    search: Callable[..., Plan],
    on_event: Callable[[str, Any], None] | None,
) -> tuple[Plan, Staged]:
    """Plans a step as a pipeline. Stages that are alike, on ranks that are alike, are planned once.

    Args:
      split: the step in microbatches.
      program: the fingerprint of the traced step, by which the plan is known again.
      info: names and roles of the step.
      skeleton: stages, schedule, mesh and cuts.
      options: the decorator's.
      pins: fixed specs of the step's inputs.
      target: where it shall run.
      search: makes a plan for a stage.
      on_event: called with each part of the planning.

    Raises:
      MicrobatchError, MeshError, ArgumentError: the step or the devices cannot be cut like this.
      InfeasibleError: a stage does not fit.
    """
    count = skeleton.stages
    schedule = make_schedule(skeleton.schedule, count, split.count)
    devices = stage_devices(target.cluster, schedule.ranks)
    step = loop_step(split)
    cuts = skeleton.cuts
    if cuts is None or len(equation_kinds(step).forward) != skeleton.forward:
        cuts = choose_cuts(step, count, target.cluster, devices)
    stages = cut_step(step, info, cuts, schedule)
    graphs: list[Graph] = []
    found: list[PlannedStage] = []
    known: dict[Hashable, PlannedStage] = {}
    away = target.cluster.link_between(0, devices) if schedule.ranks > 1 else None
    byte_s = 0.0 if away is None else 1 / away.bytes_per_s
    held = verify(schedule).held_by_stage
    for stage in stages.graphs:
        graph = prepare(stage.graph, on_event)
        if on_event is not None:
            on_event(f"stage-{stage.stage}", graph)
        rank = schedule.placement[stage.stage]
        mine = target.cluster.part(rank * devices, devices)
        fixed = {k: pins[i] for k, i in enumerate(stage.inputs) if i in pins}
        names = stage_info(stage, stages, info)
        key = (fingerprint(graph), mine.nodes, mine.network, mine.wires, tuple(fixed.items()), names.pairs)
        key = (*key, names.donated)
        if key not in known:
            share = None if options.budget_s is None else options.budget_s / count
            known[key] = _plan_stage(
                stage,
                graph,
                step.partial,
                names,
                held[stage.stage],
                split.count,
                options.memory_limit or mine.memory_bytes,
                mine.device(0).kind,
                functools.partial(
                    search,
                    graph,
                    names,
                    mine,
                    skeleton.mesh,
                    pins=fixed,
                    arriving=arriving(stage, byte_s),
                    budget_s=share,
                    seed=options.seed,
                    on_event=on_event,
                    suggest=False,
                    hoist=False,
                ),
            )
        graphs.append(graph)
        found.append(_named(known[key], names))
    choice = [schedule]
    if skeleton.schedule is None and count * split.count <= MOST_ACTIONS:
        choice += [eager_one_f_one_b(count, split.count), gpipe(count, split.count)]
    best: tuple[Plan, Staged] | None = None
    for each in choice:
        staged = Staged(stages, tuple(graphs), each)
        plan = _record(staged, found, program, info, target, devices, cuts)
        fits = plan.memory.peak_bytes <= plan.memory_limit
        if best is None or (fits and plan.time_s < WORTH * best[0].time_s):
            best = plan, staged
    assert best is not None, "there is a schedule"
    _check_fits(best[0])
    return best


@final
@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage's plan, and what it takes.

    Attributes:
      plan: of its graph.
      seconds: of each program, of one microbatch where in the loop.
      needs: bytes.
    """

    plan: Plan
    seconds: Mapping[Phase, float]
    needs: StageNeeds


def _plan_stage(
    stage: StageGraph,
    graph: Graph,
    partial: frozenset[Value],
    info: StepInfo,
    held: int,
    count: int,
    limit: int,
    kind: str,
    search: Callable[..., Plan],
) -> PlannedStage:
    """A plan of a stage that fits while it runs.

    The search sees the stage's graph as one program, in which what goes between stages lies in memory for all
    microbatches, and what microbatches keep in between for one. So where nothing fits in that sense it may use more,
    and where a plan does not fit in pieces, less. The caller checks the whole.
    """
    refused: InfeasibleError | None = None
    closest: PlannedStage | None = None
    allowed = float(limit)
    for _ in range(ATTEMPTS):
        timer = PhaseTimer(stage, graph, partial, count, overlaps(kind), {})
        try:
            plan = search(memory_limit=int(allowed), on_schedule=timer)
        except InfeasibleError as error:
            refused = refused or error
            if closest is not None:
                break
            allowed *= 2
            continue
        plan = dataclasses.replace(plan, memory_limit=limit)
        needs = stage_needs(graph, plan, stage, info, kind)
        peak = needs.peak(held)
        if closest is not None and peak >= closest.needs.peak(held):
            break  # nothing else was found
        closest = PlannedStage(plan, timer.times, needs)
        if peak <= limit or allowed > limit:
            break
        allowed *= 0.95 * limit / peak
    if closest is not None:
        return closest
    assert refused is not None, "a search finds a plan or is refused"
    raise refused


def _named(planned: PlannedStage, info: StepInfo) -> PlannedStage:
    """The same plan with the names of a stage that is alike."""
    plan = planned.plan
    inputs = tuple(dataclasses.replace(a, path=p) for a, p in zip(plan.inputs, info.input_paths, strict=True))
    outputs = tuple(dataclasses.replace(a, path=p) for a, p in zip(plan.outputs, info.output_paths, strict=True))
    return dataclasses.replace(planned, plan=dataclasses.replace(plan, inputs=inputs, outputs=outputs))


def arriving(stage: StageGraph, byte_s: float) -> dict[int, float]:
    """For the inputs of a stage's graph that other stages send, the seconds a byte takes."""
    first = len(stage.inputs)
    return dict.fromkeys(range(first, first + len(stage.arrivals) + len(stage.loop_arrivals)), byte_s)


def stage_info(stage: StageGraph, stages: Stages, info: StepInfo) -> StepInfo:
    """Names and roles of a stage's graph."""
    inputs = [*(info.input_paths[i] for i in stage.inputs)]
    inputs += [f"what stage {source} sends/{k}" for k, (_, source, _) in enumerate(stage.arrivals)]
    inputs += [
        f"what stage {source} sends of each microbatch/{k}" for k, (_, source, _) in enumerate(stage.loop_arrivals)
    ]
    outputs = [*(info.output_paths[k] for k in stage.outputs)]
    outputs += [f"to other stages/{k}" for k in range(len(stage.departures))]
    outputs += [f"microbatches to other stages/{k}" for k in range(len(stage.loop_departures))]
    place_in = {i: k for k, i in enumerate(stage.inputs) if stages.home.get(i) == stage.stage}
    place_out = {o: k for k, o in enumerate(stage.outputs)}
    pairs = tuple((place_in[i], place_out[o]) for i, o in info.pairs if i in place_in and o in place_out)
    given = set(info.donated)
    return StepInfo(
        tuple(inputs),
        tuple(0 for _ in inputs),
        ("stage",),
        tuple(outputs),
        tuple(0 for _ in outputs),
        pairs,
        tuple(k for i, k in place_in.items() if i in given),
    )


def _record(
    staged: Staged,
    found: Sequence[PlannedStage],
    program: str,
    info: StepInfo,
    target: Target,
    devices: int,
    cuts: tuple[int, ...],
) -> Plan:
    stages, schedule = staged.stages, staged.schedule
    plans, seconds = [each.plan for each in found], [each.seconds for each in found]
    step = stages.cut.step
    facts = verify(schedule)
    timed = step_time(stages, schedule, seconds, target.cluster, devices)
    forward, backward, simulation = timed.times.forward_s, timed.times.input_grad_s, timed.simulation
    weights = timed.times.weight_grad_s
    memories = [each.needs.memory(facts.held_by_stage[k]) for k, each in enumerate(found)]
    memory = max(_by_rank(memories, schedule), key=lambda m: m.peak_bytes)
    limit = min(plan.memory_limit for plan in plans)
    alike = len({plan.mesh for plan in plans}) == 1
    inner: MeshShape = plans[0].mesh if alike else (("device", devices),)
    pairs_in, pairs_out = {i for i, _ in info.pairs}, {o for _, o in info.pairs}
    inputs = tuple(
        Argument(path, short_type(v.aval), _input_spec(i, v, stages, plans), aval_bytes(v.aval), i in pairs_in)
        for i, (path, v) in enumerate(zip(info.input_paths, step.inputs, strict=True))
    )
    outputs = tuple(
        Argument(path, short_type(a.aval), _output_spec(k, a.aval, stages, plans), aval_bytes(a.aval), k in pairs_out)
        for k, (path, a) in enumerate(zip(info.output_paths, step.outputs, strict=True))
    )
    idle = 1 - sum((f + b + w) * schedule.microbatches for f, b, w in zip(forward, backward, weights, strict=True)) / (
        schedule.ranks * simulation.makespan_s or 1.0
    )
    crossing = describe_cuts(step, cuts)
    why = (
        f"{len(plans)} stages on {schedule.ranks} ranks of {devices} device{'s' if devices > 1 else ''}, "
        f"{schedule.name} of {schedule.microbatches} microbatches: ranks idle {idle:.0%} of the pipeline; a microbatch "
        f"sends {crossing} over the cuts",
        *(f"stage {k}: {line}" for k, plan in enumerate(plans) for line in plan.why[1:]),
    )
    pipeline = PipelinePlan(
        schedule.name,
        schedule.placement,
        tuple(schedule.text().splitlines()),
        cuts,
        devices,
        tuple(plans),
        forward,
        backward,
        weights,
        facts.held_by_stage,
    )
    return Plan(
        fingerprint=program,
        cluster=target.cluster.name,
        mesh=((STAGE, schedule.ranks), *inner),
        inputs=inputs,
        outputs=outputs,
        specs=(),
        values=(),
        operands=(),
        output_ids=(),
        detours=(),
        time_s=timed.end_s,
        compute_s=max(plan.compute_s for plan in plans),
        traffic_s=max(plan.traffic_s for plan in plans),
        memory=memory,
        memory_limit=limit,
        collectives=(),
        reshardings=(),
        alternatives=(),
        why=why,
        solver="; ".join(dict.fromkeys(plan.solver for plan in plans)),
        donated=info.donated,
        timeline=_timeline(simulation, schedule, devices, memories),
        microbatches=schedule.microbatches,
        groups=step.groups,
        pipeline=pipeline,
    )


def _by_rank(memories: Sequence[Memory], schedule: Schedule) -> list[Memory]:
    """What each rank holds: all its stages, though only one of them works."""
    found: list[Memory] = []
    for rank in range(schedule.ranks):
        mine = [m for m, at in zip(memories, schedule.placement, strict=True) if at == rank]
        found.append(
            Memory(
                sum(m.state_bytes for m in mine),
                sum(m.inputs_bytes for m in mine),
                sum(m.outputs_bytes for m in mine),
                sum(m.temporary_bytes for m in mine),
            )
        )
    return found


def _check_fits(plan: Plan) -> None:
    if plan.memory.peak_bytes <= plan.memory_limit:
        return
    need, pipeline = plan.memory.peak_bytes, plan.pipeline
    assert pipeline is not None, "a pipeline has stages"
    raise InfeasibleError(
        explain(
            f"the pipeline of {len(pipeline.stages)} stages and {plan.microbatches} microbatches needs at least about "
            f"{size_text(need)} on each device of its fullest rank ({pipeline.schedule}), the limit is "
            f"{size_text(plan.memory_limit)}",
            "a plan whose peak memory is within the limit",
            "use more stages, more microbatches, remat=True, more devices, or a smaller batch",
        ),
        need,
    )


def _input_spec(i: int, value: Value, stages: Stages, plans: Sequence[Plan]) -> Any:
    stage = stages.home.get(i)
    if stage is None:
        return replicated(len(value.shape))
    return plans[stage].input_specs[stages.graphs[stage].inputs.index(i)]


def _output_spec(k: int, aval: Any, stages: Stages, plans: Sequence[Plan]) -> Any:
    stage = stages.output_home[k]
    if stage is None:
        return replicated(len(aval.shape))
    return plans[stage].output_specs[stages.graphs[stage].outputs.index(k)]


def _timeline(simulation: Simulation, schedule: Schedule, devices: int, memories: Sequence[Memory]) -> Timeline:
    """A lane for each stream of the simulated schedule."""
    busy, _ = simulation.busy_s()
    streams = simulation.graph.streams
    lanes = tuple(Lane(s.name, str(k), float(t)) for k, (s, t) in enumerate(zip(streams, busy, strict=True)))
    spans: list[Span] = []
    graph = simulation.graph
    for k in range(graph.size):
        start, end, held = simulation.start_s(k), simulation.end_s(k), graph.row(graph.holds, k)
        if end > start and held:
            spans.append(Span(held[0], graph.names[k], graph.kinds[k], start, end, 1, ""))
    spans.sort(key=lambda s: (s.lane, s.start_s))
    curves = tuple(
        MemoryCurve(f"{r * devices}-{(r + 1) * devices - 1}", ((0.0, m.peak_bytes),))
        for r, m in enumerate(_by_rank(memories, schedule))
    )
    return Timeline(lanes, tuple(spans), curves, ())


def restage(plan: Plan, split: Microbatches, info: StepInfo) -> Staged:
    """The stages of a plan that was made before."""
    pipeline = plan.pipeline
    assert pipeline is not None, "only pipelines have stages"
    schedule = dataclasses.replace(read_schedule("\n".join(pipeline.rows), pipeline.placement), name=pipeline.schedule)
    stages = cut_step(loop_step(split), info, pipeline.cuts, schedule)
    return Staged(stages, tuple(prepare(stage.graph) for stage in stages.graphs), schedule)
