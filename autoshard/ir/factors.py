"""Factor rules: how the dimensions of an equation's operands and results hang together.

Notation and meaning are Shardy's (openxla/shardy, `OpShardingRuleAttr`): every dimension of every operand and
result is a product of *factors*, major first, e.g. `dot_general: ([i,k],[k,j])->([i,j])`. A factor of size n
may be split over mesh axes whose product divides n; what that means follows from its kind.
"""

from __future__ import annotations

import enum
import string
from dataclasses import dataclass
from typing import final

Dims = tuple[tuple[int, ...], ...]
"""For each dimension of one value the factors it is made of, major first; () for a dimension of size 1."""


@final
class FactorKind(enum.Enum):
    """What splitting a factor costs.

    PARALLEL: nothing. REDUCTION: results are partial and must be combined over the axes.
    PERMUTATION: neighbours exchange data (slices, pads, windows, concatenations).
    NEED_REPLICATION: the operator needs the whole dimension (sort, FFT, cumulative sums).
    """

    PARALLEL = "parallel"
    REDUCTION = "reduction"
    PERMUTATION = "permutation"
    NEED_REPLICATION = "need_replication"


@final
@dataclass(frozen=True, slots=True)
class FactorRule:
    """The rule of one equation.

    Attributes:
      operands: factors of each operand's dimensions, one entry an operand (literals included).
      results: factors of each result's dimensions.
      sizes: size of each factor.
      kinds: kind of each factor.
      reducers: for reduction factors how results combine ("add", "max", "min", "mul", "and", "or"), "" else.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    reducers: tuple[str, ...]

    def of_kind(self, kind: FactorKind) -> tuple[int, ...]:
        """Indices of the factors of one kind."""
        return tuple(i for i, k in enumerate(self.kinds) if k is kind)

    def __str__(self) -> str:
        marks = {
            FactorKind.PARALLEL: "",
            FactorKind.REDUCTION: "reduction",
            FactorKind.PERMUTATION: "permutation",
            FactorKind.NEED_REPLICATION: "need_replication",
        }
        sizes = ", ".join(f"{letter(i)}={n}" for i, n in enumerate(self.sizes))
        kinds = "".join(
            f" {mark}={{{', '.join(letter(i) for i in self.of_kind(kind))}}}"
            for kind, mark in marks.items()
            if mark and self.of_kind(kind)
        )
        return f"({_side(self.operands)})->({_side(self.results)}) {{{sizes}}}{kinds}"


def letter(index: int) -> str:
    """Shardy's name of a factor: i, j, k, ... z, z_1, z_2, ..."""
    letters = string.ascii_lowercase[8:]
    if index < len(letters):
        return letters[index]
    return f"z_{index - len(letters) + 1}"


def _side(values: tuple[Dims, ...]) -> str:
    return ", ".join("[" + ", ".join("".join(letter(f) for f in dim) or "1" for dim in dims) + "]" for dims in values)
