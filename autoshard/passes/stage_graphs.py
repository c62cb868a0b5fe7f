"""From a cut step to one graph for each stage, which is planned like any step on the stage's own mesh.

    before ; scan over microbatches (forward ; backward) ; after

A value that another stage needs is a result of one graph and an argument of the other, the same `Value` in both; those
of the loop as stacks over microbatches, which stand for what is sent one by one. A pipeline never runs these graphs
whole: its programs are runs of their equations (`stage_programs`), in phases:

    before r    of the whole step, needs what stages made in `before` up to r - 1
    forward, backward    of a microbatch; backward in two parts where the schedule has them: what other stages wait for,
                         then the rest, gradients of weights
    after r     of the whole step: the update, in as many rounds as scalars travel (a gradient norm: three)

What is small or uses no weights is computed by every stage that reads it, what is made of scalars of several stages on
the last one; the update of a weight, and of whatever has its shape, is made on the weight's stage.
"""

# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import networkx as nx

from autoshard.ir import Apply, Atom, Graph, Place, Value, instance, renamed, scan_equation, splice, trace, verify
from autoshard.passes.loop_step import Sum
from autoshard.passes.microbatch import combine, identity
from autoshard.passes.stage_cut import Cut
from autoshard.passes.stage_phases import BACKWARD, FORWARD, WEIGHTS, Part, Phase, delay, set_apart


@final
@dataclass(frozen=True, slots=True, eq=False)
class StageGraph:
    """One stage.

    Attributes:
      stage: its number.
      graph: inputs are step inputs, arrivals, stacks of loop arrivals; outputs step outputs, departures, stacks of loop
        departures.
      phase: of every value that an equation makes, those of the loop too.
      inputs: positions of the step's inputs.
      arrivals: (value, stage it comes from, phase from which it is there) before and after the loop.
      loop_arrivals: (value, stage it comes from, phase that needs it) of a microbatch.
      outputs: positions of the step's outputs.
      departures: values that other stages need; loop_departures: of a microbatch.
      consts: (value outside, value in the loop) of what the loop reads as it is.
      sums: (sum, its accumulator in the loop, the accumulator with a microbatch added).
      number: the microbatch's number in the loop.
      parts: (stack outside, part in the loop).
      stacks: (value of a microbatch, stack outside).
    """

    stage: int
    graph: Graph
    phase: Mapping[Value, Phase]
    inputs: tuple[int, ...]
    arrivals: tuple[tuple[Value, int, Phase], ...]
    loop_arrivals: tuple[tuple[Value, int, Phase], ...]
    outputs: tuple[int, ...]
    departures: tuple[Value, ...]
    loop_departures: tuple[Value, ...]
    consts: tuple[tuple[Value, Value], ...]
    sums: tuple[tuple[Sum, Value, Value], ...]
    number: Value
    parts: tuple[tuple[Value, Value], ...]
    stacks: tuple[tuple[Value, Value], ...]

    def loop_of(self, graph: Graph) -> Apply:
        """The scan over microbatches in the stage's graph, or in one that passes made of it."""
        (found,) = (
            e
            for e in graph.equations
            if isinstance(e, Apply) and e.name == "scan" and self.number in e.graphs[0].inputs
        )
        return found


@final
@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """A step in stages.

    Attributes:
      cut: what it comes from.
      graphs: one for each stage.
      home: the stage of each of the step's inputs that any stage reads; state is updated there.
      output_home: the stage of each of the step's outputs; None for those that are literals.
    """

    cut: Cut
    graphs: tuple[StageGraph, ...]
    home: Mapping[int, int]
    output_home: tuple[int | None, ...]


