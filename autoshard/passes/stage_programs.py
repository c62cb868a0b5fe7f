"""From a stage's graph, with its shardings in it, to the programs that a pipeline runs.

    before ; scan(forward ; backward) ; after    -->    before 0, ..., forward, backward, after 0, ...

Each equation belongs to a phase (`stage_graphs`). One that passes have put in (a reshard, a copy of a cheap value)
belongs to the first phase that reads it; a reshard of what comes from outside the loop is done in every phase that
reads it, so that no gathered weight is kept from the forward to the backward pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import jax

from autoshard.ir import Apply, Atom, Equation, Graph, Reshard, Value, splice
from autoshard.passes.stage_graphs import StageGraph
from autoshard.passes.stage_phases import FORWARD, Part, Phase


@final
@dataclass(frozen=True, slots=True, eq=False)
class StageProgram:
    """One program of a stage.

    Attributes:
      phase: which.
      graph: its equations; inputs are what it reads of other programs, outputs what others read of it.
    """

    phase: Phase
    graph: Graph

    @property
    def results(self) -> tuple[Value, ...]:
        """The graph's outputs, which its equations make."""
        return tuple(_value(atom) for atom in self.graph.outputs)


@final
@dataclass(frozen=True, slots=True, eq=False)
class StagePrograms:
    """All programs of a stage.

    Attributes:
      programs: in the order of their phases.
      outside: for values inside the loop the value outside that they are: what is read as it is, and accumulators (the
        scan's result).
      totals: what the loop has made of the whole step once it has ended: accumulators and stacks.
      outputs: the values that are the graph's outputs, in its order; a literal or an input may be among them.
      loop_departures: values of a microbatch that are sent, in the order of the stage's loop departures.
      stacked: (value of a microbatch, the stack outside).
    """

    programs: tuple[StageProgram, ...]
    outside: Mapping[Value, Value]
    totals: frozenset[Value]
    outputs: tuple[Atom, ...]
    loop_departures: tuple[Atom, ...]
    stacked: tuple[tuple[Value, Value], ...]


def stage_programs(stage: StageGraph, graph: Graph) -> StagePrograms:
    """The programs of a stage.

    Args:
      stage: its graph's parts.
      graph: its graph, prepared and constrained.
    """
    loop = stage.loop_of(graph)
    (body,) = loop.graphs
    fixed, sums = len(stage.consts), len(stage.sums)
    outside: dict[Value, Value] = {}
    for k, inner in enumerate(body.inputs[:fixed]):
        outside[inner] = _value(loop.inputs[k])
    for k in range(sums):
        outside[body.inputs[fixed + k]] = loop.outputs[k]
        outside[_value(loop.inputs[fixed + k])] = loop.outputs[k]
        outside[_value(body.outputs[k])] = loop.outputs[k]
    first = fixed + sums + 1
    stacks = {body.inputs[first + k]: _value(loop.inputs[first + k]) for k in range(len(stage.parts))}
    stacked = tuple((_value(body.outputs[sums + k]), loop.outputs[sums + k]) for k in range(len(stage.stacks)))
    sent = body.outputs[sums + len(stage.stacks) :]
    inner = _inner_phases(stage, body)
    outer = _outer_phases(stage, graph)
    given = {*graph.inputs, *loop.outputs}
    programs = _cut_out(graph, outer, given, _read_outside(stage, graph, outside))
    inside = _cut_out(body, inner, set(body.inputs), {a for a in body.outputs if isinstance(a, Value)})
    programs += [StageProgram(p.phase, _with_parts(p.graph, stacks, stage.number)) for p in inside]
    programs.sort(key=lambda p: p.phase)
    results = tuple(graph.outputs[: len(graph.outputs) - len(sent)])
    totals = frozenset(loop.outputs[: len(loop.outputs) - len(sent)])
    return StagePrograms(tuple(programs), outside, totals, results, tuple(sent), stacked)


def _value(atom: Atom) -> Value:
    assert isinstance(atom, Value), "loops over microbatches read and make values"
    return atom


def _with_parts(graph: Graph, stacks: Mapping[Value, Value], number: Value) -> Graph:
    """The graph reading stacks, of which it takes the microbatch's part."""
    read = [v for v in graph.inputs if v in stacks]
    if not read:
        return graph
    taken: list[Equation] = []
    for part in read:
        equations, _ = splice(
            lambda x, m: [jax.lax.dynamic_index_in_dim(x, m, 0, keepdims=False)],
            [stacks[part], number],
            graph.equations[0].place,
            [part],
        )
        taken += equations
    inputs = [v for v in graph.inputs if v not in stacks and v is not number]
    outer = tuple(dict.fromkeys(stacks[part] for part in read))
    return Graph((*inputs, number, *outer), graph.constants, (*taken, *graph.equations), graph.outputs, graph.effects)


def _read_outside(stage: StageGraph, graph: Graph, outside: Mapping[Value, Value]) -> set[Value]:
    """What is read of the equations around the loop; not stacks of what goes to and fro, which never exist."""
    loop = stage.loop_of(graph)
    operands = loop.inputs[: len(loop.inputs) - len(stage.loop_arrivals)]
    results = graph.outputs[: len(graph.outputs) - len(stage.loop_departures)]
    return {a for a in (*operands, *results) if isinstance(a, Value)} | set(outside.values())


