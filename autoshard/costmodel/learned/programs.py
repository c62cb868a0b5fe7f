"""Random programs to measure: fused clusters and whole train steps, each named by kind and seed.

A cluster is a small graph of elementwise operations, reductions, moves, indexed access, matrix products and
convolutions (`program_clusters.py`); a step is a model's loss, gradient and optimizer update (`program_steps.py`).
The same kind and seed give the same program wherever jax's random numbers are not asked for: structure and sizes come
from numpy's PCG64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import jax
import numpy as np

from autoshard.ir import Graph, trace
from autoshard.ir import Literal as IrLiteral

Kind = Literal["cluster", "step"]
KINDS: tuple[Kind, ...] = ("cluster", "step")


@final
@dataclass(frozen=True, slots=True)
class Program:
    """One program.

    Attributes:
      kind: "cluster" or "step".
      seed: with the kind it names the program.
      family: what it is made of, such as "elementwise" or "attention".
      fun: takes one array for each of `avals`, returns a tuple of arrays.
      avals: shapes and dtypes of the arguments.
      bounds: for each argument the number integers stay below; 0 for floats and booleans.
    """

    kind: Kind
    seed: int
    family: str
    fun: Callable[..., Sequence[Any]]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    bounds: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}"

    def arguments(self) -> list[Any]:
        """Arrays on the host: normal floats, even booleans, integers below their bound."""
        rng = np.random.default_rng([self.seed, 1])
        return [_array(rng, a, n) for a, n in zip(self.avals, self.bounds, strict=True)]

    def graph(self) -> Graph:
        """The program, traced."""
        return trace(self.fun, self.avals)


def make_program(kind: Kind, seed: int) -> Program:
    """The program of a kind and seed."""
    # Here, because both modules import `Program`.
    from autoshard.costmodel.learned.program_clusters import make_cluster
    from autoshard.costmodel.learned.program_steps import make_step

    match kind:
        case "cluster":
            return make_cluster(seed)
        case "step":
            return make_step(seed)


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
