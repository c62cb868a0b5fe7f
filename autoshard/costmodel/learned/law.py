"""A kernel's time as a sum of work at the machine's own rates, fitted to measured kernels: what the network corrects.

    t  =  sum_j c_j a_j,   c_j >= 0,      minimise  sum_i w_i phi( sum_j c_j a_ij / t_i - 1 )

a: one launch; bytes by how long ago they were touched; results of each operation; elements by how memory is walked;
operations of a product, whole tiles of it, its three faces. The classes of kernels (`MAINS`) that were measured often
have rates of their own. phi is square near 0 and falls off (Cauchy's), by reweighting; each round is a non-negative
least-squares problem (Lawson and Hanson, "Solving Least Squares Problems", 1974).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
from scipy.optimize import nnls  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from autoshard.costmodel.learned.kernel_features import (
    DTYPES,
    MAINS,
    NEAR,
    OPCODES,
    PATTERNS,
    PATTERNS_AT,
    PLAIN_AT,
    PRODUCT_AT,
    STRIDES_AT,
    WALKS_AT,
)

Array = np.ndarray

CLASSES = 2 * len(MAINS)

LEAST_KERNELS = 100
"""Kernels of a class that give it rates of its own."""

ROUNDS = 4
SOFT = 0.3
"""Relative errors from here on count less and less."""

TILE_ROWS, TILE_COLUMNS = 8, 16
"""Of a product's inner kernel: 16 f32 fill a vector register of 512 bits."""

LEAST_S = 1e-7

FOOTPRINTS = (1 << 20, 1 << 23, 1 << 25)
"""Bytes a program touches above which what it writes was in no near cache: the second, a part and all of the last."""


def law_columns(nodes: Array) -> Array:
    """The work of kernels, one run of each: [K, n], from their figures [K, WIDTH]."""
    rows = nodes.astype(np.float64)
    plain, product = rows[:, PLAIN_AT:], rows[:, PRODUCT_AT:]
    size, read, written, flops = (np.expm1(plain[:, k]) for k in (1, 3, 4, 7))
    counts = np.expm1(rows[:, : len(OPCODES)]) * size[:, None]
    near = rows[:, PLAIN_AT - len(NEAR) : PLAIN_AT]
    shares = np.diff(near, axis=1, prepend=0.0, append=1.0)
    walked = np.expm1(rows[:, PATTERNS_AT : PATTERNS_AT + 3 * len(PATTERNS) : 3]) * size[:, None] / 4
    strided = np.expm1(np.minimum(rows[:, WALKS_AT + 10], 40.0))
    m, n, k, batch = (np.round(np.expm1(product[:, i])) for i in range(4))
    tiles = batch * np.ceil(m / TILE_ROWS) * TILE_ROWS * np.ceil(n / TILE_COLUMNS) * TILE_COLUMNS * k
    patches = m * k * (product[:, 12] > 0)
    walks = rows[:, WALKS_AT:]
    full = np.log1p(1.0)
    results, summed = np.expm1(plain[:, 2]) * walks[:, 11], (walked[:, 1] + walked[:, 2] + walked[:, 8]) * walks[:, 14]
    footprint = rows[:, PLAIN_AT - len(NEAR) - 3]
    outputs = np.expm1(plain[:, 2])
    fused, library = plain[:, 19], plain[:, 20]
    return np.column_stack(
        (
            np.ones(len(rows)),
            read[:, None] * np.maximum(shares, 0.0),
            written,
            counts,
            walked,
            walked[:, 0] * rows[:, STRIDES_AT],
            strided,
            flops,
            flops * (1 - fused),
            flops * (1 - library),
            np.expm1(product[:, 24]),
            tiles,
            tiles * (1 - fused),
            batch * m * n,
            batch * m * k,
            batch * n * k,
            patches,
            patches * (product[:, 13] < np.log1p(3.5)),
            patches * (product[:, 19] > 0),
            patches * (product[:, 20] > 0),
            results,
            results * (walks[:, 12] > full),
            results * (walks[:, 13] > full),
            summed,
            summed * (walks[:, 15] > full),
            summed * (walks[:, 16] > full),
            *(written * (footprint > np.log(limit)) for limit in FOOTPRINTS),
            size * np.expm1(plain[:, 22]),
            size * np.expm1(plain[:, 23]),
            outputs * (rows[:, len(OPCODES) + len(MAINS) + DTYPES.index("bf16")] > 0),
            *(outputs * (plain[:, at] > 0) for at in (12, 13, 14)),  # minor dimensions that fill no vectors
        )
    )


@final
@dataclass(frozen=True, slots=True)
class Law:
    """Rates of a machine.

    Attributes:
      rates: seconds a unit of work, one row a class and one for classes without their own: [CLASSES + 1, n].
      own: whether a class has its own, [CLASSES].
    """

    rates: Array
    own: Array

    def times_s(self, nodes: Array) -> Array:
        """Seconds of one run of each kernel: [K]."""
        classes = kernel_classes(nodes)
        row = np.where(self.own[classes] > 0, classes, CLASSES)
        return np.maximum((law_columns(nodes) * self.rates[row]).sum(1), LEAST_S)


def kernel_classes(nodes: Array) -> Array:
    """What each kernel is called after, and whether a library runs it, as a number: [K]."""
    mains = nodes[:, len(OPCODES) : len(OPCODES) + len(MAINS)].argmax(1)
    return mains + len(MAINS) * (nodes[:, PLAIN_AT + 20] > 0)


def fit_law(nodes: Array, run_s: Array, weight: Array) -> Law:
    """Rates by kernels' times.

    Args:
      nodes: figures, [K, WIDTH].
      run_s: measured, one run, above 0: [K].
      weight: [K].
    """
    columns, classes = law_columns(nodes), kernel_classes(nodes)
    rates = np.zeros((CLASSES + 1, columns.shape[1]))
    own = np.zeros(CLASSES)
    if len(run_s):
        rates[-1] = _fit(columns, run_s, weight)
    for c in range(CLASSES):
        mine = classes == c
        if mine.sum() >= LEAST_KERNELS:
            own[c] = 1.0
            rates[c] = _fit(columns[mine], run_s[mine], weight[mine])
    return Law(rates, own)


def _fit(columns: Array, run_s: Array, weight: Array) -> Array:
    relative = columns / run_s[:, None]
    scale = np.sqrt((relative**2).mean(0))
    used = scale > 0
    relative, scale = relative[:, used] / scale[used], scale[used]
    each = weight.copy()
    solve = cast(Any, nnls)
    found: Array = np.zeros(int(used.sum()))
    for _ in range(ROUNDS):
        root = np.sqrt(each)
        found = solve(relative * root[:, None], root, maxiter=50 * int(used.sum()))[0]
        each = weight / (1 + ((relative @ found - 1) / SOFT) ** 2)
    rates = np.zeros(len(used))
    rates[used] = found / scale
    return rates
