"""Multi-layer perceptrons: what a step may take and return, and how its loss is reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .base import Arguments, Case, Program, functional
from .layers import Params, cross_entropy, dense, dense_init, generator, mlp, mlp_init, normal, regression_batch, sgd

SIZES = (64, 128, 128, 32)


def mean_square(params: list[Params], batch: Params) -> jax.Array:
    return jnp.mean(jnp.square(mlp(params, batch["x"]) - batch["y"]))


def momentum_step(state: Params, batch: Params) -> tuple[Params, Params]:
    loss, grads = jax.value_and_grad(mean_square)(state["params"], batch)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    params = sgd(state["params"], velocity, 0.1)
    return {"params": params, "velocity": velocity, "count": state["count"] + 1}, {"loss": loss}


def momentum(batch_size: int, seed: int):
    def build(dtype: Any) -> Case:
        def state() -> Params:
            params = mlp_init(generator(seed), SIZES, dtype)
            return {
                "params": params,
                "velocity": jax.tree.map(jnp.zeros_like, params),
                "count": jnp.zeros((), jnp.int32),
            }

        return functional(momentum_step, state, lambda i: regression_batch(seed, i, (batch_size, 64), 32, dtype))

    return build


def gradients_only(dtype: Any) -> Case:
    def step(params: list[Params], x: jax.Array, y: jax.Array) -> list[Params]:
        return jax.grad(mean_square)(params, {"x": x, "y": y})

    def arguments(params: list[Params], i: int) -> Arguments:
        batch = regression_batch(2, i, (16, 64), 32, dtype)
        return (params, batch["x"], batch["y"]), {}

    def advance(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, i: int) -> Arguments:
        # The user's own update, on the host: the step knows nothing of it, and nothing is assumed of where out lies.
        params = jax.tree.map(lambda p, g: jnp.array(np.asarray(p) - 0.1 * np.asarray(g)), args[0], out)
        return arguments(params, i + 1)

    return Case(
        step=step,
        fresh=lambda: arguments(mlp_init(generator(2), SIZES, dtype), 0),
        advance=advance,
        observe=lambda args, kwargs, out: out,
    )


class Moments(NamedTuple):
    params: list[Params]
    square: list[Params]
    unused: None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    loss: jax.Array
    accuracy: jax.Array
    per_example: jax.Array
    extra: dict[str, Any]


def many_outputs(dtype: Any) -> Case:
    def step(
        state: Moments, depth: int, batch: Params, *, rate: jax.Array, label_smoothing: float, reduction: str = "mean"
    ) -> tuple[Moments, Report, jax.Array, dict[str, Any]]:
        def loss_of(params: list[Params]) -> tuple[jax.Array, tuple[jax.Array, list[jax.Array]]]:
            hidden: list[jax.Array] = []
            x = batch["inputs"]["x"]
            for layer in params[:depth]:
                x = jax.nn.silu(dense(layer, x))
                hidden.append(jnp.mean(x, axis=0))
            logits = dense(params[-1], x)
            flat = -jnp.mean(jax.nn.log_softmax(logits, axis=-1), axis=-1)
            losses = (1 - label_smoothing) * cross_entropy(logits, batch["label"]) + label_smoothing * flat
            total = jnp.mean(losses) if reduction == "mean" else jnp.sum(losses)
            return total, (logits, hidden)

        (loss, (logits, hidden)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        square = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g * g, state.square, grads)
        params = jax.tree.map(lambda p, g, s: p - rate * g / (jnp.sqrt(s) + 1e-2), state.params, grads, square)
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        report = Report(
            loss=loss,
            accuracy=jnp.mean(right.astype(logits.dtype)),
            per_example=cross_entropy(logits, batch["label"]),
            extra={"hidden": hidden, "nothing": None, "correct": jnp.sum(right, dtype=jnp.int32)},
        )
        return Moments(params, square, None), report, logits, {"constant": jnp.ones((), logits.dtype), "empty": ()}

    def batch(i: int) -> Params:
        rng = generator(3, i)
        label = jnp.array(rng.integers(0, 32, (16,)), dtype=jnp.int32)
        return {"inputs": {"x": normal(rng, (16, 64), dtype), "unused": None}, "label": label}

    def keywords() -> dict[str, Any]:
        return {"rate": jnp.array(1e-2, dtype), "label_smoothing": 0.1, "reduction": "mean"}

    def fresh() -> Arguments:
        params = mlp_init(generator(3), SIZES, dtype)
        return (Moments(params, jax.tree.map(jnp.zeros_like, params), None), 2, batch(0)), keywords()

    return Case(
        step=step,
        fresh=fresh,
        advance=lambda args, kwargs, out, i: ((out[0], 2, batch(i + 1)), keywords()),
        observe=lambda args, kwargs, out: out,
        static_argnums=(1,),
        static_argnames=("label_smoothing", "reduction"),
    )


def sum_loss_debug_print(dtype: Any) -> Case:
    def step(params: list[Params], batch: Params) -> tuple[list[Params], dict[str, jax.Array]]:
        def loss_of(params: list[Params]) -> jax.Array:
            return jnp.sum(jnp.square(mlp(params, batch["x"]) - batch["y"]))

        loss, grads = jax.value_and_grad(loss_of)(params)
        jax.debug.print("summed loss {loss:.3f}", loss=loss)
        return sgd(params, grads, 1e-4), {"loss": loss}

    return functional(
        step, lambda: mlp_init(generator(4), SIZES, dtype), lambda i: regression_batch(4, i, (16, 64), 32, dtype)
    )


def debug_callback(dtype: Any) -> Case:
    def watch(norms: np.ndarray, step: np.ndarray) -> None:
        assert np.all(np.isfinite(norms)), f"step {step}: a hidden row is not finite"

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: list[Params]) -> jax.Array:
            hidden = jnp.tanh(dense(params[0], batch["x"]))
            jax.debug.callback(watch, jnp.sum(jnp.square(hidden), axis=-1), state["count"])
            return jnp.mean(jnp.abs(dense(params[1], hidden) - batch["y"]))

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        return {"params": sgd(state["params"], grads, 0.3), "count": state["count"] + 1}, {"loss": loss}

    def state() -> Params:
        return {"params": mlp_init(generator(5), (64, 128, 32), dtype), "count": jnp.zeros((), jnp.int32)}

    return functional(step, state, lambda i: regression_batch(5, i, (16, 64), 32, dtype))


def two_losses(dtype: Any) -> Case:
    """Deep supervision: a head in the middle and one at the end, each with its own loss; the input is also a target."""

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            x, losses = batch["x"], {}
            for number, layer in enumerate(params["trunk"]):
                x = x + jnp.tanh(dense(layer, x))
                if number == 1:
                    losses["middle"] = jnp.mean(jnp.square(dense(params["middle"], x) - batch["x"]))
            losses["end"] = jnp.mean(cross_entropy(dense(params["end"], x), batch["label"]))
            return losses["end"] + 0.3 * losses["middle"], losses

        (total, losses), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return sgd(params, grads, 0.1), {"total": total, **losses}

    def state() -> Params:
        rng = generator(6)
        trunk = [dense_init(rng, 64, 64, dtype) for _ in range(4)]
        return {"trunk": trunk, "middle": dense_init(rng, 64, 64, dtype), "end": dense_init(rng, 64, 32, dtype)}

    def batch(i: int) -> Params:
        rng = generator(6, i)
        return {"x": normal(rng, (16, 64), dtype), "label": jnp.array(rng.integers(0, 32, (16,)), dtype=jnp.int32)}

    return functional(step, state, batch)


MLP = (
    Program("mlp_momentum", momentum(16, 1), True, "plain JAX, SGD with momentum, int counter in the state"),
    Program("mlp_gradients_only", gradients_only, True, "the step returns gradients and nothing else"),
    Program("mlp_batch_17", momentum(17, 7), False, "a prime batch: no mesh divides it, no microbatch either"),
    Program("mlp_batch_12", momentum(12, 8), True, "a batch that 8 does not divide"),
    Program(
        "mlp_many_outputs", many_outputs, True, "keywords, static arguments, namedtuple, dataclass and None leaves"
    ),
    Program("mlp_sum_loss_debug_print", sum_loss_debug_print, True, "sum-reduced loss, jax.debug.print"),
    Program("mlp_debug_callback", debug_callback, True, "jax.debug.callback inside the differentiated loss"),
    Program("mlp_two_losses", two_losses, True, "a loss in the middle of the network and one at its end"),
)
