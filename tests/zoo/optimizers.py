"""What happens after the gradient: accumulation, averages, factored and matrix-valued optimizers, loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .base import Case, Program, functional
from .layers import Params, generator, mlp, mlp_init, regression_batch, sgd

SIZES = (64, 128, 64, 32)
Step = Callable[[Params, Params], tuple[Params, dict[str, jax.Array]]]


def mean_square(params: Any, batch: Params) -> jax.Array:
    return jnp.mean(jnp.square(mlp(params, batch["x"]) - batch["y"]))


def on_mlp(step: Step, seed: int, dtype: Any, extra: Callable[[Any], Params]) -> Case:
    """`step` on the state {"params": ..., **extra(params)} and sequences of 8, so gradients have full rank."""

    def state() -> Params:
        params = mlp_init(generator(seed), SIZES, dtype)
        return {"params": params, **extra(params)}

    return functional(step, state, lambda i: regression_batch(seed, i, (16, 8, 64), 32, dtype))


def with_optax(transform: Any, seed: int, dtype: Any) -> Case:
    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(mean_square)(state["params"], batch)
        updates, optimizer = transform.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, {"loss": loss, "norm": optax.tree.norm(grads)}

    return on_mlp(step, seed, dtype, lambda params: {"optimizer": transform.init(params)})


def multi_steps(dtype: Any) -> Case:
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3, eps=1e-6))
    return with_optax(optax.MultiSteps(inner, every_k_schedule=2).gradient_transformation(), 20, dtype)


def adafactor(dtype: Any) -> Case:
    transform = optax.adafactor(
        learning_rate=1e-2, min_dim_size_to_factor=32, momentum=0.9, dtype_momentum=dtype, eps=1e-8
    )
    return with_optax(transform, 21, dtype)


def accumulation(dtype: Any) -> Case:
    """The user's own microbatches: batch (16, ...) reshaped to (4, 4, ...) and scanned."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        chunks = jax.tree.map(lambda x: x.reshape(4, x.shape[0] // 4, *x.shape[1:]), batch)

        def body(carry: tuple[jax.Array, Any], chunk: Params) -> tuple[tuple[jax.Array, Any], None]:
            loss, grads = jax.value_and_grad(mean_square)(state["params"], chunk)
            return jax.tree.map(jnp.add, carry, (loss, grads)), None

        zero = (jnp.zeros((), batch["x"].dtype), jax.tree.map(jnp.zeros_like, state["params"]))
        (loss, grads), _ = jax.lax.scan(body, zero, chunks)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g / 4, state["velocity"], grads)
        return {"params": sgd(state["params"], velocity, 0.1), "velocity": velocity}, {"loss": loss / 4}

    return on_mlp(step, 22, dtype, lambda params: {"velocity": jax.tree.map(jnp.zeros_like, params)})


