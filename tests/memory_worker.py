"""One process of tests/test_pipeline_memory.py under a limit of the system: NUMBER COUNT COORDINATOR EXTRA_MIB.

One process of one trains with plain `jax.jit`, two as a pipeline. Prints the loss of every step.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard import autoshard
from tests.helpers import eager_cluster

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
WIDTH, LAYERS, EXAMPLES, STEPS = 1536, 8, 64, 2
STATE_BYTES = 3 * LAYERS * WIDTH * WIDTH * 4


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


def make_state(width: int = WIDTH) -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(k, (width, width)) / np.float32(width**0.5) for k in keys]
    return weights, OPTIMIZER.init(weights)


def make_batch(width: int = WIDTH) -> Any:
    return np.random.default_rng(0).normal(size=(EXAMPLES, width)).astype("f4")


def limit(extra_mib: int) -> None:
    """Lets this process have so much more memory of its own than it has now."""
    status = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    most = now + extra_mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    """Trains."""
    number, count, coordinator, extra = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, count, number, shutdown_timeout_seconds=10)
    batch = make_batch()
    if count == 1:
        run: Any = jax.jit(step, donate_argnums=0)
        warm: Any = jax.jit(make_state)
    else:
        run = autoshard(step, stages=2, microbatches=4, devices=eager_cluster(count))
        run.plan(jax.eval_shape(make_state), batch)
        warm = lambda: run.init(make_state)  # noqa: E731
    jax.block_until_ready(jnp.ones(8) + 1)  # threads and their stacks
    limit(extra)
    state = warm()
    for _ in range(STEPS):
        state, value = run(state, batch)
        print(f"loss {float(value):.6f}", flush=True)
    jax.block_until_ready(state)


if __name__ == "__main__":
    main()
