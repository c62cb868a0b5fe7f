"""Splits a step into what comes before its microbatches, one of them, and what comes after.

    step(weights, batch)   -->   before; for m in range(M): parts += loop(batch[m]); after(parts)

The step is traced twice, with all examples and with those of a microbatch; both have the same equations. The loop runs
the small ones, with the literals of the large ones (a mean divides by all examples), so that the parts sum up to what
the step computes. Random bits and the like are made for all examples and cut, so a microbatch has its own.

Microbatch m has the examples m, m + M, m + 2 M, ...: a batch split over devices in blocks is cut without moving any.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import jax_compat
from autoshard.costmodel import equation_work
from autoshard.errors import MicrobatchError, explain
from autoshard.ir import Apply, Atom, Graph, Literal, Value, bind_equation, trace, trip_count
from autoshard.passes.batch_roles import ALL_AT_ONCE, Axis, Batched, Coupling, Partial, Role, Roles, Whole, batch_roles
from autoshard.passes.groups import apart_values, bind_in_groups, dims_in_groups

MOST_AFTER = 0.1
"""Part of the work on examples that may be left for after the microbatches: a metric, not a layer. Ours."""


FOREIGN = "; give a call into other code that treats them apart a factor rule that says so (docs/factor-rules.md)"

SIZES = frozenset({"length", "size", "axis_size", "dimension", "feature_group_count", "batch_group_count"})
"""Parameters of one whole number that say how large something is; tuples of them (shapes, limits) all do."""


DIMENSIONS = frozenset({"axes", "dimensions", "permutation", "broadcast_dimensions", "dimension_numbers"})
"""Parameters that name dimensions, of which no number of examples makes others."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Microbatches:
    """A step in three parts.

    Attributes:
      graph, small: the step with all examples, and with those of one microbatch.
      count: microbatches.
      batch: inputs that hold examples, and their time axes.
      roles: of all values.
      before, loop, after: numbers of the equations of each part, in order; one may be in several.
      sums: partial values that the loop hands to `after`; stacked: batched ones.
      groups: of a microbatch's examples whose sums are kept apart until the loop has ended.
      apart: the values of `graph` that are [groups, ...] in the loop.
    """

    graph: Graph
    small: Graph
    count: int
    batch: Mapping[int, Axis]
    roles: Roles
    before: tuple[int, ...]
    loop: tuple[int, ...]
    after: tuple[int, ...]
    sums: tuple[Value, ...]
    stacked: tuple[Value, ...]
    groups: int = 1
    apart: frozenset[Value] = frozenset()


def split_step(
    graph: Graph, small: Graph, batch: Mapping[int, Axis], count: int, weights: Sequence[int]
) -> Microbatches:
    """Splits a step.

    Args:
      graph: traced with all examples.
      small: traced with 1 / count of them.
      batch: inputs that hold examples, and where.
      count: microbatches.
      weights: inputs whose use makes a computation part of the model: those of the state.

    Raises:
      MicrobatchError: the traces differ, or examples are coupled; names the equation and its line.
    """
    check_traces(graph, small)
    position, axis = next(iter(batch.items()))
    size = graph.inputs[position].shape[axis.dim]
    roles = batch_roles(graph, small, batch, size, _early(graph, weights))
    parts = _Parts(graph, roles, {value for i, value in enumerate(graph.inputs) if i in batch})
    for atom in graph.outputs:
        parts.complete(atom)
    for equation in graph.equations:
        if isinstance(equation, Apply) and equation.effects:
            parts.happens(equation)
    _check_after(graph, small, parts, roles, count)
    numbers = {equation: i for i, equation in enumerate(graph.equations)}

    def order(found: set[Apply]) -> tuple[int, ...]:
        return tuple(sorted(numbers[equation] for equation in found))

    return Microbatches(
        graph,
        small,
        count,
        dict(batch),
        roles,
        order(parts.before),
        order(parts.loop),
        order(parts.after),
        tuple(parts.sums),
        tuple(parts.stacked),
    )


