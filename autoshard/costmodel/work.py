"""The work of one equation: operations and bytes at GLOBAL sizes, from per-primitive rules.

A sharding divides work: where factors of an equation are split over axes of sizes s1, s2, ..., a device does
1/(s1 s2 ...) of the operations and touches its part of each operand and result. So rules run once an equation, and
`roofline.work_time_s` turns work and shares into time, thousands of times.

Rules register by primitive name with `@work_rule`. Other primitives, for which Shardy or the user has a factor rule,
are taken as one pass over operands and results, and the plan says so.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax.numpy as jnp

from autoshard.errors import ArgumentError, explain
from autoshard.ir import Apply, Atom, Equation, Literal, Reshard


@final
class WorkKind(enum.Enum):
    """What bounds the work, and how it runs.

    FREE: nothing runs (reshapes, marks, control flow, whose bodies are costed on their own). MATMUL: matrix units.
    ELEMENTWISE, REDUCE, MOVE: streaming kernels. GATHER, SCATTER: indexed access. SORT, LINALG, FFT: library calls.
    RANDOM: random bits. OPAQUE: code nobody can look into. COLLECTIVE: the user's own communication.
    """

    FREE = "free"
    MATMUL = "matmul"
    ELEMENTWISE = "elementwise"
    REDUCE = "reduce"
    MOVE = "move"
    GATHER = "gather"
    SCATTER = "scatter"
    SORT = "sort"
    LINALG = "linalg"
    FFT = "fft"
    RANDOM = "random"
    OPAQUE = "opaque"
    COLLECTIVE = "collective"


@final
@dataclass(frozen=True, slots=True)
class Matrix:
    """Sizes of a (batched) matrix product: `batch` times an m by k with a k by n matrix."""

    batch: int
    m: int
    n: int
    k: int


@final
@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes of an equation.

    Attributes:
      kind: what bounds it.
      flops: operations that are no transcendentals.
      flops_class: the unit that runs them; "tf32" runs as f32 where the device has no such unit.
      transcendentals: exponentials, logarithms, roots and the like.
      operand_bytes: bytes read of each operand (of a gather or slice only what is taken; 0 for literals).
      result_bytes: bytes written of each result (of an update in place only what is updated).
      matrix: sizes, of matrix products and convolutions.
      operator: the primitive's name.
      form: which way it runs, where that matters to a measured device: of a product "weights" (both operands are
        contracted over leading dimensions, several of them), "batched" or ""; of a convolution "weights" (its window is
        larger than its result), "input" (its operand has holes) or ""; of a reduction "major" (the last dimension
        stays), of a transpose "minor" (the last dimension moves).
    """

    kind: WorkKind
    flops: float
    flops_class: str
    transcendentals: float
    operand_bytes: tuple[float, ...]
    result_bytes: tuple[float, ...]
    matrix: Matrix | None = None
    operator: str = ""
    form: str = ""

    @property
    def nbytes(self) -> float:
        """Bytes read and written."""
        return sum(self.operand_bytes) + sum(self.result_bytes)

    @property
    def largest_bytes(self) -> float:
        """Bytes of the largest operand or result."""
        return max(*self.operand_bytes, *self.result_bytes, 0.0, 0.0)


WorkRule = Callable[[Apply], Work]

_RULES: dict[str, WorkRule] = {}


def work_rule(*names: str) -> Callable[[WorkRule], WorkRule]:
    """Registers the cost rule of primitives, as a decorator. The function gets the equation and returns its `Work`.

    Args:
      names: names of the primitives.

    Raises:
      ArgumentError: a name has a rule already.
    """

    def register(rule: WorkRule) -> WorkRule:
        for name in names:
            if name in _RULES:
                raise ArgumentError(
                    explain(
                        f"a cost rule for the primitive '{name}' was registered twice",
                        "one rule a primitive",
                        "register it once, where the primitive is defined",
                    )
                )
            _RULES[name] = rule
        return rule

    return register


def known_primitives() -> frozenset[str]:
    """Names of the primitives that have a rule."""
    return frozenset(_RULES)


def equation_work(equation: Equation) -> Work:
    """The work of an equation at its own (global) sizes. An explicit reshard reads and writes its value once.

    A primitive without a rule reads its operands and writes its results once.
    """
    if isinstance(equation, Reshard):
        nbytes = float(equation.input.nbytes) if equation.explicit else 0.0
        kind = WorkKind.MOVE if equation.explicit else WorkKind.FREE
        return Work(kind, 0.0, "f32", 0.0, (nbytes,), (nbytes,))
    rule = _RULES.get(equation.name)
    return make_work(equation, WorkKind.OPAQUE) if rule is None else rule(equation)


def size_of(atom: Atom) -> int:
    """Elements of a value."""
    return math.prod(atom.shape)


def bytes_of(atom: Atom) -> float:
    """Bytes of a value; a literal is part of the code."""
    return 0.0 if isinstance(atom, Literal) else float(atom.nbytes)


def make_work(
    equation: Apply,
    kind: WorkKind,
    flops: float = 0.0,
    transcendentals: float = 0.0,
    flops_class: str | None = None,
    matrix: Matrix | None = None,
    form: str = "",
) -> Work:
    """Work that reads all operands and writes all results."""
    return Work(
        kind,
        float(flops),
        flops_class or vector_class(equation),
        float(transcendentals),
        tuple(bytes_of(atom) for atom in equation.inputs),
        tuple(bytes_of(value) for value in equation.outputs),
        matrix,
        equation.name,
        form,
    )


def with_bytes(work: Work, operands: dict[int, float], results: dict[int, float] | None = None) -> Work:
    """The work with other byte counts for some operands and results, by index."""
    reads = tuple(operands.get(i, nbytes) for i, nbytes in enumerate(work.operand_bytes))
    writes = tuple((results or {}).get(i, nbytes) for i, nbytes in enumerate(work.result_bytes))
    return dataclasses.replace(work, operand_bytes=reads, result_bytes=writes)


def vector_class(equation: Apply) -> str:
    """The class of arithmetic outside matrix units: f64 for 64-bit floats, f32 for all else (XLA widens 16 bits)."""
    for atom in (*equation.outputs, *equation.inputs):
        if is_double(atom.dtype):
            return "f64"
    return "f32"


def is_double(dtype: Any) -> bool:
    """Whether arithmetic in the dtype needs 64-bit floats."""
    return dtype in (jnp.float64, jnp.complex128)
