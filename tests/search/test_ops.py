"""The flat list of ops: order, multiplicity, ways in and out of bodies, ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard import jax_compat
from autoshard.ir import FactorKind, Graph, Value, trace
from autoshard.search.ops import Op, OpKind, Ops, free_rule, list_ops, sized, splittable
from tests.problems import looped, mlp, random_step


def named(ops: Ops, name: str) -> list[Op]:
    return [op for op in ops.ops if op.equation is not None and op.equation.name == name]


@pytest.mark.parametrize("seed", range(8))
def test_each_value_is_made_once_before_it_is_read(seed: int) -> None:
    ops = list_ops(random_step(seed).graph())
    made: set[Value] = set()
    for index, op in enumerate(ops.ops):
        assert op.index == index
        assert all(a in made for a in op.operands if isinstance(a, Value) and sized(a))
        for k, value in enumerate(op.results):
            assert value not in made
            assert ops.maker[value] == (op, k)
            made.add(value)
        assert len(op.rule.operands) == len(op.operands)
        assert len(op.rule.results) == len(op.results)
    for value, readers in ops.readers.items():
        assert all(reader.operands[k] is value for reader, k in readers)


def test_a_scans_ops_run_as_often_as_it_is_long() -> None:
    graph = trace(
        lambda x, ws: [jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(axis=0)), x, ws)[0]],
        [jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((5, 16, 16), jnp.float32)],
    )
    ops = list_ops(graph)
    (scan,) = graph.equations
    body = scan.graphs[0]
    assert [op.times for op in named(ops, "dot_general")] == [5]
    enters = [op for op in ops.ops if op.kind is OpKind.ENTER]
    assert [op.position for op in enters] == list(range(len(scan.inputs)))
    carried, stacked = enters
    assert all(kind is FactorKind.PARALLEL for kind in carried.rule.kinds)
    assert stacked.rule.kinds[-1] is FactorKind.NEED_REPLICATION
    assert stacked.rule.operands == (((2,), (0,), (1,)),)
    assert stacked.rule.results == (((0,), (1,)),)
    (leave,) = [op for op in ops.ops if op.kind is OpKind.LEAVE and op.position == 0]
    assert leave.operands == (body.inputs[0],)
    assert leave.results == (scan.outputs[0],)
    (tie,) = [tie for tie in ops.ties if tie.output == 0]
    assert (tie.source, tie.target, tie.body) == (body.outputs[0], body.inputs[0], body)


def test_whiles_and_conds_are_tied() -> None:
    graph = looped().graph()
    ops = list_ops(graph)
    (loop,) = [e for e in graph.equations if e.name == "while"]
    condition, body = loop.graphs
    assert all(tie.target in body.inputs for tie in ops.ties if tie.body is body)
    entered = {op.results[0] for op in ops.ops if op.kind is OpKind.ENTER}
    assert set(condition.inputs) <= entered
    assert set(body.inputs) <= entered
    for cond in (e for e in graph.equations if e.name == "cond"):
        for branch in cond.graphs[1:]:
            tied = {tie.source: tie.target for tie in ops.ties if tie.body is branch}
            for k, atom in enumerate(branch.outputs):
                if isinstance(atom, Value) and atom in tied:
                    assert tied[atom] is cond.outputs[k]


def test_state_is_tied_to_what_it_was() -> None:
    step = mlp()
    graph = step.graph()
    ops = list_ops(graph, step.info().pairs)
    assert [(tie.source, tie.target) for tie in ops.ties] == [(graph.outputs[i], graph.inputs[i]) for i in range(4)]
    assert ops.tied[ops.ties[0].source] == [graph.inputs[0]]


def test_scalars_are_left_out_and_barriers_pass_by_themselves() -> None:
    def fun(x: jax.Array) -> list[jax.Array]:
        y, s = jax.lax.optimization_barrier((x, x.sum()))
        return [y * (s + 1)]

    ops = list_ops(trace(fun, [jax.ShapeDtypeStruct((8,), jnp.float32)]))
    assert named(ops, "add") == []
    assert [op.position for op in named(ops, "optimization_barrier")] == [0, 1]


def test_constants_stay_whole() -> None:
    table = jnp.arange(8.0)
    graph: Graph = trace(lambda x: [x + table], [jax.ShapeDtypeStruct((8,), jnp.float32)])
    ops = list_ops(graph)
    (constant,) = [op for op in ops.ops if op.kind is OpKind.CONSTANT]
    assert constant.rule.kinds == (FactorKind.NEED_REPLICATION,)


def test_keys_are_not_split() -> None:
    key = Value(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)))
    assert not splittable(key)
    assert free_rule((), (key,)).kinds == (FactorKind.NEED_REPLICATION,)


def test_free_rules_have_a_factor_for_each_dimension_that_can_be_split() -> None:
    value = Value(jax_compat.aval_of((4, 1, 6), jnp.float32))
    rule = free_rule((value,), (value,), whole=[2])
    assert str(rule) == "([i, 1, j])->([i, 1, j]) {i=4, j=6} need_replication={j}"
