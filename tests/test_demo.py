"""The demo's data and model. Its whole run is `make demo`."""

from __future__ import annotations

import io
from itertools import islice

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

pytest.importorskip("autoshard.api")

from autoshard import demo
from autoshard.errors import ArgumentError

pytestmark = pytest.mark.implicit_promotion

SMALL = demo.GPTConfig(layers=1, width=32, heads=2, context=32, batch=8)
LIMIT = 200_000


def test_batches_are_the_same_for_the_same_seed() -> None:
    first, second, other = (list(islice(demo.batches(seed, SMALL, LIMIT), 3)) for seed in (1, 1, 2))
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(first[0]["tokens"], other[0]["tokens"])


def test_batches_are_padded_after_the_end() -> None:
    padded = 0
    for batch in islice(demo.batches(0, SMALL, LIMIT), 20):
        assert batch["tokens"].shape == batch["targets"].shape == batch["mask"].shape == (8, 32)
        assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        assert set(np.unique(batch["mask"])) <= {0.0, 1.0}
        assert np.all(np.diff(batch["mask"], axis=1) <= 0)
        assert np.all(batch["targets"][batch["mask"] == 0] == 0)
        assert np.all(batch["mask"].sum(axis=1) >= 1)
        padded += int((batch["mask"] == 0).any())
    assert padded > 0


def test_the_mask_hides_the_padding() -> None:
    batch = next(demo.batches(0, SMALL, LIMIT))
    batch["mask"][:, 20:] = 0
    model, _ = demo.make_state(jax.random.key(0), SMALL)
    model.eval()
    changed = {**batch, "targets": np.where(batch["mask"] == 0, 7, batch["targets"])}
    before, after = (demo.masked_loss(model, jax.tree.map(jax.numpy.asarray, b)) for b in (batch, changed))
    np.testing.assert_array_equal(before, after)


def test_attention_is_causal() -> None:
    batch = next(demo.batches(0, SMALL, LIMIT))
    model, _ = demo.make_state(jax.random.key(0), SMALL)
    model.eval()
    before = model(jax.numpy.asarray(batch["tokens"]))
    after = model(jax.numpy.asarray(batch["tokens"]).at[:, 16].set(3))
    np.testing.assert_array_equal(before[:, :16], after[:, :16])
    assert not np.array_equal(before[:, 16:], after[:, 16:])


def test_plain_steps_lower_the_loss() -> None:
    model, optimizer = demo.make_state(jax.random.key(0), SMALL)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {np.dtype(np.float32)}
    step = nnx.jit(demo.train_step)
    losses = [float(step(model, optimizer, batch)["loss"]) for batch in islice(demo.batches(0, SMALL, LIMIT), 60)]
    assert losses[0] == pytest.approx(np.log(256), rel=0.05)
    assert np.mean(losses[-5:]) < 0.75 * losses[0]


@pytest.mark.parametrize(
    ("plain", "sharded", "good"),
    [
        ([5.0, 4.0], [5.0, 4.0] + [2.0] * 10, True),
        ([5.0, 4.0], [5.0, 4.01] + [2.0] * 10, False),
        ([5.0, 4.0], [5.0, 4.0] + [4.9] * 10, False),
        ([5.0, 4.0], [5.0, float("nan")] + [2.0] * 10, False),
        ([5.0, float("nan"), 4.0], [5.0, 3.0, 4.0] + [2.0] * 10, False),
        ([5.0, 4.0], [5.0, 4.0] + [float("nan")] * 10, False),
    ],
)
def test_verdict(plain: list[float], sharded: list[float], good: bool) -> None:
    assert demo._report(Console(file=io.StringIO()), plain, sharded, 1000) is good


def test_refuses_to_compare_more_than_it_trains() -> None:
    with pytest.raises(ArgumentError, match="compare=5, steps=4"):
        demo.run_demo(Console(file=io.StringIO()), steps=4, compare=5)


@pytest.mark.slow
def test_demo_run() -> None:
    out = io.StringIO()
    assert demo.run_demo(Console(file=out, width=100), steps=60, compare=20, config=SMALL), out.getvalue()
    assert "largest relative difference" in out.getvalue()
