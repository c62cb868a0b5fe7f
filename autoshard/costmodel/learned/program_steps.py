"""Random whole train steps: a model's loss, its gradient, an optimizer's update.

Perceptrons, convolutional nets, transformers and recurrent nets; depth, widths, activations, norms, residuals, dtype
and optimizer are drawn for each program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np

from autoshard.costmodel.learned.programs import Program
from autoshard.costmodel.learned.untyped import jnp, lax, nn, value_and_grad

Array = Any
Layer = Callable[[list[Array], Array], Array]

ACTIVATIONS: tuple[Callable[[Array], Array], ...] = (
    nn.relu,
    nn.gelu,
    nn.silu,
    jnp.tanh,
    nn.softplus,
    nn.leaky_relu,
    lambda v: nn.gelu(v, approximate=False),
    lambda v: lax.max(v, jnp.zeros_like(v)) ** 2,
)

LEAST_FLOPS, MOST_FLOPS = 2e8, 8e9
"""The operations of a step stay below a number drawn between these: up to some 100 ms on one core."""


@final
class _Model:
    """A model under construction: parameters' shapes, and what is done with them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.shapes: list[tuple[int, ...]] = []
        self.activation = ACTIVATIONS[int(rng.integers(len(ACTIVATIONS)))]
        self.dtype = jnp.bfloat16 if rng.random() < 0.2 else jnp.float32
        self.norm = str(rng.choice(("none", "layer", "rms")))
        self.most_flops = math.exp(rng.uniform(math.log(LEAST_FLOPS), math.log(MOST_FLOPS)))

    def weight(self, *shape: int) -> int:
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def pick(self, *values: int) -> int:
        return int(self.rng.choice(values))

    def size(self, least: int, most: int) -> int:
        """Log-uniform; mostly a power of two or a multiple of 16 or 8, as people choose."""
        value = math.exp(self.rng.uniform(math.log(least), math.log(most)))
        multiple = int(self.rng.choice((0, 16, 8, 1), p=(0.4, 0.25, 0.2, 0.15)))
        rounded = round(value / multiple) * multiple if multiple else 2 ** round(math.log2(value))
        return min(max(rounded, least), most)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def normed(self, width: int) -> Layer:
        if self.norm == "none":
            return lambda p, h: h
        scale, rms = self.weight(width), self.norm == "rms"

        def layer(p: list[Array], h: Array) -> Array:
            wide = h.astype(jnp.float32)
            if not rms:
                wide = wide - wide.mean(-1, keepdims=True)
            wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
            return wide.astype(h.dtype) * _along(p[scale], h)

        return layer

    def dense(self, inner: int, outer: int, bias: bool = True) -> Layer:
        w = self.weight(inner, outer)
        b = self.weight(outer) if bias else -1

        def layer(p: list[Array], h: Array) -> Array:
            y = h @ p[w]
            return y + _along(p[b], y) if bias else y

        return layer


def _along(v: Array, h: Array) -> Array:
    return lax.broadcast_in_dim(v, h.shape, (h.ndim - 1,))


def make_step(seed: int) -> Program:
    """The step of a seed."""
    rng = np.random.default_rng([seed, 2])
    family = str(rng.choice(("mlp", "conv", "attention", "recurrent", "embedding"), p=(0.27, 0.17, 0.34, 0.08, 0.14)))
    model = _Model(rng)
    forward, inputs, bounds = _FAMILIES[family](model)
    update = _optimizer(model)
    count = len(model.shapes)
    slots = _SLOTS[update]
    dtype = model.dtype

    def loss(params: list[Array], batch: tuple[Array, ...]) -> Array:
        return forward([p.astype(dtype) for p in params], batch)

    def fun(*arrays: Array) -> tuple[Array, ...]:
        params, batch = list(arrays[:count]), arrays[count * (1 + slots) :]
        value, grads = value_and_grad(loss)(params, batch)
        new: list[Array] = []
        states: list[list[Array]] = [[] for _ in range(slots)]
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            moments = [arrays[count * (1 + s) + i] for s in range(slots)]
            changed, moments = _UPDATES[update](p, g, moments)
            new.append(changed)
            for s in range(slots):
                states[s].append(moments[s])
        return (value, *new, *(m for state in states for m in state))

    weights = [jax.ShapeDtypeStruct(s, jnp.float32) for s in model.shapes]
    return Program(seed, family, fun, (*(weights * (1 + slots)), *inputs), (*([0] * count * (1 + slots)), *bounds))


def _optimizer(model: _Model) -> str:
    return str(model.rng.choice(tuple(_UPDATES)))


def _sgd(p: Array, g: Array, m: list[Array]) -> tuple[Array, list[Array]]:
    return p - 0.01 * g, m


def _momentum(p: Array, g: Array, m: list[Array]) -> tuple[Array, list[Array]]:
    v = 0.9 * m[0] + g
    return p - 0.01 * v, [v]


