"""From a graph and a plan to a program for `jax.jit`: the graph with a sharding constraint at every reshard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.errors import MeshError, explain
from autoshard.ir import Graph, MeshShape, Reshard, Spec, evaluate, partition_spec
from autoshard.passes import Constrain, run_passes
from autoshard.plan import Plan

OnPass = Callable[[str, Any], None]


def constrained(graph: Graph, plan: Plan, on_pass: OnPass | None = None) -> Graph:
    """The prepared graph with the plan's reshards in it."""
    return run_passes(graph, [Constrain(plan.decisions(graph))], on_pass)


def emit(graph: Graph, plan: Plan, mesh: jax.sharding.Mesh, on_pass: OnPass | None = None) -> Callable[..., list[Any]]:
    """A traceable function of the flat arguments that runs the plan.

    Args:
      graph: the prepared graph (`autoshard.search.prepare`).
      plan: made for it.
      mesh: devices with the plan's axes; axes may be of either type, the program uses automatic ones.

    Raises:
      MeshError: the mesh is not the plan's.
      PlanError: the plan belongs to another program.
    """
    check_mesh(plan.mesh, mesh)
    program = constrained(graph, plan, on_pass)
    automatic = auto_mesh(mesh)

    def constrain(value: Any, reshard: Reshard) -> Any:
        sharding = NamedSharding(automatic, partition_spec(reshard.spec))
        return jax.lax.with_sharding_constraint(value, sharding)  # pyright: ignore[reportUnknownMemberType]

    return lambda *args: evaluate(program, args, constrain)


def auto_mesh(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The same devices with automatic axes, inside which XLA partitions."""
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def shardings(specs: tuple[Spec, ...], mesh: jax.sharding.Mesh) -> tuple[NamedSharding, ...]:
    """JAX shardings of flat arguments or results."""
    return tuple(NamedSharding(mesh, partition_spec(spec)) for spec in specs)


def check_mesh(planned: MeshShape, mesh: jax.sharding.Mesh) -> None:
    """Raises MeshError unless the mesh has the plan's axes and sizes."""
    have = tuple(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    if have != planned:
        raise MeshError(
            explain(f"a mesh {dict(have)}", f"the plan's mesh {dict(planned)}", "use that mesh, or plan for this one")
        )
