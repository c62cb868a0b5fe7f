"""Random programs, planned and run on eight CPU devices, equal plain jit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest
from jax.sharding import AxisType

from autoshard.runtime import emit, shardings
from autoshard.search import prepare
from tests.helpers import distance
from tests.problems import Step, looped, mlp, random_step

SHAPES = ((8,), (2, 4), (4, 2), (2, 2, 2))
LIMIT = 1e-5


def check(step: Step, shape: tuple[int, ...]) -> None:
    plan = step.plan(shape)
    mesh = jax.make_mesh(shape, tuple(axis for axis, _ in plan.mesh), axis_types=(AxisType.Auto,) * len(shape))
    program = jax.jit(
        emit(prepare(step.graph()), plan, mesh),
        in_shardings=shardings(plan.input_specs, mesh),
        out_shardings=list(shardings(plan.output_specs, mesh)),
    )
    mine = program(*step.args)
    for array, spec in zip(mine, shardings(plan.output_specs, mesh), strict=True):
        assert array.sharding.is_equivalent_to(spec, array.ndim)
    assert distance(list(mine), list(jax.jit(step.fun)(*step.args))) < LIMIT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", [mlp, looped])
def test_known_programs(step: Callable[[], Step], shape: tuple[int, ...]) -> None:
    check(step(), shape)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.full] if i >= 12 else []) for i in range(60)])
def test_random_programs(seed: int) -> None:
    check(random_step(seed, moves=5 + seed % 4), SHAPES[seed % len(SHAPES)])
