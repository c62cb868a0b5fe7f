"""Factor rules of reductions, windows, scans along an axis, sorting and Fourier transforms.

    reduce_sum              ([i,j])->([i]) reduction={j}, combined by addition
    argmax, cumsum, sort    ([i,j])->([i,j]) need_replication={j}
    reduce_window_max       ([i,j])->([i,j]) permutation={j}

The working axis of what does not combine stays whole: sharded, it was gathered at best and wrong at worst
(jax-ml/jax#21403 and others).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autoshard.ir.factors import FactorKind, FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.rule_builder import FactorBuilder, ints
from autoshard.ir.rule_registry import register_rule

REDUCERS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
"""Reductions that devices can combine, and how."""


@register_rule(*REDUCERS)
def _reduce(equation: Apply) -> FactorRule:
    reducer = REDUCERS[equation.name]
    if reducer in ("and", "or") and equation.inputs[0].dtype != np.bool_:
        reducer = ""  # XLA has no collective for the bits of integers
    return _reduced(equation, ints(equation.params["axes"]), reducer)


@register_rule("reduce_xor", "argmax", "argmin")
def _reduce_whole(equation: Apply) -> FactorRule:
    """No collective combines these: the reduced dimensions stay whole."""
    return _reduced(equation, ints(equation.params["axes"]), "")


@register_rule("reduce")
def _reduce_any(equation: Apply) -> FactorRule:
    """A reduction by any function, of one or more arrays; initial values are scalars."""
    return _reduced(equation, ints(equation.params["dimensions"]), "")


def _reduced(equation: Apply, axes: Iterable[int], reducer: str) -> FactorRule:
    builder = FactorBuilder(equation)
    ranked = [p for p in builder.operands if builder.shapes[p]]
    rank = len(builder.shapes[ranked[0]]) if ranked else 0
    gone = {axis % rank for axis in axes}
    dim = 0
    for source in range(rank):
        at = dict.fromkeys(ranked, source)
        if source not in gone:
            builder.factor(at | dict.fromkeys(builder.results, dim))
            dim += 1
        elif reducer:
            builder.factor(at, FactorKind.REDUCTION, reducer)
    return builder.build()


@register_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(equation: Apply) -> FactorRule:
    return _axis_whole(equation, int(equation.params["axis"]))


@register_rule("sort")
def _sort(equation: Apply) -> FactorRule:
    return _axis_whole(equation, int(equation.params["dimension"]))


@register_rule("top_k")
def _top_k(equation: Apply) -> FactorRule:
    """`([i,j])->([i,k],[i,k])` with j and k whole."""
    return _axis_whole(equation, int(equation.params.get("axis", -1)))


@register_rule("approx_top_k")
def _approx_top_k(equation: Apply) -> FactorRule:
    return _axis_whole(equation, int(equation.params["reduction_dimension"]))


def _axis_whole(equation: Apply, axis: int) -> FactorRule:
    builder = FactorBuilder(equation)
    rank = len(builder.shapes[0])
    return builder.pointwise(dims=[d for d in range(rank) if d != axis % rank]).build()


@register_rule("fft")
def _fft(equation: Apply) -> FactorRule:
    builder = FactorBuilder(equation)
    return builder.pointwise(dims=range(len(builder.shapes[0]) - len(equation.params["fft_lengths"]))).build()


@register_rule(
    "reduce_window",
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window_sum",
    "select_and_gather_add",
    "select_and_scatter",
    "select_and_scatter_add",
)
def _windowed(equation: Apply) -> FactorRule:
    """Parallel where a window is one element, a permutation where it spans several (borders are exchanged)."""
    params = equation.params
    builder = FactorBuilder(equation)
    ranked = [p for p, shape in enumerate(builder.shapes) if shape]
    for dim, size in enumerate(builder.shapes[ranked[0]] if ranked else ()):
        alike = all(builder.shapes[p][dim] == size for p in ranked)
        single = alike and params["window_dimensions"][dim] == 1 and params["window_strides"][dim] == 1
        at = {p: dim for p in ranked if builder.shapes[p][dim] != 1}
        if at:
            # The smaller side counts the windows; it is the one that could be split.
            windows = min(builder.shapes[p][dim] for p in ranked)
            builder.factor(at, FactorKind.PARALLEL if single else FactorKind.PERMUTATION, size=windows)
    return builder.build()
