"""Recurrences: scans over time, a carry kept in the state, an associative scan, scans under vmap, lax.map."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .base import Case, Program, functional
from .layers import (
    Params,
    along,
    dense,
    dense_init,
    gain,
    generator,
    integers,
    layer_norm,
    mlp,
    mlp_init,
    normal,
    regression_batch,
    sgd,
    weight,
)

FEATURES, HIDDEN, TIME = 32, 64, 12


def cell_init(rng: np.random.Generator, features: int, dtype: Any) -> Params:
    return {
        "input": weight(rng, (features, 4 * HIDDEN), dtype),
        "hidden": weight(rng, (HIDDEN, 4 * HIDDEN), dtype),
        "bias": normal(rng, (4 * HIDDEN,), dtype, 0.1),
    }


Carry = tuple[jax.Array, jax.Array]


def cell(params: Params, carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
    """One step of an LSTM; x: (batch, features), carry: two of (batch, hidden)."""
    memory, hidden = carry
    gates = x @ params["input"] + hidden @ params["hidden"]
    i, f, g, o = jnp.split(gates + along(params["bias"], gates), 4, axis=-1)
    memory = jax.nn.sigmoid(f + 1) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
    return (memory, hidden), hidden


def scan_cell(params: Params, carry: Carry, x: jax.Array, reverse: bool = False) -> tuple[Carry, jax.Array]:
    """x: (batch, time, features)."""
    carry, out = jax.lax.scan(lambda c, v: cell(params, c, v), carry, jnp.swapaxes(x, 0, 1), reverse=reverse)
    return carry, jnp.swapaxes(out, 0, 1)


def rest(batch: int, dtype: Any) -> Carry:
    return jnp.zeros((batch, HIDDEN), dtype), jnp.zeros((batch, HIDDEN), dtype)


def lstm(dtype: Any) -> Case:
    """Two layers: the first reads both ways, the second forwards only."""

    def loss_of(params: Params, batch: Params) -> jax.Array:
        start = rest(batch["x"].shape[0], batch["x"].dtype)
        _, forward = scan_cell(params["forward"], start, batch["x"])
        _, backward = scan_cell(params["backward"], start, batch["x"], reverse=True)
        _, out = scan_cell(params["top"], start, jnp.concatenate([forward, backward], axis=-1))
        return jnp.mean(jnp.square(dense(params["head"], out) - batch["y"]))

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return sgd(params, grads, 0.5), {"loss": loss}

    def state() -> Params:
        rng = generator(70)
        cells = {name: cell_init(rng, FEATURES, dtype) for name in ("forward", "backward")}
        return {**cells, "top": cell_init(rng, 2 * HIDDEN, dtype), "head": dense_init(rng, HIDDEN, 16, dtype)}

    return functional(step, state, lambda i: regression_batch(70, i, (16, TIME, FEATURES), 16, dtype))


def lstm_carried(dtype: Any) -> Case:
    """Truncated backpropagation: the carry of one batch, a batched leaf of the state, starts the next."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> tuple[jax.Array, Carry]:
            carry, out = scan_cell(params["cell"], state["carry"], batch["x"])
            return jnp.mean(jnp.square(dense(params["head"], out) - batch["y"])), carry

        (loss, carry), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        return {"params": sgd(state["params"], grads, 0.5), "carry": carry}, {"loss": loss}

    def state() -> Params:
        rng = generator(71)
        params = {"cell": cell_init(rng, FEATURES, dtype), "head": dense_init(rng, HIDDEN, 16, dtype)}
        return {"params": params, "carry": rest(16, dtype)}

    return functional(step, state, lambda i: regression_batch(71, i, (16, TIME, FEATURES), 16, dtype))


