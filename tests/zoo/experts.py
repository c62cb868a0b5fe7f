"""Mixtures of experts with top-2 routing and a capacity: dispatch and combine products, or scatter and gather."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .base import Case, Program, functional
from .layers import Params, dense, dense_init, gain, generator, layer_norm, normal, regression_batch, sgd, weight

WIDTH, HIDDEN, TIME, EXPERTS, CHOICES = 64, 128, 16, 8, 2


def expert_weights(seed: int, dtype: Any) -> Params:
    rng = generator(seed)
    return {
        "gain": gain(rng, WIDTH, dtype),
        "router": weight(rng, (WIDTH, EXPERTS), dtype),
        "up": weight(rng, (EXPERTS, WIDTH, HIDDEN), dtype, WIDTH),
        "bias": normal(rng, (EXPERTS, 1, HIDDEN), dtype, 0.1),
        "down": weight(rng, (EXPERTS, HIDDEN, WIDTH), dtype, HIDDEN),
        "head": dense_init(rng, WIDTH, 32, dtype),
    }


def experts_on(params: Params, slots: jax.Array) -> jax.Array:
    """slots: (experts, slots, width), one expert's tokens in each row."""
    hidden = jax.nn.silu(jnp.einsum("esw,ewh->esh", slots, params["up"]) + params["bias"])
    return jnp.einsum("esh,ehw->esw", hidden, params["down"])


def balance_loss(gates: jax.Array, first: jax.Array) -> jax.Array:
    """Fedus et al. 2021: fraction of tokens times mean gate of each expert; gates and first: (..., tokens, experts)."""
    return EXPERTS * jnp.mean(jnp.sum(jnp.mean(gates, axis=-2) * jnp.mean(first, axis=-2), axis=-1))


def by_products(dtype: Any) -> Case:
    """GShard: every example is a routing group of its own, with a capacity of 5 tokens per expert."""
    capacity = TIME * CHOICES * 5 // (4 * EXPERTS)

    def mixture(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax(x @ params["router"], axis=-1)
        values, chosen = jax.lax.top_k(gates, CHOICES)
        values = values / jnp.sum(values, axis=-1, keepdims=True)
        one_hot = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)
        # First choices of the whole group queue before its second choices: (group, choice * token, expert).
        queue = jnp.swapaxes(one_hot, 1, 2).reshape(x.shape[0], CHOICES * TIME, EXPERTS)
        place = jnp.cumsum(queue, axis=1) - queue
        place = jnp.swapaxes(place.reshape(x.shape[0], CHOICES, TIME, EXPERTS), 1, 2)
        place = jnp.sum(place * one_hot, axis=-1).astype(jnp.int32)
        slot = jax.nn.one_hot(place, capacity, dtype=x.dtype)
        dispatch = jnp.einsum("gtke,gtkc->gtec", one_hot, slot)
        combine = jnp.einsum("gtk,gtke,gtkc->gtec", values, one_hot, slot)
        slots = jnp.einsum("gtec,gtw->egcw", dispatch, x)
        out = experts_on(params, slots.reshape(EXPERTS, -1, WIDTH)).reshape(slots.shape)
        return jnp.einsum("gtec,egcw->gtw", combine, out), balance_loss(gates, one_hot[:, :, 0])

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> tuple[jax.Array, jax.Array]:
            mixed, balance = mixture(params, layer_norm(params["gain"], batch["x"]))
            loss = jnp.mean(jnp.square(dense(params["head"], batch["x"] + mixed) - batch["y"]))
            return loss + 0.01 * balance, balance

        (loss, balance), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return sgd(params, grads, 0.1), {"loss": loss, "balance": balance}

    return functional(
        step, lambda: expert_weights(60, dtype), lambda i: regression_batch(60, i, (16, TIME, WIDTH), 32, dtype)
    )


def by_gathers(dtype: Any) -> Case:
    """All tokens of the batch queue together; they are sorted by expert, scattered to slots, and gathered back."""

    def mixture(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens = x.shape[0]
        capacity = tokens * CHOICES // EXPERTS
        gates = jax.nn.softmax(x @ params["router"], axis=-1)
        values, chosen = jax.lax.top_k(gates, CHOICES)
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        sorted_expert = expert[order]
        counts = jnp.bincount(expert, length=EXPERTS)
        place = jnp.arange(tokens * CHOICES) - (jnp.cumsum(counts) - counts)[sorted_expert]
        # Tokens beyond the capacity aim outside the buffer: their scatter is dropped, their gather gives zeros.
        slot = jnp.where(place < capacity, sorted_expert * capacity + place, EXPERTS * capacity)
        source = order // CHOICES
        buffer = (
            jnp.zeros((EXPERTS * capacity, WIDTH), x.dtype).at[slot].set(x[source], mode="drop", unique_indices=False)
        )
        out = experts_on(params, buffer.reshape(EXPERTS, capacity, WIDTH)).reshape(-1, WIDTH)
        back = out.at[slot].get(mode="fill", fill_value=0) * values.reshape(-1)[order][:, None]
        mixed = jnp.zeros_like(x).at[source].add(back)
        first = jax.nn.one_hot(chosen[:, 0], EXPERTS, dtype=x.dtype)
        return mixed, balance_loss(gates, first), jnp.sum(place >= capacity)

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        x = batch["x"].reshape(-1, WIDTH)

        def loss_of(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            mixed, balance, dropped = mixture(params, layer_norm(params["gain"], x))
            loss = jnp.mean(jnp.square(dense(params["head"], x + mixed) - batch["y"].reshape(-1, 32)))
            return loss + 0.01 * balance, (balance, dropped)

        (loss, (balance, dropped)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return sgd(params, grads, 0.1), {"loss": loss, "balance": balance, "dropped": dropped}

    return functional(
        step, lambda: expert_weights(61, dtype), lambda i: regression_batch(61, i, (16, TIME, WIDTH), 32, dtype)
    )


EXPERT_MIXTURES = (
    Program(
        "experts_by_products", by_products, True, "dispatch and combine einsums; each example its own routing group"
    ),
    Program(
        "experts_by_gathers", by_gathers, False, "argsort, scatter and gather; the whole batch shares the capacity"
    ),
)
