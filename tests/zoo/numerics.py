"""Unusual types and operations: sorts, complex and int8 weights, float0, second derivatives, a Pallas kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from .base import Case, Program, cast, functional
from .layers import (
    Params,
    along,
    cross_entropy,
    dense,
    dense_init,
    generator,
    integers,
    mlp,
    mlp_init,
    normal,
    regression_batch,
    sgd,
)


def ordered(dtype: Any) -> Case:
    """sort, top_k, cumsum, cumprod, argsort and argmax over features; sort, cumsum, argmax over the batch too."""

    def step(params: list[Params], batch: Params) -> tuple[list[Params], dict[str, jax.Array]]:
        def loss_of(params: list[Params]) -> tuple[jax.Array, dict[str, jax.Array]]:
            # The offsets keep neighbours in the order apart, so that rounding cannot swap them at the cut of top_k.
            out = mlp(params, batch["x"]) + batch["offset"]
            ranks = jnp.linspace(-1, 1, 32, dtype=out.dtype)
            best, where = jax.lax.top_k(out, 4)
            rows = jnp.sort(out[:, :8], axis=0) * ranks[:16, None]
            loss = jnp.mean(jnp.square(jnp.sort(out, axis=-1) - 4 * ranks[None])) + jnp.mean(jnp.square(rows))
            loss = loss + 0.1 * jnp.mean(jnp.square(jnp.cumsum(out, axis=-1))) / 32
            loss = loss + jnp.mean(jnp.cumsum(best, axis=0)) / 64 + jnp.mean(jnp.cumprod(jnp.tanh(best), axis=-1))
            found = {
                "where": where,
                "order": jnp.argsort(batch["offset"], axis=-1),
                "largest": jnp.argmax(out, axis=-1),
                "row": jnp.argmax(out + batch["spread"], axis=0),
                "median": jnp.median(out, axis=-1),
            }
            return loss, found

        (loss, found), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return sgd(params, grads, 0.05), {"loss": loss, **found}

    def batch(i: int) -> Params:
        rng = generator(110, i)
        offset = np.stack([rng.permutation(32) for _ in range(16)]) * 0.5
        spread = np.stack([rng.permutation(16) for _ in range(32)], axis=1) * 4.0
        x = normal(rng, (16, 64), dtype)
        return {"x": x, "offset": jnp.array(offset, dtype=dtype), "spread": jnp.array(spread, dtype=dtype)}

    return functional(step, lambda: mlp_init(generator(110), (64, 128, 32), dtype), batch)


def complex_weights(dtype: Any) -> Case:
    """Complex layers and a complex linear recurrence; jax.grad of a real loss gives conjugates."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> tuple[jax.Array, jax.Array]:
            z = batch["signal"] @ params["in"]

            def body(h: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
                h = h * along(params["turn"], h) + v
                size = jnp.square(h.real) + jnp.square(h.imag)
                return h * jax.lax.rsqrt(1 + size).astype(h.dtype), h

            _, states = jax.lax.scan(body, jnp.zeros_like(z[:, 0]), jnp.swapaxes(z, 0, 1))
            out = jnp.einsum("tbw,wo->bto", states, params["out"])
            error = out - batch["target"]
            return jnp.mean((error * jnp.conj(error)).real) + jnp.mean(jnp.square(jnp.angle(params["turn"]))), out

        (loss, out), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        velocity = jax.tree.map(lambda v, g: 0.9 * v + jnp.conj(g), state["velocity"], grads)
        return {"params": sgd(state["params"], velocity, 0.05), "velocity": velocity}, {"loss": loss, "out": out}

    def entries(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> jax.Array:
        values = scale * (rng.standard_normal(shape) + 1j * rng.standard_normal(shape))
        return cast(values, dtype)

    def state() -> Params:
        rng = generator(111)
        turn = cast(0.9 * np.exp(0.5j * rng.standard_normal(64)), dtype)
        params = {"in": entries(rng, (32, 64), 0.1), "turn": turn, "out": entries(rng, (64, 16), 0.1)}
        return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}

    def batch(i: int) -> Params:
        rng = generator(111, i)
        return {"signal": entries(rng, (16, 8, 32), 1.0), "target": entries(rng, (16, 8, 16), 1.0)}

    return functional(step, state, batch)


def int8_weights(dtype: Any) -> Case:
    """Frozen int8 weights: their scales per channel are trained; one product runs in int8 with int32 sums."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        frozen = state["weights"]

        def loss_of(scales: Params) -> jax.Array:
            sums = jax.lax.dot_general(
                batch["codes"], frozen["in"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
            )
            x = sums.astype(dtype) * scales["in"][None]
            x = jnp.tanh(x + along(scales["bias"], x))
            x = jnp.tanh(x @ (frozen["middle"].astype(dtype) * scales["middle"][None]))
            return jnp.mean(jnp.square(x @ (frozen["out"].astype(dtype) * scales["out"][None]) - batch["y"]))

        loss, grads = jax.value_and_grad(loss_of)(state["scales"])
        # The scales are small numbers: their steps are relative to their own size.
        scales = jax.tree.map(lambda s, g: s - 0.2 * g * jnp.mean(jnp.square(s)), state["scales"], grads)
        return {"weights": frozen, "scales": scales}, {"loss": loss}

    def state() -> Params:
        rng = generator(112)

        def codes(shape: tuple[int, ...]) -> jax.Array:
            return jnp.array(rng.integers(-127, 128, shape), dtype=jnp.int8)

        shapes = {"in": (64, 128), "middle": (128, 128), "out": (128, 32)}
        scales = {
            name: (1 + normal(rng, shape[1:], dtype, 0.1)) / (73 * shape[0] ** 0.5) for name, shape in shapes.items()
        }
        scales["in"] = scales["in"] / 73
        weights = {name: codes(shape) for name, shape in shapes.items()}
        return {"weights": weights, "scales": {**scales, "bias": normal(rng, (128,), dtype, 0.1)}}

    def batch(i: int) -> Params:
        rng = generator(112, i)
        codes = jnp.array(rng.integers(-127, 128, (16, 64)), dtype=jnp.int8)
        return {"codes": codes, "y": normal(rng, (16, 32), dtype)}

    return functional(step, state, batch)


def integer_leaves(dtype: Any) -> Case:
    """Integer and boolean parameters under jax.grad(allow_int=True): the float0 gradients are kept in the state."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, Any]]:
        def loss_of(params: Params) -> jax.Array:
            x = batch["x"][:, params["permutation"]]
            x = jnp.where(params["active"][None], jnp.tanh(dense(params["first"], x)), jnp.zeros((), x.dtype))
            return jnp.mean(cross_entropy(dense(params["last"], x), params["classes"][batch["word"]]))

        loss, grads = jax.value_and_grad(loss_of, allow_int=True)(state["params"])

        def update(p: jax.Array, g: jax.Array) -> jax.Array:
            return p if g.dtype == jax.dtypes.float0 else p - 0.3 * g

        params = jax.tree.map(update, state["params"], grads)
        # The hidden units that are on move by one every step.
        params["active"] = jnp.roll(params["active"], 1)
        seen = state["seen"] + jnp.bincount(batch["word"], length=64).astype(jnp.uint32)
        return {"params": params, "grads": grads, "seen": seen}, {"loss": loss, "grads": grads}

    def state() -> Params:
        rng = generator(113)
        params = {
            "first": dense_init(rng, 64, 128, dtype),
            "last": dense_init(rng, 128, 16, dtype),
            "permutation": jnp.array(rng.permutation(64), dtype=jnp.int32),
            "classes": integers(rng, (64,), 16),
            "active": jnp.array(rng.random(128) < 0.75),
        }

        def zero(p: jax.Array) -> Any:
            inexact = jnp.issubdtype(p.dtype, jnp.inexact)
            return jnp.zeros_like(p) if inexact else np.zeros(p.shape, jax.dtypes.float0)

        return {"params": params, "grads": jax.tree.map(zero, params), "seen": jnp.zeros((64,), jnp.uint32)}

    def batch(i: int) -> Params:
        rng = generator(113, i)
        return {"x": normal(rng, (16, 64), dtype), "word": integers(rng, (16,), 64)}

    return functional(step, state, batch)


def second_derivatives(dtype: Any) -> Case:
    """A physics-informed loss: the Laplacian of a network by jvp of grad, slopes, and values at the border."""

    def step(params: list[Params], batch: Params) -> tuple[list[Params], dict[str, jax.Array]]:
        def field(params: list[Params], x: jax.Array) -> jax.Array:
            return mlp(params, x)[0]

        def laplacian(params: list[Params], x: jax.Array) -> tuple[jax.Array, jax.Array]:
            slope = jax.grad(field, argnums=1)

            def along_axis(direction: jax.Array) -> jax.Array:
                return jnp.vdot(direction, jax.jvp(lambda x: slope(params, x), (x,), (direction,))[1])

            return jnp.sum(jax.vmap(along_axis)(jnp.eye(x.shape[0], dtype=x.dtype))), slope(params, x)

        def loss_of(params: list[Params]) -> tuple[jax.Array, dict[str, jax.Array]]:
            curvature, slopes = jax.vmap(laplacian, in_axes=(None, 0))(params, batch["inside"])
            border = jax.vmap(field, in_axes=(None, 0))(params, batch["border"])
            losses = {
                "equation": jnp.mean(jnp.square(curvature - batch["source"])),
                "slope": jnp.mean(jnp.square(slopes - batch["slope"])),
                "border": jnp.mean(jnp.square(border - batch["value"])),
            }
            return 0.1 * losses["equation"] + losses["slope"] + losses["border"], losses

        (loss, losses), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return sgd(params, grads, 0.02), {"loss": loss, **losses}

    def batch(i: int) -> Params:
        rng = generator(114, i)
        shapes = {"inside": (16, 8), "source": (16,), "slope": (16, 8), "border": (16, 8), "value": (16,)}
        return {name: normal(rng, shape, dtype) for name, shape in shapes.items()}

    return functional(step, lambda: mlp_init(generator(114), (8, 64, 128, 1), dtype), batch)


ROWS = 8


def fused_kernel(x_ref: Any, w_ref: Any, b_ref: Any, out_ref: Any, inner_ref: Any) -> None:
    inner = jnp.dot(x_ref[...], w_ref[...]) + b_ref[...]
    inner_ref[...] = inner
    out_ref[...] = inner * jax.nn.sigmoid(inner)


def slope_kernel(inner_ref: Any, g_ref: Any, out_ref: Any) -> None:
    gate = jax.nn.sigmoid(inner_ref[...])
    out_ref[...] = g_ref[...] * gate * (1 + inner_ref[...] * (1 - gate))


def fused_forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """silu(x w + b), a block of rows at a time; x: (rows, inputs)."""
    rows, width = x.shape[0], w.shape[1]
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    block = pl.BlockSpec((ROWS, width), lambda i: (i, 0))
    whole = [pl.BlockSpec(w.shape, lambda i: (0, 0)), pl.BlockSpec((1, width), lambda i: (0, 0))]
    y, inner = pl.pallas_call(
        fused_kernel,
        grid=(rows // ROWS,),
        in_specs=[pl.BlockSpec((ROWS, x.shape[1]), lambda i: (i, 0)), *whole],
        out_specs=[block, block],
        out_shape=[out, out],
        interpret=True,
    )(x, w, b[None])
    return y, (x, w, inner)


def fused_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, w, inner = saved
    block = pl.BlockSpec((ROWS, w.shape[1]), lambda i: (i, 0))
    slope = pl.pallas_call(
        slope_kernel,
        grid=(g.shape[0] // ROWS,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(g.shape, g.dtype),
        interpret=True,
    )(inner, g)
    return slope @ w.T, x.T @ slope, jnp.sum(slope, axis=0)


@jax.custom_vjp
def fused(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return fused_forward(x, w, b)[0]


fused.defvjp(fused_forward, fused_backward)


def pallas_kernel(dtype: Any) -> Case:
    def step(params: list[Params], batch: Params) -> tuple[list[Params], dict[str, jax.Array]]:
        def loss_of(params: list[Params]) -> jax.Array:
            x = batch["x"].reshape(-1, 64)
            for layer in params[:-1]:
                x = fused(x, layer["w"], layer["b"])
            return jnp.mean(jnp.square(dense(params[-1], x) - batch["y"].reshape(-1, 32)))

        loss, grads = jax.value_and_grad(loss_of)(params)
        return sgd(params, grads, 0.3), {"loss": loss}

    return functional(
        step,
        lambda: mlp_init(generator(115), (64, 128, 64, 32), dtype),
        lambda i: regression_batch(115, i, (16, 8, 64), 32, dtype),
    )


NUMERICS = (
    Program("ordered", ordered, False, "sort, top_k, cumsum, cumprod, argmax over features and over the batch"),
    Program("complex_weights", complex_weights, True, "complex parameters, activations and scan carry"),
    Program("int8_weights", int8_weights, True, "int8 weights in the state, trained scales, an int8 product"),
    Program(
        "integer_leaves",
        integer_leaves,
        True,
        "allow_int gradients: float0 leaves in the state; int, uint, bool leaves",
    ),
    Program("second_derivatives", second_derivatives, True, "jvp of grad inside the loss"),
    Program("pallas_kernel", pallas_kernel, False, "pallas_call (interpreted) with a custom_vjp, blocks of 8 rows"),
)
