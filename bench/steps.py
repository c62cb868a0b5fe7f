"""Small train steps for benchmarks: step(state, batch) -> (state, loss), with state and batch."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Rng = np.random.Generator
Built = tuple[Callable[[Any, Any], tuple[Any, Any]], Any, Any]
Loss = Callable[[Any, Any], Any]


def draw(rng: Rng, *shape: int) -> jax.Array:
    """Normal with variance 1 / rows."""
    return jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, jnp.float32)


def integers(rng: Rng, below: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(0, below, shape), jnp.int32)


def trained(loss: Loss, parameters: Any, batch: Any, optimizer: optax.GradientTransformation | None) -> Built:
    """One step of an optimizer, of plain SGD for None."""
    rule = optax.sgd(0.01) if optimizer is None else optimizer

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        parameters, memory = state
        value, gradient = jax.value_and_grad(loss)(parameters, batch)
        updates, memory = rule.update(gradient, memory, parameters)
        return (optax.apply_updates(parameters, updates), memory), value

    return step, (parameters, rule.init(parameters)), batch


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def mlp(rng: Rng, optimizer: Any, batch: int, width: int, layers: int, function: Callable[[Any], Any]) -> Built:
    parameters = [(draw(rng, width, width), jnp.zeros(width)) for _ in range(layers)]

    def loss(parameters: Any, batch: Any) -> Any:
        x, y = batch
        for w, b in parameters:
            x = function(x @ w + b)
        return jnp.mean((x - y) ** 2)

    return trained(loss, parameters, (draw(rng, batch, width), draw(rng, batch, width)), optimizer)


def normalize(x: Any, scale: Any, offset: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + offset


def gpt(rng: Rng, batch: int, time: int, width: int, heads: int, layers: int, words: int, dropout: bool) -> Built:
    def block() -> dict[str, Any]:
        return {
            "qkv": draw(rng, width, 3 * width),
            "out": draw(rng, width, width),
            "up": draw(rng, width, 4 * width),
            "down": draw(rng, 4 * width, width),
            "norms": [(jnp.ones(width), jnp.zeros(width)) for _ in range(2)],
        }

    parameters = {
        "embed": draw(rng, words, width),
        "position": draw(rng, time, width),
        "blocks": [block() for _ in range(layers)],
        "head": draw(rng, width, words),
    }

    def loss(p: Any, batch: Any) -> Any:
        x, y, key = batch
        h = p["embed"][x] + p["position"]
        mask = jnp.tril(jnp.ones((time, time), bool))
        for i, w in enumerate(p["blocks"]):
            qkv = normalize(h, *w["norms"][0]) @ w["qkv"]
            q, k, v = jnp.split(qkv.reshape(*x.shape, heads, -1), 3, -1)
            scores = jnp.einsum("bthd,bshd->bhts", q, k) * (width // heads) ** -0.5
            scores = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
            if dropout:
                kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, scores.shape)
                scores = jnp.where(kept, scores / 0.9, 0.0)
            h = h + jnp.einsum("bhts,bshd->bthd", scores, v).reshape(h.shape) @ w["out"]
            h = h + jax.nn.gelu(normalize(h, *w["norms"][1]) @ w["up"]) @ w["down"]
        return cross_entropy(h @ p["head"], y)

    data = integers(rng, words, batch, time), integers(rng, words, batch, time), jax.random.key(0)
    return trained(loss, parameters, data, optax.adam(1e-3))


def convolve(x: Any, w: Any, stride: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)


def cnn(rng: Rng, batch: int = 16, side: int = 32, channels: int = 32) -> Built:
    c = channels
    parameters = [
        draw(rng, 3, 3, 3, c),
        0.2 * draw(rng, 3, 3, c, c),
        0.2 * draw(rng, 3, 3, c, 2 * c),
        draw(rng, 2 * c, 10),
    ]

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        x = jax.nn.relu(convolve(x, p[0]))
        x = jax.nn.relu(convolve(x, p[1]))
        x = jax.nn.relu(convolve(x, p[2], 2))
        return cross_entropy(x.mean((1, 2)) @ p[3], y)

    return trained(loss, parameters, (draw(rng, batch, side, side, 3), integers(rng, 10, batch)), None)


def resnet(rng: Rng, batch: int = 8, side: int = 32, channels: int = 32, blocks: int = 3) -> Built:
    c = channels
    first, last = draw(rng, 3, 3, 3, c), draw(rng, c, 10)
    middle = [(0.1 * draw(rng, 3, 3, c, c), 0.1 * draw(rng, 3, 3, c, c), jnp.ones(c)) for _ in range(blocks)]

    def scaled(x: Any, scale: Any) -> Any:
        mean = x.mean((0, 1, 2))
        variance = ((x - mean) ** 2).mean((0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale

    def loss(p: Any, batch: Any) -> Any:
        (x, y), (first, middle, last) = batch, p
        x = convolve(x, first)
        for a, b, scale in middle:
            x = jax.nn.relu(x + scaled(convolve(jax.nn.relu(scaled(convolve(x, a), scale)), b), scale))
        return cross_entropy(x.mean((1, 2)) @ last, y)

    data = draw(rng, batch, side, side, 3), integers(rng, 10, batch)
    return trained(loss, (first, middle, last), data, optax.sgd(0.01, 0.9))


def lstm(rng: Rng, batch: int = 32, time: int = 32, width: int = 128) -> Built:
    parameters = draw(rng, width, 4 * width), draw(rng, width, 4 * width), jnp.zeros(4 * width)

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch

        def cell(carry: Any, row: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ p[0] + h @ p[1] + p[2], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((batch[0].shape[1], width))
        return jnp.mean((jax.lax.scan(cell, (zero, zero), x)[1] - y) ** 2)

    data = draw(rng, time, batch, width), draw(rng, time, batch, width)
    return trained(loss, parameters, data, optax.adam(1e-3))


def embeddings(rng: Rng, optimizer: Any, words: int = 20000, width: int = 64, batch: int = 512, bag: int = 16) -> Built:
    parameters = draw(rng, words, width), draw(rng, width, 256), draw(rng, 256, 1)

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        return jnp.mean((jax.nn.relu(p[0][x].mean(1) @ p[1]) @ p[2] - y) ** 2)

    return trained(loss, parameters, (integers(rng, words, batch, bag), draw(rng, batch, 1)), optimizer)


STEPS: Mapping[str, Callable[[Rng], Built]] = {
    "mlp, sgd": partial(mlp, optimizer=None, batch=256, width=512, layers=3, function=jax.nn.relu),
    "mlp, adam": partial(mlp, optimizer=optax.adam(1e-3), batch=256, width=512, layers=3, function=jax.nn.relu),
    "small mlp": partial(mlp, optimizer=None, batch=64, width=128, layers=4, function=jnp.tanh),
    "wide mlp, adam": partial(mlp, optimizer=optax.adam(1e-3), batch=64, width=2048, layers=3, function=jax.nn.relu),
    "gpt": partial(gpt, batch=4, time=128, width=128, heads=4, layers=2, words=1000, dropout=False),
    "gpt, dropout": partial(gpt, batch=4, time=128, width=128, heads=4, layers=2, words=1000, dropout=True),
    "larger gpt": partial(gpt, batch=8, time=128, width=256, heads=8, layers=2, words=4000, dropout=False),
    "cnn": cnn,
    "residual net": resnet,
    "lstm": lstm,
    "embeddings, sgd": partial(embeddings, optimizer=None),
    "embeddings, adam": partial(embeddings, optimizer=optax.adam(1e-3)),
}
