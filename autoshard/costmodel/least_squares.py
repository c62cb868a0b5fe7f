"""Fits of positive parameters to measured times, by relative error.

    minimise over p > 0    sum_i phi( log predict_i(p) - log measured_i )

Parameters are searched as logarithms, so that none turns negative and units do not matter; steps are Levenberg's and
Marquardt's (Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", 1963) with a numeric
Jacobian, so that any closed form can be fitted, kinks included. Two losses:

    robust   pseudo-Huber: square below `ROBUST_SCALE`, linear above; a stray measurement does not move the fit
    worst    the eighth power, reached over the second and fourth: close to the smallest largest error
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from autoshard.errors import ArgumentError, explain

Vector = npt.NDArray[np.float64]

Loss = Literal["robust", "worst"]

ROBUST_SCALE = 0.02
"""Relative error from which a point counts linearly. Nominal: repeated timings of a kernel differ by about as much."""

MAX_STEPS = 200
"""Most steps of one descent; the fits of docs/cost-model.md take less than 30."""

_LOG_STEP = 1e-6
_DONE_COST = 1e-5
"""Relative gain of a step below which a descent ends."""

_TINY = 1e-12


@final
@dataclass(frozen=True, slots=True)
class FitError:
    """How far predictions are from measurements, as |predicted / measured - 1|.

    Attributes:
      worst: the largest.
      mean: the mean.
      points: how many were compared.
    """

    worst: float
    mean: float
    points: int


def fit_error(predicted: Sequence[float] | Vector, measured: Sequence[float] | Vector) -> FitError:
    """The error of predictions of the same points in the same order."""
    errors = np.abs(np.asarray(predicted, dtype=np.float64) / np.asarray(measured, dtype=np.float64) - 1)
    return FitError(float(errors.max()), float(errors.mean()), len(errors))


def fit_relative(
    predict: Callable[[Vector], Vector], start: Sequence[float], measured: Sequence[float], loss: Loss
) -> Vector:
    """The parameters whose predictions are closest.

    Args:
      predict: (parameters,) -> (points,), above zero.
      start: (parameters,), above zero.
      measured: (points,), above zero.
      loss: see the module.

    Returns:
      (parameters,) of a local optimum.
    """
    target = np.log(np.asarray(measured, dtype=np.float64))
    logs = np.log(np.asarray(start, dtype=np.float64))

    def residual(at: Vector) -> Vector:
        return np.log(predict(np.exp(at))) - target

    if loss == "robust":
        return np.exp(_descend(lambda at: _pseudo_huber(residual(at)), logs))
    for power in (1, 2, 4):
        scale = max(float(np.abs(residual(logs)).max()), _TINY)
        logs = _descend(_powered(residual, power, scale), logs)
    return np.exp(logs)


def _pseudo_huber(residuals: Vector) -> Vector:
    """phi whose square is 2 d^2 (sqrt(1 + (r/d)^2) - 1), written without cancellation."""
    return np.sqrt(2) * residuals / np.sqrt(np.sqrt(1 + (residuals / ROBUST_SCALE) ** 2) + 1)


def _powered(residual: Callable[[Vector], Vector], power: int, scale: float) -> Callable[[Vector], Vector]:
    """phi = sign(r) |r|^power, in units of the largest residual at the start."""

    def shaped(at: Vector) -> Vector:
        values = residual(at) / scale
        return np.sign(values) * np.abs(values) ** power

    return shaped


def _descend(shaped: Callable[[Vector], Vector], start: Vector) -> Vector:
    """Levenberg-Marquardt from a start to where steps no longer help."""
    at, values = start, shaped(start)
    damping = 1e-3
    for _ in range(MAX_STEPS):
        jacobian = np.stack([(shaped(at + step) - values) / _LOG_STEP for step in _LOG_STEP * np.eye(len(at))], axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ values
        cost = float(values @ values)
        while damping < 1e12:
            # The absolute part keeps parameters that no prediction depends on where they are.
            scaled = normal + damping * (np.diag(np.diag(normal)) + 1e-12 * np.eye(len(at)))
            step = np.clip(-np.linalg.solve(scaled, slope), -1.0, 1.0)
            tried = shaped(at + step)
            if float(tried @ tried) < cost:
                break
            damping *= 4
        else:
            return at
        at, values, damping = at + step, tried, max(damping / 8, 1e-12)
        if cost - float(values @ values) <= _DONE_COST * cost:
            return at
    return at


def check_measured(what: str, values: Sequence[float], parameters: int) -> None:
    """Raises ArgumentError unless there are more figures than parameters, all finite and above zero."""
    if len(values) <= parameters:
        raise ArgumentError(
            explain(
                f"{len(values)} measured points for {parameters} parameters of {what}",
                f"{parameters + 1} or more",
                "measure more points, or fit fewer parameters",
            )
        )
    for value in values:
        if not (np.isfinite(value) and value > 0):
            raise ArgumentError(
                explain(f"a measured figure of {what} is {value}", "a finite number above 0", "leave the point out")
            )
