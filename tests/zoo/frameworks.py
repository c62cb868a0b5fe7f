"""The same kinds of step as users of flax (NNX and Linen), Haiku and Equinox write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

from .base import Arguments, Case, Program, cast, drawn_like, functional
from .layers import cross_entropy, generator, integers, normal, token_batch

WIDTH, HEADS, HIDDEN, TIME, VOCABULARY = 64, 8, 128, 16, 128


def in_place(step: Any, objects: Callable[[], tuple[Any, ...]], batch: Callable[[int], Any], dtype: Any) -> Case:
    """A case whose step mutates NNX objects, its leading arguments; every fresh copy owns its buffers."""
    graph, shapes = nnx.split(nnx.eval_shape(objects))

    def fresh() -> Arguments:
        copies = nnx.merge(graph, drawn_like(shapes, 40, dtype))
        return (*copies, batch(0)), {}

    return Case(
        step=step,
        fresh=fresh,
        advance=lambda args, kwargs, out, i: ((*args[:-1], batch(i + 1)), kwargs),
        observe=lambda args, kwargs, out: {"state": nnx.to_pure_dict(nnx.state(args[:-1])), "out": out},
    )


class GptBlock(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.norm_attention = nnx.LayerNorm(WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dtype=dtype, use_bias=False, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.norm_mlp = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, mask: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = x + self.attention(self.norm_attention(x), mask=mask, deterministic=False, rngs=rngs)
        hidden = self.down(nnx.gelu(self.up(self.norm_mlp(x))))
        return x + self.dropout(hidden, deterministic=False, rngs=rngs)


class Gpt(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (TIME, WIDTH), jnp.float32))
        self.blocks = nnx.List([GptBlock(dtype, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = self.embedding(tokens) + self.position[...][None]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask, rngs)
        return self.embedding.attend(self.norm(x))


def gpt_nnx(dtype: Any) -> Case:
    def step(
        model: Gpt, optimizer: nnx.Optimizer[Gpt], rngs: nnx.Rngs, batch: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        def loss_of(model: Gpt, rngs: nnx.Rngs) -> jax.Array:
            return jnp.mean(cross_entropy(model(batch["tokens"], rngs), batch["targets"]))

        loss, grads = nnx.value_and_grad(loss_of)(model, rngs)
        optimizer.update(model, grads)
        return {"loss": loss, "norm": optax.tree.norm(grads)}

    def objects() -> tuple[Gpt, nnx.Optimizer[Gpt], nnx.Rngs]:
        model = Gpt(dtype, nnx.Rngs(40))
        return model, nnx.Optimizer(model, optax.adamw(1e-3, eps=1e-6), wrt=nnx.Param), nnx.Rngs(dropout=41)

    return in_place(step, objects, lambda i: token_batch(40, i, 16, TIME, VOCABULARY), dtype)


def attention_in_float64(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Without mask and dropout; `jax.nn.dot_product_attention`, which NNX calls, has its softmax in float32."""
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), value)


