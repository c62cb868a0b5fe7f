"""Plans: frozen, printed, saved and read back, refused where they do not belong."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from autoshard.errors import PlanError
from autoshard.ir import Graph
from autoshard.plan import (
    Alternative,
    Argument,
    Collective,
    Memory,
    Plan,
    Resharding,
    check_fingerprint,
    fingerprint,
    graph_operands,
    graph_outputs,
    graph_values,
)
from autoshard.search import prepare
from tests.problems import Step, looped, mlp, normal

PLAN = Plan(
    fingerprint="0123456789abcdef",
    cluster="h100x8",
    mesh=(("data", 2), ("model", 4)),
    inputs=(
        Argument("state/w", "f32[1024,4096]", ((), ("model",)), 1 << 24, True),
        Argument("batch/x", "bf16[64,1024]", (("data",), ()), 1 << 17, False),
    ),
    outputs=(Argument("out/0/w", "f32[1024,4096]", ((), ("model",)), 1 << 24, True),),
    specs=(((), ("model",)), (("data",), ()), (("data", "model"), ())),
    values=(0, 1, -1),
    operands=(1, 0),
    output_ids=(0,),
    detours=(((64, 1024), 1, (2, 0)),),
    time_s=0.0125,
    compute_s=0.0100,
    traffic_s=0.0025,
    memory=Memory(1 << 22, 1 << 16, 0, 1 << 20),
    memory_limit=80 << 30,
    collectives=(Collective("all_reduce", ("data",), 3, 1 << 20, 0.002),),
    reshardings=(Resharding("bf16[64,1024]", "/home/me/train.py:12", ((), ()), (("data",), ()), (), 0, 1, 0.0),),
    alternatives=(Alternative("data parallel, mesh 2x4", 0.05, 1 << 30, "4.00x the time"),),
    why=("chosen: mesh 2x4", "whole on every device: state/b"),
    solver="elimination: optimal, gap 0.00%",
    donated=(0,),
)


def test_json_gives_the_plan_back() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize("step", [mlp, looped])
def test_json_gives_a_real_plan_back(step: Any) -> None:
    plan = step().plan((2, 4))
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert back.to_json() == plan.to_json()
    graph = prepare(step().graph())
    assert back.decisions(graph).values == plan.decisions(graph).values


def test_infinite_times_survive() -> None:
    never = dataclasses.replace(PLAN, alternatives=(Alternative("data parallel", math.inf, 0, "does not fit"),))
    assert Plan.from_json(never.to_json()) == never


def test_plans_are_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.time_s = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    assert len({PLAN, Plan.from_json(PLAN.to_json())}) == 1


def test_specs_of_arguments() -> None:
    assert PLAN.input_specs == (((), ("model",)), (("data",), ()))
    assert PLAN.output_specs == (((), ("model",)),)
    assert PLAN.memory.peak_bytes == (1 << 22) + (1 << 16) + (1 << 20)


def changed(**fields: Any) -> str:
    raw = json.loads(PLAN.to_json()) | fields
    return json.dumps({name: value for name, value in raw.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "given", "todo"),
    [
        ("no plan", "not JSON: Expecting value", "save plans with plan.to_json(), or plan again"),
        (PLAN.to_json()[:-40], "not JSON: ", "save plans with plan.to_json(), or plan again"),
        ("", "not JSON: ", "save plans with plan.to_json(), or plan again"),
        ("[1, 2]", "a JSON list without a format", "save plans with plan.to_json(), or plan again"),
        ('{"mesh": 1}', "a JSON dict without a format", "save plans with plan.to_json(), or plan again"),
        (changed(format=99), "a plan of another format", "plan again with this version"),
        (changed(mesh=..., why=...), "a plan with missing or unknown fields ['mesh', 'why']", "plan again"),
        (changed(colour="red"), "a plan with missing or unknown fields ['colour']", "plan again"),
        (changed(memory=3), "a damaged plan: ", "plan again"),
        (changed(memory={"state_bytes": 1}), "a damaged plan: ", "plan again"),
        (changed(inputs=[{"path": "state/w"}]), "a damaged plan: ", "plan again"),
        (changed(inputs=7), "a damaged plan: ", "plan again"),
        (changed(collectives=[[1]]), "a damaged plan: ", "plan again"),
    ],
    ids=lambda value: None if len(value) > 60 else "",
)
def test_what_is_no_plan_is_refused(text: str, given: str, todo: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(text)
    message = str(error.value)
    assert message.startswith(given)
    assert "expected: " in message
    assert todo in message


def test_a_stale_plan_is_refused() -> None:
    graph = prepare(mlp().graph())
    with pytest.raises(PlanError) as error:
        PLAN.decisions(graph)
    message = str(error.value)
    assert f"the plan belongs to program 0123456789abcdef, this step is {fingerprint(graph)}" in message
    assert "expected: the program the plan was made for (same code, shapes, dtypes and JAX version)" in message
    assert "to do: plan again with step.plan(...)" in message


def test_fingerprints_are_of_programs_not_of_runs() -> None:
    first, second = (prepare(mlp().graph()) for _ in range(2))
    assert fingerprint(first) == fingerprint(second)
    others = [mlp(width=32), mlp(layers=3), mlp(batch=16), Step(lambda x: [x * 3.0], (normal(0, 4),), 0)]
    others.append(Step(lambda x: [x * 2.0], (normal(0, 4),), 0))
    prints = {fingerprint(prepare(step.graph())) for step in others}
    assert len(prints) == len(others)
    assert fingerprint(first) not in prints
    check_fingerprint(mlp().plan(), first)


@pytest.mark.parametrize("step", [mlp, looped])
def test_a_plan_speaks_of_everything_in_its_graph(step: Any) -> None:
    graph: Graph = prepare(step().graph())
    plan = step().plan((2, 4))
    assert len(plan.values) == len(list(graph_values(graph)))
    assert len(plan.operands) == len(list(graph_operands(graph)))
    assert len(plan.output_ids) == len(list(graph_outputs(graph)))
    assert max((*plan.values, *plan.operands, *plan.output_ids)) < len(plan.specs)
    decisions = plan.decisions(graph)
    for (source, k), spec in decisions.operands.items():
        assert len(spec) == len(source.inputs[k].shape)
    for value, spec in zip(graph.inputs, plan.input_specs, strict=True):
        assert decisions.values[value] == spec


def test_printing_says_what_was_decided() -> None:
    text = str(PLAN)
    assert "mesh (data=2, model=4)" in text
    assert "12.5 ms a step (10 ms compute, 2.5 ms collectives)" in text
    assert "5.062 MiB a device of 80 GiB" in " ".join(text.split())
    assert "state/w" in text
    assert "(-,model)" in text
    assert "all_reduce" in text
    assert "train.py:12" in text
    assert "data parallel, mesh 2x4" in text
    assert "why\n  chosen: mesh 2x4\n  whole on every device: state/b\n  solver: elimination" in text


def test_the_same_plan_twice() -> None:
    assert mlp().plan(None).to_json() == mlp().plan(None).to_json()


def test_state_comes_back_as_it_went_in() -> None:
    plan = mlp(width=32).plan((2, 4))
    for i in range(4):
        assert plan.inputs[i].state
        assert plan.outputs[i].state
        assert plan.outputs[i].spec == plan.inputs[i].spec
    assert not plan.outputs[4].state