def state_space(dtype: Any) -> Case:
    """A selective state-space layer (Gu & Dao 2023, "Mamba") by an associative scan over 32 steps of time."""
    states = 8

    def scan(decay: jax.Array, drive: jax.Array) -> jax.Array:
        """h_t = decay_t * h_{t-1} + drive_t along axis 1."""

        def combine(left: Carry, right: Carry) -> Carry:
            return left[0] * right[0], right[0] * left[1] + right[1]

        return jax.lax.associative_scan(combine, (decay, drive), axis=1)[1]

    def layer(params: Params, x: jax.Array) -> jax.Array:
        y = layer_norm(params["gain"], x)
        rate = jax.nn.softplus(dense(params["rate"], y))
        write, read = jnp.split(y @ params["write_read"], 2, axis=-1)
        decay = jnp.exp(-rate[..., None] * jnp.exp(params["decay"])[None, None])
        memory = scan(decay, (rate * y)[..., None] * write[:, :, None, :])
        out = jnp.einsum("btws,bts->btw", memory, read) + along(params["skip"], y) * y
        return x + (out * jax.nn.silu(y @ params["gate"])) @ params["out"]

    def loss_of(params: Params, batch: Params) -> jax.Array:
        x = batch["x"]
        for entries in params["layers"]:
            x = layer(entries, x)
        return jnp.mean(jnp.square(dense(params["head"], x) - batch["y"]))

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return sgd(params, grads, 0.05), {"loss": loss}

    def state() -> Params:
        rng = generator(72)

        def entries() -> Params:
            return {
                "gain": gain(rng, HIDDEN, dtype),
                "rate": dense_init(rng, HIDDEN, HIDDEN, dtype),
                "write_read": weight(rng, (HIDDEN, 2 * states), dtype),
                "decay": normal(rng, (HIDDEN, states), dtype, 0.5),
                "skip": gain(rng, HIDDEN, dtype),
                "gate": weight(rng, (HIDDEN, HIDDEN), dtype),
                "out": weight(rng, (HIDDEN, HIDDEN), dtype),
            }

        return {"layers": [entries() for _ in range(2)], "head": dense_init(rng, HIDDEN, 16, dtype)}

    return functional(step, state, lambda i: regression_batch(72, i, (16, 32, HIDDEN), 16, dtype))


def scan_under_vmap(dtype: Any) -> Case:
    """One example at a time under vmap: a scan frozen at the example's own length, then per-example clipping."""

    def loss_of(params: Params, x: jax.Array, y: jax.Array, length: jax.Array) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array], value: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            hidden, t = carry
            new = jnp.tanh(value @ params["input"] + hidden @ params["hidden"] + params["bias"])
            return (jnp.where(t < length, new, hidden), t + 1), None

        (hidden, _), _ = jax.lax.scan(body, (jnp.zeros((HIDDEN,), x.dtype), jnp.zeros((), jnp.int32)), x)
        return jnp.mean(jnp.square(hidden @ params["out"] - y))

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        each = jax.vmap(jax.value_and_grad(loss_of), in_axes=(None, 0, 0, 0))
        losses, grads = each(params, batch["x"], batch["y"], batch["length"])
        squares = [jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)]
        norms = jnp.sqrt(sum(squares))
        factor = 1 / jnp.maximum(1, norms)
        clipped = jax.tree.map(lambda g: jnp.tensordot(factor, g, axes=1) / factor.shape[0], grads)
        return sgd(params, clipped, 0.5), {"loss": jnp.mean(losses), "norms": norms}

    def state() -> Params:
        rng = generator(73)
        return {
            "input": weight(rng, (FEATURES, HIDDEN), dtype),
            "hidden": weight(rng, (HIDDEN, HIDDEN), dtype),
            "bias": normal(rng, (HIDDEN,), dtype, 0.1),
            "out": weight(rng, (HIDDEN, 16), dtype),
        }

    def batch(i: int) -> Params:
        rng = generator(73, i)
        x, y = normal(rng, (16, TIME, FEATURES), dtype), normal(rng, (16, 16), dtype)
        return {"x": x, "y": y, "length": integers(rng, (16,), TIME) + 1}

    return functional(step, state, batch)


def mapped(dtype: Any) -> Case:
    """lax.map over examples, four at a time, inside the differentiated loss."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: list[Params]) -> jax.Array:
            def one(example: Params) -> jax.Array:
                hidden = mlp(params, example["x"])
                return jnp.mean(jnp.square(jnp.cumsum(hidden, axis=0) / hidden.shape[0] - example["y"]))

            return jnp.mean(jax.lax.map(one, batch, batch_size=4))

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
        return {"params": sgd(state["params"], velocity, 0.3), "velocity": velocity}, {"loss": loss}

    def state() -> Params:
        params = mlp_init(generator(74), (64, 128, 32), dtype)
        return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}

    return functional(step, state, lambda i: regression_batch(74, i, (16, 8, 64), 32, dtype))


RECURRENT = (
    Program("lstm", lstm, True, "lax.scan over time in both directions"),
    Program("lstm_carried", lstm_carried, True, "the recurrent carry is a batched leaf of the state"),
    Program("state_space", state_space, True, "selective state space by associative_scan"),
    Program(
        "scan_under_vmap", scan_under_vmap, True, "vmap of grad of scan with lengths; per-example gradient clipping"
    ),
    Program(
        "mapped",
        mapped,
        False,
        "lax.map over examples with a batch size, differentiated: a loop over examples is not cut",
    ),
)
