"""Values moved between CPU devices of several processes beside their programs, over sockets.

A collective on a CPU device (`autoshard.runtime.transfer`) keeps the process's programs waiting until the other side
is there and all bytes are: a product dispatched after a `ppermute` was done when the other process came, half a second
later, with one thread and with four (jax 0.10.1). `jax.experimental.transfer` needs threads of the same pool, and hung
beside a collective that waited. Here threads of `autoshard.runtime.exchange` send and receive, and what arrives is
waited for when a program that reads it is dispatched.

The pieces are those of a `Parcel`. Both sides count messages alike, for all processes go through one list of what is
sent (`autoshard.runtime.pipeline`).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from autoshard.runtime.exchange import exchange
from autoshard.runtime.transfer import (
    Parcel,
    devices_of,
    one_at_a_time,
    pack_program,
    parcel,
    pieces_of,
    unpack_program,
)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Arriving:
    """One of some arrays that are on their way.

    Attributes:
      wait: for all of them; what has waited once has them at once.
      position: of this one.
    """

    wait: Callable[[], Sequence[Any]]
    position: int


def arrived(array: Any) -> Any:
    """The array, waited for if it is on its way.

    Raises:
      ConnectionError, ProcessLostError: it will not come.
    """
    return array.wait()[array.position] if isinstance(array, Arriving) else array


@final
@dataclass(frozen=True, slots=True)
class Leg:
    """A piece of a value from one device to another.

    Attributes:
      value: its position.
      sender, receiver: devices.
    """

    value: int
    sender: Any
    receiver: Any


@final
class SocketTransfer:
    """Moves some values from one mesh to another; called as a `Transfer`. The answer is on its way."""

    def __init__(
        self, avals: Sequence[Any], sources: Sequence[NamedSharding], targets: Sequence[NamedSharding]
    ) -> None:
        """Args:
        avals: shapes and dtypes.
        sources: where the values are, all on one list of devices.
        targets: where they go, all on one list of devices.
        """
        me = jax.process_index()
        senders, receivers = devices_of(sources[0]), devices_of(targets[0])
        both = sorted({*senders, *receivers}, key=lambda d: int(d.id))
        self._parcels = [parcel(*each, both) for each in zip(avals, sources, targets, strict=True)]
        self._sends = any(d.process_index == me for d in senders)
        self._receives = any(d.process_index == me for d in receivers)
        self._pack, self._unpack = pack_program(self._parcels), unpack_program(self._parcels)
        self._near: list[Leg] = []  # within this process
        self._out: dict[int, list[Leg]] = {}
        self._come: dict[int, list[Leg]] = {}
        for leg in (leg for k, each in enumerate(self._parcels) for leg in find_legs(k, each)):
            ends = int(leg.sender.process_index), int(leg.receiver.process_index)
            if ends == (me, me):
                self._near.append(leg)
            elif ends[0] == me:
                self._out.setdefault(ends[1], []).append(leg)
            elif ends[1] == me:
                self._come.setdefault(ends[0], []).append(leg)
        self._settled = jax.block_until_ready if one_at_a_time() else lambda x: x

    def __call__(self, arrays: Sequence[Any]) -> list[Arriving] | None:
        """The arrays at their targets, None in processes that have no device there.

        Args:
          arrays: at their sources; not looked at in processes that have no device there.
        """
        here: list[dict[Any, Any]] = []
        if self._sends:
            packed = self._settled(arrays if self._pack is None else self._pack(*self._settled(arrays)))
            here = [{s.device: s.data for s in array.addressable_shards} for array in packed]
        for process, legs in self._out.items():
            exchange().send(process, [here[leg.value][leg.sender] for leg in legs])
        if not self._receives:
            return None
        near = [(leg, here[leg.value][leg.sender]) for leg in self._near]
        coming = [(legs, exchange().expect(process)) for process, legs in self._come.items()]
        done: list[Any] = []

        def wait() -> Sequence[Any]:
            if not done:
                done.extend(self._finish(near, coming))
            return done

        return [Arriving(wait, k) for k in range(len(self._parcels))]

    def _finish(
        self,
        near: Sequence[tuple[Leg, Any]],
        coming: Sequence[tuple[Sequence[Leg], Callable[[], Sequence[NDArray[Any]]]]],
    ) -> Sequence[Any]:
        """The arrays, once all pieces are here."""
        found: list[dict[Any, Any]] = [{} for _ in self._parcels]
        for leg, piece in near:
            found[leg.value][leg.receiver] = jax.device_put(piece, leg.receiver)
        for legs, get in coming:
            for leg, piece in zip(legs, get(), strict=True):
                each = self._parcels[leg.value]
                whole = piece.view(each.dtype).reshape(each.tile)
                found[leg.value][leg.receiver] = jax.device_put(whole, leg.receiver)
        made = [self._whole(k, pieces) for k, pieces in enumerate(found)]
        return made if self._unpack is None else list(self._settled(self._unpack(*self._settled(made))))

    def _whole(self, k: int, pieces: dict[Any, Any]) -> jax.Array:
        each = self._parcels[k]
        place = each.target if self._unpack is None else each.arrived  # the same pieces, by the user's name
        shards = [pieces[d] for d in devices_of(place) if d in pieces]
        return jax.make_array_from_single_device_arrays(each.shape, place, shards, dtype=each.dtype)


def find_legs(value: int, each: Parcel) -> list[Leg]:
    """Who sends to whom: a device itself, one of the receiver's process, or the first that has the piece."""
    has, wants = pieces_of(each.shape, each.packed), pieces_of(each.shape, each.arrived)
    legs: list[Leg] = []
    for receiver, piece in wants.items():
        holders = [device for device, held in has.items() if held == piece]
        near = [device for device in holders if device.process_index == receiver.process_index]
        sender = receiver if receiver in holders else (near or holders)[0]
        legs.append(Leg(value, sender, receiver))
    return legs
