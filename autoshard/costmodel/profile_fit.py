"""Time of a stack of equal layers, fitted to a profile.

    time = fixed + sample * batch + layers * (layer + layer_sample * batch)

`fixed` and `sample` are what stands outside the layers (embedding, head, loss, launches). Where all points have one
number of layers they cannot be told from the layers' own and are 0. Galvatron profiles such stacks (Miao et al.,
"Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism", VLDB 2023) and takes the
difference of two as the layer's time; here all points count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from autoshard.costmodel.least_squares import FitError, Vector, check_measured, fit_error, fit_relative
from autoshard.errors import ArgumentError, explain


@final
@dataclass(frozen=True, slots=True)
class LayerPoint:
    """One measurement.

    Attributes:
      layers: number of equal layers.
      batch: samples a step.
      time_s: seconds of the step.

    Raises:
      ArgumentError: no layer, or no sample.
    """

    layers: int
    batch: float
    time_s: float

    def __post_init__(self) -> None:
        if self.layers < 1 or self.batch <= 0:
            raise ArgumentError(
                explain(f"a point with {self.layers} layers, batch {self.batch}", "both above 0", "correct the point")
            )


@final
@dataclass(frozen=True, slots=True)
class LayerFit:
    """The fitted law; see the module.

    Attributes:
      fixed_s: seconds of a step outside the layers, whatever the batch.
      sample_s: seconds of each sample outside the layers.
      layer_s: seconds of each layer, whatever the batch.
      layer_sample_s: seconds of each sample in each layer.
      parameters: how many of these were fitted.
      error: on the fitted points.
    """

    fixed_s: float
    sample_s: float
    layer_s: float
    layer_sample_s: float
    parameters: int
    error: FitError

    def time_s(self, layers: int, batch: float) -> float:
        """Predicted seconds of a step."""
        outside = self.fixed_s + self.sample_s * batch
        return outside + layers * self.layer_time_s(batch)

    def layer_time_s(self, batch: float) -> float:
        """Predicted seconds of one layer alone."""
        return self.layer_s + self.layer_sample_s * batch

    def error_on(self, points: Sequence[LayerPoint]) -> FitError:
        """The error on other points.

        Raises:
          ArgumentError: no points, or a time that is not above 0.
        """
        check_measured("layer time", [p.time_s for p in points], 0)
        return fit_error([self.time_s(p.layers, p.batch) for p in points], [p.time_s for p in points])


def fit_layers(points: Sequence[LayerPoint]) -> LayerFit:
    """Fits layer time, robust against stray points.

    Args:
      points: of two batches or more, more than parameters (4; 2 where all have one number of layers).

    Raises:
      ArgumentError: too few points or batches, or a time that is not above 0.
    """
    stacked = len({p.layers for p in points}) > 1
    columns = _columns(points)
    if not stacked:
        columns = columns[:, 2:]
    measured = [p.time_s for p in points]
    check_measured("layer time", measured, columns.shape[1])
    if len({p.batch for p in points}) < 2:
        raise ArgumentError(
            explain("layer time measured at one batch only", "two batches or more", "measure another batch")
        )
    start = np.median(np.asarray(measured)[:, None] / columns, axis=0) / columns.shape[1]
    found = fit_relative(lambda p: columns @ p, start.tolist(), measured, "robust")
    fixed, sample, layer, layer_sample = found if stacked else (0.0, 0.0, *found)
    error = fit_error(columns @ found, measured)
    return LayerFit(float(fixed), float(sample), float(layer), float(layer_sample), len(found), error)


def _columns(points: Sequence[LayerPoint]) -> Vector:
    """(points, 4): what multiplies fixed, sample, layer and layer_sample."""
    rows = [(1.0, p.batch, float(p.layers), p.layers * p.batch) for p in points]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)
