"""Collective bytes predicted for the chosen plan against those compiled; all of the zoo: bench/collectives.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from autoshard import autoshard
from bench.collectives import CLOSE, Row, compare, compiled_traffic, predicted_traffic
from tests.helpers import distance, eager_cluster
from tests.zoo import get

pytestmark = [
    pytest.mark.implicit_promotion,
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),
]

FAST = (
    "mlp_momentum",
    "mlp_gradients_only",
    "mlp_batch_17",
    "mlp_two_losses",
    "accumulation_scan",
    "adafactor",
    "loss_scaling",
    "fourier_mixer",
    "grouped_dilated_convolution",
)


@pytest.mark.parametrize("name", FAST)
def test_predicted_bytes_are_those_of_the_compiled_program(name: str) -> None:
    found = compare(get(name), "2x4")
    assert abs(found.ratio - 1.0) <= CLOSE, f"{found.predicted_bytes} predicted, {found.differences}"
    assert found.rematerializations == 0


def _traffic(step: Callable[..., Any], *args: jax.Array) -> tuple[Counter[Row], Counter[Row]]:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    planned = autoshard(mesh=mesh, devices=eager_cluster())(step)
    plan = planned.plan(*args)
    text = planned.lower(*args).compile().as_text() or ""
    assert distance(planned(*args), step(*args)) < 1e-5
    return predicted_traffic(plan), compiled_traffic(text, plan.mesh)


def test_fft_of_split_rows_stays_local() -> None:
    x = jax.random.normal(jax.random.key(0), (64, 64))

    def step(x: jax.Array) -> jax.Array:
        return jnp.fft.fft(x * 2.0, axis=-1)

    mine, theirs = _traffic(step, x)
    assert mine == theirs
    assert mine.total() == 0


def test_grouped_convolution_stays_local() -> None:
    x = jax.random.normal(jax.random.key(0), (16, 8, 8, 32))
    w = jax.random.normal(jax.random.key(1), (3, 3, 4, 64))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            y = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
            )
            return (y * y).sum()

        return jax.grad(loss)(w)

    mine, theirs = _traffic(step, w, x)
    assert mine == theirs


def test_reshardings_of_loop_constants_run_once() -> None:
    w = jax.random.normal(jax.random.key(0), (64, 64)) / 8.0
    x = jax.random.normal(jax.random.key(1), (16, 64))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(c @ w) @ w.T, None

        return jax.lax.scan(body, x, None, length=5)[0]

    mine, theirs = _traffic(step, w, x)
    assert mine == theirs
