"""A reshard with its collectives written out, where XLA may not choose them.

Of a change of sharding XLA makes collective-permutes where it can. All devices of the program wait for such a one, so it
may not stand in a branch that only some take; all-gathers and all-to-alls are done by groups.

    [(a,b), -] to [a, b]     all-to-all over b
    [a, -] to [b, -]         all-gather over a, slice by b
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard import jax_compat
from autoshard.ir import (
    COMBINERS,
    Apply,
    Assignment,
    FactorKind,
    FactorRule,
    Graph,
    Reshard,
    Spec,
    Value,
    assignment_of,
    axes_size,
    factor_rule,
    legal_part,
    partition_spec,
    replicated,
    spec_axes,
    spec_of,
)
from autoshard.runtime.pjit import group_counts

LOOKUPS = ("gather", *COMBINERS)
ON_PARTS = (*LOOKUPS, "conv_general_dilated", "fft", "top_k")
"""What is applied to the parts: XLA would gather operands, exchange borders, or (gathers and scatters, jax 0.10.1) stop the
process."""


def manual_reshard(array: Any, source: Spec, target: Spec, sizes: Mapping[str, int]) -> Any:
    """The array in another spec.

    Args:
      array: a tracer, inside a `shard_map` over other axes.
      source: the spec it has.
      target: the spec it gets.
      sizes: of the mesh axes of both.
    """

    axes_used = spec_axes(target)  # where a device is on them comes in as an array: JAX 0.10 has no axis_index here

    def local(part: Any, *numbers: Any) -> Any:
        index = dict(zip(axes_used, numbers, strict=True))
        now = [list(axes) for axes in source]
        part = _exchanged(part, now, target, sizes)
        for dim, (axes, wanted) in enumerate(zip(now, target, strict=True)):
            while axes and tuple(axes) != wanted[: len(axes)]:
                part = jax.lax.all_gather(part, axes.pop(), axis=dim, tiled=True)
        for dim, (axes, wanted) in enumerate(zip(now, target, strict=True)):
            for axis in wanted[len(axes) :]:
                length = part.shape[dim] // sizes[axis]
                part = jax.lax.dynamic_slice_in_dim(part, index[axis][0] * length, length, dim)
        return part

    return jax.shard_map(
        local,
        in_specs=(partition_spec(source), *(PartitionSpec(axis) for axis in axes_used)),
        out_specs=partition_spec(target),
        axis_names=set(sizes),
        check_vma=False,
    )(array, *(jnp.arange(sizes[axis], dtype=jnp.int32) for axis in axes_used))


def _exchanged(part: Any, now: Sequence[list[str]], target: Spec, sizes: Mapping[str, int]) -> Any:
    """Moves axes from one dimension to another, in `now` too, as far as one all-to-all each does it."""
    changed = True
    while changed:
        changed = False
        for dim, axes in enumerate(now):
            if not axes or tuple(axes) == target[dim][: len(axes)]:
                continue
            for other, have in enumerate(now):
                fits = tuple((*have, axes[-1])) == target[other][: len(have) + 1]
                if other != dim and fits and part.shape[other] % sizes[axes[-1]] == 0:
                    axis = axes.pop()
                    part = jax.lax.all_to_all(part, axis, split_axis=other, concat_axis=dim, tiled=True)
                    have.append(axis)
                    changed = True
                    break
    return part


def known_specs(graph: Graph, specs: Mapping[Value, Spec], sizes: Mapping[str, int]) -> dict[Value, Spec]:
    """The specs of all values of a constrained graph: as stated, else as its equation makes it of its operands.

    Args:
      graph: with reshards in it.
      specs: of inputs, and of other values where the plan has them.
      sizes: of mesh axes.
    """
    found = dict(specs)
    for equation in graph.equations:
        if isinstance(equation, Reshard):
            found[equation.output] = equation.spec
            continue
        for body in equation.graphs:
            found.update(known_specs(body, found, sizes))
        made = natural_specs(equation, found, sizes)
        found.update({v: spec for v, spec in zip(equation.outputs, made, strict=True) if v not in specs})
    return found


def joint_assignment(
    rule: FactorRule, specs: Sequence[Spec | None], kinds: Container[FactorKind], sizes: Mapping[str, int]
) -> Assignment:
    """For each factor of these kinds the axes over which the operands are split; none where operands contradict."""
    found: list[tuple[str, ...]] = [()] * len(rule.sizes)
    for dims, spec in zip(rule.operands, specs, strict=True):
        for factor, axes in enumerate(() if spec is None else assignment_of(rule, dims, spec, sizes)):
            if rule.kinds[factor] in kinds:
                found[factor] = max(found[factor], axes, key=len)
    used = [axis for axes in found for axis in axes]
    return ((),) * len(found) if len(used) > len(set(used)) else legal_part(rule, tuple(found), sizes)


def natural_specs(equation: Apply, specs: Mapping[Value, Spec], sizes: Mapping[str, int]) -> list[Spec]:
    """The specs in which an equation's results are made: split as its operands are, sums complete."""
    if equation.graphs:
        return [replicated(len(v.shape)) for v in equation.outputs]
    rule = factor_rule(equation)
    have = [specs.get(atom) if isinstance(atom, Value) else None for atom in equation.inputs]
    assignment = joint_assignment(rule, have, _splits(equation), sizes)
    if equation.name in ON_PARTS:
        assignment, _ = _on_parts(equation, rule, assignment, sizes)
    kept = tuple(() if kind is FactorKind.REDUCTION else a for kind, a in zip(rule.kinds, assignment, strict=True))
    return [spec_of(dims, kept) for dims in rule.results]


