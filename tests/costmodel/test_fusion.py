"""What XLA's fusion leaves in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.costmodel import FusionClass, fusible, fusion_class, fusion_estimate, materialized
from autoshard.ir import Apply, Graph, Place, Reshard, Value, trace


def graph_of(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype("float32")) for shape in shapes]
    return trace(lambda *args: jax.tree.leaves(fun(*args)), avals)


def written(graph: Graph) -> list[str]:
    """Equations that write memory, in order."""
    estimate = fusion_estimate(graph)
    return [e.name for e, marks in zip(graph.equations, estimate.writes, strict=True) if any(marks)]


def kernels(graph: Graph) -> int:
    return sum(fusion_estimate(graph).launches)


def traffic_bytes(graph: Graph) -> int:
    estimate = fusion_estimate(graph)
    total = 0
    for equation, reads, writes in zip(graph.equations, estimate.reads, estimate.writes, strict=True):
        total += sum(a.nbytes * n for a, n in zip(equation.inputs, reads, strict=True) if isinstance(a, Value))
        total += sum(v.nbytes for v, mark in zip(equation.outputs, writes, strict=True) if mark)
    return total


def test_chain_is_one_kernel() -> None:
    graph = graph_of(lambda x: jnp.tanh(x * 2.0) + 1.0, (64, 64))
    assert written(graph) == ["add"]
    assert kernels(graph) == 1
    assert traffic_bytes(graph) == 2 * 64 * 64 * 4


def test_epilogue_is_a_kernel_beside_the_product() -> None:
    graph = graph_of(lambda x, w, b: jnp.maximum(x @ w + b[None], 0.0) @ w, (64, 64), (64, 64), (64,))
    assert written(graph) == ["dot_general", "max", "dot_general"]
    assert kernels(graph) == 3


def test_reduction_takes_its_producers_in() -> None:
    graph = graph_of(lambda x: jnp.sum(x * x, axis=-1) * 3.0, (64, 64))
    assert written(graph) == ["reduce_sum", "mul"]
    assert kernels(graph) == 2


def test_layer_norm_keeps_rows_in_registers() -> None:
    def fun(x: Any, w: Any) -> Any:
        mean = jnp.mean(x, -1, keepdims=True)
        var = jnp.mean((x - mean) ** 2, -1, keepdims=True)
        return ((x - mean) * jax.lax.rsqrt(var + 1e-5)) @ w

    graph = graph_of(fun, (512, 256), (256, 256))
    assert written(graph) == ["reduce_sum", "reduce_sum", "mul", "dot_general"]
    assert kernels(graph) == 4


def test_optimizer_is_one_kernel_a_parameter() -> None:
    """Adam: four arrays read, three written, nothing in between."""

    def fun(p: Any, m: Any, v: Any, g: Any) -> Any:
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        return p - 0.001 * m / (jnp.sqrt(v) + 1e-8), m, v

    graph = graph_of(fun, *[(64, 64)] * 4)
    assert kernels(graph) == 1
    assert traffic_bytes(graph) == 7 * 64 * 64 * 4


def test_cheap_producer_is_computed_again() -> None:
    """A broadcast vector read by two products' epilogues of unlike shapes is not written at full size."""

    def fun(b: Any, x: Any, y: Any) -> Any:
        wide = jnp.exp(b)
        return x + wide[:, None], y + wide[None, :, None]

    graph = graph_of(fun, (64,), (64, 1024), (8, 64, 256))
    assert written(graph) == ["add", "add"]


def test_costly_producer_is_written_once() -> None:
    """A sum of three big arrays read in three unlike kernels: 9 reads are more than 3 reads, a write and 3 reads."""

    def fun(a: Any, b: Any, c: Any) -> Any:
        total = a + b + c
        return jnp.sum(total, 0), total[:32] * 2.0, total[:8] * 3.0

    graph = graph_of(fun, *[(64, 64)] * 3)
    assert written(graph).count("add") == 1


def test_views_write_nothing() -> None:
    graph = graph_of(lambda x, w: (x @ w).reshape(16, 256), (64, 64), (64, 64))
    estimate = fusion_estimate(graph)
    assert estimate.writes == ((True,), (False,))
    assert graph.equations[1].outputs[0] in estimate.in_memory
    assert estimate.launches == (1, 0)


def test_inputs_and_outputs_are_in_memory() -> None:
    graph = graph_of(lambda x: x + 1.0, (4,))
    assert materialized(graph) == {graph.inputs[0], graph.equations[0].outputs[0]}


def test_operands_of_control_flow_are_in_memory() -> None:
    graph = graph_of(lambda x: jax.lax.scan(lambda c, _: (c * 2.0, None), x + 1.0, None, length=3)[0], (8,))
    assert written(graph) == ["add", "scan"]


def test_explicit_reshard_is_in_memory_and_a_statement_is_not() -> None:
    graph = graph_of(lambda x: jnp.tanh(x) * 2.0, (8,))
    tanh, mul = graph.equations
    assert isinstance(mul, Apply)
    for explicit, expected in ((True, ["tanh", "reshard", "mul"]), (False, ["mul"])):
        moved = Value(tanh.outputs[0].aval)
        reshard = Reshard(tanh.outputs[0], moved, (("data",),), explicit, Place(None))
        last = Apply(
            mul.primitive, (moved, mul.inputs[1]), mul.outputs, mul.params, (), frozenset(), mul.context, mul.place
        )
        whole = Graph(graph.inputs, graph.constants, (tanh, reshard, last), graph.outputs, graph.effects)
        assert written(whole) == expected
        assert fusible(reshard) is not explicit


def test_classes() -> None:
    def fun(x: Any) -> Any:
        return jnp.sort(x @ x), jnp.sum(x), x.T, x.reshape(-1)

    found = {e.name: fusion_class(e) for e in graph_of(fun, (8, 8)).equations}
    assert found == {
        "dot_general": FusionClass.ALONE,
        "sort": FusionClass.ALONE,
        "reduce_sum": FusionClass.ROOT,
        "transpose": FusionClass.LOOP,
        "reshape": FusionClass.ALIAS,
    }


def test_never_more_traffic_than_without_fusion() -> None:
    """A transformer block with its gradient."""

    def block(w: Any, x: Any) -> Any:
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        a = jax.nn.softmax(y @ w @ y.T, axis=-1) @ y
        return jnp.sum(jax.nn.gelu(a @ w) + x)

    graph = graph_of(jax.grad(block), (64, 64), (128, 64))
    unfused = sum(
        sum(atom.nbytes for atom in (*e.inputs, *e.outputs) if isinstance(atom, Value)) for e in graph.equations
    )
    assert traffic_bytes(graph) < unfused / 2
    assert kernels(graph) < len(graph.equations) / 2
