"""What each value of a step is to a microbatch: time as one more axis, propagated by factor rules.

    batched(d, n)    dimension d is (rest, M, n): microbatch m has the elements with m in the middle
    partial(add)     what microbatches compute sums up to the value (or multiplies, or is their maximum)
    whole            the same for all microbatches; known before the first of them
    complete         known after the last of them

An equation with a batched operand splits the factor that its time axis lies in (`ir.factors`): where that factor is
parallel, results are batched; where it is a reduction, partial. Sums of partial values are partial; any other use waits
for the complete value. What couples examples (a sort over the batch, a batch norm's mean used by the examples again) is
computed once, of all examples, after the last microbatch or, where it needs no weights, before the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

import jax
import jax.numpy as jnp

from autoshard import jax_compat
from autoshard.ir import Apply, Atom, FactorKind, FactorRule, Graph, Literal, Value, factor_rule

ALL_AT_ONCE = "it needs all examples at once"
"""A reason: of calls that cannot be looked into, unless a factor rule says otherwise."""

REDUCERS = ("add", "max", "min", "mul", "and", "or")


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """Where the time axis of a value is.

    Attributes:
      dim: dimension.
      inner: its elements are (rest, microbatches, inner), major first.
    """

    dim: int
    inner: int


@final
@dataclass(frozen=True, slots=True)
class Batched:
    """A microbatch has its part."""

    axis: Axis


@final
@dataclass(frozen=True, slots=True)
class Partial:
    """Microbatches have parts that combine."""

    reducer: str


@final
@dataclass(frozen=True, slots=True)
class Whole:
    """Known before; `zero` where it is nothing but zeros."""

    zero: bool = False


@final
@dataclass(frozen=True, slots=True)
class Complete:
    """Known after."""


Role = Batched | Partial | Whole | Complete
WHOLE, ZERO, COMPLETE = Whole(), Whole(True), Complete()


@final
@dataclass(frozen=True, slots=True)
class Coupling:
    """Why an equation is not computed by microbatch.

    Attributes:
      equation: which.
      reason: a clause.
    """

    equation: Apply
    reason: str


@final
@dataclass(slots=True)
class Roles:
    """Roles of a graph's values, and what follows for its equations.

    Attributes:
      of: of each value; literals are whole.
      slices: (equation, operand) that is whole and of which a microbatch takes its part.
      generated: equations without a batched operand that make something for each example (random bits, an iota): each
        microbatch takes its part of the whole.
      ahead: (equation, operand) that combines all examples, of which the equation reads the value computed before.
      alias: whole results of a barrier that batched values go through as well, and what they are.
      couplings: equations left for after the microbatches though examples go into them, in order.
    """

    of: dict[Value, Role] = field(default_factory=dict[Value, Role])
    slices: dict[tuple[Apply, int], Axis] = field(default_factory=dict[tuple[Apply, int], Axis])
    generated: set[Apply] = field(default_factory=set[Apply])
    ahead: set[tuple[Apply, int]] = field(default_factory=set[tuple[Apply, int]])
    alias: dict[Value, Value] = field(default_factory=dict[Value, Value])
    couplings: list[Coupling] = field(default_factory=list[Coupling])

    def role(self, atom: Atom) -> Role:
        if isinstance(atom, Literal):
            return Whole(is_zero(atom))
        return self.of[atom]


def is_zero(atom: Literal) -> bool:
    """Whether a literal is a zero that adds nothing."""
    if atom.dtype == jax.dtypes.float0:
        return True
    return not jnp.issubdtype(atom.dtype, jax.dtypes.extended) and bool(atom.value == 0)


def batch_roles(
    graph: Graph,
    small: Graph,
    batch: Mapping[int, Axis],
    size: int,
    early: Mapping[Value, bool],
) -> Roles:
    """Roles of all values of a step.

    Args:
      graph: the step, traced with all examples.
      small: traced with those of one microbatch; equation by equation the same.
      batch: inputs that hold examples, and their time axes.
      size: examples in all.
      early: values that depend on no weights, which may be computed before the microbatches.
    """
    roles = Roles()
    for i, value in enumerate(graph.inputs):
        roles.of[value] = Batched(batch[i]) if i in batch else WHOLE
    for value, _ in graph.constants:
        roles.of[value] = WHOLE
    inner = next(iter(batch.values())).inner
    count = size // small.inputs[next(iter(batch))].shape[next(iter(batch.values())).dim]
    _Propagation(roles, count, size, inner, early).run(graph, small)
    return roles


@final
@dataclass(frozen=True, slots=True)
class _Propagation:
    roles: Roles
    count: int
    size: int
    inner: int
    early: Mapping[Value, bool]

    def run(self, graph: Graph, small: Graph) -> None:
        for equation, part in zip(graph.equations, small.equations, strict=True):
            assert isinstance(equation, Apply), "roles are found before shardings"
            found = self._equation(equation, part)
            if not self._has_its_part(equation, part, found):
                self.roles.generated.discard(equation)
                found = self._couple(equation, "it sorts fewer examples into other groups")
            self.roles.of.update(zip(equation.outputs, found, strict=True))

    def _has_its_part(self, equation: Apply, part: Any, results: Sequence[Role]) -> bool:
        """Whether the smaller program has the parts that the roles speak of.

        A program with a fixed number of groups, `x.reshape(-1, 4, ...)`, has other groups when it has fewer examples.
        """
        for k, (atom, smaller) in enumerate(zip(equation.inputs, part.inputs, strict=True)):
            axis = self.roles.slices.get((equation, k))
            if axis is not None and smaller.shape != _part_shape(atom.shape, Batched(axis), self.count):
                return False
        return all(
            smaller.shape == _part_shape(value.shape, role, self.count)
            for value, smaller, role in zip(equation.outputs, part.outputs, results, strict=True)
            if isinstance(role, Batched | Partial)
        )

    def _equation(self, equation: Apply, part: Any) -> Sequence[Role]:
        roles = [self.roles.role(atom) for atom in equation.inputs]
        if any(isinstance(role, Batched) for role in roles):
            if equation.name == "scan" and equation.params["length"] != part.params["length"]:
                return self._couple(equation, "it runs once for each example")
            return self._batched(equation, roles)
        if any(isinstance(role, Complete) for role in roles):
            return [COMPLETE] * len(equation.outputs)
        if any(isinstance(role, Partial) for role in roles):
            reducer = _still_partial(equation, roles)
            return [Partial(reducer) if reducer else COMPLETE] * len(equation.outputs)
        return self._made(equation, part)

    def _made(self, equation: Apply, part: Any) -> Sequence[Role]:
        """Of an equation of whole values: whole, unless it makes one thing for each example."""
        axes: list[Axis] = []
        for value, smaller in zip(equation.outputs, part.outputs, strict=True):
            different = [d for d, (n, k) in enumerate(zip(value.shape, smaller.shape, strict=True)) if n != k]
            if len(different) == 1 and value.shape[different[0]] == self.size:
                axes.append(Axis(different[0], self.inner))
        wide = any(
            isinstance(a, Value) and a.shape != b.shape for a, b in zip(equation.inputs, part.inputs, strict=True)
        )
        if len(axes) == len(equation.outputs) and axes and not wide and not equation.effects:
            self.roles.generated.add(equation)
            return [Batched(axis) for axis in axes]
        zero = equation.name in _KEEP_ZERO and all(r == ZERO for r in map(self.roles.role, equation.inputs))
        return [ZERO if zero else WHOLE] * len(equation.outputs)

    def _batched(self, equation: Apply, roles: Sequence[Role]) -> Sequence[Role]:
        if equation.effects:
            return self._couple(equation, "it has an effect, which would happen once a microbatch")
        if equation.name == "optimization_barrier" and not any(isinstance(role, Complete) for role in roles):
            for atom, value, role in zip(equation.inputs, equation.outputs, roles, strict=True):
                if isinstance(role, Whole) and isinstance(atom, Value):
                    self.roles.alias[value] = self.roles.alias.get(atom, atom)
            return roles
        waiting = [k for k, role in enumerate(roles) if isinstance(role, Complete | Partial)]
        for k in waiting:
            atom = equation.inputs[k]
            assert isinstance(atom, Value), "literals are whole"
            if not self.early[atom]:
                return self._couple(equation, "it uses what all examples together give")
        self.roles.ahead.update((equation, k) for k in waiting)
        roles = [WHOLE if k in waiting else role for k, role in enumerate(roles)]
        if equation.name == "scan":
            return self._scan(equation, roles)
        if equation.name == "cond":
            return self._cond(equation, roles)
        found = split_equation(equation, factor_rule(equation), roles, self.count)
        if isinstance(found, str):
            return self._couple(equation, found)
        results, slices = found
        for k, axis in slices.items():
            self.roles.slices[equation, k] = axis
        return results

    def _couple(self, equation: Apply, reason: str) -> Sequence[Role]:
        self.roles.couplings.append(Coupling(equation, reason))
        return [COMPLETE] * len(equation.outputs)

    def _cond(self, equation: Apply, roles: Sequence[Role]) -> Sequence[Role]:
        """A branch for all examples of all microbatches; results are what they are in every branch."""
        if not isinstance(roles[0], Whole):
            return self._couple(equation, "examples take different branches")
        results: list[Role] = []
        for number, body in enumerate(equation.graphs):
            found = _inside(body, roles[1:], self.count)
            if isinstance(found, Coupling):
                return self._couple(equation, f"inside it, {found.equation.name}: {found.reason}")
            results = list(found) if number == 0 else [_either(a, b) for a, b in zip(results, found, strict=True)]
        if any(isinstance(role, Complete) for role in results):
            return self._couple(equation, "its branches treat examples in different ways")
        return results

    def _scan(self, equation: Apply, roles: Sequence[Role]) -> Sequence[Role]:
        """A scan whose body treats examples apart: carries keep one role, found by going round."""
        consts, carries = jax_compat.scan_layout(equation.params)
        first = consts + carries
        body = equation.graphs[0]
        inside: list[Role] = list(roles)
        for k in range(first, len(roles)):
            role = roles[k]
            if isinstance(role, Batched):
                if role.axis.dim == 0:
                    return self._couple(equation, "it goes through the examples one after the other")
                inside[k] = Batched(Axis(role.axis.dim - 1, role.axis.inner))
        found: list[Role] = []
        for _ in range(carries + 2):
            made = _inside(body, inside, self.count)
            if isinstance(made, Coupling):
                return self._couple(equation, f"inside it, {made.equation.name}: {made.reason}")
            found, changed = made, False
            for k in range(carries):
                before, after = inside[consts + k], found[k]
                if after == before or (isinstance(after, Whole) and before == WHOLE):
                    continue
                if not isinstance(before, Whole) or (isinstance(after, Partial) and before != ZERO):
                    return self._couple(equation, "what it carries mixes examples")
                inside[consts + k], changed = (WHOLE if isinstance(after, Whole) else after), True
            if not changed:
                break
        for k in range(consts, first):
            role, given = inside[k], roles[k]
            if isinstance(role, Batched) and not isinstance(given, Batched):
                self.roles.slices[equation, k] = role.axis
        results: list[Role] = list(inside[consts:first])
        for role in found[carries:]:
            results.append(Batched(Axis(role.axis.dim + 1, role.axis.inner)) if isinstance(role, Batched) else role)
        return results


def _part_shape(shape: tuple[int, ...], role: Role, count: int) -> tuple[int, ...]:
    """What a microbatch has of a value."""
    if not isinstance(role, Batched):
        return shape
    d = role.axis.dim
    return (*shape[:d], shape[d] // count, *shape[d + 1 :])


def _either(a: Role, b: Role) -> Role:
    """The role of a result that is one or the other; complete where there is none."""
    if a == b or (b == ZERO and not isinstance(a, Complete)):
        return a
    if a == ZERO and not isinstance(b, Complete):
        return b
    return WHOLE if isinstance(a, Whole) and isinstance(b, Whole) else COMPLETE


_KEEP_ZERO = frozenset(
    {"broadcast_in_dim", "reshape", "convert_element_type", "transpose", "neg", "copy", "squeeze", "mul", "add_any"}
)
_SUMS = frozenset({"add", "add_any"})
_PASS = frozenset({"optimization_barrier", "copy", "stop_gradient", "name"})


_LINEAR = frozenset(
    {
        "neg",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "convert_element_type",
        "slice",
        "rev",
    }
    | {"reduce_sum", "cumsum", "real", "imag", "mul", "dot_general", "conv_general_dilated", "concatenate", "conj"}
)
"""Linear in one operand while the others are whole (`concatenate`: in all)."""


def _linear(equation: Apply, roles: Sequence[Role]) -> bool:
    """Whether the results for a sum are the sum of the results."""
    partial = [k for k, role in enumerate(roles) if isinstance(role, Partial)]
    if equation.name == "concatenate":
        return all(isinstance(role, Partial) or role == ZERO for role in roles)
    if equation.name == "div":
        return partial == [0]
    if equation.name == "convert_element_type":
        dtype = equation.outputs[0].dtype
        return bool(jnp.issubdtype(dtype, jnp.inexact) and jnp.issubdtype(equation.inputs[0].dtype, jnp.inexact))
    return equation.name in _LINEAR and len(partial) == 1


def _still_partial(equation: Apply, roles: Sequence[Role], linear: bool = False) -> str:
    """The reducer of an equation of partial values that are only added up, or only made wider; "" otherwise.

    With `linear` any linear use counts; else those wait, for the sum is as good an operand and there is one of it.
    """
    reducers = {role.reducer for role in roles if isinstance(role, Partial)}
    if len(reducers) != 1:
        return ""
    (reducer,) = reducers
    others = [role for role in roles if not isinstance(role, Partial)]
    if equation.name in _PASS and not others:
        return reducer
    if reducer != "add":
        return ""
    if equation.name in _SUMS and all(role == ZERO for role in others):
        return reducer
    if equation.name == "sub" and not others:
        return reducer
    if linear and _linear(equation, roles):
        return reducer
    if equation.name == "reduce_sum":
        return reducer
    if equation.name == "convert_element_type" and _widens(equation.inputs[0].dtype, equation.outputs[0].dtype):
        return reducer
    return ""


def _widens(old: Any, new: Any) -> bool:
    if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
        return False
    narrow, wide = cast("Any", jnp).finfo(old), cast("Any", jnp).finfo(new)
    return bool(wide.nmant >= narrow.nmant and wide.nexp >= narrow.nexp)


def split_equation(
    equation: Apply, rule: FactorRule, roles: Sequence[Role], count: int
) -> tuple[list[Role], dict[int, Axis]] | str:
    """Roles of an equation's results, and the whole operands of which a part is taken; or why there are none.

    Args:
      equation: with at least one batched operand, the others whole.
      rule: its factor rule.
      roles: of its operands.
      count: microbatches.
    """
    place: tuple[int, int] | None = None
    for dims, role in zip(rule.operands, roles, strict=True):
        if not isinstance(role, Batched):
            continue
        found = _locate(rule, dims, role.axis, count)
        if found is None:
            return "it takes the examples apart in another way"
        if rule.kinds[found[0]] is FactorKind.NEED_REPLICATION:
            return ALL_AT_ONCE
        if place is not None and found != place:
            return "it combines examples with each other"
        place = found
    assert place is not None, "there is a batched operand"
    factor, within = place
    kind = rule.kinds[factor]
    if kind is FactorKind.PERMUTATION:
        return "it moves or orders examples"
    slices: dict[int, Axis] = {}
    for k, (dims, role) in enumerate(zip(rule.operands, roles, strict=True)):
        axis = _axis(rule, dims, factor, within)
        if axis is not None and not isinstance(role, Batched):
            slices[k] = axis
    results: list[Role] = []
    for dims in rule.results:
        axis = _axis(rule, dims, factor, within)
        if axis is not None:
            results.append(Batched(axis))
        elif kind is FactorKind.REDUCTION and rule.reducers[factor] in REDUCERS:
            results.append(Partial(rule.reducers[factor]))
        else:
            return "a result of it is the same for all examples"
    summed = kind is FactorKind.REDUCTION and any(isinstance(role, Partial) for role in results)
    if summed and equation.name.startswith("scatter") and roles[0] != ZERO:
        return "it adds what examples give to values that would count once a microbatch"
    return results, slices


def _locate(rule: FactorRule, dims: Sequence[Sequence[int]], axis: Axis, count: int) -> tuple[int, int] | None:
    """(factor, elements below the time axis inside it) of a value's time axis."""
    inner = 1
    for factor in reversed(dims[axis.dim]):
        n = rule.sizes[factor]
        if axis.inner < inner * n:
            within, left = divmod(axis.inner, inner)
            if left or n % (within * count):
                return None
            return factor, within
        inner *= n
    return None


