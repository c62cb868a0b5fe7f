"""Factor rules of operators that move elements without computing.

reshape          (8,4)->(32): ([i,j])->([ij])
transpose        ([i,j])->([j,i])
broadcast        ([i])->([i,j])
pad, slice, rev  permutation where elements move, parallel elsewhere
concatenate, dynamic_slice, dynamic_update_slice   need replication where sizes differ
iota             ()->([i,j])
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir.factors import FactorKind, FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.rule_builder import FactorBuilder, ints, refine
from autoshard.ir.rule_registry import register_rule


@register_rule("reshape")
def _reshape(equation: Apply) -> FactorRule:
    """`(6,4)->(4,6): ([ij,kl])->([im,nl])`, where i and l are parallel and the others need replication.

    A factor that only one side has cannot be split there without moving elements.
    """
    builder = FactorBuilder(equation)
    out = builder.result()
    if 0 in builder.shapes[0]:
        return builder.build()
    order: Sequence[int] | None = equation.params.get("dimensions")
    operand_dims = tuple(range(len(builder.shapes[0]))) if order is None else ints(order)
    operand = [builder.shapes[0][d] for d in operand_dims]
    left, right, sizes, common = refine(operand, builder.shapes[out])
    for factor, (size, shared) in enumerate(zip(sizes, common, strict=True)):
        at: dict[int, int] = {}
        for d, dim in enumerate(left):
            if factor in dim:
                at[0] = operand_dims[d]
        for d, dim in enumerate(right):
            if factor in dim:
                at[out] = d
        builder.factor(at, FactorKind.PARALLEL if shared else FactorKind.NEED_REPLICATION, size=size)
    return builder.build()


@register_rule("transpose")
def _transpose(equation: Apply) -> FactorRule:
    builder = FactorBuilder(equation)
    for dim, source in enumerate(ints(equation.params["permutation"])):
        builder.factor({0: source, builder.result(): dim})
    return builder.build()


@register_rule("broadcast_in_dim")
def _broadcast(equation: Apply) -> FactorRule:
    """New dimensions, and those that grow from 1, are free: every device writes its part."""
    return _broadcast_to(equation, [int(d) for d in equation.params["broadcast_dimensions"]])


@register_rule("broadcast_to")
def _numpy_broadcast(equation: Apply) -> FactorRule:
    builder = FactorBuilder(equation)
    rank, out_rank = len(builder.shapes[0]), len(builder.shapes[builder.result()])
    return _broadcast_to(equation, tuple(range(out_rank - rank, out_rank)))


def _broadcast_to(equation: Apply, dimensions: Sequence[int]) -> FactorRule:
    builder = FactorBuilder(equation)
    out = builder.result()
    source = {dim: d for d, dim in enumerate(dimensions) if builder.shapes[0][d] != 1}
    for dim in range(len(builder.shapes[out])):
        builder.factor({out: dim, 0: source[dim]} if dim in source else {out: dim})
    return builder.build()


@register_rule("squeeze")
def _squeeze(equation: Apply) -> FactorRule:
    builder = FactorBuilder(equation)
    rank = len(builder.shapes[0])
    gone = {d % rank for d in ints(equation.params["dimensions"])}
    for dim, source in enumerate(d for d in range(rank) if d not in gone):
        builder.factor({0: source, builder.result(): dim})
    return builder.build()


@register_rule("expand_dims")
def _expand_dims(equation: Apply) -> FactorRule:
    builder = FactorBuilder(equation)
    out = builder.result()
    rank = len(builder.shapes[out])
    new = {d % rank for d in ints(equation.params["dimensions"])}
    for source, dim in enumerate(d for d in range(rank) if d not in new):
        builder.factor({0: source, out: dim})
    return builder.build()


@register_rule("iota", "empty", "empty2")
def _made(equation: Apply) -> FactorRule:
    """`()->([i,j])`: every device makes its part."""
    builder = FactorBuilder(equation)
    return builder.pointwise(builder.results).build()


@register_rule("iota_2x32_shape")
def _counters(equation: Apply) -> FactorRule:
    """Row-major counters in two words: both results alike, each device makes its part."""
    builder = FactorBuilder(equation)
    return builder.pointwise(builder.results).build()


@register_rule("concatenate")
def _concatenate(equation: Apply) -> FactorRule:
    dimension = int(equation.params["dimension"])
    builder = FactorBuilder(equation)
    return builder.pointwise(dims=_others(builder, dimension)).build()


@register_rule("stack")
def _stack(equation: Apply) -> FactorRule:
    """`([i],[i])->([k,i])` with the new dimension whole."""
    builder = FactorBuilder(equation)
    out = builder.result()
    axis = int(equation.params.get("axis", 0)) % len(builder.shapes[out])
    for dim in range(len(builder.shapes[out])):
        if dim != axis:
            builder.factor({out: dim} | dict.fromkeys(builder.operands, dim - (dim > axis)))
    return builder.build()


@register_rule("unstack")
def _unstack(equation: Apply) -> FactorRule:
    """`([k,i])->([i],[i])` with the dimension taken apart whole."""
    builder = FactorBuilder(equation)
    rank = len(builder.shapes[0])
    axis = int(equation.params.get("axis", 0)) % rank
    for dim in range(rank):
        if dim != axis:
            builder.factor({0: dim} | dict.fromkeys(builder.results, dim - (dim > axis)))
    return builder.build()


@register_rule("split")
def _split(equation: Apply) -> FactorRule:
    """Slices: a permutation of the dimension that is taken apart."""
    builder = FactorBuilder(equation)
    axis = int(equation.params["axis"]) % len(builder.shapes[0])
    builder.pointwise(dims=_others(builder, axis))
    for position, shape in enumerate(builder.shapes):
        builder.factor({position: axis}, FactorKind.PERMUTATION, size=shape[axis])
    return builder.build()


@register_rule("tile")
def _tile(equation: Apply) -> FactorRule:
    """`([i])->([ki])`: repetitions are free and major."""
    builder = FactorBuilder(equation)
    out = builder.result()
    for dim, (size, grown) in enumerate(zip(builder.shapes[0], builder.shapes[out], strict=True)):
        builder.factor({out: dim}, size=grown // max(size, 1))
        builder.factor({0: dim, out: dim}, size=size)
    return builder.build()


@register_rule("pad")
def _pad(equation: Apply) -> FactorRule:
    """Rows move to other devices where there is padding, even if a negative one keeps the size."""
    moved = {d for d, padding in enumerate(equation.params["padding_config"]) if tuple(padding) != (0, 0, 0)}
    return _permuted(equation, moved)


@register_rule("slice")
def _slice(equation: Apply) -> FactorRule:
    shape, out = FactorBuilder(equation).shapes
    return _permuted(equation, {d for d, (n, m) in enumerate(zip(shape, out, strict=True)) if n != m})


@register_rule("rev")
def _rev(equation: Apply) -> FactorRule:
    return _permuted(equation, set(ints(equation.params["dimensions"])))


def _permuted(equation: Apply, moved: set[int]) -> FactorRule:
    """Operand 0 and the result pointwise, a permutation in the dimensions where elements move."""
    builder = FactorBuilder(equation)
    kinds = dict.fromkeys(moved, FactorKind.PERMUTATION)
    for dim, (size, out) in enumerate(zip(builder.shapes[0], builder.shapes[builder.result()], strict=True)):
        at = {p: dim for p, n in ((0, size), (builder.result(), out)) if n != 1 or dim not in moved}
        if at:
            builder.factor(at, kinds.get(dim, FactorKind.PARALLEL))
    return builder.build()


@register_rule("dynamic_slice")
def _dynamic_slice(equation: Apply) -> FactorRule:
    """Whole dimensions are parallel; where a part is taken, every device needs all of it."""
    builder = FactorBuilder(equation)
    out = builder.result()
    for dim, (size, taken) in enumerate(zip(builder.shapes[0], builder.shapes[out], strict=True)):
        if size == taken:
            builder.factor({0: dim, out: dim})
    return builder.build()


@register_rule("dynamic_update_slice")
def _dynamic_update_slice(equation: Apply) -> FactorRule:
    builder = FactorBuilder(equation)
    out = builder.result()
    for dim, (size, written) in enumerate(zip(builder.shapes[0], builder.shapes[1], strict=True)):
        if size == written:
            builder.factor({0: dim, 1: dim, out: dim})
    return builder.build()


def _others(builder: FactorBuilder, dimension: int) -> list[int]:
    rank = len(builder.shapes[0])
    return [d for d in range(rank) if d != dimension % rank]
