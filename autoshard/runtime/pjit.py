"""From a graph and a plan to a program for `jax.jit`: the graph with a sharding constraint at every reshard.

What XLA's partitioner would gather though the plan splits it is put in a shard_map:

    y = fft x    -->    y = shard_map[fft] x
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import jax_compat
from autoshard.errors import MeshError, explain
from autoshard.ir import (
    Apply,
    Assignment,
    FactorKind,
    FactorRule,
    Graph,
    Literal,
    MeshShape,
    Reshard,
    Spec,
    assignment_of,
    axes_size,
    evaluate,
    factor_rule,
    partition_spec,
    spec_axes,
    spec_of,
)
from autoshard.passes import Constrain, run_passes
from autoshard.plan import Plan

OnPass = Callable[[str, Any], None]

GROUP_COUNTS = {"feature_group_count": 1, "batch_group_count": 0}
"""Parameters of a convolution that count groups; which entry of `lhs_spec` names the dimension made of them."""


def constrained(
    graph: Graph, plan: Plan, on_pass: OnPass | None = None, mesh: jax.sharding.Mesh | None = None
) -> Graph:
    """The prepared graph with the plan's reshards in it; with a mesh, what XLA would gather is in a shard_map."""
    sizes = dict(plan.mesh)

    def rewrite(equation: Apply, operands: tuple[Spec | None, ...], _results: tuple[Spec | None, ...]) -> Apply:
        return equation if mesh is None else local_equation(equation, operands, mesh, sizes)

    return run_passes(graph, [Constrain(plan.decisions(graph), sizes, rewrite)], on_pass)


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
    automatic = auto_mesh(mesh)
    program = constrained(graph, plan, on_pass, automatic)

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


def local_equation(
    equation: Apply, operands: Sequence[Spec | None], mesh: jax.sharding.Mesh, sizes: Mapping[str, int]
) -> Apply:
    """The equation as a shard_map where `Constrain.is_local`, else as it is.

    The same primitive is applied to the parts, its group counts divided as the groups are; the result lies as the parts
    do, summed over all axes of partial sums.

    Args:
      equation: arrives with its operands in place.
      operands: their specs.
      mesh: with automatic axes.
      sizes: of its axes.
    """
    axes = [axis for spec in operands if spec is not None for axis in spec_axes(spec)]
    literal = any(isinstance(atom, Literal) for atom in equation.inputs)
    if not Constrain.is_local(equation, axes) or literal or any(spec is None for spec in operands):
        return equation
    rule = factor_rule(equation)
    specs = [spec for spec in operands if spec is not None]
    assignment = _joined([assignment_of(rule, d, s, sizes) for d, s in zip(rule.operands, specs, strict=True)])
    if any(assignment[f] for f in rule.of_kind(FactorKind.PERMUTATION)):
        return equation
    partial = tuple(axis for f in rule.of_kind(FactorKind.REDUCTION) for axis in assignment[f])
    psum: Any = jax.lax.psum  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    params = {**equation.params, **group_counts(equation, rule, assignment, sizes)}

    def part(*values: Any) -> Any:
        results = jax_compat.bind(equation.primitive, list(values), dict(params))
        return tuple(psum(r, partial) if partial else r for r in results)

    results = tuple(partition_spec(spec_of(dims, assignment)) for dims in rule.results)
    ins: tuple[PartitionSpec, ...] = tuple(partition_spec(spec) for spec in specs)
    # In a jit, which is one equation in every JAX version and returns a list.
    whole: Any = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=ins, out_specs=results, check_vma=False))  # pyright: ignore[reportUnknownMemberType]
    with jax_compat.equation_context(equation.place.source, equation.context):
        jaxpr: Any = jax_compat.trace_avals(whole, [atom.aval for atom in equation.inputs]).jaxpr
    (inner,) = jaxpr.eqns
    return Apply(
        inner.primitive,
        equation.inputs,
        equation.outputs,
        dict(inner.params),
        (),
        equation.effects,
        equation.context,
        equation.place,
    )


def _joined(each: Sequence[Assignment]) -> Assignment:
    """For each factor its axes, from whichever operand has it."""
    return tuple(max(axes, key=len) for axes in zip(*each, strict=True))


def group_counts(equation: Apply, rule: FactorRule, assignment: Assignment, sizes: Mapping[str, int]) -> dict[str, int]:
    """The group counts of one device of a convolution; none of other equations.

    Groups are the one factor that the split dimension shares with the features.
    """
    found: dict[str, int] = {}
    for name, entry in GROUP_COUNTS.items():
        count = int(equation.params.get(name, 1))
        if count == 1:
            continue
        numbers: Any = equation.params["dimension_numbers"]
        source, target = int(numbers.lhs_spec[entry]), int(numbers.out_spec[1])
        (groups,) = set(rule.operands[0][source]) & set(rule.results[0][target])
        found[name] = count // axes_size(assignment[groups], sizes)
    return found
