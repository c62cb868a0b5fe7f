"""Values moved between devices of several processes, as a program that all of these processes run.

`jax.device_put` does not do it: on CPUs it refuses, on GPUs it wants one sharding on both sides. Here the values are
cut alike on both sides, and the pieces go from device to device:

    source sharding --> pieces on the sender's devices --> pieces on the receiver's devices --> target sharding
            a program of the sender     one program of both, `ppermute`        a program of the receiver

The first and last program are left out where the sharding is the pieces' already. The pieces are those of the source
or of the target, whichever are smaller and can be on both sides; else whole values. A piece that several devices want
goes in rounds, in each of which all who have it send it on.

Why this cannot deadlock: a program with a collective waits on each of its devices for all the others, and a device (a
stream on GPUs, the queue of collectives on CPUs) runs what it is given in order. Say every process gives its devices
their programs in an order that agrees with one list for all processes, each leaving out what is not its own. Then of
all programs not yet done the first in the list can always run: what it reads was made by earlier ones, and on none of
its devices is another before it. So whoever uses a `Transfer` runs it at the same place of such a list everywhere
(`autoshard.runtime.pipeline`: the verified schedule, by simulated time). XLA on CPUs does not keep that order where
a process has one device: what has its operands overtakes what waits for them. So every transfer also reads a number
that the device's transfer before it made. Where a process has several CPU devices, a program that waits for another
process may hold the threads that a second program needs to meet itself on all devices: seen to hang with jax 0.10.1.
There one program at a time is run (`one_at_a_time`).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import jax_compat

Piece = tuple[tuple[int, int], ...]
"""Start and end in each dimension."""

Rounds = tuple[tuple[tuple[int, int], ...], ...]
"""For each round the (sender, receiver) pairs, as positions among the devices of both sides."""

AXIS = "device"

_TURNS: dict[Any, jax.Array] = {}
"""For each device of this process what its last transfer made. Of the process, as the devices are."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """One value on its way.

    Attributes:
      aval: shape and type.
      shape, dtype: of what is sent: at least one dimension, and the bits of random keys.
      tile: shape of a piece.
      source, target: shardings of the value.
      packed, arrived: shardings of what is sent, on either side.
      rounds: who sends to whom.
    """

    aval: Any
    shape: tuple[int, ...]
    dtype: Any
    tile: tuple[int, ...]
    source: NamedSharding
    target: NamedSharding
    packed: NamedSharding
    arrived: NamedSharding
    rounds: Rounds


@final
class Transfer:
    """Moves some values from one mesh to another.

    Every process with a device in one of the meshes calls it at the same place among its collective programs; the
    others may.
    """

    def __init__(
        self, avals: Sequence[Any], sources: Sequence[NamedSharding], targets: Sequence[NamedSharding]
    ) -> None:
        """Args:
        avals: shapes and dtypes.
        sources: where the values are, all on one list of devices.
        targets: where they go, all on one list of devices.
        """
        senders, receivers = devices_of(sources[0]), devices_of(targets[0])
        self._devices = sorted({*senders, *receivers}, key=lambda d: int(d.id))  # one group for both ways
        me = jax.process_index()
        self._sends = any(d.process_index == me for d in senders)
        self._receives = any(d.process_index == me for d in receivers)
        self._local = [d for d in self._devices if d.process_index == me]
        self._parcels = [parcel(*each, self._devices) for each in zip(avals, sources, targets, strict=True)]
        mesh = Mesh(np.asarray(self._devices, dtype=object), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        self._place = NamedSharding(mesh, PartitionSpec(AXIS))
        shared = bool(set(senders) & set(receivers))
        # One value a program: the order of collectives inside one is the CPU compiler's.
        self._programs = [
            jax.jit(
                jax.shard_map(
                    lambda turn, tile, rounds=p.rounds: (turn, carry(tile, rounds, len(self._devices), shared)),
                    mesh=mesh,
                    in_specs=PartitionSpec(AXIS),
                    out_specs=PartitionSpec(AXIS),
                    check_vma=False,
                )
            )
            for p in self._parcels
        ]
        self._pack, self._unpack = pack_program(self._parcels), unpack_program(self._parcels)
        self._blanks: dict[Any, jax.Array] = {}
        self._settled = jax.block_until_ready if one_at_a_time() else lambda x: x

    def __call__(self, arrays: Sequence[Any]) -> list[Any] | None:
        """The arrays at their targets, None in processes that have no device there.

        Args:
          arrays: at their sources; not looked at in processes that have no device there.
        """
        if not self._local:
            return None
        packed: Sequence[Any] = self._settled(arrays)
        if self._sends and self._pack is not None:
            packed = self._settled(self._pack(*arrays))
        arrived: list[Any] = []
        for k, (each, program) in enumerate(zip(self._parcels, self._programs, strict=True)):
            there = {s.device: s.data for s in packed[k].addressable_shards} if self._sends else {}
            tiles = self._whole(each.tile, [there[d] if d in there else self._blank(each, d) for d in self._local])
            turn, result = self._settled(program(self._whole((1,), [self._turn(d) for d in self._local]), tiles))
            _TURNS.update((s.device, s.data) for s in turn.addressable_shards)
            if not self._receives:
                continue
            there = {s.device: s.data for s in result.addressable_shards}
            place = each.target if self._unpack is None else each.arrived  # the same pieces, by the user's name
            shards = [there[d] for d in devices_of(place) if d in there]
            arrived.append(jax.make_array_from_single_device_arrays(each.shape, place, shards, dtype=each.dtype))
        if not self._receives:
            return None
        return arrived if self._unpack is None else list(self._settled(self._unpack(*arrived)))

    def _whole(self, tile: Sequence[int], shards: Sequence[jax.Array]) -> jax.Array:
        """Pieces of the devices here as part of one array on all devices of both sides."""
        shape = (tile[0] * len(self._devices), *tile[1:])
        return jax.make_array_from_single_device_arrays(shape, self._place, list(shards), dtype=shards[0].dtype)

    @staticmethod
    def _turn(device: Any) -> jax.Array:
        found = _TURNS.get(device)
        return jax.device_put(np.zeros(1, np.int32), device) if found is None else found

    def _blank(self, each: Parcel, device: Any) -> jax.Array:
        """What a device that only receives puts in: the program has one shape on all devices."""
        key = each.tile, each.dtype, device
        if key not in self._blanks:
            self._blanks[key] = jax.device_put(np.zeros(each.tile, each.dtype), device)
        return self._blanks[key]


def one_at_a_time() -> bool:
    """Whether programs of several processes must end here before the next is dispatched."""
    return jax.default_backend() == "cpu" and jax.process_count() > 1 and jax.local_device_count() > 1


def devices_of(sharding: NamedSharding) -> list[Any]:
    """A sharding's devices, in its mesh's order."""
    mesh: Any = sharding.mesh
    return list(mesh.devices.flat)


def carry(piece: Any, rounds: Rounds, devices: int, kept: bool) -> Any:
    """The program on each device: a piece in, the piece it shall have out.

    Args:
      piece: what it has; anything where it only receives.
      rounds: who sends to whom.
      devices: of both sides.
      kept: whether receivers that had their piece before must find it again.
    """
    for pairs in rounds:
        come = jax.lax.ppermute(piece, AXIS, pairs)
        if len(rounds) == 1 and not kept:
            return come
        receives = np.zeros(devices, bool)
        receives[[receiver for _, receiver in pairs]] = True
        piece = jnp.where(jnp.asarray(receives)[jax.lax.axis_index(AXIS)], come, piece)
    return piece


def pack(value: Any) -> Any:
    """value  -->  what is sent: random keys as bits, scalars with one dimension."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return value if value.ndim else value.reshape(1)


