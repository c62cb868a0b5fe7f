"""What stands behind `Plan.compile`: the planned program, lowered for GPUs that need not be there."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.ir import Graph, abstract_inputs
from autoshard.plan import Plan
from autoshard.runtime.compile_report import CompiledReport
from autoshard.runtime.deviceless import CompileTarget, compile_deviceless
from autoshard.runtime.pjit import emit, shardings


def compile_plan(
    graph: Graph, cluster: Cluster, plan: Plan, target: CompileTarget | None, **options: Any
) -> CompiledReport:
    """Compiles a plan.

    Args:
      graph: the prepared graph the plan was made for.
      cluster: what it was planned for.
      plan: the plan.
      target: what to compile for, None for `cluster`.
      **options: of `compile_deviceless`.
    """
    avals = abstract_inputs(graph)

    def build(mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
        inputs = shardings(plan.input_specs, mesh)
        jitted = jax.jit(
            emit(graph, plan, mesh),
            in_shardings=inputs,
            out_shardings=list(shardings(plan.output_specs, mesh)),
            donate_argnums=plan.donated,
        )
        args = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
            for a, s in zip(avals, inputs, strict=True)
        ]
        return jitted, tuple(args)

    return compile_deviceless(build, cluster if target is None else target, plan.mesh, **options)
