"""A pipeline schedule as tasks for the simulator: makespan, bubble and memory over time come from there.

before        a task on a rank's compute stream: until its first action may start
action        a task on its rank's compute stream, after the action before it in the rank's row and what it needs
activations,  between ranks: seconds on a stream for each direction of two ranks, or bytes over the links between
gradients     them; between stages of one rank nothing
all-reduce    of a stage, on its rank's collective stream, after the stage's last backward
activations held   from the forward pass to the end of the (weight-)backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from autoshard.costmodel.simulator import Simulation
from autoshard.costmodel.task_graph import TaskGraph, TaskGraphBuilder
from autoshard.errors import ArgumentError, explain
from autoshard.schedules import Action, Kind, Schedule, Send, StageTimes, needs, send_priority, verify


@final
@dataclass(frozen=True, slots=True)
class RankLink:
    """What messages from one rank to another travel over.

    Attributes:
      source, target: ranks.
      bytes_per_s: bandwidth.
      wire: its name; pairs of ranks that name the same wire share it.
    """

    source: int
    target: int
    bytes_per_s: float
    wire: str = ""


def schedule_tasks(schedule: Schedule, times: StageTimes, links: Sequence[RankLink] = ()) -> TaskGraph:
    """The tasks of a schedule.

    Args:
      schedule: a table, which is verified.
      times: of its virtual stages.
      links: between ranks that send bytes to each other.

    Raises:
      ArgumentError: the schedule is wrong, the times are of other stages, or a link is missing.
    """
    facts = verify(schedule)
    times.check(schedule.stages)
    builder = TaskGraphBuilder()
    compute = [builder.stream(f"rank {r}", r) for r in range(schedule.ranks)]
    sums = [builder.stream(f"rank {r} collectives", r) for r in range(schedule.ranks)] if times.all_reduce_s else []
    ways = _Ways(builder, links)
    at = {schedule.rows[r][k]: (r, k) for r, k in facts.order}
    there: dict[Action, int] = {}  # the task after which another rank has an action's result
    done: dict[Action, int] = {}
    before: list[int | None] = [None] * schedule.ranks
    for rank in range(schedule.ranks):
        first = max((t for t, at in zip(times.before_s, schedule.placement, strict=False) if at == rank), default=0.0)
        if first > 0:
            before[rank] = builder.task("before", time_s=first, streams=(compute[rank],), kind="before")
    last_of: dict[int, int] = {}
    for rank, position in facts.order:
        action = schedule.rows[rank][position]
        after = [] if before[rank] is None else [before[rank]]
        for need in needs(action, schedule.stages - 1, at):
            after.append(done[need] if need.stage == action.stage else there[need])
        name = str(action)
        task = builder.task(
            name,
            time_s=times.action_s(action),
            streams=(compute[rank],),
            after=[k for k in after if k is not None],
            kind=action.kind.name.lower(),
        )
        done[action] = before[rank] = last_of[action.stage] = task
        there[action] = _sent(action, task, schedule, times, ways)
    if times.all_reduce_s:
        for stage, rank in enumerate(schedule.placement):
            seconds, after = times.all_reduce_s[stage], (last_of[stage],)
            builder.task(f"all-reduce @{stage}", time_s=seconds, streams=(sums[rank],), after=after, kind="all_reduce")
    _buffers(builder, schedule, times, done)
    return builder.build()


def bubble_share(simulation: Simulation, ranks: int) -> float:
    """The part of ranks times makespan in which no action runs, of simulated `schedule_tasks`."""
    busy, _ = simulation.busy_s()
    return 1.0 - float(busy[:ranks].sum()) / (ranks * simulation.makespan_s)


@final
class _Ways:
    """Streams and links between ranks, made when they are first used."""

    __slots__ = ("builder", "given", "links", "streams")

    def __init__(self, builder: TaskGraphBuilder, links: Sequence[RankLink]) -> None:
        self.builder = builder
        self.given = {(link.source, link.target): link for link in links}
        self.links: dict[str | tuple[int, int], tuple[int, float]] = {}
        self.streams: dict[tuple[int, int], int] = {}

    def stream(self, source: int, target: int) -> int:
        if (source, target) not in self.streams:
            self.streams[source, target] = self.builder.stream(f"rank {source} -> rank {target}")
        return self.streams[source, target]

    def link(self, source: int, target: int) -> int:
        way = self.given.get((source, target))
        if way is None:
            given = f"rank {source} sends bytes to rank {target} and no link joins them"
            raise ArgumentError(explain(given, "a RankLink from one to the other", "add it, or give seconds"))
        key = way.wire or (source, target)
        if key not in self.links:
            name = way.wire or f"rank {source} -> rank {target}"
            self.links[key] = self.builder.link(name, way.bytes_per_s), way.bytes_per_s
        number, rate = self.links[key]
        if rate != way.bytes_per_s:
            given = f"wire {way.wire!r} of {rate} and of {way.bytes_per_s} bytes a second"
            raise ArgumentError(explain(given, "one bandwidth", "correct one of its links"))
        return number


def _sent(action: Action, task: int, schedule: Schedule, times: StageTimes, ways: _Ways) -> int:
    """The task after which the result of an action is where it is needed."""
    step = 1 if action.kind is Kind.FORWARD else -1
    stage = action.stage + step
    if action.kind is Kind.WEIGHT_GRAD or not 0 <= stage < schedule.stages or not times.sends:
        return task
    source, target = schedule.placement[action.stage], schedule.placement[stage]
    seconds, nbytes = _size(times.sends[min(action.stage, stage)], step > 0)
    if source == target or (seconds <= 0 and nbytes <= 0):
        return task
    return ways.builder.task(
        f"{action} to {target}",
        time_s=0.0 if nbytes else seconds,
        latency_s=seconds if nbytes else 0.0,
        nbytes=nbytes,
        streams=() if nbytes else (ways.stream(source, target),),
        links=(ways.link(source, target),) if nbytes else (),
        after=(task,),
        priority=send_priority(action, schedule.stages),
        kind="send",
    )


def _size(send: Send, forward: bool) -> tuple[float, float]:
    return (send.forward_s, send.forward_bytes) if forward else (send.backward_s, send.backward_bytes)


def _buffers(builder: TaskGraphBuilder, schedule: Schedule, times: StageTimes, done: dict[Action, int]) -> None:
    """Activations of every microbatch, and what is kept."""
    for stage, rank in enumerate(schedule.placement):
        if times.kept_bytes:
            builder.buffer(rank, times.kept_bytes[stage], kept=True)
        for m in range(schedule.microbatches if times.held_bytes else 0):
            users = [done[a] for kind in Kind if (a := Action(kind, stage, m)) in done]
            builder.buffer(rank, times.held_bytes[stage], users[0], users[1:])
