"""Runs a graph: equation by equation on arrays (tests), or on tracers (the emitted program).

Control flow is bound again with bodies traced from their graphs, so that what a pass put into a body is
there too. Source locations and name stacks go along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoshard import jax_compat
from autoshard.ir.graph import Apply, Atom, Graph, Literal, Reshard, Value

Constrain = Callable[[Any, Reshard], Any]
Bind = Callable[[Apply, list[Any]], Sequence[Any]]


def evaluate(
    graph: Graph, args: Sequence[Any], constrain: Constrain | None = None, bind: Bind | None = None
) -> list[Any]:
    """The outputs of the graph.

    Args:
      graph: what to run.
      args: one array or tracer for each input.
      constrain: what to do at a `Reshard` (the pjit runtime puts a sharding constraint there); None: nothing,
        and a user's own sharding constraints are left out as well, which is right on one device.
      bind: gives the results of an equation without bodies; None: its primitive is applied.

    Returns:
      One array for each output.
    """
    env: dict[Value, Any] = dict(graph.constants)
    env.update(zip(graph.inputs, args, strict=True))
    last_use = _last_uses(graph)
    for i, equation in enumerate(graph.equations):
        operands = [_read(env, atom) for atom in equation.inputs]
        with jax_compat.equation_context(equation.place.source, _context(equation)):
            if isinstance(equation, Reshard):
                results: Sequence[Any] = [operands[0] if constrain is None else constrain(operands[0], equation)]
            elif constrain is None and equation.name == "sharding_constraint":
                results = operands
            else:
                results = _apply(equation, operands, constrain, bind)
        env.update(zip(equation.outputs, results, strict=True))
        for value in last_use.get(i, ()):
            env.pop(value, None)
    return [_read(env, atom) for atom in graph.outputs]


def rebuild(graph: Graph, constrain: Constrain | None = None, bind: Bind | None = None) -> Any:
    """A closed jaxpr that computes the graph."""
    return jax_compat.trace_avals(
        lambda *args: evaluate(graph, args, constrain, bind), [value.aval for value in graph.inputs]
    )


def bind_equation(equation: Apply, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation, with its source location and context."""
    with jax_compat.equation_context(equation.place.source, equation.context):
        return _apply(equation, list(operands), None, None)


def _apply(equation: Apply, operands: list[Any], constrain: Constrain | None, bind: Bind | None) -> Sequence[Any]:
    if bind is not None and not equation.graphs:
        return bind(equation, operands)
    params = dict(equation.params)
    if equation.graphs:
        bodies = [rebuild(body, constrain, bind) for body in equation.graphs]
        params = jax_compat.body_params(params, equation.name, bodies)
    return jax_compat.bind(equation.primitive, operands, params)


def _context(equation: Apply | Reshard) -> Any:
    return equation.context if isinstance(equation, Apply) else None


def _read(env: dict[Value, Any], atom: Atom) -> Any:
    return atom.value if isinstance(atom, Literal) else env[atom]


def _last_uses(graph: Graph) -> dict[int, list[Value]]:
    """For each equation the values it is the last to read, so that arrays are freed as soon as possible."""
    last: dict[Value, int] = {}
    for i, equation in enumerate(graph.equations):
        last.update({atom: i for atom in equation.inputs if isinstance(atom, Value)})
    for atom in graph.outputs:
        if isinstance(atom, Value):
            last.pop(atom, None)
    uses: dict[int, list[Value]] = {}
    for value, i in last.items():
        uses.setdefault(i, []).append(value)
    return uses


def abstract_inputs(graph: Graph) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the inputs."""
    return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in graph.inputs)
