"""The search over stages: pipelines where they win, one mesh elsewhere, and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from autoshard import autoshard
from autoshard.cli import app
from autoshard.cluster import Cluster, Link, Node
from autoshard.errors import ArgumentError
from autoshard.plan import Plan
from tests.helpers import eager_cluster
from tests.zoo.base import distances

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(600)]


def far_apart(nodes: int = 2, devices: int = 1, bytes_per_s: float = 5e6, memory_bytes: int = 8 << 30) -> Cluster:
    """Nodes with a network that is slow beside their devices."""
    near = eager_cluster(nodes * devices, memory_bytes)
    device, link = near.device(0), near.nodes[0].link
    slow = dataclasses.replace(device, flops_per_s=dict.fromkeys(device.flops_per_s, 5e8), memory_bytes_per_s=1e9)
    return Cluster("far", (Node(slow, devices, link),) * nodes, Link(bytes_per_s, 1e-4))


def weights(count: int = 6, width: int = 256) -> list[Any]:
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(width, width)) / 16).astype("f4") for _ in range(count)]


def examples(size: int = 64, width: int = 256) -> Any:
    return np.random.default_rng(1).normal(size=(size, width)).astype("f4")


def loss_of(weights: Any, batch: Any) -> Any:
    h = batch
    for w in weights:
        h = jnp.tanh(h @ w)
    return jnp.mean(h**2)


def step(weights: Any, batch: Any) -> Any:
    value, gradients = jax.value_and_grad(loss_of)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def stages_of(plan: Plan) -> int:
    return 1 if plan.pipeline is None else len(plan.pipeline.stages)


def test_pipelines_are_found_where_gradients_would_travel_slowly() -> None:
    cluster = far_apart()
    mine: Any = autoshard(step, devices=cluster, donate_argnums=())
    plan = mine.plan(weights(), examples())
    one = autoshard(step, devices=cluster, stages=1).plan(weights(), examples())
    assert stages_of(plan) == 2
    assert plan.time_s < one.time_s
    assert any(a.name.startswith("one mesh") for a in plan.alternatives)
    jitted: Any = jax.jit(step)
    found, plain = jax.device_get(mine(weights(), examples())), jax.device_get(jitted(weights(), examples()))
    assert max(gap for _, gap in distances(found, plain)) < 1e-5


def test_one_mesh_where_links_are_quick() -> None:
    plan = autoshard(step, devices="h100x8").plan(weights(), examples())
    assert stages_of(plan) == 1
    assert not any("stages" in a.name for a in plan.alternatives)


def test_a_mesh_or_pins_speak_of_one_mesh() -> None:
    cluster = far_apart()
    for options in ({"mesh": (2,)}, {"pins": {"weights/0": jax.sharding.PartitionSpec()}}):
        assert stages_of(autoshard(step, devices=cluster, **options).plan(weights(), examples())) == 1


def test_the_command_line_cuts_and_explains(tmp_path: Path) -> None:
    file = tmp_path / "my_step.py"
    file.write_text("from tests.test_stage_search import examples, step, weights\ninputs = (weights(), examples())\n")
    made = tmp_path / "plan.json"
    runner = CliRunner()
    asked = ["--devices", "h100x8", "--stages", "2", "--microbatches", "4", "-o", str(made)]
    done = runner.invoke(app, ["plan", f"{file}:step", *asked])
    assert done.exit_code == 0, done.output
    plan = Plan.from_json(made.read_text())
    assert (stages_of(plan), plan.microbatches) == (2, 4)
    done = runner.invoke(app, ["explain", str(made), "weights/*"])
    assert done.exit_code == 0, done.output
    assert "2 stages on 2 ranks" in done.output


def test_the_command_line_keeps_a_decorated_steps_options(tmp_path: Path) -> None:
    file, made = tmp_path / "my_step.py", [tmp_path / "a.json", tmp_path / "b.json"]
    file.write_text(
        "from autoshard import autoshard\nfrom tests.test_stage_search import examples, step, weights\n"
        "inputs = (weights(), examples())\n"
        "mine = autoshard(step, devices='h100x8', stages=2, schedule='gpipe', microbatches=4)\n"
    )
    runner = CliRunner()
    for path, asked in zip(made, ([], ["--microbatches", "8", "--schedule", "1f1b"]), strict=True):
        done = runner.invoke(app, ["plan", f"{file}:mine", *asked, "-o", str(path)])
        assert done.exit_code == 0, done.output
    plans = [Plan.from_json(path.read_text()) for path in made]
    assert [(stages_of(p), p.microbatches, p.pipeline and p.pipeline.schedule) for p in plans] == [
        (2, 4, "gpipe"),
        (2, 8, "1f1b"),
    ]
    done = runner.invoke(app, ["diff", *map(str, made)])
    assert all(word in done.output for word in ("microbatches", "gpipe", "1f1b")), done.output


def test_options_that_cannot_be_changed_afterwards() -> None:
    mine = autoshard(step, devices="h100x8", stages=2)
    assert stages_of(mine.with_options(microbatches=2).plan(weights(), examples())) == 2
    with pytest.raises(ArgumentError, match="donate_argnums for step, which is decorated already"):
        mine.with_options(donate_argnums=0)
    with pytest.raises(ArgumentError, match="did you mean microbatches"):
        mine.with_options(micro_batches=2)


@pytest.mark.deviceless
def test_the_command_line_compiles_every_program(tmp_path: Path) -> None:
    file = tmp_path / "my_step.py"
    file.write_text("from tests.test_stage_search import examples, step, weights\ninputs = (weights(), examples())\n")
    written = tmp_path / "report.json"
    asked = ["--devices", "h100x2", "--stages", "2", "--microbatches", "4", "-o", str(written)]
    done = CliRunner().invoke(app, ["compile", f"{file}:step", *asked])
    assert done.exit_code == 0, done.output
    found = json.loads(written.read_text())
    assert {"stage 0 forward 0", "stage 1 backward 0"} <= set(found)


def test_coupled_examples_say_why_there_is_no_pipeline() -> None:
    def coupled(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = batch
            for w in weights:
                h = jnp.tanh(h @ w)
                h = (h - h.mean(0)) / (h.std(0) + 1.0)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    plan = autoshard(coupled, devices=far_apart()).plan(weights(), examples())
    assert stages_of(plan) == 1
    assert any(line.startswith("no pipeline: ") for line in plan.why)


def test_what_fits_no_mesh_may_fit_in_stages() -> None:
    """Recomputing and microbatches are off on one mesh here, so that only stages are left."""
    cluster = far_apart(memory_bytes=1 << 40)
    limit = autoshard(step, devices=cluster, stages=2).plan(weights(), examples()).memory.peak_bytes
    plan = autoshard(step, devices=cluster, memory_limit=int(1.02 * limit)).plan(weights(), examples())
    assert plan.memory.peak_bytes <= 1.02 * limit


@pytest.mark.parametrize(("nodes", "devices", "bytes_per_s"), [(2, 2, 5e6), (4, 1, 2e7), (2, 1, 1e9)])
def test_never_slower_than_one_mesh_or_equal_stages(nodes: int, devices: int, bytes_per_s: float) -> None:
    cluster = far_apart(nodes, devices, bytes_per_s)
    args = weights(), examples()
    chosen = autoshard(step, devices=cluster).plan(*args)
    plain = [autoshard(step, devices=cluster, stages=1).plan(*args)]
    for stages in (2, nodes * devices):
        plain += [
            autoshard(step, devices=cluster, stages=stages, schedule=name).plan(*args) for name in ("gpipe", "1f1b")
        ]
    assert chosen.time_s <= 1.001 * min(plan.time_s for plan in plain)


@pytest.mark.deviceless
@pytest.mark.full
def test_estimates_of_programs_beside_xla() -> None:
    """The estimated bytes of every program are within a third of XLA's; programs that are alike are compiled once."""
    options: Any = {"stages": 4, "microbatches": 4, "mesh": (1,)}
    made = autoshard(step, devices="h100x4", **options).plan(weights(8, 1024), examples(512, 1024))
    reports = made.compile()
    for each in reports:
        memory = each.report.memory
        found = memory.arguments + memory.outputs - memory.aliased + memory.temporaries
        assert 2 / 3 * found - 1e5 <= each.estimate.peak_bytes <= 4 / 3 * found + 1e5, each.program
    second, third = ({r.program: r.report for r in reports if r.stage == k} for k in (1, 2))
    assert all(third[name] is report for name, report in second.items())
