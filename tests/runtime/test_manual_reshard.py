"""Written-out reshards: right for every pair of specs, without a collective-permute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.ir import Spec, partition_spec, spec_axes
from autoshard.runtime.manual_reshard import manual_reshard

SIZES = {"a": 2, "b": 2}
ENTRIES = ((), ("a",), ("b",), ("a", "b"), ("b", "a"))
SPECS: list[Spec] = [s for s in product(ENTRIES, repeat=2) if len(set(spec_axes(s))) == len(spec_axes(s))]


def compiled(source: Spec, targets: Sequence[Spec]) -> Any:
    """A program that brings an array from one spec to each of the others."""
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("stage", "a", "b"), axis_types=auto)
    whole = PartitionSpec("stage")

    def place(spec: Spec) -> NamedSharding:
        return NamedSharding(mesh, partition_spec((("stage", *spec[0]), spec[1])))

    jitted = jax.jit(
        jax.shard_map(
            lambda x: [manual_reshard(x, source, target, SIZES) for target in targets],
            mesh=mesh,
            in_specs=whole,
            out_specs=whole,
            axis_names={"stage"},
            check_vma=False,
        ),
        in_shardings=place(source),
        out_shardings=[place(target) for target in targets],
    )
    return jitted.lower(jax.ShapeDtypeStruct((16, 8), np.float32)).compile()


@pytest.mark.parametrize("source", SPECS, ids=str)
def test_every_pair(source: Spec) -> None:
    array = np.arange(128, dtype="f4").reshape(16, 8)
    program = compiled(source, SPECS)
    assert "collective-permute" not in program.as_text()
    for found in program(array):
        np.testing.assert_array_equal(found, array)


def test_an_axis_that_moves_is_an_all_to_all() -> None:
    text = compiled((("a", "b"), ()), [(("a",), ("b",))]).as_text()
    assert "all-to-all" in text
    assert "all-gather" not in text
