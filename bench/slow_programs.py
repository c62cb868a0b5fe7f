"""Train steps that take a fraction of a second on one core, for the benchmark over a slow network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A step.

    Attributes:
      name: of the program.
      step: (state, batch) -> (state, loss).
      make_state: key -> state.
      batch: arrays on the host.
    """

    name: str
    step: Callable[[Any, Any], Any]
    make_state: Callable[[Any], Any]
    batch: Any


def _case(
    name: str,
    init: Callable[[Any], Any],
    loss: Callable[[Any, Any], Any],
    batch: Any,
    optimizer: optax.GradientTransformation,
) -> Case:
    def make_state(key: Any) -> Any:
        params = init(key)
        return {"params": params, "optimizer": optimizer.init(params)}

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    return Case(name, step, make_state, batch)


def _weights(key: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / np.sqrt(np.prod(shape[:-1])) if len(shape) > 1 else jnp.zeros(shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def mlp(name: str, sizes: Sequence[int], batch: int, optimizer: optax.GradientTransformation) -> Case:
    """Dense layers with tanh or gelu."""
    layers = len(sizes) - 1
    shapes = {f"{kind}{i}": s for i in range(layers) for kind, s in
              (("w", (sizes[i], sizes[i + 1])), ("b", (sizes[i + 1],)))}  # fmt: skip

    def loss(p: Any, data: Any) -> Any:
        x, y = data
        for i in range(layers):
            x = x @ p[f"w{i}"] + p[f"b{i}"]
            x = jax.nn.gelu(x) if i + 1 < layers else x
        return jnp.mean((x - y) ** 2)

    draw = np.random.default_rng(0)
    data = (draw.normal(size=(batch, sizes[0])).astype("f4"), draw.normal(size=(batch, sizes[-1])).astype("f4"))
    return _case(name, lambda key: _weights(key, shapes), loss, data, optimizer)


def transformer(width: int, layers: int, length: int, batch: int, vocabulary: int) -> Case:
    """A decoder with causal attention, trained with AdamW and clipped gradients."""
    heads = width // 32
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"qkv{i}": (width, 3 * width), f"out{i}": (width, width), f"up{i}": (width, 4 * width)}
        shapes |= {f"down{i}": (4 * width, width)}

    def normed(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss(p: Any, tokens: Any) -> Any:
        x = p["embed"][tokens]
        mask = jnp.tril(jnp.ones((length, length), bool))
        for i in range(layers):
            q, k, v = jnp.split(normed(x) @ p[f"qkv{i}"], 3, axis=-1)
            q, k, v = (t.reshape(-1, length, heads, width // heads) for t in (q, k, v))
            scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / np.sqrt(width // heads)
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            x = x + jnp.einsum("bhlm,bmhd->blhd", weights, v).reshape(-1, length, width) @ p[f"out{i}"]
            x = x + jax.nn.gelu(normed(x) @ p[f"up{i}"]) @ p[f"down{i}"]
        scores = normed(x) @ p["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(scores[:, :-1], tokens[:, 1:]).mean()

    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length)).astype("i4")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return _case(f"transformer-{width}x{layers}", lambda key: _weights(key, shapes), loss, tokens, optimizer)


def convolutional(batch: int, size: int, widths: Sequence[int]) -> Case:
    """Convolutions of stride two and a dense head, with momentum."""
    shapes: dict[str, tuple[int, ...]] = {}
    channels = 3
    for i, width in enumerate(widths):
        shapes[f"c{i}"] = (3, 3, channels, width)
        channels = width
    shapes["head"] = (channels, 10)

    def loss(p: Any, data: Any) -> Any:
        x, y = data
        for i in range(len(widths)):
            x = jax.lax.conv_general_dilated(
                x, p[f"c{i}"], (2, 2) if i else (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return optax.softmax_cross_entropy_with_integer_labels(x.mean((1, 2)) @ p["head"], y).mean()

    draw = np.random.default_rng(0)
    data = (draw.normal(size=(batch, size, size, 3)).astype("f4"), draw.integers(0, 10, batch).astype("i4"))
    return _case("convolutional", lambda key: _weights(key, shapes), loss, data, optax.sgd(0.1, momentum=0.9))


def recurrent(batch: int, length: int, width: int) -> Case:
    """An LSTM over time, as a scan, with Adam."""
    shapes = {"wx": (width, 4 * width), "wh": (width, 4 * width), "b": (4 * width,), "head": (width, width)}

    def loss(p: Any, data: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((batch, width))
        _, hidden = jax.lax.scan(cell, (zero, zero), data)
        return jnp.mean((hidden @ p["head"] - data) ** 2)

    data = np.random.default_rng(0).normal(size=(length, batch, width)).astype("f4")
    return _case("recurrent", lambda key: _weights(key, shapes), loss, data, optax.adam(1e-3))


def embedding(batch: int, words: int, vocabulary: int, width: int) -> Case:
    """A bag of words over a large table, with AdaGrad."""
    shapes = {"table": (vocabulary, width), "w": (width, width), "head": (width, 64)}

    def loss(p: Any, data: Any) -> Any:
        tokens, y = data
        x = jnp.tanh(p["table"][tokens].mean(1) @ p["w"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], y).mean()

    draw = np.random.default_rng(0)
    data = (draw.integers(0, vocabulary, (batch, words)).astype("i4"), draw.integers(0, 64, batch).astype("i4"))
    return _case("embedding", lambda key: _weights(key, shapes), loss, data, optax.adagrad(0.1))


def cases(small: bool = False) -> list[Case]:
    """All programs; `small` for a quick look."""
    if small:
        return [mlp("mlp", (64, 128, 16), 64, optax.sgd(0.1))]
    return [
        mlp("mlp-square", (1024,) * 5, 512, optax.sgd(0.1)),
        mlp("mlp-wide-adam", (256, 4096, 4096, 64), 256, optax.adam(1e-3)),
        transformer(256, 3, 128, 8, 2048),
        convolutional(32, 32, (32, 64, 128)),
        recurrent(64, 32, 384),
        embedding(512, 32, 20000, 128),
    ]
