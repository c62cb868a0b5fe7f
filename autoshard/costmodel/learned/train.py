"""Trains the network on measured programs: Optax, seeded, split by what programs do.

The loss is the Huber loss of the logarithm of time, of kernels and of whole programs: a relative error counts the same
for a microsecond and a second. Kernels below `SURE_S` count less, as timers and interrupts weigh more there, and so do
kernels whose visits differ. Programs of one structure (`programs.structure`: the same operations, whatever the sizes)
are all on one side of the split: 70 % train, 10 % say when to stop (the best average of weights is kept), 20 % are
held out for the evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from autoshard.costmodel.learned.features import Batch, Features, make_batch, pack
from autoshard.costmodel.learned.law import Law, fit_law
from autoshard.costmodel.learned.recall import Recall, make_recall, owner_number
from autoshard.costmodel.learned.untyped import jax, jnp
from autoshard.errors import ArgumentError, explain

Array = np.ndarray

SURE_S = 2e-6
"""A kernel whose run takes this counts fully; shorter ones count by their part of it."""

SPREAD = 0.1
"""A kernel whose visits differ by this part counts half."""

STEP_WEIGHT = 0.3
"""Of the programs' mean loss beside the kernels'."""

WARM = 0.05
"""Part of the training in which the learning rate rises."""

LEAST = 20
"""Fewest programs that can be split and trained on."""


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """One measured program.

    Attributes:
      name, family, structure: see `programs.py`.
      features: arrays of the compiled program.
      time_s: measured, of the whole; nan where it is too noisy.
      kernel_s: measured, of all runs of a kernel; nan where there is no label.
      kernel_spread: how much slower the second fastest visit was, as a part.
      analytic_s, kernel_analytic_s: what the analytic model says.
      again_s, kernel_again_s: what another session of measuring said, slower; nan where there was none.
    """

    name: str
    family: str
    structure: str
    features: Features
    time_s: float
    kernel_s: Array
    kernel_spread: Array
    analytic_s: float
    kernel_analytic_s: Array
    again_s: float
    kernel_again_s: Array

    @property
    def weight(self) -> Array:
        """Of each kernel in the loss: [K]."""
        run_s = self.kernel_s / self.features.runs
        known = np.isfinite(run_s) & np.isfinite(self.kernel_spread)
        weight = np.minimum(run_s / SURE_S, 1.0) / (1.0 + (self.kernel_spread / SPREAD) ** 2)
        return np.where(known, weight, 0.0)


@final
@dataclass(frozen=True, slots=True)
class LearnOptions:
    """How to train.

    Attributes:
      width, layers, dropout: of the network.
      epochs: passes over the training programs.
      patience: epochs without a better validation before training ends.
      batch: programs a step.
      learning_rate, weight_decay: of AdamW; the rate rises for 5 % of the steps, then falls along a cosine.
      average: of the weights, decay a step.
      members: networks trained from different starts; the prediction is the mean of their logarithms.
      seconds: most CPU time of all members together; each has its part, and its rate falls within it.
      seed: of weights and order.
    """

    width: int = 96
    layers: int = 1
    dropout: float = 0.4
    epochs: int = 20
    patience: int = 20
    batch: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 2e-2
    average: float = 0.99
    members: int = 3
    seconds: float = 300.0
    seed: int = 0


@final
@dataclass(frozen=True, slots=True)
class Split:
    """Samples by what they are for."""

    train: tuple[Sample, ...]
    validation: tuple[Sample, ...]
    held_out: tuple[Sample, ...]


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """What training gives.

    Attributes:
      members: parameters of each network.
      recall: the training programs' kernels, and the law of their times.
      mean, scale: the figures' standardization.
      options: as trained.
      losses: (epoch, training loss, validation loss), members one after the other.
      seconds: CPU time of the training.
    """

    members: tuple[Any, ...]
    recall: Recall
    mean: Array
    scale: Array
    options: LearnOptions
    losses: tuple[tuple[int, float, float], ...]
    seconds: float


Tell = Callable[[int, int, float, float], None]
"""Called after each epoch: epoch, epochs, training and validation loss."""


def split_samples(samples: Sequence[Sample], seed: int) -> Split:
    """By structure: the side is a hash of the structure and the seed, so that more samples change no side.

    Raises:
      ArgumentError: too few samples.
    """
    if len(samples) < LEAST:
        raise ArgumentError(
            explain(f"{len(samples)} measured programs", f"at least {LEAST}", "collect more (--programs, --minutes)")
        )
    parts: tuple[list[Sample], list[Sample], list[Sample]] = ([], [], [])
    for sample in samples:
        digest = hashlib.sha256(f"{seed} {sample.structure}".encode()).digest()
        share = int.from_bytes(digest[:4], "big") / 2**32
        parts[0 if share < 0.7 else 1 if share < 0.8 else 2].append(sample)
    return Split(tuple(parts[0]), tuple(parts[1]), tuple(parts[2]))


def digest(samples: Sequence[Sample]) -> str:
    """A hash of which programs are in a part."""
    return hashlib.sha256(" ".join(sorted(s.name for s in samples)).encode()).hexdigest()[:16]


def train(split: Split, options: LearnOptions, tell: Tell | None = None) -> Trained:
    """Trains all members.

    Raises:
      ArgumentError: no training or validation programs.
    """
    if not split.train or not split.validation:
        raise ArgumentError(explain("a split with an empty part", "programs for training and validation", "add some"))
    begun = time.process_time()
    recall = remember(split.train)
    split = Split(
        tuple(_with_recall(recall, s, owner_number(s.structure)) for s in split.train),
        tuple(_with_recall(recall, s, -1) for s in split.validation),
        (),
    )
    stacked = np.concatenate([s.features.nodes for s in split.train])
    mean, scale = stacked.mean(0), stacked.std(0)
    scale = np.where(scale < 1e-6, 1.0, scale).astype(np.float32)
    members: list[Any] = []
    losses: list[tuple[int, float, float]] = []
    for member in range(options.members):
        until = begun + options.seconds * (member + 1) / options.members
        with _usual_promotion():
            found, curve = _train_one(split, options, options.seed + member, (mean, scale), until, tell)
        members.append(found)
        losses += curve
    trained = Trained(tuple(members), recall, mean, scale, options, tuple(losses), time.process_time() - begun)
    return trained


def remember(samples: Sequence[Sample]) -> Recall:
    """What the kernels of some programs took: the law of their times, and how each differs from it."""
    nodes, runs, weight = (
        np.concatenate(each)
        for each in zip(*((s.features.nodes, s.kernel_s / s.features.runs, s.weight) for s in samples), strict=True)
    )
    known = weight > 0
    law = fit_law(nodes[known], runs[known], weight[known])
    parts: list[tuple[Array, Array, Array, Array, str]] = []
    for s in samples:
        w = s.weight
        logs = np.log(np.where(w > 0, s.kernel_s, np.nan) / law_s(law, s.features))
        parts.append((s.features.nodes, s.features.keys, logs, w, s.structure))
    return make_recall(law, parts)


def law_s(law: Law, features: Features) -> Array:
    """Seconds of all runs of each kernel by the law; loops, branches and the call keep their base times: [K]."""
    named = np.array([bool(name) for name in features.names])
    return np.where(named, law.times_s(features.nodes) * features.runs, features.base_s)


def recalled(recall: Recall, features: Features, owner: int = -1) -> Features:
    """Features with what is remembered of their kernels in the figures and in the base times."""
    logs, columns = recall.look_up(features.nodes, features.keys, owner)
    law = law_s(recall.law, features)
    base_s = (law * np.exp(logs)).astype(np.float32)
    lawful = np.log(law / features.base_s).astype(np.float32)[:, None]
    return dataclasses.replace(features, nodes=np.concatenate((features.nodes, columns, lawful), axis=1), base_s=base_s)


def _with_recall(recall: Recall, sample: Sample, owner: int) -> Sample:
    return dataclasses.replace(sample, features=recalled(recall, sample.features, owner))


def _train_one(
    split: Split, options: LearnOptions, seed: int, standard: tuple[Array, Array], until: float, tell: Tell | None
) -> tuple[Any, list[tuple[int, float, float]]]:
    network = _network(options, options.dropout)
    optimizer, init, update = _updater(network, options.batch + 1, options.weight_decay)
    rng = np.random.default_rng([seed, 3])
    steps = len(_batches(split.train, options.batch, np.random.default_rng(0)))
    total, begun = max(options.epochs * steps, 2), time.process_time()
    first = _standard(make_batch([s.features for s in split.train[:2]], options.batch + 1), standard)
    key = jax.random.key(seed)
    params: Any = init(key, *_inputs(first))
    state: Any = optimizer.init(params)

    average = params
    best, best_loss, since = params, float("inf"), 0
    curve: list[tuple[int, float, float]] = []
    number = 0
    for epoch in range(options.epochs):
        found: list[float] = []
        for part in _batches(split.train, options.batch, rng):
            batch = _standard(make_batch([s.features for s in part], options.batch + 1), standard)
            labels = _labels(part, len(batch.base_s), options.batch + 1)
            number += 1
            new = max(1 - options.average, 9 / (9 + number))  # the first weights are soon forgotten
            progress = max(number / total, (time.process_time() - begun) / max(until - begun, 1e-9))
            rate = options.learning_rate * _rate(progress)
            params, average, state, value = update(
                params, average, state, _inputs(batch), labels, jax.random.fold_in(key, number), new, rate
            )
            found.append(float(value))
        logs = predict_logs(network, average, [s.features for s in split.validation], standard)
        validation = _validation_loss(*logs, split.validation)
        curve.append((epoch, float(np.mean(found)), validation))
        if tell is not None:
            tell(epoch + 1, options.epochs, *curve[-1][1:])
        if validation < best_loss:
            best, best_loss, since = average, validation, 0
        else:
            since += 1
        if since >= options.patience or time.process_time() > until:
            break
    return jax.device_get(best), curve


def _rate(progress: float) -> float:
    """A share of the learning rate: up for a twentieth of the training, then down along a cosine."""
    return progress / WARM if progress < WARM else 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))) + 1e-3


@functools.lru_cache(maxsize=4)
def _updater(network: Any, slots: int, weight_decay: float) -> tuple[Any, Any, Any]:
    """The optimizer, compiled first weights, a compiled step of training: for all members and the control."""
    import optax  # pyright: ignore[reportMissingTypeStubs]  # planning alone does not load it

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0, weight_decay=weight_decay))

    def mean(logs: Any, y: Any, weight: Any) -> Any:
        return jnp.sum(optax.huber_loss(logs, y, delta=0.3) * weight) / jnp.maximum(jnp.sum(weight), 1.0)

    def loss(p: Any, inputs: tuple[Any, ...], labels: tuple[Any, ...], dropout: Any) -> Any:
        kernels, steps = network.apply(p, *inputs, slots, True, rngs={"dropout": dropout})
        return mean(kernels, *labels[:2]) + STEP_WEIGHT * mean(steps, *labels[2:])

    @jax.jit
    def init(key: Any, *inputs: Any) -> Any:
        return network.init(key, *inputs, slots)

    @jax.jit
    def update(
        p: Any,
        average: Any,
        s: Any,
        inputs: tuple[Any, ...],
        labels: tuple[Any, ...],
        dropout: Any,
        new: Any,
        rate: Any,
    ) -> Any:
        value, grads = jax.value_and_grad(loss)(p, inputs, labels, dropout)
        changes, s = optimizer.update(grads, s, p)

        def at_rate(change: Any) -> Any:
            return change * rate

        p = optax.apply_updates(p, jax.tree.map(at_rate, changes))
        average = optax.incremental_update(p, average, new)
        return p, average, s, value

    return optimizer, init, update


@contextmanager
def _usual_promotion() -> Generator[None]:
    """Optax and Flax promote types, whatever the user has set."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _network(options: LearnOptions, dropout: float) -> Any:
    from autoshard.costmodel.learned.network import Corrector  # loads flax, which planning alone does not need

    return Corrector(options.width, options.layers, dropout)


