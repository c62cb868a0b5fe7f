"""Runs a pipeline: every stage's programs in the order of the schedule, values sent between them.

    before 0, 1, ...  of all stages
    forward and backward of microbatches, in an order that keeps every rank's row of the schedule
    after 0, 1, ...   of all stages

All programs are dispatched from here, one after the other, and run asynchronously on their own devices: what a program
reads from another stage is sent as soon as it is made. A value is let go when its last reader has been dispatched.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from autoshard.ir import Atom, Literal, Value
from autoshard.passes import BACKWARD, FORWARD, Part, Phase, StageGraph, StagePrograms, Stages
from autoshard.schedules import Kind, Schedule, verify


@runtime_checkable
class Backend(Protocol):
    """What runs programs and moves values."""

    def program(self, stage: int, number: int) -> Callable[..., Sequence[Any]]:
        """The stage's program of that number; takes and returns arrays in the order of its graph."""
        ...

    def send(self, stage: int, values: Sequence[Value], arrays: Sequence[Any]) -> Sequence[Any]:
        """The arrays of these values, moved to where the stage reads them."""
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
      sends: for each stage the values it is sent, with True where they are of the microbatch.
    """

    call: Callable[..., Sequence[Any]]
    takes: tuple[tuple[Value, bool], ...]
    gives: tuple[tuple[Value, bool], ...]
    drops: tuple[Value, ...]
    sends: tuple[tuple[int, tuple[tuple[Value, Value], ...], bool], ...]


@final
class Pipeline:
    """A pipeline that can run.

    Attributes:
      held: of the last step, the most microbatches of which each stage held values of its own at a time.
    """

    def __init__(self, stages: Stages, programs: Sequence[StagePrograms], schedule: Schedule, backend: Backend) -> None:
        self._stages, self._programs, self._schedule, self._backend = stages, programs, schedule, backend
        self.held: list[int] = [0] * len(programs)
        self._calls: list[tuple[Callable[..., Any], Sequence[Any]]] | None = None
        self._total_sends: list[tuple[tuple[int, tuple[tuple[Value, Value], ...], bool], ...]] = []
        self._steps = [self._prepare(s) for s in range(len(programs))]
        order = verify(schedule).order
        self._order = [schedule.rows[rank][position] for rank, position in order]
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

    def _sends(
        self, stage: int, source: Mapping[Value, Atom], made: Set[Value], loop: bool
    ) -> tuple[tuple[int, tuple[tuple[Value, Value], ...], bool], ...]:
        """What other stages are sent of these values, as (stage, (value there, value here), of a microbatch)."""
        sends: list[tuple[int, tuple[tuple[Value, Value], ...], bool]] = []
        for other in self._stages.graphs:
            pairs: list[tuple[Value, Value]] = []
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
        """The step's outputs.

        Args:
          place_input: (position of a step input, stage) to the array as the stage reads it.
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
                self._dispatch(stage, phase, top, inner, None)
        for action in self._order:
            phase = FORWARD if action.kind is Kind.FORWARD else BACKWARD
            mine = inner[action.stage].setdefault(action.microbatch, {})
            mine[graphs[action.stage].number] = self._backend.number(action.stage, action.microbatch)
            if phase == FORWARD:
                running = sum(1 for held in inner[action.stage].values() if graphs[action.stage].number in held)
                self.held[action.stage] = max(self.held[action.stage], running)
            self._dispatch(action.stage, phase, top, inner, action.microbatch)
            for value, outside in self._stacks[action.stage].items():
                if value in mine:
                    rows = stacks[action.stage].setdefault(outside, [None] * self._schedule.microbatches)
                    rows[action.microbatch] = mine.pop(value)
            if phase == BACKWARD:
                del inner[action.stage][action.microbatch]
        for stage, found in enumerate(stacks):
            for outside, rows in found.items():
                top[stage][outside] = self._backend.stack(stage, outside, rows)
        for stage, sends in enumerate(self._total_sends):
            for target, pairs, _ in sends:
                values = [v for v, _ in pairs]
                moved = self._backend.send(target, values, [top[stage][here] for _, here in pairs])
                top[target].update(zip(values, moved, strict=True))
        for phase in self._after:
            for stage in range(count):
                self._dispatch(stage, phase, top, inner, None)
        return [self._output(k, top) for k in range(len(self._stages.output_home))]

    def _dispatch(
        self,
        stage: int,
        phase: Phase,
        top: list[dict[Value, Any]],
        inner: list[dict[int, dict[Value, Any]]],
        microbatch: int | None,
    ) -> None:
        step = self._steps[stage].get(phase)
        if step is None:
            return
        outer = top[stage]
        mine: dict[Value, Any] = {} if microbatch is None else inner[stage][microbatch]
        operands = [mine[v] if held else outer[v] for v, held in step.takes]
        if self._calls is not None:
            self._calls.append((step.call, operands))
        results = step.call(*operands)
        for (value, held), array in zip(step.gives, results, strict=True):
            if held:
                mine[value] = array
            else:
                outer[value] = array
        for target, pairs, loop in step.sends:
            values = [v for v, _ in pairs]
            arrays = [mine[source] if loop else outer[source] for _, source in pairs]
            moved = self._backend.send(target, values, arrays)
            there = top[target] if not loop else inner[target].setdefault(_known(microbatch), {})
            there.update(zip(values, moved, strict=True))
        kept = self._stacks[stage]
        for value in step.drops:
            if value not in kept:
                mine.pop(value, None)

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
        return top[stage][self._programs[stage].outside.get(atom, atom)]


def _known(microbatch: int | None) -> int:
    assert microbatch is not None, "what is sent inside the loop is of a microbatch"
    return microbatch
