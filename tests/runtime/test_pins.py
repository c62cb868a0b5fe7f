"""Pins: patterns and their errors."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.errors import ArgumentError, PinError
from autoshard.runtime.pins import check_pins, matches, resolve_pins

PATHS = ("state/params/mlp/kernel", "state/params/mlp/bias", "state/mu/mlp/kernel", "batch/x")
SHAPES = ((8, 6), (6,), (8, 6), (16, 8))
MESH = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("state/w", "state/w", True),
        ("state", "state/w", False),
        ("*/w", "state/w", True),
        ("*", "state/w", False),
        ("**", "state/w", True),
        ("**/w", "w", True),
        ("**/w", "a/b/c/w", True),
        ("**/mlp/**/kernel", "state/params/mlp/kernel", True),
        ("**/mlp/**/kernel", "state/mlp/layers/0/up/kernel", True),
        ("**/mlp/**/kernel", "state/mlpx/kernel", False),
        ("state/**", "state", True),
        ("state/layer_*/w", "state/layer_12/w", True),
        ("state/layer_?/w", "state/layer_12/w", False),
        ("state/[wb]", "state/b", True),
        ("**/linear/w", "params/mlp/~/linear/w", True),
        ("State/w", "state/w", False),
    ],
)
def test_patterns(pattern: str, path: str, fits: bool) -> None:
    assert matches(pattern, path) is fits


def pin(pins: dict[str, Any], mesh: dict[str, int] | None = None) -> dict[int, Any]:
    return resolve_pins(check_pins(pins), PATHS, SHAPES, mesh)


def test_pins_become_specs() -> None:
    found = pin({"**/kernel": P("model"), "batch/*": P(("data", "model"), None)}, MESH)
    assert found == {0: (("model",), ()), 2: (("model",), ()), 3: (("data", "model"), ())}
    assert pin({"batch/x": P()}) == {3: ((), ())}
    assert resolve_pins(None, PATHS, SHAPES, MESH) == {}


def test_named_shardings_may_be_pins() -> None:
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    assert check_pins({"batch/x": sharding}) == {"batch/x": P("data")}


def test_two_patterns_may_agree() -> None:
    assert pin({"**/kernel": P("model"), "state/mu/**": P("model")}) == {0: (("model",), ()), 2: (("model",), ())}


@pytest.mark.parametrize(
    ("pins", "mesh", "message"),
    [
        (
            {"**/kernal": P()},
            None,
            r"the pin '\*\*/kernal' fits no array.\n  expected: .* nearest are 'state/mu/mlp/kernel'.*\n  to do",
        ),
        (
            {"**/bias": P(None, "model")},
            None,
            r"gives 2 dimensions .*, but state/params/mlp/bias has shape \(6,\).\n  expected: at most 1 entries",
        ),
        (
            {"**/params/**/kernel": P("tensor")},
            MESH,
            "dimension 0 of state/params/mlp/kernel over the mesh axis 'tensor'.\n  expected: .*data=2, model=4",
        ),
        (
            {"**/params/**/kernel": P(None, "model")},
            MESH,
            r"dimension 1 of state/params/mlp/kernel \(size 6\) over model=4 = 4 parts.\n  expected: .* multiple of 4",
        ),
        (
            {"batch/x": P(None, ("data", "model", "data"))},
            MESH,
            "uses the mesh axis 'data' twice for batch/x",
        ),
        ({"batch/x": P("data", "data")}, MESH, "uses the mesh axis 'data' twice for batch/x"),
        (
            {"**/kernel": P("model"), "state/mu/**": P("data")},
            MESH,
            r"state/mu/mlp/kernel is pinned by '\*\*/kernel' to .* and by 'state/mu/\*\*' to ",
        ),
        ({"batch/x": P(P.UNCONSTRAINED)}, MESH, "has the entry .*\n  expected: None, an axis name or a tuple"),
    ],
)
def test_pin_errors(pins: dict[str, Any], mesh: dict[str, int] | None, message: str) -> None:
    with pytest.raises(PinError, match=message):
        pin(pins, mesh)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ([("a", P())], "pins is a list"),
        ({1: P()}, "pins has the key 1"),
        ({"": P()}, "pins has the key ''"),
        ({"a": ("data",)}, r"pins\['a'\] is \('data',\).\n  expected: a jax.sharding.PartitionSpec"),
        ({"a": None}, r"pins\['a'\] is None"),
    ],
)
def test_option_errors(pins: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_pins(pins)
