"""Binding calls, naming leaves, flat functions, state pairs."""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from autoshard.errors import ArgumentError
from autoshard.ir import StepInfo, trace
from autoshard.runtime.arguments import Call, Static, bind, has_tracer
from autoshard.runtime.outputs import FlatFunction
from autoshard.runtime.pairing import describe
from autoshard.runtime.parameters import read_parameters


def call_of(fun: Any, *args: Any, static: Any = None, donate: Any = None, **kwargs: Any) -> Call:
    return bind(read_parameters(fun, None, static, donate), args, kwargs)


def info_of(fun: Any, *args: Any, donate: Any = None, **kwargs: Any) -> StepInfo:
    call = call_of(fun, *args, donate=donate, **kwargs)
    flat = FlatFunction(fun, call.template, call.slashes)
    graph = trace(flat, call.avals)
    assert flat.outputs is not None
    return describe(call, flat.outputs, graph)


def named(info: StepInfo) -> tuple[dict[str, str], set[str]]:
    pairs = {info.input_paths[i]: info.output_paths[o] for i, o in info.pairs}
    return pairs, {info.input_paths[i] for i in info.donated}


def step(state: Any, batch: Any, *rest: Any, scale: Any = 1.0, **more: Any) -> Any:
    return state, batch, rest, scale, more


class Point(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1


def test_paths() -> None:
    call = call_of(
        step,
        {"params": {"mlp/~/linear": {"w": jnp.ones(2)}}, "opt": Point(1, 2.0)},
        [np.zeros(3), jnp.ones(())],
        jnp.ones(1),
        scale=2.0,
        z=jnp.ones(4),
        a=jnp.ones(5),
    )
    assert call.paths == (
        "state['opt'].x",
        "state['opt'].y",
        "state['params']['mlp/~/linear']['w']",
        "batch[0]",
        "batch[1]",
        "rest[0]",
        "scale",
        "more['a']",
        "more['z']",
    )
    assert call.slashes == (
        "state/opt/x",
        "state/opt/y",
        "state/params/mlp/~/linear/w",
        "batch/0",
        "batch/1",
        "rest/0",
        "scale",
        "more/a",
        "more/z",
    )
    assert call.owners == (0, 0, 0, 1, 1, 2, 3, 4, 5)


def test_avals_are_those_of_jit() -> None:
    values = (1, 1.0, True, 1j, np.float64(2), np.ones(3, np.int64), jax.random.key(0), jnp.ones(2, jnp.bfloat16))
    call = call_of(lambda *args: args, *values)
    jaxpr = jax.make_jaxpr(lambda *args: args)(*values)
    assert [(a.shape, a.dtype, a.weak_type) for a in call.avals] == [
        (v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in jaxpr.jaxpr.invars
    ]


def test_shapes_bind_like_arrays() -> None:
    arrays = {"w": jnp.ones((2, 3)), "k": jax.random.key(1)}
    shapes = jax.eval_shape(lambda: arrays)
    assert call_of(step, arrays, 1).key == call_of(step, shapes, 1).key
    assert call_of(step, arrays, 1).abstract is None
    assert call_of(step, shapes, 1).abstract == "state['k']"


def test_keywords_and_positions_are_one_signature() -> None:
    plain = call_of(step, 1.0, 2.0)
    assert plain.key == call_of(step, 1.0, batch=2.0).key == call_of(step, batch=2.0, state=1.0).key

    def gap(a: Any, b: Any = 1, c: Any = 2) -> Any:
        return a, b, c

    assert call_of(gap, 1.0, 2.0).key != call_of(gap, 1.0, c=2.0).key
    rebuilt = call_of(gap, 1.0, c=2.0).template.rebuild([5.0, 6.0])
    assert (rebuilt.args, rebuilt.kwargs) == ((5.0,), {"c": 6.0})


def test_rebuild_is_the_inverse() -> None:
    args = ({"w": 1.0, "f": jnp.sin, "n": None, "s": "relu", "e": Color.RED, "d": np.dtype("float32")}, [2.0], 3.0)
    call = call_of(step, *args, scale=4.0, more=5.0)
    rebuilt = call.template.rebuild(call.flat)
    assert rebuilt.args == args
    assert rebuilt.kwargs == {"scale": 4.0, "more": 5.0}
    assert call.flat == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_static_leaves_are_compared_by_value_and_type() -> None:
    def key(value: Any) -> Any:
        return call_of(step, {"x": 1.0, "kind": value}, 1.0).key

    assert key("relu") == key("re" + "lu")
    assert key("relu") != key("gelu")
    assert Static(1) != Static(True)
    assert hash(Static((1, 2))) == hash(Static((1, 2)))
    assert call_of(step, 1.0, 2, static="batch").key != call_of(step, 1.0, True, static="batch").key


def test_unhashable_static_leaf_is_named() -> None:
    class Box:
        def __eq__(self, other: object) -> bool:
            return True

    with pytest.raises(ArgumentError, match=r"state\['a'\]\[0\] is a Box, which is neither an array nor hashable") as e:
        call_of(step, {"a": [Box()]}, 1.0)
    assert "to do: make it an array" in str(e.value)
    with pytest.raises(ArgumentError, match="batch is a list, which is neither an array nor hashable"):
        call_of(step, 1.0, [1], static="batch")


def test_too_large_a_number() -> None:
    with pytest.raises(ArgumentError, match="batch is 1" + "0" * 20):
        call_of(step, 1.0, 10**20)


def test_missing_and_unknown_arguments_are_pythons_errors() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        call_of(step, 1.0)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'c'"):
        call_of(lambda a: a, 1.0, c=2.0)
    with pytest.raises(TypeError, match="too many positional arguments"):
        call_of(lambda a: a, 1.0, 2.0)


def test_builtins_without_a_signature() -> None:
    call = call_of(functools.partial(jnp.add, jnp.ones(2)), jnp.ones(2))
    assert call.flat[0].shape == (2,)
    assert call_of(max, 1.0, 2.0).slashes == ("args/0", "args/1")


def test_equinox_modules_work_as_they_are() -> None:
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(4, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.5), eqx.nn.Lambda(jax.nn.relu)]
    )
    call = call_of(step, model, 0.5)
    assert [p.removeprefix("state/") for p in call.slashes] == ["layers/0/weight", "layers/0/bias", "batch"]
    quiet = eqx.nn.inference_mode(model)
    assert call_of(step, quiet, 0.5).key != call.key


