"""Slots of the whole mesh and the stages' arrays in them: the same buffers both ways."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.runtime.one_program_layout import Item
from autoshard.runtime.slot_arrays import Held, SlotArrays
from autoshard.runtime.slots import Table, slot_for

AUTO = jax.sharding.AxisType.Auto


def meshes() -> tuple[jax.sharding.Mesh, list[jax.sharding.Mesh]]:
    grid = np.asarray(jax.devices()[:8]).reshape(2, 4)
    whole = jax.sharding.Mesh(grid, ("stage", "data"), axis_types=(AUTO, AUTO))
    return whole, [jax.sharding.Mesh(row, ("data",), axis_types=(AUTO,)) for row in grid]


def pointers(array: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def held(rank: int, index: int, value: Any, axes: Any, mesh: Any) -> tuple[Held, Any]:
    place = NamedSharding(mesh[rank], PartitionSpec(*axes))
    array = jax.device_put(value, place)
    return Held(Item(index, rank, rank, index), jax.typeof(array), place), array


def test_slots_are_matched_by_form() -> None:
    table = Table()
    form = slot_for(jax.ShapeDtypeStruct((4, 4), np.float32), ((), ()))
    other = slot_for(jax.ShapeDtypeStruct((4, 4), np.float32), (("data",), ()))
    assert [table.add(0, "a", form), table.add(0, "b", form), table.add(0, "c", other)] == [0, 1, 2]
    assert [table.add(1, "d", form), table.add(1, "e", other), table.add(1, "d", form)] == [0, 2, 0]
    assert table.add(1, "f", form, sort="other") == 3
    assert (table.owned(1), table.find(1, "a")) == ([0, 2, 3], None)


def test_no_copies_but_of_scalars_and_keys() -> None:
    whole, mine = meshes()
    draw = np.random.default_rng(0)
    big, small = draw.normal(size=(8, 4)).astype("f4"), np.float32(3)
    pairs = [
        held(0, 0, big, ("data",), mine),
        held(1, 0, 2 * big, ("data",), mine),
        held(1, 1, big.T.copy(), (None, "data"), mine),
        held(0, 2, small, (), mine),
        held(1, 3, jax.random.key(7), (), mine),
    ]
    specs = {0: (("data",), ()), 1: ((), ("data",)), 2: (), 3: ()}
    slots = [slot_for(next(h.aval for h, _ in pairs if h.item.index == k), spec) for k, spec in specs.items()]
    arrays = SlotArrays(slots, [h for h, _ in pairs], whole, mine)
    together = arrays.together([a for _, a in pairs])
    assert pointers(together[0]) == pointers(pairs[0][1]) + pointers(pairs[1][1])
    assert pointers(together[1])[4:] == pointers(pairs[2][1])
    assert [x.shape for x in together] == [(16, 4), (8, 8), (2,), (4,)]
    np.testing.assert_array_equal(together[0], np.concatenate([big, 2 * big]))
    again = arrays.apart(together, again=True)
    for (_, before), after in zip(pairs, again, strict=True):
        assert after.sharding == before.sharding
        assert jax.typeof(after) == jax.typeof(before)
    assert [pointers(x) for x in again[:3]] == [pointers(a) for _, a in pairs[:3]]
    assert float(again[3]) == 3
    assert jax.random.bits(again[4]) == jax.random.bits(pairs[4][1])
    filler = pointers(together[1])[:4]
    renewed = arrays.together([a for _, a in pairs])
    assert pointers(renewed[1])[:4] == filler, "fillers that came out are used again"
    assert arrays.together(again)[0] is together[0], "what was taken apart is known"
