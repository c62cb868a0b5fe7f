"""Equations as a branch of a pipeline's one program has them: operands in line, so that XLA moves nothing by itself.

    z = dot_general[b,i,k] x[data,-,model] y[-,model]    operands agree: left to XLA, which sums over model
    z = add x[data,-] y[model,-]                         operands contradict: both are gathered first
    z = gather table[-,model] ids[data]                  in a shard_map, on the parts

What an equation makes is known then: split as its operands are, sums complete. From there a plan's spec is reached by
`manual_reshard`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax

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
    spec_of,
)
from autoshard.runtime.manual_reshard import manual_reshard
from autoshard.runtime.pjit import group_counts

LOOKUPS = ("gather", *COMBINERS)
ON_PARTS = (*LOOKUPS, "conv_general_dilated", "fft", "top_k")
"""What is applied to the parts: XLA would gather operands, exchange borders, or (gathers and scatters split in two
dimensions, jax 0.10.1) end the process with a failed check."""


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
