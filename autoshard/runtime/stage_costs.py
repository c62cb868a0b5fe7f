"""What a planned stage takes: seconds of each of its programs, bytes on one device while they run.

Programs run one after the other, so a stage holds, beside what the running program makes and needs for itself:

    there     state and inputs
    before    what its `before` programs made (casts of weights, accumulators)
    kept      of each microbatch from its forward to its backward pass: what that reads of the forward pass, and where
              that is in two parts, what the second reads of the first
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import final

from autoshard.costmodel import Sharding, find_buffers, materialized, peak_memory
from autoshard.ir import Equation, Graph, Spec, StepInfo, Value, local_bytes, replicated
from autoshard.passes import (
    BACKWARD,
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
class PhaseCost:
    """Seconds of a program, of one microbatch where in the loop.

    Attributes:
      work_s: its compute, and what nothing hides of the collectives of examples.
      moved_s: collectives of examples.
      fixed_s: collectives of weights and of their gradients, which are as many bytes in a smaller microbatch.
      summed_s: of that, sums of gradients.
    """

    work_s: float = 0.0
    moved_s: float = 0.0
    fixed_s: float = 0.0
    summed_s: float = 0.0

    def times(self, factor: float) -> PhaseCost:
        """Of a program that is so many times as much."""
        return PhaseCost(*(factor * getattr(self, f.name) for f in fields(self)))

    def __add__(self, other: PhaseCost) -> PhaseCost:
        return PhaseCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def unsummed(self) -> PhaseCost:
        """Of the program that keeps sums of gradients apart."""
        return replace(self, fixed_s=self.fixed_s - self.summed_s, summed_s=0.0)

    def time_s(self, overlaps: bool) -> float:
        """Seconds from beginning to end."""
        return max(self.work_s, self.moved_s + self.fixed_s) if overlaps else self.work_s + self.fixed_s


@final
@dataclass(frozen=True, slots=True)
class PhaseTimer:
    """Takes from a stage's simulated step the seconds of each of its programs, of one microbatch where in the loop.

    Compute and collectives that overlap in the step share its time. A weight that is gathered for the loop is gathered
    by every program that reads it, for each microbatch: nothing gathered is kept from one program to the next.

    Attributes:
      stage: the stage.
      graph: its prepared graph.
      partial: values of the loop that microbatches add up.
      count: microbatches.
      overlaps: whether collectives run beside compute.
      times: filled in.
      costs: filled in, the same by part.
    """

    stage: StageGraph
    graph: Graph
    partial: frozenset[Value]
    count: int
    overlaps: bool
    times: dict[Phase, float]
    costs: dict[Phase, PhaseCost] = field(default_factory=dict[Phase, PhaseCost])

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
        compute: dict[Phase, float] = defaultdict(float)
        moved: dict[Phase, float] = defaultdict(float)
        summed: dict[Phase, float] = defaultdict(float)
        gathered: dict[Phase, float] = defaultdict(float)
        total = 0.0
        for k, (op, traffic) in enumerate(made.source):
            took = made.simulation.end_s(k) - made.simulation.start_s(k)
            phase = of.get(op.equation) if op.equation is not None else None
            if phase is not None:
                total += took
                into = compute if traffic is None else moved if self.partial.isdisjoint(op.results) else summed
                into[phase] += took / (self.count if phase[0] in (Part.FORWARD, Part.BACKWARD) else 1)
            elif op.kind is OpKind.ENTER and op.equation is loop and traffic is not None and op.position < consts:
                for reader in {phase for value in op.results for phase in readers[value]}:
                    gathered[reader] += took / self.count
        overlapped = min(made.time_s / total, 1.0) if total else 1.0
        for phase in {*compute, *moved, *summed, *gathered}:
            work = compute[phase] + moved[phase]
            mine = overlapped * (work + summed[phase])
            cost = PhaseCost(min(mine, work), moved[phase], summed[phase] + gathered[phase], summed[phase])
            self.costs[phase] = cost
            self.times[phase] = max(mine, cost.time_s(self.overlaps))


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
      read: of weights by every microbatch; added: of accumulators, and were they whole on each of the devices along the
        mesh's first axis.
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
    added_whole: int
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


def stage_needs(graph: Graph, plan: Plan, stage: StageGraph, info: StepInfo, kind: str) -> StageNeeds:
    """What a stage needs under a plan.

    Args:
      graph: the stage's prepared graph.
      plan: made for it.
      stage: its parts.
      info: which of the graph's inputs are state, and given away.
      kind: of the devices.
    """
    sizes = dict(plan.mesh)
    decisions = plan.decisions(graph)

    def size(value: Value) -> int:
        return local_bytes(value.aval, decisions.values.get(value, replicated(len(value.shape))), sizes)

    def whole(value: Value) -> int:
        spec = decisions.values.get(value, replicated(len(value.shape)))
        others = tuple(tuple(axis for axis in axes if axis != plan.mesh[0][0]) for axes in spec)
        return local_bytes(value.aval, others, sizes)

    made = stage_programs(stage, graph)
    rows, sent = len(stage.loop_arrivals), len(stage.loop_departures)
    given = [local_bytes(v.aval, s, sizes) for v, s in zip(graph.inputs, plan.input_specs, strict=True)]
    there = sum(given[: len(given) - rows])
    results = [local_bytes(a.aval, s, sizes) for a, s in zip(graph.outputs, plan.output_specs, strict=True)]
    arrivals = {v for v, _, _ in stage.loop_arrivals}
    backward_reads = {v for p in made.programs if p.phase[0] is Part.BACKWARD for v in p.graph.inputs}
    forward_makes = {v for p in made.programs if p.phase[0] is Part.FORWARD for v in p.results}
    awaited = {v for p in made.programs if p.phase == BACKWARD for v in p.results}  # read again by `WEIGHTS`
    kept = sum(size(v) for v in backward_reads & (forward_makes | awaited | arrivals) if v not in made.outside)
    before, before_peak, arriving, after = 0, 0, 0, 0
    most: dict[Part, int] = defaultdict(int)
    for program, needs in zip(made.programs, _memory(made, graph, plan, info, kind), strict=True):
        part = program.phase[0]
        come = 0
        if part is Part.BEFORE:
            before += sum(size(v) for v in program.results)
            before_peak = max(before_peak, before + needs.temporary_bytes)
        elif part is not Part.AFTER:
            made_here = forward_makes if part is Part.BACKWARD else frozenset[Value]()
            come = sum(size(v) for v in program.graph.inputs if v in arrivals and v not in made_here)
            arriving += come if part is Part.FORWARD else 0
        mine = come + needs.outputs_bytes + needs.temporary_bytes
        most[part] = max(most[part], mine + (after if part is Part.AFTER else 0))
        after += needs.outputs_bytes if part is Part.AFTER else 0
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
        sum(whole(inside) for _, inside, _ in stage.sums),
        most[Part.FORWARD],
        most[Part.BACKWARD],
        most[Part.AFTER],
    )


def program_memory(graph: Graph, plan: Plan, stage: StageGraph, info: StepInfo, kind: str) -> tuple[Memory, ...]:
    """What each program of a stage needs by itself: all it reads counts as inputs.

    Args:
      graph: the stage's prepared graph.
      plan: made for it.
      stage: its parts.
      info: which of the graph's inputs are state, and given away.
      kind: of the devices.
    """
    return tuple(_memory(stage_programs(stage, graph), graph, plan, info, kind))


def _memory(made: StagePrograms, graph: Graph, plan: Plan, info: StepInfo, kind: str) -> Iterator[Memory]:
    decisions = plan.decisions(graph)

    def way(value: Value, source: Spec, target: Spec) -> tuple[Spec, ...]:
        return decisions.detours.get((value.shape, source, target), (target,))

    sharding = Sharding(dict(plan.mesh), decisions.values, decisions.operands, {}, {}, way)
    for program in made.programs:
        same = _reused(made, program, graph, info)
        written = materialized(program.graph).__contains__ if kind == "gpu" else None
        needs = peak_memory(find_buffers(program.graph, same, kind, sharding, written))
        yield Memory(0, needs.inputs_bytes, needs.outputs_bytes, needs.temporary_bytes)


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