def stage_graphs(cut: Cut, pairs: Sequence[tuple[int, int]], weights_apart: bool = False) -> Stages:
    """A graph for each stage.

    Args:
      cut: a step with a stage for each equation.
      pairs: (input, output) that are one piece of state.
      weights_apart: put what no other stage waits for in the backward pass into a phase of its own, `WEIGHTS`.
    """
    build = _Build(cut, tuple(pairs), weights_apart)
    build.find_loop()
    build.place_after()
    build.find_outputs()
    build.find_rounds()
    graphs = tuple(build.graph(s) for s in range(cut.count))
    home: dict[int, int] = {}
    for i, value in enumerate(cut.step.inputs):
        readers = [stage.stage for stage in graphs if i in stage.inputs]
        if readers:
            wanted = build.home.get(value)
            home[i] = wanted if wanted in readers else readers[0]
    return Stages(cut, graphs, home, tuple(build.output_home))


@final
@dataclass(slots=True)
class _Found:
    """What one stage needs and makes."""

    free: dict[Apply, Phase] = field(default_factory=dict[Apply, Phase])  # equations of the loop computed here too
    arrivals: dict[Value, Phase] = field(default_factory=dict[Value, Phase])
    departures: dict[Value, None] = field(default_factory=dict[Value, None])
    consts: dict[Value, None] = field(default_factory=dict[Value, None])
    parts: dict[Value, None] = field(default_factory=dict[Value, None])
    before: set[Apply] = field(default_factory=set[Apply])
    after: set[Apply] = field(default_factory=set[Apply])
    inputs: dict[Value, None] = field(default_factory=dict[Value, None])
    constants: dict[Value, None] = field(default_factory=dict[Value, None])
    top_arrivals: dict[Value, int] = field(default_factory=dict[Value, int])
    top_departures: dict[Value, None] = field(default_factory=dict[Value, None])
    sums: dict[Value, None] = field(default_factory=dict[Value, None])  # parts
    stacks: dict[Value, None] = field(default_factory=dict[Value, None])  # parts


