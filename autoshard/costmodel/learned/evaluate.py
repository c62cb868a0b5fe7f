"""How good a model is on programs never seen: against the analytic model, and against labels that mean nothing.

An error is |predicted / measured - 1|, of whole steps and of each kernel in them. The analytic model is judged twice:
as it is, and with one factor fitted to the training programs of a kind, which is all that measuring could give it
without a model. The control trains the same network on times shuffled among training kernels and among steps; it must
end no better than their mean correction,
the same factor on every base time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from autoshard.costmodel.learned.train import LearnOptions, Sample, Split, Tell, Times, Trained, predict, train

Array = np.ndarray

Kind = Literal["cluster", "step"]
KINDS: tuple[Kind, ...] = ("cluster", "step")
"""A cluster is what XLA fused into a kernel of a step; a step is the whole program."""

LEAST_KERNEL_S = 2e-6
"""Kernels whose run is shorter are not judged."""

WITHIN = 0.14
"""The error DisCo reports for 90 % of its predictions (Yi et al., TPDS 2022, section 4.3)."""

LEAST_PROGRAMS = 10
"""Fewest validation kernels or steps that can say a model is better."""


@final
@dataclass(frozen=True, slots=True)
class Score:
    """One model on one set of kernels or steps.

    Attributes:
      model: "learned", "analytic", "analytic, scaled", "shuffled", "mean correction" or "measured again".
      kind: of what is predicted.
      count: kernels or steps.
      within: part of them with an error of at most `WITHIN`.
      median, p90: of the errors.
      rank: Spearman's correlation of predicted and measured times.
    """

    model: str
    kind: str
    count: int
    within: float
    median: float
    p90: float
    rank: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def score(model: str, kind: str, predicted: Array, measured: Array) -> Score:
    """The figures of some predictions."""
    if not len(measured):
        return Score(model, kind, 0, 0.0, math.inf, math.inf, 0.0)
    errors = np.abs(predicted / measured - 1)
    ranks = [np.argsort(np.argsort(x)) for x in (predicted, measured)]
    rank = float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(measured) > 2 else 0.0
    within = float(np.mean(errors <= WITHIN))
    return Score(model, kind, len(measured), within, float(np.median(errors)), float(np.percentile(errors, 90)), rank)


def measured(samples: Sequence[Sample]) -> Times:
    """The labels; kernels too short to be judged are nan."""
    kernels = tuple(np.where(s.kernel_s / s.features.runs >= LEAST_KERNEL_S, s.kernel_s, np.nan) for s in samples)
    return Times(kernels, np.array([s.time_s for s in samples]))


def scores(model: str, told: Times, labels: Times) -> list[Score]:
    """Of kernels, of steps."""
    return [score(model, kind, *_pairs(kind, told, labels)) for kind in KINDS]


def _pairs(kind: Kind, told: Times, labels: Times) -> tuple[Array, Array]:
    """Times of two sources where both have one."""
    if kind == "step":
        left, right = told.steps, labels.steps
    else:
        left, right = (np.concatenate([np.zeros(0), *times.kernels]) for times in (told, labels))
    known = np.isfinite(left) & np.isfinite(right)
    return left[known], right[known]


def analytic(samples: Sequence[Sample]) -> Times:
    """What the analytic model says."""
    return Times(tuple(s.kernel_analytic_s for s in samples), np.array([s.analytic_s for s in samples]))


def bases(samples: Sequence[Sample]) -> Times:
    """What the network corrects."""
    return Times(tuple(s.features.base_s for s in samples), np.array([s.features.base_s.sum() for s in samples]))


def scaled(
    told: Callable[[Sequence[Sample]], Times], train_samples: Sequence[Sample], samples: Sequence[Sample]
) -> Times:
    """Times the median factor of the training programs, one a kind."""
    known, labels, found = told(train_samples), measured(train_samples), told(samples)
    factors: dict[str, float] = {}
    for kind in KINDS:
        left, right = _pairs(kind, known, labels)
        factors[kind] = float(np.median(right[left > 0] / left[left > 0])) if np.any(left > 0) else 1.0
    return Times(tuple(factors["cluster"] * each for each in found.kernels), factors["step"] * found.steps)


def evaluate_model(trained: Trained, split: Split, samples: Sequence[Sample]) -> list[Score]:
    """The learned and the analytic model on the same programs."""
    labels = measured(samples)
    return [
        *scores("learned", predict(trained, [s.features for s in samples]), labels),
        *scores("analytic", analytic(samples), labels),
        *scores("analytic, scaled", scaled(analytic, split.train, samples), labels),
    ]


def repeat_scores(samples: Sequence[Sample]) -> list[Score]:
    """Another session of measuring as a model of the fastest one: no model can be expected to be better."""
    again = Times(tuple(s.kernel_again_s for s in samples), np.array([s.again_s for s in samples]))
    return scores("measured again", again, measured(samples))


def shuffled_control(split: Split, options: LearnOptions, tell: Tell | None = None) -> list[Score]:
    """The same training on shuffled times, and the mean correction, on the held-out programs.

    What is shuffled is the factor between time and base time, so that the control keeps what the bases know and has
    nothing else to learn.
    """
    rng = np.random.default_rng([options.seed, 4])
    shuffled = Split(_shuffle(split.train, rng), _shuffle(split.validation, rng), split.held_out)
    trained = train(shuffled, dataclasses.replace(options, members=1), tell)
    held = split.held_out
    return [
        *scores("shuffled", predict(trained, [s.features for s in held]), measured(held)),
        *scores("mean correction", scaled(bases, split.train, held), measured(held)),
    ]


def _shuffle(samples: Sequence[Sample], rng: np.random.Generator) -> tuple[Sample, ...]:
    """Factors among all kernels, and among all steps."""
    kernels = [s.kernel_s / s.features.base_s for s in samples]
    joined = np.concatenate([np.zeros(0), *kernels])
    known = np.flatnonzero(np.isfinite(joined))
    joined[known] = joined[rng.permutation(known)]
    parts = np.split(joined, np.cumsum([len(k) for k in kernels])[:-1]) if kernels else []
    steps = np.array([s.time_s / float(s.features.base_s.sum()) for s in samples])
    known = np.flatnonzero(np.isfinite(steps))
    steps[known] = steps[rng.permutation(known)]
    return tuple(
        dataclasses.replace(s, kernel_s=factors * s.features.base_s, time_s=float(factor * s.features.base_s.sum()))
        for s, factors, factor in zip(samples, parts, steps, strict=True)
    )


def wins(found: Sequence[Score]) -> dict[str, bool]:
    """For each kind whether the learned model is better than the analytic one, scaled or not: median and tail."""
    table = {(s.model, s.kind): s for s in found}
    result: dict[str, bool] = {}
    for kind in KINDS:
        mine = table["learned", kind]
        others = [table[name, kind] for name in ("analytic", "analytic, scaled")]
        result[kind] = mine.count >= LEAST_PROGRAMS and all(
            mine.median < other.median and mine.within >= other.within for other in others
        )
    return result
