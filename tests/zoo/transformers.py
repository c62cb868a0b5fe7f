"""Transformers in plain JAX: stacked layers, shared biases, dropout under remat, custom attention, token mixing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .base import Case, Program, functional
from .layers import (
    Params,
    attend,
    attention,
    attention_init,
    block,
    block_init,
    causal_bias,
    cross_entropy,
    dense,
    dense_init,
    feed_forward,
    gain,
    generator,
    layer_norm,
    normal,
    regression_batch,
    sgd,
    token_batch,
    weight,
)

WIDTH, HEADS, HIDDEN, TIME, VOCABULARY = 64, 8, 128, 16, 128


def masked_mean(losses: jax.Array, mask: jax.Array) -> jax.Array:
    mask = mask.astype(losses.dtype)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def scanned_remat(dtype: Any) -> Case:
    """Parameters of all layers stacked on a leading axis, scanned, each layer rematerialized; AdamW with a schedule."""
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 1e-3, 2, 10)
    transform = optax.adamw(schedule, eps=1e-6, weight_decay=0.01)

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> jax.Array:
            x = params["embedding"][batch["tokens"]] + params["position"][None]
            bias = causal_bias(TIME, x.dtype)

            @jax.checkpoint
            def body(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
                return block(layer, x, bias), None

            x, _ = jax.lax.scan(body, x, params["layers"])
            logits = layer_norm(params["gain"], x) @ params["unembedding"]
            return masked_mean(cross_entropy(logits, batch["targets"]), batch["mask"])

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, optimizer = transform.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, {"loss": loss}

    def state() -> Params:
        rng = generator(30)
        layers = [block_init(rng, WIDTH, HEADS, HIDDEN, dtype) for _ in range(4)]
        params = {
            "embedding": normal(rng, (VOCABULARY, WIDTH), dtype, 0.3),
            "position": normal(rng, (TIME, WIDTH), dtype, 0.3),
            "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
            "gain": gain(rng, WIDTH, dtype),
            "unembedding": weight(rng, (WIDTH, VOCABULARY), dtype),
        }
        return {"params": params, "optimizer": transform.init(params)}

    return functional(step, state, lambda i: token_batch(30, i, 16, TIME, VOCABULARY))


def encoder_decoder(dtype: Any) -> Case:
    """T5 in small: cross attention, and one relative-position bias used by every self-attention on both sides."""

    def relative_bias(table: jax.Array) -> jax.Array:
        distance = jnp.arange(TIME)[None, :] - jnp.arange(TIME)[:, None]
        bucket = jnp.clip(distance + 8, 0, 15)
        return jnp.transpose(table[bucket], (2, 0, 1))[None]

    def loss_of(params: Params, batch: Params) -> jax.Array:
        bias = relative_bias(params["relative"])
        memory = params["embedding"][batch["source"]]
        for layer in params["encoder"]:
            memory = block(layer, memory, bias)
        memory = layer_norm(params["gain_encoder"], memory)
        x = params["embedding"][batch["tokens"]]
        causal = bias + causal_bias(TIME, x.dtype)
        for layer in params["decoder"]:
            normed = layer_norm(layer["self"]["gain_attention"], x)
            x = x + attention(layer["self"]["attention"], normed, normed, causal)
            x = x + attention(layer["cross"], layer_norm(layer["gain_cross"], x), memory)
            x = x + feed_forward(layer["self"], x)
        logits = layer_norm(params["gain_decoder"], x) @ params["embedding"].T
        return masked_mean(cross_entropy(logits, batch["targets"]), batch["mask"])

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
        return {"params": sgd(state["params"], velocity, 0.05), "velocity": velocity}, {"loss": loss}

    def state() -> Params:
        rng = generator(31)

        def decoder_layer() -> Params:
            return {
                "self": block_init(rng, WIDTH, HEADS, HIDDEN, dtype),
                "cross": attention_init(rng, WIDTH, HEADS, dtype),
                "gain_cross": gain(rng, WIDTH, dtype),
            }

        params = {
            "embedding": normal(rng, (VOCABULARY, WIDTH), dtype, 0.2),
            "relative": normal(rng, (16, HEADS), dtype, 0.3),
            "encoder": [block_init(rng, WIDTH, HEADS, HIDDEN, dtype) for _ in range(2)],
            "decoder": [decoder_layer() for _ in range(2)],
            "gain_encoder": gain(rng, WIDTH, dtype),
            "gain_decoder": gain(rng, WIDTH, dtype),
        }
        return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}

    def batch(i: int) -> Params:
        return {
            **token_batch(31, i, 16, TIME, VOCABULARY),
            "source": token_batch(131, i, 16, TIME, VOCABULARY)["tokens"],
        }

    return functional(step, state, batch)


def dropout_remat(dtype: Any) -> Case:
    """Dropout inside a rematerialized block: the masks of forward and backward must be the same bits."""

    def dropout(key: jax.Array, x: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(key, 0.8, x.shape)
        return jnp.where(keep, x / 0.8, jnp.zeros_like(x))

    @jax.checkpoint
    def layer_of(layer: Params, x: jax.Array, key: jax.Array) -> jax.Array:
        attention_key, mlp_key = jax.random.split(key)
        normed = layer_norm(layer["gain_attention"], x)
        x = x + dropout(attention_key, attention(layer["attention"], normed, normed))
        return x + dropout(mlp_key, feed_forward(layer, x))

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        key, use = jax.random.split(state["key"])

        def loss_of(params: Params) -> jax.Array:
            x = batch["x"]
            for number, layer in enumerate(params["layers"]):
                x = layer_of(layer, x, jax.random.fold_in(use, number))
            return jnp.mean(jnp.square(dense(params["head"], x) - batch["y"]))

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        return {"params": sgd(state["params"], grads, 0.1), "key": key}, {"loss": loss, "grads": grads["head"]}

    def state() -> Params:
        rng = generator(32)
        layers = [block_init(rng, WIDTH, HEADS, HIDDEN, dtype) for _ in range(2)]
        return {"params": {"layers": layers, "head": dense_init(rng, WIDTH, 32, dtype)}, "key": jax.random.key(32)}

    return functional(step, state, lambda i: regression_batch(32, i, (16, TIME, WIDTH), 32, dtype))


@jax.custom_vjp
def saved_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attend(q, k, v)


def saved_attention_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Keeps the log of the softmax's denominator instead of its probabilities."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - log_sum), v)
    return out, (q, k, v, out, log_sum)


def saved_attention_backward(saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, log_sum = saved
    scale = q.shape[-1] ** -0.5
    p = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale - log_sum)
    row = jnp.einsum("bqhd,bqhd->bhq", g, out)[..., None]
    ds = p * (jnp.einsum("bqhd,bkhd->bhqk", g, v) - row) * scale
    return (
        jnp.einsum("bhqk,bkhd->bqhd", ds, k),
        jnp.einsum("bhqk,bqhd->bkhd", ds, q),
        jnp.einsum("bhqk,bqhd->bkhd", p, g),
    )


saved_attention.defvjp(saved_attention_forward, saved_attention_backward)


def custom_vjp_attention(dtype: Any) -> Case:
    def loss_of(params: Params, batch: Params) -> jax.Array:
        x = batch["x"]
        for layer in params["layers"]:
            normed = layer_norm(layer["gain_attention"], x)
            q, k, v = (jnp.einsum("btw,whd->bthd", normed, layer["attention"][name]) for name in "qkv")
            x = x + jnp.einsum("bthd,hdw->btw", saved_attention(q, k, v), layer["attention"]["o"])
            x = x + feed_forward(layer, x)
        return jnp.mean(jnp.square(dense(params["head"], x) - batch["y"]))

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return sgd(params, grads, 0.1), {"loss": loss}

    def state() -> Params:
        rng = generator(33)
        layers = [block_init(rng, WIDTH, HEADS, HIDDEN, dtype) for _ in range(2)]
        return {"layers": layers, "head": dense_init(rng, WIDTH, 32, dtype)}

    return functional(step, state, lambda i: regression_batch(33, i, (16, TIME, WIDTH), 32, dtype))


def low_rank_adapters(dtype: Any) -> Case:
    """LoRA: frozen weights are their own argument, and the gradient is taken of the adapters alone."""

    def adapted(frozen: Params, adapter: Params, x: jax.Array) -> jax.Array:
        return dense(frozen, x) + 2.0 * (x @ adapter["down"]) @ adapter["up"]

    def loss_of(adapters: list[Params], frozen: Params, batch: Params) -> jax.Array:
        x = batch["x"]
        for layer, adapter in zip(frozen["layers"], adapters, strict=True):
            normed = layer_norm(layer["gain_attention"], x)
            x = x + attention(layer["attention"], normed, normed)
            hidden = jax.nn.gelu(adapted(layer["up"], adapter["up"], layer_norm(layer["gain_mlp"], x)))
            x = x + adapted(layer["down"], adapter["down"], hidden)
        return jnp.mean(jnp.square(dense(frozen["head"], x) - batch["y"]))

    transform = optax.adam(1e-2, eps=1e-4)

    def step(state: Params, frozen: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_of)(state["adapters"], frozen, batch)
        updates, optimizer = transform.update(grads, state["optimizer"])
        return {"adapters": optax.apply_updates(state["adapters"], updates), "optimizer": optimizer}, {"loss": loss}

    def adapter(rng: np.random.Generator, fan_in: int, fan_out: int) -> Params:
        return {"down": weight(rng, (fan_in, 8), dtype), "up": normal(rng, (8, fan_out), dtype, 0.02)}

    def frozen() -> Params:
        rng = generator(34)
        layers = [block_init(rng, WIDTH, HEADS, HIDDEN, dtype) for _ in range(2)]
        return {"layers": layers, "head": dense_init(rng, WIDTH, 32, dtype)}

    def state() -> Params:
        rng = generator(34, 1)
        adapters = [{"up": adapter(rng, WIDTH, HIDDEN), "down": adapter(rng, HIDDEN, WIDTH)} for _ in range(2)]
        return {"adapters": adapters, "optimizer": transform.init(adapters)}

    def batch(i: int) -> Params:
        return regression_batch(34, i, (16, TIME, WIDTH), 32, dtype)

    return Case(
        step=step,
        fresh=lambda: ((state(), frozen(), batch(0)), {}),
        # The frozen weights are made anew each time: a caller that donates every argument must still be able to go on.
        advance=lambda args, kwargs, out, i: ((out[0], frozen(), batch(i + 1)), {}),
        observe=lambda args, kwargs, out: out,
    )


def fourier_mixer(dtype: Any) -> Case:
    """FNet: a two-dimensional FFT over time and width in place of attention, and one real FFT filter."""

    def loss_of(params: Params, batch: Params) -> jax.Array:
        x = batch["x"]
        for layer in params["layers"]:
            mixed = jnp.fft.fft2(layer_norm(layer["gain_attention"], x), axes=(1, 2), norm="ortho").real
            x = x + mixed
            spectrum = jnp.fft.rfft(x, axis=1)
            spectrum = spectrum * (1 + layer["filter"][None]).astype(spectrum.dtype)
            x = jnp.fft.irfft(spectrum, n=TIME, axis=1)
            x = x + feed_forward(layer, x)
        return jnp.mean(jnp.square(dense(params["head"], x) - batch["y"]))

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return sgd(params, grads, 0.05), {"loss": loss}

    def state() -> Params:
        rng = generator(35)

        def layer() -> Params:
            entries = block_init(rng, WIDTH, HEADS, HIDDEN, dtype)
            del entries["attention"]
            return {**entries, "filter": normal(rng, (TIME // 2 + 1, WIDTH), dtype, 0.1)}

        return {"layers": [layer() for _ in range(2)], "head": dense_init(rng, WIDTH, 32, dtype)}

    return functional(step, state, lambda i: regression_batch(35, i, (16, TIME, WIDTH), 32, dtype))


TRANSFORMERS = (
    Program("scanned_remat", scanned_remat, True, "stacked layers, scan, checkpoint, AdamW, masked loss"),
    Program(
        "encoder_decoder", encoder_decoder, True, "T5: cross attention, one relative bias and one embedding for all"
    ),
    Program("dropout_remat", dropout_remat, True, "dropout inside a rematerialized block, typed key in the state"),
    Program("custom_vjp_attention", custom_vjp_attention, True, "attention whose backward pass is the user's own"),
    Program(
        "low_rank_adapters", low_rank_adapters, True, "LoRA: gradients and Adam for adapters, frozen weights apart"
    ),
    Program("fourier_mixer", fourier_mixer, True, "fft2, rfft and irfft over sharded candidates"),
)
