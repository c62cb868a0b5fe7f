"""Factor rules of gathers and scatters.

    gather, table[n,d] and ids[b,1]     ([k,j],[i,l])->([i,j]) reduction={k} need_replication={l}
    scatter-add                         ([k,j],[i,l],[i,j])->([k,j]) reduction={i} need_replication={l}

Split along an indexed dimension, a gather finds on each device what lies there and zeros elsewhere: partial sums.
A scatter does without: each device takes the updates that fall into its part. Split along the updates, a scatter that
combines has partial results (the operand counts once, not once a device); one that overwrites has no such form, for
the last write wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from autoshard.ir.factors import FactorKind, FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.rule_builder import FactorBuilder, ints
from autoshard.ir.rule_registry import register_rule

COMBINERS = {
    "scatter": "",
    "scatter-add": "add",
    "scatter_add": "add",
    "scatter-sub": "",
    "scatter-mul": "mul",
    "scatter_mul": "mul",
    "scatter-min": "min",
    "scatter_min": "min",
    "scatter-max": "max",
    "scatter_max": "max",
}
"""Scatters and how partial results combine; "" where the partitioner has no way to."""


@final
@dataclass(frozen=True, slots=True)
class _Windows:
    """Which dimensions of a gather or scatter go together.

    Attributes:
      full: (operand dimension, window dimension) pairs taken whole.
      indexed: operand dimensions that windows do not have.
      single: operand dimensions of which a window has one element.
      batch: (operand dimension, or None where it is implicit, indices dimension, window dimension).
    """

    full: tuple[tuple[int, int], ...]
    indexed: tuple[int, ...]
    single: tuple[int, ...]
    batch: tuple[tuple[int | None, int, int], ...]


def _windows(
    operand: Sequence[int],
    window: Sequence[int],
    offsets: Sequence[int],
    collapsed: Sequence[int],
    operand_batch: Sequence[int],
    indices_batch: Sequence[int],
    started: Sequence[int],
) -> _Windows:
    """Sorts the dimensions; JAX keeps the index vector last in the indices.

    Args:
      operand, window: shapes; the window array is a gather's result or a scatter's updates.
      offsets: its dimensions that lie inside a window, in the operand's order.
      collapsed: operand dimensions that windows do not have.
      operand_batch, indices_batch: explicit batch dimensions, in pairs.
      started: operand dimensions that indices give the start of.
    """
    inside = [d for d in range(len(operand)) if d not in collapsed and d not in operand_batch]
    pairs = list(zip(inside, sorted(offsets), strict=True))
    outside = [d for d in range(len(window)) if d not in offsets]
    explicit = dict(zip(indices_batch, operand_batch, strict=True))
    return _Windows(
        full=tuple((d, w) for d, w in pairs if operand[d] == window[w]),
        indexed=tuple(collapsed),
        single=tuple(d for d, w in pairs if window[w] == 1 and d in started and operand[d] > 1),
        batch=tuple((explicit.get(k), k, w) for k, w in enumerate(outside)),
    )


@register_rule("gather")
def _gather(equation: Apply) -> FactorRule:
    numbers: Any = equation.params["dimension_numbers"]
    builder = FactorBuilder(equation)
    out = builder.result()
    windows = _windows(
        builder.shapes[0],
        builder.shapes[out],
        ints(numbers.offset_dims),
        ints(numbers.collapsed_slice_dims),
        ints(numbers.operand_batching_dims),
        ints(numbers.start_indices_batching_dims),
        ints(numbers.start_index_map),
    )
    for operand_dim, indices_dim, dim in windows.batch:
        builder.factor({1: indices_dim, out: dim} | ({} if operand_dim is None else {0: operand_dim}))
    for operand_dim, dim in windows.full:
        builder.factor({0: operand_dim, out: dim})
    for operand_dim in (*windows.indexed, *windows.single):
        builder.factor({0: operand_dim}, FactorKind.REDUCTION, "add")
    return builder.build()


@register_rule(*COMBINERS)
def _scatter(equation: Apply) -> FactorRule:
    numbers: Any = equation.params["dimension_numbers"]
    builder = FactorBuilder(equation)
    count = (len(equation.inputs) - 1) // 2
    operands, indices = range(count), count
    updates, outs = range(count + 1, 2 * count + 1), builder.results
    windows = _windows(
        builder.shapes[0],
        builder.shapes[updates[0]],
        ints(numbers.update_window_dims),
        ints(numbers.inserted_window_dims),
        ints(numbers.operand_batching_dims),
        ints(numbers.scatter_indices_batching_dims),
        ints(numbers.scatter_dims_to_operand_dims),
    )
    combiner = COMBINERS[equation.name]
    combined = FactorKind.REDUCTION if combiner else FactorKind.NEED_REPLICATION
    everywhere = (*operands, *outs)
    for operand_dim, indices_dim, dim in windows.batch:
        at = {indices: indices_dim} | dict.fromkeys(updates, dim)
        if operand_dim is None:
            builder.factor(at, combined, combiner)
        else:
            builder.factor(at | dict.fromkeys(everywhere, operand_dim))
    for operand_dim, dim in windows.full:
        builder.factor(dict.fromkeys(everywhere, operand_dim) | dict.fromkeys(updates, dim))
    rows = math.prod(builder.shapes[updates[0]][dim] for _, _, dim in windows.batch)
    for operand_dim in windows.indexed:
        # A single update is compiled to a dynamic slice, which XLA:CPU merges with one of the operand although either
        # may be clamped: wrong values on jaxlib 0.10.1, right on 0.12 (tests/test_cases.py).
        whole = FactorKind.NEED_REPLICATION if rows == 1 else FactorKind.PARALLEL
        builder.factor(dict.fromkeys(everywhere, operand_dim), whole)
    return builder.build()
