"""Sharded state of a pipeline, saved with orbax, is restored under other plans bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import autoshard
from tests.helpers import eager_cluster

pytestmark = [
    pytest.mark.implicit_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax"),
]

OPTIMIZER = optax.adam(1e-2)


def step(state: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = batch
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - batch) ** 2)

    weights, moments = state
    value, gradients = jax.value_and_grad(loss)(weights)
    updates, moments = OPTIMIZER.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), value


def make_state() -> Any:
    weights = [jax.random.normal(jax.random.key(k), (16, 16)) / 4 for k in range(4)]
    return weights, OPTIMIZER.init(weights)


def test_state_is_restored_under_other_plans(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    batch = np.random.default_rng(0).normal(size=(16, 16)).astype("f4")
    shapes = jax.eval_shape(make_state)
    first: Any = autoshard(step, stages=2, microbatches=4, mesh=(4,), devices=eager_cluster())
    first.plan(shapes, batch)
    state, _ = first(first.init(make_state), batch)
    kept = jax.tree.map(np.asarray, state)
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
    for options in ({"stages": 4, "microbatches": 4, "mesh": (2,)}, {"stages": 2, "mesh": (2, 2)}, {"mesh": (8,)}):
        other: Any = autoshard(step, devices=eager_cluster(), **options)
        (places, _), _ = other.shardings(shapes, batch)
        wanted = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)
        with checkpoint.StandardCheckpointer() as saver:
            restored = saver.restore(tmp_path / "state", wanted)
        for a, b, place in zip(*map(jax.tree.leaves, (restored, kept, places)), strict=True):
            assert a.sharding == place
            np.testing.assert_array_equal(np.asarray(a), b)
        _, value = other(restored, batch)
        plain: Any = jax.jit(step)
        np.testing.assert_allclose(value, plain(kept, batch)[1], rtol=1e-5)