def _batches(samples: Sequence[Sample], size: int, rng: np.random.Generator) -> list[list[Sample]]:
    """All programs once, in random order."""
    sizes = [(len(s.features.base_s), len(s.features.edges)) for s in samples]
    packed = pack(sizes, [int(i) for i in rng.permutation(len(samples))], size)
    return [[samples[i] for i in part] for part in packed]


def _standard(batch: Batch, standard: tuple[Array, Array]) -> Batch:
    mean, scale = standard
    nodes = np.clip((batch.nodes - mean) / scale, -8.0, 8.0).astype(np.float32)
    return Batch(nodes, batch.base_s, batch.edges, batch.edge_bytes, batch.real, batch.program, batch.count)


def _inputs(batch: Batch) -> tuple[Array, ...]:
    return (batch.nodes, batch.base_s, batch.edges, batch.edge_bytes / 20.0, batch.real, batch.program)


def _labels(part: Sequence[Sample], nodes: int, slots: int) -> tuple[Array, ...]:
    """Logs and weights of kernels [nodes], then of programs [slots]."""
    kernel_s, weights = (np.concatenate(x) for x in ([s.kernel_s for s in part], [s.weight for s in part]))
    y, weight = np.zeros((2, nodes), np.float32)
    y[: len(kernel_s)] = np.where(weights > 0, np.log(np.where(weights > 0, kernel_s, 1.0)), 0.0)
    weight[: len(weights)] = weights
    step, step_weight = np.zeros((2, slots), np.float32)
    step_weight[: len(part)] = [np.isfinite(s.time_s) for s in part]
    step[: len(part)] = [np.log(s.time_s) if np.isfinite(s.time_s) else 0.0 for s in part]
    return y, weight, step, step_weight