def _adam(p: Array, g: Array, m: list[Array]) -> tuple[Array, list[Array]]:
    a, b = 0.9 * m[0] + 0.1 * g, 0.999 * m[1] + 0.001 * g * g
    return p - 0.001 * a / (jnp.sqrt(jnp.abs(b)) + 1e-8), [a, b]


def _adamw(p: Array, g: Array, m: list[Array]) -> tuple[Array, list[Array]]:
    new, moments = _adam(p, g, m)
    return new - 0.0001 * p, moments


def _lion(p: Array, g: Array, m: list[Array]) -> tuple[Array, list[Array]]:
    return p - 0.001 * jnp.sign(0.9 * m[0] + 0.1 * g), [0.99 * m[0] + 0.01 * g]


_UPDATES: dict[str, Callable[[Array, Array, list[Array]], tuple[Array, list[Array]]]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adamw,
    "lion": _lion,
}
_SLOTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "lion": 1}

Built = tuple[Callable[[list[Array], tuple[Array, ...]], Array], tuple[jax.ShapeDtypeStruct, ...], tuple[int, ...]]


def _head(model: _Model, width: int) -> tuple[Callable[[list[Array], Array, Array], Array], int]:
    """A loss over rows: cross entropy of classes, or squared error (0 classes)."""
    classes = model.pick(0, 10, 100, 257, model.size(8, 2000))
    out = model.dense(width, classes or 1)

    def loss(p: list[Array], h: Array, labels: Array) -> Array:
        y = out(p, h).astype(jnp.float32)
        if not classes:
            return jnp.mean((y[..., 0] - labels.astype(jnp.float32)) ** 2)
        logs = nn.log_softmax(y)
        return -jnp.take_along_axis(logs, labels[..., None], axis=-1, mode="clip").mean()

    return loss, max(classes, 2)


def _mlp(model: _Model) -> Built:
    batch = model.size(16, 1024)
    widths = [model.size(32, 1024)]
    depth = model.pick(1, 2, 2, 3, 3, 4, 5, 6)
    same = model.chance(0.4)
    for _ in range(depth):
        n = widths[-1] if same and len(widths) > 1 else model.size(32, 2048)
        while 6.0 * batch * widths[-1] * n * depth > model.most_flops:
            n //= 2
        widths.append(n)
    residual, first = model.chance(0.4), model.chance(0.5)
    pairs = list(itertools.pairwise(widths))
    layers = [(model.dense(a, b, model.chance(0.8)), model.normed(a if first else b)) for a, b in pairs]
    loss, classes = _head(model, widths[-1])
    act = model.activation

    def forward(p: list[Array], batch_: tuple[Array, ...]) -> Array:
        h = batch_[0].astype(model.dtype)
        for dense, norm in layers:
            y = act(dense(p, norm(p, h))) if first else act(norm(p, dense(p, h)))
            h = h + y if residual and h.shape == y.shape else y
        return loss(p, h, batch_[1])

    x = jax.ShapeDtypeStruct((batch, widths[0]), jnp.float32)
    return forward, (x, jax.ShapeDtypeStruct((batch,), jnp.int32)), (0, classes)


