"""Microbatches: every program of the zoo that can be cut equals plain jit, the others are refused by name and line.

CI runs every third of them, `make test-all` all, in both precisions and with two and four microbatches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import autoshard
from autoshard.errors import InfeasibleError, MicrobatchError
from autoshard.plan import Plan
from tests.helpers import eager_cluster, slow_links
from tests.zoo import PROGRAMS, Program
from tests.zoo.base import check_runs, distances, plain_jit, run

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(900)]

LIMITS = {"float32": 1e-4, "float64": 1e-9}
COUNTS = (2, 4)
MESH = {2: (8,), 4: (2, 4)}

REFUSED = {
    "mlp_batch_17": "17 examples",
    "moving_average": r"dot_general at .*layers.py.* couples the examples",
    "experts_by_gathers": r"sort at .*experts.py.*: it needs all examples at once",
    "haiku_state": r"sub at .*batch_norm.py.*: it uses what all examples together give",
    "resnet": r"sub at .*normalization.py.*: it uses what all examples together give",
    "graph_network": r"scatter-max at .*graphs.py",
    "gathers_and_scatters": r"gather at .*graphs.py.*: it needs all examples at once",
    "mapped": r"reshape at .*recurrent.py.*: it sorts fewer examples into other groups",
    "contrastive": r"dot_general at .*generative.py.*: it combines examples with each other",
    "loop_of_products": r"while at .*control_flow.py",
    "equilibrium": r"while at .*control_flow.py",
    "ordered": "the step cannot be traced with a part of its batch",
    "pallas_kernel": r"pallas_call at .*numerics.py",
}


def decorated(program: Program, dtype: str, count: int) -> tuple[Any, Any]:
    case = program.build(jnp.dtype(dtype).type)
    options = {"static_argnums": case.static_argnums, "static_argnames": case.static_argnames}
    step = autoshard(mesh=MESH[count], devices=eager_cluster(), microbatches=count, **options)(case.step)
    return case, step


def parameters() -> list[Any]:
    found: list[Any] = []
    for number, program in enumerate(p for p in PROGRAMS if p.microbatch):
        for dtype in LIMITS:
            for count in COUNTS:
                slice_ = dtype == "float32" and number % 3 == 0 and count == COUNTS[number % 2]
                marks: list[Any] = [] if slice_ else [pytest.mark.full]
                found.append(pytest.param(program, dtype, count, marks=marks, id=f"{program.name}-{dtype}-{count}"))
    return found


@pytest.mark.parametrize(("program", "dtype", "count"), parameters())
def test_equals_plain_jit(program: Program, dtype: str, count: int) -> None:
    with jax.enable_x64(dtype == "float64"):
        case, step = decorated(program, dtype, count)
        mine = run(case, step)
        plain = run(case, plain_jit(case))
        check_runs(mine, plain, LIMITS[dtype])
        (compiled,) = step._compiled.values()
        assert compiled.planned.plan.microbatches == count
        assert any(e.name == "scan" for e in compiled.planned.graph.equations)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if not p.microbatch], ids=lambda p: p.name)
def test_coupled_examples_are_refused(program: Program) -> None:
    case, step = decorated(program, "float32", 2)
    args, kwargs = case.fresh()
    with pytest.raises(MicrobatchError, match=REFUSED[program.name]) as caught:
        step.plan(*args, **kwargs)
    assert "\n  to do: " in str(caught.value)


def test_most_of_the_zoo_can_be_cut() -> None:
    assert sum(p.microbatch for p in PROGRAMS) >= 40
    assert set(REFUSED) == {p.name for p in PROGRAMS if not p.microbatch}


def wide_step(weights: Any, batch: Any) -> Any:
    """A step whose activations are larger than its weights."""

    def loss(w: Any) -> Any:
        h = batch
        for _ in range(4):
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def wide_arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(32, 32)).astype("f4"), draw.normal(size=(1024, 32)).astype("f4")


def limited(limit: int | None, **options: Any) -> Any:
    return autoshard(wide_step, devices=slow_links(), mesh=(8,), memory_limit=limit, **options)


def test_a_step_that_does_not_fit_is_cut() -> None:
    arguments = wide_arguments()
    whole = limited(None).plan(*arguments)
    assert whole.microbatches == 1
    limit = int(0.7 * whole.memory.peak_bytes)
    with pytest.raises(InfeasibleError):
        limited(limit, microbatches=1).plan(*arguments)
    step = limited(limit)
    plan = step.plan(*arguments)
    assert plan.microbatches > 1
    assert plan.memory.peak_bytes <= limit
    assert any(
        line.startswith((f"{plan.microbatches} microbatches: ", f"{plan.microbatches} microbatches and "))
        for line in plan.why
    )
    assert f"{plan.microbatches} microbatches, " in str(plan)
    mine, plain = step(*arguments), jax.jit(wide_step)(*arguments)
    assert max(gap for _, gap in distances(jax.device_get(mine), jax.device_get(plain))) < 1e-5


def test_what_never_fits_says_that_microbatches_do_not_help() -> None:
    with pytest.raises(InfeasibleError, match=r"tried too: 2 microbatches: .*, 4 microbatches: "):
        limited(1000).plan(*wide_arguments())


def test_a_plan_with_microbatches_is_loaded(tmp_path: Path) -> None:
    arguments = wide_arguments()
    plan = limited(None, microbatches=4).plan(*arguments)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert Plan.from_json(file.read_text()).microbatches == 4
    step = limited(None, plan=file)
    assert step.plan(*arguments).microbatches == 4
    assert jnp.allclose(step(*arguments)[1], jax.jit(wide_step)(*arguments)[1], rtol=1e-5)


def test_the_mean_of_a_mask_is_known_before() -> None:
    """A masked mean divides by the number of tokens in all microbatches, which differs between them."""

    def step(w: Any, batch: Any) -> Any:
        x, mask = batch["x"], batch["mask"]

        def loss(w: Any) -> Any:
            return jnp.sum(jnp.tanh(x @ w)[:, 0] ** 2 * mask) / jnp.sum(mask)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, {"loss": value, "tokens": jnp.sum(mask)}

    draw = np.random.default_rng(0)
    mask = np.arange(16) % 3 == 0
    batch = {"x": draw.normal(size=(16, 8)).astype("f4"), "mask": mask.astype("f4")}
    weights = draw.normal(size=(8, 8)).astype("f4")
    mine = autoshard(step, devices=eager_cluster(), mesh=(8,), microbatches=4)(weights, batch)
    plain = jax.jit(step)(weights, batch)
    assert max(gap for _, gap in distances(jax.device_get(mine), jax.device_get(plain))) < 1e-5


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean, jnp.max, jnp.min])
def test_metrics_combine_as_they_were_written(reduce: Any) -> None:
    """The user's reduction is kept: a sum is not averaged, a maximum not summed (alpa issues 400 and 268)."""

    def step(w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - 1e-3 * gradient, {"loss": value, "metric": reduce(x @ w)}

    draw = np.random.default_rng(0)
    weights, x = draw.normal(size=(8, 8)).astype("f4"), draw.normal(size=(16, 8)).astype("f4")
    mine = autoshard(step, devices=eager_cluster(), mesh=(8,), microbatches=2)(weights, x)
    plain = jax.jit(step)(weights, x)
    assert max(gap for _, gap in distances(jax.device_get(mine), jax.device_get(plain))) < 1e-5


def test_results_for_each_example_keep_their_order() -> None:
    def step(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        return w + jnp.mean(y), {"each": y[:, 0], "transposed": y.T}

    draw = np.random.default_rng(0)
    weights, x = draw.normal(size=(8, 8)).astype("f4"), draw.normal(size=(16, 8)).astype("f4")
    mine = autoshard(step, devices=eager_cluster(), mesh=(8,), microbatches=4)(weights, x)
    plain = jax.jit(step)(weights, x)
    assert max(gap for _, gap in distances(jax.device_get(mine), jax.device_get(plain))) < 1e-5


def test_half_precision_gradients_are_summed_in_single() -> None:
    """Sixteen microbatches of 1 + 2^-9: summed in bfloat16 the small part would be lost."""

    def step(w: Any, x: Any) -> Any:
        return w + jnp.sum(x, 0, dtype=jnp.bfloat16), jnp.sum(x)

    x = np.full((16, 8), 1 + 2**-7, jnp.bfloat16)
    mine = autoshard(step, devices=eager_cluster(), mesh=(8,), microbatches=16)(np.zeros(8, jnp.bfloat16), x)
    assert float(mine[0][0]) == 16.125


def test_one_example_that_is_special_is_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        y = x @ w if x.shape[0] > 4 else jnp.tanh(x @ w)
        return w - jnp.mean(y), jnp.mean(y)

    weights, x = np.ones((8, 8), "f4"), np.ones((8, 8), "f4")
    with pytest.raises(MicrobatchError, match="traced with fewer examples the step is another program"):
        autoshard(step, devices=eager_cluster(), mesh=(8,), microbatches=2).plan(weights, x)


@pytest.mark.parametrize("kind", ["power", "loop"])
def test_what_depends_on_the_number_of_examples_is_not_cut(kind: str) -> None:
    """The batch's size as an exponent, and as a trip count: a microbatch's own would be another function."""

    def step(w: Any, x: Any) -> Any:
        if kind == "power":
            y = (x @ w) ** x.shape[0]
        else:
            y, _ = jax.lax.scan(lambda h, _: (h * 0.9, None), x @ w, None, length=x.shape[0])
        return w - jnp.mean(y), jnp.mean(y)

    weights, x = np.ones((8, 8), "f4"), np.ones((8, 8), "f4")
    with pytest.raises(MicrobatchError, match="integer_pow .* has another y" if kind == "power" else "scan at"):
        autoshard(step, devices=eager_cluster(), mesh=(8,), microbatches=2).plan(weights, x)


def test_no_batch() -> None:
    with pytest.raises(MicrobatchError, match="no argument beside the state"):
        autoshard(lambda w: w - 0.5, devices=eager_cluster(), mesh=(8,), microbatches=2).plan(np.ones((8, 8), "f4"))


def test_effects_happen_once_a_step_with_all_examples() -> None:
    """Nobody reads what a callback makes; cut into microbatches it still runs, once."""
    seen: list[Any] = []

    def step(w: Any, x: Any) -> Any:
        y = x @ w
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), y)
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), w[0, 0])
        return w - jnp.mean(y), jnp.mean(y)

    weights, x = np.ones((8, 8), "f4"), np.arange(128, dtype="f4").reshape(16, 8)
    step_ = autoshard(step, devices=eager_cluster(), mesh=(8,), microbatches=4)
    jax.block_until_ready(step_(weights, x))
    jax.effects_barrier()
    assert sorted(v.shape for v in seen) == [(), (16, 8)]
    np.testing.assert_allclose(max(seen, key=np.size), x @ weights, rtol=1e-5)


