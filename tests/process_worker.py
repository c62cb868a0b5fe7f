"""One process of tests/test_processes.py: NUMBER COUNT DEVICES COORDINATOR CASE. Prints "agrees" at the end."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard import autoshard
from tests.helpers import eager_cluster

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def mlp(weights: Any, batch: Any) -> Any:
    h = batch
    for w in weights:
        h = jnp.tanh(h @ w)
    return jnp.mean((h - batch) ** 2)


def transformer(weights: Any, tokens: Any) -> Any:
    """A decoder with tied embeddings."""
    table, layers = weights
    h = table[tokens]
    mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    for qkv, out, up, down in layers:
        q, k, v = jnp.split(h @ qkv, 3, axis=-1)
        scores = jnp.where(mask, jnp.einsum("bld,bmd->blm", q, k) / np.sqrt(h.shape[-1]), -1e9)
        h = h + jax.nn.softmax(scores) @ v @ out
        h = h + jax.nn.gelu(h @ up) @ down
    scores = (h @ table.T)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def problem(name: str) -> tuple[Any, Any, Any]:
    """Loss, weights, batch."""
    draw = np.random.default_rng(0)

    def matrix(*shape: int) -> Any:
        return (draw.normal(size=shape) / np.sqrt(shape[0])).astype("f4")

    if name == "transformer":
        layers = [(matrix(16, 48), matrix(16, 16), matrix(16, 32), matrix(32, 16)) for _ in range(2)]
        return transformer, (matrix(32, 16), layers), draw.integers(0, 32, (16, 8)).astype("i4")
    return mlp, [matrix(16, 16) for _ in range(4)], matrix(16, 16)


def main() -> None:
    """Trains three steps, pipelined over all processes, beside plain jit in each."""
    number, count, devices = map(int, sys.argv[1:4])
    coordinator, name = sys.argv[4:6]
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, count, number, shutdown_timeout_seconds=10)
    loss, weights, batch = problem(name)

    def step(state: Any, batch: Any) -> Any:
        weights, moments = state
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        updates, moments = OPTIMIZER.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), {"loss": value, "norm": optax.tree.norm(gradients)}

    def make_state() -> Any:
        made = jax.tree.map(jnp.asarray, weights)
        return made, OPTIMIZER.init(made)

    cluster = eager_cluster(count * devices)
    shapes = jax.eval_shape(make_state)
    mine: Any = autoshard(step, stages=2, microbatches=4, devices=cluster)
    mine.plan(shapes, batch)
    state, metrics = mine.init(make_state), []
    if name.startswith("killed"):
        for turn in range(10**6):
            state, found = mine(state, batch)
            float(found["loss"])
            if turn == 5 and number == int(name.removeprefix("killed-")):
                os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        state, found = mine(state, batch)
        metrics.append(found)
    plain: Any = jax.jit(step)
    wanted = jax.tree.map(np.asarray, make_state())
    for found in metrics:
        wanted, each = plain(wanted, batch)
        for key in each:
            assert np.isfinite(float(found[key]))
            np.testing.assert_allclose(float(found[key]), float(each[key]), rtol=1e-4)
    half = jax.devices()[: count * devices // 2]
    here = 0
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert a.sharding.device_set in (set(half), set(jax.devices()) - set(half))
        here += len(a.addressable_shards)
        for shard in a.addressable_shards:
            part = np.asarray(b)[shard.index]
            np.testing.assert_allclose(shard.data, part, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    assert 0 < here < devices * len(jax.tree.leaves(state))
    print("agrees", flush=True)


if __name__ == "__main__":
    main()
