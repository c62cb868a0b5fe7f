"""A plan whose program is larger than the limit is planned again, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import Step, autoshard
from autoshard.errors import InfeasibleError
from autoshard.ir import Graph
from autoshard.plan import Memory, Plan
from autoshard.runtime import Compiled, Planned, fitting
from autoshard.runtime.fit import ROUNDS
from tests.helpers import slow_links

Weights = dict[str, jax.Array]


def train_step(weights: Weights, x: jax.Array) -> tuple[Weights, jax.Array]:
    def loss(weights: Weights) -> jax.Array:
        return jnp.mean(jnp.square(jnp.tanh(x @ weights["up"]) @ weights["down"]))

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def arguments() -> tuple[Weights, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (64, 256), "down": (256, 64)}
    weights = {n: jax.random.normal(k, s) / 8 for (n, s), k in zip(shapes.items(), keys[:2], strict=True)}
    return weights, jax.random.normal(keys[2], (32, 64))


def limited(limit: int | None, **options: Any) -> Step:
    return autoshard(train_step, devices=slow_links(), mesh=(8,), memory_limit=limit, **options)


def planned_of(step: Step) -> tuple[Planned, Compiled]:
    step.lower(*arguments())
    (compiled,) = step._compiled.values()
    return compiled.planned, compiled


def counting(peaks: list[int]) -> Callable[[Compiled], int | None]:
    left = iter(peaks)
    return lambda _: next(left)


def shrinking(least: int) -> tuple[Planned, Callable[[Planned], Compiled], list[int]]:
    """A planned step at its limit, whose next plans are as large as they may be, down to `least` bytes."""
    plan = limited(None).plan(*arguments())
    planned, compiled = planned_of(limited(plan.memory.peak_bytes))
    asked: list[int] = []

    def again(limit: int) -> tuple[Plan, Graph]:
        asked.append(limit)
        if limit < least:
            raise InfeasibleError("too small")
        return dataclasses.replace(plan, memory=Memory(0, 0, 0, limit), memory_limit=limit), planned.graph

    def make(p: Planned) -> Compiled:
        return dataclasses.replace(compiled, planned=p)

    return dataclasses.replace(planned, again=again), make, asked


def test_a_program_that_is_too_large_is_planned_again_for_less() -> None:
    planned, make, asked = shrinking(0)
    limit = planned.plan.memory_limit
    found = fitting(planned, make, counting([int(limit * 1.02), limit + 1, limit]))
    assert found.planned.plan.memory_limit == limit
    assert len(asked) == 2
    assert asked[1] < asked[0] < limit / 1.02
    assert "planned again: XLA counted" in found.planned.plan.why[-1]


def test_what_never_fits_is_refused_by_what_xla_counted() -> None:
    planned, make, asked = shrinking(0)
    limit = planned.plan.memory_limit
    with pytest.raises(InfeasibleError, match=rf"needs .* on each device once compiled.*\n.*\({ROUNDS + 1} tried\)"):
        fitting(planned, make, counting([limit + 1 + k for k in range(ROUNDS + 1)]))
    assert len(asked) == ROUNDS
    planned, make, _ = shrinking(limit)
    with pytest.raises(InfeasibleError, match=r"\(1 tried\)"):
        fitting(planned, make, lambda _: limit + 1)


def test_far_below_the_limit_nothing_is_compiled() -> None:
    planned, compiled = planned_of(limited(None))

    def never(_: Compiled) -> int:
        raise AssertionError("asked XLA")

    assert fitting(planned, lambda _: compiled, never) is compiled


def test_a_plan_given_by_the_user_is_kept() -> None:
    plan = limited(None).plan(*arguments())
    planned, _ = planned_of(limited(None, plan=plan))
    assert planned.again is None
