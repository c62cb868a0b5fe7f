"""A step in microbatches as equations: what comes before them, one of them, what comes after.

    before    of the whole step; cuts batches into [M, ...]
    loop      of one microbatch: reads whole values, its own number, its part of what is cut
    after     of the whole step; reads the sums over microbatches, and stacks [M, ...] of what each has made

This is `Microbatches` with its two graphs made one: a value of all examples and the value of a microbatch are different
values, and what `accumulate` does in Python (cutting, joining, taking a part of random bits) is written in equations.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax
import numpy as np

from autoshard import jax_compat
from autoshard.ir import Apply, Atom, Literal, Place, Value, renamed, splice
from autoshard.passes.batch_roles import Axis, Batched, Partial, Whole
from autoshard.passes.duplicate_cheap import is_cheap
from autoshard.passes.groups import bind_in_groups, dims_in_groups
from autoshard.passes.microbatch import (
    Microbatches,
    accumulator,
    completed,
    cut,
    joined,
    small_equation,
    take_part,
)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A value that microbatches add up (or multiply, ...).

    Attributes:
      part: of one microbatch.
      total: of all, in the accumulator's dtype.
      reducer: add, mul, max, min, and, or.
    """

    part: Value
    total: Value
    reducer: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class LoopStep:
    """See the module's text.

    Attributes:
      inputs, constants, outputs: of the step.
      count: microbatches.
      before, loop, after: equations of each part, in order.
      number: int32[], the microbatch at hand.
      parts: (stack made before, a microbatch's part of it).
      sums: what the loop adds up for `after`.
      stacks: (a microbatch's value, stack of all of them that `after` reads).
      partial: values of the loop that `add` up.
      groups: of examples whose sums are kept apart: `passes.groups`.
      weights: inputs whose use makes a computation part of the model.
    """

    inputs: tuple[Value, ...]
    constants: tuple[tuple[Value, Any], ...]
    outputs: tuple[Atom, ...]
    count: int
    before: tuple[Apply, ...]
    loop: tuple[Apply, ...]
    after: tuple[Apply, ...]
    number: Value
    parts: tuple[tuple[Value, Value], ...]
    sums: tuple[Sum, ...]
    stacks: tuple[tuple[Value, Value], ...]
    partial: frozenset[Value]
    weights: frozenset[Value]
    groups: int = 1

    @property
    def weights_of(self) -> dict[Value, frozenset[Value]]:
        """Of each value made before the loop, and parts of it, the weights it is made of; of weights themselves too."""
        of: dict[Value, frozenset[Value]] = {w: frozenset({w}) for w in self.weights}
        for equation in self.before:
            used = [of[a] for a in equation.inputs if isinstance(a, Value) and a in of]
            if used:
                of.update(dict.fromkeys(equation.outputs, frozenset[Value]().union(*used)))
        of.update({part: of[stack] for stack, part in self.parts if stack in of})
        return of


def loop_step(split: Microbatches) -> LoopStep:
    """The equations of a split step."""
    made = _Made(split)
    made.run_before()
    made.run_loop()
    made.run_after()
    graph, of = split.graph, split.roles.of
    now = {**dict(_pairs(split)), **made.kept}
    partial = {now[v] for v, role in of.items() if v in now and role == Partial("add")}
    weights = [
        value
        for i, value in enumerate(graph.inputs)
        if i not in split.batch and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)
    ]
    alias = split.roles.alias
    outputs = [made.made_here(alias.get(a, a)) if isinstance(a, Value) else a for a in graph.outputs]
    return LoopStep(
        graph.inputs,
        graph.constants,
        tuple(outputs),
        split.count,
        tuple(made.before),
        tuple(made.loop),
        tuple(made.after),
        made.number,
        tuple((stack, part) for stack, part in made.parts.values()),
        tuple(made.sums),
        tuple(made.stacks),
        frozenset(partial),
        frozenset(weights),
        split.groups,
    )


def _grouped(value: Value, groups: int) -> Value:
    return Value(value.aval.update(shape=(groups, *value.shape)))


