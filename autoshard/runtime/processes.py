"""Arrays where several processes run one program (`jax.distributed`): what is here, what is elsewhere.

An array whose devices are all in other processes is still a `jax.Array` here, with its shape, type and sharding and no
data. Where one process has all devices, everything here is `jax.device_put`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autoshard import jax_compat
from autoshard.errors import MeshError, explain
from autoshard.runtime.transfer import Transfer


def is_here(sharding: NamedSharding | Mesh) -> bool:
    """Whether this process has one of the devices."""
    devices = sharding.devices.flat if isinstance(sharding, Mesh) else sharding.device_set
    return any(device.process_index == jax.process_index() for device in devices)


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh has devices of other processes than this."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def put(array: Any, target: NamedSharding, copy: bool = False) -> jax.Array:
    """The array at its place, which may be in other processes.

    Args:
      array: of this process alone, the same in every process; or (committed to a `NamedSharding`) one that all
        processes know, and then every process of either side must call this.
      target: its place.
      copy: never to share memory with the array, so that it can be donated.

    Raises:
      MeshError: the array is in several processes and has no `NamedSharding`.
    """
    held = isinstance(array, jax.Array)
    if target.is_fully_addressable and not (held and not array.is_fully_addressable):
        return jax.device_put(array, target, may_alias=False if copy else None)
    if held and (not array.is_fully_addressable or (array.committed and isinstance(array.sharding, NamedSharding))):
        return _moved(array, target, copy)
    whole = array if isinstance(array, jax.Array) else np.asarray(array)
    aval = jax.typeof(array)
    shards = [
        jax.device_put(whole[index], device, may_alias=False if copy else None)
        for device, index in target.addressable_devices_indices_map(aval.shape).items()
    ]
    return jax_compat.array_of_shards(aval, target, shards)


def _moved(array: jax.Array, target: NamedSharding, copy: bool) -> jax.Array:
    source: Any = array.sharding
    if isinstance(source, SingleDeviceSharding):
        (device,) = source.device_set
        source = NamedSharding(Mesh(np.asarray([device], dtype=object), ("device",)), PartitionSpec())
    if not isinstance(source, NamedSharding):
        raise MeshError(
            explain(
                f"an array of several processes has a {type(source).__name__}",
                "a jax.sharding.NamedSharding",
                "make it with jax.device_put(array, NamedSharding(mesh, spec))",
            )
        )
    if source.is_equivalent_to(target, array.ndim):
        shards = [jax.device_put(s.data, s.device, may_alias=not copy) for s in array.addressable_shards]
        return jax_compat.array_of_shards(jax.typeof(array), target, shards)
    aval = jax.typeof(array)
    (moved,) = _transfer(aval.shape, aval.dtype, source, target)([array]) or [None]
    return nothing_of(aval, target) if moved is None else moved


@functools.lru_cache(maxsize=256)
def _transfer(shape: tuple[int, ...], dtype: Any, source: NamedSharding, target: NamedSharding) -> Transfer:
    return Transfer([jax.ShapeDtypeStruct(shape, dtype)], [source], [target])


def nothing_of(aval: Any, place: NamedSharding) -> jax.Array:
    """An array of other processes, as it looks here."""
    return jax_compat.array_of_shards(aval, place, [])
