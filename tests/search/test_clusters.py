"""Who leads and who follows whom."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from autoshard.cluster import Cluster, Link, Node
from autoshard.search import prepare
from autoshard.search.clusters import LEADERS, find_parents, find_roots
from autoshard.search.ops import OpKind, list_ops, sized
from tests.helpers import eager_cluster
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
        elif op.operands[parent.own] is not parent.op.results[parent.theirs]:
            # What a loop carries out follows what its body makes of it.
            assert op.kind is OpKind.LEAVE
            assert op.operands[0] in ops.tied[parent.op.results[parent.theirs]]
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


def test_an_added_dimension_follows_its_operand() -> None:
    def fun(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [jnp.sin(jnp.expand_dims(x @ w, 0)).sum((1,))]

    ops = list_ops(Step(fun, (normal(0, 8, 16), normal(1, 16, 4)), 0).graph())
    parents, by_name = find_parents(ops), {op.equation.name: op for op in ops.ops if op.equation is not None}
    chain = ["reduce_sum", "sin", "broadcast_in_dim", "dot_general"]
    for name, above in itertools.pairwise(chain):
        follow = parents[by_name[name].index]
        assert follow is not None
        assert follow.op is by_name[above]
        assert not follow.reads_us


def test_heads_taken_apart_do_not_gather_the_batch() -> None:
    """Gradients of q, k, v come together by dimensions that are added; the bias's sum over them stays split."""

    def fun(w: jax.Array, b: jax.Array, x: jax.Array) -> list[jax.Array]:
        def loss(w: jax.Array, b: jax.Array) -> jax.Array:
            whole = jnp.einsum("btd,dchk->btchk", x, w) + jnp.broadcast_to(b, (64, 8, 3, 2, 8))
            q, k, v = jnp.moveaxis(whole, 2, 0)
            scores = jnp.einsum("bthk,bshk->bhts", q, k)
            return (jnp.einsum("bhts,bshk->bthk", scores, v) ** 2).sum()

        grads = jax.grad(loss, (0, 1))(w, b)
        return [w - grads[0], b - grads[1]]

    step = Step(fun, (normal(0, 16, 3, 2, 8), normal(1, 3, 2, 8), normal(2, 64, 8, 16)), 2)
    on = eager_cluster()
    dear = Cluster("dear links", (Node(on.device(0), 8, Link(1e4, 1e-9)),))
    plan = step.plan((8,), dear)
    assert plan.inputs[2].spec[0] == ("data",)
    gathered = [r for r in plan.reshardings if "all_gather" in r.kinds and r.nbytes > 64 * 8 * 16 * 4]
    assert not gathered, gathered


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
