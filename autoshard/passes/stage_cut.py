"""Which stage computes each equation of a microbatch, forward and backward.

    forward    the equations that use weights, in the order of the program, are cut into S runs
    backward   goes to the last stage that has what it reads of the forward pass, and no later than the gradients it
               reads were made; what adds to the gradient of a weight that is not read there goes to the weight
    free       what uses no weights is computed wherever it is read

A backward equation is one that JAX made by transposing (name stacks), or that reads such a one. Sums of gradients made
on different stages (tied weights) are lifted out of the loop, so they travel once a step:

    dw = add_any a b    a on stage 0, b on stage 1     -->     after:  dw = add_any (sum of a) (sum of b)
"""

# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import jax.numpy as jnp

from autoshard import jax_compat
from autoshard.errors import ArgumentError, explain
from autoshard.ir import Apply, Atom, Place, Value, splice
from autoshard.passes.loop_step import LoopStep, Sum
from autoshard.passes.microbatch import accumulator
from autoshard.passes.remat import is_backward


@final
@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A step with a stage for each equation of its loop that uses weights.

    Attributes:
      step: with cross-stage sums lifted out of the loop.
      count: stages.
      stage: of each such equation.
      backward: those of the backward pass.
      home: the stage of each weight that the loop reads: the first that reads it in the forward pass.
    """

    step: LoopStep
    count: int
    stage: Mapping[Apply, int]
    backward: frozenset[Apply]
    home: Mapping[Value, int]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Equations of a step by what they are.

    Attributes:
      forward: equations of the loop that use weights and are not of the backward pass, in order.
      backward: those that are, in order.
    """

    forward: tuple[Apply, ...]
    backward: tuple[Apply, ...]


def equation_kinds(step: LoopStep) -> Kinds:
    """Forward and backward equations of a microbatch."""
    late = set(step.weights_of)
    forward: list[Apply] = []
    backward: list[Apply] = []
    behind: set[Value] = set()
    for equation in step.loop:
        operands = [a for a in equation.inputs if isinstance(a, Value)]
        if not any(a in late for a in operands):
            continue
        late.update(equation.outputs)
        if is_backward(equation) or any(a in behind for a in operands):
            behind.update(equation.outputs)
            backward.append(equation)
        else:
            forward.append(equation)
    return Kinds(tuple(forward), tuple(backward))


def cut_stages(step: LoopStep, cuts: Sequence[int], pairs: Sequence[tuple[int, int]] = ()) -> Cut:
    """Cuts a step.

    Args:
      step: in microbatches.
      cuts: numbers of the forward equations (`equation_kinds`) that begin a stage, ascending; one less than stages.
      pairs: (input, output) that are one piece of state.

    Raises:
      ArgumentError: cuts that are no ascending numbers of forward equations.
    """
    kinds = equation_kinds(step)
    if list(cuts) != sorted(set(cuts)) or any(not 0 < c < len(kinds.forward) for c in cuts):
        raise ArgumentError(
            explain(
                f"cuts {tuple(cuts)} of {len(kinds.forward)} forward equations",
                f"ascending numbers from 1 to {len(kinds.forward) - 1}",
                "use fewer stages, or other cuts",
            )
        )
    stage: dict[Apply, int] = {}
    number = 0
    for i, equation in enumerate(kinds.forward):
        number += i in cuts
        stage[equation] = number
    last = len(cuts)
    weights_of = step.weights_of
    where: dict[Value, set[int]] = {}  # stages that have a value of the forward pass, or a weight
    for equation in kinds.forward:
        for atom in equation.inputs:
            if isinstance(atom, Value):
                where.setdefault(atom, set()).add(stage[equation])
                for weight in weights_of.get(atom, ()):
                    where.setdefault(weight, set()).add(stage[equation])
        for value in equation.outputs:
            where.setdefault(value, set()).add(stage[equation])
    home = {w: min(stages) for w, stages in where.items() if w in step.weights}
    lifting = _Lifting(step)
    gradients: dict[Value, int] = {}  # stage of each value of the backward pass
    owners = _owners(step, pairs)
    for equation in kinds.backward:
        operands = [a for a in equation.inputs if isinstance(a, Value)]
        made = {gradients[a] for a in operands if a in gradients}
        if lifting.lifts(equation, made, gradients):
            continue
        highest = min(made, default=last)
        needed = [where[a] for a in operands if a in where and a not in gradients]
        common = [s for s in range(highest + 1) if all(s in stages for stages in needed)]
        at = common[-1] if common else min([highest, *(min(stages) for stages in needed)])
        read = [w for v in equation.outputs for w in owners.get(v, ()) if w in home and at not in where[w]]
        at = min([at, *(home[w] for w in read)])
        stage[equation] = at
        gradients.update(dict.fromkeys(equation.outputs, at))
    step = lifting.result(step)
    left = [e for e in kinds.backward if e in stage]
    _sink(left, stage, where, gradients, {s.part for s in step.sums} | {v for v, _ in step.stacks})
    late: dict[Value, int] = {}  # weights that only the backward pass reads, by its lowest stage
    for equation in left:
        for atom in equation.inputs:
            for weight in _reads(atom, weights_of):
                late[weight] = min(stage[equation], late.get(weight, last))
    home = {**late, **home}
    return Cut(step, last + 1, stage, frozenset(left), home)


def _reads(atom: Atom, weights_of: Mapping[Value, frozenset[Value]]) -> frozenset[Value]:
    return weights_of.get(atom, frozenset()) if isinstance(atom, Value) else frozenset()


