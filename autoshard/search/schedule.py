"""A layout as tasks for the simulator, and what comes out as the plan's timeline.

All devices of one mesh do the same, so one stands for all: a compute stream and a collective stream. Ops run in the
program's order as far as their operands are there; a collective starts when what it moves is made, and whoever reads
its result waits for it:

    gpu   collectives run beside compute (XLA makes them asynchronous)
    cpu   a collective holds both streams (XLA:CPU runs them in order; DESIGN section 7)

What runs in a loop's body is one task of all its trips. What a loop carries is there after the body that makes it, and
the result of a branch after every branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from autoshard import jax_compat
from autoshard.cluster import mesh_size
from autoshard.costmodel import Buffers, Simulation, TaskGraphBuilder, equation_work, simulate
from autoshard.ir import MeshShape, Value, axes_size
from autoshard.search.layout import Layout, Move
from autoshard.search.ops import Op, OpKind, Ops
from autoshard.search.pricing import Pricer
from autoshard.search.rates import Traffic
from autoshard.timeline import Lane, MemoryCurve, OperatorCost, Span, Timeline

SPANS = 2000
"""Most spans of a timeline; beyond, neighbours within a slot of time are joined."""

POINTS = 400
"""Most points of a memory curve: of each slot of time the highest counts."""

COSTS = 200
"""Most lines of cost by operator, dearest first; the others are one line."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A simulated layout.

    Attributes:
      simulation: of its tasks.
      source: for each task the op it belongs to, and the collective it is, if it is one.
      made: for each value the task after which it is there.
    """

    simulation: Simulation
    source: tuple[tuple[Op, Traffic | None], ...]
    made: dict[Value, int]

    @property
    def time_s(self) -> float:
        """Seconds of a step."""
        return self.simulation.makespan_s


@final
@dataclass(slots=True)
class _Tasks:
    """Tasks so far, and after which of them each value is there in which sharding."""

    builder: TaskGraphBuilder
    compute: tuple[int, ...]
    collective: tuple[int, ...]
    source: list[tuple[Op, Traffic | None]] = field(default_factory=list[tuple[Op, Traffic | None]])
    made: dict[Value, int] = field(default_factory=dict[Value, int])
    moved: dict[Value, dict[object, int]] = field(default_factory=dict[Value, dict[object, int]])


def schedule(ops: Ops, layout: Layout, pricer: Pricer) -> Schedule:
    """Simulates a step of a layout."""
    builder = TaskGraphBuilder()
    compute, collective = builder.stream("compute"), builder.stream("collectives")
    tasks = _Tasks(builder, (compute,), (collective,) if pricer.overlaps else (compute, collective))
    sums: dict[int, list[tuple[Traffic, int]]] = {}
    for op, traffic, times in layout.sums:
        sums.setdefault(op.index, []).append((traffic, times))
    moves: dict[Value, list[Move]] = {}
    for move in layout.moves:
        moves.setdefault(move.value, []).append(move)
    carried: dict[Value, list[Value]] = {}
    for tie in ops.ties:
        carried.setdefault(tie.target, []).append(tie.source)
    for op in ops.ops:
        late = [v for end in (*op.operands, *op.results) if isinstance(end, Value) for v in carried.get(end, ())]
        _add(tasks, op, layout, late if op.kind is OpKind.LEAVE else (), sums.get(op.index, ()), moves, pricer)
    return Schedule(simulate(builder.build()), tuple(tasks.source), tasks.made)


def _add(
    tasks: _Tasks,
    op: Op,
    layout: Layout,
    late: Sequence[Value],
    sums: Sequence[tuple[Traffic, int]],
    moves: dict[Value, list[Move]],
    pricer: Pricer,
) -> None:
    """The tasks of one op: its work, the sums of its results, the moves of its results to other shardings.

    It waits for its operands, and for the values of a body that end a loop or a branch (`late`).
    """
    before: dict[int, None] = {}
    for atom, spec in zip(op.operands, layout.choice[op.index].operands, strict=True):
        if isinstance(atom, Value):
            at = tasks.moved.get(atom, {}).get(spec, tasks.made.get(atom, -1))
            if at >= 0:
                before[at] = None
    for value in late:
        for at in (tasks.made.get(value, -1), *tasks.moved.get(value, {}).values()):
            if at >= 0:
                before[at] = None
    after = list(before)
    name = op.equation.name if op.equation is not None else op.kind.value
    seconds = layout.work_s[op.index]
    if seconds > 0 or len(after) > 1:
        after = [_task(tasks, op, None, name, seconds, tasks.compute, after)]
    for traffic, times in sums:
        after = [_task(tasks, op, traffic, name, times * pricer.traffic_s(traffic), tasks.collective, after)]
    for value in op.results:
        if after:
            tasks.made[value] = after[0]
        for move in moves.get(value, ()):
            way = after[:1]
            for traffic in move.route.traffic:
                took = move.times * pricer.traffic_s(traffic)
                way = [_task(tasks, op, traffic, name, took, tasks.collective, way)]
            if way:
                tasks.moved.setdefault(value, {})[move.route.path[-1]] = way[0]


def _task(
    tasks: _Tasks,
    op: Op,
    traffic: Traffic | None,
    name: str,
    seconds: float,
    streams: tuple[int, ...],
    after: Sequence[int],
) -> int:
    tasks.source.append((op, traffic))
    return tasks.builder.task(name, time_s=seconds, streams=streams if seconds > 0 else (), after=after)


def timeline(made: Schedule, layout: Layout, buffers: Buffers, mesh: MeshShape, pricer: Pricer) -> Timeline:
    """What the plan keeps of a schedule."""
    size = mesh_size(mesh)
    devices = "0" if size == 1 else f"0-{size - 1}"
    busy, _ = made.simulation.busy_s()
    streams = made.simulation.graph.streams
    lanes = tuple(Lane(s.name, devices, float(t)) for s, t in zip(streams, busy, strict=True))
    spans = _joined(_spans(made), made.time_s)
    curve = MemoryCurve(devices, _memory_points(made, buffers))
    return Timeline(lanes, spans, (curve,), _costs(made, layout, pricer))


def _spans(made: Schedule) -> list[Span]:
    """A span for each task that takes time; a collective stands in its own lane only."""
    spans: list[Span] = []
    for k, (op, traffic) in enumerate(made.source):
        start, end = made.simulation.start_s(k), made.simulation.end_s(k)
        if end > start:
            lane, name, kind = (0, _name(op), _kind(op)) if traffic is None else (1, traffic.kind, traffic.kind)
            spans.append(Span(lane, name, kind, start, end, 1, _line(op)))
    return sorted(spans, key=lambda s: (s.lane, s.start_s))


def _joined(spans: list[Span], time_s: float) -> tuple[Span, ...]:
    """As they are if they are few; else those that begin in the same slot of time, of one lane and kind, as one."""
    if len(spans) <= SPANS:
        return tuple(spans)
    slot_s = 4 * time_s / SPANS
    groups: dict[tuple[int, str, int], list[Span]] = {}
    for s in spans:
        groups.setdefault((s.lane, s.kind, int(s.start_s / slot_s)), []).append(s)
    joined: list[Span] = []
    for group in groups.values():
        longest = max(group, key=lambda s: s.end_s - s.start_s)
        count = sum(s.count for s in group)
        start, end = group[0].start_s, max(s.end_s for s in group)
        joined.append(Span(longest.lane, longest.name, longest.kind, start, end, count, longest.source_line))
    return tuple(sorted(joined, key=lambda s: (s.lane, s.start_s)))


def _memory_points(made: Schedule, buffers: Buffers) -> tuple[tuple[float, int], ...]:
    """Bytes in use by the memory estimate, at the times at which the simulator makes the values."""
    steps = buffers.steps + 2
    change, at = np.zeros(steps, np.int64), np.zeros(steps)
    every = (*buffers.inputs, *(b for b in buffers.outputs if b is not None), *buffers.temporaries)
    for b in every:
        change[b.start] += b.nbytes
        change[min(b.end, steps - 1)] -= b.nbytes
        task = made.made.get(b.value) if b.value is not None else None
        if task is not None:
            at[b.start] = max(at[b.start], made.simulation.start_s(task))
    nbytes = np.cumsum(change)[: buffers.steps]
    times = np.minimum(np.maximum.accumulate(at)[: buffers.steps], made.time_s)
    points: list[tuple[float, int]] = []
    for part in np.array_split(np.arange(len(times)), min(POINTS, len(times))):
        points.append((float(times[part[0]]), int(nbytes[part].max())))
    kept = [p for k, p in enumerate(points) if k == 0 or p[1] != points[k - 1][1]]
    return tuple(kept)


def _costs(made: Schedule, layout: Layout, pricer: Pricer) -> tuple[OperatorCost, ...]:
    """Like operators of one line of the user's code as one."""
    rows: dict[tuple[str, str, str], list[float]] = {}
    for k, (op, traffic) in enumerate(made.source):
        seconds = made.simulation.end_s(k) - made.simulation.start_s(k)
        if seconds <= 0:
            continue
        if traffic is not None:
            row = rows.setdefault((traffic.kind, traffic.kind, _line(op)), [0, 0.0, 0.0, 0.0])
            figures = (op.times, seconds, 0.0, float(op.times * traffic.nbytes))
        else:
            row = rows.setdefault((_name(op), _kind(op), _line(op)), [0, 0.0, 0.0, 0.0])
            figures = (op.times, seconds, *_work(op, layout, pricer))
        for i, figure in enumerate(figures):
            row[i] += figure
    made_rows = [OperatorCost(name, kind, line, int(n), s, f, b) for (name, kind, line), (n, s, f, b) in rows.items()]
    made_rows.sort(key=lambda c: -c.time_s)
    rest = made_rows[COSTS:]
    if not rest:
        return tuple(made_rows)
    total = OperatorCost(
        f"{len(rest)} more",
        "",
        "",
        sum(c.count for c in rest),
        sum(c.time_s for c in rest),
        sum(c.flops for c in rest),
        sum(c.nbytes for c in rest),
    )
    return (*made_rows[:COSTS], total)


def _work(op: Op, layout: Layout, pricer: Pricer) -> tuple[float, float]:
    """Operations of one device, and bytes if nothing were fused."""
    assert op.equation is not None, "only equations take time"
    work = equation_work(op.equation)
    share = 1.0 / axes_size(layout.choice[op.index].split_axes, pricer.sizes)
    return op.times * share * (work.flops + work.transcendentals), op.times * share * work.nbytes


def _name(op: Op) -> str:
    return op.equation.name if op.equation is not None else op.kind.value


def _kind(op: Op) -> str:
    return equation_work(op.equation).kind.value if op.kind is OpKind.APPLY and op.equation is not None else ""


def _line(op: Op) -> str:
    return jax_compat.source_line(op.equation.place.source) if op.equation is not None else ""
