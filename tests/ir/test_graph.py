"""Tracing, evaluation, verification and printing of graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import TraceError, VerifyError
from autoshard.ir import Apply, Graph, Reshard, Value, evaluate, print_graph, trace, trip_count, verify


def rich_step(w: jax.Array, x: jax.Array) -> list[jax.Array]:
    """Calls, control flow, remat, custom rules, keys and an effect in one function."""

    def loss(w: jax.Array) -> jax.Array:
        def body(carry: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = jax.nn.relu(jax.checkpoint(lambda c: jnp.sin(c @ w))(carry)) * scale
            return carry, carry.sum()

        h, sums = jax.lax.scan(body, x, jnp.linspace(0.5, 1.0, 3, dtype=x.dtype))
        h = jax.lax.cond(h.sum() > 0, lambda h: h + 1, lambda h: h * 2, h)
        noise = jax.random.normal(jax.random.key(3), h.shape, h.dtype)
        return (h * noise).sum() + sums.sum()

    value, grad = jax.value_and_grad(loss)(w)
    _, product = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ w), (jnp.int32(0), x))
    jax.debug.callback(lambda v: None, value)
    return [value, grad, product]


def arrays() -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(0)
    return jax.random.normal(key, (8, 8)) * 0.3, jax.random.normal(jax.random.fold_in(key, 1), (4, 8))


@pytest.mark.implicit_promotion
def test_evaluate_equals_the_function() -> None:
    args = arrays()
    graph = trace(rich_step, args)
    verify(graph)
    for mine, plain in zip(evaluate(graph, args), rich_step(*args), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=2e-5)
    jitted = jax.jit(lambda *a: evaluate(graph, a))(*args)
    for mine, plain in zip(jitted, jax.jit(rich_step)(*args), strict=True):
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.implicit_promotion
def test_calls_are_inlined_and_effects_kept() -> None:
    graph = trace(rich_step, arrays())
    names = {equation.name for equation, _ in graph.walk()}
    assert not names & {"jit", "pjit", "custom_jvp_call", "remat2", "checkpoint", "closed_call"}
    assert {"scan", "while", "cond", "optimization_barrier", "debug_callback"} <= names


@pytest.mark.parametrize(
    ("start", "bound", "step", "inclusive", "trips"),
    [(0, 6, 1, False, 6), (1, 6, 2, False, 3), (0, 6, 3, True, 3), (7, 6, 1, False, 0), (0, 6, 0, False, 1)],
)
def test_trips_of_a_counting_loop(start: int, bound: int, step: int, inclusive: bool, trips: int) -> None:
    def loop(w: jax.Array) -> list[jax.Array]:
        def go_on(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return carry[0] <= bound if inclusive else carry[0] < bound

        return [jax.lax.while_loop(go_on, lambda c: (c[0] + step, jnp.sin(c[1])), (jnp.int32(start), w))[1]]

    graph = trace(loop, arrays()[:1])
    assert [trip_count(e) for e in graph.equations] == [trips]
    assert {times for e, times in graph.walk() if e.name == "sin"} == {trips}


def test_trips_of_a_loop_that_ends_on_data_count_once() -> None:
    def loop(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        limit = x.sum().astype(jnp.int32)
        counted = jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, jnp.sin(c[1])), (jnp.int32(0), w))
        return [counted[1], jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c * 2, w)]

    graph = trace(loop, arrays())
    assert [trip_count(e) for e in graph.equations if e.graphs] == [1, 1]


def test_printing_is_stable_and_says_types() -> None:
    def step(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [jnp.tanh(x @ w), jnp.zeros((2,))]

    avals = [jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.bfloat16)]
    with jax.numpy_dtype_promotion("standard"):
        texts = {print_graph(trace(step, avals)) for _ in range(2)}
    (text,) = texts
    assert text == (
        "inputs a:f32[8,4] b:bf16[2,8]\n"
        "c:f32[2,4] = dot_general[dimension_numbers=(((1,), (0,)), ((), ())) preferred_element_type=float32] b a\n"
        "d:f32[2,4] = tanh c\n"
        "e:f32[2] = broadcast_in_dim[broadcast_dimensions=() shape=(2,)] 0.0:f32[]\n"
        "outputs d e\n"
    )


def test_dead_equations_are_dropped() -> None:
    def step(x: jax.Array) -> list[jax.Array]:
        jnp.sin(x)
        return [jnp.cos(x)]

    graph = trace(step, [jax.ShapeDtypeStruct((4,), jnp.float32)])
    assert [e.name for e in graph.equations] == ["cos"]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: [x if x.sum() > 0 else -x],
        lambda x: [jnp.zeros(int(x[0]))],
        lambda x: [x[x > 0]],
        lambda x: [np.asarray(x)],
    ],
    ids=["branch", "integer", "boolean_index", "numpy"],
)
def test_untraceable_steps_say_what_to_do(step: Any) -> None:
    with pytest.raises(TraceError) as error:
        trace(step, [jax.ShapeDtypeStruct((4,), jnp.float32)])
    assert "could not be traced" in str(error.value)
    assert "static_argnames" in str(error.value)
    assert error.value.__cause__ is not None


def test_a_leaked_tracer_says_so() -> None:
    kept: list[jax.Array] = []

    def leaks(x: jax.Array) -> list[jax.Array]:
        kept.append(x)
        return [x]

    struct = [jax.ShapeDtypeStruct((4,), jnp.float32)]
    trace(leaks, struct)
    with pytest.raises(TraceError, match="a leaked tracer"):
        trace(lambda x: [x + kept[0]], struct)


def simple() -> Graph:
    return trace(lambda x: [jnp.sin(x) + 1], [jax.ShapeDtypeStruct((4, 2), jnp.float32)])


def test_verify_finds_a_use_before_its_definition() -> None:
    graph = simple()
    broken = dataclasses.replace(graph, equations=tuple(reversed(graph.equations)))
    with pytest.raises(VerifyError, match=r"used before it is defined\nin equation: add\(") as error:
        verify(broken)
    assert "from source:" in str(error.value)
    assert "test_graph.py" in str(error.value)


def test_verify_finds_a_value_defined_twice() -> None:
    graph = simple()
    with pytest.raises(VerifyError, match="a value is defined twice"):
        verify(dataclasses.replace(graph, equations=(*graph.equations, graph.equations[-1])))


def test_verify_finds_an_undefined_output() -> None:
    graph = simple()
    with pytest.raises(VerifyError, match="output of the graph is not defined"):
        verify(dataclasses.replace(graph, outputs=(Value(graph.inputs[0].aval),)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [((("a",), ("a",)), "a mesh axis stands twice"), ((("a",),), "a spec of 1 entries on 2 dimensions")],
)
def test_verify_finds_bad_reshards(spec: Any, message: str) -> None:
    graph = simple()
    value = graph.inputs[0]
    reshard = Reshard(value, Value(value.aval), spec, True, graph.equations[0].place)
    with pytest.raises(VerifyError, match=message):
        verify(dataclasses.replace(graph, equations=(reshard, *graph.equations)))


def test_verify_finds_a_body_that_does_not_fit() -> None:
    def step(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]]

    graph = trace(step, [jax.ShapeDtypeStruct((4,), jnp.float32)])
    (scan,) = graph.equations
    assert isinstance(scan, Apply)
    body = dataclasses.replace(scan.graphs[0], outputs=())
    broken = dataclasses.replace(graph, equations=(dataclasses.replace(scan, graphs=(body,)),))
    with pytest.raises(VerifyError, match="a scan's body has another number"):
        verify(broken)
