"""Pipelines: every program of the zoo that can be cut equals plain jit on stages of their own devices.

CI runs a slice, `make test-all` all: 2 and 4 stages, 4 and 8 microbatches, both precisions, on 8 devices.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import autoshard
from autoshard.errors import ArgumentError, InfeasibleError, MeshError, MicrobatchError, PlanError
from autoshard.passes import Part
from autoshard.plan import Plan
from autoshard.runtime.compiled import Planned
from autoshard.runtime.stage_backend import build_pipeline
from autoshard.runtime.target import running_mesh
from autoshard.schedules import dual_pipe_v, interleaved, zb_h1, zb_h2, zb_v
from tests.helpers import eager_cluster
from tests.zoo import PROGRAMS, Program
from tests.zoo.base import check_runs, distances, plain_jit, run

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(900)]

LIMITS = {"float32": 1e-4, "float64": 1e-9}
LAYOUTS = {2: (2, 2), 4: (2,)}
"""Stages, and the mesh of each on 8 devices."""

REFUSED = {"accumulation_scan": "a loop .* is one equation|one example each is often special"}
"""Programs whose forward pass is one scan."""

OTHER_COUNTS = {("mlp_batch_12", 8): 6}
"""Microbatches of programs whose batch the usual number does not divide."""

SLICE = (
    ("mlp_momentum", "float32", 2),
    ("mlp_many_outputs", "float32", 2),
    ("mlp_two_losses", "float32", 2),
    ("multi_steps", "float32", 2),
    ("loss_scaling", "float32", 2),
    ("custom_vjp_attention", "float32", 2),
    ("custom_vjp_attention", "float64", 4),
    ("unet", "float32", 2),
    ("switched", "float32", 2),
)
"""Programs, precisions and stages that CI runs."""


def decorated(program: Program, dtype: str, stages: int, count: int, **more: Any) -> tuple[Any, Any]:
    case = program.build(jnp.dtype(dtype).type)
    options = {"static_argnums": case.static_argnums, "static_argnames": case.static_argnames, **more}
    layout = LAYOUTS[stages]
    step = autoshard(mesh=layout, stages=stages, devices=eager_cluster(), microbatches=count, **options)(case.step)
    return case, step


def parameters(often: Collection[tuple[str, str, int]]) -> list[Any]:
    """All programs, precisions and numbers of stages; those that are not of `often` are marked `full`."""
    found: list[Any] = []
    for program in (p for p in PROGRAMS if p.microbatch):
        for dtype in LIMITS:
            for stages, usual in ((2, 4), (4, 8)):
                count = OTHER_COUNTS.get((program.name, usual), usual)
                marks: list[Any] = [] if (program.name, dtype, stages) in often else [pytest.mark.full]
                name = f"{program.name}-{dtype}-{stages}-{count}"
                found.append(pytest.param(program, dtype, stages, count, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("program", "dtype", "stages", "count"), parameters(SLICE))
def test_equals_plain_jit(program: Program, dtype: str, stages: int, count: int) -> None:
    with jax.enable_x64(dtype == "float64"):
        case, step = decorated(program, dtype, stages, count)
        args, kwargs = case.fresh()
        if program.name in REFUSED:
            with pytest.raises(MicrobatchError, match=REFUSED[program.name]):
                step.plan(*args, **kwargs)
            return
        mine = run(case, step)
        plain = run(case, plain_jit(case))
        check_runs(mine, plain, LIMITS[dtype])
        (compiled,) = step._compiled.values()
        pipeline = compiled.planned.plan.pipeline
        assert pipeline is not None
        assert len(pipeline.stages) == stages
    gc.collect()


def chain(layers: int = 4, width: int = 16) -> tuple[Callable[..., Any], Any, Any]:
    """A step of like layers, with a gradient norm over all of them."""

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = batch
            for w in weights:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        return [w - 0.1 * g / (1.0 + norm) for w, g in zip(weights, gradients, strict=True)], (value, norm)

    draw = np.random.default_rng(0)
    weights = [draw.normal(size=(width, width)).astype("f4") for _ in range(layers)]
    return step, weights, draw.normal(size=(16, width)).astype("f4")


def plainly(step: Any, *args: Any) -> Any:
    jitted: Any = jax.jit(step)
    return jitted(*args)


def planned(step: Any, *args: Any) -> Planned:
    step.plan(*args)
    (found,) = step._planned.values()
    return found


def test_state_lies_on_its_stage_only() -> None:
    step, weights, batch = chain()
    mine = autoshard(step, stages=4, microbatches=4, mesh=(2,), devices=eager_cluster())
    mine.plan(weights, batch)
    placed = mine.init(lambda: [jnp.asarray(w) for w in weights])
    devices = jax.devices()
    for stage, w in enumerate(placed):
        assert w.sharding.device_set == set(devices[2 * stage : 2 * stage + 2])
    (new, metrics) = mine(placed, batch)
    for stage, w in enumerate(new):
        assert w.sharding.device_set == set(devices[2 * stage : 2 * stage + 2])
    plain = plainly(step, weights, batch)
    assert max(gap for _, gap in distances(jax.device_get((new, metrics)), jax.device_get(plain))) < 1e-5
    assert all(w.is_deleted() for w in placed), "state is donated"


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])])
def test_held_microbatches_at_run_time(schedule: str, held: list[int]) -> None:
    """1F1B holds at most S - s microbatches on stage s, counted while the pipeline runs."""
    step, weights, batch = chain()
    mine = autoshard(step, stages=4, microbatches=8, mesh=(2,), devices=eager_cluster(), schedule=schedule)
    found = planned(mine, weights, batch)
    assert found.staged is not None
    mesh = running_mesh(found.target, found.plan.mesh)
    compiled, pipeline = build_pipeline(found, found.staged, mesh, "chain")
    compiled.run_flat([*weights, batch], None)
    assert pipeline.held == held
    assert found.plan.pipeline is not None
    assert list(found.plan.pipeline.held) == held


def test_an_interleaved_schedule_puts_two_stages_on_each_rank() -> None:
    step, weights, batch = chain()
    mine = autoshard(
        step, stages=4, microbatches=4, mesh=(2, 2), devices=eager_cluster(), schedule=interleaved(2, 4, 2)
    )
    placed, _ = mine(weights, batch)
    devices = jax.devices()
    for stage, w in enumerate(placed):
        rank = stage % 2
        assert w.sharding.device_set == set(devices[4 * rank : 4 * rank + 4])
    plain = plainly(step, weights, batch)
    assert max(gap for _, gap in distances(jax.device_get(placed), jax.device_get(plain[0]))) < 1e-5


def test_programs_are_compiled_once() -> None:
    step, weights, batch = chain()
    mine = autoshard(step, stages=2, microbatches=4, mesh=(4,), devices=eager_cluster())
    found = planned(mine, weights, batch)
    assert found.staged is not None
    assert found.plan.pipeline is not None
    mesh = running_mesh(found.target, found.plan.mesh)
    compiled, pipeline = build_pipeline(found, found.staged, mesh, "chain")
    flat: Any = [*weights, batch]
    for _ in range(3):
        new, _ = compiled.run_flat(flat, None)
        flat = [*new, batch]
    backend: Any = pipeline._backend
    assert {program._cache_size() for program in backend.jitted.values()} == {1}


def test_tied_weights_meet_once_a_step() -> None:
    """alpa#859: the sums of a tied weight's gradients, made on two stages, are no part of what microbatches send."""

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            table, w = state
            h = table[batch]
            for _ in range(3):
                h = jnp.tanh(h @ w)
            return jnp.mean((h @ table.T) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

    draw = np.random.default_rng(0)
    state = (draw.normal(size=(64, 16)).astype("f4"), draw.normal(size=(16, 16)).astype("f4"))
    batch = draw.integers(0, 64, size=(16, 8)).astype("i4")
    mine = autoshard(step, stages=2, microbatches=4, mesh=(4,), devices=eager_cluster())
    found = planned(mine, state, batch)
    assert found.staged is not None
    graphs = found.staged.stages.graphs
    sent = [v for g in graphs for v, _, _ in g.loop_arrivals]
    assert not [v for v in sent if set(v.shape) == {16, 64}]
    arrivals = [(g.stage, phase) for g in graphs for v, _, phase in g.arrivals if set(v.shape) == {16, 64}]
    assert arrivals == [(0, (Part.AFTER, 1)), (1, (Part.BEFORE, 1))], "its gradient's sum, and the table itself"
    after, plain = mine(state, batch), plainly(step, state, batch)
    assert max(gap for _, gap in distances(jax.device_get(after), jax.device_get(plain))) < 1e-5


def test_a_plan_is_loaded(tmp_path: Path) -> None:
    step, weights, batch = chain()
    plan = autoshard(step, stages=2, microbatches=4, mesh=(4,), devices=eager_cluster()).plan(weights, batch)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert Plan.from_json(file.read_text()) == plan
    with pytest.raises(PlanError, match="has 2 stages, stages=4"):
        autoshard(step, plan=file, stages=4, devices=eager_cluster()).plan(weights, batch)
    again = autoshard(step, plan=file, devices=eager_cluster())
    assert again.plan(weights, batch) == plan
    plain = plainly(step, weights, batch)
    assert max(gap for _, gap in distances(jax.device_get(again(weights, batch)), jax.device_get(plain))) < 1e-5


def test_pins_hold_on_their_stage() -> None:
    step, weights, batch = chain()
    pins = {"weights/1": jax.P(None, "model"), "weights/2": jax.P("model")}
    mesh = {"data": 2, "model": 2}
    mine = autoshard(step, stages=2, microbatches=4, mesh=mesh, devices=eager_cluster(), pins=pins)
    specs = {a.path: a.spec for a in mine.plan(weights, batch).inputs}
    assert specs["weights/1"] == ((), ("model",))
    assert specs["weights/2"] == (("model",), ())
    plain = plainly(step, weights, batch)
    assert max(gap for _, gap in distances(jax.device_get(mine(weights, batch)), jax.device_get(plain))) < 1e-5


def test_a_table_of_ones_own() -> None:
    step, weights, batch = chain()
    table = "F0 F1 B0 B1\nF0 B0 F1 B1"
    plan = autoshard(step, stages=2, microbatches=2, devices=eager_cluster(), schedule=table).plan(weights, batch)
    assert plan.pipeline is not None
    assert plan.pipeline.rows == tuple(table.splitlines())
    text = str(plan)
    assert "mesh (stage=2, " in text
    assert "F0 B0 F1 B1" in text
    assert "stages on 2 ranks of 4 devices" in text


ZERO_BUBBLE = {"encoder_decoder": "zb-h1", "gpt_nnx": "zb-v", "unet": "dualpipe-v"}
SPLIT = {"zb-h1": (zb_h1, 2), "zb-h2": (zb_h2, 2), "zb-v": (zb_v, 4), "dualpipe-v": (dual_pipe_v, 4)}


def two_parts() -> list[Any]:
    found: list[Any] = []
    for program in (p for p in PROGRAMS if p.name in ZERO_BUBBLE):
        for name in SPLIT:
            marks = [] if ZERO_BUBBLE[program.name] == name else [pytest.mark.full]
            found.append(pytest.param(program, name, marks=marks, id=f"{program.name}-{name}"))
    return found


@pytest.mark.parametrize(("program", "name"), two_parts())
def test_backward_passes_in_two_parts(program: Program, name: str) -> None:
    make, stages = SPLIT[name]
    with jax.enable_x64():
        case = program.build(jnp.float64)
        options = {"static_argnums": case.static_argnums, "static_argnames": case.static_argnames}
        schedule = make(2, 4)
        step: Any = autoshard(stages=stages, microbatches=4, schedule=schedule, devices=eager_cluster(), **options)(
            case.step
        )
        check_runs(run(case, step), run(case, plain_jit(case)), 1e-9)
        (compiled,) = step._compiled.values()
        pipeline = compiled.planned.plan.pipeline
        assert pipeline is not None
        assert min(pipeline.weights_s) > 0
        assert max(pipeline.backward_s[1:]) > 0


def test_zero_bubble_is_quicker_by_the_simulator_than_1f1b() -> None:
    step, weights, batch = chain(8, 256)
    big = np.resize(batch, (2048, 256))
    plans = {
        name: autoshard(step, devices=eager_cluster(4), stages=4, microbatches=8, schedule=name).plan(weights, big)
        for name in ("1f1b", "zb-h1")
    }
    assert plans["zb-h1"].time_s < plans["1f1b"].time_s
    text = plans["zb-h1"].to_json()
    again: Any = autoshard(step, devices=eager_cluster(4), plan=Plan.from_json(text))
    found, plain = again(weights, big), jax.jit(step)(weights, big)
    assert max(gap for _, gap in distances(jax.device_get(found), jax.device_get(plain))) < 1e-5


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stages": 0}, ArgumentError, "stages=0"),
        ({"schedule": "1f1b"}, ArgumentError, "without stages"),
        ({"stages": 2, "schedule": "dualpipe"}, ArgumentError, "schedule='dualpipe'"),
        (
            {"stages": 2, "microbatches": 4, "schedule": "zb-h1", "pipeline_runtime": "one-program"},
            ArgumentError,
            "in two parts",
        ),
        ({"stages": 2, "microbatches": 4, "schedule": "F0 B0\nF0 B0"}, ArgumentError, "2 stages and 1 microbatches"),
        ({"stages": 3}, MeshError, "3 pipeline ranks .* on 8 devices"),
        ({"stages": 2, "mesh": (8,)}, MeshError, "16 devices"),
        ({"stages": 2, "microbatches": 5}, MicrobatchError, "a divisor of 16"),
        ({"stages": 8, "mesh": (1,), "memory_limit": 100}, InfeasibleError, "100 B"),
    ],
    ids=lambda value: None if not isinstance(value, dict) else "-".join(value),
)
def test_what_cannot_be_is_refused(options: Any, error: Any, text: str) -> None:
    step, weights, batch = chain()
    with pytest.raises(error, match=text):
        autoshard(step, devices=eager_cluster(), **options).plan(weights, batch)


def test_a_loop_over_layers_is_not_cut() -> None:
    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, weights)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradients, value

    weights = np.ones((4, 16, 16), "f4")
    with pytest.raises(MicrobatchError, match="for 8 stages") as caught:
        autoshard(step, stages=8, mesh=(1,), devices=eager_cluster()).plan(weights, np.ones((16, 16), "f4"))
    assert "a loop (lax.scan) is one equation" in str(caught.value)