def in_groups(split: Microbatches, groups: int) -> Microbatches:
    """The split step with sums kept apart for so many groups of a microbatch's examples; see `passes.groups`.

    Raises:
      MicrobatchError: the groups do not divide the examples, or no sum can be kept apart.
    """
    position, axis = next(iter(split.batch.items()))
    examples = split.small.inputs[position].shape[axis.dim]
    if examples % groups:
        raise MicrobatchError(
            explain(
                f"sums kept apart for {groups} groups of a microbatch of {examples} examples",
                f"a divisor of {examples}",
                "use fewer microbatches, or another batch size",
            )
        )
    inside = [(split.graph.equations[i], split.small.equations[i]) for i in split.loop]
    pairs = [(e, part) for e, part in inside if isinstance(e, Apply) and isinstance(part, Apply)]
    apart = apart_values(pairs, split.roles, set(split.sums), examples, groups)
    if not apart:
        raise MicrobatchError(
            explain(
                f"no sum over examples can be kept apart for {groups} groups",
                "gradients made by matrix products, sums and scatters",
                "sum them for every microbatch",
            )
        )
    return replace(split, groups=groups, apart=apart)


def _early(graph: Graph, weights: Sequence[int]) -> dict[Value, bool]:
    """For each value whether it depends on no weight."""
    early = {value: i not in set(weights) for i, value in enumerate(graph.inputs)}
    early.update({value: True for value, _ in graph.constants})
    for equation in graph.equations:
        free = all(early[atom] for atom in equation.inputs if isinstance(atom, Value))
        early.update(dict.fromkeys(equation.outputs, free))
    return early


@final
class _Parts:
    """Which equations each part needs, found from the step's results backwards."""

    def __init__(self, graph: Graph, roles: Roles, given: set[Value]) -> None:
        self._roles = roles
        self._given = given
        self._maker: dict[Value, Apply] = {v: e for e in graph.equations if isinstance(e, Apply) for v in e.outputs}
        self.before: set[Apply] = set()
        self.loop: set[Apply] = set()
        self.after: set[Apply] = set()
        self.sums: dict[Value, None] = {}
        self.stacked: dict[Value, None] = {}

    def complete(self, root: Atom) -> None:
        """The value of all examples is needed, after the microbatches."""
        todo = [root]
        while todo:
            atom = todo.pop()
            if isinstance(atom, Literal) or atom in self._given:
                continue
            role = self._roles.of[atom]
            if isinstance(role, Whole):
                self._ahead(atom)
            elif isinstance(role, Partial):
                self.sums[atom] = None
                self._each(atom)
            elif isinstance(role, Batched):
                self.stacked[atom] = None
                self._each(atom)
            else:
                maker = self._maker[atom]
                if maker not in self.after:
                    self.after.add(maker)
                    todo += maker.inputs

    def happens(self, equation: Apply) -> None:
        """An equation with an effect runs once, for all examples, though nobody may read what it makes."""
        if equation not in self.before and equation not in self.after:
            self.after.add(equation)
            for atom in equation.inputs:
                self.complete(atom)

    def _ahead(self, root: Value) -> None:
        """The value of all examples is needed before."""
        todo: list[Atom] = [root]
        while todo:
            atom = todo.pop()
            maker = None if isinstance(atom, Literal) else self._maker.get(self._roles.alias.get(atom, atom))
            if maker is not None and maker not in self.before:
                self.before.add(maker)
                todo += maker.inputs

    def _each(self, root: Value) -> None:
        """A microbatch's value is needed."""
        todo: list[Atom] = [root]
        while todo:
            atom = todo.pop()
            maker = None if isinstance(atom, Literal) else self._maker.get(atom)
            if maker is None or maker in self.loop:
                continue
            self.loop.add(maker)
            for k, operand in enumerate(maker.inputs):
                role = self._roles.role(operand)
                if isinstance(operand, Literal):
                    continue
                if isinstance(role, Whole) or (maker, k) in self._roles.ahead:
                    self._ahead(operand)
                else:
                    todo.append(operand)


def _check_after(graph: Graph, small: Graph, parts: _Parts, roles: Roles, count: int) -> None:
    """Raises unless little is computed of all examples at once."""
    if not roles.couplings:
        return
    done = {"after": 0.0, "loop": 0.0}
    first: Coupling | None = next((c for c in roles.couplings if c.equation in parts.after), None)
    for equation, part in zip(graph.equations, small.equations, strict=True):
        values = zip((*equation.inputs, *equation.outputs), (*part.inputs, *part.outputs), strict=True)
        if not isinstance(equation, Apply) or all(a.shape == b.shape for a, b in values):
            continue
        amount = _amount(equation)
        if equation in parts.after:
            done["after"] += amount
        elif equation in parts.loop:
            done["loop"] += amount
    if first is not None and done["after"] > MOST_AFTER * (done["after"] + done["loop"]):
        raise MicrobatchError(
            explain(
                f"{first.equation.name} at {jax_compat.source_line(first.equation.place.source)} couples the examples "
                f"of different microbatches: {first.reason}",
                f"a step whose {count} microbatches are computed apart but for sums of their gradients and metrics",
                "use microbatches=1, or a layer that treats examples apart (a group or layer norm for a batch norm)"
                + (FOREIGN if first.reason == ALL_AT_ONCE else ""),
            )
        )


