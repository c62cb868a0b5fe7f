"""What leaders may do and followers do."""

from __future__ import annotations

import pytest

from autoshard.ir import FactorKind, FactorRule, MeshShape, assignments, axes_size, spec_axes
from autoshard.search.choices import Choice, choice_of, follow, leader_choices
from autoshard.search.ops import list_ops
from tests.problems import random_step

MATMUL = FactorRule(
    (((0,), (2,)), ((2,), (1,))),
    (((0,), (1,)),),
    (8, 4, 16),
    (FactorKind.PARALLEL, FactorKind.PARALLEL, FactorKind.REDUCTION),
    ("", "", "add"),
)  # ([i,k],[k,j])->([i,j])
MESH: MeshShape = (("a", 2), ("b", 4))


def test_a_product_on_one_axis() -> None:
    assert leader_choices(MATMUL, (("a", 2),)) == [
        Choice(((), (), ()), (((), ()), ((), ())), (((), ()),)),
        Choice((("a",), (), ()), ((("a",), ()), ((), ())), ((("a",), ()),)),
        Choice(((), ("a",), ()), (((), ()), ((), ("a",))), (((), ("a",)),)),
        Choice(((), (), ("a",)), (((), ("a",)), (("a",), ())), (((), ()),), ("a",)),
        *[c for c in leader_choices(MATMUL, (("a", 2),)) if c.scattered],
    ]
    scattered = [c.results[0] for c in leader_choices(MATMUL, (("a", 2),)) if c.scattered]
    assert sorted(scattered) == [((), ("a",)), (("a",), ())]


def test_the_first_choice_splits_nothing() -> None:
    first = leader_choices(MATMUL, MESH)[0]
    assert first.split_axes == ()
    assert first.partial == ()


def test_sums_are_partial_and_may_be_scattered() -> None:
    choices = leader_choices(MATMUL, MESH)
    assert len(set(choices)) == len(choices)
    assert {c.assignment for c in choices} == set(assignments(MATMUL, MESH))
    for choice in choices:
        assert choice.partial == choice.assignment[2]
        assert set(choice.scattered) <= set(choice.partial)
        (spec,) = choice.results
        axes = spec_axes(spec)
        assert len(set(axes)) == len(axes)
        assert set(axes) == set(choice.assignment[0] + choice.assignment[1] + choice.scattered)
        for n, dim in zip((8, 4), spec, strict=True):
            assert n % axes_size(dim, dict(MESH)) == 0


@pytest.mark.parametrize("reducer", ["max", "min", "mul"])
def test_only_sums_are_scattered(reducer: str) -> None:
    rule = FactorRule((((0,), (1,)),), (((0,),),), (8, 8), (FactorKind.PARALLEL, FactorKind.REDUCTION), ("", reducer))
    choices = leader_choices(rule, MESH)
    assert all(not c.scattered for c in choices)
    assert any(c.partial for c in choices)


def test_scattered_axes_divide_what_is_left() -> None:
    rule = FactorRule((((0,), (1,)),), (((0,),),), (2, 8), (FactorKind.PARALLEL, FactorKind.REDUCTION), ("", "add"))
    for choice in leader_choices(rule, MESH):
        assert 2 % axes_size(choice.results[0][0], dict(MESH)) == 0


def test_a_follower_takes_what_it_can() -> None:
    sizes = dict(MESH)
    dims = MATMUL.operands[0]
    assert follow(MATMUL, dims, (("a",), ("b",)), sizes) == choice_of(MATMUL, (("a",), (), ("b",)))
    assert follow(MATMUL, MATMUL.results[0], (("b",), ("a",)), sizes).operands == ((("b",), ()), ((), ("a",)))
    small = FactorRule((((0,),),), (((0,),),), (6,), (FactorKind.PARALLEL,), ("",))
    assert follow(small, small.operands[0], (("b",),), sizes).results == (((),),)
    assert follow(small, small.operands[0], (("a", "b"),), sizes).results == ((("a",),),)


@pytest.mark.parametrize("seed", range(6))
def test_all_choices_of_real_rules_divide(seed: int) -> None:
    sizes = dict(MESH)
    for op in list_ops(random_step(seed).graph()).ops:
        for choice in leader_choices(op.rule, MESH):
            values = (*zip(op.operands, choice.operands, strict=True), *zip(op.results, choice.results, strict=True))
            for atom, spec in values:
                assert len(spec) == len(atom.shape)
                assert all(n % axes_size(dim, sizes) == 0 for n, dim in zip(atom.shape, spec, strict=True))
