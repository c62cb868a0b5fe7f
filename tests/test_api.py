"""The decorator as users see it: decorating, calling, planning."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.api import Step, autoshard
from autoshard.errors import (
    ArgumentError,
    AutoshardWarning,
    ClusterError,
    InfeasibleError,
    MeshError,
    PinError,
    PlanError,
    TraceError,
)
from autoshard.runtime.initialise import init_program
from autoshard.runtime.options import parse_memory
from tests.api_problems import (
    axes_of,
    check_training,
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

# Decorating.


def test_three_ways_to_decorate() -> None:
    @autoshard
    def one(x: Any) -> Any:
        """Text."""
        return x + 1

    @autoshard()
    def two(x: Any) -> Any:
        return x + 1

    three = autoshard(lambda x: x + 1, seed=1)
    assert one.__doc__ == "Text."
    assert one.__name__ == "one"
    assert one.__wrapped__(1) == 2
    assert repr(one) == "autoshard(one)"
    for step in (one, two, three):
        assert isinstance(step, Step)
        assert step(jnp.ones(8)).tolist() == [2.0] * 8


def test_partials_and_lambdas_and_callable_objects() -> None:
    class Adder:
        def __call__(self, x: Any) -> Any:
            return x + 1

    for fun in (functools.partial(jnp.add, 1.0), lambda x: x + 1, Adder()):
        assert autoshard(fun)(jnp.ones(8)).tolist() == [2.0] * 8
    scaled = autoshard(functools.partial(lambda x, *, scale: x * scale, scale=3.0))
    assert scaled(jnp.ones(8)).tolist() == [3.0] * 8
    assert scaled(jnp.ones(8), scale=4.0).tolist() == [4.0] * 8


def test_methods() -> None:
    class Trainer:
        def __init__(self, lr: float) -> None:
            self.lr = lr

        @autoshard
        def step(self, w: Any, x: Any) -> Any:
            return w - self.lr * x, jnp.sum(x)

        @staticmethod
        @autoshard
        def double(x: Any) -> Any:
            return 2 * x

    a, b = Trainer(1.0), Trainer(2.0)
    for trainer in (a, b, a):
        assert trainer.step(jnp.ones(8), jnp.ones(8))[0].tolist() == [1.0 - trainer.lr] * 8
    assert a.step.plan(jnp.ones(8), x=jnp.ones(8)).inputs[0].path == "w"
    assert isinstance(Trainer.step, Step)
    assert a.double(jnp.ones(8)).tolist() == [2.0] * 8
    bound = autoshard(functools.partial(Trainer.step.__wrapped__, a))
    assert bound(jnp.ones(8), jnp.ones(8))[0].tolist() == [0.0] * 8
    a.step.clear_cache()
    a.step.lower(jnp.ones(8), jnp.ones(8)).compile()
    assert len(a.step.shardings(jnp.ones(8), jnp.ones(8))[0]) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fun": 3}, ArgumentError, "given a int to decorate.\n  expected: a function"),
        ({"mesh": "2x4"}, ArgumentError, "mesh='2x4'.\n  expected: None"),
        ({"mesh": ()}, ArgumentError, r"mesh=\(\)"),
        ({"mesh": (2.0, 4)}, ArgumentError, r"mesh=\(2.0, 4\)"),
        ({"mesh": (True, 8)}, ArgumentError, r"mesh=\(True, 8\)"),
        ({"mesh": (0, 8)}, MeshError, r"a mesh of shape \(0, 8\)"),
        ({"mesh": {"data": -8}}, MeshError, "sizes of at least 1"),
        ({"mesh": (("data", 2), ("data", 4))}, MeshError, "names 'data' twice"),
        ({"static_argnums": 5}, ArgumentError, r"train_step has 3 positional .*\(state, batch, lr\)"),
        ({"static_argnums": -4}, ArgumentError, "positions from -3 to 2"),
        ({"static_argnums": "lr"}, ArgumentError, "static_argnums='lr'.*\n.*\n  to do: use static_argnames for names"),
        ({"static_argnames": "rate"}, ArgumentError, "'rate', but the parameters of train_step are batch, lr"),
        ({"static_argnames": 2}, ArgumentError, "static_argnames=2"),
        ({"static_argnames": (2,)}, ArgumentError, r"static_argnames=\(2,\)"),
        ({"donate_argnums": 3}, ArgumentError, "donate_argnums=3, but train_step has 3 positional"),
        ({"donate_argnums": 1.5}, ArgumentError, "donate_argnums=1.5"),
        ({"donate_argnums": 2, "static_argnames": "lr"}, ArgumentError, "'lr' of train_step is both static and"),
        ({"memory_limit": -1}, ArgumentError, "memory_limit=-1.\n  expected: bytes on one device, positive"),
        ({"memory_limit": "24 gigs"}, ArgumentError, "memory_limit='24 gigs'"),
        ({"memory_limit": [1]}, ArgumentError, r"memory_limit=\[1\]"),
        ({"memory_limit": float("nan")}, ArgumentError, "memory_limit=nan"),
        ({"budget": 0}, ArgumentError, "budget=0.\n  expected: seconds"),
        ({"budget": "1"}, ArgumentError, "budget='1'"),
        ({"seed": 1.0}, ArgumentError, "seed=1.0"),
        ({"seed": -1}, ArgumentError, "seed=-1"),
        ({"dump_dir": 3}, ArgumentError, "dump_dir=3"),
        ({"pins": P()}, ArgumentError, "pins is a P"),
        ({"plan": 3}, PlanError, "load was given a int"),
        ({"plan": "/nowhere/plan.json"}, PlanError, "/nowhere/plan.json"),
        ({"meshes": 3}, ArgumentError, "the option meshes=3"),
        ({"stages": 2}, ArgumentError, "stages=2, which is not available yet.*\n  expected: None or 1"),
        ({"microbatches": 0}, ArgumentError, "microbatches=0.\n  expected: an int of at least 1"),
        ({"microbatches": True}, ArgumentError, "microbatches=True"),
        ({"schedule": "1f1b"}, ArgumentError, "schedule='1f1b', which is not available yet"),
        ({"remat": "full"}, ArgumentError, "remat='full'"),
        ({"sync": "delayed"}, ArgumentError, "sync='delayed', which is not available yet"),
        ({"period": 8}, ArgumentError, "period=8, which is not available yet"),
        ({"delay": 1}, ArgumentError, "delay=1, which is not available yet"),
        ({"merge": True}, ArgumentError, "merge=True, which is not available yet"),
        ({"warmup_steps": 10}, ArgumentError, "warmup_steps=10, which is not available yet"),
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    fun = options.get("fun", train_step)
    with pytest.raises(error, match=message) as caught:
        autoshard(fun, **{k: v for k, v in options.items() if k != "fun"})
    assert "\n  expected: " in str(caught.value)
    assert "\n  to do: " in str(caught.value)


def test_decorating_twice() -> None:
    with pytest.raises(ArgumentError, match=r"autoshard\(train_step\) is decorated already"):
        autoshard(autoshard(train_step))


def test_options_of_one_mesh_are_taken() -> None:
    neutral: dict[str, Any] = {"stages": 1, "microbatches": 1, "schedule": None, "remat": False, "sync": True}
    assert isinstance(autoshard(train_step, period=1, delay=0, merge=False, warmup_steps=0, **neutral), Step)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1024, 1024), ("24GiB", 24 << 30), ("80 GB", 80 * 10**9), ("1.5MiB", 3 << 19), ("100", 100), ("2K", 2000)],
)
def test_memory_limits(limit: Any, expected: int) -> None:
    assert parse_memory(limit) == expected


def test_memory_limit_is_the_plans() -> None:
    plan = eager(train_step, memory_limit="1GiB").plan(jax.eval_shape(make_state, jax.random.key(0)), make_batch())
    assert plan.memory_limit == 1 << 30
    with pytest.raises(InfeasibleError, match="the limit is"):
        eager(train_step, memory_limit=1000).plan(make_state(jax.random.key(0)), make_batch())


# Calling.


def test_plan_then_train() -> None:
    step = eager(train_step)
    plan = step.plan(jax.eval_shape(make_state, jax.random.key(0)), make_batch())
    assert any(axes for spec in plan.input_specs for axes in spec)
    state = check_training(step, train_step, lambda: make_state(jax.random.key(0)), make_batch())
    assert axes_of(state)


def test_devices_auto() -> None:
    check_training(autoshard(train_step), train_step, lambda: make_state(jax.random.key(0)), make_batch())


def test_state_is_donated_and_the_batch_is_not() -> None:
    step = eager(train_step)
    first, batch = make_state(jax.random.key(0)), jax.tree.map(jnp.asarray, make_batch())
    second, _ = step(first, batch)
    third, _ = step(second, batch)
    assert second["p"]["w"].is_deleted()
    assert not third["p"]["w"].is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))
    keep = eager(train_step, donate_argnums=())
    again, _ = keep(third, batch)
    keep(third, batch)
    assert not again["p"]["w"].is_deleted()


def test_keywords_positions_and_defaults() -> None:
    step, counter = counted(train_step)
    batch = make_batch()
    state = make_state(jax.random.key(0))
    for _ in range(2):
        state, _ = step(state, batch)
        state, _ = step(state, batch=batch)
        state, _ = step(batch=batch, state=state)
    assert counter.count == 1
    for _ in range(2):
        state, _ = step(state, batch, 0.2)
        state, _ = step(state, lr=0.2, batch=batch)
    assert counter.count == 2


def test_a_gap_in_the_arguments_is_not_confused() -> None:
    @eager
    def step(a: Any, b: Any = 2.0, c: Any = 3.0) -> Any:
        return a + 10 * b + 100 * c

    one = jnp.ones(8)
    for _ in range(3):
        assert step(one, one).tolist() == [311.0] * 8
        assert step(one, c=one).tolist() == [121.0] * 8
        assert step(one, b=one).tolist() == [311.0] * 8


def test_variadic_arguments() -> None:
    @eager
    def step(*args: Any, **kwargs: Any) -> Any:
        return sum(args) + kwargs.get("a", 0) - kwargs.get("b", 0)

    one = jnp.ones(8)
    for _ in range(2):
        assert step(one, one, a=one, b=3 * one).tolist() == [0.0] * 8
        assert step(one, one, b=3 * one, a=one).tolist() == [0.0] * 8
        assert step(one).tolist() == [1.0] * 8


def test_pythons_own_errors() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        eager(train_step)(1.0)
    step = eager(train_step)
    step(make_state(jax.random.key(0)), make_batch())
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        step(make_state(jax.random.key(0)), make_batch(), rate=1)


def test_static_arguments() -> None:
    traces: list[Any] = []

    def power(x: Any, n: int, kind: str = "up") -> Any:
        traces.append((n, kind))
        return x**n if kind == "up" else x / n

    step = eager(power, static_argnums=1, static_argnames=("kind",))
    two = jnp.full(8, 2.0)
    for _ in range(3):
        assert step(two, 3).tolist() == [8.0] * 8
        assert step(two, 2).tolist() == [4.0] * 8
        assert step(two, n=2, kind="down").tolist() == [1.0] * 8
    assert traces == [(3, "up"), (2, "up"), (2, "down")]
    with pytest.raises(ArgumentError, match="n is a list, which is neither an array nor hashable"):
        step(two, [1])
    plan = step.plan(two, 5)
    assert [a.path for a in plan.inputs] == ["x"]


def test_python_numbers_are_traced_like_jit() -> None:
    traces: list[int] = []

    @eager
    def step(x: Any, lr: Any) -> Any:
        traces.append(1)
        return x * lr

    ones = jnp.ones(8, jnp.bfloat16)
    for lr in (0.5, 2.0):
        assert step(ones, lr).dtype == jnp.bfloat16
    assert len(traces) == 1
    assert step(ones, jnp.float32(2.0)).dtype == jnp.float32
    assert len(traces) == 2


def test_several_signatures_alternate() -> None:
    step, counter = counted(train_step)
    state = make_state(jax.random.key(0))
    for _ in range(3):
        for size in (8, 16, 32):
            state, _ = step(state, make_batch(size))
    assert counter.count == 3
    step.clear_cache()
    step(state, make_batch(8))
    assert counter.count == 4


def test_non_array_leaves_are_static() -> None:
    traces: list[int] = []

    @eager
    def step(state: Any, x: Any) -> Any:
        traces.append(1)
        return {**state, "w": state["w"] + state["act"](x)}, state["name"]

    state: Any = {"w": jnp.ones(8), "act": jnp.sin, "name": "sine", "none": None}
    for _ in range(3):
        state, name = step(state, jnp.zeros(8))
        assert name == "sine"
        assert state["act"] is jnp.sin
    assert len(traces) == 1
    state, _ = step({**state, "act": jnp.cos}, jnp.zeros(8))
    assert state["w"].tolist() == [2.0] * 8
    assert len(traces) == 2


# plan, lower, shardings, init, place, load.


def test_plan_without_devices() -> None:
    step = autoshard(train_step, devices="h100x1024")
    plan = step.plan(jax.eval_shape(make_state, jax.random.key(0)), jax.eval_shape(lambda: make_batch(4096)))
    assert plan.cluster == "h100x1024"
    with pytest.raises(
        ArgumentError, match=r"the plan is for h100x1024 \(1024 gpu devices\), but there are 8 cpu"
    ) as e:
        step(make_state(jax.random.key(0)), make_batch(4096))
    assert 'devices="auto"' in str(e.value)


def test_shapes_cannot_be_run() -> None:
    with pytest.raises(ArgumentError, match=r"batch\['x'\] is a jax.ShapeDtypeStruct"):
        eager(train_step)(make_state(jax.random.key(0)), jax.eval_shape(make_batch))


def test_unknown_devices() -> None:
    with pytest.raises(ClusterError, match="h100"):
        autoshard(train_step, devices="h1000x8").plan(make_state(jax.random.key(0)), make_batch())


def test_no_arrays() -> None:
    with pytest.raises(ArgumentError, match="called without a single array"):
        autoshard(lambda: jnp.ones(3))()


def test_lower_and_shardings() -> None:
    step = eager(train_step)
    shapes = jax.eval_shape(make_state, jax.random.key(0)), jax.eval_shape(make_batch)
    lowered = step.lower(*shapes)
    assert "sdy.mesh" in lowered.as_text()
    inputs, outputs = step.shardings(*shapes)
    assert jax.tree.structure(inputs) == jax.tree.structure(shapes)
    assert outputs[0]["p"]["w"] == inputs[0]["p"]["w"]
    compiled = lowered.compile()
    state = jax.device_put(make_state(jax.random.key(0)), inputs[0])
    expected = jax.jit(train_step)(make_state(jax.random.key(0)), make_batch())
    assert distance(compiled(state, jax.device_put(make_batch(), inputs[1])), expected) < 1e-5

    @functools.partial(eager, static_argnames="n")
    def keyword(x: Any, n: int, *, y: Any, f: Any) -> Any:
        return f(x) * n + y, "static"

    inputs, outputs = keyword.shardings(jnp.ones(8), 2, y=jnp.ones(8), f=jnp.sin)
    assert isinstance(inputs[0][0], NamedSharding)
    assert isinstance(inputs[1]["y"], NamedSharding)
    assert inputs[1]["f"] is None
    assert outputs[1] is None


def test_init_is_sharded_from_the_start() -> None:
    step = eager(train_step)
    shapes = jax.eval_shape(make_state, jax.random.key(0)), jax.eval_shape(make_batch)
    with pytest.raises(ArgumentError, match=r"train_step.init was called before anything was planned"):
        step.init(make_state, jax.random.key(0))
    step.plan(*shapes)
    with pytest.raises(ArgumentError, match="init was given a dict"):
        step.init({"p": 1})
    state = step.init(make_state, jax.random.key(0))
    inputs, _ = step.shardings(*shapes)
    assert jax.tree.map(lambda x: x.sharding, state) == inputs[0]
    assert distance(state, jax.jit(make_state)(jax.random.key(0))) < 1e-6
    params, mu = step.init(lambda key: (make_state(key)["p"], make_state(key)["mu"]), jax.random.key(0))
    assert params["w"].sharding == inputs[0]["p"]["w"]
    assert mu["v"].sharding == inputs[0]["mu"]["v"]
    with pytest.raises(ArgumentError, match=r"out/big has shape \(1024, 1024\)"):
        step.init(lambda: {"big": jnp.ones((1024, 1024))})


def test_init_never_holds_the_whole_state_on_one_device() -> None:
    def make(key: Any) -> Any:
        params = {"w": jax.random.normal(key, (1024, 1024))}
        return {"p": params, "opt": optax.adam(1e-3).init(params)}

    def fun(state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(state["p"])
        updates, opt = optax.adam(1e-3).update(grads, state["opt"])
        return {"p": optax.apply_updates(state["p"], updates), "opt": opt}

    pins = {"state/**/w": P("data"), "state/p/w": P("data")}
    step = eager(fun, mesh=(8,), pins=pins)
    step.plan(jax.eval_shape(make, jax.random.key(0)), jnp.ones((16, 1024)))
    state = step.init(make, jax.random.key(0))
    for leaf in (state["p"]["w"], state["opt"][0].mu["w"], state["opt"][0].nu["w"]):
        assert {s.data.shape for s in leaf.addressable_shards} == {(128, 1024)}
    program, call = init_program(make, (jax.random.key(0),), {}, step._known("init"))
    memory = program.lower(*call.flat).compile().memory_analysis()
    whole_bytes = 1024 * 1024 * 4
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < whole_bytes


def test_place() -> None:
    step = eager(train_step)
    state, batch = make_state(jax.random.key(0)), make_batch()
    with pytest.raises(ArgumentError, match="place was called before anything was planned"):
        step.place(state)
    step.plan(state, batch)
    inputs, _ = step.shardings(state, batch)
    placed = step.place(state)
    assert jax.tree.map(lambda x: x.sharding, placed) == inputs[0]
    both = step.place(state, batch)
    assert jax.tree.map(lambda x: x.sharding, both) == inputs
    assert step.place(state["p"])["w"].sharding == inputs[0]["p"]["w"]
    with pytest.raises(ArgumentError, match=r"state has shape \(512, 512\) and dtype float32, and no argument"):
        step.place(np.ones((512, 512), np.float32))
    model, optimizer = make_nnx()
    other = eager(nnx_step)
    other.plan(model, optimizer, jnp.ones((16, 8)))
    kernel = model.up.kernel
    before = np.asarray(kernel[...])
    assert other.place(model) is model
    assert model.up.kernel is kernel
    assert isinstance(kernel[...].sharding, NamedSharding)
    assert np.array_equal(kernel[...], before)


def test_plans_are_used_again(tmp_path: Path) -> None:
    state, batch = jax.eval_shape(make_state, jax.random.key(0)), make_batch()
    plan = eager(train_step).plan(state, batch)
    step, counter = counted(train_step)
    step.load(plan)
    assert step.plan(state, batch) == plan
    step(make_state(jax.random.key(0)), batch)
    assert counter.count == 0
    with pytest.raises(PlanError, match=r"the loaded plan is of program \w+, train_step called this way is"):
        step(make_state(jax.random.key(0)), make_batch(32))
    step.clear_cache()
    step(make_state(jax.random.key(0)), make_batch(32))
    assert counter.count == 1
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert eager(train_step, plan=file).plan(state, batch) == plan
    with pytest.raises(PlanError, match="the loaded plan is for the mesh"):
        eager(train_step, plan=plan, mesh={"other": 8}).plan(state, batch)
    file.write_text(json.dumps({"format": 0}))
    with pytest.raises(PlanError, match="another format"):
        step.load(str(file))


def test_pins_hold() -> None:
    step = eager(train_step, mesh=(2, 4), pins={"state/*/w": P(None, "model"), "batch/x": P("data")})
    state, _ = step(make_state(jax.random.key(0)), make_batch())
    assert state["p"]["w"].sharding.spec == P(None, "model")
    assert state["mu"]["w"].sharding.spec == P(None, "model")
    with pytest.raises(PinError, match="the mesh axis 'tensor'"):
        eager(train_step, mesh=(2, 4), pins={"**/w": P("tensor")}).plan(make_state(jax.random.key(0)), make_batch())
    with pytest.raises(PinError, match=r"dimension 0 of batch/x \(size 17\) over data=8"):
        eager(train_step, mesh=8, pins={"batch/x": P("data")}).plan(make_state(jax.random.key(0)), make_batch(17))


def test_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_DUMP_DIR", str(tmp_path))
    eager(train_step).plan(make_state(jax.random.key(0)), make_batch())
    names = {path.name for path in (tmp_path / "train_step-01").iterdir()}
    assert any(name.endswith("-trace.txt") for name in names)
    assert any(name.endswith("-plan.json") for name in names)
    step = eager(train_step, dump_dir=tmp_path / "more")
    step(make_state(jax.random.key(0)), make_batch())
    names = {path.name for path in (tmp_path / "more" / "train_step-01").iterdir()}
    assert any(name.endswith("-constrain.txt") for name in names)
    assert {name.split("-", 1)[1] for name in names} >= {"stablehlo-before.mlir", "stablehlo-after.mlir"}


# Transformations, failures.


def test_under_outer_transformations() -> None:
    calls: list[int] = []

    @eager
    def step(x: Any, scale: float = 2.0) -> Any:
        calls.append(1)
        return jnp.sum(x * scale)

    x = jnp.ones(8)
    assert jax.eval_shape(step, x).shape == ()
    assert jax.make_jaxpr(step)(x).out_avals[0].shape == ()
    with pytest.warns(AutoshardWarning, match="step was called inside another JAX transformation"):
        assert float(jax.jit(step)(jnp.ones(4))) == 8.0
    assert jax.grad(step)(x).tolist() == [2.0] * 8
    assert jax.vmap(step)(jnp.ones((4, 8))).tolist() == [16.0] * 4
    count = len(calls)
    assert float(step(x)) == float(step(x)) == 16.0
    assert len(calls) == count + 1
    once = copy.deepcopy(step)
    assert once is step, "one cache, as of a jitted function"
    assert jax.eval_shape(lambda y: y + step(x), jax.ShapeDtypeStruct((), jnp.float32)).shape == ()
    assert jax.grad(step)(x).tolist() == [2.0] * 8
    model, optimizer = make_nnx()
    shape = nnx.eval_shape(eager(nnx_step), model, optimizer, jnp.ones((16, 8)))
    assert shape["loss"].shape == ()


def test_plans_are_copied_and_pickled() -> None:
    plan = eager(train_step).plan(make_state(jax.random.key(0)), make_batch())
    assert copy.deepcopy(plan) is plan
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    with pytest.raises(PlanError, match="compile"):
        again.compile()


def test_failure_leaves_the_state_untouched() -> None:
    state = make_state(jax.random.key(0))
    step = eager(lambda s, b: (train_step(s, b)[0], b["x"] @ b["x"]))
    with pytest.raises(TypeError, match="dot_general"):
        step(state, make_batch())
    branch = eager(lambda s, b: (s, 1.0) if b["x"][0, 0] > 0 else (s, 2.0))
    with pytest.raises(TraceError, match="could not be traced"):
        branch(state, make_batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    eager(train_step)(state, make_batch())


def test_errors_of_the_user_come_through() -> None:
    @eager
    def step(x: Any) -> Any:
        if x.shape[0] == 4:
            raise ValueError("four")
        return x + 1

    step(jnp.ones(8))
    for _ in range(2):
        with pytest.raises(ValueError, match="four"):
            step(jnp.ones(4))
    assert step(jnp.ones(8)).tolist() == [2.0] * 8


def test_many_steps_in_one_process() -> None:
    for scale in range(4):
        step = eager(lambda x, scale=scale: x * scale)
        assert step(jnp.ones(8)).tolist() == [float(scale)] * 8