def _splits(equation: Apply) -> tuple[FactorKind, ...]:
    """Factors that an equation may be split over."""
    return (FactorKind.PARALLEL,) if equation.name in LOOKUPS else (FactorKind.PARALLEL, FactorKind.REDUCTION)


def _on_parts(
    equation: Apply, rule: FactorRule, assignment: Assignment, sizes: Mapping[str, int]
) -> tuple[Assignment, dict[str, Any]]:
    """The assignment as far as the primitive may be applied to the parts, and its parameters for them."""
    params = {**equation.params, **group_counts(equation, rule, assignment, sizes)}
    if equation.name not in LOOKUPS:
        return assignment, params
    if equation.name == "gather":
        lengths = [
            length // math.prod(axes_size(assignment[f], sizes) for f in dim) if length > 1 else length
            for length, dim in zip(equation.params["slice_sizes"], rule.operands[0], strict=True)
        ]
        return assignment, {**params, "slice_sizes": tuple(lengths)}
    numbers: Any = equation.params["dimension_numbers"]
    indexed = {f for d in numbers.inserted_window_dims for f in rule.operands[0][d]}
    return tuple(() if f in indexed else axes for f, axes in enumerate(assignment)), params


def manual_bind(
    equation: Apply, operands: Sequence[Any], specs: Sequence[Spec | None], sizes: Mapping[str, int]
) -> Sequence[Any]:
    """The results of an equation, its operands brought into line first, so that XLA has nothing to move.

    Args:
      equation: without bodies.
      operands: tracers, inside a `shard_map` over other axes.
      specs: they have; None: not known.
      sizes: of mesh axes.
    """
    rule = factor_rule(equation)
    assignment, params = joint_assignment(rule, specs, _splits(equation), sizes), dict(equation.params)
    if equation.name in ON_PARTS:
        assignment, params = _on_parts(equation, rule, assignment, sizes)
    wanted = [spec_of(dims, assignment) for dims in rule.operands]
    placed = [
        x if have is None or have == want else manual_reshard(x, have, want, sizes)
        for x, have, want in zip(operands, specs, wanted, strict=True)
    ]
    if equation.name not in ON_PARTS:
        return jax_compat.bind(equation.primitive, placed, params)
    results = [spec_of(dims, assignment) for dims in rule.results]
    partial = tuple(axis for f in rule.of_kind(FactorKind.REDUCTION) for axis in assignment[f])

    def local(*parts: Any) -> tuple[Any, ...]:
        made = jax_compat.bind(equation.primitive, list(parts), params)
        return tuple(jax.lax.psum(x, partial) if partial else x for x in made)

    return jax.shard_map(
        local,
        in_specs=tuple(map(partition_spec, wanted)),
        out_specs=tuple(map(partition_spec, results)),
        axis_names=set(sizes),
        check_vma=False,
    )(*placed)