def test_linen_and_haiku_and_typed_keys() -> None:
    dense = linen.Dense(3)
    params = dense.init(jax.random.key(0), jnp.ones((1, 2)))
    state = TrainState.create(apply_fn=dense.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    call = call_of(step, state, 1.0)
    assert "state/params/params/kernel" in call.slashes
    assert "state.opt_state[0].trace['params']['bias']" in call.paths
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
    call = call_of(step, net.init(jax.random.PRNGKey(0), jnp.ones((1, 2))), jax.random.key(3))
    assert call.slashes == ("state/linear/b", "state/linear/w", "batch")


def test_tracers_are_seen() -> None:
    seen: list[bool] = []
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def inner(x: Any) -> Any:
        seen.append(has_tracer(({"a": [x]}, 1, "s")))
        seen.append(has_tracer(({"a": 1}, model)))
        return x

    jax.eval_shape(inner, 1.0)
    nnx.eval_shape(lambda m: (seen.append(has_tracer([m])), m)[1], model)
    assert seen == [True, False, True]


# Pairs and donation.


def sgd(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] + p["b"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


PARAMS = {"w": jnp.ones((3, 3)), "b": jnp.zeros((1, 3))}


def test_state_is_found_and_donated() -> None:
    pairs, donated = named(info_of(sgd, PARAMS, jnp.ones((4, 3))))
    assert pairs == {"params/b": "out/0/b", "params/w": "out/0/w"}
    assert donated == {"params/b", "params/w"}


def test_gradients_are_not_state() -> None:
    def gradients(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] + p["b"]) ** 2) + 0.1 * jnp.sum(p["w"] ** 2))(
            params
        )

    info = info_of(gradients, PARAMS, jnp.ones((4, 3)))
    assert info.pairs == ()
    assert info.donated == ()


def test_a_batch_of_an_outputs_shape_is_not_donated() -> None:
    def shift(params: Any, x: Any) -> Any:
        return {k: v + 1.0 for k, v in params.items()}, x + params["w"]

    pairs, donated = named(info_of(shift, PARAMS, jnp.ones((3, 3))))
    assert pairs["x"] == "out/1"
    assert donated == {"params/w", "params/b"}


def test_momentum_alone_is_state_beside_parameters() -> None:
    def momentum(params: Any, velocity: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean((batch @ p["w"] + p["b"]) ** 2))(params)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return jax.tree.map(jnp.subtract, params, velocity), velocity

    pairs, donated = named(info_of(momentum, PARAMS, PARAMS, jnp.ones((4, 3))))
    assert pairs == {f"{a}/{k}": f"out/{i}/{k}" for i, a in enumerate(("params", "velocity")) for k in "wb"}
    assert len(donated) == 4


def test_pieces_of_an_argument() -> None:
    def whole(carry: Any, batch: Any) -> Any:
        params, count = carry
        new, loss = sgd(params, batch)
        return loss, {"params": new, "count": count + 1}

    pairs, donated = named(info_of(whole, (PARAMS, jnp.int32(0)), jnp.ones((4, 3))))
    assert pairs == {
        "carry/0/w": "out/1/params/w",
        "carry/0/b": "out/1/params/b",
        "carry/1": "out/1/count",
    }
    assert len(donated) == 3


def test_state_through_control_flow() -> None:
    def many(params: Any, batches: Any, skip: Any) -> Any:
        params, losses = jax.lax.scan(sgd, params, batches)
        return jax.lax.cond(skip, lambda p: p, lambda p: jax.tree.map(lambda v: v + 1.0, p), params), losses

    pairs, _ = named(info_of(many, PARAMS, jnp.ones((2, 4, 3)), False))
    assert set(pairs) == {"params/w", "params/b"}

    def loop(params: Any, batch: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, p: sgd(p, batch)[0], params)

    pairs, _ = named(info_of(loop, PARAMS, jnp.ones((4, 3))))
    assert set(pairs) == {"params/w", "params/b"}