def unpack(sent: Any, aval: Any) -> Any:
    """The inverse of `pack`."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        sent = jax.random.wrap_key_data(sent, impl=jax_compat.key_impl(aval.dtype))
    return sent.reshape(aval.shape)


def pack_program(parcels: Sequence[Parcel]) -> Any:
    """The sender's program, None where nothing changes."""
    return _program(pack, parcels, [p.source for p in parcels], [p.packed for p in parcels])


def unpack_program(parcels: Sequence[Parcel]) -> Any:
    """The receiver's program, None where nothing changes."""
    return _program(unpack, parcels, [p.arrived for p in parcels], [p.target for p in parcels])


def _program(
    change: Any, parcels: Sequence[Parcel], before: Sequence[NamedSharding], after: Sequence[NamedSharding]
) -> Any:
    """A program from one side's shardings to the other's, None where nothing changes."""
    plain = all(p.shape == tuple(p.aval.shape) and p.dtype == p.aval.dtype for p in parcels)
    same = all(a.is_equivalent_to(b, len(p.shape)) for a, b, p in zip(before, after, parcels, strict=True))
    if plain and same:
        return None

    def run(*values: Any) -> tuple[Any, ...]:
        if change is pack:
            return tuple(pack(v) for v in values)
        return tuple(unpack(v, p.aval) for v, p in zip(values, parcels, strict=True))

    return jax.jit(run, out_shardings=tuple(after))


