"""Arrays as they come, moved to where the plan wants them.

jax.jit places what is not committed to a device, and refuses the rest unless it lies as the plan says. Moving inputs is
our job: a committed array of another sharding is moved, one on devices the plan does not have is refused. The
user's own arrays stay as they are until the step has run.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.errors import MeshError, explain
from autoshard.runtime.arguments import Call
from autoshard.runtime.compiled import Compiled
from autoshard.runtime.processes import put
from autoshard.runtime.target import describe_mesh

EXPLICIT = jax.sharding.AxisType.Explicit


def settle(call: Call, compiled: Compiled, copy_donated: bool = False) -> tuple[Any, ...]:
    """The call's arrays, moved to the plan's shardings; what is donated and passed twice is copied.

    Args:
      call: the call.
      compiled: its program.
      copy_donated: copy everything donated.

    Raises:
      MeshError: an array lies on devices that the plan does not have.
    """
    flat = list(call.flat)
    donated = sorted(compiled.planned.info.donated)
    given = set(donated)
    seen: set[int] = set()
    for i in (*donated, *(i for i in range(len(flat)) if i not in given)):
        array = flat[i]
        if not isinstance(array, jax.Array) or array.is_deleted():
            continue
        target, buffer = compiled.inputs[i], _buffer(array)
        if buffer in seen or (copy_donated and i in given):
            flat[i] = put(array, target, copy=True)
        elif not lies_on(array, target):
            flat[i] = move(array, target, call.paths[i], compiled.mesh)
        if i in given:
            seen.add(buffer)
    return tuple(flat)


def _buffer(array: jax.Array) -> int:
    """The same for arrays that share memory (views that device_put makes share it too)."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key) or not array.addressable_shards:
        return id(array)
    return array.addressable_data(0).unsafe_buffer_pointer()


def move(array: Any, target: NamedSharding, path: str, mesh: jax.sharding.Mesh) -> jax.Array:
    """The array at its place.

    Args:
      array: what the user passed.
      target: its place.
      path: of it, for errors.
      mesh: all devices of the plan.

    Raises:
      MeshError: it lies on devices that the plan does not have.
    """
    if isinstance(array, jax.Array) and array.committed:
        check_devices(array, path, mesh)
    return put(array, target)


def lies_on(array: jax.Array, target: NamedSharding) -> bool:
    """Whether jax.jit takes the array for this sharding as it is."""
    if not array.committed:
        return True
    sharding = array.sharding
    if isinstance(sharding, NamedSharding) and sharding.mesh != target.mesh:
        kinds: Sequence[Any] = (*sharding.mesh.axis_types, *target.mesh.axis_types)
        if EXPLICIT in kinds:
            return False
    return sharding.is_equivalent_to(target, array.ndim)


def check_devices(array: jax.Array, path: str, mesh: Any) -> None:
    """Raises MeshError if the array lies on devices that the mesh does not have."""
    sharding = array.sharding
    if sharding.device_set <= set(mesh.devices.flat):
        return
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
        where = f"the mesh {describe_mesh(sharding.mesh)}"
    else:
        where = f"devices {sorted(int(device.id) for device in sharding.device_set)}"
    raise MeshError(
        explain(
            f"{path} lies on {where}, the plan runs on the mesh {describe_mesh(mesh)}",
            "arrays on the plan's devices, or not yet committed to any",
            "move it with jax.device_put, or give the decorator the mesh it lies on",
        )
    )
