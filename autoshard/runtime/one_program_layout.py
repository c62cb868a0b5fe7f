"""Where everything of a pipeline lies when all stages are one program: slots, rows of buffers, ticks.

    state, inputs     slots that the program takes; state slots come out again
    made, arrived     results of `before` and `after` programs; what other ranks sent of them, once a step
    sums              accumulators of the loop
    rings             buffers of slots with a row for each microbatch that is held: what the forward pass keeps for the
                      backward pass, what has come from other ranks and is not used yet, stacks of all microbatches

A message goes to the rank so many ranks on (`offset`), each for itself: what skips stages is not handed through.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from jaxtyping import Int

from autoshard.ir import Spec, StepInfo, Value, replicated
from autoshard.passes import BACKWARD, FORWARD, Part, Phase, StageGraph, StageProgram, StagePrograms, stage_programs
from autoshard.plan import PipelinePlan
from autoshard.runtime.pjit import constrained
from autoshard.runtime.slots import Slot, Table, slot_for
from autoshard.runtime.stage_backend import stage_specs
from autoshard.runtime.stage_planning import Staged
from autoshard.schedules import Action, Kind, Schedule, in_ticks, shared_rows

STATE, INPUT, SUM = "state", "input", "sum"
TOTALS: Phase = (Part.AFTER, -1)
"""After the loop, before the first `after`: what the loop has summed up is sent."""

PHASE_OF: Mapping[Kind, Phase] = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD}


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """A slot: of which table, and its number there."""

    table: Hashable
    index: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class StageCode:
    """A stage's programs, and how the values between them lie.

    Attributes:
      parts: of its graph.
      programs: of it.
      specs: of values; what is not there is replicated.
      inputs: (position of a step input, the value).
    """

    parts: StageGraph
    programs: StagePrograms
    specs: Mapping[Value, Spec]
    inputs: tuple[tuple[int, Value], ...]

    def top(self, value: Value) -> Value:
        """The value outside the loop that a value is."""
        return self.programs.outside.get(value, value)

    def slot(self, value: Value) -> Slot:
        """The slot for a value."""
        value = self.top(value)
        return slot_for(value.aval, self.specs.get(value, replicated(len(value.shape))))

    def program(self, phase: Phase) -> StageProgram | None:
        """The program of a phase."""
        return next((p for p in self.programs.programs if p.phase == phase), None)

    def made_in(self, value: Value) -> Kind | None:
        """Whether the forward or the backward program makes a value of a microbatch."""
        for kind, phase in PHASE_OF.items():
            program = self.program(phase)
            if program is not None and value in program.results:
                return kind
        return None


@final
@dataclass(frozen=True, slots=True)
class Item:
    """An array that a step takes or gives.

    Attributes:
      position: of the step's input, or output.
      stage: that has it.
      rank: of the stage.
      index: of the slot.
    """

    position: int
    stage: int
    rank: int
    index: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A value that is sent once a step.

    Attributes:
      source: the stage it comes from.
      value: there.
      index: of the slot it arrives in.
    """

    source: int
    value: Value
    index: int


@final
@dataclass(slots=True, eq=False)
class Ring:
    """A buffer of the loop.

    Attributes:
      table: its slots, by stage (the target's, of messages).
      depth: rows.
      write: for each tick and rank the row that is written, -1 for none.
      read: for each tick and rank the row that is read.
      read_in: in which kind of pass they are read; None: after the loop.
      hop: how many stages on its values are sent before they are written.
      offset: how many ranks on.
      pairs: (rank, rank it sends to).
      sources: for each source stage (value there, slot).
      made: whether rows are written in a forward or a backward pass.
    """

    made: Kind
    read_in: Kind | None
    hop: int = 0
    offset: int = 0
    table: Table = field(default_factory=Table)
    depth: int = 0
    write: Int[np.ndarray, "ticks ranks"] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    read: Int[np.ndarray, "ticks ranks"] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    pairs: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    sources: dict[int, list[tuple[Value, int]]] = field(default_factory=dict[int, list[tuple[Value, int]]])


