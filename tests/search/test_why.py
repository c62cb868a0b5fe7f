"""The plan says what every device does or holds whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import sparse

from tests.helpers import eager_cluster
from tests.problems import Step, normal


def test_operators_that_cannot_be_split_are_named() -> None:
    def step(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        values, vectors = jnp.linalg.eigh(w @ w.T)
        return [w - vectors * values[None], jnp.sort(x, axis=1)]

    plan = Step(step, (normal(0, 256, 256), normal(1, 64, 32)), 1).plan((8,))
    (line,) = [line for line in plan.why if line.startswith("computed on every device: eigh")]
    assert "f32[256,256]: it needs every dimension whole (" in line
    assert "test_why.py:" in line
    assert not any("sort" in line for line in plan.why), "small or split over its rows"


def test_sizes_that_divide_by_no_axis_are_named() -> None:
    plan = Step(lambda w, x: [w, x @ w], (normal(0, 257, 129), normal(1, 511, 257)), 1).plan((8,))
    (line,) = [line for line in plan.why if line.startswith("computed on every device: dot_general")]
    assert "what could be split, of 511, 129, 257, divides by no mesh axis {'data': 8}" in line


def test_arguments_alike_share_a_line() -> None:
    def step(*weights: jax.Array) -> list[jax.Array]:
        return [w * 0.9 for w in weights]

    plan = Step(step, tuple(normal(k, 131, 129) for k in range(5)), 5).plan((8,))
    (line,) = [line for line in plan.why if line.startswith("whole on every device")]
    assert "in/0 and 4 more like it f32[131,129]: dimension 0 of 131, dimension 1 of 129" in line


def test_nothing_is_said_on_one_device() -> None:
    plan = Step(lambda w, x: [w, x @ w], (normal(0, 257, 129), normal(1, 511, 257)), 1).plan((1,), eager_cluster(1))
    assert not any("every device" in line for line in plan.why)


def test_costs_that_nobody_registered_are_named() -> None:
    def step(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [w, sparse.BCOO.fromdense(w, nse=w.size) @ x]

    plan = Step(step, (normal(0, 16, 16), normal(1, 16, 8)), 1).plan((8,))
    assert any(line.startswith("cost of bcoo_fromdense: one pass") for line in plan.why)
