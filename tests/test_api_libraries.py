"""The decorator on Equinox, Linen, Haiku and Flax NNX programs."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

from autoshard.ir import partition_spec
from tests.api_problems import (
    ROWS,
    axes_of,
    check_training,
    counted,
    eager,
    make_nnx,
    nnx_distance,
    nnx_step,
)
from tests.helpers import distance

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.filterwarnings("ignore:.with mesh")]


def test_equinox_module() -> None:
    tx = optax.adam(1e-2)

    def fun(model: Any, opt_state: Any, x: Any, key: Any) -> Any:
        def loss(model: Any) -> Any:
            keys = jax.random.split(key, x.shape[0])
            return jnp.mean(jax.vmap(lambda row, k: model(row, key=k))(x, keys) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, value

    def make() -> Any:
        a, b = jax.random.split(jax.random.key(0))
        model = eqx.nn.Sequential(
            [
                eqx.nn.Linear(8, 16, key=a),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Dropout(0.5),
                eqx.nn.Linear(16, 8, key=b),
            ]
        )
        return model, tx.init(eqx.filter(model, eqx.is_array))

    x, key = jnp.ones((16, 8)), jax.random.key(1)
    step = eager(fun)
    mine, theirs = make(), make()
    plain: Any = eqx.filter_jit(fun)
    for _ in range(3):
        model, opt, value = step(*mine, x, key)
        mine = model, opt
        model, opt, expected = plain(*theirs, x, key)
        theirs = model, opt
        assert distance(value, expected) < 1e-5
    assert distance(eqx.filter(mine, eqx.is_array), eqx.filter(theirs, eqx.is_array)) < 1e-4
    quiet, *_ = step(eqx.nn.inference_mode(mine[0]), mine[1], x, key)
    assert quiet.layers[2].inference is True
    with pytest.raises(TypeError, match="required"):
        step(*make(), x)


def test_linen_train_state() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(8)(linen.relu(linen.Dense(32)(x)))

    def fun(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads), value

    net, tx = Net(), optax.adamw(1e-2)
    x = jnp.ones((16, 8))

    def make() -> Any:
        params = net.init(jax.random.key(0), x)
        return TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    check_training(eager(fun), fun, make, x)


def test_haiku() -> None:
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 8])(x)))

    def fun(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean(net.apply(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    x = jnp.ones((16, 8))
    check_training(eager(fun), fun, lambda: net.init(jax.random.PRNGKey(0), x), x)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys(make_key: Any) -> None:
    def fun(state: Any, x: Any) -> Any:
        key, use = jax.random.split(state["key"])
        w = state["w"] + jax.random.normal(use, (16, 8)) * jnp.mean(x)
        return {"key": key, "w": w}, jnp.sum(w)

    step = eager(fun)
    state = {"key": make_key(0), "w": jnp.ones((16, 8))}
    theirs = {"key": make_key(0), "w": jnp.ones((16, 8))}
    for _ in range(3):
        state, out = step(state, jnp.ones(8))
        theirs, expected = jax.jit(fun)(theirs, jnp.ones(8))
        assert distance(out, expected) < 1e-5
    data = [jax.random.key_data(s["key"]) if make_key is jax.random.key else s["key"] for s in (state, theirs)]
    assert np.array_equal(data[0], data[1])
    assert state["key"].dtype == theirs["key"].dtype


# Flax NNX.


def test_nnx_objects_are_updated_in_place() -> None:
    step, counter = counted(nnx_step)
    plain: Any = nnx.jit(nnx_step)
    x = ROWS
    mine, theirs = make_nnx(), make_nnx()
    kernel = mine[0].up.kernel
    for _ in range(3):
        assert distance(step(*mine, x), plain(*theirs, x)) < 1e-5
    assert mine[0].up.kernel is kernel
    assert nnx_distance(mine[0], theirs[0]) < 1e-4
    assert nnx_distance(mine[1], theirs[1]) < 1e-4
    assert int(mine[0].calls[...]) == 3
    assert counter.count == 1
    assert axes_of([kernel[...], *jax.tree.leaves(nnx.state(mine[1], nnx.optimizer.OptState))])


def test_nnx_shared_module_and_returned_objects() -> None:
    def fun(pair: Any, optimizer: Any, x: Any) -> Any:
        loss = nnx_step(pair["a"], optimizer, x)
        return pair["b"], nnx.Linear(8, 8, rngs=nnx.Rngs(0)), loss

    step = eager(fun)
    model, optimizer = make_nnx()
    for _ in range(2):
        same, new, _ = step({"a": model, "b": model}, optimizer, jnp.ones((16, 8)))
        assert same is model
        assert isinstance(new, nnx.Linear)
    assert int(model.calls[...]) == 2


def test_nnx_structural_change() -> None:
    def fun(model: Any, x: Any) -> Any:
        model.extra = nnx.Param(jnp.mean(x) + model.up.kernel[...])
        return jnp.sum(x)

    model, _ = make_nnx()
    step = eager(fun)
    step(model, jnp.ones((16, 8)))
    assert model.extra[...].shape == (8, 32)
    step(model, jnp.ones((16, 8)))
    assert model.extra[...].shape == (8, 32)


def test_nnx_static_attributes_are_seen() -> None:
    @eager
    def evaluate(model: Any, x: Any) -> Any:
        return model(x)

    model, _ = make_nnx()
    x = ROWS
    first, second = evaluate(model, x), evaluate(model, x)
    assert not np.array_equal(first, second)
    model.eval()
    assert np.array_equal(evaluate(model, x), evaluate(model, x))


def test_nnx_abstract_plan_init_and_train() -> None:
    step, counter = counted(nnx_step)
    x = ROWS
    plan = step.plan(*nnx.eval_shape(make_nnx), x)
    model, optimizer = step.init(make_nnx)
    specs = dict(zip((a.path for a in plan.inputs), plan.input_specs, strict=True))
    assert isinstance(model.up.kernel[...].sharding, NamedSharding)
    assert tuple(n for n, _ in plan.mesh) == model.up.kernel[...].sharding.mesh.axis_names
    assert model.up.kernel[...].sharding.spec == partition_spec(specs["model/up/kernel"])
    reference = make_nnx()
    assert nnx_distance(model, reference[0]) < 1e-6
    losses = [float(step(model, optimizer, x)["loss"]) for _ in range(3)]
    plain: Any = nnx.jit(nnx_step)
    assert np.allclose(losses, [float(plain(*reference, x)["loss"]) for _ in range(3)], rtol=1e-4)
    assert counter.count == 1, "the plan of the abstract objects is used again"


def test_nnx_state_untouched_when_the_step_fails() -> None:
    def fun(model: Any, x: Any) -> Any:
        model.calls[...] += 1
        return model(x) @ jnp.ones(3)

    model, _ = make_nnx()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    with pytest.raises(TypeError):
        eager(fun)(model, jnp.ones((16, 8)))
    assert int(model.calls[...]) == 0
    assert distance(nnx.to_pure_dict(nnx.state(model, nnx.Param)), before) == 0
