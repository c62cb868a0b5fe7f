"""Arrays of stages, put together to slots of the whole mesh and taken apart again, without copies.

A slot over all ranks is made of the very buffers that the stages' arrays have. Ranks that have nothing for a slot get
zeros, once: of what the program takes and gives back, they come out again. Scalars and typed PRNG keys, which are
not in the form of a slot, go through one small program on each rank.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from jax.sharding import NamedSharding

from autoshard import jax_compat
from autoshard.ir import partition_spec
from autoshard.runtime.one_program_layout import Item
from autoshard.runtime.slots import Slot, fill, is_key, is_nothing, take


@final
@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An array of a stage in a slot.

    Attributes:
      item: which, and where.
      aval: its type.
      place: where the stage has it.
    """

    item: Item
    aval: Any
    place: NamedSharding

    def as_is(self, slot: Slot) -> bool:
        """Whether its buffers are those of the slot."""
        return bool(slot.shape) and not (is_key(self.aval) or is_nothing(self.aval) or self.aval.weak_type)


@final
class SlotArrays:
    """The arrays of a list of slots.

    Args:
      slots: in order.
      held: what lies in them.
      mesh: the whole mesh.
      meshes: of each rank.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        held: Sequence[Held],
        mesh: jax.sharding.Mesh,
        meshes: Sequence[jax.sharding.Mesh],
    ) -> None:
        self._slots, self._held, self._meshes = list(slots), list(held), list(meshes)
        self.shardings = [NamedSharding(mesh, slot.whole_spec()) for slot in slots]
        self._ranks = len(meshes)
        self._fillers: dict[tuple[int, int], list[Any]] = {}
        self._changed: list[list[int]] = [[] for _ in meshes]
        self._rows: list[dict[int, int]] = [{} for _ in slots]
        for k, each in enumerate(held):
            self._rows[each.item.index][each.item.rank] = k
            if not each.as_is(self._slots[each.item.index]):
                self._changed[each.item.rank].append(k)
        self._into = [self._program(r, inwards=True) for r in range(self._ranks)]
        self._out = [self._program(r, inwards=False) for r in range(self._ranks)]
        # slot to (all ranks' array, weak references to the stages' arrays made of it)
        self._known: dict[int, tuple[jax.Array, dict[int, Any]]] = {}

    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes to lower with."""
        return tuple(
            jax.ShapeDtypeStruct(slot.whole_shape(self._ranks), slot.dtype, sharding=place)
            for slot, place in zip(self._slots, self.shardings, strict=True)
        )

    def _place(self, k: int) -> NamedSharding:
        each = self._held[k]
        return NamedSharding(self._meshes[each.item.rank], partition_spec(self._slots[each.item.index].outside().spec))

    def _program(self, rank: int, inwards: bool) -> Callable[..., Sequence[Any]] | None:
        """Between the arrays of a rank that are not as in their slots, and what lies there."""
        mine = self._changed[rank]
        if not mine:
            return None
        held = [(self._held[k].aval, self._slots[self._held[k].item.index]) for k in mine]

        def enter(*arrays: Any) -> list[Any]:
            filled = (fill(a, slot, aval) for a, (aval, slot) in zip(arrays, held, strict=True))
            return [a.reshape(slot.outside().shape) for a, (_, slot) in zip(filled, held, strict=True)]

        def leave(*arrays: Any) -> list[Any]:
            taken = (take(a.reshape(slot.shape), aval) for a, (aval, slot) in zip(arrays, held, strict=True))
            return [
                jax_compat.weakly_typed(a) if aval.weak_type else a for a, (aval, _) in zip(taken, held, strict=True)
            ]

        stage, slot = tuple(self._held[k].place for k in mine), tuple(self._place(k) for k in mine)
        if inwards:
            return jax.jit(enter, in_shardings=stage, out_shardings=list(slot))
        return jax.jit(leave, in_shardings=slot, out_shardings=list(stage))

    def together(self, arrays: Sequence[Any]) -> tuple[jax.Array, ...]:
        """The slots that hold these arrays, one for each of `held`, each at its place."""
        found = list(arrays)
        for program, mine in zip(self._into, self._changed, strict=True):
            if program is not None:
                for k, array in zip(mine, program(*[arrays[k] for k in mine]), strict=True):
                    found[k] = array
        return tuple(self._slot(index, found) for index in range(len(self._slots)))

    def _slot(self, index: int, arrays: Sequence[Any]) -> jax.Array:
        rows = self._rows[index]
        known = self._known.get(index)
        if known is not None and all(known[1][r]() is arrays[k] for r, k in rows.items()):
            return known[0]
        shards: list[Any] = []
        for rank in range(self._ranks):
            shards += self._filler(rank, index) if rank not in rows else _shards(arrays[rows[rank]])
        slot = self._slots[index]
        return jax.make_array_from_single_device_arrays(slot.whole_shape(self._ranks), self.shardings[index], shards)

    def _filler(self, rank: int, index: int) -> list[Any]:
        found = self._fillers.get((rank, index))
        if found is None or found[0].is_deleted():
            slot = self._slots[index].outside()
            place = NamedSharding(self._meshes[rank], partition_spec(slot.spec))
            found = _shards(jax.device_put(np.zeros(slot.shape, slot.dtype), place))
            self._fillers[rank, index] = found
        return found

    def apart(self, slots: Sequence[jax.Array], again: bool = False) -> list[Any]:
        """The arrays that lie in these slots, one for each of `held`.

        Args:
          slots: from the program.
          again: they are what the program takes next: fillers are kept.
        """
        found: list[Any] = [None] * len(self._held)
        for index, (array, slot) in enumerate(zip(slots, self._slots, strict=True)):
            shards = _shards(array)
            count = len(shards) // self._ranks
            shape, rows = slot.outside().shape, self._rows[index]
            for rank in range(self._ranks):
                part = shards[rank * count : (rank + 1) * count]
                if rank in rows:
                    k = rows[rank]
                    place = self._held[k].place if self._held[k].as_is(slot) else self._place(k)
                    found[k] = jax.make_array_from_single_device_arrays(shape, place, part)
                elif again:
                    self._fillers[rank, index] = part
            if again and all(self._held[k].as_is(slot) for k in rows.values()):
                self._remember(index, array, {r: found[k] for r, k in rows.items()})
        for program, mine in zip(self._out, self._changed, strict=True):
            if program is not None:
                for k, array in zip(mine, program(*[found[k] for k in mine]), strict=True):
                    found[k] = array
        return found

    def _remember(self, index: int, array: jax.Array, parts: dict[int, Any]) -> None:
        """Keeps a slot for as long as all arrays made of it live: most often they are what the next step is given."""
        known = self._known

        def forget(_: Any) -> None:
            known.pop(index, None)

        known[index] = (array, {rank: weakref.ref(part, forget) for rank, part in parts.items()})


def _shards(array: jax.Array) -> list[Any]:
    """The array's parts, in the order of the mesh."""
    return [shard.data for shard in array.addressable_shards]
