"""Who leads and who follows whom."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard.search import prepare
from autoshard.search.clusters import LEADERS, find_parents, find_roots
from autoshard.search.ops import OpKind, list_ops, sized
from tests.problems import Step, looped, mlp, normal, random_step

STEPS = {"mlp": mlp, "looped": looped}


@pytest.mark.parametrize("name", [*STEPS, *range(10)])
def test_every_op_leads_or_follows_a_leader(name: str | int) -> None:
    step = random_step(name) if isinstance(name, int) else STEPS[name]()
    ops = list_ops(prepare(step.graph()), step.info().pairs)
    parents = find_parents(ops)
    roots = find_roots(ops, parents)
    assert len(parents) == len(roots) == len(ops.ops)
    for op, parent, root in zip(ops.ops, parents, roots, strict=True):
        assert parents[root.index] is None
        if parent is None:
            assert root is op
            continue
        assert root is roots[parent.op.index]
        if parent.reads_us:
            assert op.results[parent.own] is parent.op.operands[parent.theirs]
        else:
            assert op.operands[parent.own] is parent.op.results[parent.theirs]
        assert op.kind not in (OpKind.INPUT, OpKind.CONSTANT)
        if op.kind is OpKind.APPLY:
            assert op.equation is not None
            assert op.equation.name not in LEADERS


def test_elementwise_follows_the_largest_operand() -> None:
    def fun(x: jax.Array, w: jax.Array, b: jax.Array) -> list[jax.Array]:
        return [jnp.tanh(x @ w) + jnp.broadcast_to(b, (8, 4))]

    ops = list_ops(Step(fun, (normal(0, 8, 16), normal(1, 16, 4), normal(2, 4)), 0).graph())
    parents = find_parents(ops)
    by_name = {op.equation.name: op for op in ops.ops if op.equation is not None}
    tanh, add = parents[by_name["tanh"].index], parents[by_name["add"].index]
    assert tanh is not None
    assert tanh.op is by_name["dot_general"]
    assert add is not None
    assert add.op is by_name["tanh"]
    assert not add.reads_us


def test_broadcasts_follow_their_reader() -> None:
    def fun(x: jax.Array, b: jax.Array) -> list[jax.Array]:
        return [jnp.sin(x) * jnp.broadcast_to(b, (8, 4))]

    ops = list_ops(Step(fun, (normal(0, 8, 4), normal(2, 4)), 0).graph())
    parents = find_parents(ops)
    (spread,) = [op for op in ops.ops if op.equation is not None and op.equation.name == "broadcast_in_dim"]
    parent = parents[spread.index]
    assert parent is not None
    assert parent.reads_us
    assert parent.op.equation is not None
    assert parent.op.equation.name == "mul"


def test_followers_share_their_value_with_the_parent() -> None:
    step = looped()
    ops = list_ops(prepare(step.graph()), step.info().pairs)
    for op, parent in zip(ops.ops, find_parents(ops), strict=True):
        if parent is not None:
            shared = op.results[parent.own] if parent.reads_us else op.operands[parent.own]
            assert sized(shared)
