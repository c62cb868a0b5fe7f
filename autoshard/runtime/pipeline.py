"""Runs a pipeline: every stage's programs in the order of the schedule, values sent between them.

    before 0, 1, ...  of all stages
    forward and backward of microbatches, and what is sent after each, by the time they start at in the schedule
    after 0, 1, ...   of all stages

Programs are dispatched from here, one after the other, and run asynchronously on their own devices. A value is let go
when its last reader has been dispatched. One that comes from another process over a socket is waited for when its first
reader is.

Where there are several processes, each goes through the same list and dispatches what its devices take part in:
programs of its stages, and both sides of what is sent. One list for all is what keeps sends, which wait for the other
side, from waiting in a circle (`autoshard.runtime.transfer` has the argument). That it is by time keeps them from
waiting long: on a rank whose row is F0 F1 B0, F1's activations are sent before it asks for the gradients that B0 reads.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from autoshard.ir import Atom, Literal, Value
from autoshard.passes import BACKWARD, FORWARD, WEIGHTS, Part, Phase, StageGraph, StagePrograms, Stages
from autoshard.runtime.socket_transfer import arrived
from autoshard.schedules import TICK_S, Action, Kind, Schedule, StageTimes, start_times, uniform_times, verify

PHASES: Mapping[Kind, tuple[Phase, ...]] = {
    Kind.FORWARD: (FORWARD,),
    Kind.BACKWARD: (BACKWARD, WEIGHTS),
    Kind.INPUT_GRAD: (BACKWARD,),
    Kind.WEIGHT_GRAD: (WEIGHTS,),
}
"""Programs of each action, those that the stage has."""

LEAST_S = 1e-9
"""Of an action, so that what is sent after it comes after it."""


Pair = tuple[Value, Value]
"""What another stage is sent: the value there, the value here."""

Sends = tuple[tuple[int, tuple[Pair, ...], bool], ...]
"""For each stage that is sent something what it is sent, and whether that is of a microbatch."""


@runtime_checkable
class Backend(Protocol):
    """What runs programs and moves values."""

    def program(self, stage: int, number: int) -> Callable[..., Sequence[Any]]:
        """The stage's program of that number; takes and returns arrays in the order of its graph."""
        ...

    def is_here(self, stage: int) -> bool:
        """Whether this process has devices of the stage; if not, its programs are never called here."""
        ...

    def send(self, source: int, target: int, pairs: Sequence[Pair], arrays: Sequence[Any]) -> Sequence[Any] | None:
        """The arrays of these values, moved from one stage to where another reads them.

        Args:
          source, target: stages.
          pairs: (value there, value here).
          arrays: none if the source is not here.

        Returns:
          None if the target is not here.
        """
        ...

    def stack(self, stage: int, value: Value, rows: Sequence[Any]) -> Any:
        """The arrays of all microbatches as one, as the stage reads it."""
        ...

    def number(self, stage: int, microbatch: int) -> Any:
        """The number of a microbatch on a stage's devices."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One program as it is dispatched.

    Attributes:
      call: the program.
      takes: for each operand the value, and whether it is one of the microbatch at hand.
      gives: the same for results.
      drops: values of the microbatch that nobody reads afterwards.
      sends: to other stages.
    """

    call: Callable[..., Sequence[Any]]
    takes: tuple[tuple[Value, bool], ...]
    gives: tuple[tuple[Value, bool], ...]
    drops: tuple[Value, ...]
    sends: Sends