def broken(kind: str) -> Any:
    """Steps that a critic broke."""

    def step(w: Any, x: Any) -> Any:
        mask = (x[:, 0] > 0).astype(x.dtype)
        k = 1 if x.shape[0] > 12 else 2

        def loss(w: Any) -> Any:
            features = h = jnp.tanh(x @ w)
            if kind == "slice":
                h = h[:, k : k + 4]
            if kind == "axes":
                return jnp.mean(jnp.sum(jnp.stack([h, 2 * h], 1), axis=k) ** 2), features
            each = jnp.sum(h**2, 1)
            masked = jnp.sum(each * mask) / jnp.maximum(mask.sum(), 1)
            return (masked if kind == "mask" else jnp.mean(each)), features

        (value, features), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        metrics = {
            "bits": lambda: jnp.bitwise_or.reduce((x[:, 0] * 8).astype(jnp.int32)),
            "bools": lambda: (jnp.max(x > 2, 0), jnp.min(x > -3, 0)),
            "features": lambda: features,
            "constant": lambda: np.arange(3),
        }
        return w - 0.1 * gradient, (value, metrics.get(kind, lambda: value)())

    return step


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["mask", "bits", "bools", "features", "constant"])
def test_steps_that_were_broken(kind: str, stages: int) -> None:
    draw = np.random.default_rng(0)
    w, x = draw.normal(size=(8, 8)).astype("f4"), draw.normal(size=(16, 8)).astype("f4")
    mine: Any = autoshard(broken(kind), devices=eager_cluster(), stages=stages, microbatches=4, donate_argnums=())
    plain: Any = jax.jit(broken(kind))
    assert max(gap for _, gap in distances(jax.device_get(mine(w, x)), jax.device_get(plain(w, x)))) < 1e-5


@pytest.mark.parametrize("kind", ["slice", "axes"])
def test_dimensions_and_slices_that_depend_on_the_number_of_examples_are_refused(kind: str) -> None:
    w, x = np.ones((8, 8), "f4"), np.ones((16, 8), "f4")
    with pytest.raises(MicrobatchError, match="is another program"):
        autoshard(broken(kind), devices=eager_cluster(), microbatches=4).plan(w, x)
