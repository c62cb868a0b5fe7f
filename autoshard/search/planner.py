"""From a graph to a plan: meshes, templates, the solver, and the record of why.

For each candidate mesh the sharding problem is built and solved; each template is the same problem with fewer choices,
and its answer is a start of the full search, so the plan is never dearer than any template that fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from autoshard.cluster import Cluster, DeviceSpec, mesh_size
from autoshard.costmodel import (
    Buffers,
    EquationKernels,
    Lives,
    cpu_kernels,
    find_lives,
    fresh_pages_s,
    materialized,
    peak_memory,
    stored_anywhere,
)
from autoshard.errors import InfeasibleError, MeshError, explain
from autoshard.ir import Graph, MeshShape, Spec, StepInfo, Value, local_bytes
from autoshard.passes import DuplicateCheap, run_passes
from autoshard.plan import Alternative, Memory, Plan
from autoshard.search.layout import Layout, estimate, lay_out
from autoshard.search.memory_rows import MemoryTable, answer_buffers, copy_bytes, memory_table, peak_times, priced
from autoshard.search.meshes import candidate_meshes, named_mesh
from autoshard.search.model import Model, build_model, build_problem
from autoshard.search.ops import Ops, list_ops
from autoshard.search.pricing import Pricer
from autoshard.search.problem import Problem, Solution
from autoshard.search.record import record_plan
from autoshard.search.schedule import Schedule, schedule, timeline
from autoshard.search.solve import solve
from autoshard.search.templates import restrict, split_state, templates
from autoshard.show import size_text
from autoshard.timeline import NO_TIMELINE

OnEvent = Callable[[str, Any], None]
"""Called with the name of each finished part of planning and what it made (a graph, or a text)."""

NOTHING: Mapping[int, int] = {}
NO_RATES: Mapping[int, float] = {}

MEMORY_ROWS = 8
"""Times at which the solver sees memory: the highest peaks of the templates."""

MEMORY_ROUNDS = 4
"""How often rows are added for peaks that the last answer moved elsewhere, or the limit of the rows is lowered by what
they do not see of the last answer's peak."""

LEAST_SLACK = 1.1
"""The rows' limit is lowered to this times what the thriftiest choice of each variable takes, no further. Ours."""

TIGHT = 4.0
"""From this part of the limit on, by its rows, an answer's whole peak is worked out (it may be that many times what the
rows see, which miss copies in other shardings). Ours, for plan time: below it, and at templates', `_choose` looks."""

MAX_DEVICES = 1024
"""Largest cluster that is tried when a step does not fit; the largest preset."""

LARGER_BUDGET_S = 16.0
"""Seconds for trying larger clusters when a step does not fit. Ours: an error message may take this long."""

LIMIT_GAP = 1e-4
"""With this gap a search under a memory limit is content: the estimate of a step time is far from that exact."""

DEFAULT_BUDGET_S = 20.0
"""Seconds for the searches of all meshes together; exact methods mostly end much sooner."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What every mesh is planned for.

    Attributes:
      graph: the prepared graph; ops: its ops; written: values that go through memory; stored: those in
        bodies too; lives: when.
      donated: (input, output) pairs in one buffer.
      info: names and roles; state: values of state arguments; pins: fixed specs.
      limit: most bytes on a device.
      kernels: of a calibrated CPU, what XLA makes of the graph.
    """

    graph: Graph
    ops: Ops
    written: frozenset[Value]
    stored: frozenset[Value]
    lives: Lives
    donated: tuple[tuple[int, int], ...]
    info: StepInfo
    state: frozenset[Value]
    pins: Mapping[Value, Spec]
    limit: int
    kernels: Mapping[int, EquationKernels] | None


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """What all answers on one mesh share.

    Attributes:
      mesh: axes and sizes.
      pricer: costs; model: choices; memory: bytes by choice.
    """

    mesh: MeshShape
    pricer: Pricer
    model: Model
    memory: MemoryTable

    @property
    def least_share(self) -> float:
        """What overlap leaves of the time without it, at least: compute and collectives side by side."""
        return 0.5 if self.pricer.overlaps else 1.0


