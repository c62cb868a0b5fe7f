"""From ops to a sharding problem.

Variables are kinds of leaders; a kind's choices and costs are worked out once, on its first member, and counted as
often as it has members. Between two variables a resharding of a value to a spec is paid once, however many readers want
it; readers of different variables each pay in the problem, but not in the estimate that answers are compared by, since
XLA merges equal reshardings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from autoshard.errors import PinError, explain
from autoshard.ir import (
    MeshShape,
    Spec,
    Value,
    assignment_of,
    from_partition_spec,
    local_bytes,
    local_shape,
    print_spec,
    short_type,
    spec_axes,
)
from autoshard.search.choices import Choice, choice_of, follow, leader_choices
from autoshard.search.clusters import Follow, find_parents, find_roots
from autoshard.search.layers import Kinds, find_kinds
from autoshard.search.ops import Op, OpKind, Ops, sized
from autoshard.search.pricing import Pricer
from autoshard.search.problem import Edge, Floats, Problem

Restriction = Callable[[Op, Choice], bool]
"""Which choices of a leader a template allows."""


MAX_CHOICES = 96
"""Most choices of one op; two axes never give more (GPT's products have 91)."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Ops, who follows whom, and the choices of each kind.

    Attributes:
      ops, parents, roots, kinds: structure of the graph.
      variable: for each kind the number of the variable that decides it.
      leaders: for each variable the kind of its leader.
      choices: for each kind what its members do, one entry for each choice of its variable.
    """

    ops: Ops
    parents: list[Follow | None]
    roots: list[Op]
    kinds: Kinds
    variable: tuple[int, ...]
    leaders: tuple[int, ...]
    choices: tuple[tuple[Choice, ...], ...]


def build_model(
    ops: Ops,
    mesh: MeshShape,
    pins: Mapping[Value, Spec],
    tie: bool = True,
    written: frozenset[Value] = frozenset(),
) -> Model:
    """Finds clusters, kinds and choices.

    Raises:
      PinError: a pinned value has no choice with its spec.
    """
    parents = find_parents(ops)
    roots = find_roots(ops, parents)
    kinds = find_kinds(ops, roots, pins, tie, written)
    members = kinds.members
    leader_kinds = [k for k, group in enumerate(members) if parents[group[0].index] is None]
    number = {k: i for i, k in enumerate(leader_kinds)}
    variable = tuple(number[kinds.kind[roots[group[0].index].index]] for group in members)
    choices: list[tuple[Choice, ...] | None] = [None] * len(members)
    cache: dict[object, Choice] = {}
    sizes = dict(mesh)
    for k in range(len(members)):
        stack = [k]
        while stack:
            top = stack[-1]
            if choices[top] is not None:
                stack.pop()
                continue
            op = members[top][0]
            parent = parents[op.index]
            if parent is None:
                choices[top] = _leader(op, mesh, pins)
                continue
            above = choices[kinds.kind[parent.op.index]]
            if above is None:
                stack.append(kinds.kind[parent.op.index])
                continue
            choices[top] = tuple(_follow(op, parent, c, sizes, cache) for c in above)
    done = tuple(c for c in choices if c is not None)
    return Model(ops, parents, roots, kinds, variable, tuple(leader_kinds), done)


def _leader(op: Op, mesh: MeshShape, pins: Mapping[Value, Spec]) -> tuple[Choice, ...]:
    """A leader's choices, those that differ in nothing but the assignment taken once."""
    found: dict[object, Choice] = {}
    if op.kind is OpKind.CONSTANT:
        return (choice_of(op.rule, ((),) * len(op.rule.sizes)),)
    sizes = dict(mesh)
    options = [c for c in leader_choices(op.rule, mesh) if _compiles_right(op, c, sizes)]
    wanted = _wanted(op, pins, sizes)
    if wanted is not None:
        options = [c for c in options if all(w is None or w == s for w, s in zip(wanted, c.results[0], strict=True))]
        fixed = tuple(w for w in wanted if w is not None)
        axes = spec_axes(fixed)
        if not options and len(fixed) == len(wanted) and set(axes) <= set(sizes) and len(set(axes)) == len(axes):
            # Axes in another order than the mesh's on one dimension: a user may want that, the search never does.
            exact = choice_of(op.rule, assignment_of(op.rule, op.rule.results[0], fixed, sizes))
            options = [exact] if exact.results[0] == fixed else []
        if not options:
            shown = print_spec(tuple(w or () for w in wanted))
            raise PinError(
                explain(
                    f"{short_type(op.results[0].aval)} is pinned to {shown} on the mesh {dict(mesh)}",
                    "a spec whose axes' product divides each dimension, on a value that may be split",
                    "change the pin or the mesh",
                )
            )
    for choice in options:
        found.setdefault((choice.operands, choice.results, choice.partial, choice.scattered), choice)
    return _most_useful(op, tuple(found.values()))


def _most_useful(op: Op, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """At most `MAX_CHOICES`: the replicated one, then those that use most axes, those with fewest sums first.

    On three axes a product of two stacked matrices has hundreds of choices, and pairs of them tens of thousands.
    Arguments keep all, so that templates and pins find theirs.
    """
    if op.kind is OpKind.INPUT or len(choices) <= MAX_CHOICES:
        return choices
    rest = sorted(choices[1:], key=lambda c: (-len(c.split_axes), len(c.partial)))
    return (choices[0], *rest[: MAX_CHOICES - 1])


def _compiles_right(op: Op, choice: Choice, sizes: Mapping[str, int]) -> bool:
    """Whether XLA is known to compile a choice to the right values.

    It does not where each device is left with a single update of a scatter whose indexed dimension is split: see the
    rule of scatters (`autoshard.ir`).
    """
    if op.equation is None or not op.equation.name.startswith("scatter"):
        return True
    numbers: Any = op.equation.params["dimension_numbers"]
    indexed: tuple[int, ...] = numbers.inserted_window_dims
    split = any(choice.operands[0][d] for d in indexed)
    rows = local_shape(op.operands[-1].shape, choice.operands[-1], sizes)
    count = math.prod(n for d, n in enumerate(rows) if d not in numbers.update_window_dims)
    return not split or count > 1


def _wanted(op: Op, pins: Mapping[Value, Spec], sizes: Mapping[str, int]) -> tuple[tuple[str, ...] | None, ...] | None:
    """The spec a leader's result must have, entry None where it is free; axes of size 1 split nothing."""
    wanted = _stated(op, pins)
    if wanted is None:
        return None
    return tuple(None if axes is None else tuple(a for a in axes if sizes.get(a) != 1) for axes in wanted)


def _stated(op: Op, pins: Mapping[Value, Spec]) -> tuple[tuple[str, ...] | None, ...] | None:
    """What a pin or the user's sharding constraint says of a leader's result."""
    if op.kind is OpKind.INPUT and op.results[0] in pins:
        return pins[op.results[0]]
    if op.equation is not None and op.equation.name == "sharding_constraint":
        spec = getattr(op.equation.params["sharding"], "spec", None)
        if spec is None:
            return None
        free: set[int] = set(op.equation.params["unconstrained_dims"] or ())
        rank = len(op.results[0].shape)
        entries: list[Any] = [e if isinstance(e, str | tuple) else () for e in spec]
        known = from_partition_spec(entries, rank)
        return tuple(None if d in free else axes for d, axes in enumerate(known))
    return None


def _follow(op: Op, parent: Follow, above: Choice, sizes: Mapping[str, int], cache: dict[object, Choice]) -> Choice:
    spec = (above.operands if parent.reads_us else above.results)[parent.theirs]
    dims = (op.rule.results if parent.reads_us else op.rule.operands)[parent.own]
    key = (op.rule.operands, op.rule.results, op.rule.sizes, op.rule.kinds, dims, spec)
    if key not in cache:
        cache[key] = follow(op.rule, dims, spec, sizes)
    return cache[key]


def build_problem(model: Model, pricer: Pricer, arriving: Mapping[Value, float] | None = None) -> Problem:
    """The costs of every choice and pair of choices, without memory rows.

    Args:
      model: of the step.
      pricer: of the mesh.
      arriving: arguments that come from other devices, to the seconds a byte of a device's part takes.
    """
    costs: list[Floats] = [np.zeros(len(model.choices[k])) for k in model.leaders]
    for value, seconds in (arriving or {}).items():
        k = model.kinds.kind[model.ops.maker[value][0].index]
        parts = [local_bytes(value.aval, c.results[0], pricer.sizes) for c in model.choices[k]]
        costs[model.variable[k]] += seconds * np.array(parts, float)
    edges: dict[Edge, Floats] = {}
    for k, group in enumerate(model.kinds.members):
        costs[model.variable[k]] += len(group) * group[0].times * _unary(group[0], model.choices[k], pricer)
    for op, weight in model.kinds.makers:
        k = model.kinds.kind[op.index]
        own = model.variable[k]
        for r, value in enumerate(op.results):
            if not sized(value):
                continue
            specs = [c.results[r] for c in model.choices[k]]
            for other, wanted in _readers(model, value).items():
                table = weight * op.times * _edge(value, specs, wanted, pricer)
                if other == own:
                    costs[own] += np.diagonal(table)
                elif own < other:
                    edges[own, other] = edges.get((own, other), 0.0) + table
                else:
                    edges[other, own] = edges.get((other, own), 0.0) + table.T
    used = {e: t for e, t in edges.items() if np.any(t)}
    none = np.zeros((0,))
    return Problem(tuple(costs), used, (), none, None)


def _unary(op: Op, choices: Sequence[Choice], pricer: Pricer) -> Floats:
    """Compute and partial-sum seconds of each choice, equal choices worked out once."""
    known: dict[object, float] = {}
    out = np.zeros(len(choices))
    for s, choice in enumerate(choices):
        key = (choice.assignment, choice.scattered)
        if key not in known:
            known[key] = pricer.compute_s(op, choice) + sum(pricer.traffic_s(t) for t in pricer.sums(op, choice))
        out[s] = known[key]
    return out


def _readers(model: Model, value: Value) -> dict[int, list[tuple[Spec, ...]]]:
    """By variable: for each of its choices the distinct specs in which its ops want the value."""
    found: dict[int, list[list[Spec]]] = {}

    def want(kind: int, specs: list[Spec]) -> None:
        lists = found.setdefault(model.variable[kind], [[] for _ in specs])
        for have, spec in zip(lists, specs, strict=True):
            if spec not in have:
                have.append(spec)

    kinds = model.kinds.kind
    for kind, k in dict.fromkeys((kinds[reader.index], k) for reader, k in model.ops.readers.get(value, ())):
        want(kind, [c.operands[k] for c in model.choices[kind]])
    makers = (model.ops.maker[target] for target in model.ops.tied.get(value, ()))
    for kind, result in dict.fromkeys((kinds[maker.index], result) for maker, result in makers):
        want(kind, [c.results[result] for c in model.choices[kind]])
    return {v: [tuple(specs) for specs in lists] for v, lists in found.items()}


def _edge(value: Value, specs: list[Spec], wanted: list[tuple[Spec, ...]], pricer: Pricer) -> Floats:
    """Resharding seconds, shape (choices of the maker, choices of the readers)."""
    sources = {spec: i for i, spec in enumerate(dict.fromkeys(specs))}
    targets = {w: j for j, w in enumerate(dict.fromkeys(wanted))}
    single = {t: k for k, t in enumerate(dict.fromkeys(t for w in targets for t in w))}
    seconds = pricer.reshard_s(value, list(sources), list(single))
    table = np.stack([seconds[:, [single[t] for t in w]].sum(axis=1) for w in targets], axis=1)
    return table[np.ix_([sources[s] for s in specs], [targets[w] for w in wanted])]
