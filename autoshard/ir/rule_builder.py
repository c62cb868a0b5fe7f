"""A short way to write a factor rule: name each factor once, with the dimensions that it stands in.

Positions are numbered through: operands 0, 1, ..., then results (`FactorBuilder.result`). Sizes 0 and 1 make no
factor; dimensions that no factor was given for need to stay whole. So a rule lists what may be split, and forgetting
a dimension is safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from autoshard.ir.factors import Dims, FactorKind, FactorRule
from autoshard.ir.graph import Apply


@final
class FactorBuilder:
    """The rule of one equation in the making.

    Attributes:
      shapes: of the operands, then the results. What has no shape (a token) counts as a scalar.
    """

    def __init__(self, equation: Apply) -> None:
        atoms = (*equation.inputs, *equation.outputs)
        self.shapes: tuple[tuple[int, ...], ...] = tuple(shape_of(atom.aval) for atom in atoms)
        self._operands = len(equation.inputs)
        self._dims: list[list[list[int]]] = [[[] for _ in shape] for shape in self.shapes]
        self._sizes: list[int] = []
        self._kinds: list[FactorKind] = []
        self._reducers: list[str] = []

    @property
    def operands(self) -> range:
        """Positions of the operands."""
        return range(self._operands)

    @property
    def results(self) -> range:
        """Positions of the results."""
        return range(self._operands, len(self.shapes))

    def result(self, index: int = 0) -> int:
        """Position of a result."""
        return self._operands + index

    def factor(
        self,
        at: Mapping[int, int],
        kind: FactorKind = FactorKind.PARALLEL,
        reducer: str = "",
        size: int | None = None,
    ) -> None:
        """Adds a factor, minor to those that its dimensions already have.

        Args:
          at: dimension by position.
          kind: what splitting costs; `reducer` how results of a reduction combine.
          size: default is the size of the first of those dimensions.
        """
        position, dim = next(iter(at.items()))
        count = self.shapes[position][dim] if size is None else size
        if count <= 1:
            return
        for position, dim in at.items():
            self._dims[position][dim].append(len(self._sizes))
        self._sizes.append(count)
        self._kinds.append(kind)
        self._reducers.append(reducer if kind is FactorKind.REDUCTION else "")

    def pointwise(
        self,
        positions: Iterable[int] | None = None,
        kinds: Mapping[int, FactorKind] | None = None,
        dims: Iterable[int] | None = None,
    ) -> FactorBuilder:
        """One factor a dimension, shared by all values; those of rank 0 are left out.

        Args:
          positions: default all; those of rank greater than 0 must have one rank.
          kinds: of dimensions that are not parallel.
          dims: default all.
        """
        chosen = [p for p in (range(len(self.shapes)) if positions is None else positions) if self.shapes[p]]
        if not chosen:
            return self
        rank = len(self.shapes[chosen[0]])
        for dim in range(rank) if dims is None else dims:
            # A dimension of size 1 beside others of size n has no factor.
            sizes = [self.shapes[p][dim] for p in chosen]
            at = {p: dim for p, size in zip(chosen, sizes, strict=True) if size != 1}
            if at:
                self.factor(at, (kinds or {}).get(dim, FactorKind.PARALLEL))
        return self

    def build(self) -> FactorRule:
        """The rule; dimensions without a factor get one that needs replication."""
        for position, shape in enumerate(self.shapes):
            for dim, size in enumerate(shape):
                if size > 1 and not self._dims[position][dim]:
                    self.factor({position: dim}, FactorKind.NEED_REPLICATION)
        dims = [tuple(tuple(factors) for factors in value) for value in self._dims]
        return FactorRule(
            tuple(dims[p] for p in self.operands),
            tuple(dims[p] for p in self.results),
            tuple(self._sizes),
            tuple(self._kinds),
            tuple(self._reducers),
        )


def ints(dimensions: Iterable[Any]) -> tuple[int, ...]:
    """Dimensions as Python integers; JAX's batching rules leave numpy's in parameters."""
    return tuple(int(d) for d in dimensions)


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape of an abstract value; () of what has none (tokens)."""
    return tuple(getattr(aval, "shape", ()))


def pointwise(equation: Apply) -> FactorRule:
    """`([i,j],[i,j])->([i,j])`."""
    return FactorBuilder(equation).pointwise().build()


def pairwise(equation: Apply) -> FactorRule:
    """Operand k and result k alike, each pair with factors of its own: `([i],[j])->([i],[j])`."""
    builder = FactorBuilder(equation)
    for operand, result in zip(builder.operands, builder.results, strict=True):
        builder.pointwise((operand, result))
    return builder.build()


def whole(equation: Apply) -> FactorRule:
    """Nothing may be split: `([i])->([j]) need_replication={i, j}`."""
    return FactorBuilder(equation).build()


def batched(equation: Apply, batch: int) -> FactorRule:
    """The first `batch` dimensions of all values are independent problems, the others stay whole."""
    builder = FactorBuilder(equation)
    for dim in range(batch):
        at = {p: dim for p, shape in enumerate(builder.shapes) if len(shape) > dim and shape[dim] > 1}
        if at:
            builder.factor(at)
    return builder.build()


def refine(operand: Sequence[int], result: Sequence[int]) -> tuple[Dims, Dims, tuple[int, ...], tuple[bool, ...]]:
    """Factors of a reshape: both shapes cut at the same row-major strides as long as that is possible.

        (8, 4) and (32)     -->   [i, j] and [ij]
        (6, 4) and (4, 6)   -->   [ij, kl] and [im, nl], where only i and l are common

    Walking both shapes from the left, equal positions (products of the factors so far) allow a common factor: the
    greatest common divisor of what is left of the two current dimensions. Without one the shapes part, and each side
    goes on alone until the positions are equal again.

    Args:
      operand, result: shapes without zeros, of equal size.

    Returns:
      factors of the operand's dimensions, those of the result's, sizes, and which factors are common.
    """
    sizes: list[int] = []
    common: list[bool] = []
    sides = (_Side(operand), _Side(result))
    total = math.prod(operand)
    assert total == math.prod(result), f"a reshape from {operand} to {result} changes the number of elements"
    while min(side.position for side in sides) < total:
        left, right = sides
        shared = math.gcd(left.left, right.left)
        if left.position == right.position and shared > 1:
            for side in sides:
                side.take(shared, len(sizes))
            sizes.append(shared)
            common.append(True)
            continue
        behind, ahead = (left, right) if left.position <= right.position else (right, left)
        gap = ahead.position // behind.position
        meets = ahead.position % behind.position == 0 and gap > 1 and behind.left % gap == 0
        step = gap if meets else behind.left // shared if behind.left > shared else behind.left
        behind.take(step, len(sizes))
        sizes.append(step)
        common.append(False)
    return _dims_of(sides[0]), _dims_of(sides[1]), tuple(sizes), tuple(common)


@final
class _Side:
    """One shape of a reshape, walked from the left.

    Attributes:
      position: product of the factors so far.
      left: what is left of the current dimension, 1 at the end.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.dims: list[list[int]] = [[] for _ in shape]
        self.position = 1
        self.left = 1
        self.dim = -1
        self._next()

    def take(self, size: int, factor: int) -> None:
        """Cuts a factor off the current dimension."""
        self.dims[self.dim].append(factor)
        self.position *= size
        self.left //= size
        if self.left == 1:
            self._next()

    def _next(self) -> None:
        while self.left == 1 and self.dim + 1 < len(self.shape):
            self.dim += 1
            self.left = self.shape[self.dim]


def _dims_of(side: _Side) -> Dims:
    return tuple(tuple(factors) for factors in side.dims)
