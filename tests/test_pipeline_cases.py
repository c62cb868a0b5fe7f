"""What users of other pipeline systems ran into (shared/CASES.md), as steps that run or say why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import autoshard
from autoshard.cluster import Cluster, Link, Node
from autoshard.errors import MicrobatchError
from autoshard.passes import Part
from autoshard.runtime.compiled import Planned
from tests.helpers import eager_cluster
from tests.zoo.base import distances

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(600)]

Step = Callable[..., Any]


def layers(count: int = 4, width: int = 16) -> list[Any]:
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(width, width)) / 4).astype("f4") for _ in range(count)]


def examples(size: int = 16, width: int = 16) -> Any:
    return np.random.default_rng(1).normal(size=(size, width)).astype("f4")


def agrees(step: Step, *args: Any, stages: int = 2, **options: Any) -> Planned:
    """Runs a pipeline beside plain jit; returns what was planned."""
    mine = autoshard(step, stages=stages, devices=eager_cluster(), donate_argnums=(), **options)
    jitted: Any = jax.jit(step)
    found, plain = jax.device_get(mine(*args)), jax.device_get(jitted(*args))
    assert max(gap for _, gap in distances(found, plain)) < 1e-5
    (planned,) = mine._planned.values()
    return planned


def loss_of(weights: Any, batch: Any) -> Any:
    h = batch
    for w in weights:
        h = jnp.tanh(h @ w)
    return jnp.mean(h**2)


def plain_step(weights: Any, batch: Any) -> Any:
    value, gradients = jax.value_and_grad(loss_of)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def test_a_bias_used_by_every_layer() -> None:
    """alpa#808: T5's relative positions; gradients from all stages, which sum up once a step."""

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            weights, bias = state
            h = batch
            for w in weights:
                h = jnp.tanh(h @ (w * jnp.exp(bias)))
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

    bias = np.zeros((16, 16), "f4")
    planned = agrees(step, (layers(), bias), examples(), stages=4, microbatches=4, mesh=(2,))
    assert planned.staged is not None
    for stage in planned.staged.stages.graphs:
        shapes = [v.shape for v, _, _ in stage.loop_arrivals]
        assert (16, 16) not in shapes, "no sum of gradients is sent for each microbatch"


@pytest.mark.parametrize("count", [1, 4])
def test_clip_by_global_norm(count: int) -> None:
    """alpa#880 and #829: a norm over all stages; one microbatch."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def step(state: Any, batch: Any) -> Any:
        weights, moments = state
        value, gradients = jax.value_and_grad(loss_of)(weights, batch)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    weights = layers()
    planned = agrees(step, (weights, optimizer.init(weights)), examples(), microbatches=count, mesh=(4,))
    assert planned.staged is not None
    stages = planned.staged.stages
    weight_at = [stages.home[i] for i, path in enumerate(planned.info.input_paths) if path.startswith("state/0")]
    assert weight_at == [0, 0, 1, 1]
    for kind in ("mu", "nu"):
        at = [stages.home[i] for i, path in enumerate(planned.info.input_paths) if f"/{kind}" in path]
        assert at == weight_at, "optimizer state is updated beside its weight (alpa#549)"


def test_gradients_only() -> None:
    """alpa#560: a step that returns gradients."""
    agrees(jax.value_and_grad(loss_of), layers(), examples(), microbatches=4, mesh=(4,))


def test_held_memory_does_not_grow_with_microbatches() -> None:
    """marin#6532: what is held is bounded by the schedule."""
    peaks: list[int] = []
    for count in (4, 16):
        step = autoshard(plain_step, stages=2, microbatches=count, mesh=(4,), devices=eager_cluster())
        plan = step.plan(layers(), examples(count * 4))
        assert plan.pipeline is not None
        assert plan.pipeline.held == (2, 1)
        peaks.append(plan.memory.temporary_bytes)
    inputs = 16 * 4 * 16 * 4  # the larger batch itself, cut
    assert peaks[1] <= peaks[0] + inputs


def test_a_batch_that_does_not_divide() -> None:
    """levanter#1261: one line at planning time, with the argument, dimension and size."""
    with pytest.raises(
        MicrobatchError, match=r"microbatches=8 for batch, which has 12 examples in dimension 0"
    ) as caught:
        autoshard(plain_step, stages=2, microbatches=8, devices=eager_cluster()).plan(layers(), examples(12))
    assert len(str(caught.value).splitlines()) == 3


def test_batch_norm_is_refused_by_line() -> None:
    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = batch
            for w in weights:
                h = h @ w
                h = jnp.tanh((h - jnp.mean(h, 0)[None]) / (1e-3 + jnp.std(h, 0)[None]))
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    with pytest.raises(MicrobatchError, match=r"test_pipeline_cases.py:\d+.* couples the examples"):
        autoshard(step, stages=2, microbatches=4, devices=eager_cluster()).plan(layers(), examples())


