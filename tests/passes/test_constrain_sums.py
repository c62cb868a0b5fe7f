"""Where sums are stated before their own spec."""

from __future__ import annotations

import pytest

from autoshard.ir import Spec
from autoshard.passes import Constrain

SIZES = {"a": 2, "b": 4, "c": 2}


@pytest.mark.parametrize(
    ("name", "result", "partial", "stop"),
    [
        ("dot_general", ((), ()), ("a", "b"), None),
        ("dot_general", (("a", "b"), ()), ("a", "b"), None),
        ("dot_general", (("a",), ()), ("a", "b"), None),
        ("dot_general", (("a",), ("b",)), ("a", "b"), ((), ("b",))),
        ("dot_general", (("c", "a"), ("b",)), ("a", "b"), (("c",), ("b",))),
        ("conv_general_dilated", (("a",), ()), ("a", "b"), ((), ())),
        ("conv_general_dilated", ((), ("b", "a")), ("a", "b"), None),
        ("reduce_sum", (("a",), ("b",)), ("a", "b"), None),
    ],
)
def test_stop(name: str, result: Spec, partial: tuple[str, ...], stop: Spec | None) -> None:
    assert Constrain.sum_stop(name, result, partial, SIZES) == stop
