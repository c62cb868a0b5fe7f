"""Layers and data that several programs share: plain JAX, no framework, weights in dictionaries.

Weights are drawn by numpy and cast, so the float32 and the float64 build of a program start from the same point.
Everything runs under strict dtype and rank promotion.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


def generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return jnp.array(rng.standard_normal(shape) * scale, dtype=dtype)


def integers(rng: np.random.Generator, shape: tuple[int, ...], high: int) -> jax.Array:
    return jnp.array(rng.integers(0, high, shape), dtype=jnp.int32)


def weight(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, fan_in: int | None = None) -> jax.Array:
    """Normal entries of variance 1 / fan_in; fan_in defaults to all but the last dimension."""
    return normal(rng, shape, dtype, float(np.prod(shape[:-1]) if fan_in is None else fan_in) ** -0.5)


def gain(rng: np.random.Generator, size: int, dtype: Any) -> jax.Array:
    return 1.0 + normal(rng, (size,), dtype, 0.1)


def dense_init(rng: np.random.Generator, fan_in: int, fan_out: int, dtype: Any) -> Params:
    return {"w": weight(rng, (fan_in, fan_out), dtype), "b": normal(rng, (fan_out,), dtype, 0.1)}


def along(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A vector over the last dimension of x, with leading dimensions of size 1 (rank promotion is off)."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def dense(params: Params, x: jax.Array) -> jax.Array:
    y = x @ params["w"]
    return y + along(params["b"], y)


def layer_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * along(scale, x)


def mlp_init(rng: np.random.Generator, sizes: tuple[int, ...], dtype: Any) -> list[Params]:
    return [dense_init(rng, a, b, dtype) for a, b in pairwise(sizes)]


def mlp(params: list[Params], x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jnp.tanh(dense(layer, x))
    return dense(params[-1], x)


def attention_init(rng: np.random.Generator, width: int, heads: int, dtype: Any) -> Params:
    """No biases: the gradient of a key bias is zero but for rounding, which no comparison by norm survives."""
    size = width // heads
    projections = {name: weight(rng, (width, heads, size), dtype, width) for name in ("q", "k", "v")}
    return {**projections, "o": weight(rng, (heads, size, width), dtype)}


def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """q, k, v: (batch, time, heads, size); bias: broadcast against (batch, heads, time, time)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def attention(params: Params, x: jax.Array, source: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    q = jnp.einsum("btw,whd->bthd", x, params["q"])
    k = jnp.einsum("btw,whd->bthd", source, params["k"])
    v = jnp.einsum("btw,whd->bthd", source, params["v"])
    return jnp.einsum("bthd,hdw->btw", attend(q, k, v, bias), params["o"])


def causal_bias(time: int, dtype: Any) -> jax.Array:
    """(1, 1, time, time): 0 where the key is not later than the query, else a large negative number."""
    allowed = jnp.tril(jnp.ones((time, time), dtype=bool))
    return jnp.where(allowed, jnp.zeros((), dtype), jnp.full((), -1e9, dtype))[None, None]


def block_init(rng: np.random.Generator, width: int, heads: int, hidden: int, dtype: Any) -> Params:
    return {
        "gain_attention": gain(rng, width, dtype),
        "attention": attention_init(rng, width, heads, dtype),
        "gain_mlp": gain(rng, width, dtype),
        "up": dense_init(rng, width, hidden, dtype),
        "down": dense_init(rng, hidden, width, dtype),
    }


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    return dense(params["down"], jax.nn.gelu(dense(params["up"], layer_norm(params["gain_mlp"], x))))


def block(params: Params, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """A pre-norm transformer block; x: (batch, time, width)."""
    normed = layer_norm(params["gain_attention"], x)
    x = x + attention(params["attention"], normed, normed, bias)
    return x + feed_forward(params, x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Per-position loss; logits: (..., classes), labels: (...)."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]


def sgd(params: Any, grads: Any, rate: float) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def global_norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def regression_batch(seed: int, i: int, shape: tuple[int, ...], outputs: int, dtype: Any) -> Params:
    """x: `shape`; y: `shape` with its last dimension replaced by `outputs`."""
    rng = generator(seed, i)
    return {"x": normal(rng, shape, dtype), "y": normal(rng, (*shape[:-1], outputs), dtype)}


def token_batch(seed: int, i: int, batch: int, time: int, vocabulary: int) -> Params:
    """Tokens, next tokens and a mask that leaves out a ragged tail of every row."""
    rng = generator(seed, i)
    tokens = rng.integers(0, vocabulary, (batch, time + 1))
    lengths = rng.integers(time // 2, time + 1, (batch, 1))
    return {
        "tokens": jnp.array(tokens[:, :-1], dtype=jnp.int32),
        "targets": jnp.array(tokens[:, 1:], dtype=jnp.int32),
        "mask": jnp.array(np.arange(time)[None] < lengths),
    }