@final
@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """An answer carried out.

    Attributes:
      layout: the sharding of everything.
      buffers: its memory; `memory`: the parts of their peak.
      pages_s: seconds for memory that a step takes anew, in the layout's compute, not in its schedule.
    """

    layout: Layout
    buffers: Buffers
    memory: Memory
    pages_s: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One answer on one mesh.

    Attributes:
      name: "search" or the template's.
      ground: what it was found on.
      solution: of the solver.
      time_s: estimated step time; without overlap until it has a schedule.
      peak_bytes: estimated peak on one device.
      exact: carried out, None where only the rows' estimate is known.
      schedule: its simulated step, None before.
    """

    name: str
    ground: Ground
    solution: Solution
    time_s: float
    peak_bytes: int
    exact: Exact | None = None
    schedule: Schedule | None = None


def prepare(graph: Graph, on_event: OnEvent | None = None) -> Graph:
    """The graph that plans speak of: cheap values duplicated, one a reader."""
    return run_passes(graph, [DuplicateCheap()], on_event)


def make_plan(
    graph: Graph,
    info: StepInfo,
    cluster: Cluster,
    mesh: MeshShape | None,
    *,
    pins: Mapping[int, Spec],
    memory_limit: int | None,
    budget_s: float | None,
    seed: int,
    on_event: OnEvent | None = None,
    tie: bool = True,
    suggest: bool = True,
    on_schedule: Callable[[Schedule], None] | None = None,
    compare: bool = True,
    hoist: bool = True,
    split: Mapping[int, int] = NOTHING,
    arriving: Mapping[int, float] = NO_RATES,
    known: dict[Any, tuple[Task, Ground, Problem]] | None = None,
) -> Plan:
    """Plans a step.

    Args:
      graph: the step, traced and prepared.
      info: names and roles of its flat arguments and results.
      cluster: devices and links.
      mesh: axes and sizes, None to choose.
      pins: flat argument to the spec it must have.
      memory_limit: bytes a device may hold, None for what the device has.
      budget_s: seconds for the searches of all meshes together.
      seed: of every random decision.
      on_event: called after each part.
      tie: plan repeated layers once.
      suggest: look for a larger cluster if nothing fits.
      on_schedule: called with the simulated step of the plan.
      compare: solve each template too; they are starts of the search, and the plan's alternatives. Without, the plan
        has no timeline either.
      hoist: as `list_ops` takes it.
      split: flat arguments, of the state, to the number of inner axes of the mesh they are to be split over where they
        divide.
      arriving: flat arguments that come from other devices in each step, to the seconds a byte of a part takes.
      known: problems of earlier calls for the same graph, cluster and mesh, which differ in `split` only; filled in.

    Raises:
      InfeasibleError: nothing fits the memory limit; names the need, and a larger cluster that would do.
      MeshError, PinError, UnknownPrimitiveError: see there.
    """
    tell = on_event or _silent
    limit = memory_limit if memory_limit is not None else cluster.memory_bytes
    earlier = next((t for (g, _, _), (t, _, _) in (known or {}).items() if g is graph), None)
    task = earlier or _task(graph, info, pins, limit, cluster.device(0), hoist)
    meshes = [mesh] if mesh is not None else candidate_meshes(cluster)
    for shape in meshes:
        _check_mesh(shape, cluster)
    budget = (budget_s or DEFAULT_BUDGET_S) / len(meshes)
    found: list[Candidate] = []
    for shape in meshes:
        tell("mesh", shape)
        found += plan_mesh(
            task,
            cluster,
            shape,
            budget_s=budget,
            seed=seed,
            tie=tie,
            tell=tell,
            compare=compare,
            split={graph.inputs[i]: n for i, n in split.items()},
            arriving={graph.inputs[i]: seconds for i, seconds in arriving.items()},
            known=known,
        )
    chosen = _choose(task, found)
    if chosen is None:
        enough = _larger(task, cluster, mesh, found, seed) if suggest else ""
        need = min((c.peak_bytes for c in found), default=None)
        raise InfeasibleError(_does_not_fit(found, limit, cluster, enough), need)
    best, found = chosen
    ground, exact, made = best.ground, best.exact, best.schedule
    assert exact is not None, "a chosen answer has been carried out"
    assert made is not None, "and simulated"
    plan = record_plan(
        task.graph,
        task.ops,
        info,
        cluster,
        ground.mesh,
        exact.layout,
        best.time_s,
        exact.memory,
        limit,
        best.name,
        best.solution,
        tuple(_alternatives(found, best, limit)),
        pins,
        ground.pricer.traffic_s,
        timeline(made, exact.layout, exact.buffers, ground.mesh, ground.pricer) if compare else NO_TIMELINE,
    )
    if on_schedule is not None:
        on_schedule(made)
    tell("plan", plan)
    return plan


def _silent(_name: str, _what: Any) -> None:
    """Where nobody listens."""


def plan_mesh(
    task: Task,
    cluster: Cluster,
    mesh: MeshShape,
    *,
    budget_s: float,
    seed: int,
    tie: bool,
    tell: OnEvent,
    compare: bool = True,
    split: Mapping[Value, int] | None = None,
    arriving: Mapping[Value, float] | None = None,
    known: dict[Any, tuple[Task, Ground, Problem]] | None = None,
) -> list[Candidate]:
    """The answers of the full search and of each template on one mesh."""
    deadline = time.monotonic() + budget_s
    key = (task.graph, cluster, mesh)
    if known is not None and key in known:
        _, ground, problem = known[key]
        pricer, model = ground.pricer, ground.model
    else:
        pricer = Pricer(cluster, mesh, task.stored.__contains__, task.kernels)
        model = build_model(task.ops, mesh, task.pins, tie, task.written)
        ground = Ground(mesh, pricer, model, memory_table(model, task.lives, pricer.sizes))
        problem = build_problem(model, pricer, arriving)
        if known is not None:
            known[key] = task, ground, problem
    names = tuple(axis for axis, size in mesh if size > 1)
    for inner in sorted(set((split or {}).values())):
        mine = frozenset(v for v, n in (split or {}).items() if n == inner)
        problem = restrict(problem, model, split_state(names[-inner:]), mine, pricer.sizes, task.pins) or problem
    tell("problem", f"{len(problem.costs)} decisions, {sum(len(c) for c in problem.costs)} choices")
    found: list[Candidate] = []
    for template in templates(mesh) if compare else ():
        narrow = restrict(problem, model, template, task.state, pricer.sizes, task.pins)
        if narrow is None:
            continue
        left = max(deadline - time.monotonic(), 0.1)
        candidate = _search(task, template.name, ground, narrow, left / 6, seed, (), 1)
        if candidate is not None:
            found.append(candidate)
            tell("template", f"{template.name}: {candidate.time_s:.3e} s")
    starts = tuple(c.solution.choice for c in found)
    left = max(deadline - time.monotonic(), 1.0)
    candidate = _search(task, "search", ground, problem, left, seed, starts, MEMORY_ROUNDS)
    if candidate is not None:
        found.insert(0, candidate)
        tell("search", f"{candidate.time_s:.3e} s, {candidate.solution.result.value}")
    return found


def _search(
    task: Task,
    name: str,
    ground: Ground,
    problem: Problem,
    budget_s: float,
    seed: int,
    starts: tuple[tuple[int, ...], ...],
    rounds: int,
) -> Candidate | None:
    """Solves; where the answer does not fit, adds memory rows, and a price on copies in other shardings."""
    times: set[int] = set()
    allowed = float(task.limit)
    plain, price = problem, 0.0
    deadline = time.monotonic() + budget_s
    best: Candidate | None = None
    for _ in range(rounds):
        left = max(deadline - time.monotonic(), 0.5)
        solution = solve(problem, budget_s=left, seed=seed, starts=starts, gap=LIMIT_GAP)
        if solution.stats.get("interrupted"):  # a search keeps its answer; who waits for a plan wants to stop
            raise KeyboardInterrupt
        if not solution.choice:
            break
        curve = ground.memory.curve(solution.choice)
        peak = int(curve.max(initial=0))
        seconds = estimate(ground.model, solution.choice, ground.pricer)
        exact = None
        if rounds > 1 and peak > task.limit / TIGHT:
            exact = _exact(task, ground, solution)
            allowed = min(allowed, task.limit - (exact.memory.peak_bytes - peak))
            peak = max(peak, exact.memory.peak_bytes)
        candidate = Candidate(name, ground, solution, seconds, peak, exact)
        if best is None or candidate.peak_bytes < best.peak_bytes:
            best = candidate
        if candidate.peak_bytes <= task.limit:
            return candidate
        times |= set(peak_times(curve, MEMORY_ROWS))
        if time.monotonic() > deadline:
            break
        if allowed < task.limit:
            price = max(4.0 * price, seconds / task.limit)
            problem = priced(plain, copy_bytes(ground.model, task.lives, times, ground.pricer), price)
        least = ground.memory.least(times)
        problem = ground.memory.constrain(problem, sorted(times), max(allowed, LEAST_SLACK * least))
    return best


def _choose(task: Task, found: list[Candidate]) -> tuple[Candidate, list[Candidate]] | None:
    """The quickest simulated answer that fits, and all answers with what is known of their times and peaks.

    None where none fits; `found` then holds the peaks. A step with overlap takes at least half of what it takes
    without, so answers more than twice as slow as the best are not simulated.
    """
    best: Candidate | None = None
    order = sorted(range(len(found)), key=lambda k: (found[k].time_s, found[k].peak_bytes, found[k].name != "search"))
    for k in order:
        c = found[k]
        if c.peak_bytes > task.limit or (best is not None and c.time_s * c.ground.least_share >= best.time_s):
            continue
        found[k] = c = _scheduled(task, c)
        if best is not None and c.time_s >= best.time_s:
            continue
        exact = c.exact or _exact(task, c.ground, c.solution)
        time_s = c.time_s + exact.pages_s
        found[k] = c = replace(c, exact=exact, peak_bytes=exact.memory.peak_bytes, time_s=time_s)
        if c.peak_bytes <= task.limit and (best is None or c.time_s < best.time_s):
            best = c
    if best is not None:
        return best, found
    least = min(found, key=lambda c: c.peak_bytes, default=None)
    if least is not None and least.exact is None:  # by the rows only: it may be more
        exact = _exact(task, least.ground, least.solution)
        found[found.index(least)] = replace(least, peak_bytes=max(least.peak_bytes, exact.memory.peak_bytes))
    return None


def _scheduled(task: Task, c: Candidate) -> Candidate:
    """The answer with its simulated step."""
    layout = c.exact.layout if c.exact is not None else lay_out(c.ground.model, c.solution.choice, c.ground.pricer)
    made = schedule(task.ops, layout, c.ground.pricer)
    return replace(c, schedule=made, time_s=made.time_s)


def _larger(task: Task, cluster: Cluster, mesh: MeshShape | None, found: list[Candidate], seed: int) -> str:
    """What is known of larger clusters of the same devices: the smallest that a plan fits on, by doubling.

    The mesh grows along its first axis. A peak is at best divided by the factor, so smaller ones are not tried.
    """
    if not found:
        return ""
    need = min(c.peak_bytes for c in found)
    deadline = time.monotonic() + LARGER_BUDGET_S
    factor, tried = 2, ""
    while cluster.size * factor <= MAX_DEVICES and time.monotonic() < deadline:
        larger = cluster.times(factor) if need <= task.limit * factor else None
        if larger is not None:
            shape = ((mesh[0][0], mesh[0][1] * factor), *mesh[1:]) if mesh else named_mesh((larger.size,))
            answers = plan_mesh(task, larger, shape, budget_s=LARGER_BUDGET_S / 8, seed=seed, tie=True, tell=_silent)
            chosen = _choose(task, answers)
            if chosen is not None:
                return f"{larger.name} would do ({size_text(chosen[0].peak_bytes)}, mesh {dict(shape)})"
            tried = larger.name
        factor *= 2
    return f"more devices alone do not help: {tried} would not do either" if tried else ""


def _exact(task: Task, ground: Ground, solution: Solution) -> Exact:
    """An answer carried out, and its peak."""
    layout, pricer = lay_out(ground.model, solution.choice, ground.pricer), ground.pricer
    buffers = answer_buffers(task.graph, task.ops, layout, pricer, task.donated, task.written.__contains__)
    peak = peak_memory(buffers)
    state = sum(local_bytes(v.aval, layout.spec[v], pricer.sizes) for v in task.state)
    memory = Memory(state, peak.inputs_bytes - state, peak.outputs_bytes, peak.temporary_bytes)
    pages_s = fresh_pages_s(memory.temporary_bytes, pricer.cluster.device(0))
    return Exact(replace(layout, compute_s=layout.compute_s + pages_s), buffers, memory, pages_s)


def _task(graph: Graph, info: StepInfo, pins: Mapping[int, Spec], limit: int, device: DeviceSpec, hoist: bool) -> Task:
    ops = list_ops(graph, info.pairs, hoist)
    given = set(info.donated)
    donated = tuple((i, o) for i, o in info.pairs if i in given)
    written = materialized(graph)
    lives = find_lives(graph, donated, device.kind, written.__contains__ if device.kind == "gpu" else None)
    state = frozenset(graph.inputs[i] for i, _ in info.pairs)
    fixed = {graph.inputs[i]: spec for i, spec in pins.items()}
    kernels = cpu_kernels(graph) if device.calibrated and device.kind == "cpu" else None
    return Task(graph, ops, written, stored_anywhere(graph), lives, donated, info, state, fixed, limit, kernels)


def _check_mesh(mesh: MeshShape, cluster: Cluster) -> None:
    if mesh_size(mesh) != cluster.size:
        raise MeshError(
            explain(
                f"a mesh of {mesh_size(mesh)} devices {dict(mesh)} on {cluster.name} with {cluster.size}",
                "a mesh whose sizes multiply to the number of devices",
                "change the mesh, or name other devices",
            )
        )


def _alternatives(found: list[Candidate], best: Candidate, limit: int) -> list[Alternative]:
    """All other answers, best first, with the reason each was not taken."""
    rows: list[Alternative] = []
    for c in sorted(found, key=lambda c: c.time_s):
        if c is best:
            continue
        shape = "x".join(str(n) for _, n in c.ground.mesh)
        name = f"{c.name}, mesh {shape}"
        if c.peak_bytes > limit:
            note = f"does not fit: {size_text(c.peak_bytes)} of {size_text(limit)}"
        elif best.time_s > 0:
            note = f"{c.time_s / best.time_s:.2f}x the time"
        else:
            note = "no faster"
        rows.append(Alternative(name, c.time_s, c.peak_bytes, note))
    return rows


def _does_not_fit(found: list[Candidate], limit: int, cluster: Cluster, enough: str) -> str:
    if not found:
        return explain(
            f"no plan meets the pins and a limit of {size_text(limit)} a device on {cluster.name}",
            "pins that leave every argument a sharding",
            "remove a pin or raise memory_limit",
        )
    least = min(found, key=lambda c: c.peak_bytes)
    need = least.peak_bytes
    more = "devices with more memory" if enough.startswith("more devices") else "more devices or ones with more memory"
    return explain(
        f"the step needs at least about {size_text(need)} on each device of {cluster.name} "
        f"({least.name}, mesh {dict(least.ground.mesh)}), the limit is {size_text(limit)}",
        "a plan whose peak memory is within the limit",
        f"use {more}, a smaller batch, or jax.checkpoint on the layers" + (f"; {enough}" if enough else ""),
    )
