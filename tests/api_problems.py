"""Steps, states and helpers for the tests of the decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from autoshard.api import Step, autoshard
from autoshard.plan import Plan
from autoshard.runtime import SEARCH, check_options, read_parameters
from tests.helpers import distance, eager_cluster

eager = functools.partial(autoshard, devices=eager_cluster())


def train_step(state: Any, batch: Any, lr: Any = 0.1) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["p"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
    new = {"p": jax.tree.map(lambda p, m: p - lr * m, state["p"], mu), "mu": mu, "n": state["n"] + 1}
    return new, {"loss": value}


def make_state(key: Any) -> Any:
    one, two = jax.random.split(key)
    params = {"w": jax.random.normal(one, (32, 64)) * 0.1, "v": jax.random.normal(two, (64, 16)) * 0.1}
    return {"p": params, "mu": jax.tree.map(jnp.zeros_like, params), "n": 0}


def make_batch(size: int = 16) -> Any:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(size, 32)).astype(np.float32), "y": rng.normal(size=(size, 16)).astype(np.float32)}


class Counter:
    """Counts searches."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        self.count += 1
        return SEARCH(*args, **kwargs)


def counted(fun: Callable[..., Any], static_argnames: Any = None, **options: Any) -> tuple[Step, Counter]:
    defaults: dict[str, Any] = {
        "mesh": None, "pins": None, "stages": 1, "schedule": None, "microbatches": None, "remat": None,
        "memory_limit": None, "budget": None, "seed": 0, "dump_dir": None, "learned_model": None, "later": {},
    }  # fmt: skip
    counter = Counter()
    checked = check_options(**{"devices": eager_cluster(), **defaults, **options})
    return Step(fun, read_parameters(fun, None, static_argnames, None), checked, counter), counter


def check_training(step: Any, fun: Callable[..., Any], make: Callable[[], Any], *rest: Any, steps: int = 3) -> Any:
    """Trains both; results agree; returns the sharded state."""
    plain = jax.jit(fun)
    mine, theirs = make(), make()
    for _ in range(steps):
        mine, out = step(mine, *rest)
        theirs, expected = plain(theirs, *rest)
        assert distance(out, expected) < 1e-5
    assert distance(mine, theirs) < 1e-4
    return mine


def axes_of(tree: Any) -> set[str]:
    """Names of the mesh axes that anything is split over."""
    found: set[str] = set()
    for leaf in jax.tree.leaves(tree):
        for entry in leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ():
            found |= {entry} if isinstance(entry, str) else set(entry or ())
    return found


def auto_mesh(shape: tuple[int, ...] = (2, 4), names: tuple[str, ...] = ("x", "y"), kind: Any = AxisType.Auto) -> Any:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


ROWS = np.random.default_rng(3).normal(size=(16, 8)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 32, use_bias=False, rngs=rngs)  # a bias before BatchNorm has no gradient but noise
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def nnx_step(model: Any, optimizer: Any, x: Any) -> Any:
    value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return {"loss": value}


def make_nnx(key: Any = 0) -> Any:
    model = Net(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def nnx_distance(first: Any, second: Any) -> float:
    return distance(*(jax.tree.leaves(nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.RngKey)))) for m in (first, second)))
