"""Copies of broadcasts and iotas: golden print, same values, bodies too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.ir import Apply, Graph, Value, evaluate, print_graph, trace, verify
from autoshard.passes import DuplicateCheap
from tests.golden import check_golden
from tests.problems import Step, looped, mlp, normal, random_step

GOLDEN = Path(__file__).parent / "golden"


def shared_zeros() -> Step:
    """A broadcast read twice, in a scan's body and outside, returned, and an iota read twice."""

    def fun(x: jax.Array) -> list[jax.Array]:
        zeros = jnp.zeros((4, 8))
        count = jax.lax.iota(jnp.float32, 8)
        half = jax.lax.broadcast_in_dim(x[0, 0], (4, 8), ())

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            ones = jnp.ones((4, 8))
            return (carry + ones) * ones + zeros, None

        carried, _ = jax.lax.scan(body, x + zeros, None, length=2)
        return [carried - zeros, (count + 1) * count, zeros, half * half + x]

    return Step(fun, (normal(0, 4, 8),), 0)


STEPS = {"shared_zeros": shared_zeros, "mlp": mlp, "looped": looped}


@pytest.mark.parametrize("name", ["shared_zeros"])
def test_golden(name: str, update_golden: bool) -> None:
    after = DuplicateCheap().apply(STEPS[name]().graph())
    check_golden(GOLDEN / f"duplicate_cheap-{name}.txt", print_graph(after), update_golden)


@pytest.mark.parametrize("name", [*STEPS, *range(5)])
def test_computes_the_same(name: str | int) -> None:
    step = random_step(name) if isinstance(name, int) else STEPS[name]()
    before = step.graph()
    text = print_graph(before)
    after = DuplicateCheap().apply(before)
    verify(after)
    assert print_graph(before) == text, "a pass never mutates its input"
    for mine, plain in zip(evaluate(after, step.args), evaluate(before, step.args), strict=True):
        np.testing.assert_array_equal(mine, plain)


def readers(graph: Graph) -> Counter[Value]:
    return Counter(atom for e in graph.equations for atom in e.inputs if isinstance(atom, Value))


@pytest.mark.parametrize("name", STEPS)
def test_every_cheap_value_has_one_reader(name: str) -> None:
    after = DuplicateCheap().apply(STEPS[name]().graph())
    graphs = [after, *(body for e, _ in after.walk() for body in e.graphs)]
    for graph in graphs:
        count = readers(graph)
        count.update(atom for atom in graph.outputs if isinstance(atom, Value))
        for e in graph.equations:
            if isinstance(e, Apply) and e.name in ("broadcast_in_dim", "iota") and all(a.shape == () for a in e.inputs):
                assert count[e.outputs[0]] <= 1


def test_a_second_run_changes_nothing() -> None:
    once = DuplicateCheap().apply(shared_zeros().graph())
    assert print_graph(DuplicateCheap().apply(once)) == print_graph(once)


def test_broadcasts_of_arrays_stay() -> None:
    def fun(x: jax.Array) -> list[jax.Array]:
        wide = jnp.broadcast_to(x, (4, 8))
        return [wide + 1, wide * 2]

    graph = trace(fun, [jax.ShapeDtypeStruct((8,), jnp.float32)])
    assert print_graph(DuplicateCheap().apply(graph)) == print_graph(graph)
