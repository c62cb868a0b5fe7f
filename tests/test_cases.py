"""What users of such systems ran into (public reports): the kind of program, with the right value as the test.

Each test names its reports. What the zoo runs anyway (every gradient leaf compared, dropout under remat, T5's shared
bias, accumulation, while loops, sums) is pinned here only where a particular sharding is the point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import autoshard
from autoshard.errors import PinError
from autoshard.runtime import collectives

from .helpers import distance, eager_cluster

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(900)]

MESH = {"data": 2, "model": 4}


def check(fun: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Runs a function planned and plain; the planned step, if they agree."""
    options = {"devices": eager_cluster(), "mesh": MESH, "donate_argnums": (), **options}
    step = autoshard(fun, **options)
    assert distance(step(*args), jax.jit(fun)(*args)) < 1e-5
    return step


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("table", [P("model"), P(None, "model"), P("data", "model"), P(("data", "model"))])
@pytest.mark.parametrize("ids", [P("data"), P()])
def test_embedding_gradients(table: P, ids: P) -> None:
    """openxla/xla#42481: scatter-add with tensor-parallel operands gave wrong sums."""

    def step(table: jax.Array, ids: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(table: jax.Array) -> jax.Array:
            return ((table[ids] @ w) ** 2).sum()

        value, grad = jax.value_and_grad(loss)(table)
        return table - 0.01 * grad, value

    ids_array = jax.random.randint(jax.random.key(1), (16, 8), 0, 64)
    check(step, normal(0, 64, 32), ids_array, normal(2, 32, 8), pins={"table": table, "ids": ids})


def test_resharding_is_not_full_rematerialization() -> None:
    """jax-ml/jax#21562: (y,-,x) to (-,xy,-) gathered the whole tensor."""

    def step(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * 2

    x = normal(0, 8, 16, 8)
    step = autoshard(step, devices=eager_cluster(), mesh=MESH, donate_argnums=(), pins={"x": P("model", None, "data")})
    plan = step.plan(x)
    assert all(c.nbytes < x.nbytes for c in plan.collectives)
    np.testing.assert_allclose(step(x), jnp.sin(x) * 2, rtol=1e-6)


def test_accumulation_keeps_the_reshape_local() -> None:
    """openxla/xla#19166, #13306: (batch) to (steps, batch/steps) before a scan brought all-to-alls."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(lambda w: jnp.mean((part @ w) ** 2))(w), None

        total, _ = jax.lax.scan(body, jnp.zeros_like(w), x.reshape(4, -1, x.shape[-1]))
        return w - 0.1 * total

    w, x = normal(0, 64, 32), normal(1, 64, 64)
    planned = check(step, w, x, mesh={"data": 8}, pins={"w": P()})
    kinds = {c.kind for c in collectives(planned.lower(w, x).compile().as_text())}
    assert "all_to_all" not in kinds


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("model", "data")])
def test_static_update_of_a_sharded_array(spec: P) -> None:
    """jax-ml/jax#23052: x.at[0:3].set with static indices."""
    check(lambda x: (x.at[0:3].set(1.0) * 2, x.at[2, 3:7].add(1.0)), normal(0, 16, 16), pins={"**": spec})


def test_gathers_over_several_dimensions() -> None:
    """alpa-projects/alpa#941: a gather over several dimensions aborted the process."""

    def step(x: jax.Array, i: jax.Array, j: jax.Array) -> tuple[jax.Array, ...]:
        grad = jax.grad(lambda x: (x[i, j] ** 2).sum())(x)
        return grad, x[i, :, j], x[:, i, j], x.at[i, j].multiply(2.0), jnp.take_along_axis(x, i[:, None, None] % 4, 1)

    i = jax.random.randint(jax.random.key(1), (16,), 0, 16)
    j = jax.random.randint(jax.random.key(2), (16,), 0, 8)
    check(step, normal(0, 16, 8, 8), i, j % 8)


def test_init_is_never_whole_on_one_device() -> None:
    """google/flax#3701, google-deepmind/optax#548, jax-ml/jax#19893: optimizer state and random bits."""
    import optax

    optimizer = optax.adam(1e-3)

    def make_state(key: jax.Array) -> dict[str, Any]:
        params = {"w": jax.random.normal(key, (1024, 1024))}
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        grads = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean())(state["params"])
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    planned = autoshard(step, devices=eager_cluster(), mesh={"data": 8}, pins={"state/**/w": P("data")})
    key = jax.random.key(0)
    planned.plan(jax.eval_shape(make_state, key), jax.ShapeDtypeStruct((8, 1024), jnp.float32))
    state = planned.init(make_state, key)
    whole = 1024 * 1024 * 4
    for leaf in (state["params"]["w"], state["opt"][0].mu["w"], state["opt"][0].nu["w"]):
        assert leaf.addressable_shards[0].data.nbytes == whole // 8
    np.testing.assert_array_equal(state["params"]["w"], make_state(key)["params"]["w"])
    program = jax.jit(make_state, out_shardings=jax.tree.map(lambda x: x.sharding, state)).lower(key).compile()
    stats: Any = program.memory_analysis()
    assert stats.temp_size_in_bytes + stats.output_size_in_bytes < whole


def test_stacked_layers_are_ordinary_dimensions() -> None:
    """google/flax#5172, #5112: optimizer state of stacked layers lost the extra axis."""
    import optax

    optimizer = optax.adam(1e-2)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt = state

        def loss(w: jax.Array) -> jax.Array:
            return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2).mean()

        updates, opt = optimizer.update(jax.grad(loss)(params), opt)
        return optax.apply_updates(params, updates), opt

    params = normal(0, 4, 32, 32) * 0.2
    planned = check(step, (params, optimizer.init(params)), normal(1, 8, 32))
    plan = planned.plan((params, optimizer.init(params)), normal(1, 8, 32))
    assert all(len(a.spec) == 3 for a in plan.inputs if a.type == "f32[4,32,32]")