def _amount(equation: Apply) -> float:
    """Operations and bytes, those of bodies included."""
    work = equation_work(equation)
    amount = work.flops + work.transcendentals + sum(work.operand_bytes) + sum(work.result_bytes)
    inside = sum(_amount(e) for body in equation.graphs for e in body.equations if isinstance(e, Apply))
    return amount + trip_count(equation) * inside


def check_traces(graph: Graph, small: Graph) -> None:
    """Raises MicrobatchError unless both graphs have the same equations, sizes apart."""
    different = _difference(graph, small)
    if different is not None:
        raise MicrobatchError(
            explain(
                f"traced with fewer examples the step is another program: {different}",
                "a step that does the same for any number of examples",
                "use other microbatches (one example each is often special), or microbatches=1",
            )
        )


def _difference(graph: Graph, small: Graph, sizes: frozenset[str] = SIZES) -> str | None:
    if len(graph.equations) != len(small.equations):
        return f"{len(small.equations)} equations instead of {len(graph.equations)}"
    known: dict[Value, Value] = dict(zip(graph.inputs, small.inputs, strict=True))
    known.update(zip((v for v, _ in graph.constants), (v for v, _ in small.constants), strict=False))
    for equation, part in zip(graph.equations, small.equations, strict=True):
        where = ""
        if isinstance(equation, Apply):
            where = f"{part.name} at {jax_compat.source_line(equation.place.source)}"
        if equation.name != part.name or len(equation.inputs) != len(part.inputs):
            return f"{where} stands where {equation.name} did"
        for a, b in zip(equation.inputs, part.inputs, strict=True):
            same = known.get(a) is b if isinstance(a, Value) else isinstance(b, Literal)
            if not same:
                return f"{where} has other operands"
        for a, b in zip((*equation.inputs, *equation.outputs), (*part.inputs, *part.outputs), strict=True):
            if len(a.shape) != len(b.shape) or a.dtype != b.dtype:
                return f"{where} has a {b.aval.str_short()} where it had a {a.aval.str_short()}"
        for inner, other in zip(equation.graphs, part.graphs, strict=True):
            found = _difference(inner, other, SIZES - {"length"})  # a loop in a loop is not looked at again
            if found is not None:
                return found
        if isinstance(equation, Apply) and isinstance(part, Apply):
            name = _other_param(equation.params, part.params, sizes) or _other_slice(equation, part)
            if name is not None:
                return f"{where} has another {name}"
        known.update(zip(equation.outputs, part.outputs, strict=True))
    for a, b in zip(graph.outputs, small.outputs, strict=True):
        if isinstance(a, Value) and known.get(a) is not b:
            return "its results are made elsewhere"
    return None


def _other_slice(equation: Apply, part: Apply) -> str | None:
    """The bounds of a slice, where they differ in a dimension of one size."""
    if equation.name != "slice":
        return None
    shapes = zip(equation.inputs[0].shape, part.inputs[0].shape, strict=True)
    same = [d for d, (n, k) in enumerate(shapes) if n == k]
    for name in ("start_indices", "limit_indices"):
        if any(equation.params[name][d] != part.params[name][d] for d in same):
            return name
    return None


def _other_param(params: Mapping[str, Any], others: Mapping[str, Any], sizes: frozenset[str]) -> str | None:
    """A parameter that is another number or word; sizes may differ."""
    for name, value in params.items():
        other = others.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and name in sizes:
            continue
        if isinstance(value, float | complex | str | bool | int):
            both_nan = value != value and other != other
            if value != other and not both_nan:
                return name
        elif name in DIMENSIONS and value != other:
            return name
    return None


