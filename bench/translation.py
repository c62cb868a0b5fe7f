"""GNMT-16 as a train step, as shapes only: eight LSTM layers encode, eight decode with attention (Wu et al., 2016).

The first encoder layer goes both ways; residuals from the third layer on; attention of the first decoder layer's
outputs on the encoder's, fed to all decoder layers above (so that layers are loops over time, one after the other).
Width 1024, vocabulary 32,000, sentences of 50 tokens.
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
    """One model.

    Attributes:
      layers: of the encoder, and of the decoder.
      length: tokens of a sentence.
    """

    layers: int = 8
    width: int = 1024
    vocabulary: int = 32000
    length: int = 50


GNMT16 = Size()


def init_params(size: Size, key: jax.Array) -> dict[str, Any]:
    """Parameters, a dict for each layer."""
    d = size.width
    keys = iter(jax.random.split(key, 4 * size.layers + 8))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.uniform(next(keys), shape, jnp.float32, -0.04, 0.04)

    def cell(inputs: int, width: int) -> dict[str, jax.Array]:
        return {"input": matrix(inputs, 4 * width), "hidden": matrix(width, 4 * width), "bias": jnp.zeros(4 * width)}

    return {
        "source": matrix(size.vocabulary, d),
        "target": matrix(size.vocabulary, d),
        "forward": cell(d, d),
        "backward": cell(d, d),
        "encoder": [cell(2 * d if k == 0 else d, d) for k in range(size.layers - 1)],
        "first": cell(d, d),
        "decoder": [cell(2 * d, d) for _ in range(size.layers - 1)],
        "attention": matrix(d, d),
        "logits": matrix(d, size.vocabulary),
    }


def lstm(cell: dict[str, jax.Array], x: jax.Array, reverse: bool = False) -> jax.Array:
    """x: (examples, time, inputs) to (examples, time, width)."""
    gates = x @ cell["input"] + cell["bias"]
    hidden = cell["hidden"]

    def tick(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = carry
        i, f, g, o = jnp.split(now + h @ hidden, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[0], hidden.shape[0]), x.dtype)
    _, found = jax.lax.scan(tick, (zeros, zeros), gates.swapaxes(0, 1), reverse=reverse)
    return found.swapaxes(0, 1)


def loss_fn(params: dict[str, Any], source: jax.Array, target: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of the next token of the translation."""
    x = params["source"][source]
    x = jnp.concatenate([lstm(params["forward"], x), lstm(params["backward"], x, reverse=True)], -1)
    for k, cell in enumerate(params["encoder"]):
        made = lstm(cell, x)
        x = made if k == 0 else made + x
    y = lstm(params["first"], params["target"][target])
    scores = jnp.einsum("btd,bsd->bts", y @ params["attention"], x) * (x.shape[-1] ** -0.5)
    context = jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, -1), x)
    for k, cell in enumerate(params["decoder"]):
        made = lstm(cell, jnp.concatenate([y, context], -1))
        y = made if k == 0 else made + y
    return optax.softmax_cross_entropy_with_integer_labels(y @ params["logits"], labels).mean()


def make_translation_step(size: Size, batch: int) -> tuple[Callable[..., Any], Any, Any]:
    """(step, abstract state, abstract batch): Adam with global-norm clipping, everything in float32."""
    optimizer = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-3))

    def make_state(key: jax.Array) -> dict[str, Any]:
        params = init_params(size, key)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch["source"], batch["target"], batch["labels"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    state = jax.eval_shape(make_state, jax.random.key(0))
    data = jax.ShapeDtypeStruct((batch, size.length), jnp.int32)
    return step, state, {"source": data, "target": data, "labels": data}
