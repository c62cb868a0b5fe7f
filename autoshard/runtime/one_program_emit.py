"""A pipeline as one traceable function of slots: all ranks go through the schedule's ticks together.

    shard_map over the axis `stage` (a rank's own axes stay automatic, with the plan's constraints inside)
      before 0, 1, ...    switch over ranks; what other ranks need is sent after each
      scan over ticks     switch over idle, forward and backward of each stage;  ppermute;  rows of rings written
      after 0, 1, ...     as before; the last one gives state and results

Ranks take different branches, so a branch may hold collectives of its own rank only.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.ir import Apply, Reshard, Spec, Value, divides, evaluate, partition_spec, replicated
from autoshard.passes import Part, Phase, StageProgram
from autoshard.runtime.manual_equation import known_specs, manual_bind
from autoshard.runtime.manual_reshard import manual_reshard
from autoshard.runtime.one_program_layout import INPUT, PHASE_OF, STATE, SUM, TOTALS, Layout, Ref, Ring
from autoshard.runtime.slots import Slot, fill, take
from autoshard.runtime.target import STAGE
from autoshard.schedules import Kind

Arrays = list[Any]
Rings = list[Arrays]


def emit_pipeline(layout: Layout, mesh: jax.sharding.Mesh) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A function (state slots, input slots) -> (state slots, result slots) of arrays over the whole mesh.

    Args:
      layout: where everything lies.
      mesh: with automatic axes; the first one is `stage`, with a member for each rank.
    """

    def body(states: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
        return _Emit(layout, jax.sharding.get_abstract_mesh()).step(states, inputs)

    whole = PartitionSpec(STAGE)
    return jax.shard_map(body, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={STAGE}, check_vma=False)


@final
@dataclass(slots=True)
class _Branch:
    """What one branch of a switch outside the loop gives."""

    made: Arrays
    sums: Arrays
    sent: list[Arrays]
    states: Arrays = field(default_factory=list[Any])
    results: Arrays = field(default_factory=list[Any])

    def tree(self) -> tuple[Any, ...]:
        return self.made, self.sums, self.sent, self.states, self.results


@final
class _Emit:
    """One trace of the function.

    Args:
      layout: where everything lies.
      mesh: of the trace: `stage` is manual.
    """

    def __init__(self, layout: Layout, mesh: Any) -> None:
        self._layout, self._mesh = layout, mesh
        self._env: dict[Hashable, Arrays] = {}
        self._rings = list(layout.rings.items())
        self._sizes = {name: n for name, n in mesh.shape.items() if name != STAGE}

    def step(self, states: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
        """The whole step on one rank."""
        layout = self._layout
        self._env[STATE] = [self._enter(a, s) for a, s in zip(states, layout.states.slots, strict=True)]
        self._env[INPUT] = [self._enter(a, s) for a, s in zip(inputs, layout.inputs.slots, strict=True)]
        self._env[SUM] = [self._zeros(slot) for slot in layout.sums.slots]
        rank = jax.lax.axis_index(STAGE)
        for phase in layout.phases:
            if phase[0] is Part.BEFORE:
                self._round(rank, phase, collect=False)
        self._loop(rank)
        self._send_totals(rank)
        after = [phase for phase in layout.phases if phase[0] is Part.AFTER]
        last = after[-1] if after else None
        merged = last is not None and not self._messages(last)
        for phase in after:
            self._round(rank, phase, collect=merged and phase == last)
        if not merged:
            self._round(rank, None, collect=True)
        out_states = [self._leave(a, s) for a, s in zip(self._env[STATE], layout.states.slots, strict=True)]
        results = [self._leave(a, s) for a, s in zip(self._env["result"], layout.results.slots, strict=True)]
        return tuple(out_states), tuple(results)

    # slots

    def _state(self, array: Any, spec: Spec) -> Any:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self._mesh, partition_spec(spec)))

    def _pin(self, array: Any, slot: Slot) -> Any:
        return self._state(array, slot.spec)

    def _fit(self, array: Any, stage: int, value: Value, slot: Slot) -> Any:
        """A stage's value as it lies in a slot, whose spec may be another."""
        source = self._layout.codes[stage].slot(value).spec
        array = fill(array, slot, value.aval)
        if source == slot.spec or not divides(slot.shape, source, self._sizes):
            return self._pin(array, slot)
        return self._pin(manual_reshard(self._state(array, source), source, slot.spec, self._sizes), slot)

    def _zeros(self, slot: Slot) -> Any:
        return self._pin(jnp.zeros(slot.shape, slot.dtype), slot)

    def _enter(self, array: Any, slot: Slot) -> Any:
        return self._pin(array if slot.shape else array.reshape(()), slot)

    def _leave(self, array: Any, slot: Slot) -> Any:
        return self._pin(array if slot.shape else array.reshape((1,)), slot.outside())

    def _run(self, stage: int, program: StageProgram, operands: Sequence[Any]) -> list[Any]:
        """A program's results."""
        code = self._layout.codes[stage]
        specs = {v: code.specs[code.top(v)] for v in program.graph.inputs if code.top(v) in code.specs}
        known = known_specs(program.graph, {**code.specs, **specs}, self._sizes)

        def constrain(value: Any, reshard: Reshard) -> Any:
            source = known.get(reshard.input, replicated(len(value.shape)))
            if not reshard.explicit:
                value = self._state(value, source)
            if source == reshard.spec or not divides(value.shape, source, self._sizes):
                return self._state(value, reshard.spec)
            return manual_reshard(value, source, reshard.spec, self._sizes)

        def bind(equation: Apply, operands: list[Any]) -> Sequence[Any]:
            specs = [known.get(atom) if isinstance(atom, Value) else None for atom in equation.inputs]
            return manual_bind(equation, operands, specs, self._sizes)

        return evaluate(program.graph, operands, constrain, bind)

    # once a step

    def _read(self, local: Mapping[tuple[int, Value], Any], stage: int, value: Value) -> Any:
        top = self._layout.codes[stage].top(value)
        if (stage, top) in local:
            return local[stage, top]
        ref = self._layout.where[stage, top]
        return take(self._env[ref.table][ref.index], top.aval)

    def _messages(self, phase: Phase | None) -> list[tuple[Phase, int]]:
        """What is sent when a phase has ended, by offset."""
        return sorted(key for key in self._layout.messages if key[0] == phase)

    def _round(self, rank: Any, phase: Phase | None, collect: bool) -> None:
        """One phase of all ranks, and what is sent of it; None: no program."""
        layout = self._layout
        keys = self._messages(phase)
        made = [] if phase is None else layout.made[phase].slots

        def branch(mine: int) -> tuple[Any, ...]:
            local: dict[tuple[int, Value], Any] = {}
            found = _Branch([None] * len(made), list(self._env[SUM]), [])
            for stage in layout.stages_of[mine]:
                code = layout.codes[stage]
                program = None if phase is None else code.program(phase)
                if program is None:
                    continue
                operands = [self._read(local, stage, v) for v in program.graph.inputs]
                results = self._run(stage, program, operands)
                for value, result in zip(program.results, results, strict=True):
                    top = code.top(value)
                    local[stage, top] = result
                    ref, slot = layout.where[stage, top], code.slot(top)
                    target = found.sums if ref.table == SUM else found.made
                    target[ref.index] = self._fit(result, stage, value, slot)
            found.made = [self._zeros(s) if a is None else a for a, s in zip(found.made, made, strict=True)]
            found.sent = [self._outgoing(local, key, mine) for key in keys]
            if collect:
                found.states, found.results = self._collect(local, mine)
            return found.tree()

        branches = [lambda mine=mine: branch(mine) for mine in range(layout.ranks)]
        values, sums, sent, states, results = jax.lax.switch(rank, branches)
        if phase is not None:
            self._env[phase] = [self._pin(a, s) for a, s in zip(values, made, strict=True)]
        self._env[SUM] = [self._pin(a, s) for a, s in zip(sums, layout.sums.slots, strict=True)]
        self._deliver(keys, sent)
        if collect:
            self._env[STATE], self._env["result"] = list(states), list(results)

    def _send_totals(self, rank: Any) -> None:
        keys = self._messages(TOTALS)
        if keys:
            branches = [
                lambda mine=mine: [self._outgoing({}, key, mine) for key in keys] for mine in range(self._layout.ranks)
            ]
            self._deliver(keys, jax.lax.switch(rank, branches))

    def _outgoing(self, local: Mapping[tuple[int, Value], Any], key: tuple[Phase, int], mine: int) -> Arrays:
        """What a rank sends so many ranks on."""
        layout = self._layout
        slots = layout.arrived[key].slots
        found: Arrays = [None] * len(slots)
        for message in layout.messages[key]:
            if layout.placement[message.source] == mine:
                slot = slots[message.index]
                array = self._read(local, message.source, message.value)
                found[message.index] = self._fit(array, message.source, message.value, slot)
        return [self._zeros(s) if a is None else a for a, s in zip(found, slots, strict=True)]

    def _deliver(self, keys: Sequence[tuple[Phase, int]], sent: Sequence[Arrays]) -> None:
        layout = self._layout
        for key, arrays in zip(keys, sent, strict=True):
            sources = sorted({layout.placement[m.source] for m in layout.messages[key]})
            pairs = [(r, (r + key[1]) % layout.ranks) for r in sources]
            self._env[key] = [self._move(a, s, pairs) for a, s in zip(arrays, layout.arrived[key].slots, strict=True)]

    def _move(self, array: Any, slot: Slot, pairs: Sequence[tuple[int, int]]) -> Any:
        if all(source == target for source, target in pairs):
            return self._pin(array, slot)
        return self._pin(jax.lax.ppermute(self._pin(array, slot), STAGE, list(pairs)), slot)

    def _collect(self, local: Mapping[tuple[int, Value], Any], mine: int) -> tuple[Arrays, Arrays]:
        """New state and results of a rank; of others' slots the state as it is, or zeros."""
        layout = self._layout
        states, results = list(self._env[STATE]), [self._zeros(slot) for slot in layout.results.slots]
        for items, slots, target in (
            (layout.state_outputs, layout.states.slots, states),
            (layout.result_items, layout.results.slots, results),
        ):
            for item in items:
                if item.rank == mine:
                    code = layout.codes[item.stage]
                    value = code.programs.outputs[code.parts.outputs.index(item.position)]
                    assert isinstance(value, Value), "literals have no slot"
                    slot = slots[item.index]
                    target[item.index] = self._fit(self._read(local, item.stage, value), item.stage, value, slot)
        states = [self._pin(a, s) for a, s in zip(states, layout.states.slots, strict=True)]
        return states, [self._pin(a, s) for a, s in zip(results, layout.results.slots, strict=True)]

    # the loop

    def _loop(self, rank: Any) -> None:
        """All ticks."""
        layout = self._layout
        rings = [[self._zeros(slot.rows(ring.depth)) for slot in ring.table.slots] for _, ring in self._rings]
        table = jnp.asarray(self._table())[:, rank]

        def tick(carry: tuple[Arrays, Rings], row: Any) -> tuple[tuple[Arrays, Rings], None]:
            sums, rings = carry
            writes, reads = row[2::2], row[3::2]
            branches = [self._turn(None, Kind.FORWARD)]
            branches += [self._turn(s, kind) for s in range(len(layout.codes)) for kind in PHASE_OF]
            sums, rows = jax.lax.switch(row[0], branches, sums, rings, row[1], reads)
            sums = [self._pin(a, s) for a, s in zip(sums, layout.sums.slots, strict=True)]
            written = [
                [
                    self._write(a, made, slot, ring, writes[k])
                    for a, made, slot in zip(old, new, ring.table.slots, strict=True)
                ]
                for k, ((_, ring), old, new) in enumerate(zip(self._rings, rings, rows, strict=True))
            ]
            return (sums, written), None

        (sums, rings), _ = jax.lax.scan(tick, (self._env[SUM], rings), table)
        self._env[SUM] = sums
        for (sort, _), arrays in zip(self._rings, rings, strict=True):
            self._env[sort] = arrays

    def _table(self) -> np.ndarray:
        """For each tick and rank: branch, microbatch, and of each ring the rows to write and to read."""
        layout = self._layout
        found = np.zeros((len(layout.rows), layout.ranks, 2 + 2 * len(self._rings)), np.int32)
        kinds = list(PHASE_OF)
        for t, actions in enumerate(layout.rows):
            for r, action in enumerate(actions):
                if action is not None:
                    found[t, r, 0] = 1 + len(kinds) * action.stage + kinds.index(action.kind)
                    found[t, r, 1] = action.microbatch
        for k, (_, ring) in enumerate(self._rings):
            found[:, :, 2 + 2 * k], found[:, :, 3 + 2 * k] = ring.write, ring.read
        return found

    def _write(self, buffer: Any, made: Any, slot: Slot, ring: Ring, row: Any) -> Any:
        """The buffer with the row written, after it was sent where the ring is one of messages; -1: as it was."""
        made = self._move(made, slot, sorted(ring.pairs)) if ring.pairs else self._pin(made, slot)
        at = jax.lax.max(row, np.int32(0))
        old = jax.lax.dynamic_index_in_dim(buffer, at, 0, keepdims=False)
        new = jax.lax.select(jax.lax.ge(row, np.int32(0)), made, old)
        return self._pin(jax.lax.dynamic_update_index_in_dim(buffer, new, at, 0), slot.rows(ring.depth))

    def _turn(self, stage: int | None, kind: Kind) -> Callable[..., tuple[Arrays, Rings]]:
        """A branch of the loop: one pass of a stage; None: nothing."""

        def run(sums: Arrays, rings: Rings, number: Any, reads: Any) -> tuple[Arrays, Rings]:
            sums = list(sums)
            rows: Rings = [[None] * len(ring.table.slots) for _, ring in self._rings]
            if stage is not None:
                self._pass(stage, kind, sums, rows, rings, number, reads)
            filled = [
                [self._zeros(s) if a is None else self._pin(a, s) for a, s in zip(mine, ring.table.slots, strict=True)]
                for mine, (_, ring) in zip(rows, self._rings, strict=True)
            ]
            return [self._pin(a, s) for a, s in zip(sums, self._layout.sums.slots, strict=True)], filled

        return run

    def _pass(self, stage: int, kind: Kind, sums: Arrays, rows: Rings, rings: Rings, number: Any, reads: Any) -> None:
        """A forward or backward pass of a microbatch.

        Args:
          stage: whose.
          kind: which of the two.
          sums: accumulators, which it changes.
          rows: of each ring the row to write, which it fills in.
          rings: as they are.
          number: of the microbatch.
          reads: of each ring the row that the microbatch has in it.
        """
        layout = self._layout
        code, inner = layout.codes[stage], {layout.codes[stage].parts.number: number}
        numbers = {sort: k for k, (sort, _) in enumerate(self._rings)}

        def row_of(ref: Ref) -> Any:
            k = numbers[ref.table]
            row = jax.lax.dynamic_index_in_dim(rings[k][ref.index], reads[k], 0, keepdims=False)
            return self._pin(row, self._rings[k][1].table.slots[ref.index])

        def read(value: Value) -> Any:
            if value in inner:
                return inner[value]
            ref = layout.kept.get((stage, value)) if kind is Kind.BACKWARD else None
            ref = ref or layout.arrivals.get((stage, value))
            if ref is not None:
                return take(row_of(ref), value.aval)
            top = code.top(value)
            ref = layout.where[stage, top]
            return take(sums[ref.index] if ref.table == SUM else self._env[ref.table][ref.index], top.aval)

        program = code.program(PHASE_OF[kind])
        if program is not None:
            results = self._run(stage, program, [read(v) for v in program.graph.inputs])
            inner.update(zip(program.results, results, strict=True))
            for value in program.results:
                ref = layout.where.get((stage, code.top(value)))
                if ref is not None and ref.table == SUM:
                    sums[ref.index] = self._fit(inner[value], stage, value, layout.sums.slots[ref.index])
        for k, (_, ring) in enumerate(self._rings):
            for value, index in ring.sources.get(stage, ()) if ring.made is kind else ():
                rows[k][index] = self._fit(read(value), stage, value, ring.table.slots[index])