def _owners(step: LoopStep, pairs: Sequence[tuple[int, int]]) -> dict[Value, list[Value]]:
    """For parts of sums, the inputs whose new values they go into, through values of as many elements."""
    reach: dict[Value, frozenset[Value]] = {each.total: frozenset({each.part}) for each in step.sums}
    apart = {each.total for each in step.sums} if step.groups > 1 else set[Value]()
    for equation in step.after:
        operands = [a for a in equation.inputs if isinstance(a, Value) and a in reach]
        for value in equation.outputs:
            size = math.prod(value.shape)
            same = [reach[a] for a in operands if math.prod(a.shape) in (size, step.groups * size * (a in apart))]
            if same:
                reach[value] = frozenset[Value]().union(*same)
    found: dict[Value, list[Value]] = {}
    for i, o in pairs:
        new = step.outputs[o]
        if isinstance(new, Value) and math.prod(new.shape) > 1:
            for part in reach.get(new, ()):
                found.setdefault(part, []).append(step.inputs[i])
    return found


def _sink(
    backward: Sequence[Apply],
    stage: dict[Apply, int],
    where: Mapping[Value, set[int]],
    gradients: dict[Value, int],
    kept: set[Value],
) -> None:
    """Moves equations of the backward pass to the stage of their readers where less travels then."""
    readers: dict[Value, list[Apply]] = {}
    for equation in backward:
        for atom in equation.inputs:
            if isinstance(atom, Value):
                readers.setdefault(atom, []).append(equation)
    for equation in reversed(backward):
        mine = stage[equation]
        below = [stage[r] for v in equation.outputs for r in readers.get(v, ())]
        if not below or any(v in kept for v in equation.outputs) or max(below) >= mine:
            continue
        target = max(below)
        cost = 0
        for atom in {a for a in equation.inputs if isinstance(a, Value)}:
            if atom in gradients:
                there = gradients[atom] == target or any(
                    stage[r] == target for r in readers.get(atom, ()) if r is not equation
                )
            else:
                there = target in where.get(atom, {target})
            cost += 0 if there else atom.nbytes
        if cost <= sum(v.nbytes for v in equation.outputs):
            stage[equation] = target
            gradients.update(dict.fromkeys(equation.outputs, target))


@final
class _Lifting:
    """Sums over stages on their way out of the loop."""

    def __init__(self, step: LoopStep) -> None:
        self._partial = step.partial
        self._lifted: list[Apply] = []
        self._made: set[Value] = set()

    def lifts(self, equation: Apply, stages: set[int], gradients: Mapping[Value, int]) -> bool:
        """Whether an equation reads sums of several stages (or of what was lifted), and so is done after the loop."""
        partial = [a for a in equation.inputs if isinstance(a, Value) and a in self._partial]
        behind = any(v in self._made for v in partial)
        if not partial or not all(v in self._partial for v in equation.outputs):
            return False
        if not behind and (len(stages) < 2 or not all(v in gradients for v in partial)):
            return False
        self._lifted.append(equation)
        self._made.update(equation.outputs)
        return True

    def result(self, step: LoopStep) -> LoopStep:
        """The step with what was lifted among the equations after the loop."""
        if not self._lifted:
            return step
        gone = {id(e) for e in self._lifted}
        made = self._made
        now: dict[Value, Value] = {}  # part to its total's value, of the part's dtype
        after: list[Apply] = []
        sums = [s for s in step.sums if s.part not in made]
        known = {s.part: s for s in sums}
        totals = {s.part: s.total for s in step.sums if s.part in made}
        constants: dict[Value, Value] = {}
        for equation in self._lifted:
            operands: list[Atom] = []
            for atom in equation.inputs:
                if not isinstance(atom, Value) or atom in now:
                    operands.append(now.get(atom, atom) if isinstance(atom, Value) else atom)
                elif atom in self._partial:
                    operands.append(_total(atom, known, sums, now, after, equation.place))
                else:  # zeros of the loop
                    operands.append(constants.setdefault(atom, _zeros(atom, equation.place, after)))
            outputs = tuple(_named(v, totals) for v in equation.outputs)
            after.append(dataclasses.replace(equation, inputs=tuple(operands), outputs=outputs))
            now.update(zip(equation.outputs, outputs, strict=True))
        for part, total in totals.items():
            if now[part] is not total:
                equations, _ = splice(lambda x, d=total.dtype: [x.astype(d)], [now[part]], after[-1].place, [total])
                after += equations
        return dataclasses.replace(
            step,
            loop=tuple(e for e in step.loop if id(e) not in gone),
            after=(*after, *step.after),
            sums=tuple(sums),
        )


def _named(part: Value, totals: Mapping[Value, Value]) -> Value:
    """What stands for a lifted value: the total itself where it has the part's dtype."""
    total = totals.get(part)
    return total if total is not None and total.dtype == part.dtype else Value(part.aval)


def _total(
    part: Value, known: dict[Value, Sum], sums: list[Sum], now: dict[Value, Value], after: list[Apply], place: Place
) -> Value:
    """The total of a part, in the part's dtype."""
    if part not in known:
        dtype = jnp.dtype(accumulator(part.dtype))
        known[part] = Sum(part, Value(jax_compat.aval_of(part.shape, dtype)), "add")
        sums.append(known[part])
    total = known[part].total
    if total.dtype == part.dtype:
        now[part] = total
    else:
        equations, (narrow,) = splice(lambda x, d=part.dtype: [x.astype(d)], [total], place)
        assert isinstance(narrow, Value), "a cast is an equation"
        after += equations
        now[part] = narrow
    return now[part]


def _zeros(value: Value, place: Place, after: list[Apply]) -> Value:
    equations, (made,) = splice(lambda s=value.shape, d=value.dtype: [jnp.zeros(s, d)], [], place)
    assert isinstance(made, Value), "zeros are made by an equation"
    after += equations
    return made
