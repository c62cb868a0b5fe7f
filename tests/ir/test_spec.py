"""Specs and assignments: what every rule and mesh must keep, and the same by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from autoshard.ir import (
    Assignment,
    Dims,
    FactorKind,
    FactorRule,
    MeshShape,
    Spec,
    assignment_of,
    assignments,
    axes_size,
    divides,
    from_partition_spec,
    local_bytes,
    local_shape,
    partition_spec,
    spec_axes,
    spec_of,
)
from autoshard.ir.spec import SPLITTABLE, legal_part

AXES = ("a", "b", "c")
QUICK = settings(max_examples=200, deadline=None)


@st.composite
def meshes(draw: st.DrawFn) -> MeshShape:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    return tuple(zip(AXES, sizes, strict=False))


@st.composite
def rules(draw: st.DrawFn) -> tuple[Any, ...]:
    """Up to four factors, spread over the dimensions of one to three operands and one result.

    A rule's parts: made into one outside the strategy, since beartype draws random numbers.
    """
    count = draw(st.integers(1, 4))
    sizes = tuple(draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in range(count))
    kinds = tuple(draw(st.sampled_from(list(FactorKind))) for _ in range(count))
    reducers = tuple("add" if kind is FactorKind.REDUCTION else "" for kind in kinds)

    def dims(allowed: list[int]) -> Dims:
        order = draw(st.permutations(allowed))
        taken = order[: draw(st.integers(0, len(order)))]
        found: list[tuple[int, ...]] = []
        while taken:
            size = draw(st.integers(0, min(2, len(taken))))
            found.append(tuple(taken[:size]))
            taken = taken[size:] if size else taken[1:]
        return tuple(found)

    every = list(range(count))
    operands = tuple(dims(every) for _ in range(draw(st.integers(1, 3))))
    result = dims([f for f in every if kinds[f] is not FactorKind.REDUCTION])
    return operands, (result,), sizes, kinds, reducers


def shape_of(rule: FactorRule, dims: Dims) -> tuple[int, ...]:
    return tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims)


def is_legal(rule: FactorRule, assignment: Assignment, sizes: dict[str, int]) -> bool:
    """The definition, written out: divides, only splittable factors, whole prefixes."""
    for factor, axes in enumerate(assignment):
        if axes and (rule.kinds[factor] not in SPLITTABLE or rule.sizes[factor] % axes_size(axes, sizes)):
            return False
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            for major, minor in itertools.pairwise(dim):
                if assignment[minor] and axes_size(assignment[major], sizes) != rule.sizes[major]:
                    return False
    return True


@QUICK
@given(rules(), meshes())
def test_every_assignment_is_legal(parts: tuple[Any, ...], mesh: MeshShape) -> None:
    rule, sizes = FactorRule(*parts), dict(mesh)
    found = assignments(rule, mesh)
    assert found[0] == ((),) * len(rule.sizes)
    assert len(set(found)) == len(found)
    for assignment in found:
        assert is_legal(rule, assignment, sizes)
        assert legal_part(rule, assignment, sizes) == assignment
        axes = [axis for factor in assignment for axis in factor]
        assert len(set(axes)) == len(axes)
        for dims in (*rule.operands, *rule.results):
            assert divides(shape_of(rule, dims), spec_of(dims, assignment), sizes)


@QUICK
@given(rules(), meshes())
def test_no_legal_assignment_is_missed(parts: tuple[Any, ...], mesh: MeshShape) -> None:
    """All ways to give each axis to one factor or none, axes of one factor in mesh order."""
    rule, sizes = FactorRule(*parts), dict(mesh)
    every: list[Assignment] = [((),) * len(rule.sizes)]
    for axis in (name for name, size in mesh if size > 1):
        grown: list[Assignment] = []
        for a in every:
            grown += [a, *((*a[:f], (*a[f], axis), *a[f + 1 :]) for f in range(len(a)))]
        every = grown
    assert set(assignments(rule, mesh)) == {a for a in every if is_legal(rule, a, sizes)}


@QUICK
@given(rules(), meshes())
def test_an_operands_spec_gives_the_assignment_back(parts: tuple[Any, ...], mesh: MeshShape) -> None:
    rule, sizes = FactorRule(*parts), dict(mesh)
    for assignment in assignments(rule, mesh):
        for dims in (*rule.operands, *rule.results):
            mine = {f for dim in dims for f in dim}
            restricted = tuple(axes if f in mine else () for f, axes in enumerate(assignment))
            back = assignment_of(rule, dims, spec_of(dims, assignment), sizes)
            assert back == legal_part(rule, restricted, sizes)
            if is_legal(rule, restricted, sizes):
                assert back == restricted
                assert spec_of(dims, back) == spec_of(dims, assignment)


@st.composite
def specs(draw: st.DrawFn, rank: int, mesh: MeshShape) -> Spec:
    order = draw(st.permutations([name for name, _ in mesh]))
    at = [draw(st.integers(-1, rank - 1)) for _ in order]
    return tuple(tuple(axis for axis, d in zip(order, at, strict=True) if d == dim) for dim in range(rank))


@QUICK
@given(st.data())
def test_any_spec_gives_a_legal_assignment_no_finer_than_it(data: st.DataObject) -> None:
    rule, mesh = FactorRule(*data.draw(rules())), data.draw(meshes())
    sizes = dict(mesh)
    for dims in rule.operands:
        spec = data.draw(specs(len(dims), mesh))
        found = assignment_of(rule, dims, spec, sizes)
        assert is_legal(rule, found, sizes)
        for have, want in zip(spec_of(dims, found), spec, strict=True):
            assert want[: len(have)] == have


@QUICK
@given(st.data())
def test_legal_part_is_legal_and_keeps_what_was(data: st.DataObject) -> None:
    rule, mesh = FactorRule(*data.draw(rules())), data.draw(meshes())
    sizes = dict(mesh)
    some = data.draw(st.sampled_from(assignments(rule, mesh)))
    dropped = data.draw(st.sets(st.integers(0, len(some) - 1)))
    part = tuple(() if f in dropped else axes for f, axes in enumerate(some))
    found = legal_part(rule, part, sizes)
    assert is_legal(rule, found, sizes)
    assert all(axes in ((), part[f]) for f, axes in enumerate(found))
    assert legal_part(rule, found, sizes) == found


MERGED = FactorRule(
    (((0,), (1,)),), (((0, 1),),), (4, 8), (FactorKind.PARALLEL, FactorKind.PARALLEL), ("", "")
)  # reshape ([i,j])->([ij])


def test_a_minor_factor_needs_its_major_one_split_whole() -> None:
    found = assignments(MERGED, (("a", 2), ("b", 4)))
    assert ((), ("a",)) not in found
    assert (("a",), ("b",)) not in found
    assert (("b",), ("a",)) in found
    assert assignment_of(MERGED, MERGED.operands[0], ((), ("b",)), {"a": 2, "b": 4}) == ((), ())
    assert assignment_of(MERGED, MERGED.results[0], (("b", "a"),), {"a": 2, "b": 4}) == (("b",), ("a",))
    assert assignment_of(MERGED, MERGED.results[0], (("a", "b"),), {"a": 2, "b": 4}) == (("a",), ())


def test_axes_that_do_not_divide_are_left_out() -> None:
    rule = FactorRule((((0,),),), (((0,),),), (6,), (FactorKind.PARALLEL,), ("",))
    sizes = {"a": 2, "b": 4}
    assert assignments(rule, tuple(sizes.items())) == [((),), (("a",),)]
    assert assignment_of(rule, rule.operands[0], (("a", "b"),), sizes) == (("a",),)
    assert assignment_of(rule, rule.operands[0], (("b",),), sizes) == ((),)


@pytest.mark.parametrize("kind", [FactorKind.PERMUTATION, FactorKind.NEED_REPLICATION])
def test_what_needs_to_stay_whole_does(kind: FactorKind) -> None:
    rule = FactorRule((((0,),),), (((0,),),), (8,), (kind,), ("",))
    assert assignments(rule, (("a", 2),)) == [((),)]
    assert assignment_of(rule, rule.operands[0], (("a",),), {"a": 2}) == ((),)


def test_local_shapes_round_up_as_xla_pads() -> None:
    sizes = {"a": 2, "b": 4}
    assert local_shape((6, 8), (("a",), ("b",)), sizes) == (3, 2)
    assert local_shape((5, 8), (("a", "b"), ()), sizes) == (1, 8)
    assert local_shape((9,), (("b",),), sizes) == (3,)
    assert not divides((5, 8), (("a",), ()), sizes)
    assert divides((6, 8), (("a",), ("b",)), sizes)
    aval = jax.ShapeDtypeStruct((9, 2), jnp.float32)
    assert local_bytes(aval, (("b",), ()), sizes) == 3 * 2 * 4
    assert local_bytes(jax.ShapeDtypeStruct((0, 2), jnp.float32), (("b",), ()), sizes) == 0


@QUICK
@given(st.data())
def test_partition_specs_round_trip(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 4))
    spec = data.draw(specs(rank, (("a", 2), ("b", 2), ("c", 2)))) if rank else ()
    assert from_partition_spec(partition_spec(spec), rank) == spec
    assert sorted(spec_axes(spec)) == sorted(axis for dim in spec for axis in dim)


def test_partition_specs_are_written_as_a_user_would() -> None:
    assert partition_spec((("a",), (), ())) == PartitionSpec("a")
    assert partition_spec(((), ("a", "b"))) == PartitionSpec(None, ("a", "b"))
    assert from_partition_spec(PartitionSpec("a"), 3) == (("a",), (), ())