def _conv(model: _Model) -> Built:
    batch, side = model.size(4, 64), model.pick(8, 12, 16, 20, 28, 32, 48)
    channels = model.pick(1, 3, 3, 8, 16)
    layers: list[tuple[int, int, Layer, bool]] = []
    flops, width, size = 0.0, channels, side
    pool = model.chance(0.4)
    for _ in range(model.pick(1, 2, 3, 4)):
        out, window, stride = model.size(8, 128), model.pick(1, 3, 3, 5), model.pick(1, 1, 2)
        flops += 6.0 * batch * size * size * window**2 * width * out / stride**2
        if flops > model.most_flops / 2 and layers:
            break
        kernel = model.weight(window, window, width, out)
        layers.append((kernel, stride, model.normed(out), pool and size >= 8))
        width, size = out, -(-size // stride)
        size = size // 2 if layers[-1][3] else size
    loss, classes = _head(model, width)
    act = model.activation

    def forward(p: list[Array], batch_: tuple[Array, ...]) -> Array:
        h = batch_[0].astype(model.dtype)
        for kernel, stride, norm, halve in layers:
            h = lax.conv_general_dilated(
                h, p[kernel], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = act(norm(p, h))
            if halve:
                a, b = h.shape[1] // 2 * 2, h.shape[2] // 2 * 2
                h = h[:, :a, :b].reshape(h.shape[0], a // 2, 2, b // 2, 2, h.shape[3]).mean(axis=(2, 4))
        return loss(p, h.mean(axis=(1, 2)), batch_[1])

    x = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32)
    return forward, (x, jax.ShapeDtypeStruct((batch,), jnp.int32)), (0, classes)


def _attention_block(model: _Model, width: int, heads: int, causal: bool) -> Layer:
    fused = model.chance(0.4)
    qkv = [model.dense(width, 3 * width, False)] if fused else [model.dense(width, width) for _ in range(3)]
    out, before, after = model.dense(width, width), model.normed(width), model.normed(width)
    grow = model.pick(1, 2, 3, 4)
    gated = model.chance(0.3)
    up, down = model.dense(width, grow * width), model.dense(grow * width, width)
    gate = model.dense(width, grow * width, False) if gated else None
    act = model.activation

    def layer(p: list[Array], h: Array) -> Array:
        b, n, _ = h.shape
        y = before(p, h)
        parts = jnp.split(qkv[0](p, y), 3, axis=-1) if fused else [f(p, y) for f in qkv]
        q, k, v = (part.reshape(b, n, heads, width // heads) for part in parts)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (1 / math.sqrt(width // heads))
        if causal:
            rows, columns = (lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (2, 3))
            scores = jnp.where(rows >= columns, scores, jnp.full_like(scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores, axis=-1), v)
        h = h + out(p, mixed.reshape(b, n, width))
        y = after(p, h)
        inner = act(up(p, y))
        return h + down(p, inner * gate(p, y) if gate is not None else inner)

    return layer


def _attention_flops(batch: int, length: int, width: int, heads: int) -> float:
    """Of a block; a weight of the softmax counts as the operations a product does in its time."""
    return batch * length * (72.0 * width * width + length * (12.0 * width + 600.0 * heads))


def _attention(model: _Model) -> Built:
    heads = model.pick(1, 2, 4, 8)
    width = max(model.size(48, 768) // heads, 4) * heads
    batch, length = model.pick(1, 2, 4, 8, 16), model.size(32, 512)
    depth = model.pick(1, 1, 2, 3)
    while _attention_flops(batch, length, width, heads) * depth > model.most_flops and batch * length > 16:
        batch, length = max(batch // 2, 1), length if batch > 1 else length // 2
    causal = model.chance(0.6)
    vocabulary = model.pick(0, 64, 257, 1000, 8000)
    table = model.weight(vocabulary, width) if vocabulary else -1
    blocks = [_attention_block(model, width, heads, causal) for _ in range(depth)]
    loss, classes = _head(model, width)

    def forward(p: list[Array], batch_: tuple[Array, ...]) -> Array:
        h = p[table].at[batch_[0]].get(mode="clip") if vocabulary else batch_[0].astype(model.dtype)
        for block in blocks:
            h = block(p, h)
        return loss(p, h, batch_[1])

    labels = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    x = labels if vocabulary else jax.ShapeDtypeStruct((batch, length, width), jnp.float32)
    return forward, (x, labels), (vocabulary, classes)


def _recurrent(model: _Model) -> Built:
    batch, length = model.size(4, 64), model.pick(8, 16, 24, 32)
    inner, width = model.size(16, 128), model.size(32, 256)
    gated = model.chance(0.5)
    read, keep = model.dense(inner, width), model.dense(width, width, False)
    gate = model.dense(width, width) if gated else None
    loss, classes = _head(model, width)
    act = model.activation

    def forward(p: list[Array], batch_: tuple[Array, ...]) -> Array:
        x = batch_[0].astype(model.dtype)

        def cell(h: Array, x_t: Array) -> tuple[Array, Array]:
            new = act(read(p, x_t) + keep(p, h))
            if gate is not None:
                z = nn.sigmoid(gate(p, h))
                new = z * h + (1 - z) * new
            return new, new

        h, _ = lax.scan(cell, jnp.zeros((batch, width), model.dtype), x)
        return loss(p, h, batch_[1])

    x = jax.ShapeDtypeStruct((length, batch, inner), jnp.float32)
    return forward, (x, jax.ShapeDtypeStruct((batch,), jnp.int32)), (0, classes)


def _embedding(model: _Model) -> Built:
    """A table, a sum or a mixing over the sequence, a perceptron."""
    batch, length = model.size(4, 128), model.size(4, 64)
    rows, width = model.pick(100, 500, 1000, 5000, 10000, 30000), model.size(16, 256)
    mixing = model.pick(0, 1, 2)
    table, inner = model.weight(rows, width), model.size(32, 512)
    first, second, norm = model.dense(width, inner), model.dense(inner, width), model.normed(width)
    mix = model.weight(length, length)
    loss, classes = _head(model, width)
    act = model.activation

    def forward(p: list[Array], batch_: tuple[Array, ...]) -> Array:
        h = p[table].at[batch_[0]].get(mode="clip")
        if mixing == 1:
            h = h + jnp.einsum("bld,lm->bmd", h, p[mix])
        elif mixing == 2:
            h = jnp.cumsum(h, axis=1) if length <= 8 else h * jnp.roll(h, 1, axis=1)
        h = norm(p, h + second(p, act(first(p, h))))
        return loss(p, h.mean(axis=1), batch_[1])

    x = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return forward, (x, jax.ShapeDtypeStruct((batch,), jnp.int32)), (rows, classes)


_FAMILIES: dict[str, Callable[[_Model], Built]] = {
    "mlp": _mlp,
    "conv": _conv,
    "attention": _attention,
    "recurrent": _recurrent,
    "embedding": _embedding,
}