@final
class Pipeline:
    """A pipeline that can run.

    Attributes:
      held: of the last step, the most microbatches of which each stage here held values of its own at a time.
    """

    def __init__(
        self,
        stages: Stages,
        programs: Sequence[StagePrograms],
        schedule: Schedule,
        backend: Backend,
        times: StageTimes | None = None,
    ) -> None:
        self._stages, self._programs, self._schedule, self._backend = stages, programs, schedule, backend
        self.held: list[int] = [0] * len(programs)
        self._calls: list[tuple[Callable[..., Any], Sequence[Any]]] | None = None
        self._total_sends: list[Sends] = []
        self._steps = [self._prepare(s) for s in range(len(programs))]
        self._order = timed_order(schedule, times)
        self._here = [backend.is_here(s) for s in range(len(programs))]
        phases = {phase for steps in self._steps for phase in steps}
        self._before = sorted(p for p in phases if p[0] is Part.BEFORE)
        self._after = sorted(p for p in phases if p[0] is Part.AFTER)
        self._stacks = [dict(each.stacked) for each in programs]

    def _prepare(self, stage: int) -> dict[Phase, _Step]:
        graph, programs = self._stages.graphs[stage], self._programs[stage]
        inner = {v for p in programs.programs if p.phase[0] in (Part.FORWARD, Part.BACKWARD) for v in p.results}
        inner |= {v for v, _, _ in graph.loop_arrivals} | {graph.number}
        inner -= set(programs.outside)
        departs = dict(zip(graph.loop_departures, programs.loop_departures, strict=True))
        tops = dict(zip(graph.departures, programs.outputs[len(graph.outputs) :], strict=True))
        made: dict[Phase, _Step] = {}
        for number, program in enumerate(programs.programs):
            takes = tuple(self._place(programs, inner, v) for v in program.graph.inputs)
            gives = tuple(self._place(programs, inner, v) for v in program.results)
            loop = program.phase[0] in (Part.FORWARD, Part.BACKWARD)
            later = {v for p in programs.programs if p.phase > program.phase for v in p.graph.inputs}
            mine = [v for v, held in (*takes, *gives) if held and v not in later and v is not graph.number]
            outputs = {v for v, _ in gives} - (set() if loop else programs.totals)
            sends = self._sends(stage, departs if loop else tops, outputs, loop)
            call = self._backend.program(stage, number)
            made[program.phase] = _Step(call, takes, gives, tuple(mine), sends)
        self._total_sends.append(self._sends(stage, tops, programs.totals, loop=False))
        return made

    def _sends(self, stage: int, source: Mapping[Value, Atom], made: Set[Value], loop: bool) -> Sends:
        """What other stages are sent of these values, as (stage, (value there, value here), of a microbatch)."""
        sends: list[tuple[int, tuple[Pair, ...], bool]] = []
        for other in self._stages.graphs:
            pairs: list[Pair] = []
            for value, at, _ in other.loop_arrivals if loop else other.arrivals:
                here = source.get(value) if at == stage else None
                if isinstance(here, Value) and here in made:
                    pairs.append((value, here))
            if pairs:
                sends.append((other.stage, tuple(pairs), loop))
        return tuple(sends)

    @staticmethod
    def _place(programs: StagePrograms, inner: set[Value], value: Value) -> tuple[Value, bool]:
        outside = programs.outside.get(value)
        return (value, value in inner) if outside is None else (outside, False)

    def record(self, calls: list[tuple[Callable[..., Any], Sequence[Any]]] | None) -> None:
        """Adds every program and its operands to `calls` from the next step on; None ends that."""
        self._calls = calls

    def run(self, place_input: Callable[[int, int], Any]) -> list[Any]:
        """The step's outputs, None for those of stages that are not here.

        Args:
          place_input: (position of a step input, stage) to the array as the stage reads it; asked for all stages.
        """
        graphs = self._stages.graphs
        count = len(graphs)
        top: list[dict[Value, Any]] = [{} for _ in range(count)]
        inner: list[dict[int, dict[Value, Any]]] = [{} for _ in range(count)]
        stacks: list[dict[Value, list[Any]]] = [{} for _ in range(count)]
        self.held = [0] * count
        for stage, graph in enumerate(graphs):
            for position, value in zip(graph.inputs, graph.graph.inputs, strict=False):
                top[stage][value] = place_input(position, stage)
        for phase in self._before:
            for stage in range(count):
                for send in self._dispatch(stage, phase, top, inner, None):
                    send()
        leaving: dict[Action, list[Callable[[], None]]] = {}
        for action, sends in self._order:
            if sends:
                for send in leaving.pop(action):
                    send()
                continue
            mine = inner[action.stage].setdefault(action.microbatch, {})
            if self._here[action.stage]:
                mine[graphs[action.stage].number] = self._backend.number(action.stage, action.microbatch)
            if action.kind is Kind.FORWARD and self._here[action.stage]:
                running = sum(1 for held in inner[action.stage].values() if graphs[action.stage].number in held)
                self.held[action.stage] = max(self.held[action.stage], running)
            leaving[action] = []
            for phase in PHASES[action.kind]:
                leaving[action] += self._dispatch(action.stage, phase, top, inner, action.microbatch)
            for value, outside in self._stacks[action.stage].items():
                if value in mine:
                    rows = stacks[action.stage].setdefault(outside, [None] * self._schedule.microbatches)
                    rows[action.microbatch] = arrived(mine[value])
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                del inner[action.stage][action.microbatch]
        for stage, found in enumerate(stacks):
            for outside, rows in found.items():
                top[stage][outside] = self._backend.stack(stage, outside, rows)
        for stage, sends in enumerate(self._total_sends):
            for target, pairs, _ in sends:
                arrays = [arrived(top[stage][here]) for _, here in pairs] if self._here[stage] else []
                self._send(stage, target, pairs, arrays, top[target])
        for phase in self._after:
            for stage in range(count):
                for send in self._dispatch(stage, phase, top, inner, None):
                    send()
        return [self._output(k, top) for k in range(len(self._stages.output_home))]

    def _dispatch(
        self,
        stage: int,
        phase: Phase,
        top: list[dict[Value, Any]],
        inner: list[dict[int, dict[Value, Any]]],
        microbatch: int | None,
    ) -> list[Callable[[], None]]:
        """Calls a program if its stage is here; what is left to do is to send its results."""
        step = self._steps[stage].get(phase)
        if step is None:
            return []
        outer = top[stage]
        mine: dict[Value, Any] = {} if microbatch is None else inner[stage][microbatch]
        if self._here[stage]:
            self._call(step, outer, mine)
        sends: list[Callable[[], None]] = []
        for target, pairs, loop in step.sends:
            arrays = [arrived(mine[v] if loop else outer[v]) for _, v in pairs] if self._here[stage] else []
            there = top[target] if not loop else inner[target].setdefault(_known(microbatch), {})
            sends.append(functools.partial(self._send, stage, target, pairs, arrays, there))
        kept = self._stacks[stage]
        for value in step.drops:
            if value not in kept:
                mine.pop(value, None)
        return sends

    def _call(self, step: _Step, outer: dict[Value, Any], mine: dict[Value, Any]) -> None:
        operands = [arrived(mine[v] if held else outer[v]) for v, held in step.takes]
        if self._calls is not None:
            self._calls.append((step.call, operands))
        results = step.call(*operands)
        for (value, held), array in zip(step.gives, results, strict=True):
            if held:
                mine[value] = array
            else:
                outer[value] = array

    def _send(
        self, source: int, target: int, pairs: Sequence[Pair], arrays: Sequence[Any], there: dict[Value, Any]
    ) -> None:
        moved = self._backend.send(source, target, pairs, arrays)
        if moved is not None:
            there.update(zip((v for v, _ in pairs), moved, strict=True))

    def _output(self, k: int, top: Sequence[Mapping[Value, Any]]) -> Any:
        stage = self._stages.output_home[k]
        if stage is None:
            atom = self._stages.cut.step.outputs[k]
            assert isinstance(atom, Literal), "only literals are made nowhere"
            return atom.value
        graph: StageGraph = self._stages.graphs[stage]
        atom = self._programs[stage].outputs[graph.outputs.index(k)]
        if isinstance(atom, Literal):
            return atom.value
        return arrived(top[stage][self._programs[stage].outside.get(atom, atom)]) if self._here[stage] else None


def timed_order(schedule: Schedule, times: StageTimes | None = None) -> list[tuple[Action, bool]]:
    """What a step does in turn: (action, False) to run it, (action, True) to send what it made, by simulated time.

    Args:
      schedule: the table.
      times: of its stages; None: all alike.
    """
    verify(schedule)
    given = times or uniform_times(schedule.stages)
    least = StageTimes(
        tuple(max(t, LEAST_S) for t in given.forward_s),
        tuple(max(t, LEAST_S) for t in given.input_grad_s),
        given.weight_grad_s,
    )
    events: list[tuple[int, bool, int, Action]] = []
    for number, (action, start) in enumerate(start_times(schedule, least).items()):
        tick = round(start / TICK_S)
        events.append((tick, True, number, action))
        events.append((tick + round(least.action_s(action) / TICK_S), False, number, action))
    return [(action, not starts) for _, starts, _, action in sorted(events, key=lambda e: e[:3])]


def _known(microbatch: int | None) -> int:
    assert microbatch is not None, "what is sent inside the loop is of a microbatch"
    return microbatch
