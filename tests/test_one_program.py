"""Pipelines as one program: the zoo equals plain jit; state lies on its stage and is never copied; what is refused.

CI runs a slice, `make test-all` all: 2 and 4 stages, 4 and 8 microbatches, both precisions, on 8 devices.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import autoshard
from autoshard.errors import ArgumentError, MicrobatchError
from autoshard.plan import Plan
from autoshard.runtime.hlo_module import parse_module
from autoshard.runtime.likeness import likeness
from autoshard.runtime.one_program import check_branches
from autoshard.runtime.one_program_layout import pipeline_layout
from autoshard.schedules import interleaved
from tests.helpers import eager_cluster
from tests.test_pipeline import LIMITS, REFUSED, chain, decorated, parameters, plainly, planned
from tests.zoo import Program
from tests.zoo.base import check_runs, distances, plain_jit, run

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(900)]

ONE = {"pipeline_runtime": "one-program", "devices": eager_cluster()}

EFFECTS = ("mlp_sum_loss_debug_print", "mlp_debug_callback")
"""Programs that print or call back."""

SLICE = (
    ("mlp_two_losses", "float32", 2),
    ("integer_leaves", "float32", 2),
    ("strided_convolution", "float32", 2),
    ("lstm_carried", "float32", 2),
    ("switched", "float64", 4),
)
"""Programs, precisions and stages that CI runs."""


@pytest.mark.parametrize(("program", "dtype", "stages", "count"), parameters(SLICE))
def test_equals_plain_jit(program: Program, dtype: str, stages: int, count: int) -> None:
    with jax.enable_x64(dtype == "float64"):
        case, step = decorated(program, dtype, stages, count, pipeline_runtime="one-program")
        args, kwargs = case.fresh()
        if program.name in REFUSED:
            with pytest.raises(MicrobatchError, match=REFUSED[program.name]):
                step.plan(*args, **kwargs)
            return
        if program.name in EFFECTS:
            with pytest.raises(ArgumentError, match="has effects, such as prints or callbacks"):
                step.plan(*args, **kwargs)
            return
        mine = run(case, step)
        check_runs(mine, run(case, plain_jit(case)), LIMITS[dtype])
        (compiled,) = step._compiled.values()
        pipeline = compiled.planned.plan.pipeline
        assert pipeline is not None
        assert (pipeline.runtime, len(pipeline.stages)) == ("one-program", stages)
    gc.collect()


def close(mine: Any, plain: Any) -> bool:
    return max(gap for _, gap in distances(jax.device_get(mine), jax.device_get(plain))) < 1e-5


def test_state_lies_on_its_stage_and_is_donated() -> None:
    step, weights, batch = chain()
    mine = autoshard(step, stages=4, microbatches=4, mesh=(2,), **ONE)
    mine.plan(weights, batch)
    placed = mine.init(lambda: [jnp.asarray(w) for w in weights])
    devices = jax.devices()
    new, metrics = mine(placed, batch)
    for stage, (before, after) in enumerate(zip(placed, new, strict=True)):
        assert before.is_deleted()
        assert after.sharding.device_set == set(devices[2 * stage : 2 * stage + 2])
    assert close((new, metrics), plainly(step, weights, batch))


def test_what_is_not_donated_can_be_used_again() -> None:
    step, weights, batch = chain()
    mine = autoshard(step, stages=2, microbatches=4, mesh=(4,), donate_argnums=(), **ONE)
    mine.plan(weights, batch)
    placed = mine.place(weights, batch)[0]
    new, _ = mine(placed, batch)
    assert close(new, mine(placed, batch)[0])
    assert close(new, plainly(step, weights, batch)[0])


def test_nothing_is_compiled_after_the_first_step() -> None:
    step, weights, batch = chain()
    mine = autoshard(step, stages=2, microbatches=4, mesh=(4,), **ONE)
    state, _ = mine(weights, batch)
    compiled: list[str] = []
    monitoring: Any = jax.monitoring

    def count(name: str, _: float, **_more: Any) -> None:
        if "backend_compile" in name:
            compiled.append(name)

    monitoring.register_event_duration_secs_listener(count)
    try:
        for _ in range(3):
            state, _ = mine(state, batch)
    finally:
        monitoring.unregister_event_duration_listener(count)
    assert compiled == []
    assert len(mine._compiled) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 4, "mesh": (2,), "schedule": "gpipe"},
        {"stages": 4, "mesh": (2,), "schedule": "eager-1f1b"},
        {"stages": 4, "mesh": (2, 2), "schedule": interleaved(2, 4, 2)},
        {"stages": 2, "mesh": (2, 2), "schedule": "F0 F1 B1 F2 B0 F3 B3 B2\nF0 F1 B1 B0 F2 F3 B3 B2"},
    ],
    ids=["gpipe", "eager", "interleaved", "own"],
)
def test_schedules(options: Any) -> None:
    step, weights, batch = chain()
    mine = autoshard(step, microbatches=4, **options, **ONE)
    assert close(mine(weights, batch), plainly(step, weights, batch))


def skipping_tied(state: Any, batch: Any) -> Any:
    """A table read by the first and the last stage, and a connection over all stages."""

    def loss(state: Any) -> Any:
        table, layers = state
        first = h = table[batch]
        for w in layers:
            h = jnp.tanh(h @ w)
        return jnp.mean(((h + first) @ table.T) ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda w, g: w - 0.1 * g / (1.0 + norm), state, gradients), (value, norm)


def skipping_state() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    layers = [draw.normal(size=(16, 16)).astype("f4") for _ in range(5)]
    return (draw.normal(size=(64, 16)).astype("f4"), layers), draw.integers(0, 64, size=(16, 8)).astype("i4")


@pytest.mark.parametrize(("stages", "mesh"), [(2, (2, 2)), (4, (2,))])
def test_skip_connections_and_tied_weights(stages: int, mesh: Any) -> None:
    state, batch = skipping_state()
    mine = autoshard(skipping_tied, stages=stages, microbatches=4, mesh=mesh, **ONE)
    found = planned(mine, state, batch)
    assert found.staged is not None
    assert found.plan.pipeline is not None
    layout = pipeline_layout(found.staged, found.plan.pipeline, found.info)
    hops = {ring.hop for ring in layout.rings.values()}
    assert {1, -1} <= hops
    assert max(hops) == stages // 2, "what skips a stage goes straight to its reader"
    assert close(mine(state, batch), plainly(skipping_tied, state, batch))


def test_a_ring_holds_as_many_microbatches_as_the_schedule() -> None:
    step, weights, batch = chain()
    mine = autoshard(step, stages=4, microbatches=8, mesh=(2,), **ONE)
    found = planned(mine, weights, batch)
    assert found.staged is not None
    assert found.plan.pipeline is not None
    layout = pipeline_layout(found.staged, found.plan.pipeline, found.info)
    kept = layout.rings["kept", 0]
    assert kept.depth == max(found.plan.pipeline.held) == 4
    assert [int(kept.write[:, rank].max()) + 1 for rank in range(4)] == [4, 3, 2, 1]
    assert max(ring.depth for ring in layout.rings.values() if ring.hop) <= 2


def test_it_is_one_program_and_can_be_lowered() -> None:
    step, weights, batch = chain()
    mine = autoshard(step, stages=2, microbatches=4, mesh=(4,), **ONE)
    text = mine.lower(weights, batch).as_text()
    assert "module @jit_step" in text
    assert "stablehlo.collective_permute" in text
    why = mine.plan(weights, batch).why
    assert any(line.startswith("runtime one-program, as asked for") for line in why)


def test_a_plan_remembers_its_runtime(tmp_path: Path) -> None:
    step, weights, batch = chain()
    plan = autoshard(step, stages=2, microbatches=4, mesh=(4,), **ONE).plan(weights, batch)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert Plan.from_json(file.read_text()) == plan
    again = autoshard(step, plan=file, devices=eager_cluster())
    assert again.plan(weights, batch) == plan
    other = autoshard(step, plan=file, devices=eager_cluster(), pipeline_runtime="mpmd").plan(weights, batch)
    assert other.pipeline is not None
    assert other.pipeline.runtime == "mpmd"
    assert other.why[-1].startswith("runtime mpmd")


def unlike(widths: Any) -> tuple[Any, Any, Any]:
    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = batch
            for w in weights:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    shapes = [jax.ShapeDtypeStruct(pair, np.float32) for pair in pairwise(widths)]
    return step, shapes, jax.ShapeDtypeStruct((16, widths[0]), np.float32)


def test_unlike_stages_are_refused() -> None:
    step, weights, batch = unlike((4096, 4352, 4608, 4864, 5120))
    mine = autoshard(step, stages=4, microbatches=4, mesh=(2,), **ONE)
    with pytest.raises(ArgumentError, match=r"stages are unlike: every device would hold .*\(at most 2 times that\)"):
        mine.plan(weights, batch)


def test_stages_on_unlike_meshes_are_refused() -> None:
    step, weights, batch = chain()
    found = planned(autoshard(step, stages=2, microbatches=4, mesh=(2, 2), devices=eager_cluster()), weights, batch)
    assert found.staged is not None
    assert found.plan.pipeline is not None
    first, last = found.plan.pipeline.stages
    changed = replace(found.plan.pipeline, stages=(first, replace(last, mesh=(("data", 4),))))
    assert likeness(found.staged, found.plan.pipeline, found.info).reasons == ()
    (reason,) = likeness(found.staged, changed, found.info).reasons
    assert reason.startswith("stages have different meshes")


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(ArgumentError, match="pipeline_runtime='spmd'"):
        autoshard(chain()[0], pipeline_runtime="spmd")


@pytest.mark.parametrize("permutes", [False, True])
def test_a_branch_that_other_ranks_would_wait_for_is_refused(permutes: bool) -> None:
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("stage", "a", "b"), axis_types=auto)

    def body(x: Any) -> Any:
        inner: Any = jax.sharding.get_abstract_mesh()

        def place(x: Any, *axes: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, NamedSharding(inner, PartitionSpec(*axes)))

        def first(x: Any) -> Any:
            if permutes:
                x = place(jnp.tanh(place(x, None, ("a", "b"))), None, ("b", "a"))
            return place(jnp.tanh(place(x, None, "a")), "a")

        return jax.lax.switch(jax.lax.axis_index("stage"), [first, lambda x: place(x, "a")], place(x, "a"))

    whole = PartitionSpec("stage")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={"stage"}, check_vma=False)
    place = NamedSharding(mesh, PartitionSpec(("stage", "a")))
    jitted: Any = jax.jit(mapped, in_shardings=place, out_shardings=place)
    module = parse_module(jitted.lower(jax.ShapeDtypeStruct((16, 8), np.float32)).compile().as_text())
    if not permutes:
        check_branches(module, 4, "step")
        return
    with pytest.raises(ArgumentError, match=r"collective-permute .* inside a stage of step"):
        check_branches(module, 4, "step")


@pytest.mark.deviceless
def test_it_compiles_for_gpus_that_are_not_there() -> None:
    state, batch = skipping_state()
    mine = autoshard(
        skipping_tied, stages=2, microbatches=4, mesh=(4,), devices="h100x8", pipeline_runtime="one-program"
    )
    report: Any = mine.plan(state, batch).compile()
    assert report.memory.peak > 0
    assert any(group.kind == "permute" for group in report.collectives)
