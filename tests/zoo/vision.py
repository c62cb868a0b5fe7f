"""Convolutions, pooling and resizing; batch statistics in flax Linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .base import Case, Program, drawn_like, functional
from .layers import Params, cross_entropy, dense, dense_init, generator, integers, normal, sgd, weight

LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolve(
    x: jax.Array, kernel: jax.Array, stride: int = 1, dilation: int = 1, groups: int = 1, padding: str = "SAME"
) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=LAYOUT,
        feature_group_count=groups,
    )


def image_batch(seed: int, i: int, dtype: Any, channels: int = 8, size: int = 16, classes: int = 16) -> Params:
    rng = generator(seed, i)
    return {"image": normal(rng, (16, size, size, channels), dtype), "label": integers(rng, (16,), classes)}


def trained(
    loss_of: Callable[[Any, Params], jax.Array], rate: float
) -> Callable[[Params, Params], tuple[Params, Params]]:
    """A step of SGD with momentum on `loss_of(params, batch)`."""

    def step(state: Params, batch: Params) -> tuple[Params, Params]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
        return {"params": sgd(state["params"], velocity, rate), "velocity": velocity}, {"loss": loss}

    return step


def at_rest(params: Params) -> Params:
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


def classify(params: Params, features: jax.Array, label: jax.Array) -> jax.Array:
    return jnp.mean(cross_entropy(dense(params, jnp.mean(features, axis=(1, 2))), label))


class Residual(nn.Module):
    features: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def norm() -> nn.BatchNorm:
            return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)

        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False, dtype=self.dtype)(x)
        y = nn.Conv(self.features, (3, 3), use_bias=False, dtype=self.dtype)(nn.silu(norm()(y)))
        if self.strides != 1:
            x = nn.Conv(self.features, (1, 1), self.strides, use_bias=False, dtype=self.dtype)(x)
        return nn.silu(x + norm()(y))


class ResNet(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3), dtype=self.dtype)(x)
        for features, strides in ((16, 1), (32, 2), (64, 2)):
            x = Residual(features, strides, self.dtype)(x)
        return nn.Dense(16, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


def resnet(dtype: Any) -> Case:
    model = ResNet(dtype)
    transform = optax.sgd(0.05, momentum=0.9, nesterov=True)

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> tuple[jax.Array, Params]:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            changed: Any
            logits, changed = model.apply(variables, batch["image"], mutable=["batch_stats"])
            return jnp.mean(cross_entropy(logits, batch["label"])), changed["batch_stats"]

        (loss, statistics), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, optimizer = transform.update(grads, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": statistics, "optimizer": optimizer}, {"loss": loss}

    shapes = jax.eval_shape(model.init, jax.random.key(50), jnp.zeros((16, 16, 16, 8), dtype))

    def state() -> Params:
        variables = drawn_like(shapes, 50, dtype)
        return {**variables, "optimizer": transform.init(variables["params"])}

    return functional(step, state, lambda i: image_batch(50, i, dtype))


def unet(dtype: Any) -> Case:
    """Down by strided convolutions, up by transposed ones, skip connections joined on channels; predicts an image."""

    def up(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=LAYOUT)

    def loss_of(params: Params, batch: Params) -> jax.Array:
        x0 = jax.nn.silu(convolve(batch["image"], params["in"]))
        x1 = jax.nn.silu(convolve(x0, params["down1"], stride=2))
        x2 = jax.nn.silu(convolve(x1, params["down2"], stride=2))
        x2 = x2 + jax.nn.silu(convolve(x2, params["middle"]))
        y1 = jnp.concatenate([jax.nn.silu(up(x2, params["up2"])), x1], axis=-1)
        y0 = jnp.concatenate([jax.nn.silu(up(y1, params["up1"])), x0], axis=-1)
        return jnp.mean(jnp.square(convolve(y0, params["out"]) - batch["target"]))

    def state() -> Params:
        rng = generator(51)
        shapes = {
            "in": (3, 3, 8, 16),
            "down1": (3, 3, 16, 32),
            "down2": (3, 3, 32, 64),
            "middle": (3, 3, 64, 64),
            "up2": (3, 3, 64, 32),
            "up1": (3, 3, 64, 16),
            "out": (3, 3, 32, 8),
        }
        return at_rest({name: weight(rng, shape, dtype) for name, shape in shapes.items()})

    def batch(i: int) -> Params:
        rng = generator(51, i)
        return {name: normal(rng, (16, 16, 16, 8), dtype) for name in ("image", "target")}

    return functional(trained(loss_of, 0.2), state, batch)


def grouped_dilated(dtype: Any) -> Case:
    """Grouped, depthwise, dilated, and grouped-strided convolutions, and a transposed one by input dilation."""

    def loss_of(params: Params, batch: Params) -> jax.Array:
        x = convolve(batch["image"], params["in"])
        x = x + jnp.tanh(convolve(x, params["grouped"], groups=4))
        x = x + jnp.tanh(convolve(x, params["depthwise"], groups=32, dilation=2))
        x = jnp.tanh(convolve(x, params["strided"], stride=2, groups=2, padding="VALID"))
        x = jax.lax.conv_general_dilated(
            x, params["spread"], (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2), dimension_numbers=LAYOUT
        )
        return classify(params["head"], jnp.tanh(x), batch["label"])

    def state() -> Params:
        rng = generator(52)
        shapes = {
            "in": (1, 1, 8, 32),
            "grouped": (3, 3, 8, 32),
            "depthwise": (3, 3, 1, 32),
            "strided": (3, 3, 16, 64),
            "spread": (3, 3, 64, 64),
        }
        kernels = {name: weight(rng, shape, dtype) for name, shape in shapes.items()}
        return at_rest({**kernels, "head": dense_init(rng, 64, 16, dtype)})

    return functional(trained(loss_of, 0.1), state, lambda i: image_batch(52, i, dtype))


def strided(dtype: Any) -> Case:
    """Strides 2 and 3 without padding in NCHW, where batch and output channels both invite sharding."""

    def conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    def loss_of(params: Params, batch: Params) -> jax.Array:
        x = jnp.transpose(batch["image"], (0, 3, 1, 2))
        x = jax.nn.gelu(conv(x, params["first"], 2))
        x = jax.nn.gelu(conv(x, params["second"], 3))
        return jnp.mean(cross_entropy(dense(params["head"], x.reshape(x.shape[0], -1)), batch["label"]))

    def state() -> Params:
        rng = generator(53)
        kernels = {
            "first": weight(rng, (32, 8, 3, 3), dtype, 72),
            "second": weight(rng, (64, 32, 4, 4), dtype, 512),
        }
        return at_rest({**kernels, "head": dense_init(rng, 64 * 16, 16, dtype)})

    return functional(trained(loss_of, 0.02), state, lambda i: image_batch(53, i, dtype, size=32))


def max_pool(dtype: Any) -> Case:
    """Max pooling and average pooling by reduce_window, a running maximum over rows, and biases per channel."""

    def loss_of(params: Params, batch: Params) -> jax.Array:
        x = convolve(batch["image"], params["first"]) + params["bias"].reshape(1, 1, 1, -1)
        x = jax.lax.reduce_window(jnp.tanh(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jnp.tanh(convolve(x, params["second"]))
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") / 9
        x = x + nn.max_pool(x, (3, 3), strides=(1, 1), padding="SAME")
        return classify(params["head"], x + jax.lax.cummax(x, axis=1), batch["label"])

    def state() -> Params:
        rng = generator(54)
        params = {
            "first": weight(rng, (3, 3, 8, 32), dtype),
            "bias": normal(rng, (32,), dtype, 0.1),
            "second": weight(rng, (3, 3, 32, 64), dtype),
            "head": dense_init(rng, 64, 16, dtype),
        }
        return at_rest(params)

    return functional(trained(loss_of, 0.02), state, lambda i: image_batch(54, i, dtype))


def image_operations(dtype: Any) -> Case:
    """Bilinear and cubic resizing, flips by a per-example mask, shifts, padding, crops, bilinear sampling at points."""

    def loss_of(params: Params, batch: Params) -> jax.Array:
        image = batch["image"]
        image = jnp.where(batch["flip"][:, None, None, None], image[:, :, ::-1], image)
        x = jnp.tanh(convolve(image, params["first"]))
        small = jax.image.resize(x, (x.shape[0], 8, 8, x.shape[3]), "bilinear")
        small = jnp.tanh(convolve(jnp.roll(small, 1, axis=1), params["second"]))
        large = jax.image.resize(small, x.shape, "cubic")
        padded = jnp.pad(x + large, ((0, 0), (1, 1), (2, 0), (0, 0)), mode="reflect")
        x = padded[:, 1:-1, :-2] - jnp.flip(large, axis=1)
        # Every example samples a channel mean at its own points, as a spatial transformer does.
        mean = jnp.mean(x, axis=-1)
        sampled = jax.vmap(lambda m, p: jax.scipy.ndimage.map_coordinates(m, [p[0], p[1]], order=1))(
            mean, batch["points"]
        )
        return classify(params["head"], x, batch["label"]) + jnp.mean(jnp.square(sampled))

    def state() -> Params:
        rng = generator(55)
        kernels = {name: weight(rng, (3, 3, n, 32), dtype) for name, n in (("first", 8), ("second", 32))}
        return at_rest({**kernels, "head": dense_init(rng, 32, 16, dtype)})

    def batch(i: int) -> Params:
        rng = generator(55, i)
        points = jnp.array(rng.uniform(1, 14, (16, 2, 24)), dtype=dtype)
        return {**image_batch(55, i, dtype), "points": points, "flip": jnp.array(rng.integers(0, 2, (16,)) == 1)}

    return functional(trained(loss_of, 0.1), state, batch)


VISION = (
    Program("resnet", resnet, False, "Linen, batch normalization with running statistics"),
    Program("unet", unet, True, "transposed convolutions and skip connections"),
    Program("grouped_dilated_convolution", grouped_dilated, True, "groups, depthwise, dilation of kernel and of input"),
    Program("strided_convolution", strided, True, "strides 2 and 3 in NCHW; batch and output channels divide the mesh"),
    Program("max_pool", max_pool, True, "reduce_window with max and sum, select_and_scatter, cummax"),
    Program("image_operations", image_operations, True, "resize, roll, reflect padding, flip, sampling at points"),
)
