"""Pins are kept exactly, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoshard.errors import PinError
from autoshard.ir import Spec
from autoshard.search import prepare
from tests.problems import Step, looped, mlp


@pytest.mark.parametrize(
    ("step", "which", "spec"),
    [
        (mlp, 0, ((), ())),
        (mlp, 0, (("model",), ())),
        (mlp, 0, (("data",), ("model",))),
        (mlp, 0, ((), ("data", "model"))),
        (mlp, 0, (("model", "data"), ())),
        (mlp, 1, (("model",),)),
        (mlp, 4, ((), ("data",))),
        (mlp, 4, (("data", "model"), ())),
        (looped, 0, ((), ("model",), ())),
        (looped, 0, (("model",), (), ("data",))),
        (looped, 1, ((), ("model",))),
    ],
)
def test_a_pin_is_kept(step: Callable[[], Step], which: int, spec: Spec) -> None:
    plan = step().plan((2, 4), pins={which: spec})
    assert plan.inputs[which].spec == spec
    assert f"pinned: in/{which}" in plan.why
    if plan.inputs[which].state:
        assert plan.outputs[which].spec == spec
    graph = prepare(step().graph())
    assert plan.decisions(graph).values[graph.inputs[which]] == spec
    assert plan.time_s >= step().plan((2, 4)).time_s * (1 - 1e-9)


def test_pins_of_everything_are_kept() -> None:
    pins: dict[int, Spec] = {0: (("data",), ()), 1: ((),), 2: ((), ("model",)), 3: (("model",),), 4: ((), ())}
    plan = mlp().plan((2, 4), pins=pins)
    assert {i: plan.inputs[i].spec for i in pins} == pins


@pytest.mark.parametrize(
    "spec",
    [(("model",), ("data",)), (("data", "data"), ()), (("nowhere",), ())],
    ids=["divides", "twice", "unknown"],
)
def test_a_pin_that_cannot_hold_is_refused(spec: Spec) -> None:
    step = mlp(width=6 if spec == (("model",), ("data",)) else 16)
    with pytest.raises(PinError) as error:
        step.plan((2, 4), pins={0: spec})
    message = str(error.value)
    assert "is pinned to (" in message
    assert "on the mesh {'data': 2, 'model': 4}" in message
    assert "expected: a spec whose axes' product divides each dimension" in message
    assert "to do: change the pin or the mesh" in message
