"""Where a step is planned for and where it runs: the option `mesh`, the mesh around the call, the option `devices`.

mesh given       wins; a surrounding mesh of other devices contradicts it
mesh around      `jax.set_mesh(mesh)` or `with mesh:`, axes of either type
neither          the search chooses the mesh
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from autoshard import jax_compat
from autoshard.cluster import Cluster, DeviceSpec, mesh_size, preset_cluster, resolve_cluster
from autoshard.errors import ArgumentError, ClusterError, MeshError, explain
from autoshard.hardware import detect_nodes
from autoshard.ir import MeshShape
from autoshard.runtime.options import Options

STAGE = "stage"
"""The first axis of a pipeline's mesh."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a step is planned for.

    Attributes:
      cluster: its devices and links.
      shape: mesh axes and sizes, None where the search chooses.
      mesh: the JAX mesh whose devices are meant, None where they are JAX's devices in order.
      real: whether the cluster was found by asking JAX, not named by the user.
    """

    cluster: Cluster
    shape: MeshShape | None
    mesh: jax.sharding.Mesh | None
    real: bool


def find_target(options: Options) -> Target:
    """The target of a call made here and now.

    Raises:
      MeshError: the mesh given and the one around the call have other devices, or the mesh does not fit the devices.
      ClusterError: the option `devices` means nothing.
    """
    around: jax.sharding.Mesh | None = jax_compat.ambient_mesh()[1]
    given = options.mesh
    auto = isinstance(options.devices, str) and options.devices == "auto"
    if around is not None and given is not None:
        _check_same(given, around)
    mesh = given if isinstance(given, jax.sharding.Mesh) else (around if auto or given is None else None)
    ranks = options.ranks
    shape = mesh_shape(given) if isinstance(given, jax.sharding.Mesh) else given
    if ranks > 1 and shape is not None and not isinstance(given, jax.sharding.Mesh):
        shape = shape if shape[0] == (STAGE, ranks) and len(shape) > 1 else ((STAGE, ranks), *shape)
    if shape is None and mesh is not None:
        shape = mesh_shape(mesh)
    if ranks > 1 and mesh is not None and (shape is None or shape[0][1] != ranks or len(shape) < 2):
        raise MeshError(
            explain(
                f"{ranks} pipeline ranks with the mesh {describe_mesh(mesh)}",
                f"a mesh of at least two axes whose first has {ranks} members, one for each rank",
                "reshape the mesh, or give the mesh of one stage as a shape",
            )
        )
    if auto and mesh is not None:
        nodes, network = detect_nodes(list(mesh.devices.flat))
        return Target(Cluster("auto", nodes, network), shape, mesh, True)
    count = None if shape is None else mesh_size(shape)
    cluster = resolve_cluster(options.devices, count if _counts_by_mesh(options.devices) else None)
    if count is not None and count != cluster.size:
        each = f"; `mesh` is that of one of {ranks} stages, {cluster.size // ranks} devices" if ranks > 1 else ""
        raise MeshError(
            explain(
                f"mesh {dict(shape or ())} of {count} devices for {cluster.name!r}, which has {cluster.size}",
                f"sizes that multiply to {cluster.size}{each}",
                "change the mesh, or name other devices (a jax.sharding.Mesh may have part of them)",
            )
        )
    return Target(cluster, shape, mesh, auto)


def mesh_shape(mesh: jax.sharding.Mesh) -> MeshShape:
    """Axes and sizes of a JAX mesh."""
    return tuple((str(name), int(n)) for name, n in zip(mesh.axis_names, mesh.devices.shape, strict=True))


def running_mesh(target: Target, planned: MeshShape) -> jax.sharding.Mesh:
    """The JAX mesh a plan runs on: the user's where there is one, else JAX's devices in order.

    Raises:
      ArgumentError: the plan is for devices that this process does not have.
    """
    if target.mesh is not None and mesh_shape(target.mesh) == planned:
        return target.mesh
    have = list(jax.devices() if target.mesh is None else target.mesh.devices.flat)
    wanted = mesh_size(planned)
    kind = target.cluster.nodes[0].device.kind
    here = {"gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}.get(have[0].platform, have[0].platform)
    if len(have) < wanted or (not target.real and here != kind):
        raise ArgumentError(
            explain(
                f"the plan is for {target.cluster.name} ({wanted} {kind} devices), "
                f"but there are {len(have)} {here} devices here",
                "to run where the plan's devices are; .plan(...) works anywhere",
                'run the step on such devices, or decorate it with devices="auto" to plan for the devices here',
            )
        )
    grid: Any = np.asarray(have[:wanted], dtype=object).reshape([n for _, n in planned])
    kinds = (jax.sharding.AxisType.Auto,) * len(planned)
    return jax.sharding.Mesh(grid, tuple(name for name, _ in planned), axis_types=kinds)


def describe_mesh(mesh: jax.sharding.Mesh) -> str:
    """A mesh in words: axes, sizes and device numbers."""
    numbers = [int(device.id) for device in mesh.devices.flat]
    few = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{dict(mesh_shape(mesh))} of {mesh.devices.flat[0].platform} devices {few}"


def is_explicit(mesh: jax.sharding.Mesh) -> bool:
    """Whether any axis is of the explicit type (shardings are part of array types)."""
    return any(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)


def _check_same(given: jax.sharding.Mesh | MeshShape, around: jax.sharding.Mesh) -> None:
    if isinstance(given, jax.sharding.Mesh):
        if set(given.devices.flat) == set(around.devices.flat):
            return
        text = describe_mesh(given)
    else:
        if mesh_size(given) == around.devices.size:
            return
        text = f"{dict(given)} of {mesh_size(given)} devices"
    raise MeshError(
        explain(
            f"the step was given the mesh {text}, and the call stands inside the mesh {describe_mesh(around)}",
            "one set of devices",
            "drop mesh= from the decorator, or leave the surrounding mesh context",
        )
    )


def _counts_by_mesh(devices: Any) -> bool:
    """Whether the option names a device but not how many."""
    if isinstance(devices, DeviceSpec):
        return True
    if not isinstance(devices, str) or devices == "auto" or devices.endswith(".toml"):
        return False
    try:
        return preset_cluster(devices).size == 1 and "x1" not in devices[-2:]
    except ClusterError:
        return False
