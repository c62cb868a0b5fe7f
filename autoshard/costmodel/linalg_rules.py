"""Work rules of factorisations, solvers and Fourier transforms: leading-order operation counts.

Counts are those of Golub and Van Loan, "Matrix Computations" (4th edition, chapters 3 to 8), for the LAPACK algorithms
JAX calls; n is the order of a square matrix, m by n a tall one. A complex operation counts as four real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp

from autoshard.costmodel.work import Work, WorkKind, make_work, size_of, vector_class, work_rule
from autoshard.ir import Apply

COMPLEX_OPERATION = 4
"""Real operations in a complex multiply-add pair, to leading order."""

FFT_FLOPS = 5
"""A complex transform of length n takes 5 n log2(n) (radix 2; the count FFTW's benchmarks use)."""

_SQUARE: dict[str, Callable[[float, float], float]] = {
    # operations by rows m and columns n
    "cholesky": lambda m, n: n**3 / 3,
    "cholesky_update": lambda m, n: 2 * n**2,
    "eig": lambda m, n: 25 * n**3,
    "eigh": lambda m, n: 9 * n**3,
    "geqp3": lambda m, n: _qr_flops(m, n),
    "geqrf": lambda m, n: _qr_flops(m, n),
    "hessenberg": lambda m, n: 10 / 3 * n**3,
    "householder_product": lambda m, n: _qr_flops(m, n),
    "lu": lambda m, n: max(m * n**2 - n**3 / 3, 2 / 3 * min(m, n) ** 3),
    "ormqr": lambda m, n: 4 * m * n**2,
    "qr": lambda m, n: 2 * _qr_flops(m, n),
    "schur": lambda m, n: 25 * n**3,
    "svd": lambda m, n: 6 * max(m, n) * min(m, n) ** 2 + 20 * min(m, n) ** 3,
    "tridiagonal": lambda m, n: 4 / 3 * n**3,
}


def _qr_flops(m: float, n: float) -> float:
    long, short = max(m, n), min(m, n)
    return 2 * long * short**2 - 2 / 3 * short**3


@work_rule(*_SQUARE)
def _factorisation(equation: Apply) -> Work:
    shape = equation.inputs[0].shape
    batch, m, n = math.prod(shape[:-2]), shape[-2], shape[-1]
    return _linalg(equation, batch * _SQUARE[equation.name](float(m), float(n)))


@work_rule("triangular_solve")
def _triangular_solve(equation: Apply) -> Work:
    """n^2 operations a right-hand side; the matrix is square, the right-hand sides fill the other operand."""
    order = equation.inputs[0].shape[-1]
    return _linalg(equation, order * size_of(equation.inputs[1]))


@work_rule("tridiagonal_solve")
def _tridiagonal_solve(equation: Apply) -> Work:
    """Thomas' algorithm: 8 operations an unknown."""
    return _linalg(equation, 8 * size_of(equation.outputs[0]))


@work_rule("symmetric_product")
def _symmetric_product(equation: Apply) -> Work:
    """Half of a product of [m, k] with its transpose."""
    shape = equation.inputs[0].shape
    return _linalg(equation, math.prod(shape[:-2]) * shape[-2] ** 2 * shape[-1])


@work_rule("lu_pivots_to_permutation")
def _pivots(equation: Apply) -> Work:
    return make_work(equation, WorkKind.LINALG, size_of(equation.outputs[0]))


@work_rule("fft")
def _fft(equation: Apply) -> Work:
    """A real transform takes half of a complex one."""
    lengths = equation.params["fft_lengths"]
    elements = max(size_of(equation.inputs[0]), size_of(equation.outputs[0]))
    atoms = (equation.inputs[0], equation.outputs[0])
    real = not all(jnp.issubdtype(atom.dtype, jnp.complexfloating) for atom in atoms)
    flops = FFT_FLOPS * elements * math.log2(max(math.prod(lengths), 2)) * (0.5 if real else 1.0)
    return make_work(equation, WorkKind.FFT, flops)


def _linalg(equation: Apply, flops: float) -> Work:
    complex_ = jnp.issubdtype(equation.inputs[0].dtype, jnp.complexfloating)
    return make_work(
        equation, WorkKind.LINALG, flops * (COMPLEX_OPERATION if complex_ else 1), 0, vector_class(equation)
    )
