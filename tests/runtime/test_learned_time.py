"""Plans timed by a learned model: used, refused with the reason, and never without being asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import autoshard
from autoshard.costmodel import LearnedModel, LearnOptions
from autoshard.costmodel.learned.features import hlo_features
from autoshard.costmodel.learned.learn import learn_model
from autoshard.costmodel.learned.store import load_model
from autoshard.costmodel.learned.train import Sample
from autoshard.errors import ArgumentError
from autoshard.runtime.compiled import Planned
from autoshard.runtime.learned_time import REFUSED, USED, learned_time
from tests.api_problems import counted
from tests.helpers import eager_cluster

_TEXT = """HloModule m

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} add(%a, %a)
}
"""


def train_step(weights: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.square(jnp.tanh(x @ weights["up"]) @ weights["down"]))

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


ARGUMENTS = (
    {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32), "down": jax.ShapeDtypeStruct((256, 64), jnp.float32)},
    jax.ShapeDtypeStruct((32, 64), jnp.float32),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one kernel: all that matters is that it predicts something."""
    features = hlo_features(_TEXT)
    samples = [
        Sample(
            name=f"step-{i}",
            family="one",
            structure=f"s{i}",
            features=features,
            time_s=1e-5,
            kernel_s=np.array([5e-6, np.nan]),
            kernel_spread=np.zeros(2),
            analytic_s=1e-6,
            kernel_analytic_s=np.full(2, 1e-6),
            again_s=np.nan,
            kernel_again_s=np.full(2, np.nan),
        )
        for i in range(40)
    ]
    made = tmp_path_factory.mktemp("model")
    options = LearnOptions(width=8, layers=1, epochs=1, members=1, seconds=10.0)
    learn_model(samples, made, options, {}, shuffled=False)
    return made


@pytest.fixture(scope="module")
def planned() -> Planned:
    """A plan that no model has timed."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        step = autoshard(train_step, mesh=(8,))
        step.plan(*ARGUMENTS)
    (found,) = step._planned.values()
    return found


def changed(folder: Path, wins: bool = True, **record: object) -> LearnedModel:
    model = load_model(folder)
    model.record = {**model.record, "wins": {"cluster": wins, "step": wins}, **record}
    return model


def test_a_plan_says_that_it_was_timed_by_the_model(folder: Path, planned: Planned):
    plain = planned.plan
    assert not any(line.startswith((USED, REFUSED)) for line in plain.why)
    timed = learned_time(planned, changed(folder), "train_step", cores=4)
    (line,) = (line for line in timed.plan.why if line.startswith(USED))
    assert "median error" in line
    assert timed.plan.time_s != plain.time_s
    assert timed.plan.compute_s > 0
    same = dataclasses.replace(timed.plan, time_s=plain.time_s, compute_s=plain.compute_s, why=plain.why)
    assert same == plain  # decisions are the analytic model's
    twice = learned_time(planned, changed(folder), "train_step", cores=8)
    assert 2 * twice.plan.compute_s == pytest.approx(timed.plan.compute_s)
    again = learned_time(timed, changed(folder), "train_step", cores=8)
    assert again.plan == timed.plan
    assert planned.again is not None
    assert timed.again is not None
    other, graph = timed.again(plain.memory_limit)
    assert graph is planned.again(plain.memory_limit)[1]
    assert any(line.startswith((USED, REFUSED)) for line in other.why)


@pytest.mark.parametrize(
    ("record", "cores", "expected"),
    [
        ({"wins": False}, 8, "analytic model for steps: on "),
        ({"machine": {"machine": "abacus", "system": "Linux", "cpu": "", "threads": 1}}, 8, "machine 'abacus'"),
        ({"versions": {"jax": "0.0.1"}}, 8, "jax '0.0.1' (here "),
        ({}, 64, "a device has 8 cores"),
    ],
)
def test_a_plan_says_why_the_model_was_not_used(
    folder: Path, planned: Planned, record: dict[str, object], cores: int, expected: str
):
    plan = learned_time(planned, changed(folder, **record), "train_step", cores).plan  # pyright: ignore[reportArgumentType]
    assert plan.time_s == planned.plan.time_s
    assert plan.why[-1].startswith(REFUSED)
    assert expected in plan.why[-1]


def test_described_devices_are_not_this_machine(folder: Path):
    step, _ = counted(train_step, devices=eager_cluster(), learned_model=changed(folder))
    assert "devices='auto'" in step.plan(*ARGUMENTS).why[-1]
    step = autoshard(train_step, devices="h100x8", learned_model=folder)
    assert "gpu devices" in step.plan(*ARGUMENTS).why[-1]


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ArgumentError, match="autoshard learn"):
        autoshard(train_step, learned_model=tmp_path)
    with pytest.raises(ArgumentError, match="folder that `autoshard learn` wrote"):
        autoshard(train_step, learned_model=3)
