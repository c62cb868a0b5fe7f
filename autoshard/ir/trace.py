"""From a Python function to a graph.

The function is traced once by JAX. Calls are inlined:

    jit, closed_call, core_call, custom_jvp_call, custom_vjp_call   -->   their equations
    remat2 (differentiated, prevent_cse)                            -->   optimization_barrier, then its equations
    jit(in_shardings=s)                                             -->   sharding_constraint(s) on its operands

which is what JAX's own lowering does with them. `scan`, `while` and `cond` keep their bodies as graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from autoshard import jax_compat
from autoshard.errors import AutoshardError, TraceError, explain
from autoshard.ir.graph import Apply, Atom, Equation, Graph, Literal, Place, Value

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
"""Primitives that are calls, and the parameter that holds what is called."""

CONTROL_FLOW = ("scan", "while", "cond")


def trace(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Graph:
    """Traces a function of flat arrays.

    Args:
      fun: takes one array for each of `avals`, returns a sequence of arrays.
      avals: `jax.ShapeDtypeStruct`s or abstract values of the arguments.

    Returns:
      The graph, dead equations removed.

    Raises:
      TraceError: the function used a traced value as a Python number, leaked a tracer, or the like;
        the original JAX error is its cause and its message is repeated.
    """
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=bool(getattr(a, "weak_type", False))) for a in avals]
    try:
        closed = jax.make_jaxpr(fun)(*structs)  # pyright: ignore[reportUnknownMemberType]
    except AutoshardError:
        raise
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.UnexpectedTracerError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        raise TraceError(
            explain(
                f"the step could not be traced: {type(error).__name__}: {_first_lines(error)}",
                "a step that jax.jit accepts: no Python branch on array values, no traced value kept from an earlier "
                "call",
                "use jnp.where or lax.cond for branches, mark Python values in static_argnames, "
                "return values instead of storing them outside the step",
            )
        ) from error
    graph = from_jaxpr(closed)
    if any(isinstance(const, Tracer) for _, const in graph.constants):
        raise TraceError(
            explain(
                "the step uses a traced value kept from an earlier trace (a leaked tracer)",
                "a step that reads arrays only from its arguments and from concrete arrays outside",
                "return values instead of storing them outside the step; jax.checking_leaks() finds where it leaked",
            )
        )
    return graph


def from_jaxpr(closed: Any) -> Graph:
    """The graph of a closed jaxpr."""
    jaxpr, consts = jax_compat.open_jaxpr(closed)
    return _Inliner().graph(jaxpr, consts)


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split("\n\n")[0].split())[:400]


class _Inliner:
    """One trace: where the equations of the current graph gather."""

    def graph(self, jaxpr: Any, consts: Sequence[Any]) -> Graph:
        env: dict[Any, Atom] = {}
        constants: list[tuple[Value, Any]] = []
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = value = Value(var.aval)
            constants.append((value, const))
        inputs: list[Value] = []
        for var in jaxpr.invars:
            env[var] = value = Value(var.aval)
            inputs.append(value)
        equations: list[Equation] = []
        self._inline(jaxpr, env, equations, constants, None, 0)
        outputs = tuple(_read(env, atom) for atom in jaxpr.outvars)
        graph = Graph(tuple(inputs), tuple(constants), tuple(equations), outputs, frozenset(jaxpr.effects))
        return drop_dead(graph)

    def _inline(
        self,
        jaxpr: Any,
        env: dict[Any, Atom],
        equations: list[Equation],
        constants: list[tuple[Value, Any]],
        outer: Any,
        remat: int,
    ) -> None:
        for eqn in jaxpr.eqns:
            source = eqn.source_info if outer is None else jax_compat.join_name_stack(outer, eqn.source_info)
            operands = [_read(env, atom) for atom in eqn.invars]
            name = str(eqn.primitive.name)
            place = Place(source, remat)
            if name in CALLS:
                results = self._call(eqn, name, operands, equations, constants, place)
                for var, atom in zip(eqn.outvars, results, strict=True):
                    env[var] = atom
                continue
            bodies: tuple[Graph, ...] = ()
            params = dict(eqn.params)
            if name in CONTROL_FLOW:
                params, closed = jax_compat.take_bodies(params, name)
                bodies = tuple(self.graph(*jax_compat.open_jaxpr(body)) for body in closed)
            outputs = tuple(Value(var.aval) for var in eqn.outvars)
            equations.append(
                Apply(eqn.primitive, tuple(operands), outputs, params, bodies, frozenset(eqn.effects), eqn.ctx, place)
            )
            for var, value in zip(eqn.outvars, outputs, strict=True):
                env[var] = value

    def _call(
        self,
        eqn: Any,
        name: str,
        operands: list[Atom],
        equations: list[Equation],
        constants: list[tuple[Value, Any]],
        place: Place,
    ) -> list[Atom]:
        inner, consts = jax_compat.open_jaxpr(eqn.params[CALLS[name]])
        remat = place.remat
        scope = place.source
        if name in ("remat2", "checkpoint"):
            remat += 1
            scope = jax_compat.call_scope(scope, "checkpoint")
            if eqn.params["differentiated"]:
                operands = _barrier(operands, eqn.params["prevent_cse"], equations, eqn.ctx, place)
        if name in ("jit", "pjit"):
            operands = _constrain(operands, eqn.params.get("in_shardings", ()), equations, eqn.ctx, place)
        env: dict[Any, Atom] = {}
        for var, const in zip(inner.constvars, consts, strict=True):
            env[var] = value = Value(var.aval)
            constants.append((value, const))
        for var, atom in zip(inner.invars, operands, strict=True):
            env[var] = atom
        self._inline(inner, env, equations, constants, scope, remat)
        results = [_read(env, atom) for atom in inner.outvars]
        if name in ("jit", "pjit"):
            results = _constrain(results, eqn.params.get("out_shardings", ()), equations, eqn.ctx, place)
        return results


def _read(env: dict[Any, Atom], atom: Any) -> Atom:
    if jax_compat.is_literal(atom):
        return Literal(atom.val, atom.aval)
    return env[atom]


def _barrier(
    operands: list[Atom], prevent: bool | Sequence[bool], equations: list[Equation], context: Any, place: Place
) -> list[Atom]:
    """The operands behind an optimization barrier, so that XLA does not undo the recomputation."""
    marks = [prevent] * len(operands) if isinstance(prevent, bool) else list(prevent)
    chosen = [i for i, mark in enumerate(marks) if mark and isinstance(operands[i], Value)]
    if not chosen:
        return operands
    held = tuple(operands[i] for i in chosen)
    outputs = tuple(Value(atom.aval) for atom in held)
    barrier = jax_compat.optimization_barrier_p()
    equations.append(Apply(barrier, held, outputs, {}, (), frozenset(), context, place))
    result = list(operands)
    for i, value in zip(chosen, outputs, strict=True):
        result[i] = value
    return result


def _constrain(
    atoms: list[Atom], shardings: Sequence[Any], equations: list[Equation], context: Any, place: Place
) -> list[Atom]:
    """The shardings a user wrote on an inner `jax.jit`, as constraints."""
    result = list(atoms)
    for i, sharding in enumerate(shardings):
        atom = atoms[i]
        if type(sharding).__name__ == jax_compat.UNSPECIFIED_NAME or not isinstance(atom, Value):
            continue
        value = Value(atom.aval)
        equations.append(
            Apply(
                jax_compat.sharding_constraint_p(),
                (atom,),
                (value,),
                jax_compat.sharding_constraint_params(sharding),
                (),
                frozenset(),
                context,
                place,
            )
        )
        result[i] = value
    return result


def drop_dead(graph: Graph) -> Graph:
    """The graph without equations that have no effect and whose results nobody reads."""
    live: set[Value] = {atom for atom in graph.outputs if isinstance(atom, Value)}
    kept: list[Equation] = []
    for equation in reversed(graph.equations):
        effects = equation.effects if isinstance(equation, Apply) else frozenset[Any]()
        if effects or any(value in live for value in equation.outputs):
            kept.append(equation)
            live.update(atom for atom in equation.inputs if isinstance(atom, Value))
    constants = tuple((value, const) for value, const in graph.constants if value in live)
    return Graph(graph.inputs, constants, tuple(reversed(kept)), graph.outputs, graph.effects)