def _huber(error: Array) -> Array:
    return np.where(error < 0.3, 0.5 * error**2, 0.3 * (error - 0.15))


def _validation_loss(kernels: Sequence[Array], steps: Array, samples: Sequence[Sample]) -> float:
    total, weights = 0.0, 1e-9
    for logs, sample in zip(kernels, samples, strict=True):
        known = sample.weight > 0
        weight = sample.weight[known]
        total += float(np.sum(weight * _huber(np.abs(logs[known] - np.log(sample.kernel_s[known])))))
        weights += float(weight.sum())
    errors = _huber(np.abs(steps - np.log([s.time_s for s in samples])))
    step = float(np.mean(errors[np.isfinite(errors)])) if np.isfinite(errors).any() else 0.0
    return total / weights + STEP_WEIGHT * step


def predict_logs(
    network: Any, params: Any, features: Sequence[Features], standard: tuple[Array, Array], size: int = 32
) -> tuple[list[Array], Array]:
    """Logarithms of the times of each program's kernels, and of the programs."""
    kernels: list[Array] = [np.zeros(0)] * len(features)
    logs = np.zeros(len(features))
    sizes = [(len(f.base_s), len(f.edges)) for f in features]
    for part in pack(sizes, range(len(features)), size):
        batch = _standard(make_batch([features[i] for i in part], size + 1), standard)
        nodes, steps = _apply(network, params, _inputs(batch), size + 1)
        logs[part] = np.asarray(steps)[: len(part)]
        ends = np.cumsum([sizes[i][0] for i in part])
        for i, found in zip(part, np.split(np.asarray(nodes), ends)[:-1], strict=True):
            kernels[i] = found
    return kernels, logs


