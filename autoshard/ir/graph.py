"""The graph: a flattened jaxpr that passes rewrite and searches read.

    graph     ::= Graph(inputs: Value*, constants: (Value, array)*, equations: Equation*, outputs: Atom*)
    equation  ::= Apply(primitive, inputs: Atom*, outputs: Value*, params, graphs: Graph*, place)
                | Reshard(input: Value, output: Value, spec, explicit, place)
    atom      ::= Value(aval) | Literal(value, aval)
    spec      ::= (axis name*)* , one tuple of mesh axes a dimension, major first

Calls (`jit`, `closed_call`, `custom_jvp`, `custom_vjp`, `remat`) are inlined; `scan`, `while` and `cond` keep
their bodies as `graphs`. Values are compared by identity, each is defined once, before its uses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

Spec = tuple[tuple[str, ...], ...]
"""A sharding of one value: for each dimension the mesh axes it is split over, major first."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A typed value. Two values are the same only if they are the same object.

    Attributes:
      aval: shape, dtype and weak type.
    """

    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole (global) value."""
        return aval_bytes(self.aval)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A scalar constant written into an equation."""

    value: Any
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype


Atom = Value | Literal


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where an equation comes from.

    Attributes:
      source: JAX's source info (traceback and name stack), carried to the emitted program.
      remat: how many `jax.checkpoint` marks the equation lies under.
    """

    source: Any
    remat: int = 0


@final
@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """One primitive applied.

    Attributes:
      primitive: the JAX primitive.
      inputs: operands.
      outputs: results.
      params: the primitive's parameters; of control flow, without the bodies.
      graphs: bodies of control flow: scan (body,), while (cond, body), cond (one a branch).
      effects: JAX effects (ordered prints and the like); an equation with effects is never dropped.
      context: JAX's equation context (x64 mode, compute type), restored when it is evaluated.
      place: where it comes from.
    """

    primitive: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    params: Mapping[str, Any]
    graphs: tuple[Graph, ...]
    effects: frozenset[Any]
    context: Any
    place: Place

    @property
    def name(self) -> str:
        return str(self.primitive.name)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reshard:
    """The value with its sharding fixed to `spec`.

    Attributes:
      input: the value as it is.
      output: the same value, laid out by `spec`.
      spec: mesh axes of each dimension.
      explicit: True where data moves (a resharding point), False where the spec only states what is.
      place: where it comes from.
    """

    input: Value
    output: Value
    spec: Spec
    explicit: bool
    place: Place

    @property
    def inputs(self) -> tuple[Atom, ...]:
        return (self.input,)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (self.output,)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return ()

    @property
    def name(self) -> str:
        return "reshard" if self.explicit else "keep"


Equation = Apply | Reshard


@final
@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A program: inputs and constants in, outputs out.

    Attributes:
      inputs: arguments in order.
      constants: captured arrays with the values that stand for them.
      equations: in an order in which each value is defined before its uses.
      outputs: results in order.
      effects: JAX effects of the whole (ordered prints and the like).
    """

    inputs: tuple[Value, ...]
    constants: tuple[tuple[Value, Any], ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    effects: frozenset[Any]

    def walk(self) -> Iterator[tuple[Equation, int]]:
        """Every equation, bodies included, with the number of times it runs in one call.

        A `while` whose trip count is not known counts once, and so does every `cond` branch.
        """
        yield from _walk(self, 1)


def _walk(graph: Graph, times: int) -> Iterator[tuple[Equation, int]]:
    for equation in graph.equations:
        yield equation, times
        inner = times * trip_count(equation)
        for body in equation.graphs:
            yield from _walk(body, inner)


def trip_count(equation: Equation) -> int:
    """How often the bodies of an equation run: the length of a scan, of a `while` what its counter says, else 1."""
    if isinstance(equation, Apply) and equation.name == "scan":
        return int(equation.params["length"])
    if isinstance(equation, Apply) and equation.name == "while":
        trips = _counted(equation)
        return 1 if trips is None else trips
    return 1


def _counted(loop: Apply) -> int | None:
    """Trips of `while i < bound: i += step` where start, bound and step are literals; None for other loops."""
    cond, body = loop.graphs
    consts, body_consts = int(loop.params["cond_nconsts"]), int(loop.params["body_nconsts"])
    (test,) = cond.outputs
    compare = next((e for e in cond.equations if test in e.outputs), None)
    if compare is None or compare.name not in ("lt", "le") or compare.inputs[0] not in cond.inputs[consts:]:
        return None
    k = cond.inputs.index(compare.inputs[0]) - consts
    add = next((e for e in body.equations if body.outputs[k] in e.outputs), None)
    if add is None or add.name != "add" or add.inputs[0] is not body.inputs[body_consts + k]:
        return None
    ends = (loop.inputs[consts + body_consts + k], compare.inputs[1], add.inputs[1])
    if not all(isinstance(end, Literal) for end in ends):
        return None
    start, bound, step = (int(end.value) for end in ends if isinstance(end, Literal))
    return max(-(-(bound - start + (compare.name == "le")) // step), 0) if step > 0 else None


def aval_bytes(aval: Any) -> int:
    """Bytes of a whole value; typed PRNG keys count their words, float0 counts nothing."""
    return math.prod(aval.shape) * _item_bytes(aval.dtype)


@functools.cache
def _item_bytes(dtype: Any) -> int:
    if dtype == jax.dtypes.float0:
        return 0
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    return int(dtype.itemsize)
