"""Repeated structure is found once, and tying it keeps plans legal."""

from __future__ import annotations

from collections import Counter

import pytest

from autoshard.search import named_mesh, prepare
from autoshard.search.clusters import find_parents, find_roots
from autoshard.search.layers import Kinds, find_kinds
from autoshard.search.ops import Op, Ops, list_ops
from tests.helpers import eager_cluster
from tests.problems import Step, ground, looped, mlp, random_answers, random_step


def kinds_of(step: Step, tie: bool = True) -> tuple[Ops, list[Op], Kinds]:
    graph = prepare(step.graph())
    ops = list_ops(graph, step.info().pairs)
    roots = find_roots(ops, find_parents(ops))
    return ops, roots, find_kinds(ops, roots, {}, tie)


def test_depth_adds_no_kinds() -> None:
    shallow, deep = (kinds_of(mlp(layers=n)) for n in (12, 96))
    assert len(deep[0].ops) > 7 * len(shallow[0].ops)
    assert len(deep[2].members) == len(shallow[2].members)
    assert len(deep[2].makers) == len(shallow[2].makers)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", ["deep", "looped", *range(4)])
def test_kinds_are_a_partition(name: str | int, tie: bool) -> None:
    steps = {"deep": lambda: mlp(layers=6), "looped": looped}
    ops, roots, kinds = kinds_of(random_step(name) if isinstance(name, int) else steps[name](), tie)
    assert [op for op in ops.ops if op not in kinds.members[kinds.kind[op.index]]] == []
    assert sum(len(group) for group in kinds.members) == len(ops.ops)
    assert sum(count for _, count in kinds.makers) == len(ops.ops)
    for group in kinds.members:
        looks = {(op.kind, op.rule, op.times, tuple(v.shape for v in op.results)) for op in group}
        assert len(looks) == 1
        assert len({kinds.kind[roots[op.index].index] for op in group}) == 1
    if not tie:
        assert all(len(group) == 1 for group in kinds.members)


def test_layers_in_the_middle_agree() -> None:
    _, _, kinds = kinds_of(mlp(layers=12))
    sizes = Counter(len(group) for group in kinds.members)
    assert max(sizes) >= 6


def test_pins_keep_values_apart() -> None:
    step = mlp(layers=12)
    graph = prepare(step.graph())
    ops = list_ops(graph, step.info().pairs)
    roots = find_roots(ops, find_parents(ops))
    pinned = graph.inputs[12]
    kinds = find_kinds(ops, roots, {pinned: ((), ("data",))})
    (alone,) = [group for group in kinds.members if any(pinned in op.results for op in group)]
    assert len(alone) == 1


@pytest.mark.parametrize("name", ["deep", "looped", *range(4)])
def test_ties_never_make_a_choice_illegal(name: str | int) -> None:
    """What a kind does under any answer is a choice that each of its members has by itself."""
    steps = {"deep": lambda: mlp(layers=6), "looped": looped}
    step = random_step(name) if isinstance(name, int) else steps[name]()
    mesh = named_mesh((2, 4))
    tied, apart = (ground(step, mesh, eager_cluster(), tie) for tie in (True, False))
    for answer in random_answers(tied.model, 3):
        chosen = [c[answer[v]] for c, v in zip(tied.model.choices, tied.model.variable, strict=True)]
        for op, kind in zip(tied.ops.ops, tied.model.kinds.kind, strict=True):
            assert chosen[kind] in apart.model.choices[op.index]
