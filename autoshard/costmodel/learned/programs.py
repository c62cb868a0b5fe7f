"""What a measured program is: a whole train step, named by its seed (`program_steps.py` draws them).

The same seed gives the same program wherever jax's random numbers are not asked for: structure and sizes come from
numpy's PCG64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import jax
import numpy as np

from autoshard.ir import Graph, trace
from autoshard.ir import Literal as IrLiteral


@final
@dataclass(frozen=True, slots=True)
class Program:
    """One program.

    Attributes:
      seed: its name.
      family: the kind of model, such as "attention".
      fun: takes one array for each of `avals`, returns a tuple of arrays.
      avals: shapes and dtypes of the arguments.
      bounds: for each argument the number integers stay below; 0 for floats and booleans.
    """

    seed: int
    family: str
    fun: Callable[..., Sequence[Any]]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    bounds: tuple[int, ...]

    def arguments(self) -> list[Any]:
        """Arrays on the host: normal floats, even booleans, integers below their bound."""
        rng = np.random.default_rng([self.seed, 1])
        return [_array(rng, a, n) for a, n in zip(self.avals, self.bounds, strict=True)]

    def graph(self) -> Graph:
        """The program, traced."""
        return trace(self.fun, self.avals)


def structure(graph: Graph) -> str:
    """A hash of what a program does, sizes left out: primitives, operands, ranks and dtypes.

    Programs of one structure are never on both sides of a split.
    """
    parts: list[str] = []
    _describe(graph, parts)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _describe(graph: Graph, parts: list[str]) -> None:
    number = {value: i for i, value in enumerate((*graph.inputs, *(v for v, _ in graph.constants)))}
    for equation in graph.equations:
        operands = ["c" if isinstance(a, IrLiteral) else str(number.get(a, -1)) for a in equation.inputs]
        kinds = [f"{v.dtype}{len(v.shape)}" for v in equation.outputs]
        parts.append(f"{equation.name} {','.join(operands)} {','.join(kinds)}")
        for value in equation.outputs:
            number[value] = len(number)
        for body in equation.graphs:
            _describe(body, parts)


def _array(rng: np.random.Generator, aval: Any, bound: int) -> Any:
    if bound:
        return cast(Any, rng.integers(0, bound, aval.shape, dtype=np.int32))
    if aval.dtype == np.bool_:
        return cast(Any, rng.integers(0, 2, aval.shape)).astype(np.bool_)
    return cast(Any, rng.standard_normal(aval.shape, dtype=np.float32)).astype(aval.dtype)