def test_inputs_are_moved() -> None:
    """jax-ml/jax#19735: choose the shardings under normal jit and move my inputs to them."""
    x = jax.device_put(normal(0, 16, 16), jax.devices()[3])
    check(lambda x: x @ x, x)


@pytest.mark.parametrize("scale", [jnp.sum, jnp.mean])
def test_the_users_reduction_is_kept(scale: Any) -> None:
    """alpa-projects/alpa#268: a sum-reduced loss was averaged."""
    check(lambda w, x: jax.grad(lambda w: scale((x @ w) ** 2))(w), normal(0, 32, 16), normal(1, 16, 32))


def test_loops_of_products_are_split() -> None:
    """alpa-projects/alpa#400: a while_loop of matrix products had no strategy."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]

    planned = check(step, normal(0, 32, 32), normal(1, 16, 32))
    plan = planned.plan(normal(0, 32, 32), normal(1, 16, 32))
    assert any(any(a.spec) for a in plan.inputs)


def test_batch_of_one_and_a_second_plan() -> None:
    """alpa-projects/alpa#543, #776: batch 1 forced into data parallel; a second plan in the same process failed."""
    for _ in range(2):
        planned = check(lambda w, x: x @ w, normal(0, 64, 64), normal(1, 1, 64), mesh={"data": 8})
        plan = planned.plan(normal(0, 64, 64), normal(1, 1, 64))
        assert plan.inputs[1].spec[0] == ()


def test_rows_that_do_not_divide_are_said() -> None:
    """jax-ml/jax#26946: 17 rows over 8 devices were silently replicated."""
    planned = check(lambda x: jnp.sin(x), normal(0, 17, 3), mesh={"data": 8})
    plan = planned.plan(normal(0, 17, 3))
    (line,) = [line for line in plan.why if line.startswith("whole on every device: x")]
    assert "17" in line
    assert "divides by no mesh axis" in line


@pytest.mark.parametrize("pins", [{"x": P("data")}, {"w": P("model")}, {"x": P("data"), "w": P("model")}])
def test_strided_convolutions(pins: Any) -> None:
    """jax-ml/jax#16894: batch and output channels sharded gave other values."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return (jax.lax.conv_general_dilated(x, w, (2, 2), "SAME") ** 2).sum()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.01 * grad, value

    check(step, normal(0, 8, 4, 3, 3) * 0.1, normal(1, 8, 4, 16, 16), pins=pins)


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model"), P(("data", "model"))])
def test_working_axes_that_are_sharded(spec: P) -> None:
    """jax-ml/jax#21403, #19271, openxla/xla#49122, #49118: cumsum, top_k, argmax, sort, slices out of range."""

    def step(x: jax.Array, at: jax.Array) -> tuple[Any, ...]:
        return (
            jnp.cumsum(x, 0),
            jax.lax.cummax(x, 1),
            jax.lax.top_k(x, 3),
            jnp.argmax(x, 0),
            jnp.argmin(x, 1),
            jnp.sort(x, 0),
            jnp.argsort(x, 1),
            jax.lax.dynamic_slice(x, (at, at), (4, 4)),
            jax.lax.dynamic_update_slice(x, x[:4, :4], (at, at)),
            jnp.flip(x, 0),
            jnp.roll(x, 3, 1),
            jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 3), (1, 1), "SAME"),
            jnp.fft.fft(x, axis=0).real,
        )

    check(step, normal(0, 16, 16), jnp.int32(30), pins={"x": spec})


