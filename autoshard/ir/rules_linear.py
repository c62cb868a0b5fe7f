"""Factor rules of matrix products and convolutions.

    dot_general              ([b,i,k],[b,k,j])->([b,i,j]) reduction={k}
    conv_general_dilated     ([b,x,c],[w,c,f])->([b,x,f]) reduction={c} permutation={x}
    ragged_dot_general       ([i,k],[g,k,j],[g])->([i,j]) reduction={k} need_replication={i,g}
"""

from __future__ import annotations

from typing import Any

from autoshard.ir.factors import FactorKind, FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.rule_builder import FactorBuilder
from autoshard.ir.rule_registry import register_rule


@register_rule("dot_general")
def _dot_general(equation: Apply) -> FactorRule:
    return _dot(FactorBuilder(equation), equation.params["dimension_numbers"]).build()


def _dot(builder: FactorBuilder, dimension_numbers: Any, whole: frozenset[tuple[int, int]] = frozenset()) -> FactorBuilder:
    """Factors of a product whose result has batch, left and right dimensions, last in its shape.

    Args:
      builder: operands 0 and 1 are multiplied.
      dimension_numbers: as those of `dot_general`.
      whole: (operand, dimension) pairs that stay whole.
    """
    (left_contract, right_contract), (left_batch, right_batch) = dimension_numbers
    out = builder.result()

    def kind(*at: tuple[int, int], default: FactorKind = FactorKind.PARALLEL) -> FactorKind:
        return FactorKind.NEED_REPLICATION if any(pair in whole for pair in at) else default

    left = [d for d in range(len(builder.shapes[0])) if d not in left_contract and d not in left_batch]
    right = [d for d in range(len(builder.shapes[1])) if d not in right_contract and d not in right_batch]
    dim = len(builder.shapes[out]) - len(left_batch) - len(left) - len(right)
    for x, y in zip(left_batch, right_batch, strict=True):
        builder.factor({0: x, 1: y, out: dim}, kind((0, x), (1, y)))
        dim += 1
    for operand, dims in ((0, left), (1, right)):
        for d in dims:
            builder.factor({operand: d, out: dim}, kind((operand, d)))
            dim += 1
    for x, y in zip(left_contract, right_contract, strict=True):
        builder.factor({0: x, 1: y}, kind((0, x), (1, y), default=FactorKind.REDUCTION), "add")
    return builder


@register_rule("ragged_dot_general", "ragged_dot")
def _ragged_dot(equation: Apply) -> FactorRule:
    """Rows belong to groups of sizes known only at run time: the ragged dimension and the groups stay whole.

    Three forms (`jax.lax.RaggedDotDimensionNumbers`) differ in whether the ragged dimension of the left operand is
    free (the right operand has a group dimension), contracted (the result has one, first) or a batch dimension.
    """
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left_contract, right_contract), (left_batch, right_batch) = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    builder = FactorBuilder(equation)
    out = builder.result()
    ragged = frozenset((0, d) for d in numbers.lhs_ragged_dimensions)
    left = [d for d in range(len(builder.shapes[0])) if d not in left_contract and d not in left_batch]
    right = [
        d
        for d in range(len(builder.shapes[1]))
        if d not in right_contract and d not in right_batch and d not in groups
    ]
    dim = len(builder.shapes[out]) - len(left_batch) - len(left) - len(right)

    def kind(d: int, default: FactorKind) -> FactorKind:
        return FactorKind.NEED_REPLICATION if (0, d) in ragged else default

    for x, y in zip(left_batch, right_batch, strict=True):
        builder.factor({0: x, 1: y, out: dim}, kind(x, FactorKind.PARALLEL))
        dim += 1
    for d in left:
        builder.factor({0: d, out: dim}, kind(d, FactorKind.PARALLEL))
        dim += 1
    for d in right:
        builder.factor({1: d, out: dim})
        dim += 1
    for x, y in zip(left_contract, right_contract, strict=True):
        builder.factor({0: x, 1: y}, kind(x, FactorKind.REDUCTION), "add")
    return builder.build()


@register_rule("conv_general_dilated")
def _conv(equation: Apply) -> FactorRule:
    """Batch and features as in a product; spatial dimensions exchange borders.

    Groups are major in the dimensions that they divide. A spatial dimension of the input is split by windows (with the
    output), or by window elements (with the kernel), the larger of the two first. Of these only a 1x1 kernel without
    strides could do without its neighbours; all are called permutations (the partitioner exchanges halos).
    """
    numbers = equation.params["dimension_numbers"]
    batch, feature, *space = numbers.lhs_spec
    kernel_out, kernel_in, *kernel_space = numbers.rhs_spec
    out_batch, out_feature, *out_space = numbers.out_spec
    builder = FactorBuilder(equation)
    out = builder.result()
    lhs, rhs, result = builder.shapes[0], builder.shapes[1], builder.shapes[out]
    batch_groups, feature_groups = equation.params["batch_group_count"], equation.params["feature_group_count"]
    builder.factor({0: batch, 1: kernel_out, out: out_feature}, size=batch_groups)
    builder.factor({0: batch, out: out_batch}, size=result[out_batch])
    for x, w, y in zip(space, kernel_space, out_space, strict=True):
        rest = lhs[x]
        for windows in (True, False) if result[y] >= rhs[w] else (False, True):
            size = min(rest, result[y] if windows else rhs[w])
            builder.factor({0: x, out: y} if windows else {0: x, 1: w}, FactorKind.PERMUTATION, size=size)
            rest //= max(size, 1)
    builder.factor({0: feature, 1: kernel_out, out: out_feature}, size=feature_groups)
    builder.factor({0: feature, 1: kernel_in}, FactorKind.REDUCTION, "add", size=rhs[kernel_in])
    builder.factor({1: kernel_out, out: out_feature}, size=result[out_feature] // (batch_groups * feature_groups))
    return builder.build()