@final
class Layout:
    """See the module's text.

    Attributes:
      codes: of the stages.
      placement: the rank of each stage; stages_of: the stages of each rank.
      microbatches: their number.
      rows: for each tick the action of each rank.
      states, inputs, results: slots that go in and come out; states do both.
      state_inputs, state_outputs, input_items, result_items: what lies in them.
      sums: slots of accumulators.
      made: for each phase the slots of its results.
      arrived: for (phase, offset) the slots of what is sent when it has ended.
      messages: the same, what is sent.
      where: for (stage, value) outside the loop its slot.
      rings: buffers of the loop, by sort.
      arrivals, kept: for (stage, value) of a microbatch its ring and slot.
      phases: before and after the loop, in order.
    """

    def __init__(
        self,
        codes: Sequence[StageCode],
        schedule: Schedule,
        home: Mapping[int, int],
        output_home: Sequence[int | None],
        state: Mapping[int, int],
    ) -> None:
        """Finds a place for everything.

        Args:
          codes: of the stages.
          schedule: of forward and backward passes.
          home: the stage of each input.
          output_home: the stage of each output.
          state: inputs whose buffers may be reused, to the outputs that are their new values.
        """
        self.codes, self.placement, self.microbatches = tuple(codes), schedule.placement, schedule.microbatches
        self.ranks = schedule.ranks
        self.stages_of = [[s for s, at in enumerate(self.placement) if at == r] for r in range(self.ranks)]
        self.where: dict[tuple[int, Value], Ref] = {}
        self._find_inputs(home, output_home, state)
        phases = {p.phase for code in codes for p in code.programs.programs}
        self.phases = sorted(p for p in phases if p not in (FORWARD, BACKWARD))
        self.sums = Table()
        self._made_in: dict[tuple[int, Value], Phase] = {}
        self.made: dict[Phase, Table] = {phase: Table() for phase in self.phases}
        self._find_made()
        self.rings: dict[Hashable, Ring] = {}
        self.arrivals: dict[tuple[int, Value], Ref] = {}
        self.kept: dict[tuple[int, Value], Ref] = {}
        self._find_loop()
        self.arrived: dict[tuple[Phase, int], Table] = {}
        self.messages: dict[tuple[Phase, int], list[Message]] = {}
        self._find_messages()
        ticks = in_ticks(schedule)
        self.rows, self._at = ticks.rows, ticks.at
        for ring in self.rings.values():
            self._fill_ring(ring)

    # what goes in and comes out

    def _find_inputs(
        self, home: Mapping[int, int], output_home: Sequence[int | None], state: Mapping[int, int]
    ) -> None:
        self.states, self.inputs, self.results = Table(), Table(), Table()
        self.state_inputs: list[Item] = []
        self.state_outputs: list[Item] = []
        self.input_items: list[Item] = []
        self.result_items: list[Item] = []
        shared: dict[tuple[int, int, Slot], int] = {}
        for stage, code in enumerate(self.codes):
            rank = self.placement[stage]
            outputs = dict(zip(code.parts.outputs, code.programs.outputs, strict=False))
            for i, value in code.inputs:
                new = outputs.get(state[i]) if i in state and home.get(i) == stage else None
                slot = code.slot(value)
                if isinstance(new, Value) and code.slot(new) == slot:
                    index = self.states.add(rank, i, slot)
                    shared[rank, i, slot] = index
                    self.where[stage, value] = Ref(STATE, index)
                    self.state_inputs.append(Item(i, stage, rank, index))
                    self.state_outputs.append(Item(state[i], stage, rank, index))
        given = {item.position for item in self.state_outputs}
        for stage, code in enumerate(self.codes):
            rank = self.placement[stage]
            for i, value in code.inputs:
                if (stage, value) in self.where:
                    continue
                slot = code.slot(value)
                if (rank, i, slot) in shared:
                    self.where[stage, value] = Ref(STATE, shared[rank, i, slot])
                    continue
                new = self.inputs.find(rank, (i, slot)) is None
                index = self.inputs.add(rank, (i, slot), slot)
                self.where[stage, value] = Ref(INPUT, index)
                if new:
                    self.input_items.append(Item(i, stage, rank, index))
            for k, atom in zip(code.parts.outputs, code.programs.outputs, strict=False):
                if isinstance(atom, Value) and k not in given and output_home[k] == stage:
                    index = self.results.add(rank, k, code.slot(atom))
                    self.result_items.append(Item(k, stage, rank, index))

    # once a step

    def _find_made(self) -> None:
        for phase in self.phases:
            for stage, code in enumerate(self.codes):
                program = code.program(phase)
                for value in () if program is None else program.results:
                    top, rank = code.top(value), self.placement[stage]
                    if top in code.programs.totals:
                        index = self.sums.add(rank, (stage, top), code.slot(top))
                        self.where[stage, top] = Ref(SUM, index)
                    else:
                        index = self.made[phase].add(rank, (stage, top), code.slot(top))
                        self.where[stage, top] = Ref(phase, index)
                        self._made_in[stage, top] = phase

    def _find_messages(self) -> None:
        for target, code in enumerate(self.codes):
            for value, source, _ in code.parts.arrivals:
                there = self.codes[source]
                first = len(there.parts.outputs)
                departures = dict(zip(there.parts.departures, there.programs.outputs[first:], strict=False))
                atom = departures[value]
                assert isinstance(atom, Value), "what is sent is made by an equation"
                phase = self._made_in.get((source, there.top(atom)), TOTALS)
                offset = self._offset(source, target)
                table = self.arrived.setdefault((phase, offset), Table())
                index = table.add(self.placement[target], (target, value), code.slot(value))
                self.where[target, value] = Ref((phase, offset), index)
                self.messages.setdefault((phase, offset), []).append(Message(source, there.top(atom), index))

    def _offset(self, source: int, target: int) -> int:
        return (self.placement[target] - self.placement[source]) % self.ranks

    # of a microbatch

    def _find_loop(self) -> None:
        for stage, code in enumerate(self.codes):
            chunk = self.stages_of[self.placement[stage]].index(stage)
            uses: dict[Value, Kind] = {}
            for value, source, phase in code.parts.loop_arrivals:
                use = Kind.FORWARD if phase == FORWARD else Kind.BACKWARD
                uses[value] = use
                self._find_arrival(stage, value, source, use)
            backward = code.program(BACKWARD)
            for value in () if backward is None else backward.graph.inputs:
                if code.made_in(value) is Kind.FORWARD or uses.get(value) is Kind.FORWARD:
                    sort = ("kept", chunk)
                    ring = self.rings.setdefault(sort, Ring(Kind.FORWARD, Kind.BACKWARD))
                    index = ring.table.add(stage, value, code.slot(value))
                    self.kept[stage, value] = Ref(sort, index)
                    ring.sources.setdefault(stage, []).append((value, index))
            for part, stack in code.programs.stacked:
                kind = code.made_in(part) or uses.get(part)
                assert kind is not None, "what is stacked is made in the loop, or has come there"
                sort = ("stack", kind, chunk)
                ring = self.rings.setdefault(sort, Ring(kind, None))
                whole = code.slot(stack)
                index = ring.table.add(stage, stack, Slot(whole.shape[1:], whole.dtype, whole.spec[1:]))
                self.where[stage, stack] = Ref(sort, index)
                ring.sources.setdefault(stage, []).append((part, index))

    def _find_arrival(self, stage: int, value: Value, source: int, use: Kind) -> None:
        code, there = self.codes[stage], self.codes[source]
        departures = dict(zip(there.parts.loop_departures, there.programs.loop_departures, strict=True))
        atom = departures[value]
        assert isinstance(atom, Value), "what is sent is made by an equation"
        kind = there.made_in(atom)
        assert kind is not None, "what is sent of a microbatch is made in the loop"
        offset = self._offset(source, stage)
        sort = ("sent", stage - source, offset, kind, use)
        ring = self.rings.setdefault(sort, Ring(kind, use, stage - source, offset))
        index = ring.table.add(stage, value, code.slot(value))
        ring.pairs.add((self.placement[source], self.placement[stage]))
        ring.sources.setdefault(source, []).append((atom, index))
        self.arrivals[stage, value] = Ref(sort, index)

    def _fill_ring(self, ring: Ring) -> None:
        """Rows and ticks of a ring."""
        ring.write = np.full((len(self.rows), self.ranks), -1, np.int32)
        ring.read = np.zeros((len(self.rows), self.ranks), np.int32)
        every = range(self.microbatches)
        if ring.read_in is None:
            ring.depth = self.microbatches
            for stage in ring.sources:
                for m in every:
                    ring.write[self._at[Action(ring.made, stage, m)], self.placement[stage]] = m
            return
        targets = {source + ring.hop for source in ring.sources}
        for rank in range(self.ranks):
            mine = [s for s in targets if self.placement[s] == rank]
            spans = {
                (s, m): (self._at[Action(ring.made, s - ring.hop, m)], self._at[Action(ring.read_in, s, m)])
                for s in mine
                for m in every
            }
            found, depth = shared_rows(spans)
            ring.depth = max(ring.depth, depth)
            for key, row in found.items():
                written, read = spans[key]
                ring.write[written, rank] = row
                ring.read[read, rank] = row

    def memory_bytes(self, sizes: Mapping[str, int]) -> tuple[int, list[int]]:
        """Bytes on one device between programs: of all slots, and for each rank of those in which it has something.

        Args:
          sizes: of a rank's mesh axes.
        """
        whole, own = 0, [0] * self.ranks
        for table in (self.states, self.inputs, self.sums, *self.made.values(), *self.arrived.values()):
            sizes_of = [slot.local_bytes(sizes) for slot in table.slots]
            whole += sum(sizes_of)
            for rank in range(self.ranks):
                own[rank] += sum(sizes_of[k] for k in table.owned(rank))
        for ring in self.rings.values():
            sizes_of = [slot.local_bytes(sizes) for slot in ring.table.slots]
            whole += ring.depth * sum(sizes_of)
            for stage, rank in enumerate(self.placement):
                rows = int(ring.write[:, rank].max()) + 1
                own[rank] += rows * sum(sizes_of[k] for k in ring.table.owned(stage))
        return whole, own


def pipeline_layout(
    staged: Staged, pipeline: PipelinePlan, info: StepInfo, on_pass: Callable[[str, Any], None] | None = None
) -> Layout:
    """Where everything of a planned pipeline lies in one program.

    Args:
      staged: its stages.
      pipeline: their plans.
      info: roles of the step.
      on_pass: called with each stage's graph as it is emitted.
    """
    codes: list[StageCode] = []
    for parts, graph, plan in zip(staged.stages.graphs, staged.graphs, pipeline.stages, strict=True):
        program = constrained(graph, plan, on_pass)
        programs = stage_programs(parts, program)
        specs = stage_specs(parts, graph, program, plan, programs)
        codes.append(StageCode(parts, programs, specs, tuple(zip(parts.inputs, graph.inputs, strict=False))))
    given = set(info.donated)
    state = {i: o for i, o in info.pairs if i in given}
    return Layout(codes, staged.schedule, staged.stages.home, staged.stages.output_home, state)
