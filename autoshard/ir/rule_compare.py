"""Two factor rules side by side: ours and Shardy's, up to the names and the cutting of factors.

Every dimension is read from its major side as a list of parts. A part that may be split is known by its size and by
the places that it stands in; parts that stay whole are all alike (why they do makes no difference to a plan). So

    ([i,j])->([i])   and   ([k,m])->([k])        are equal
    ([i])->([i])     and   ([jk])->([jk])        are equal where j and k always stand together
    need_replication of i on one side only       is a difference: stricter or looser
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from autoshard.ir.factors import FactorKind, FactorRule

STRICTER: Mapping[str, str] = {
    "argmax": "no collective combines positions; along a split axis values were wrong (openxla/xla#49122)",
    "argmin": "as argmax",
    "conv_general_dilated": "where windows overlap, splitting their elements takes border exchange and sums at once",
    "dynamic_update_slice": "a part written at run-time positions may lie across devices",
    "eig": "as eigh",
    "eigh": "library calls need whole matrices; Shardy lets their sides pass for propagation's sake",
    "hessenberg": "as eigh",
    "lu": "as eigh",
    "lu_pivots_to_permutation": "a loop over the pivots",
    "pad": "negative padding on one side moves elements even where the size stays",
    "random_unwrap": "the words of a key stay together",
    "random_wrap": "as random_unwrap",
    "reduce": "a reducer given as a function is not known to be one that collectives have",
    "reduce_xor": "collectives have no exclusive or",
    "reshape": "a factor that only one side has moves elements; older Shardy says parallel",
    "rev": "elements move to the mirrored device; older Shardy says parallel",
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
        "a single update, split along the indexed dimension, gave wrong values on jaxlib 0.10.1 (rules_index.py)",
    ),
    "schur": "as eigh",
    "symmetric_product": "a library call on GPUs",
    "tridiagonal": "as eigh",
    "tridiagonal_solve": "a library call",
}
"""Primitives of which dimensions stay whole here although Shardy would split them, and why."""

LOOSER: Mapping[str, str] = {
    "conv_general_dilated": "a window of one element does not reach to its neighbours; Shardy permutes all the same",
    "reshape": "equal parts of both shapes are split without moving anything; newer Shardy wants dimensions to match",
}
"""Primitives of which dimensions may be split here although Shardy keeps them whole, and why.

