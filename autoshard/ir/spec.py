"""Shardings as specs, and what factor rules make of them.

A *spec* gives each dimension of a value its mesh axes; an *assignment* gives each factor of a rule its mesh axes.
A rule turns one into the other:

    spec_of        assignment  -->  spec of an operand or result
    assignment_of  spec of one operand or result  -->  the largest assignment that agrees with it

A factor may be split only if the axes' product divides its size, only over whole prefixes (in a dimension `jk` the
factor k may be split only where j is split completely), and only if it is parallel or a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.ir.factors import Dims, FactorKind, FactorRule
from autoshard.ir.graph import Spec, aval_bytes

MeshShape = tuple[tuple[str, int], ...]
"""Mesh axes with their sizes, slowest first."""

Assignment = tuple[tuple[str, ...], ...]
"""For each factor of a rule the mesh axes it is split over, major first."""

SPLITTABLE = (FactorKind.PARALLEL, FactorKind.REDUCTION)


def replicated(rank: int) -> Spec:
    """The spec that splits nothing."""
    return ((),) * rank


def spec_axes(spec: Spec) -> tuple[str, ...]:
    """All axes of a spec, in order of dimensions."""
    return tuple(axis for dim in spec for axis in dim)


def axes_size(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Number of parts that axes split something into."""
    product = 1
    for axis in axes:
        product *= sizes[axis]
    return product


def local_shape(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one device's part; dimensions that do not divide are rounded up, as XLA pads them."""
    return tuple(-(-n // axes_size(axes, sizes)) for n, axes in zip(shape, spec, strict=True))


def local_bytes(aval: Any, spec: Spec, sizes: Mapping[str, int]) -> int:
    """Bytes of one device's part."""
    whole = math.prod(aval.shape)
    if whole == 0:
        return 0
    part = math.prod(local_shape(tuple(aval.shape), spec, sizes))
    return aval_bytes(aval) // whole * part


def divides(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> bool:
    """Whether each dimension is a multiple of the number of its parts."""
    return all(not axes or n % axes_size(axes, sizes) == 0 for n, axes in zip(shape, spec, strict=True))


def partition_spec(spec: Spec) -> PartitionSpec:
    """The JAX form of a spec."""
    entries: list[Any] = [axes[0] if len(axes) == 1 else (axes or None) for axes in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def from_partition_spec(spec: Any, rank: int) -> Spec:
    """Our form of a JAX PartitionSpec, filled up to `rank` dimensions."""
    entries = list(spec) + [None] * (rank - len(spec))
    return tuple(
        () if entry is None else (str(entry),) if isinstance(entry, str) else tuple(str(a) for a in entry)
        for entry in entries
    )


def spec_of(dims: Dims, assignment: Assignment) -> Spec:
    """The spec of a value whose dimensions are made of these factors."""
    return tuple(tuple(axis for factor in dim for axis in assignment[factor]) for dim in dims)


def assignment_of(rule: FactorRule, dims: Dims, spec: Spec, sizes: Mapping[str, int]) -> Assignment:
    """The largest assignment that splits the value with these `dims` no further than `spec` does.

    Axes that the rule cannot use (they do not divide, would split a factor that needs to stay whole, or would
    not be a prefix elsewhere) are left out: the value has to be gathered along them first.
    """
    found: list[tuple[str, ...]] = [()] * len(rule.sizes)
    for dim, axes in zip(dims, spec, strict=True):
        rest = list(axes)
        for factor in dim:
            taken: list[str] = []
            parts = 1
            while rest and rule.kinds[factor] in SPLITTABLE and rule.sizes[factor] % (parts * sizes[rest[0]]) == 0:
                parts *= sizes[rest[0]]
                taken.append(rest.pop(0))
            found[factor] = tuple(taken)
            if parts != rule.sizes[factor]:
                break
    return legal_part(rule, tuple(found), sizes)


def legal_part(rule: FactorRule, assignment: Assignment, sizes: Mapping[str, int]) -> Assignment:
    """The assignment without the factors that would not be a split prefix of their dimension somewhere."""
    found = list(assignment)
    changed = True
    while changed:
        changed = False
        for dims in (*rule.operands, *rule.results):
            for dim in dims:
                whole = True
                for factor in dim:
                    if found[factor] and not whole:
                        found[factor] = ()
                        changed = True
                    whole = whole and axes_size(found[factor], sizes) == rule.sizes[factor]
    return tuple(found)


def assignments(rule: FactorRule, mesh: MeshShape) -> list[Assignment]:
    """Every legal assignment of mesh axes to the rule's factors, each axis used at most once.

    Axes on one factor stand in mesh order: other orders only permute devices.
    """
    sizes = dict(mesh)
    factors = [f for f, kind in enumerate(rule.kinds) if kind in SPLITTABLE and rule.sizes[f] > 1]
    found: list[Assignment] = [((),) * len(rule.sizes)]
    for axis, size in mesh:
        if size == 1:
            continue
        grown: list[Assignment] = []
        for assignment in found:
            grown.append(assignment)
            for factor in factors:
                axes = (*assignment[factor], axis)
                if rule.sizes[factor] % axes_size(axes, sizes) == 0:
                    grown.append((*assignment[:factor], axes, *assignment[factor + 1 :]))
        found = grown
    return [a for a in found if legal_part(rule, a, sizes) == a]
