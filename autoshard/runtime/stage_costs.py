"""What a planned stage takes: seconds of each of its programs, bytes on one device while they run.

Programs run one after the other, so a stage holds, beside what the running program makes and needs for itself:

    there     state and inputs
    before    what its `before` programs made (casts of weights, accumulators)
    kept      of each microbatch from its forward to its backward pass: what that reads of the forward pass
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields
from typing import final

from autoshard.costmodel import Sharding, find_buffers, materialized, peak_memory
from autoshard.ir import Equation, Graph, Spec, StepInfo, Value, local_bytes, replicated
from autoshard.passes import (
    BACKWARD,
    FORWARD,
    Part,
    Phase,
    StageGraph,
    StageProgram,
    StagePrograms,
    body_phases,
    stage_programs,
)
from autoshard.plan import Memory, Plan
from autoshard.search import OpKind
from autoshard.search import Schedule as StepSchedule


@final
@dataclass(frozen=True, slots=True)
class PhaseTimer:
    """Takes from a stage's simulated step the seconds of each of its programs, of one microbatch where in the loop.

    Compute and collectives that overlap in the step share its time. A weight that is gathered for the loop is gathered
    by every program that reads it, for each microbatch: nothing gathered is kept from one program to the next.

    Attributes:
      stage: the stage.
      graph: its prepared graph.
      count: microbatches.
      overlaps: whether weights are gathered beside the rest of a program; else after it.
      times: filled in.
      gathered: filled in, the part of `times` that does not shrink with the microbatch.
    """

    stage: StageGraph
    graph: Graph
    count: int
    overlaps: bool
    times: dict[Phase, float]
    gathered: dict[Phase, float] = field(default_factory=dict[Phase, float])

    def __call__(self, made: StepSchedule) -> None:
        of: dict[Equation, Phase] = {}
        for equation, phase in body_phases(self.stage, self.graph).items():
            of[equation] = phase
            for inner in _inside(equation):
                of[inner] = phase
        loop = self.stage.loop_of(self.graph)
        readers: dict[Value, set[Phase]] = defaultdict(set)
        for equation in loop.graphs[0].equations:
            for atom in equation.inputs:
                if isinstance(atom, Value):
                    readers[atom].add(of[equation])
        consts = len(self.stage.consts)
        found: dict[Phase, float] = defaultdict(float)
        gathered: dict[Phase, float] = defaultdict(float)
        total = 0.0
        for k, (op, traffic) in enumerate(made.source):
            took = made.simulation.end_s(k) - made.simulation.start_s(k)
            phase = of.get(op.equation) if op.equation is not None else None
            if phase is not None:
                found[phase] += took / (self.count if phase in (FORWARD, BACKWARD) else 1)
                total += took
            elif op.kind is OpKind.ENTER and op.equation is loop and traffic is not None and op.position < consts:
                for reader in {phase for value in op.results for phase in readers[value]}:
                    gathered[reader] += took / self.count
        overlapped = min(made.time_s / total, 1.0) if total else 1.0
        for phase in {*found, *gathered}:
            mine = overlapped * found[phase]
            self.times[phase] = max(mine, gathered[phase]) if self.overlaps else mine + gathered[phase]
            self.gathered[phase] = gathered[phase]


def overlaps(kind: str) -> bool:
    """Whether devices of this kind run collectives beside compute: XLA makes them asynchronous on GPUs only."""
    return kind != "cpu"


def _inside(equation: Equation) -> list[Equation]:
    found: list[Equation] = []
    for body in equation.graphs:
        for inner in body.equations:
            found += [inner, *_inside(inner)]
    return found


@final
@dataclass(frozen=True, slots=True)
class StageNeeds:
    """Bytes on one device of a stage's rank; see the module's text.

    Attributes:
      state: parameters and optimizer state.
      there: state and inputs.
      outputs: of the step, beyond the state.
      before: what the `before` programs made; before_peak: with their temporaries.
      kept: of a microbatch from its forward to its backward pass.
      arriving: of a microbatch, what the forward pass takes of other stages.
      read: of weights by every microbatch; added: of accumulators.
      forward, backward, after: most that such a program makes, takes from other stages and needs for itself; `after`
        with what the programs before it after the loop made.
    """

    state: int
    there: int
    outputs: int
    before: int
    before_peak: int
    kept: int
    arriving: int
    read: int
    added: int
    forward: int
    backward: int
    after: int

    def peak(self, held: int) -> int:
        """Most that is held at once, with so many microbatches between their forward and backward passes."""
        rest = self.there + self.before
        return max(
            self.there + self.before_peak,
            rest + max(held - 1, 0) * self.kept + self.forward,
            rest + held * self.kept + self.backward,
            rest + self.after,
        )

    def times(self, factor: float) -> StageNeeds:
        """Of a stage that is so many times as much."""
        return StageNeeds(*(int(factor * getattr(self, f.name)) for f in fields(self)))

    def memory(self, held: int) -> Memory:
        """The same by part."""
        rest = max(self.there - self.state, 0)
        temporary = self.peak(held) - self.state - rest - self.outputs
        return Memory(self.state, rest, self.outputs, max(temporary, 0))


def stage_needs(graph: Graph, plan: Plan, stage: StageGraph, kind: str, info: StepInfo) -> StageNeeds:
    """What a stage needs under a plan.

    Args:
      graph: the stage's prepared graph.
      plan: made for it.
      stage: its parts.
      kind: of the devices.
      info: roles of the stage's inputs and outputs.
    """
    sizes = dict(plan.mesh)
    decisions = plan.decisions(graph)

    def size(value: Value) -> int:
        return local_bytes(value.aval, decisions.values.get(value, replicated(len(value.shape))), sizes)

    def way(value: Value, source: Spec, target: Spec) -> tuple[Spec, ...]:
        return decisions.detours.get((value.shape, source, target), (target,))

    sharding = Sharding(sizes, decisions.values, decisions.operands, {}, {}, way)
    made = stage_programs(stage, graph)
    rows, sent = len(stage.loop_arrivals), len(stage.loop_departures)
    given = [local_bytes(v.aval, s, sizes) for v, s in zip(graph.inputs, plan.input_specs, strict=True)]
    there = sum(given[: len(given) - rows])
    results = [local_bytes(a.aval, s, sizes) for a, s in zip(graph.outputs, plan.output_specs, strict=True)]
    arrivals = {v for v, _, _ in stage.loop_arrivals}
    backward_reads = {v for p in made.programs if p.phase[0] is Part.BACKWARD for v in p.graph.inputs}
    forward_makes = {v for p in made.programs if p.phase[0] is Part.FORWARD for v in p.results}
    kept = sum(size(v) for v in backward_reads & (forward_makes | arrivals) if v not in made.outside)
    before, before_peak, arriving, after = 0, 0, 0, 0
    most: dict[Part, int] = defaultdict(int)
    for program in made.programs:
        same = _reused(made, program, graph, info)
        written = materialized(program.graph).__contains__ if kind == "gpu" else None
        own = peak_memory(find_buffers(program.graph, same, kind, sharding, written))
        part = program.phase[0]
        come = 0
        if part is Part.BEFORE:
            before += sum(size(v) for v in program.results)
            before_peak = max(before_peak, before + own.temporary_bytes)
        elif part is not Part.AFTER:
            made_here = forward_makes if part is Part.BACKWARD else frozenset[Value]()
            come = sum(size(v) for v in program.graph.inputs if v in arrivals and v not in made_here)
            arriving += come if part is Part.FORWARD else 0
        needs = come + own.outputs_bytes + own.temporary_bytes
        most[part] = max(most[part], needs + (after if part is Part.AFTER else 0))
        after += own.outputs_bytes if part is Part.AFTER else 0
    state = plan.memory.state_bytes
    outputs = max(sum(results[: len(results) - sent]) - state, 0)
    return StageNeeds(
        state,
        there,
        outputs,
        before,
        before_peak,
        kept,
        arriving,
        sum(size(inside) for _, inside in stage.consts),
        sum(size(inside) for _, inside, _ in stage.sums),
        most[Part.FORWARD],
        most[Part.BACKWARD],
        most[Part.AFTER],
    )


def _reused(made: StagePrograms, program: StageProgram, graph: Graph, info: StepInfo) -> list[tuple[int, int]]:
    """(operand, result) of a program that share a buffer: accumulators, and state that nobody reads afterwards."""
    given = set(info.donated)
    state = {graph.inputs[i]: made.outputs[o] for i, o in info.pairs if i in given}
    later = {v for p in made.programs if p.phase > program.phase for v in p.graph.inputs}
    found: list[tuple[int, int]] = []
    for i, value in enumerate(program.graph.inputs):
        outer = made.outside.get(value)
        for o, result in enumerate(program.results):
            accumulates = outer is not None and outer == made.outside.get(result)
            updates = program.phase[0] in (Part.BEFORE, Part.AFTER) and value not in later
            if accumulates or (updates and state.get(value) is result):
                found.append((i, o))
    return found
