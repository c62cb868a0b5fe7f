"""Slots: what the ranks of a pipeline hold, matched, so that one program can name all of it alike.

A slot is an array that every rank has, of one shape, dtype and spec over the rank's devices; each rank keeps something
of its own in it, or nothing (a filler):

    rank 0   table f32[64,16]   w0 f32[16,16]                             f32[64,16]  f32[16,16]  f32[16,16]
    rank 1   w1 f32[16,16]      w2 f32[16,16]     -->   slots of rank 0   table       w0          -
                                                                 rank 1   -           w1          w2

Typed PRNG keys lie in slots as their words. Outside the program a slot has at least one dimension: the ranks' parts are
put together along the first.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autoshard import jax_compat
from autoshard.ir import Spec, axes_size, partition_spec, replicated
from autoshard.runtime.target import STAGE


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """Shape, dtype and spec of a slot on one rank."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    spec: Spec

    def local_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes on one device."""
        parts = math.prod(axes_size(axes, sizes) for axes in self.spec)
        return math.prod(self.shape) * self.dtype.itemsize // parts

    def rows(self, count: int) -> Slot:
        """So many of it in one array."""
        return Slot((count, *self.shape), self.dtype, ((), *self.spec))

    def outside(self) -> Slot:
        """The slot as it is outside the program, with a first dimension."""
        return self if self.shape else Slot((1,), self.dtype, ((),))

    def whole_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of all ranks' parts together."""
        first, *rest = self.outside().shape
        return (ranks * first, *rest)

    def whole_spec(self) -> PartitionSpec:
        """How they lie on the whole mesh."""
        first, *rest = self.outside().spec
        return partition_spec(((STAGE, *first), *rest))


def is_key(aval: Any) -> bool:
    """Whether values of this type are typed PRNG keys."""
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def is_nothing(aval: Any) -> bool:
    """Whether values of this type have no contents: gradients of integers (float0)."""
    return aval.dtype == jax.dtypes.float0


def slot_for(aval: Any, spec: Spec) -> Slot:
    """The slot that holds values of this type; of what has no contents it is one of booleans."""
    if is_nothing(aval):
        return Slot(tuple(aval.shape), np.dtype(bool), spec)
    if not is_key(aval):
        return Slot(tuple(aval.shape), np.dtype(aval.dtype), spec)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return Slot(tuple(words.shape), np.dtype(words.dtype), (*spec, *replicated(len(words.shape) - len(spec))))


def fill(array: Any, slot: Slot, aval: Any) -> Any:
    """A value as it lies in its slot."""
    if is_nothing(aval):
        return jnp.zeros(slot.shape, slot.dtype)
    if is_key(aval):
        array = jax.random.key_data(array)
    return jax.lax.convert_element_type(array, slot.dtype)  # not weakly typed


def take(array: Any, aval: Any) -> Any:
    """The value of this type that lies in a slot."""
    if is_nothing(aval):
        return np.zeros(aval.shape, jax.dtypes.float0)
    return jax.random.wrap_key_data(array, impl=jax_compat.key_impl(aval.dtype)) if is_key(aval) else array


@final
class Table:
    """Slots as they are found.

    Attributes:
      slots: of the table, in order.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self._index: dict[tuple[Hashable, Slot, int], int] = {}
        self._counts: dict[tuple[int, Hashable, Slot], int] = {}
        self._at: dict[tuple[int, Hashable], int] = {}

    def add(self, holder: int, owner: Hashable, slot: Slot, sort: Hashable = None) -> int:
        """The number of the slot in which a holder has something.

        Args:
          holder: a rank, or a stage; what it has lies in different slots.
          owner: what it has.
          slot: of this form.
          sort: slots of different sorts are different.
        """
        if (holder, owner) in self._at:
            return self._at[holder, owner]
        turn = self._counts.get((holder, sort, slot), 0)
        self._counts[holder, sort, slot] = turn + 1
        key = (sort, slot, turn)
        if key not in self._index:
            self._index[key] = len(self.slots)
            self.slots.append(slot)
        self._at[holder, owner] = self._index[key]
        return self._index[key]

    def find(self, holder: int, owner: Hashable) -> int | None:
        """The number of the slot in which a holder has this, if it has."""
        return self._at.get((holder, owner))

    def owned(self, holder: int) -> list[int]:
        """Slots in which a holder has something."""
        return [index for (each, _), index in self._at.items() if each == holder]