def with_literals(small: Graph, graph: Graph) -> Graph:
    """The small graph with the literals of the large one, bodies included."""
    equations: list[Apply] = []
    for part, equation in zip(small.equations, graph.equations, strict=True):
        assert isinstance(part, Apply), "steps are split before shardings"
        assert isinstance(equation, Apply), "steps are split before shardings"
        equations.append(small_equation(part, equation))
    outputs = tuple(b if isinstance(b, Literal) else a for a, b in zip(small.outputs, graph.outputs, strict=True))
    return Graph(small.inputs, small.constants, tuple(equations), outputs, small.effects)


def small_equation(part: Apply, equation: Apply) -> Apply:
    """The equation of a microbatch with the literals of the one of all examples."""
    inputs = tuple(b if isinstance(b, Literal) else a for a, b in zip(part.inputs, equation.inputs, strict=True))
    graphs = tuple(with_literals(a, b) for a, b in zip(part.graphs, equation.graphs, strict=True))
    return Apply(part.primitive, inputs, part.outputs, part.params, graphs, part.effects, part.context, equation.place)


def cut(x: Any, axis: Axis, count: int) -> Any:
    """[count, ...]: the parts of all microbatches."""
    d, n = axis.dim, x.shape[axis.dim]
    split = x.reshape(*x.shape[:d], n // (count * axis.inner), count, axis.inner, *x.shape[d + 1 :])
    moved = jnp.moveaxis(split, d + 1, 0)
    return moved.reshape(count, *x.shape[:d], n // count, *x.shape[d + 1 :])


def joined(x: Any, axis: Axis) -> Any:
    """The whole of the parts of all microbatches, [count, ...]."""
    count, d, n = x.shape[0], axis.dim, x.shape[axis.dim + 1]
    split = x.reshape(count, *x.shape[1 : d + 1], n // axis.inner, axis.inner, *x.shape[d + 2 :])
    moved = jnp.moveaxis(split, 0, d + 1)
    return moved.reshape(*x.shape[1 : d + 1], n * count, *x.shape[d + 2 :])


@final
@dataclass(slots=True)
class _Env:
    """Arrays of values: of all examples, and of the microbatch at hand."""

    whole: dict[Value, Any]
    part: dict[Value, Any] = field(default_factory=dict[Value, Any])


def accumulate(split: Microbatches) -> Callable[..., list[Any]]:
    """The step as a function of its flat arguments, with a scan over the microbatches in it."""

    def step(*args: Any) -> list[Any]:
        env = _Env(dict(split.graph.constants))
        env.whole.update(zip(split.graph.inputs, args, strict=True))
        _run_whole(split, split.before, env.whole)
        parts: dict[Value, Any] = {}
        for i, axis in split.batch.items():
            parts[split.graph.inputs[i]] = cut(args[i], axis, split.count)
        inside = set(_equations(split, split.loop))
        sliced = {
            (e, k): cut(_whole(split, env.whole, e.inputs[k]), axis, split.count)
            for (e, k), axis in split.roles.slices.items()
            if e in inside
        }
        starts = [_start(split, value) for value in split.sums]

        def body(sums: list[Any], given: tuple[Any, Any, Any]) -> tuple[list[Any], list[Any]]:
            m, mine, cuts = given
            inner = _Env(env.whole, dict(mine))
            _run_part(split, m, inner, cuts)
            added = [_combine(split, v, s, inner.part[v]) for v, s in zip(split.sums, sums, strict=True)]
            return added, [inner.part[v] for v in split.stacked]

        numbers = jnp.arange(split.count, dtype=jnp.int32)
        keys = list(parts), list(sliced)

        def scanned(sums: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
            m, mine, cuts = given
            return body(sums, (m, dict(zip(keys[0], mine, strict=True)), dict(zip(keys[1], cuts, strict=True))))

        sums, stacks = jax.lax.scan(scanned, starts, (numbers, list(parts.values()), list(sliced.values())))
        for value, found in zip(split.sums, sums, strict=True):
            env.whole[value] = completed(found, value, value in split.apart)
        for value, found in zip(split.stacked, stacks, strict=True):
            role = split.roles.of[value]
            assert isinstance(role, Batched), "only batched values are stacked"
            env.whole[value] = joined(found, role.axis)
        _run_whole(split, split.after, env.whole)
        return [_whole(split, env.whole, atom) for atom in split.graph.outputs]

    return step


def microbatched(split: Microbatches) -> Graph:
    """The step with a scan over its microbatches, as a graph of the same inputs and outputs."""
    return trace(accumulate(split), [value.aval for value in split.graph.inputs])


def _equations(split: Microbatches, numbers: Sequence[int]) -> list[Apply]:
    return [e for i in numbers if isinstance(e := split.graph.equations[i], Apply)]


def _whole(split: Microbatches, env: Mapping[Value, Any], atom: Atom) -> Any:
    return atom.value if isinstance(atom, Literal) else env[split.roles.alias.get(atom, atom)]


def _run_whole(split: Microbatches, numbers: Sequence[int], env: dict[Value, Any]) -> None:
    for equation in _equations(split, numbers):
        operands = [_whole(split, env, a) for a in equation.inputs]
        env.update(zip(equation.outputs, bind_equation(equation, operands), strict=True))


def _run_part(split: Microbatches, m: Any, env: _Env, cuts: Mapping[tuple[Apply, int], Any]) -> None:
    roles = split.roles
    for i in split.loop:
        equation, part = split.graph.equations[i], split.small.equations[i]
        assert isinstance(equation, Apply), "steps are split before shardings"
        assert isinstance(part, Apply), "steps are split before shardings"
        operands: list[Any] = []
        for k, atom in enumerate(equation.inputs):
            if (equation, k) in cuts:
                operands.append(cuts[equation, k])
            elif isinstance(atom, Literal):
                operands.append(atom.value)
            elif isinstance(roles.of[atom], Whole) or (equation, k) in roles.ahead:
                operands.append(env.whole[roles.alias.get(atom, atom)])
            else:
                operands.append(env.part[atom])
        if equation in roles.generated and equation.name != "broadcast_in_dim":
            made = bind_equation(equation, operands)
            results = [
                take_part(x, _axis_of(roles.of[v]), split.count, m) for x, v in zip(made, equation.outputs, strict=True)
            ]
        elif any(v in split.apart for v in equation.outputs):
            mapped = dims_in_groups(roles, split.apart, equation)
            results = bind_in_groups(small_equation(part, equation), operands, mapped, split.groups)
        else:
            results = bind_equation(small_equation(part, equation), operands)
        env.part.update(zip(equation.outputs, results, strict=True))


def _axis_of(role: Role) -> Axis:
    assert isinstance(role, Batched), "what is made for each example is batched"
    return role.axis


def take_part(x: Any, axis: Axis, count: int, m: Any) -> Any:
    """Microbatch m's part."""
    d, n = axis.dim, x.shape[axis.dim]
    split = x.reshape(*x.shape[:d], n // (count * axis.inner), count, axis.inner, *x.shape[d + 1 :])
    mine = jax.lax.dynamic_index_in_dim(split, m, d + 1, keepdims=False)
    return mine.reshape(*x.shape[:d], n // count, *x.shape[d + 1 :])


def accumulator(dtype: Any) -> Any:
    """Half precision is summed in single."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def _start(split: Microbatches, value: Value) -> Any:
    role = split.roles.of[value]
    assert isinstance(role, Partial), "only partial values are summed"
    dtype = accumulator(value.dtype)
    shape = (split.groups, *value.shape) if value in split.apart else value.shape
    return jnp.full(shape, identity(role.reducer, dtype), dtype)


def completed(total: Any, value: Value, apart: bool) -> Any:
    """What an accumulator holds in the end, as the value is of all examples."""
    return (total.sum(0) if apart else total).astype(value.dtype)


def identity(reducer: str, dtype: Any) -> Any:
    """What a reduction starts from."""
    if reducer in ("add", "or"):
        return np.zeros((), dtype)
    if reducer in ("mul", "and"):
        return np.ones((), dtype) if reducer == "mul" else np.invert(np.zeros((), dtype))
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(-math.inf if reducer == "max" else math.inf, dtype)
    if dtype == np.bool_:
        return np.array(reducer == "min", dtype)
    info = jnp.iinfo(dtype)
    return np.array(info.min if reducer == "max" else info.max, dtype)


def _combine(split: Microbatches, value: Value, total: Any, found: Any) -> Any:
    role = split.roles.of[value]
    assert isinstance(role, Partial), "only partial values are summed"
    return combine(role.reducer, total, found)


def combine(reducer: str, total: Any, found: Any) -> Any:
    """The total with one more part."""
    found = found.astype(total.dtype)
    match reducer:
        case "add":
            return total + found
        case "mul":
            return total * found
        case "max":
            return jnp.maximum(total, found)
        case "min":
            return jnp.minimum(total, found)
        case "and":
            return total & found
        case "or":
            return total | found
        case other:
            raise AssertionError(f"unknown reducer {other}")