def _pairs(split: Microbatches) -> list[tuple[Value, Value]]:
    """(value of all examples, the same of a microbatch) of what equations make."""
    found: list[tuple[Value, Value]] = []
    for equation, part in zip(split.graph.equations, split.small.equations, strict=True):
        found += zip(equation.outputs, part.outputs, strict=True)
    return found


@final
@dataclass(slots=True)
class _Made:
    """Equations so far."""

    split: Microbatches
    number: Value = field(default_factory=lambda: Value(jax_compat.aval_of((), np.dtype(np.int32))))
    before: list[Apply] = field(default_factory=list[Apply])
    loop: list[Apply] = field(default_factory=list[Apply])
    after: list[Apply] = field(default_factory=list[Apply])
    parts: dict[tuple[Value, Axis], tuple[Value, Value]] = field(
        default_factory=dict[tuple[Value, Axis], tuple[Value, Value]]
    )
    sums: list[Sum] = field(default_factory=list[Sum])
    stacks: list[tuple[Value, Value]] = field(default_factory=list[tuple[Value, Value]])
    _maker: dict[Value, Apply] = field(default_factory=dict[Value, Apply])
    _copies: dict[Value, Value] = field(default_factory=dict[Value, Value])
    kept: dict[Value, Value] = field(default_factory=dict[Value, Value])  # [groups, ...] in the loop

    def _whole(self, equation: Apply) -> Apply:
        alias: Mapping[Value, Value] = self.split.roles.alias
        return renamed(equation, {a: alias[a] for a in equation.inputs if isinstance(a, Value) and a in alias})

    def _equations(self, numbers: Sequence[int]) -> list[tuple[Apply, Apply]]:
        pairs: list[tuple[Apply, Apply]] = []
        for i in numbers:
            equation, part = self.split.graph.equations[i], self.split.small.equations[i]
            assert isinstance(equation, Apply), "steps are split before shardings"
            assert isinstance(part, Apply), "steps are split before shardings"
            pairs.append((equation, part))
        return pairs

    def run_before(self) -> None:
        self.before += [self._whole(equation) for equation, _ in self._equations(self.split.before)]

    def _part(self, value: Value, axis: Axis, place: Place) -> Value:
        """A microbatch's part of a value of all examples."""
        if (value, axis) not in self.parts:
            count = self.split.count
            equations, (stack,) = splice(lambda x: [cut(x, axis, count)], [value], place)
            assert isinstance(stack, Value), "a cut is made by equations"
            self.before += equations
            self.parts[value, axis] = stack, Value(stack.aval.update(shape=stack.shape[1:]))
        return self.parts[value, axis][1]

    def run_loop(self) -> None:
        split, roles = self.split, self.split.roles
        self.kept = {v: _grouped(small, split.groups) for v, small in _pairs(split) if v in split.apart}
        now: dict[Value, Value] = {**dict(_pairs(split)), **self.kept}
        self._maker = {v: e for e in self.before for v in e.outputs}
        batch = {split.graph.inputs[i]: axis for i, axis in split.batch.items()}
        for equation, part in self._equations(split.loop):
            operands: list[Atom] = []
            for k, atom in enumerate(equation.inputs):
                if isinstance(atom, Literal):
                    operands.append(atom)
                elif (equation, k) in roles.slices:
                    source = roles.alias.get(atom, atom)
                    operands.append(self._part(source, roles.slices[equation, k], equation.place))
                elif isinstance(roles.of[atom], Whole) or (equation, k) in roles.ahead:
                    operands.append(self._cheap(roles.alias.get(atom, atom)))
                elif atom in batch:
                    operands.append(self._part(atom, batch[atom], equation.place))
                else:
                    operands.append(now[atom])
            if equation in roles.generated and equation.name != "broadcast_in_dim":
                self._generate(equation, part, operands)
            elif any(v in split.apart for v in equation.outputs):
                self._in_groups(equation, small_equation(part, equation), operands)
            else:
                self.loop.append(replace(small_equation(part, equation), inputs=tuple(operands)))

    def _in_groups(self, equation: Apply, small: Apply, operands: Sequence[Atom]) -> None:
        """An equation mapped over groups of examples."""
        dims = dims_in_groups(self.split.roles, self.split.apart, equation)
        places = [k for k, atom in enumerate(operands) if isinstance(atom, Value)]

        def mapped(*given: Any) -> list[Any]:
            found = [atom.value if isinstance(atom, Literal) else None for atom in operands]
            for k, x in zip(places, given, strict=True):
                found[k] = x
            return bind_in_groups(small, found, dims, self.split.groups)

        values = [atom for atom in operands if isinstance(atom, Value)]
        results = [self.kept[v] for v in equation.outputs]
        equations, _ = splice(mapped, values, equation.place, results)
        self.loop += equations

    def _cheap(self, value: Value) -> Value:
        """A whole value; what costs nothing to make (zeros) is made in the loop rather than kept for it."""
        maker = self._maker.get(value)
        if maker is None or not is_cheap(maker) or any(isinstance(a, Value) for a in maker.inputs):
            return value
        if value not in self._copies:
            self._copies[value] = Value(value.aval)
            self.loop.append(replace(maker, outputs=(self._copies[value],)))
        return self._copies[value]

    def _generate(self, equation: Apply, part: Apply, operands: Sequence[Atom]) -> None:
        """What is made for each example is made for all, of which a microbatch takes its part."""
        whole = tuple(Value(value.aval) for value in equation.outputs)
        self.loop.append(replace(equation, inputs=tuple(operands), outputs=whole))
        for full, value, mine in zip(whole, equation.outputs, part.outputs, strict=True):
            role = self.split.roles.of[value]
            assert isinstance(role, Batched), "what is made for each example is batched"
            axis, count = role.axis, self.split.count
            equations, _ = splice(
                lambda x, m, a=axis, n=count: [take_part(x, a, n, m)], [full, self.number], equation.place, [mine]
            )
            self.loop += equations

    def run_after(self) -> None:
        split, roles = self.split, self.split.roles
        now = {**dict(_pairs(split)), **self.kept}
        maker = {v: e for e in split.graph.equations for v in e.outputs}
        ahead = {v for e in self.before for v in e.outputs}  # of all examples, known already
        for value in split.sums:
            if value in ahead:
                continue
            role = roles.of[value]
            assert isinstance(role, Partial), "only partial values are summed"
            dtype = accumulator(value.dtype)
            total, apart = value, value in self.kept
            if apart or np.dtype(dtype) != value.dtype:
                shape = (split.groups, *value.shape) if apart else value.shape
                total = Value(jax_compat.aval_of(shape, np.dtype(dtype)))
                equations, _ = splice(
                    lambda x, v=value, a=apart: [completed(x, v, a)], [total], maker[value].place, [value]
                )
                self.after += equations
            self.sums.append(Sum(now[value], total, role.reducer))
        for value in split.stacked:
            if value in ahead:
                continue
            role = roles.of[value]
            assert isinstance(role, Batched), "only batched values are stacked"
            part = now[value]
            stack = Value(part.aval.update(shape=(split.count, *part.shape)))
            equations, _ = splice(lambda x, a=role.axis: [joined(x, a)], [stack], maker[value].place, [value])
            self.stacks.append((part, stack))
            self.after += equations
        left = [equation for equation, _ in self._equations(split.after) if ahead.isdisjoint(equation.outputs)]
        self.after += [self._whole(equation) for equation in left]
        self._drop_dead()

    def made_here(self, output: Value) -> Value:
        """The output, a copy of it where it is a constant: programs hand on what their equations make."""
        if output not in {v for v, _ in self.split.graph.constants}:
            return output
        equations, (copied,) = splice(lambda x: [jax.numpy.copy(x)], [output], self.split.graph.equations[-1].place)
        assert isinstance(copied, Value), "a copy is made by an equation"
        self.after += equations
        return copied

    def _drop_dead(self) -> None:
        """Leaves out what the loop computes for nobody."""
        read = {each.part for each in self.sums} | {part for part, _ in self.stacks}
        kept: list[Apply] = []
        for equation in reversed(self.loop):
            if any(v in read for v in equation.outputs):
                kept.append(equation)
                read.update(a for a in equation.inputs if isinstance(a, Value))
        self.loop = kept[::-1]
