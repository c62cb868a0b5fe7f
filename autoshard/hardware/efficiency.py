"""What part of a device's peak rate operators of a class reach, by size: measured points and what lies between them.

    class  ::= operator | operator.dtype    "matmul.f32", "elementwise", "exp", "reduce_major"
    curve  ::= (size, share)+               sizes ascend; interpolated linearly in log(size), constant beyond the ends

`DeviceSpec.efficiency` holds the curves; `autoshard.costmodel.roofline` says which sizes it asks for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from autoshard.errors import ClusterError, explain

Points = tuple[tuple[float, float], ...]
"""(size, share of the peak rate) of one class, sizes ascending."""

OPERATOR_CLASSES = (
    *("matmul", "matmul_narrow", "matmul_operands", "matmul_weights", "matmul_batched"),
    *("conv", "conv_weights", "conv_input"),
    *(
        "elementwise",
        "reduce",
        "reduce_major",
        "reduce_fused",
        "reduce_major_fused",
        "move",
        "transpose",
        "transpose_aligned",
    ),
    *("gather", "scatter", "cumulative", "window", "fresh"),
    *("sort", "random", "linalg", "fft", "vector"),
    *("transcendental", "exp", "tanh", "log", "rsqrt", "sqrt", "logistic", "pow", "sin", "erf", "div"),
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"),
)
"""Operators that may have a curve: products, streams, library calls, functions, collectives."""


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """One class's points, ready to be asked thousands of times.

    Attributes:
      logs: logarithms of the sizes.
      shares: at the sizes.
    """

    logs: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, points: Points) -> Curve:
        """The curve through checked points."""
        return cls(tuple(math.log(size) for size, _ in points), tuple(share for _, share in points))

    def at(self, size: float) -> float:
        """The share at a size, constant beyond the ends."""
        logs, shares = self.logs, self.shares
        if size <= 0.0 or len(logs) == 1:
            return shares[0]
        x = math.log(size)
        i = bisect_right(logs, x)
        if i == 0:
            return shares[0]
        if i == len(logs):
            return shares[-1]
        part = (x - logs[i - 1]) / (logs[i] - logs[i - 1])
        return shares[i - 1] + part * (shares[i] - shares[i - 1])


def check_efficiency(
    where: str, efficiency: Mapping[str, Points], dtypes: tuple[str, ...]
) -> tuple[dict[str, Points], dict[str, Curve]]:
    """Copies of the points, as tuples, and their curves.

    Raises:
      ClusterError: a class nobody asks for, no points, sizes that do not ascend from above 0, a share not above 0.
    """
    kept: dict[str, Points] = {}
    for name, points in efficiency.items():
        operator, _, dtype = name.partition(".")
        if operator not in OPERATOR_CLASSES or (dtype and dtype not in dtypes):
            raise ClusterError(
                explain(
                    f"{where} has efficiency for {name!r}",
                    f"operator or operator.dtype, of {', '.join(OPERATOR_CLASSES)} and {', '.join(dtypes)}",
                    "correct the class",
                )
            )
        pairs = tuple((float(size), float(share)) for size, share in points)
        sizes = [size for size, _ in pairs]
        good = all(math.isfinite(x) and x > 0 for pair in pairs for x in pair)
        if not pairs or not good or any(a >= b for a, b in pairwise(sizes)):
            raise ClusterError(
                explain(
                    f"{where} has efficiency.{name} = {[list(pair) for pair in pairs]}",
                    "pairs [size, share], sizes ascending, all finite and above 0",
                    f"correct efficiency.{name}",
                )
            )
        kept[name] = pairs
    return kept, {name: Curve.of(points) for name, points in kept.items()}