def moving_average(dtype: Any) -> Case:
    """Exponential moving average of the parameters, with a warm-up of its decay, and the loss under it."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(mean_square)(state["params"], batch)
        params = sgd(state["params"], grads, 0.2)
        count = state["count"] + 1
        t = count.astype(loss.dtype)
        decay = jnp.minimum(0.99, (1 + t) / (10 + t))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state["average"], params)
        metrics = {"loss": loss, "average_loss": mean_square(average, batch)}
        return {"params": params, "average": average, "count": count}, metrics

    return on_mlp(step, 23, dtype, lambda p: {"average": jax.tree.map(jnp.copy, p), "count": jnp.zeros((), jnp.int32)})


def newton_schulz(x: jax.Array, iterations: int = 5) -> jax.Array:
    """Towards the nearest orthogonal matrix (Jordan et al. 2024, "Muon"): x --> a x + b (x xT) x + c (x xT)^2 x."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + 1e-6)
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def muon(dtype: Any) -> Case:
    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(mean_square)(state["params"], batch)
        velocity = jax.tree.map(lambda v, g: 0.95 * v + g, state["velocity"], grads)

        def update(p: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
            direction = g + 0.95 * v
            return p - 0.02 * (newton_schulz(direction) if p.ndim == 2 else direction)

        params = jax.tree.map(update, state["params"], velocity, grads)
        return {"params": params, "velocity": velocity}, {"loss": loss}

    return on_mlp(step, 24, dtype, lambda params: {"velocity": jax.tree.map(jnp.zeros_like, params)})


def damped(statistic: jax.Array) -> jax.Array:
    """Adds a hundredth of the mean eigenvalue to every eigenvalue."""
    size = statistic.shape[0]
    return statistic + (0.01 / size) * jnp.trace(statistic) * jnp.eye(size, dtype=statistic.dtype)


def root_eigh(statistic: jax.Array) -> jax.Array:
    """statistic ** (-1/4) from its eigenvectors."""
    values, vectors = jnp.linalg.eigh(damped(statistic))
    return (vectors * (values**-0.25)[None, :]) @ vectors.T


def root_newton(statistic: jax.Array) -> jax.Array:
    """statistic ** (-1/4) by coupled Newton iterations (Anil et al. 2020, "Scalable second order optimization")."""
    matrix = damped(statistic)
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    z = 5.0 / (2.0 * jnp.linalg.norm(matrix))

    def condition(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, coupled, _ = carry
        return (i < 30) & (jnp.max(jnp.abs(coupled - identity)) > 1e-5)

    def body(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, coupled, root = carry
        factor = (5.0 * identity - coupled) / 4.0
        twice = factor @ factor
        return i + 1, twice @ twice @ coupled, root @ factor

    start = (jnp.zeros((), jnp.int32), matrix * z, identity * z**0.25)
    return jax.lax.while_loop(condition, body, start)[2]


def shampoo(root: Callable[[jax.Array], jax.Array], seed: int) -> Callable[[Any], Case]:
    """Gupta et al. 2018: left and right statistics of each matrix, their inverse fourth roots around the gradient."""

    def build(dtype: Any) -> Case:
        def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
            loss, grads = jax.value_and_grad(mean_square)(state["params"], batch)
            params, statistics = [], []
            for layer, grad, old in zip(state["params"], grads, state["statistics"], strict=True):
                g = grad["w"]
                left, right = 0.9 * old["left"] + g @ g.T, 0.9 * old["right"] + g.T @ g
                direction = root(left) @ g @ root(right)
                params.append({"w": layer["w"] - 0.02 * direction, "b": layer["b"] - 0.1 * grad["b"]})
                statistics.append({"left": left, "right": right})
            return {"params": params, "statistics": statistics}, {"loss": loss}

        def statistics(params: Any) -> Params:
            zeros = [(jnp.zeros((n, n), dtype), jnp.zeros((m, m), dtype)) for n, m in (p["w"].shape for p in params)]
            return {"statistics": [{"left": left, "right": right} for left, right in zeros]}

        return on_mlp(step, seed, dtype, statistics)

    return build


def loss_scaling(dtype: Any) -> Case:
    """Dynamic loss scale: the second batch overflows and is skipped, two good steps in a row double the scale."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def scaled(params: Any) -> tuple[jax.Array, jax.Array]:
            loss = mean_square(params, batch)
            return loss * state["scale"], loss

        grads, loss = jax.grad(scaled, has_aux=True)(state["params"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))

        def good(state: Params) -> Params:
            streak = state["streak"] + 1
            grow = streak == 2
            return {
                "params": sgd(state["params"], grads, 0.1),
                "scale": jax.lax.cond(grow, lambda s: s * 2, lambda s: s, state["scale"]),
                "streak": jnp.where(grow, 0, streak),
            }

        def bad(state: Params) -> Params:
            return {"params": state["params"], "scale": state["scale"] / 2, "streak": jnp.zeros((), jnp.int32)}

        state = jax.lax.cond(finite, good, bad, state)
        return state, {"loss": jnp.where(finite, loss, jnp.zeros_like(loss)), "skipped": ~finite}

    def batch(i: int) -> Params:
        batch = regression_batch(27, i, (16, 8, 64), 32, dtype)
        return {**batch, "y": batch["y"].at[3, 2, 1].set(jnp.finfo(dtype).max)} if i == 1 else batch

    def state() -> Params:
        params = mlp_init(generator(27), SIZES, dtype)
        return {"params": params, "scale": jnp.array(2.0**15, dtype), "streak": jnp.zeros((), jnp.int32)}

    return functional(step, state, batch)


OPTIMIZERS = (
    Program(
        "accumulation_scan",
        accumulation,
        True,
        "the user's own gradient accumulation: reshape to (4, batch / 4), then scan",
    ),
    Program("multi_steps", multi_steps, True, "optax.MultiSteps around clipping and Adam"),
    Program("adafactor", adafactor, True, "optax.adafactor: factored second moments, update clipping, parameter scale"),
    Program("muon", muon, True, "momentum through Newton-Schulz iterations"),
    Program("shampoo_eigh", shampoo(root_eigh, 25), True, "matrix inverse fourth roots by eigh"),
    Program(
        "shampoo_newton", shampoo(root_newton, 26), True, "matrix inverse fourth roots by a while_loop of products"
    ),
    Program(
        "moving_average",
        moving_average,
        False,
        "exponential moving average of parameters; a second forward pass after the update",
    ),
    Program("loss_scaling", loss_scaling, True, "lax.cond on finite gradients; the second batch overflows"),
)