def _apply(network: Any, params: Any, inputs: tuple[Array, ...], slots: int) -> Any:
    return _applied(network, slots)(params, *inputs)


_FUNCTIONS: dict[tuple[Any, ...], Any] = {}


def _applied(network: Any, slots: int) -> Any:
    key = (network.width, network.layers, slots)
    if key not in _FUNCTIONS:

        def call(p: Any, *inputs: Any) -> Any:
            return network.apply(p, *inputs, slots)

        _FUNCTIONS[key] = jax.jit(call)
    return _FUNCTIONS[key]


@final
@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of programs.

    Attributes:
      kernels: for each program [K], all runs of a kernel together.
      steps: [programs].
    """

    kernels: tuple[Array, ...]
    steps: Array


def predict(trained: Trained, features: Sequence[Features]) -> Times:
    """The members' geometric mean."""
    network = _network(trained.options, 0.0)
    standard = (trained.mean, trained.scale)
    features = [recalled(trained.recall, each) for each in features]
    with _usual_promotion():
        found = [predict_logs(network, params, features, standard) for params in trained.members]
    kernels = tuple(np.exp(np.mean(each, axis=0)) for each in zip(*(k for k, _ in found), strict=True))
    return Times(kernels, np.exp(np.mean([steps for _, steps in found], axis=0)))