def body_phases(stage: StageGraph, graph: Graph) -> dict[Equation, Phase]:
    """The phase of every equation of a stage's graph, those of the loop's body among them; not of the loop itself."""
    return {**_outer_phases(stage, graph), **_inner_phases(stage, stage.loop_of(graph).graphs[0])}


def _outer_phases(stage: StageGraph, graph: Graph) -> dict[Equation, Phase]:
    """The phase of each equation before and after the loop."""
    loop = stage.loop_of(graph)
    ready: dict[Value, Phase] = dict.fromkeys(graph.inputs, (Part.BEFORE, 0))
    ready.update({v: phase for v, _, phase in stage.arrivals})
    ready.update(dict.fromkeys((v for v, _ in graph.constants), (Part.BEFORE, 0)))
    ready.update(dict.fromkeys(loop.outputs, (Part.AFTER, 0)))
    equations = [e for e in graph.equations if e is not loop]
    return _phases(equations, stage.phase, ready)


def _inner_phases(stage: StageGraph, body: Graph) -> dict[Equation, Phase]:
    """The phase of each equation of the loop."""
    ready: dict[Value, Phase] = dict.fromkeys(body.inputs, FORWARD)
    first = len(body.inputs) - len(stage.loop_arrivals)
    ready.update(zip(body.inputs[first:], (phase for _, _, phase in stage.loop_arrivals), strict=True))
    return _phases(body.equations, stage.phase, ready)


def _phases(
    equations: Sequence[Equation], known: Mapping[Value, Phase], ready: dict[Value, Phase]
) -> dict[Equation, Phase]:
    """Phases that are known by the values made, else the first that reads them, else the first possible."""
    wanted: dict[Value, Phase] = {}
    found: dict[Equation, Phase] = {}
    for equation in reversed(equations):
        phases = [known[v] for v in equation.outputs if v in known]
        phases = phases or [wanted[v] for v in equation.outputs if v in wanted]
        if phases:
            found[equation] = phase = min(phases)
            for atom in equation.inputs:
                if isinstance(atom, Value):
                    wanted[atom] = min(phase, wanted.get(atom, phase))
    for equation in equations:
        if equation not in found:
            found[equation] = max((ready[a] for a in equation.inputs if a in ready), default=min(ready.values()))
        ready.update(dict.fromkeys(equation.outputs, found[equation]))
    return found


def _live(equations: Sequence[Equation], read: set[Value]) -> set[Equation]:
    """Equations that make something that is read, or have an effect."""
    wanted, found = set(read), set[Equation]()
    for equation in reversed(equations):
        effects = isinstance(equation, Apply) and bool(equation.effects)
        if effects or any(v in wanted for v in equation.outputs):
            found.add(equation)
            wanted.update(a for a in equation.inputs if isinstance(a, Value))
    return found


def _cut_out(graph: Graph, phases: Mapping[Equation, Phase], given: set[Value], read: set[Value]) -> list[StageProgram]:
    """A program for each phase.

    Args:
      graph: which equations stand in.
      phases: of its equations (others are left out).
      given: values that come from outside: their reshards are repeated in every phase that reads them.
      read: values that are read outside of these programs.
    """
    constants = dict(graph.constants)
    free: dict[Value, Reshard] = {}  # reshards of what is given
    for equation in graph.equations:
        if not isinstance(equation, Reshard) or equation.output in read:
            continue
        if equation.input in given or equation.input in free:
            free[equation.output] = equation
    index = {e: i for i, e in enumerate(graph.equations)}
    order = sorted(set(phases.values()))
    own: dict[Phase, list[Equation]] = {phase: [] for phase in order}
    live = _live([e for e in graph.equations if e in phases], read)
    for equation in graph.equations:
        if equation in live and not any(v in free for v in equation.outputs):
            own[phases[equation]].append(equation)
    needs: dict[Phase, list[Value]] = {}
    whole: dict[Phase, list[Equation]] = {}
    for phase in order:
        made = {v for e in own[phase] for v in e.outputs}
        extra: dict[Equation, None] = {}
        wanted: dict[Value, None] = {}
        todo = [a for e in own[phase] for a in e.inputs if isinstance(a, Value)]
        while todo:
            value = todo.pop()
            if value in made or value in wanted:
                continue
            if value in free:
                extra[free[value]] = None
                made.add(value)
                todo.append(free[value].input)
            elif value not in constants:
                wanted[value] = None
        needs[phase] = list(wanted)
        whole[phase] = sorted((*own[phase], *extra), key=lambda e: index[e])
    programs: list[StageProgram] = []
    for k, phase in enumerate(order):
        if not own[phase]:
            continue
        later = read.union(*(needs[p] for p in order[k + 1 :]))
        outputs = tuple(v for e in whole[phase] for v in e.outputs if v in later and v not in free)
        used = {a for e in whole[phase] for a in e.inputs if isinstance(a, Value)}
        effects = frozenset(x for e in whole[phase] if isinstance(e, Apply) for x in e.effects)
        inner = Graph(
            tuple(needs[phase]),
            tuple((v, c) for v, c in graph.constants if v in used),
            tuple(whole[phase]),
            outputs,
            effects,
        )
        programs.append(StageProgram(phase, inner))
    return programs
