"""Loops and branches in the step: while_loop of matrix products, a fixed point with its own gradient, a switch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .base import Case, Program, functional
from .layers import Params, along, dense, dense_init, generator, mlp, mlp_init, normal, regression_batch, sgd, weight


def loop_of_products(dtype: Any) -> Case:
    """A teacher applied a data-dependent number of times to the batch, and power iterations on the trained weight."""

    def spectral_norm(w: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        def condition(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return carry[0] < 6

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, u = carry
            u = w @ (w.T @ u)
            return i + 1, u / jnp.linalg.norm(u)

        u = jax.lax.while_loop(condition, body, (jnp.zeros((), jnp.int32), start))[1]
        return jnp.linalg.norm(w.T @ u), u

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, x = carry
            return i + 1, jnp.tanh(x @ state["teacher"])

        rounds = jnp.max(batch["rounds"])
        start = (jnp.zeros((), jnp.int32), batch["x"])
        _, target = jax.lax.while_loop(lambda carry: carry[0] < rounds, body, start)

        def loss_of(w: jax.Array) -> jax.Array:
            return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ w) - target))

        loss, grad = jax.value_and_grad(loss_of)(state["student"])
        student = state["student"] - 2.0 * grad
        sigma, vector = spectral_norm(student, state["vector"])
        student = student / jnp.maximum(1, sigma / 1.5)
        teacher = 0.9 * state["teacher"] + 0.1 * student
        return {"student": student, "teacher": teacher, "vector": vector}, {"loss": loss, "sigma": sigma}

    def state() -> Params:
        rng = generator(100)
        student, teacher = weight(rng, (64, 64), dtype), weight(rng, (64, 64), dtype)
        vector = normal(rng, (64,), dtype)
        return {"student": student, "teacher": teacher, "vector": vector / jnp.linalg.norm(vector)}

    def batch(i: int) -> Params:
        rng = generator(100, i)
        rounds = jnp.array(rng.integers(1, 4, (16,)), dtype=jnp.int32).at[0].set(3 + i % 2)
        return {"x": normal(rng, (16, 64), dtype), "rounds": rounds}

    return functional(step, state, batch)


def cell(params: Params, z: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(z @ params["inner"] + x @ params["outer"] + along(params["bias"], z))


def solve(function: Any, start: jax.Array) -> jax.Array:
    """Iterates until no entry moves by more than 1e-4 anywhere in the batch."""

    def condition(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, old, new = carry
        return (i < 40) & (jnp.max(jnp.abs(new - old)) > 1e-4)

    def body(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, _, new = carry
        return i + 1, new, function(new)

    return jax.lax.while_loop(condition, body, (jnp.zeros((), jnp.int32), start, function(start)))[2]


@jax.custom_vjp
def fixed_point(params: Params, x: jax.Array) -> jax.Array:
    return solve(lambda z: cell(params, z, x), jnp.zeros_like(x))


def fixed_point_forward(params: Params, x: jax.Array) -> tuple[jax.Array, tuple[Params, jax.Array, jax.Array]]:
    z = fixed_point(params, x)
    return z, (params, x, z)


def fixed_point_backward(saved: tuple[Params, jax.Array, jax.Array], g: jax.Array) -> tuple[Params, jax.Array]:
    """Solves u = g + (dcell/dz)^T u by the same iteration."""
    params, x, z = saved
    through_z = jax.vjp(lambda z: cell(params, z, x), z)[1]
    u = solve(lambda u: g + through_z(u)[0], g)
    return jax.vjp(lambda params, x: cell(params, z, x), params, x)[1](u)


fixed_point.defvjp(fixed_point_forward, fixed_point_backward)


def equilibrium(dtype: Any) -> Case:
    """Bai et al. 2019: a layer defined as a fixed point, found by a while_loop whose end depends on the whole batch."""

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> jax.Array:
            z = fixed_point(params["cell"], dense(params["in"], batch["x"]))
            return jnp.mean(jnp.square(dense(params["out"], z) - batch["y"]))

        loss, grads = jax.value_and_grad(loss_of)(params)
        return sgd(params, grads, 0.1), {"loss": loss}

    def state() -> Params:
        rng = generator(101)
        inner = {"inner": 0.3 * weight(rng, (64, 64), dtype), "outer": weight(rng, (64, 64), dtype)}
        return {
            "in": dense_init(rng, 32, 64, dtype),
            "cell": {**inner, "bias": normal(rng, (64,), dtype, 0.1)},
            "out": dense_init(rng, 64, 16, dtype),
        }

    return functional(step, state, lambda i: regression_batch(101, i, (16, 32), 16, dtype))


def switched(dtype: Any) -> Case:
    """A curriculum: lax.switch on the step count picks the loss, inside the gradient; fori_loop ends the step."""

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: list[Params]) -> jax.Array:
            error = mlp(params, batch["x"]) - batch["y"]
            branches = (
                lambda e: jnp.mean(jnp.square(e)),
                lambda e: jnp.mean(jnp.sqrt(1 + jnp.square(e)) - 1),
                lambda e: jnp.mean(jax.nn.logsumexp(e, axis=-1)) / 4,
            )
            return jax.lax.switch(state["count"] % 3, branches, error)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        params = sgd(state["params"], grads, 0.2)
        shrink = jax.lax.fori_loop(0, 3, lambda _, w: w - 0.01 * w @ (w.T @ w) / 8, params[1]["w"])
        params = [params[0], {**params[1], "w": shrink}, *params[2:]]
        return {"params": params, "count": state["count"] + 1}, {"loss": loss}

    def state() -> Params:
        return {"params": mlp_init(generator(102), (64, 128, 64, 32), dtype), "count": jnp.zeros((), jnp.int32)}

    return functional(step, state, lambda i: regression_batch(102, i, (16, 64), 32, dtype))


CONTROL_FLOW = (
    Program("loop_of_products", loop_of_products, False, "while_loops of matrix products, one over the batch"),
    Program(
        "equilibrium", equilibrium, False, "fixed point by while_loop with custom_vjp; the batch decides when to stop"
    ),
    Program("switched", switched, True, "lax.switch inside the gradient, fori_loop on a weight"),
)
