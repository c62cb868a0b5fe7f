"""Vision train steps at published sizes, as shapes only: ViT-B/16 (AdamW), ResNet-50 and VGG-19 (SGD with momentum).

Sizes: ViT (Dosovitskiy et al., 2021, table 1); ResNet (He et al., 2016, table 1), strides in the 3x3 convolutions; VGG
(Simonyan and Zisserman, 2015, table 1, E).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

CLASSES = 1000
SIDE = 224


class Block(nn.Module):
    """Attention and feed-forward, normalized before."""

    width: int
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, deterministic=True)(h, h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(h))
        return x + nn.Dense(self.width, dtype=self.dtype)(h)


class ViT(nn.Module):
    """Patches of 16 x 16, a class token, learned positions."""

    dtype: Any
    layers: int = 12
    width: int = 768
    heads: int = 12

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (16, 16), (16, 16), "VALID", dtype=self.dtype)(image)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width)).astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.width)), x], axis=1)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], self.width))
        x = x + positions.astype(self.dtype)
        for _ in range(self.layers):
            x = Block(self.width, self.heads, self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a projection where shapes differ."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(x: jax.Array, features: int, side: int, stride: int = 1) -> jax.Array:
            x = nn.Conv(features, (side, side), (stride, stride), use_bias=False, dtype=self.dtype)(x)
            return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x)

        y = nn.relu(conv(x, self.features, 1))
        y = nn.relu(conv(y, self.features, 3, self.stride))
        y = conv(y, 4 * self.features, 1)
        if x.shape != y.shape:
            x = conv(x, 4 * self.features, 1, self.stride)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet-50."""

    dtype: Any
    blocks: tuple[int, ...] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.blocks):
            for k in range(count):
                x = Bottleneck(64 << stage, 2 if stage and not k else 1, self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean(axis=(1, 2)))


class VGG19(nn.Module):
    """Configuration E: sixteen convolutions, three fully connected layers of which the first holds most weights."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(count):
                x = nn.relu(nn.Conv(features, (3, 3), dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(4096, dtype=self.dtype)(x))
        return nn.Dense(CLASSES, dtype=self.dtype)(x)


def make_vision_step(
    model: nn.Module, optimizer: optax.GradientTransformation, batch: int, dtype: Any
) -> tuple[Callable[..., Any], Any, Any]:
    """(step, abstract state, abstract batch); running statistics travel in the state where the model has any."""

    def make_state(key: jax.Array) -> dict[str, Any]:
        variables: Any = model.init(key, jnp.zeros((1, SIDE, SIDE, 3), dtype))
        return {**variables, "opt": optimizer.init(variables["params"])}

    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        statistics = {k: v for k, v in state.items() if k not in ("params", "opt")}

        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            changed: Any
            logits, changed = model.apply({"params": params, **statistics}, batch["image"], mutable=list(statistics))
            wide = logits.astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(wide, batch["label"]).mean(), changed

        (loss, changed), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, **changed}, {"loss": loss}

    state = jax.eval_shape(make_state, jax.random.key(0))
    image = jax.ShapeDtypeStruct((batch, SIDE, SIDE, 3), dtype)
    return step, state, {"image": image, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)}


def vit(batch: int, dtype: Any) -> tuple[Callable[..., Any], Any, Any]:
    """ViT-B/16 with AdamW."""
    return make_vision_step(ViT(dtype), optax.adamw(1e-3, weight_decay=0.1), batch, dtype)


def resnet50(batch: int, dtype: Any) -> tuple[Callable[..., Any], Any, Any]:
    """ResNet-50 with SGD and momentum."""
    return make_vision_step(ResNet(dtype), optax.sgd(0.1, momentum=0.9), batch, dtype)


def vgg19(batch: int, dtype: Any) -> tuple[Callable[..., Any], Any, Any]:
    """As `make_vision_step`."""
    return make_vision_step(VGG19(dtype), optax.sgd(0.01, momentum=0.9), batch, dtype)
