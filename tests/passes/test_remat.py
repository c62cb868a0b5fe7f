"""Recomputation: the same values bit for bit, less kept, nothing done twice that must not be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import autoshard
from autoshard.errors import ArgumentError
from autoshard.ir import Apply, Graph, Value, evaluate, trace
from autoshard.passes import Remat, forward_cuts, run_passes
from autoshard.passes.remat import is_backward, is_forward
from autoshard.plan import Plan

LAYERS, WIDTH, ROWS = 8, 16, 64


def step_of(layers: int = LAYERS, watch: Any = None) -> Any:
    """SGD on a residual net; `watch` is called in every layer."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for i in range(layers):
                h = h + jnp.tanh(jax.nn.gelu(h @ weights[i]))
                if watch is not None:
                    jax.debug.callback(watch, h[0, 0])
            return jnp.mean(h**2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    return step


def arguments(layers: int = LAYERS, width: int = WIDTH, rows: int = ROWS) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(layers, width, width)).astype("f4") / 4, draw.normal(size=(rows, width)).astype("f4")


def traced(step: Any, *args: Any) -> Graph:
    return trace(step, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])


def kept_bytes(graph: Graph) -> int:
    """Bytes of forward values that the backward pass reads."""
    forward = {v for e in graph.equations if is_forward(e) and e.place.remat == 0 for v in e.outputs}
    read = {a for e in graph.equations if is_backward(e) or e.place.remat for a in e.inputs if a in forward}
    return sum(a.nbytes for a in read if isinstance(a, Value))


def test_the_same_bit_for_bit_and_less_is_kept() -> None:
    weights, x = arguments()
    before = traced(step_of(), weights, x)
    cuts = forward_cuts(before)
    assert cuts
    after = run_passes(before, [Remat(cuts)])
    for a, b in zip(evaluate(before, (weights, x)), evaluate(after, (weights, x)), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    assert kept_bytes(after) < 0.5 * kept_bytes(before)
    products = [sum(e.name == "dot_general" for e in g.equations) for g in (before, after)]
    assert products[0] < products[1] <= products[0] + LAYERS


def test_a_barrier_waits_for_the_backward_pass() -> None:
    weights, x = arguments()
    before = traced(step_of(), weights, x)
    after = run_passes(before, [Remat(forward_cuts(before))])
    maker = {v: e for e in after.equations for v in e.outputs}
    barriers = [e for e in after.equations if e.name == "optimization_barrier"]
    assert barriers
    assert all(any(is_backward(maker[a]) for a in e.inputs if a in maker) for e in barriers)
    again = [e for e in after.equations if e.place.remat and e.name != "optimization_barrier"]
    starts = {v for e in barriers for v in e.outputs} | {v for e in again for v in e.outputs}
    assert again
    assert all(isinstance(e, Apply) and any(a in starts for a in e.inputs) for e in again)


def test_more_layers_keep_about_the_square_root() -> None:
    found = []
    for layers in (4, 64):
        weights, x = arguments(layers)
        graph = traced(step_of(layers), weights, x)
        found.append(kept_bytes(run_passes(graph, [Remat(forward_cuts(graph))])) / kept_bytes(graph))
    assert found[1] < 0.5 * found[0]


def test_effects_happen_once() -> None:
    seen: list[float] = []
    weights, x = arguments()
    graph = traced(step_of(watch=lambda v: seen.append(float(v))), weights, x)
    cuts = forward_cuts(graph)
    after = run_passes(graph, [Remat(cuts)])
    jax.block_until_ready(jax.jit(lambda *args: evaluate(after, args))(weights, x))
    jax.effects_barrier()
    assert len(seen) == LAYERS


def test_without_a_backward_pass_nothing_is_cut() -> None:
    weights, x = arguments()
    assert forward_cuts(traced(lambda w, x: (w - jnp.mean(x), jnp.mean(x)), weights, x)) == ()
    step = autoshard(lambda w, x: (w - jnp.mean(x), jnp.mean(x)), devices="h100", mesh=(1,), remat=True)
    with pytest.raises(ArgumentError, match="remat=True for a step without a backward pass"):
        step.plan(weights, x)


def large() -> tuple[Any, Any]:
    shape = jax.ShapeDtypeStruct
    return shape((LAYERS, 1024, 1024), jnp.float32), shape((65536, 1024), jnp.float32)


def planned(**options: Any) -> Plan:
    return autoshard(step_of(), devices="h100", mesh=(1,), **options).plan(*large())


def test_a_step_that_does_not_fit_recomputes_or_is_cut() -> None:
    whole = planned()
    assert not whole.remat
    again = planned(remat=True)
    assert again.remat
    assert again.memory.peak_bytes < 0.75 * whole.memory.peak_bytes
    assert again.time_s > whole.time_s
    assert "recomputing, " in str(again)
    chosen = planned(memory_limit=int(1.02 * again.memory.peak_bytes), microbatches=1)
    assert chosen.remat
    assert any(line.startswith("recomputing: ") for line in chosen.why)
    assert Plan.from_json(chosen.to_json()).remat
    free = planned(memory_limit=int(1.02 * again.memory.peak_bytes))
    assert free.memory.peak_bytes <= 1.02 * again.memory.peak_bytes
    assert free.time_s <= chosen.time_s


def test_on_cpus_the_plan_says_that_it_is_merged() -> None:
    weights, x = arguments()
    plan = autoshard(step_of(), mesh=(1,), devices="cpu", remat=True).plan(weights, x)
    assert not plan.remat
    assert any("XLA's CPU compiler would merge it" in line for line in plan.why)


@pytest.mark.deviceless
@pytest.mark.parametrize("count", [1, 4])
def test_memory_as_the_gpu_compiler_counts_it(count: int) -> None:
    whole, again = planned(microbatches=count), planned(microbatches=count, remat=True)
    peaks = [plan.compile().memory.peak for plan in (whole, again)]
    assert peaks[1] < 0.7 * peaks[0]
    for plan, peak in zip((whole, again), peaks, strict=True):
        assert abs(plan.memory.peak_bytes / peak - 1) < 0.3