def test_top_k_is_not_planned_over_a_split_dimension() -> None:
    """top_k over a sharded dimension is all-gathered by the partitioner: the plan prefers to split the rows."""
    planned = check(lambda x: jax.lax.top_k(jnp.sin(x), 4), normal(0, 64, 64), mesh={"data": 8})
    assert planned.plan(normal(0, 64, 64)).inputs[0].spec == (("data",), ())


def test_pins_that_do_not_divide_are_one_line() -> None:
    """levanter PR#1261, jax-ml/jax#27808, marin#1317: path, dimension, size and axis, at planning time."""
    step = autoshard(lambda x: x * 2, devices=eager_cluster(), mesh=MESH, pins={"x": P("model")})
    with pytest.raises(PinError) as error:
        step.plan(jax.ShapeDtypeStruct((6, 8), jnp.float32))
    text = str(error.value)
    assert "x" in text
    assert "6" in text
    assert "model" in text
    assert "4" in text


@pytest.mark.parametrize("mesh", [(1,), (1, 8), (8, 1), (1, 1), (1, 2, 1)])
def test_meshes_with_axes_of_one(mesh: tuple[int, ...]) -> None:
    """autoparallel PR#22, #73: a mesh of one device failed; (1,n) and (n,1) are plain plans."""
    count = int(np.prod(mesh))
    w, x = normal(0, 32, 16), normal(1, 16, 32)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    names = ("a", "b", "c")[: len(mesh)]
    devices = np.array(jax.devices()[:count]).reshape(mesh)
    check(step, w, x, mesh=jax.sharding.Mesh(devices, names), devices=eager_cluster(count))


def test_products_of_axes_fit_the_dimension() -> None:
    """autoparallel PR#22: a dimension of 32 over 256 devices."""
    step = autoshard(lambda w, x: x @ w, devices="h100x256", mesh=(16, 16))
    plan = step.plan(jax.ShapeDtypeStruct((4096, 32), jnp.float32), jax.ShapeDtypeStruct((32, 4096), jnp.float32))
    sizes = dict(plan.mesh)
    for a in (*plan.inputs, *plan.outputs):
        shape = [int(n) for n in a.type[a.type.index("[") + 1 : -1].split(",")]
        for n, axes in zip(shape, a.spec, strict=True):
            assert n % int(np.prod([sizes[axis] for axis in axes])) == 0


def test_checkpoints_restore_on_fewer_devices(tmp_path: Any) -> None:
    """orbax#648, #683, #2540: save on 8, restore on 4, 2 and 1, typed keys included."""
    import orbax.checkpoint as ocp

    def step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        key, now = jax.random.split(state["key"])
        noise = jax.random.normal(now, x.shape)
        grad = jax.grad(lambda w: (((x + noise) @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.1 * grad, "key": key}

    def stepper(count: int) -> Any:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))
        return autoshard(step, mesh=mesh, devices=eager_cluster(count), pins={"state/w": P("data")}, donate_argnums=())

    start = {"w": normal(0, 32, 16), "key": jax.random.key(7)}
    x = normal(1, 16, 32)
    eight = stepper(8)
    state = eight(start, x)
    after = eight(state, x)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", {"w": state["w"], "key": jax.random.key_data(state["key"])})
    for count in (4, 2, 1):
        fewer = stepper(count)
        fewer.plan(start, x)
        (shardings, _), _ = fewer.shardings(start, x)
        target = {
            "w": jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=shardings["w"]),
            "key": jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=shardings["key"]),
        }
        with ocp.StandardCheckpointer() as reader:
            raw = reader.restore(tmp_path / "state", target)
        restored = {"w": raw["w"], "key": jax.random.wrap_key_data(raw["key"])}
        assert len(restored["w"].sharding.device_set) == count
        assert distance(fewer(restored, x)["w"], after["w"]) < 1e-6
