"""Equations made by tracing a function, put among others.

splice(f, [x])   -->   the equations of f, reading x, and the values that stand for its results
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import jax_compat
from autoshard.ir.graph import Apply, Atom, Equation, Graph, Place, Value
from autoshard.ir.trace import trace


def splice(
    fun: Callable[..., Any], operands: Sequence[Value], place: Place, results: Sequence[Value] | None = None
) -> tuple[list[Apply], tuple[Atom, ...]]:
    """(equations of `fun`, its results), reading these values.

    Args:
      fun: takes an array for each operand, returns a sequence of arrays.
      operands: values that exist where the equations are put.
      place: where the equations come from, as an error names it.
      results: values that the results shall be; they must be made by `fun`, not handed through.
    """
    graph = trace(fun, [value.aval for value in operands])
    assert not graph.constants, "spliced functions capture nothing"
    return instance(graph, operands, place, results)


def instance(
    graph: Graph, operands: Sequence[Value], place: Place, results: Sequence[Value] | None = None
) -> tuple[list[Apply], tuple[Atom, ...]]:
    """(equations of a graph with values of their own, its results), reading these values; else as `splice`."""
    names: dict[Value, Value] = dict(zip(graph.inputs, operands, strict=True))
    if results is not None:
        for atom, value in zip(graph.outputs, results, strict=True):
            assert isinstance(atom, Value), "a spliced result is no literal"
            assert atom not in names, "a spliced result is made by an equation of its own"
            names[atom] = value
    for equation in graph.equations:
        for value in equation.outputs:
            names.setdefault(value, Value(value.aval))
    equations = [renamed(equation, names, place) for equation in graph.equations]
    return equations, tuple(names.get(a, a) if isinstance(a, Value) else a for a in graph.outputs)


def renamed(equation: Equation, names: Mapping[Value, Atom], place: Place | None = None) -> Apply:
    """The equation with other operands and results; bodies stay as they are."""
    assert isinstance(equation, Apply), "equations are renamed before shardings"
    outputs: list[Value] = []
    for value in equation.outputs:
        named = names.get(value, value)
        assert isinstance(named, Value), "results are values"
        outputs.append(named)
    inputs = tuple(names.get(a, a) if isinstance(a, Value) else a for a in equation.inputs)
    return replace(equation, inputs=inputs, outputs=tuple(outputs), place=place or equation.place)


def scan_equation(
    body: Graph, consts: Sequence[Value], carries: Sequence[Atom], scanned: Sequence[Value], length: int, place: Place
) -> Apply:
    """A scan over a body whose inputs are constants, carries, scanned parts, and outputs carries, parts.

    Args:
      body: for one trip.
      consts, carries, scanned: operands; scanned ones have the length as their first dimension.
      length: trips.
      place: where it comes from.
    """
    results = len(body.outputs) - len(carries)
    context_now = jax_compat.trace_context()
    params = _scan_params(len(consts), len(carries), len(scanned), results, length, context_now)
    primitive, settings, context = params
    outputs = [Value(atom.aval) for atom in body.outputs[: len(carries)]]
    for atom in body.outputs[len(carries) :]:
        aval = atom.aval
        outputs.append(Value(aval.update(shape=(length, *aval.shape))))
    operands = (*consts, *carries, *scanned)
    return Apply(primitive, operands, tuple(outputs), settings, (body,), body.effects, context, place)


@functools.lru_cache(maxsize=64)
def _scan_params(
    consts: int, carries: int, scanned: int, results: int, length: int, _context: Hashable
) -> tuple[Any, Any, Any]:
    """Primitive, parameters and context of a scan with so many operands, as JAX writes them under these settings."""

    def whole(*args: Any) -> Sequence[Any]:
        fixed, start, rows = args[:consts], args[consts : consts + carries], args[consts + carries :]

        def trip(carry: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            used = sum((jnp.sin(x) for x in (*fixed, *row)), jnp.float32(1.0))
            return tuple(c * used for c in carry), tuple(used * (k + 2.0) for k in range(results))

        end, made = jax.lax.scan(trip, tuple(start), tuple(rows), length=length)
        return (*end, *made)

    one, row = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((length,), jnp.float32)
    graph = trace(whole, [one] * (consts + carries) + [row] * scanned)
    (scan,) = (e for e in graph.equations if isinstance(e, Apply) and e.name == "scan")
    return scan.primitive, scan.params, scan.context
