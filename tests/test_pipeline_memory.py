"""A step that does not fit the memory of one device trains as a pipeline of two stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import autoshard
from autoshard.errors import InfeasibleError
from tests.helpers import eager_cluster

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
WIDTH, LAYERS = 256, 8
LIMIT = 7 * 2**20
"""The step has 6 MiB of state, and its gradients are 2 MiB more."""


def loss(weights: Any, batch: Any) -> Any:
    h = batch
    for w in weights:
        h = jnp.tanh(h @ w)
    return jnp.mean((h - batch) ** 2)


def step(state: Any, batch: Any) -> Any:
    """Clipped Adam."""
    weights, moments = state
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    updates, moments = OPTIMIZER.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), value


def make_state() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / np.float32(WIDTH**0.5) for k in keys]
    return weights, OPTIMIZER.init(weights)


@pytest.mark.implicit_promotion
def test_a_step_that_does_not_fit_one_device_trains_in_two_stages() -> None:
    batch = np.random.default_rng(0).normal(size=(64, WIDTH)).astype("f4")
    shapes = jax.eval_shape(make_state)
    alone: Any = autoshard(step, devices=eager_cluster(1), mesh=(1,), memory_limit=LIMIT)
    with pytest.raises(InfeasibleError):
        alone.plan(shapes, batch)
    mine: Any = autoshard(step, devices=eager_cluster(2), stages=2, microbatches=4, memory_limit=LIMIT)
    assert mine.plan(shapes, batch).memory.peak_bytes <= LIMIT
    state, wanted, plain = mine.init(make_state), make_state(), jax.jit(step)
    for _ in range(3):
        state, value = mine(state, batch)
        wanted, other = plain(wanted, batch)
        np.testing.assert_allclose(float(value), float(other), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-4)
