"""Losses with structure: a variational autoencoder and a contrastive pair of encoders."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .base import Case, Program, functional
from .layers import Params, cross_entropy, generator, mlp, mlp_init, normal, sgd


def variational(dtype: Any) -> Case:
    """A normal sample inside the step; the typed key is a leaf of the state and is split every step."""
    latent = 16

    def step(state: Params, x: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
        key, use = jax.random.split(state["key"])

        def loss_of(params: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            mean, log_variance = jnp.split(mlp(params["encoder"], x), 2, axis=-1)
            noise = jax.random.normal(use, mean.shape, mean.dtype)
            sample = mean + jnp.exp(0.5 * log_variance) * noise
            logits = mlp(params["decoder"], sample)
            target = jax.nn.sigmoid(x)
            reconstruction = jnp.mean(jnp.sum(jax.nn.softplus(logits) - target * logits, axis=-1))
            divergence = 0.5 * jnp.sum(jnp.exp(log_variance) + jnp.square(mean) - 1 - log_variance, axis=-1)
            loss = reconstruction + 0.5 * jnp.mean(divergence)
            return loss, {"reconstruction": reconstruction, "divergence": divergence}

        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        return {"params": sgd(state["params"], grads, 0.01), "key": key}, {"loss": loss, **metrics}

    def state() -> Params:
        rng = generator(90)
        params = {
            "encoder": mlp_init(rng, (64, 128, 2 * latent), dtype),
            "decoder": mlp_init(rng, (latent, 128, 64), dtype),
        }
        return {"params": params, "key": jax.random.key(90)}

    return functional(step, state, lambda i: normal(generator(90, i), (16, 64), dtype))


def contrastive(dtype: Any) -> Case:
    """InfoNCE: every example is the others' negative, so the loss couples the batch; the temperature is learned."""

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> tuple[jax.Array, jax.Array]:
            left, right = mlp(params["left"], batch["left"]), mlp(params["right"], batch["right"])
            left = left / jnp.linalg.norm(left, axis=-1, keepdims=True)
            right = right / jnp.linalg.norm(right, axis=-1, keepdims=True)
            logits = left @ right.T * jnp.exp(params["log_scale"])
            labels = jnp.arange(logits.shape[0])
            loss = jnp.mean(cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
            return loss, jnp.mean(jnp.diagonal(logits))

        (loss, agreement), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return sgd(params, grads, 0.2), {"loss": loss, "agreement": agreement}

    def state() -> Params:
        rng = generator(91)
        encoders = {"left": mlp_init(rng, (64, 128, 32), dtype), "right": mlp_init(rng, (48, 128, 32), dtype)}
        return {**encoders, "log_scale": jnp.array(1.0, dtype)}

    def batch(i: int) -> Params:
        rng = generator(91, i)
        return {"left": normal(rng, (16, 64), dtype), "right": normal(rng, (16, 48), dtype)}

    return functional(step, state, batch)


GENERATIVE = (
    Program("variational", variational, True, "a random normal inside the step, typed key in the state"),
    Program("contrastive", contrastive, False, "InfoNCE couples the examples of the batch"),
)
