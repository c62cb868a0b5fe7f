"""How good a model is on programs never seen: against the analytic model, and against labels that mean nothing.

An error is |predicted / measured - 1|. The analytic model is judged twice: as it is, and with one factor fitted to the
training programs of a kind, which is all that measuring could give it without a model. The control trains the same
network on times shuffled among training programs of a kind; it must end no better than their mean correction,
the same factor on every base time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from autoshard.costmodel.learned.train import LearnOptions, Sample, Split, Tell, Trained, predict, train

Array = np.ndarray

WITHIN = 0.14
"""The error DisCo reports for 90 % of its predictions (Yi et al., TPDS 2022, section 4.3)."""

LEAST_PROGRAMS = 10
"""Fewest validation programs of a kind that can say a model is better."""


@final
@dataclass(frozen=True, slots=True)
class Score:
    """One model on one set of programs.

    Attributes:
      model: "learned", "analytic", "analytic, scaled", "shuffled" or "mean correction".
      kind: "cluster", "step" or "all".
      count: programs.
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


def scores(model: str, predicted: Array, samples: Sequence[Sample]) -> list[Score]:
    """Of clusters, of steps, of all."""
    measured = np.array([s.time_s for s in samples])
    kinds = np.array([s.kind for s in samples])
    parts = [(kind, kinds == kind) for kind in ("cluster", "step")]
    parts.append(("all", np.ones(len(samples), bool)))
    return [score(model, kind, predicted[mask], measured[mask]) for kind, mask in parts]


def analytic(samples: Sequence[Sample]) -> Array:
    """What the analytic model says."""
    return np.array([s.analytic_s for s in samples])


def scaled_analytic(train_samples: Sequence[Sample], samples: Sequence[Sample]) -> Array:
    """The analytic model times the median factor of the training programs of each kind."""
    return analytic(samples) * _factors(train_samples, samples, [s.analytic_s for s in train_samples])


def mean_correction(train_samples: Sequence[Sample], samples: Sequence[Sample]) -> Array:
    """The base times times the median factor of the training programs of each kind."""
    bases = [float(s.features.base_s.sum()) for s in train_samples]
    return np.array([s.features.base_s.sum() for s in samples]) * _factors(train_samples, samples, bases)


def _factors(train_samples: Sequence[Sample], samples: Sequence[Sample], told: Sequence[float]) -> Array:
    factors: dict[str, float] = {}
    for kind in ("cluster", "step"):
        found = [s.time_s / t for s, t in zip(train_samples, told, strict=True) if s.kind == kind and t > 0]
        factors[kind] = float(np.median(found)) if found else 1.0
    return np.array([factors[s.kind] for s in samples])


def evaluate_model(trained: Trained, split: Split, samples: Sequence[Sample]) -> list[Score]:
    """The learned and the analytic model on the same programs."""
    return [
        *scores("learned", predict(trained, [s.features for s in samples]), samples),
        *scores("analytic", analytic(samples), samples),
        *scores("analytic, scaled", scaled_analytic(split.train, samples), samples),
    ]


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
        *scores("shuffled", predict(trained, [s.features for s in held]), held),
        *scores("mean correction", mean_correction(split.train, held), held),
    ]


def _shuffle(samples: Sequence[Sample], rng: np.random.Generator) -> tuple[Sample, ...]:
    made = list(samples)
    for kind in ("cluster", "step"):
        places = [i for i, s in enumerate(samples) if s.kind == kind]
        factors = [samples[i].time_s / float(samples[i].features.base_s.sum()) for i in places]
        for i, k in zip(places, rng.permutation(len(places)), strict=True):
            base = float(samples[i].features.base_s.sum())
            made[i] = dataclasses.replace(samples[i], time_s=base * factors[k])
    return tuple(made)


def wins(found: Sequence[Score]) -> dict[str, bool]:
    """For each kind whether the learned model is better than the analytic one, scaled or not: median and tail."""
    table = {(s.model, s.kind): s for s in found}
    result: dict[str, bool] = {}
    for kind in ("cluster", "step"):
        mine = table["learned", kind]
        others = [table[name, kind] for name in ("analytic", "analytic, scaled")]
        result[kind] = mine.count >= LEAST_PROGRAMS and all(
            mine.median < other.median and mine.within >= other.within for other in others
        )
    return result
