"""The decorator and meshes: the user's own, of either axis type; arrays that lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.api import autoshard
from autoshard.errors import MeshError
from tests.api_problems import (
    ROWS,
    auto_mesh,
    counted,
    eager,
    make_batch,
    make_nnx,
    make_state,
    nnx_step,
    train_step,
)
from tests.helpers import distance

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.filterwarnings("ignore:.with mesh")]

# Meshes.


@pytest.fixture(params=["option", "with", "set_mesh"])
def within(request: pytest.FixtureRequest) -> Callable[[Any], tuple[dict[str, Any], Any]]:
    def enter(mesh: Any) -> tuple[dict[str, Any], Any]:
        if request.param == "option":
            return {"mesh": mesh}, jax.named_scope("none")
        return {}, mesh if request.param == "with" else jax.set_mesh(mesh)

    return enter


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_users_mesh_of_either_type(kind: Any, within: Any) -> None:
    mesh = auto_mesh(kind=kind)
    options, context = within(mesh)
    state, batch = make_state(jax.random.key(0)), make_batch()
    pins = {"batch/*": P("x"), "**/w": P(None, "y")}
    step, counter = counted(train_step, pins=pins, devices="auto", **options)
    with context:
        for _ in range(3):
            state, out = step(state, batch)
        plan = step.plan(state, batch)
    assert plan.mesh == (("x", 2), ("y", 4))
    assert state["p"]["w"].sharding.mesh == mesh
    assert state["p"]["w"].sharding.spec == P(None, "y")
    assert counter.count == 1
    theirs = make_state(jax.random.key(0))
    for _ in range(3):
        theirs, expected = jax.jit(train_step)(theirs, batch)
    assert distance(out, expected) < 1e-5
    assert distance(state, theirs) < 1e-4


def test_nnx_on_an_explicit_mesh() -> None:
    model, optimizer = make_nnx()
    reference = make_nnx()
    x = ROWS
    step = autoshard(nnx_step, mesh=auto_mesh(kind=AxisType.Explicit), pins={"x": P("x")})
    plain: Any = nnx.jit(nnx_step)
    for _ in range(3):
        assert distance(step(model, optimizer, x), plain(*reference, x)) < 1e-4


def test_the_mesh_around_may_change() -> None:
    step, counter = counted(train_step, devices="auto")
    state, batch = make_state(jax.random.key(0)), make_batch()
    for _ in range(2):
        for shape in ((8, 1), (2, 4)):
            with jax.set_mesh(auto_mesh(shape)):
                state, _ = step(state, batch)
                assert state["p"]["w"].sharding.mesh.devices.shape == shape
        state, _ = step(state, batch)
    assert counter.count == 3


def test_part_of_the_devices() -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[4:8]), ("data",))
    step = autoshard(train_step, mesh=mesh, pins={"state/*/*": P("data")})
    state, _ = step(make_state(jax.random.key(0)), make_batch())
    assert state["p"]["w"].sharding.device_set == set(jax.devices()[4:8])
    with pytest.raises(
        MeshError, match=r"state\['mu'\]\['v'\] lies on devices \[0\], the plan runs on the mesh .*'data': 4"
    ):
        step(jax.device_put(make_state(jax.random.key(0)), jax.devices()[0]), make_batch())
    other = NamedSharding(jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("z",)), P())
    with pytest.raises(MeshError, match=r"lies on the mesh \{'z': 4\} of cpu devices 0, 1, 2, 3, the plan runs on"):
        step(jax.device_put(make_state(jax.random.key(0)), other), make_batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": (4,)}, r"mesh \{'data': 4\} of 4 devices for 'auto', which has 8"),
        ({"mesh": (4, 4)}, "of 16 devices for 'auto', which has 8"),
        ({"mesh": (4,), "devices": "h100x8"}, "of 4 devices for 'h100x8', which has 8"),
    ],
)
def test_mesh_and_devices_disagree(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        autoshard(train_step, **options).plan(make_state(jax.random.key(0)), make_batch())


def test_meshes_that_contradict_each_other() -> None:
    given = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("data",))
    step = autoshard(train_step, mesh=given)
    message = r"given the mesh \{'data': 4\} of cpu devices 0, 1, 2, 3, and the call stands inside the mesh .*'x': 2"
    with jax.set_mesh(auto_mesh()), pytest.raises(MeshError, match=message):
        step.plan(make_state(jax.random.key(0)), make_batch())
    with jax.set_mesh(given), pytest.raises(MeshError, match=r"given the mesh \{'data': 8\} of 8 devices, and"):
        autoshard(train_step, mesh=(8,)).plan(make_state(jax.random.key(0)), make_batch())
    with jax.set_mesh(auto_mesh()):
        plan = autoshard(train_step, mesh=auto_mesh((8,), ("all",))).plan(make_state(jax.random.key(0)), make_batch())
    assert plan.mesh == (("all", 8),)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_lie_elsewhere_are_moved(kind: Any) -> None:
    mesh = auto_mesh()
    step, counter = counted(train_step, mesh=mesh, pins={"**/w": P("x", "y"), "batch/*": P("x")})
    other = auto_mesh((8,), ("z",), kind)
    expected = jax.jit(train_step)(make_state(jax.random.key(0)), make_batch())
    places: list[Any] = [NamedSharding(other, P("z")), NamedSharding(other, P()), jax.devices()[3], jax.devices()[0]]
    for target in places:
        for _ in range(2):
            state = make_state(jax.random.key(0))
            moved = {k: jax.device_put(v, target) for k, v in state.items() if k != "n"} | {"n": state["n"]}
            batch = jax.device_put(make_batch(), target)
            assert distance(step(moved, batch), expected) < 1e-5
            assert not any(x.is_deleted() for x in jax.tree.leaves(batch))
    assert counter.count == 1


def test_the_same_array_twice_in_a_donated_state() -> None:
    def fun(state: Any, other: Any) -> Any:
        return jax.tree.map(lambda w: w + 1.0, state), sum(jax.tree.leaves(other))

    step = autoshard(fun, mesh=jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",)))
    for _ in range(3):
        w = jnp.ones((8, 8))
        state, out = step({"w": w, "ema": w}, {"also": w})
        assert state["ema"].tolist() == state["w"].tolist() == [[2.0] * 8] * 8
        assert out.tolist() == [[1.0] * 8] * 8
    split = eager(fun)
    for _ in range(3):
        state, _ = split({"w": state["w"], "ema": state["w"]}, {"also": jnp.ones((8, 8))})
        state, _ = split({"w": state["w"], "ema": state["w"]}, {"also": state["w"]})


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """No test leaves a mesh context behind."""
    yield
    assert jax.sharding.get_abstract_mesh().empty
