"""Seconds and bytes of a schedule's parts, and when everything starts under them.

Semantics are the simulator's (`autoshard.costmodel.simulate` of `schedule_tasks`): a rank does one action at a time,
messages in one direction between two ranks go one at a time, whatever can start does.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from autoshard.errors import ArgumentError, explain
from autoshard.schedules.table import Action, Kind, Schedule

TICK_S = 1e-12
"""Times are whole ticks, those of the simulator, so that sums are exact and what is equal is equal."""


@final
@dataclass(frozen=True, slots=True)
class Send:
    """What goes over the boundary between a stage and the next, for one microbatch: seconds, then bytes.

    Attributes:
      forward_s, backward_s: seconds for activations, and for their gradients.
      forward_bytes, backward_bytes: bytes that share the links between the two ranks.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class StageTimes:
    """What each virtual stage takes for one microbatch. A whole backward pass takes both its parts.

    Attributes:
      forward_s, input_grad_s, weight_grad_s: seconds, for each stage.
      sends: for each boundary between stages; empty: nothing is sent. Stages of one rank send nothing to each other.
      all_reduce_s: seconds to sum a stage's gradients over its replicas, after its last backward; empty: none.
      held_bytes: activations held from a forward pass to its (weight-)backward; empty: none.
      kept_bytes: weights and optimizer state; empty: none.
      before_s: seconds from the start of the step to a stage's first action; empty: none. `schedule_tasks` reads it.
    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    sends: tuple[Send, ...] = ()
    all_reduce_s: tuple[float, ...] = ()
    held_bytes: tuple[int, ...] = ()
    kept_bytes: tuple[int, ...] = ()
    before_s: tuple[float, ...] = ()

    @property
    def stages(self) -> int:
        """Number of virtual stages."""
        return len(self.forward_s)

    def action_s(self, action: Action) -> float:
        """Seconds of an action."""
        s = action.stage
        match action.kind:
            case Kind.FORWARD:
                return self.forward_s[s]
            case Kind.BACKWARD:
                return self.input_grad_s[s] + self.weight_grad_s[s]
            case Kind.INPUT_GRAD:
                return self.input_grad_s[s]
            case Kind.WEIGHT_GRAD:
                return self.weight_grad_s[s]

    def check(self, stages: int) -> None:
        """Raises ArgumentError where a field is not of this many stages."""
        fields = (
            ("forward_s", len(self.forward_s), stages, False),
            ("input_grad_s", len(self.input_grad_s), stages, False),
            ("weight_grad_s", len(self.weight_grad_s), stages, False),
            ("sends", len(self.sends), stages - 1, True),
            ("all_reduce_s", len(self.all_reduce_s), stages, True),
            ("held_bytes", len(self.held_bytes), stages, True),
            ("kept_bytes", len(self.kept_bytes), stages, True),
            ("before_s", len(self.before_s), stages, True),
        )
        for name, given, wanted, may_miss in fields:
            if given != wanted and not (may_miss and given == 0):
                raise ArgumentError(
                    explain(f"{name} of {given} for {stages} stages", f"{wanted} numbers", "give one for each")
                )


def uniform_times(
    stages: int, forward_s: float = 1.0, input_grad_s: float = 1.0, weight_grad_s: float = 1.0, send_s: float = 0.0
) -> StageTimes:
    """All stages alike."""
    sends = (Send(send_s, send_s),) * (stages - 1) if send_s else ()
    return StageTimes((forward_s,) * stages, (input_grad_s,) * stages, (weight_grad_s,) * stages, sends)


def send_priority(action: Action, stages: int) -> int:
    """The least goes first of messages that wait for a link at the same time: by microbatch, then as it travels."""
    turn = action.stage if action.kind is Kind.FORWARD else 2 * stages - 1 - action.stage
    return action.microbatch * 2 * stages + turn


@runtime_checkable
class Picker(Protocol):
    """Decides what an idle rank does."""

    def ready(self, stage: int, microbatch: int, kind: Kind) -> None:
        """A forward, a backward (kind BACKWARD, whole or its first part) or a weight gradient could run now."""
        ...

    def pick(self, rank: int) -> Action | None:
        """What an idle rank does now, None for nothing."""
        ...

    def ended(self, action: Action) -> None:
        """An action has ended."""
        ...


def play(picker: Picker, placement: Sequence[int], microbatches: int, times: StageTimes) -> dict[Action, float]:
    """Runs a pipeline with a picker's decisions; the start of every action, in the order in which they start.

    Raises:
      ArgumentError: times of other stages, or of sends in bytes.
    """
    times.check(len(placement))
    if any(send.forward_bytes or send.backward_bytes for send in times.sends):
        raise ArgumentError(
            explain("sends in bytes", "sends in seconds here", "divide them by the bandwidth of the links")
        )
    return _Run(picker, tuple(placement), times).run(microbatches)


@final
class _Run:
    """The event loop's state."""

    __slots__ = ("busy", "count", "events", "links", "now", "picker", "placement", "starts", "times")

    def __init__(self, picker: Picker, placement: tuple[int, ...], times: StageTimes) -> None:
        self.picker, self.placement, self.times = picker, placement, times
        self.events: list[tuple[int, int, bool, Action]] = []
        self.links: dict[tuple[int, int], list[tuple[int, Action]]] = {}
        self.busy: set[int | tuple[int, int]] = set()
        self.starts: dict[Action, float] = {}
        self.now, self.count = 0, 0

    def run(self, microbatches: int) -> dict[Action, float]:
        for m in range(microbatches):
            self.picker.ready(0, m, Kind.FORWARD)
        while True:
            self._start()
            if not self.events:
                return self.starts
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now:
                _, _, sent, action = heapq.heappop(self.events)
                if sent:
                    self.busy.discard(self._way(action))
                    self._arrive(action)
                else:
                    self.busy.discard(self.placement[action.stage])
                    self._end(action)

    def _start(self) -> None:
        """Every idle rank and link starts what it can."""
        for rank in range(max(self.placement) + 1):
            if rank not in self.busy:
                action = self.picker.pick(rank)
                if action is not None:
                    self.busy.add(rank)
                    self.starts[action] = self.now * TICK_S
                    self._event(self.times.action_s(action), False, action)
        for way, waiting in self.links.items():
            if waiting and way not in self.busy:
                self.busy.add(way)
                _, action = heapq.heappop(waiting)
                self._event(self._send_s(action), True, action)

    def _event(self, seconds: float, sent: bool, action: Action) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + round(seconds / TICK_S), self.count, sent, action))

    def _end(self, action: Action) -> None:
        """What an action's end makes possible."""
        self.picker.ended(action)
        last = len(self.placement) - 1
        if action.kind is Kind.WEIGHT_GRAD:
            return
        if action.kind is Kind.INPUT_GRAD:
            self.picker.ready(action.stage, action.microbatch, Kind.WEIGHT_GRAD)
        if action.kind is Kind.FORWARD and action.stage == last:
            self.picker.ready(last, action.microbatch, Kind.BACKWARD)
        elif action.kind is Kind.FORWARD or action.stage > 0:
            way = self._way(action)
            if way[0] == way[1] or self._send_s(action) <= 0:
                self._arrive(action)
            else:
                heapq.heappush(self.links.setdefault(way, []), (send_priority(action, last + 1), action))

    def _arrive(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self.picker.ready(action.stage + 1, action.microbatch, Kind.FORWARD)
        else:
            self.picker.ready(action.stage - 1, action.microbatch, Kind.BACKWARD)

    def _way(self, action: Action) -> tuple[int, int]:
        step = 1 if action.kind is Kind.FORWARD else -1
        return self.placement[action.stage], self.placement[action.stage + step]

    def _send_s(self, action: Action) -> float:
        if not self.times.sends:
            return 0.0
        if action.kind is Kind.FORWARD:
            return self.times.sends[action.stage].forward_s
        return self.times.sends[action.stage - 1].backward_s


@final
class _Rows:
    """Picks a schedule's own order."""

    __slots__ = ("left", "may")

    def __init__(self, schedule: Schedule) -> None:
        self.left = [deque(row) for row in schedule.rows]
        self.may: set[tuple[int, int, Kind]] = set()

    def ready(self, stage: int, microbatch: int, kind: Kind) -> None:
        self.may.add((stage, microbatch, kind))

    def pick(self, rank: int) -> Action | None:
        row = self.left[rank]
        if not row:
            return None
        kind = Kind.BACKWARD if row[0].kind is Kind.INPUT_GRAD else row[0].kind
        return row.popleft() if (row[0].stage, row[0].microbatch, kind) in self.may else None

    def ended(self, action: Action) -> None:
        pass


def start_times(schedule: Schedule, times: StageTimes) -> dict[Action, float]:
    """When each action of a verified schedule starts.

    Raises:
      ArgumentError: times of other stages, or of sends in bytes.
    """
    return play(_Rows(schedule), schedule.placement, schedule.microbatches, times)


def makespan_s(schedule: Schedule, times: StageTimes) -> float:
    """Seconds until the last action of a verified schedule, and the all-reduces after it, are done."""
    ends: dict[int, float] = {}
    for action, start in start_times(schedule, times).items():
        ends[action.stage] = max(ends.get(action.stage, 0.0), start + times.action_s(action))
    return _with_all_reduce(schedule.placement, ends, times)


def _with_all_reduce(placement: Sequence[int], ends: dict[int, float], times: StageTimes) -> float:
    """The all-reduces of a rank's stages go one at a time."""
    if not times.all_reduce_s:
        return max(ends.values())
    free: dict[int, float] = {}
    for stage in sorted(ends, key=lambda s: ends[s]):
        rank = placement[stage]
        free[rank] = max(free.get(rank, 0.0), ends[stage]) + times.all_reduce_s[stage]
    return max(*free.values(), 0.0)


def idle_share(schedule: Schedule, times: StageTimes) -> float:
    """The bubble: the part of ranks times makespan in which nothing runs."""
    busy = sum(times.action_s(action) for row in schedule.rows for action in row)
    return 1.0 - busy / (schedule.ranks * makespan_s(schedule, times))