That the partitioner needs no collective for these is a test (tests/ir/test_rules_shardy.py).
"""

_LOOP = "lowered, it is a loop until all elements have converged; each element is computed by itself"

ELSEWHERE: Mapping[str, str] = {
    "igamma": _LOOP,
    "igamma_grad_a": _LOOP,
    "igammac": _LOOP,
    "regularized_incomplete_beta": _LOOP,
    "svd": "lowered for TPU it is a loop whose condition meets over the batch; libraries solve the batch one by one",
}
"""Primitives whose lowered form, which is what Shardy sees, is not the operator the rule is about."""


@final
class Order(enum.Enum):
    """How one rule's demand on a place compares to the other's."""

    STRICTER = "stricter"
    LOOSER = "looser"
    OTHER = "other"


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """A place where two rules differ.

    Attributes:
      order: whether the first rule asks for more there than the second.
      place: the operand or result and its dimension.
      mine, other: what the rules say.
    """

    order: Order
    place: str
    mine: str
    other: str

    def __str__(self) -> str:
        return f"{self.place}: {self.mine}, Shardy {self.other} ({self.order.value})"


def expected(name: str, difference: Difference) -> bool:
    """Whether one of the tables gives a reason for a difference of this primitive's rules."""
    table = {Order.STRICTER: STRICTER, Order.LOOSER: LOOSER, Order.OTHER: dict[str, str]()}[difference.order]
    return name in table or name in ELSEWHERE


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a dimension.

    Attributes:
      size: of the factor.
      kind: parallel or reduction for a part that may be split, else why it stays whole.
      reducer: of a reduction.
      places: (value, dimension) of every occurrence; none for whole parts.
    """

    size: int
    kind: FactorKind
    reducer: str
    places: frozenset[tuple[int, int]]

    @property
    def whole(self) -> bool:
        return not self.places

    def __str__(self) -> str:
        where = "" if self.whole else f" at {sorted(self.places)}"
        return f"{self.size} {self.kind.value}{f' by {self.reducer}' if self.reducer else ''}{where}"


def compare(mine: FactorRule, other: FactorRule, shapes: Sequence[Sequence[int]]) -> tuple[Difference, ...]:
    """Where two rules of one equation differ.

    Args:
      mine, other: the rules; the second is the reference.
      shapes: of operands and results.
    """
    found: list[Difference] = []
    count = len(mine.operands)
    for value, (a, b) in enumerate(zip(_parts(mine, shapes), _parts(other, shapes), strict=True)):
        name = f"operand {value}" if value < count else f"result {value - count}"
        for dim, (x, y) in enumerate(zip(a, b, strict=True)):
            for left, right in _aligned(x, y):
                order = _order(left, right)
                if order is not None:
                    place = f"{name}, dimension {dim}"
                    found.append(Difference(order, place, _text(left), _text(right)))
    return tuple(found)


def _text(parts: Sequence[_Part]) -> str:
    return " * ".join(str(part) for part in parts)


def _order(mine: Sequence[_Part], other: Sequence[_Part]) -> Order | None:
    if all(p.whole for p in mine):
        return None if all(p.whole for p in other) else Order.STRICTER
    if all(p.whole for p in other):
        return Order.LOOSER
    return None if list(mine) == list(other) else Order.OTHER


def _aligned(mine: Sequence[_Part], other: Sequence[_Part]) -> list[tuple[list[_Part], list[_Part]]]:
    """The parts between cuts that both sides make."""
    cuts = _cuts(mine) & _cuts(other)
    return [
        (_between(mine, low, high), _between(other, low, high))
        for low, high in zip(sorted(cuts), sorted(cuts)[1:], strict=False)
    ]


def _cuts(parts: Sequence[_Part]) -> set[int]:
    found = {1}
    product = 1
    for part in parts:
        product *= part.size
        found.add(product)
    return found


def _between(parts: Sequence[_Part], low: int, high: int) -> list[_Part]:
    found: list[_Part] = []
    product = 1
    for part in parts:
        if low <= product < high:
            found.append(part)
        product *= part.size
    return found


def _parts(rule: FactorRule, shapes: Sequence[Sequence[int]]) -> list[list[list[_Part]]]:
    """The parts of every dimension of every value, in normal form."""
    values = (*rule.operands, *rule.results)
    alone = _merged(rule)
    places: dict[int, set[tuple[int, int]]] = {}
    for value, dims in enumerate(values):
        for dim, factors in enumerate(dims):
            for factor in factors:
                places.setdefault(factor, set()).add((value, dim))
    found: list[list[list[_Part]]] = []
    for dims, shape in zip(values, shapes, strict=True):
        found.append([])
        for factors, size in zip(dims, shape, strict=True):
            parts: list[_Part] = []
            for factor in factors:
                if rule.sizes[factor] <= 1 or factor not in alone:
                    continue
                kind = rule.kinds[factor]
                splits = kind in (FactorKind.PARALLEL, FactorKind.REDUCTION)
                at = frozenset(places[factor]) if splits else frozenset[tuple[int, int]]()
                parts.append(_Part(alone[factor], kind, rule.reducers[factor], at))
            if size > 1 and math.prod(part.size for part in parts) != size:
                # Permutations of other sizes than the dimension, and dimensions without any factor.
                kinds = {part.kind for part in parts}
                kind = FactorKind.PERMUTATION if kinds == {FactorKind.PERMUTATION} else FactorKind.NEED_REPLICATION
                parts = [_Part(size, kind, "", frozenset())]
            found[-1].append(parts if size > 1 else [])
    return found


def _merged(rule: FactorRule) -> dict[int, int]:
    """Sizes of the factors, those merged into the one before them left out.

    A factor is merged where it always follows the same factor of the same kind.
    """
    before: dict[int, set[int | None]] = {}
    after: dict[int, set[int | None]] = {}
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            factors = [f for f in dim if rule.sizes[f] > 1]
            for k, factor in enumerate(factors):
                before.setdefault(factor, set()).add(factors[k - 1] if k else None)
                after.setdefault(factor, set()).add(factors[k + 1] if k + 1 < len(factors) else None)
    sizes = {f: rule.sizes[f] for f in before}
    first: dict[int, int] = {f: f for f in sizes}
    for factor in sorted(sizes):
        for following in after[factor]:
            if (
                following is not None
                and len(after[factor]) == 1
                and before[following] == {factor}
                and rule.kinds[factor] is rule.kinds[following]
                and rule.reducers[factor] == rule.reducers[following]
            ):
                first[following] = factor
    totals: dict[int, int] = {}
    for factor, size in sizes.items():
        root = factor
        while first[root] != root:
            root = first[root]
        totals[root] = totals.get(root, 1) * size
    return totals
