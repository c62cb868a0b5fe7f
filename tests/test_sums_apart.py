"""Sums over examples that groups of devices keep until the last microbatch: same values, fewer collectives; when.

CI runs every third program of the zoo, `make test-all` all.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import autoshard
from autoshard.errors import MicrobatchError
from autoshard.ir import MeshShape
from autoshard.plan import Plan
from autoshard.runtime import planning
from autoshard.runtime.programs import Way, way_of
from tests.helpers import eager_cluster
from tests.test_stage_search import examples, far_apart, step, weights
from tests.zoo import PROGRAMS, Program
from tests.zoo.base import check_runs, distances, plain_jit, run

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(900)]

MESH = (2, 4)


NOT_APART = {"accumulation_scan"}
"""The step goes through parts of its batch in a scan of its own, whose sums are not looked into."""


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are kept apart whether that is quicker or not."""

    def apart(plan: Plan, meshes: Sequence[MeshShape], make: Callable[[MeshShape, Way], Plan]) -> Plan:
        return make(meshes[0], dataclasses.replace(way_of(plan), groups=meshes[0][0][1]))

    monkeypatch.setattr(planning, "sums_apart", apart)


def parameters() -> list[Any]:
    cut = [p for p in PROGRAMS if p.microbatch and p.name not in NOT_APART]
    return [pytest.param(p, marks=[] if k % 3 == 1 else [pytest.mark.full], id=p.name) for k, p in enumerate(cut)]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("program", parameters())
def test_equals_plain_jit(program: Program) -> None:
    with jax.enable_x64():
        case = program.build(jnp.float64)
        options = {"static_argnums": case.static_argnums, "static_argnames": case.static_argnames}
        mine: Any = autoshard(mesh=MESH, devices=eager_cluster(), microbatches=2, **options)(case.step)
        check_runs(run(case, mine), run(case, plain_jit(case)), 1e-9)
        (compiled,) = mine._compiled.values()
        assert compiled.planned.plan.groups == MESH[0]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("runtime", [None, "one-program"])
def test_pipelines_equal_plain_jit(runtime: str | None) -> None:
    mine: Any = autoshard(
        step,
        devices=eager_cluster(),
        stages=2,
        microbatches=4,
        mesh=(2, 2),
        pipeline_runtime=runtime,
        donate_argnums=(),
    )
    plan = mine.plan(weights(), examples())
    assert plan.groups == 2
    jitted: Any = jax.jit(step)
    found, plain = jax.device_get(mine(weights(), examples())), jax.device_get(jitted(weights(), examples()))
    assert max(gap for _, gap in distances(found, plain)) < 1e-5


def sums_in_loops(text: str) -> int:
    """All-reduces of optimized HLO in a loop's body."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    inside = [part for part in re.split(r"\n(?=%|ENTRY)", text) if part.lstrip("%").split(" ")[0] in bodies]
    return sum(len(re.findall(r" all-reduce(?:-start)?\(", part)) for part in inside)


def test_data_parallel_gradients_are_summed_once_where_links_are_slow() -> None:
    cluster = far_apart(4, 1, 1e6)
    mine: Any = autoshard(step, devices=cluster, mesh=(4,), microbatches=4, donate_argnums=())
    arguments = weights(), examples(4096)
    plan = mine.plan(*arguments)
    assert plan.groups == 4
    assert any(a.note.endswith("the time") and a.name == "one mesh 4, 4 microbatches" for a in plan.alternatives)
    each = next(a for a in plan.alternatives if a.name == "one mesh 4, 4 microbatches")
    assert each.time_s > 1.2 * plan.time_s
    jitted: Any = jax.jit(step)
    found, plain = jax.device_get(mine(*arguments)), jax.device_get(jitted(*arguments))
    assert max(gap for _, gap in distances(found, plain)) < 1e-5
    assert sums_in_loops(mine.lower(*arguments).compile().as_text()) == 0


def test_a_plan_with_sums_apart_is_loaded(tmp_path: Path) -> None:
    cluster, arguments = far_apart(4, 1, 1e6), (weights(), examples(4096))
    plan = autoshard(step, devices=cluster, mesh=(4,), microbatches=4).plan(*arguments)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    again: Any = autoshard(step, devices=cluster, plan=file)
    assert again.plan(*arguments).groups == 4
    assert np.isfinite(again(*arguments)[1])


def test_examples_that_do_not_fall_into_groups_are_summed_every_time() -> None:
    plan = autoshard(step, devices=far_apart(4, 1, 1e6), mesh=(4,), microbatches=2).plan(weights(), examples(4084))
    assert plan.groups == 1
    assert any("a divisor of" in line or "4 groups of a microbatch" in line for line in plan.why)


@pytest.mark.usefixtures("always")
def test_sums_inside_loops_of_the_step_are_not_kept_apart() -> None:
    (program,) = (p for p in PROGRAMS if p.name in NOT_APART)
    case = program.build(jnp.float32)
    mine: Any = autoshard(mesh=MESH, devices=eager_cluster(), microbatches=2)(case.step)
    with pytest.raises(MicrobatchError, match="no sum over examples can be kept apart for 2 groups"):
        run(case, mine)