@final
class _Build:
    """Where everything is computed."""

    def __init__(self, cut: Cut, pairs: tuple[tuple[int, int], ...], weights_apart: bool) -> None:
        self._weights_apart = weights_apart
        self.cut, self.step, self.pairs = cut, cut.step, pairs
        self.home: dict[Value, int] = dict(cut.home)
        self.output_home: list[int | None] = []
        self._found = [_Found() for _ in range(cut.count)]
        step = cut.step
        self._loop_maker = {v: e for e in step.loop for v in e.outputs}
        self._before_maker = {v: e for e in step.before for v in e.outputs}
        self._after_maker = {v: e for e in step.after for v in e.outputs}
        self._inputs, self._constants = set(step.inputs), {v for v, _ in step.constants}
        self._stack_of = {part: stack for stack, part in step.parts}
        self._index = {e: i for part in (step.before, step.loop, step.after) for i, e in enumerate(part)}
        self._late = step.weights_of
        self._given: dict[Value, int] = {}  # totals and stacks to their stage
        self._stage_after: dict[Apply, int] = {}
        self._rounds: list[dict[Value, int]] = [{} for _ in range(cut.count)]
        self._traced: dict[Hashable, Graph] = {}
        self._round_of: list[dict[Apply, int]] = [{} for _ in range(cut.count)]
        self._of_stage: list[list[Apply]] = [[] for _ in range(cut.count)]
        for equation, stage in cut.stage.items():
            self._of_stage[stage].append(equation)

    # the loop

    def find_loop(self) -> None:
        """What each stage computes of the loop, and what it needs from outside."""
        for equation, stage in self.cut.stage.items():
            phase = BACKWARD if equation in self.cut.backward else FORWARD
            for atom in equation.inputs:
                self._need_inner(atom, stage, phase)
        for each in self.step.sums:
            stage = self._stage_of_part(each.part)
            self._found[stage].sums[each.part] = None
            self._given[each.total] = stage
        for part, stack in self.step.stacks:
            stage = self._stage_of_part(part)
            self._found[stage].stacks[part] = None
            self._given[stack] = stage

    def _stage_of_part(self, part: Value) -> int:
        maker = self._loop_maker.get(part)
        stage = None if maker is None else self.cut.stage.get(maker)
        if stage is None:
            stage = self.cut.count - 1
            self._need_inner(part, stage, FORWARD)
        return stage

    def _need_inner(self, root: Atom, stage: int, phase: Phase) -> None:
        found = self._found[stage]
        todo = [(root, phase)]
        while todo:
            atom, when = todo.pop()
            if not isinstance(atom, Value) or atom is self.step.number:
                continue
            maker = self._loop_maker.get(atom)
            if atom in self._stack_of:
                found.parts[atom] = None
                self._need_before(self._stack_of[atom], stage)
            elif maker is None:
                found.consts[atom] = None
                self._need_before(atom, stage)
            elif maker in self.cut.stage:
                source = self.cut.stage[maker]
                if source != stage:
                    found.arrivals[atom] = min(when, found.arrivals.get(atom, when))
                    self._found[source].departures[atom] = None
            elif found.free.get(maker, (Part.AFTER, 0)) > when:
                found.free[maker] = when
                todo += [(a, when) for a in maker.inputs]

    # before the loop

    def _need_before(self, root: Atom, stage: int) -> None:
        todo = [(root, stage)]
        while todo:
            atom, at = todo.pop()
            if not isinstance(atom, Value):
                continue
            found = self._found[at]
            if atom in self._inputs:
                found.inputs[atom] = None
                self.home.setdefault(atom, at)
            elif atom in self._constants:
                found.constants[atom] = None
            else:
                maker = self._before_maker[atom]
                source = self._stage_before(maker, at)
                if source != at:
                    found.top_arrivals[atom] = source
                    self._found[source].top_departures[atom] = None
                if maker not in self._found[source].before:
                    self._found[source].before.add(maker)
                    todo += [(a, source) for a in maker.inputs]

    def _stage_before(self, equation: Apply, reader: int) -> int:
        """Where an equation before the loop is computed for a reader: on the stage of the weights it uses.

        One with an effect is computed once, on the first stage.
        """
        if equation.effects:
            return 0
        late = [a for a in equation.inputs if isinstance(a, Value) and a in self._late]
        if not late:
            return reader
        largest = max(late, key=lambda v: v.nbytes)
        if largest in self._inputs:
            return self.home.setdefault(largest, reader)
        return self._stage_before(self._before_maker[largest], reader)

    # after the loop

    def place_after(self) -> None:
        """The stage of every equation after the loop that has arrays: that of the state it updates."""
        same: nx.Graph[Value] = nx.Graph()
        for equation in self.step.after:
            values = [v for v in (*equation.inputs, *equation.outputs) if isinstance(v, Value) and v.shape]
            same.add_nodes_from(values)
            first: dict[tuple[int, ...], Value] = {}
            same.add_edges_from((first.setdefault(v.shape, v), v) for v in values)
        group: dict[Value, int] = {}
        where: dict[int, int] = {}
        for number, members in enumerate(nx.connected_components(same)):
            group.update(dict.fromkeys(members, number))
        homes = [(v, self.home[v]) for v in self.step.inputs if v in self.home]
        for value, stage in (*homes, *self._given.items()):
            if value in group:
                where.setdefault(group[value], stage)
        left: Sequence[Apply] = self.step.after
        changed = True
        while changed:
            changed, again = False, list[Apply]()
            for equation in left:
                values = [v for v in (*equation.outputs, *equation.inputs) if isinstance(v, Value) and v.shape]
                placed = [v for v in values if group[v] in where]
                if not placed:
                    again.append(equation)
                    continue
                stage = where[group[max(placed, key=lambda v: v.nbytes)]]
                self._stage_after[equation] = stage
                for value in values:
                    if group[value] not in where:
                        where[group[value]] = stage
                changed = True
            left = again
        for value in self.step.inputs:
            if value in group and group[value] in where:
                self.home.setdefault(value, where[group[value]])
        self._gather_scalars()

    def _gather_scalars(self) -> None:
        """What is made of scalars of several stages is computed on the last stage: one number goes back to each stage
        rather than every number to every stage.
        """
        of: dict[Value, frozenset[int]] = {v: frozenset({s}) for v, s in self._given.items()}
        for equation in self.step.after:
            if equation not in self._stage_after:
                sources = frozenset[int]().union(*(of.get(a, ()) for a in equation.inputs if isinstance(a, Value)))
                if len(sources) < 2:
                    of.update(dict.fromkeys(equation.outputs, sources))
                    continue
                self._stage_after[equation] = self.cut.count - 1
            of.update(dict.fromkeys(equation.outputs, frozenset({self._stage_after[equation]})))

    def find_outputs(self) -> None:
        """Where each of the step's outputs is made, and with it everything after the loop."""
        paired = {o: self.step.inputs[i] for i, o in self.pairs}
        for k, atom in enumerate(self.step.outputs):
            if not isinstance(atom, Value):
                self.output_home.append(None)
                continue
            state = paired.get(k)
            stage = self.home.get(state) if state is not None else None
            if stage is None:
                stage = self._stage_of(atom)
            if state is not None:
                self.home.setdefault(state, stage)
            self.output_home.append(stage)
            self._need_after(atom, stage)
        for equation in self.step.after:
            if equation.effects:
                stage = self._stage_after.get(equation, self.cut.count - 1)
                for atom in equation.inputs:
                    self._need_after(atom, stage)
                self._found[stage].after.add(equation)

    def _stage_of(self, value: Value) -> int:
        """Where a value after the loop is computed: where its array, or what it is made of, is."""
        todo, seen = [value], set[Value]()
        while todo:
            atom = todo.pop()
            if atom in seen:
                continue
            seen.add(atom)
            if atom in self._given:
                return self._given[atom]
            if atom in self._inputs and atom in self.home:
                return self.home[atom]
            maker = self._after_maker.get(atom)
            if maker is not None:
                if maker in self._stage_after:
                    return self._stage_after[maker]
                todo += [a for a in reversed(maker.inputs) if isinstance(a, Value)]
        return self.cut.count - 1

    def _need_after(self, root: Atom, stage: int) -> None:
        todo = [(root, stage)]
        while todo:
            atom, at = todo.pop()
            if not isinstance(atom, Value):
                continue
            found = self._found[at]
            maker = self._after_maker.get(atom)
            if atom in self._given or (maker is not None and maker in self._stage_after):
                source = self._given[atom] if maker is None else self._stage_after[maker]
            elif maker is None:
                self._need_before(atom, at)
                continue
            else:
                source = at
            if source != at:
                found.top_arrivals[atom] = source
                self._found[source].top_departures[atom] = None
            if maker is not None and maker not in self._found[source].after:
                self._found[source].after.add(maker)
                todo += [(a, source) for a in maker.inputs]

    # rounds

    def find_rounds(self) -> None:
        """For each stage the round of every value and equation before or after the loop."""
        for after, equations in ((False, self.step.before), (True, self.step.after)):
            makers = self._after_maker if after else self._before_maker
            holders: dict[Apply, list[int]] = {}
            for stage, found in enumerate(self._found):
                for equation in found.after if after else found.before:
                    holders.setdefault(equation, []).append(stage)
            for equation in equations:
                for stage in holders.get(equation, ()):
                    level, arrivals = 0, self._found[stage].top_arrivals
                    for atom in equation.inputs:
                        if not isinstance(atom, Value):
                            continue
                        mine, source = atom in makers, arrivals.get(atom)
                        if source is not None and (mine or (after and atom in self._given)):
                            level = max(level, self._rounds[source].get(atom, 0) + 1)
                        elif mine:
                            level = max(level, self._rounds[stage][atom])
                    self._rounds[stage].update(dict.fromkeys(equation.outputs, level))
                    self._round_of[stage][equation] = level

    def _arrives(self, value: Value, rounds: Mapping[Value, int]) -> Phase:
        part = Part.BEFORE if value in self._before_maker else Part.AFTER
        return part, 1 + rounds.get(value, -1 if value in self._given else 0)

    # the graph

    def graph(self, stage: int) -> StageGraph:
        """The graph of a stage."""
        step, found = self.step, self._found[stage]
        rounds = self._round_of[stage]
        phase: dict[Value, Phase] = {}
        place = step.loop[0].place

        def ordered(equations: Collection[Apply], part: Part) -> list[Apply]:
            for equation in equations:
                phase.update(dict.fromkeys(equation.outputs, (part, rounds[equation])))
            return sorted(equations, key=lambda e: (rounds[e], self._index[e]))

        late = self._put_off(stage)
        before = ordered([e for e in found.before if e not in late], Part.BEFORE)
        body, consts, sums, made = self._body(stage, phase, place)
        starts: list[Value] = []
        for each, _, _ in sums:
            equations, (start,) = self._spliced("start", each, [], place)
            assert isinstance(start, Value), "an accumulator is made by an equation"
            before += equations
            phase.update(dict.fromkeys((v for e in equations for v in e.outputs), (Part.BEFORE, 0)))
            starts.append(start)
        count = step.count
        equations, (numbers,) = splice(lambda: [jax.lax.iota(jnp.int32, count)], [], place)
        assert isinstance(numbers, Value), "numbers are made by an equation"
        before += equations
        phase[numbers] = (Part.BEFORE, 0)
        parts = tuple((self._stack_of[part], part) for part in found.parts)
        arrivals = tuple(found.arrivals)
        rows = [Value(v.aval.update(shape=(count, *v.shape))) for v in arrivals]
        scanned = [numbers, *(stack for stack, _ in parts), *rows]
        scan = scan_equation(body, [outside for outside, _ in consts], starts, scanned, count, place)
        totals = [each.total for each, _, _ in sums]
        stack_of = dict(step.stacks)
        names = dict(zip(scan.outputs, [*totals, *(stack_of[p] for p in found.stacks)], strict=False))
        scan = renamed(scan, names)
        after = ordered(found.after, Part.AFTER)
        phase.update((v, (Part.AFTER, turn)) for e, turn in late.items() for v in e.outputs)
        after = sorted((*after, *late), key=lambda e: (late.get(e, rounds[e]), e not in late, self._index[e]))
        positions = {v: i for i, v in enumerate(step.inputs)}
        used = sorted(found.inputs, key=lambda v: positions[v])
        mine = [k for k, at in enumerate(self.output_home) if at == stage]
        departures = tuple(found.top_departures)
        sent = scan.outputs[len(scan.outputs) - len(found.departures) :] if found.departures else ()
        constants = dict(step.constants)
        graph = Graph(
            (*used, *found.top_arrivals, *rows),
            tuple((v, constants[v]) for v in found.constants),
            (*before, scan, *after),
            (*(step.outputs[k] for k in mine), *departures, *sent),
            frozenset(effect for e in after for effect in e.effects),
        )
        verify(graph)
        sources = {v: self.cut.stage[self._loop_maker[v]] for v in arrivals}
        return StageGraph(
            stage,
            graph,
            {**phase, **made},
            tuple(positions[v] for v in used),
            tuple((v, source, self._arrives(v, self._rounds[source])) for v, source in found.top_arrivals.items()),
            tuple((v, sources[v], found.arrivals[v]) for v in arrivals),
            tuple(mine),
            departures,
            tuple(found.departures),
            consts,
            sums,
            step.number,
            parts,
            tuple((part, stack_of[part]) for part in found.stacks),
        )

    def _put_off(self, stage: int) -> dict[Apply, int]:
        """What need not be made before the loop, for only what comes after it reads it, and the round that does first.

        m1 = mul 0.9 m ; loop ; new = add m1 g   -->   loop ; m1 = mul 0.9 m ; new = add m1 g

        So it takes no memory while the loop runs, and `new` can have the buffer of m.
        """
        found, rounds = self._found[stage], self._round_of[stage]
        kept = {*found.consts, *(self._stack_of[p] for p in found.parts), *found.top_departures, *self.step.outputs}
        first: dict[Value, int] = {}
        for equation in found.after:
            for atom in equation.inputs:
                if isinstance(atom, Value):
                    first[atom] = min(rounds[equation], first.get(atom, rounds[equation]))
        late: dict[Apply, int] = {}
        for equation in sorted(found.before, key=lambda e: -self._index[e]):
            turns = [first[v] for v in equation.outputs if v in first]
            if not turns or equation.effects or any(v in kept for v in equation.outputs):
                kept.update(a for a in equation.inputs if isinstance(a, Value))
                continue
            late[equation] = min(turns)
            for atom in equation.inputs:
                if isinstance(atom, Value):
                    first[atom] = min(late[equation], first.get(atom, late[equation]))
        return late

    def _spliced(
        self, what: Literal["start", "add"], each: Sum, operands: Sequence[Value], place: Place
    ) -> tuple[list[Apply], tuple[Atom, ...]]:
        """Equations that begin a sum or add to it; like sums are traced once."""
        part, total = each.part.aval, each.total.aval
        key = (what, each.reducer, total.shape, total.dtype, total.weak_type, part.dtype, part.weak_type)
        if key not in self._traced:
            self._traced[key] = trace(_start(each) if what == "start" else _adds(each), [v.aval for v in operands])
        return instance(self._traced[key], operands, place)

    def _body(
        self, stage: int, phase: dict[Value, Phase], place: Place
    ) -> tuple[Graph, tuple[tuple[Value, Value], ...], tuple[tuple[Sum, Value, Value], ...], dict[Value, Phase]]:
        """The loop's body: forward equations, then backward ones, sums in between and at the end."""
        step, found = self.step, self._found[stage]
        when: dict[Apply, Phase] = dict(found.free)
        for equation in self._of_stage[stage]:
            when[equation] = BACKWARD if equation in self.cut.backward else FORWARD
        delay(when, {*found.sums, *found.stacks, *found.departures}, self._index)
        if self._weights_apart:
            set_apart(when, set(found.departures), self._index)
        consts = tuple((v, Value(v.aval)) for v in found.consts)
        names: dict[Value, Atom] = dict(consts)
        equations: list[Apply] = []
        made: dict[Value, Phase] = {}
        sums: list[tuple[Sum, Value, Value]] = []
        for part in (FORWARD, BACKWARD, WEIGHTS):
            for equation in sorted((e for e, p in when.items() if p == part), key=lambda e: self._index[e]):
                equations.append(renamed(equation, names))
                made.update(dict.fromkeys(equation.outputs, part))
            for each in step.sums:
                if each.part in found.sums and made.get(each.part) == part:
                    before = Value(each.total.aval)
                    added, (after,) = self._spliced("add", each, [before, each.part], place)
                    assert isinstance(after, Value), "a sum is an equation"
                    equations += added
                    made.update(dict.fromkeys((v for e in added for v in e.outputs), part))
                    sums.append((each, before, after))
        outputs = (*(after for _, _, after in sums), *found.stacks, *found.departures)
        inputs = (
            *(inside for _, inside in consts),
            *(before for _, before, _ in sums),
            step.number,
            *found.parts,
            *found.arrivals,
        )
        effects = frozenset(effect for e in equations for effect in e.effects)
        return Graph(inputs, (), tuple(equations), outputs, effects), consts, tuple(sums), made


def _start(each: Sum) -> Callable[..., Sequence[Any]]:
    shape, dtype, reducer = each.total.shape, each.total.dtype, each.reducer
    # Of a scalar JAX would make a literal.
    return lambda: [jnp.full(shape or (1,), identity(reducer, dtype), dtype).reshape(shape)]


def _adds(each: Sum) -> Callable[..., Sequence[Any]]:
    return lambda total, found: [combine(each.reducer, total, found)]
