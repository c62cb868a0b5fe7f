"""Factor rules of matrix products and convolutions.

dot_general              ([b,i,k],[b,k,j])->([b,i,j]) reduction={k}
conv_general_dilated     ([b,x,c],[w,c,f])->([b,x,f]) reduction={c} permutation={x}
ragged_dot_general       ([i,k],[g,k,j],[g])->([i,j]) reduction={k} need_replication={g}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.ir.factors import FactorKind, FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.rule_builder import FactorBuilder, ints
from autoshard.ir.rule_registry import register_rule


@register_rule("dot_general")
def _dot_general(equation: Apply) -> FactorRule:
    return _product(equation, equation.params["dimension_numbers"])


@register_rule("ragged_dot_general", "ragged_dot")
def _ragged_dot(equation: Apply) -> FactorRule:
    """A product whose right operand depends on the row: groups stay whole, all else is as in a product.

    Rows find their group by their position in the whole, so they may be split although the groups' sizes, which are
    known only at run time, ignore the borders between devices. Of the three forms
    (`jax.lax.RaggedDotDimensionNumbers`) the second sums rows by group: the result has a group dimension, first.
    """
    numbers: Any = equation.params["ragged_dot_dimension_numbers"]
    return _product(equation, numbers.dot_dimension_numbers, ints(numbers.rhs_group_dimensions))


@register_rule("scaled_matmul", "scaled_matmul_wrapper")
def _scaled_matmul(equation: Apply) -> FactorRule:
    """cuDNN's block-scaled product `([b,i,k],[b,j,k],[b,i,l],[b,j,l])->([b,i,j])`; k and its blocks l stay whole."""
    builder = FactorBuilder(equation)
    out = builder.result()
    builder.factor({0: 0, 1: 0, 2: 0, 3: 0, out: 0})
    builder.factor({0: 1, 2: 1, out: 1})
    builder.factor({1: 1, 3: 1, out: 2})
    return builder.build()


def _product(equation: Apply, numbers: Any, groups: Sequence[int] = ()) -> FactorRule:
    """The rule of a product; its result has batch, left and right dimensions, last in its shape.

    Args:
      equation: operands 0 and 1 are multiplied.
      numbers: (contracted, batch) dimensions of both, as those of `dot_general`.
      groups: dimensions of the right operand that neither are contracted nor stand in the result.
    """
    contracted, batch = numbers
    left_contract, right_contract = (ints(side) for side in contracted)
    left_batch, right_batch = (ints(side) for side in batch)
    builder = FactorBuilder(equation)
    out = builder.result()

    left = [d for d in range(len(builder.shapes[0])) if d not in (*left_contract, *left_batch)]
    right = [d for d in range(len(builder.shapes[1])) if d not in (*right_contract, *right_batch, *groups)]
    dim = len(builder.shapes[out]) - len(left_batch) - len(left) - len(right)
    for x, y in zip(left_batch, right_batch, strict=True):
        builder.factor({0: x, 1: y, out: dim})
        dim += 1
    for d in left:
        builder.factor({0: d, out: dim})
        dim += 1
    for d in right:
        builder.factor({1: d, out: dim})
        dim += 1
    for x, y in zip(left_contract, right_contract, strict=True):
        builder.factor({0: x, 1: y}, FactorKind.REDUCTION, "add")
    return builder.build()


@register_rule("conv_general_dilated")
def _conv(equation: Apply) -> FactorRule:
    """Batch and features as in a product; spatial dimensions exchange borders.

    Groups are major in the dimensions that they divide. A spatial dimension of the input is made of windows (as the
    output's) and of window elements (as the kernel's), the larger of the two first. Both are permutations, for windows
    reach over the border to the next device; only where a window is one element, and every element is one, are they
    parallel.
    """
    numbers: Any = equation.params["dimension_numbers"]
    batch, feature, *space = ints(numbers.lhs_spec)
    kernel_out, kernel_in, *kernel_space = ints(numbers.rhs_spec)
    out_batch, out_feature, *out_space = ints(numbers.out_spec)
    builder = FactorBuilder(equation)
    out = builder.result()
    lhs, rhs, result = builder.shapes[0], builder.shapes[1], builder.shapes[out]
    batch_groups = int(equation.params["batch_group_count"])
    feature_groups = int(equation.params["feature_group_count"])
    builder.factor({0: batch, 1: kernel_out, out: out_feature}, size=batch_groups)
    builder.factor({0: batch, out: out_batch}, size=result[out_batch])
    for x, w, y in zip(space, kernel_space, out_space, strict=True):
        if rhs[w] == 1 and lhs[x] == result[y]:
            builder.factor({0: x, out: y})
            continue
        rest = lhs[x]
        for windows in (True, False) if result[y] >= rhs[w] else (False, True):
            size = min(rest, result[y] if windows else rhs[w])
            builder.factor({0: x, out: y} if windows else {0: x, 1: w}, FactorKind.PERMUTATION, size=size)
            rest //= max(size, 1)
    builder.factor({0: feature, 1: kernel_out, out: out_feature}, size=feature_groups)
    builder.factor({0: feature, 1: kernel_in}, FactorKind.REDUCTION, "add", size=rhs[kernel_in])
    builder.factor({1: kernel_out, out: out_feature}, size=result[out_feature] // (batch_groups * feature_groups))
    return builder.build()