class VitBlock(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.norm_attention = nnx.LayerNorm(WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        own: Any = {"attention_fn": attention_in_float64} if jnp.dtype(dtype) == jnp.float64 else {}
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dtype=dtype, use_bias=False, decode=False, rngs=rngs, **own
        )
        self.norm_mlp = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, HIDDEN, dtype=dtype, rngs=rngs),
            nnx.gelu,
            nnx.Dropout(0.1, rngs=rngs),
            nnx.Linear(HIDDEN, WIDTH, dtype=dtype, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Vit(nnx.Module):
    """Patches of 4 x 4 by a strided convolution, a class token, two blocks; dropout keys live in the model."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), padding="VALID", dtype=dtype, rngs=rngs)
        self.token = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 1, WIDTH), jnp.float32))
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 17, WIDTH), jnp.float32))
        self.blocks = nnx.List([VitBlock(dtype, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 16, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images).reshape(images.shape[0], -1, WIDTH)
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, WIDTH))
        x = jnp.concatenate([token, x], axis=1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def vit_nnx(dtype: Any) -> Case:
    def step(model: Vit, optimizer: nnx.Optimizer[Vit], batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def loss_of(model: Vit) -> tuple[jax.Array, jax.Array]:
            logits = model(batch["images"])
            return jnp.mean(cross_entropy(logits, batch["labels"])), logits

        (loss, logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimizer.update(model, grads)
        return loss, logits

    def batch(i: int) -> dict[str, jax.Array]:
        rng = generator(42, i)
        return {"images": normal(rng, (16, 16, 16, 3), dtype), "labels": integers(rng, (16,), 16)}

    def objects() -> tuple[Vit, nnx.Optimizer[Vit]]:
        model = Vit(dtype, nnx.Rngs(params=42, dropout=43))
        model.train()
        return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)

    return in_place(step, objects, batch, dtype)


class LinenGpt(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        x = embedding(tokens) + self.param("position", nn.initializers.normal(0.1), (TIME, WIDTH))[None]
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            y = nn.LayerNorm(dtype=self.dtype, use_bias=False)(x)
            x = x + nn.MultiHeadDotProductAttention(
                HEADS, dtype=self.dtype, use_bias=False, dropout_rate=0.1, deterministic=False
            )(y, mask=mask)
            y = nn.Dense(HIDDEN, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(y)))
        return embedding.attend(nn.LayerNorm(dtype=self.dtype)(x))


class KeyedState(train_state.TrainState):
    key: jax.Array


def gpt_linen(dtype: Any) -> Case:
    """Global-norm clipping before AdamW, a mean over unmasked tokens, dropout keys folded from the step count."""
    model = LinenGpt(dtype)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-6, weight_decay=0.01))

    def batch(i: int) -> dict[str, jax.Array]:
        return token_batch(44, i, 16, TIME, VOCABULARY)

    def step(state: KeyedState, batch: dict[str, jax.Array]) -> tuple[KeyedState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)

        def loss_of(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["tokens"], rngs={"dropout": key})
            mask = batch["mask"].astype(logits.dtype)
            return jnp.sum(cross_entropy(logits, batch["targets"]) * mask) / jnp.sum(mask)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.tree.norm(grads)}

    keys = {"params": jax.random.key(44), "dropout": jax.random.key(45)}
    shapes = jax.eval_shape(model.init, keys, batch(0)["tokens"])["params"]

    def state() -> KeyedState:
        params = drawn_like(shapes, 44, dtype)
        state = KeyedState.create(apply_fn=model.apply, params=params, tx=transform, key=jax.random.key(46))
        return state.replace(step=jnp.zeros((), jnp.int32))

    return functional(step, state, batch)


def haiku_state(dtype: Any) -> Case:
    """hk.transform_with_state: batch normalization keeps running statistics, dropout draws from the step's key."""

    def network(x: jax.Array) -> jax.Array:
        x = hk.Linear(128, with_bias=False)(x)
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training=True)
        x = hk.dropout(hk.next_rng_key(), 0.1, jax.nn.gelu(x))
        return hk.nets.MLP([128, 32], activation=jnp.tanh)(x)

    model = hk.transform_with_state(network)
    transform = optax.sgd(0.1, momentum=0.9)

    def step(
        params: hk.Params, state: hk.State, optimizer: optax.OptState, key: jax.Array, x: jax.Array, y: jax.Array
    ) -> tuple[hk.Params, hk.State, optax.OptState, jax.Array]:
        def loss_of(params: hk.Params) -> tuple[jax.Array, hk.State]:
            out, new_state = model.apply(params, state, key, x)
            return jnp.mean(jnp.square(out - y)), new_state

        (loss, state_out), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, optimizer = transform.update(grads, optimizer)
        stepped: Any = optax.apply_updates(params, updates)
        return stepped, state_out, optimizer, loss

    def batch(i: int) -> tuple[jax.Array, ...]:
        rng = generator(47, i)
        return jax.random.fold_in(jax.random.key(47), i), normal(rng, (16, 64), dtype), normal(rng, (16, 32), dtype)

    drawn = jax.jit(model.init)(jax.random.key(48), jnp.zeros((16, 64), jnp.float32))

    def fresh() -> Arguments:
        params, state = cast(drawn, dtype)
        return (params, state, transform.init(params), *batch(0)), {}

    return Case(
        step=step,
        fresh=fresh,
        advance=lambda args, kwargs, out, i: ((*out[:3], *batch(i + 1)), {}),
        observe=lambda args, kwargs, out: out,
    )


class Mixer(eqx.Module):
    """An Equinox model with leaves that are no arrays: activation functions, sizes, a flag."""

    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    scale: float
    residual: bool = eqx.field(static=True)

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(32, WIDTH, dtype=jnp.float32, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, dtype=jnp.float32, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH, dtype=jnp.float32)
        self.mlp = eqx.nn.MLP(WIDTH, 32, HIDDEN, depth=2, activation=jax.nn.silu, dtype=jnp.float32, key=keys[2])
        self.scale = 0.5
        self.residual = True

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: (time, 32), one example."""
        x = jax.vmap(self.embed)(x)
        normed = jax.vmap(self.norm)(x)
        mixed = self.scale * self.attention(normed, normed, normed)
        return jax.vmap(self.mlp)(x + mixed if self.residual else mixed)


def equinox_module(dtype: Any) -> Case:
    transform = optax.adam(1e-3, eps=1e-5)

    @eqx.filter_value_and_grad
    def loss_of(model: Mixer, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jax.vmap(model)(x) - y))

    def step(
        model: Mixer, optimizer: optax.OptState, x: jax.Array, y: jax.Array
    ) -> tuple[Mixer, optax.OptState, jax.Array]:
        loss, grads = loss_of(model, x, y)
        updates, optimizer = transform.update(grads, optimizer, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), optimizer, loss

    def batch(i: int) -> tuple[jax.Array, jax.Array]:
        rng = generator(49, i)
        return normal(rng, (16, 8, 32), dtype), normal(rng, (16, 8, 32), dtype)

    drawn, rest = eqx.partition(Mixer(jax.random.key(49)), eqx.is_array)

    def fresh() -> Arguments:
        model = eqx.combine(cast(drawn, dtype), rest)
        return (model, transform.init(eqx.filter(model, eqx.is_inexact_array)), *batch(0)), {}

    return Case(
        step=step,
        fresh=fresh,
        advance=lambda args, kwargs, out, i: ((*out[:2], *batch(i + 1)), {}),
        observe=lambda args, kwargs, out: eqx.filter(out, eqx.is_array),
    )


FRAMEWORKS = (
    Program(
        "gpt_nnx",
        gpt_nnx,
        True,
        "flax NNX objects updated in place, tied embeddings, dropout from an nnx.Rngs argument",
    ),
    Program(
        "gpt_linen", gpt_linen, True, "flax Linen TrainState, tied embeddings, dropout, clipping, AdamW, masked loss"
    ),
    Program("vit_nnx", vit_nnx, True, "vision transformer in NNX; dropout keys inside the model"),
    Program("haiku_state", haiku_state, False, "hk.transform_with_state; batch statistics couple the examples"),
    Program("equinox_module", equinox_module, True, "eqx.Module passed whole, with leaves that are no arrays"),
)