def _axis(rule: FactorRule, dims: Sequence[Sequence[int]], factor: int, within: int) -> Axis | None:
    """Where a factor's time axis is in another value; None where the value does not have the factor."""
    for d, factors in enumerate(dims):
        if factor in factors:
            inner = 1
            for other in reversed(factors):
                if other == factor:
                    return Axis(d, inner * within)
                inner *= rule.sizes[other]
    return None


def _inside(body: Graph, inputs: Sequence[Role], count: int) -> list[Role] | Coupling:
    """Roles of a body's outputs; nothing in it may need a part of something whole, or wait."""
    of: dict[Value, Role] = dict(zip(body.inputs, inputs, strict=True))
    of.update({value: WHOLE for value, _ in body.constants})
    same: dict[Value, frozenset[int]] = {}

    def read(atom: Atom) -> Role:
        return Whole(is_zero(atom)) if isinstance(atom, Literal) else of[atom]

    for equation in body.equations:
        assert isinstance(equation, Apply), "roles are found before shardings"
        roles = [read(atom) for atom in equation.inputs]
        results: Sequence[Role]
        if not any(isinstance(role, Batched | Partial) for role in roles):
            zero = equation.name in _KEEP_ZERO and all(role == ZERO for role in roles)
            results = [ZERO if zero else WHOLE] * len(equation.outputs)
            same.update(dict.fromkeys(equation.outputs, _uniform(equation, same)))
        elif not any(isinstance(role, Batched) for role in roles):
            reducer = _still_partial(equation, roles, linear=True)
            if not reducer:
                return Coupling(equation, "it uses a sum over examples")
            results = [Partial(reducer)] * len(equation.outputs)
        elif any(isinstance(role, Partial) for role in roles):
            return Coupling(equation, "it uses a sum over examples")
        elif equation.name == "optimization_barrier":
            results = roles
        else:
            found = split_equation(equation, factor_rule(equation), roles, count)
            if isinstance(found, str):
                return Coupling(equation, found)
            results, slices = found
            apart = [k for k, axis in slices.items() if axis.dim not in same.get(cast("Value", equation.inputs[k]), ())]
            if apart:
                return Coupling(equation, "it takes one thing for each example from outside")
        of.update(zip(equation.outputs, results, strict=True))
    return [read(atom) for atom in body.outputs]


def _uniform(equation: Apply, same: Mapping[Value, frozenset[int]]) -> frozenset[int]:
    """Dimensions along which the result is the same everywhere: a part of it can be made as well as the whole."""
    shape = equation.outputs[0].shape
    if equation.name == "broadcast_in_dim":
        return frozenset(range(len(shape))) - frozenset(equation.params["broadcast_dimensions"])
    found = frozenset(range(len(shape)))
    for atom in equation.inputs:
        if atom.shape and atom.shape != shape:
            return frozenset()
        if isinstance(atom, Value) and atom.shape:
            found &= same.get(atom, frozenset())
    return found if equation.name in _ELEMENTWISE else frozenset()


_ELEMENTWISE = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "exp",
        "sqrt",
        "rsqrt",
        "max",
        "min",
        "convert_element_type",
        "select_n",
        "copy",
    }
    | {"add_any", "integer_pow", "square", "log", "abs", "sign", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"}
)
