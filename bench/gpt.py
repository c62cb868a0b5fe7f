"""GPT train steps at published sizes, as shapes only: for plan time and deviceless compiles.

Sizes: GPT-2 124M (Radford et al., 2019); GPT-3 175B (Brown et al., 2020, table 2.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import optax


@final
@dataclass(frozen=True, slots=True)
class Size:
    """One model."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


GPT2 = Size(12, 768, 12)
GPT3 = Size(96, 12288, 96, context=2048)


def init_params(size: Size, key: jax.Array) -> dict[str, Any]:
    """Parameters in float32, a dict for each layer."""

    def matrix(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * 0.02

    d = size.width
    keys = iter(jax.random.split(key, 6 * size.layers + 2))
    layers = [
        {
            "norm1": {"scale": jnp.ones(d), "bias": jnp.zeros(d)},
            "qkv": {
                "kernel": matrix(next(keys), d, 3, size.heads, d // size.heads),
                "bias": jnp.zeros((3, size.heads, d // size.heads)),
            },
            "out": {"kernel": matrix(next(keys), size.heads, d // size.heads, d), "bias": jnp.zeros(d)},
            "norm2": {"scale": jnp.ones(d), "bias": jnp.zeros(d)},
            "up": {"kernel": matrix(next(keys), d, 4 * d), "bias": jnp.zeros(4 * d)},
            "down": {"kernel": matrix(next(keys), 4 * d, d), "bias": jnp.zeros(d)},
        }
        for _ in range(size.layers)
    ]
    return {
        "tokens": matrix(next(keys), size.vocabulary, d),
        "positions": matrix(next(keys), size.context, d),
        "layers": layers,
        "norm": {"scale": jnp.ones(d), "bias": jnp.zeros(d)},
    }


def _norm(x: jax.Array, p: dict[str, Any]) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    var = ((wide - mean) ** 2).mean(-1, keepdims=True)
    return (((wide - mean) * jax.lax.rsqrt(var + 1e-5)) * p["scale"] + p["bias"]).astype(x.dtype)


def _layer(x: jax.Array, p: dict[str, Any]) -> jax.Array:
    half = x.dtype
    h = _norm(x, p["norm1"])
    q, k, v = jnp.moveaxis(
        jnp.einsum("btd,dchk->btchk", h, p["qkv"]["kernel"].astype(half)) + p["qkv"]["bias"].astype(half), 2, 0
    )
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * (q.shape[-1] ** -0.5)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e9), -1).astype(half)
    mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, p["out"]["kernel"].astype(half)) + p["out"]["bias"].astype(half)
    h = _norm(x, p["norm2"])
    h = jax.nn.gelu(h @ p["up"]["kernel"].astype(half) + p["up"]["bias"].astype(half))
    return x + h @ p["down"]["kernel"].astype(half) + p["down"]["bias"].astype(half)


def loss_fn(
    params: dict[str, Any], tokens: jax.Array, targets: jax.Array, remat: bool = False, dtype: Any = jnp.bfloat16
) -> jax.Array:
    """Mean cross entropy of the next token."""
    x = params["tokens"][tokens].astype(dtype) + params["positions"][: tokens.shape[1]].astype(dtype)
    layer = jax.checkpoint(_layer) if remat else _layer
    for p in params["layers"]:
        x = layer(x, p)
    logits = (_norm(x, params["norm"]) @ params["tokens"].T.astype(dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_step(
    size: Size, batch: int, remat: bool = False, dtype: Any = jnp.bfloat16
) -> tuple[Callable[..., Any], Any, Any]:
    """(step, abstract state, abstract batch): AdamW with global-norm clipping; parameters are float32."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))

    def make_state(key: jax.Array) -> dict[str, Any]:
        params = init_params(size, key)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch["tokens"], batch["targets"], remat, dtype)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    state = jax.eval_shape(make_state, jax.random.key(0))
    data = jax.ShapeDtypeStruct((batch, size.context), jnp.int32)
    return step, state, {"tokens": data, "targets": data}