def test_updates_are_made_beside_their_weights() -> None:
    """alpa#684: no optimizer equation on a stage that has no weight in it."""
    planned = agrees(plain_step, layers(), examples(), stages=4, microbatches=4, mesh=(2,))
    assert planned.staged is not None
    for stage in planned.staged.stages.graphs:
        updates = [
            e for e in stage.graph.equations if e.outputs and stage.phase.get(e.outputs[0], (0, 0))[0] == Part.AFTER
        ]
        large = [e for e in updates if e.outputs[0].shape == (16, 16)]
        assert len({e.name for e in large}) >= 2
        assert sum(e.name == "sub" for e in large) == 1


def test_effects_happen_once_a_step() -> None:
    """A callback on the loss, on all examples, and on a weight: each once, whatever the stages."""
    seen: list[Any] = []

    def step(weights: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(weights, batch)
        for each in (value, batch, weights[3]):
            jax.debug.callback(lambda v: seen.append(np.asarray(v)), each)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    weights, batch = layers(), examples(24)
    mine = autoshard(step, stages=4, microbatches=4, mesh=(2,), devices=eager_cluster())
    _, value = mine(weights, batch)
    jax.effects_barrier()
    assert sorted(v.shape for v in seen) == [(), (16, 16), (24, 16)]
    for found, wanted in zip(sorted(seen, key=np.size), (value, weights[3], batch), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def nodes_of_two(bytes_per_s: float) -> Cluster:
    """Four nodes of two devices, with a network of this speed between them."""
    node = eager_cluster(2).nodes[0]
    return Cluster("four nodes", (Node(node.device, 2, node.link),) * 4, Link(bytes_per_s, 1e-6))


def test_a_stage_over_several_nodes() -> None:
    """alpa#953: two stages of two nodes each run, and what a stage sends inside itself is costed over the network."""
    weights, batch = layers(), examples()
    slow = autoshard(plain_step, stages=2, microbatches=4, mesh=(4,), devices=nodes_of_two(1e4), donate_argnums=())
    jitted: Any = jax.jit(plain_step)
    gaps = distances(jax.device_get(slow(weights, batch)), jax.device_get(jitted(weights, batch)))
    assert max(gap for _, gap in gaps) < 1e-5
    pins = {"weights/**": jax.sharding.PartitionSpec(), "batch": jax.sharding.PartitionSpec("data")}
    options: Any = {"stages": 2, "microbatches": 4, "mesh": {"data": 4}, "pins": pins}
    times = [
        autoshard(plain_step, devices=nodes_of_two(speed), **options).plan(weights, batch).time_s
        for speed in (1e4, 1e9)
    ]
    crossing = (
        sum(w.nbytes for w in weights) / 2 / 2
    )  # gradients of one of two stages, by two devices of a node at once
    assert times[0] - times[1] > crossing / 1e4


def test_a_sum_stays_a_sum_and_a_second_plan() -> None:
    """alpa#268: a sum-reduced loss is not averaged over microbatches; alpa#776: planned twice in a process."""

    def step(weights: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda w, x: loss_of(w, x) * x.size)(weights, batch)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value

    for _ in range(2):
        agrees(step, layers(), examples(), microbatches=4, mesh=(4,))


@pytest.mark.parametrize("remat", [False, True])
def test_dropout_masks_agree(remat: bool) -> None:
    """jax#17982 and #21046: one mask in the forward pass, when it is computed again, and in the backward pass."""

    def layer(h: Any, w: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.7, h.shape)
        return jnp.where(kept, jnp.tanh(h @ w) / 0.7, 0.0)

    def step(state: Any, batch: Any) -> Any:
        weights, key = state
        keys = jax.random.split(key, len(weights) + 1)

        def loss(weights: Any) -> Any:
            h = batch
            for w, each in zip(weights, keys[1:], strict=True):
                h = (jax.checkpoint(layer) if remat else layer)(h, w, each)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return (jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), keys[0]), value

    mine = autoshard(step, stages=2, microbatches=4, mesh=(4,), devices=eager_cluster(), donate_argnums=())
    jitted: Any = jax.jit(step)
    state, batch = (layers(), jax.random.key(3)), examples()
    (found, key), value = mine(state, batch)
    (plain, wanted), loss = jitted(state, batch)
    assert max(gap for _, gap in distances(jax.device_get((found, value)), jax.device_get((plain, loss)))) < 1e-5
    assert jax.random.key_data(key).tolist() == jax.random.key_data(wanted).tolist()