def parcel(aval: Any, source: NamedSharding, target: NamedSharding, devices: Sequence[Any]) -> Parcel:
    """How a value goes.

    Args:
      aval: shape and dtype.
      source: where it is.
      target: where it goes.
      devices: of both sides.
    """
    sent = jax.eval_shape(pack, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    shape = tuple(sent.shape)
    here, there = _widen(source, len(shape)), _widen(target, len(shape))
    sides = devices_of(here), devices_of(there)
    ways: list[tuple[NamedSharding, NamedSharding]] = []
    if not set(sides[0]) & set(sides[1]):
        parts, wanted = _parts(shape, here), _parts(shape, there)
        if len(sides[1]) % math.prod(parts) == 0:
            ways.append((here, there if parts == wanted else _cut(sides[1], parts)))
        if len(sides[0]) % math.prod(wanted) == 0:
            ways.append((_cut(sides[0], wanted), there))
    ways.append((_cut(sides[0], (1,) * len(shape)), _cut(sides[1], (1,) * len(shape))))
    packed, arrived = max(ways, key=lambda way: math.prod(_parts(shape, way[0])))
    has = {devices.index(d): p for d, p in pieces_of(shape, packed).items()}
    wants = {devices.index(d): p for d, p in pieces_of(shape, arrived).items()}
    process = [int(d.process_index) for d in devices]
    rounds = find_rounds(has, wants, process)
    return Parcel(aval, shape, sent.dtype, tuple(packed.shard_shape(shape)), source, target, packed, arrived, rounds)


def find_rounds(has: Mapping[int, Piece], wants: Mapping[int, Piece], process: Sequence[int]) -> Rounds:
    """Who sends to whom; a sender of the receiver's own process is preferred.

    Args:
      has: positions of devices with the piece they have.
      wants: the same with the piece they shall have.
      process: of each position.
    """
    holders: dict[Piece, list[int]] = {}
    for device, piece in has.items():
        holders.setdefault(piece, []).append(device)
    waiting = {d: piece for d, piece in wants.items() if has.get(d) != piece}
    rounds: list[tuple[tuple[int, int], ...]] = []
    while waiting:
        free = {piece: list(found) for piece, found in holders.items()}
        pairs: list[tuple[int, int]] = []
        for near in (True, False):
            for device, piece in list(waiting.items()):
                found = [d for d in free[piece] if process[d] == process[device]] if near else free[piece]
                if found:
                    sender = found[0]
                    free[piece].remove(sender)
                    pairs.append((sender, device))
                    del waiting[device]
        for _, device in pairs:
            holders[wants[device]].append(device)
        rounds.append(tuple(pairs))
    return tuple(rounds)


def _widen(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """The sharding with a mesh whose axes are automatic, of what is sent."""
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    given: Any = sharding.mesh
    kinds = (jax.sharding.AxisType.Auto,) * len(given.axis_names)
    mesh = Mesh(given.devices, given.axis_names, axis_types=kinds)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _parts(shape: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """Into how many parts each dimension is cut."""
    tile = sharding.shard_shape(tuple(shape))
    return tuple(n // m if m else 1 for n, m in zip(shape, tile, strict=True))


def _cut(devices: Sequence[Any], parts: Sequence[int]) -> NamedSharding:
    """A sharding into these parts, each on as many of the devices as the others."""
    grid = np.asarray(devices, dtype=object).reshape(*parts, -1)
    names = tuple(f"cut{k}" for k in range(len(parts)))
    kinds = (jax.sharding.AxisType.Auto,) * grid.ndim
    return NamedSharding(Mesh(grid, (*names, "copy"), axis_types=kinds), PartitionSpec(*names))


def pieces_of(shape: Sequence[int], sharding: NamedSharding) -> dict[Any, Piece]:
    """The piece of each device."""
    found = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)) for device, index in found.items()
    }