def test_gradients_of_scanned_layers_are_not_state() -> None:
    def gradients(stack: Any, x: Any) -> Any:
        def loss(stack: Any) -> Any:
            return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack["w"])[0])

        return jax.grad(loss)(stack)

    assert info_of(gradients, {"w": jnp.ones((2, 3, 3))}, jnp.ones((4, 3))).pairs == ()


def test_donate_argnums_overrides() -> None:
    assert info_of(sgd, PARAMS, jnp.ones((4, 3)), donate=()).donated == ()
    assert info_of(sgd, PARAMS, jnp.ones((4, 3)), donate=()).pairs != ()
    _, donated = named(info_of(sgd, PARAMS, jnp.ones((4, 3)), donate=(1,)))
    assert donated == {"batch"}
    _, donated = named(info_of(sgd, PARAMS, jnp.ones((4, 3)), donate=-1))
    assert donated == {"batch"}


def test_lone_arrays_are_donated_only_in_front() -> None:
    def update(w: Any, v: Any, x: Any) -> Any:
        return w + jnp.sum(x), v + 1.0

    pairs, donated = named(info_of(update, jnp.ones(3), jnp.ones(3), jnp.ones(2)))
    assert pairs == {"w": "out/0", "v": "out/1"}
    assert donated == {"w"}


def test_key_in_state_is_donated_and_a_lone_key_is_not() -> None:
    def noisy(state: Any, key: Any) -> Any:
        inner, use = jax.random.split(state["key"])
        return {"key": inner, "w": state["w"] + jax.random.normal(use, (3,))}, jax.random.fold_in(key, 1)

    _, donated = named(info_of(noisy, {"key": jax.random.key(0), "w": jnp.ones(3)}, jax.random.key(1)))
    assert donated == {"state/key", "state/w"}


def test_outputs_that_are_not_arrays_stay_aside() -> None:
    def mixed(x: Any) -> Any:
        return {"y": x + 1, "name": "mse", "fun": jnp.sin, "none": None, "n": 3, "a": np.ones(2, np.float32)}

    call = call_of(mixed, jnp.ones(2))
    flat = FlatFunction(mixed, call.template, call.slashes)
    trace(flat, call.avals)
    assert flat.outputs is not None
    assert flat.outputs.paths == ("out/a", "out/n", "out/y")
    result = flat.outputs.rebuild([1, 2, 3], None)
    assert result == {"y": 3, "name": "mse", "fun": jnp.sin, "none": None, "n": 2, "a": 1}


def test_output_parts() -> None:
    def parts(x: Any) -> Any:
        return {"b": (x, x), "a": None, "c": "static"}, x, {}

    info = info_of(parts, jnp.ones(2))
    assert info.output_paths == ("out/0/b/0", "out/0/b/1", "out/1")
    assert info.output_parts == (0, 0, 1)
    assert info_of(lambda x: x, jnp.ones(2)).output_parts == (0,)


# Flax NNX.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0))


def nnx_step(model: Any, optimizer: Any, x: Any) -> Any:
    def loss(model: Any) -> Any:
        return jnp.mean(model.dropout(model.linear(x)) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    model.count[...] += 1
    return value


def make_nnx() -> tuple[Block, nnx.Optimizer[Block]]:
    model = Block(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.mark.implicit_promotion  # optax
def test_nnx_paths_and_pairs() -> None:
    model, optimizer = make_nnx()
    info = info_of(nnx_step, model, optimizer, jnp.ones((2, 3)))
    assert "model/linear/kernel" in info.input_paths
    assert any(
        path.startswith("optimizer/opt_state/") and path.endswith("mu/linear/kernel") for path in info.input_paths
    )
    pairs, donated = named(info)
    state = [path for path in info.input_paths if path != "x"]
    assert pairs == {path: path for path in state}
    assert donated == set(state)
    assert info.output_parts[-1] == 0
    assert set(info.output_parts[:-1]) == {-1}


def test_nnx_shared_references_are_one_input() -> None:
    model, _ = make_nnx()
    call = call_of(step, model, {"again": model.linear, "kernel": model.linear.kernel})
    assert sum(path.endswith("kernel") for path in call.slashes) == 1
    rebuilt = call.template.rebuild(call.flat)
    first, second = rebuilt.args
    assert second["again"] is first.linear
    assert second["kernel"] is first.linear.kernel


def test_nnx_abstract_objects_bind_like_real_ones() -> None:
    model, optimizer = make_nnx()
    shapes = nnx.eval_shape(make_nnx)
    real, abstract = call_of(step, model, 1.0), call_of(step, shapes[0], 1.0)
    assert real.avals == abstract.avals
    assert real.slashes == abstract.slashes
    assert abstract.abstract is not None
    assert call_of(step, (model, optimizer), 1.0).flat
