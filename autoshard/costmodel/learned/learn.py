"""All of learning in order: samples from measured programs, training, scores, the stored model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from autoshard.cluster import DeviceSpec, resolve_cluster
from autoshard.costmodel.graph_time import graph_time_s
from autoshard.costmodel.learned.collect import good_samples
from autoshard.costmodel.learned.evaluate import Score, evaluate_model, repeat_scores, shuffled_control
from autoshard.costmodel.learned.features import Features, hlo_features
from autoshard.costmodel.learned.hlo_graph import unpack_text
from autoshard.costmodel.learned.kernel_features import REUSE_COLUMNS
from autoshard.costmodel.learned.program_steps import make_step
from autoshard.costmodel.learned.store import make_record, save_model
from autoshard.costmodel.learned.train import LearnOptions, Sample, Split, Tell, Trained, split_samples, train
from autoshard.costmodel.measured import TRANSCENDENTAL_FLOPS


@final
@dataclass(frozen=True, slots=True)
class Learned:
    """What learning gives.

    Attributes:
      trained: the networks.
      split: the programs.
      validation, held_out: scores of the learned and the analytic models.
      control: scores of the shuffled control and the mean correction on the held-out programs; empty if not asked for.
      repeats: of another session of measuring, on all programs that have one.
      record: as stored.
    """

    trained: Trained
    split: Split
    validation: tuple[Score, ...]
    held_out: tuple[Score, ...]
    control: tuple[Score, ...]
    repeats: tuple[Score, ...]
    record: Mapping[str, Any]


def one_core() -> DeviceSpec:
    """The device that programs are measured on: one core of this host, as `devices="auto"` describes it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    node = resolve_cluster("auto").nodes[0]
    share = node.count / cores
    flops = {name: rate * share for name, rate in node.device.flops_per_s.items()}
    return dataclasses.replace(
        node.device, flops_per_s=flops, memory_bytes_per_s=node.device.memory_bytes_per_s * share
    )


def make_samples(
    records: Sequence[Mapping[str, Any]], device: DeviceSpec, tell: Callable[[int, int], None] | None = None
) -> list[Sample]:
    """Samples of what was measured; failed records are left out.

    Args:
      records: `collect.read_samples`.
      device: what the analytic model is told.
      tell: progress.
    """
    kept = good_samples(records)
    samples: list[Sample] = []
    nan = float("nan")
    for number, r in enumerate(kept):
        program = make_step(r["seed"])
        features = hlo_features(unpack_text(r["hlo"]))
        analytic_s = graph_time_s(program.graph(), device)
        kernel_s, again_s, spread = (
            np.array([r[key].get(name, nan) for name in features.names])
            for key in ("kernel_s", "kernel_again_s", "kernel_spread")
        )
        samples.append(
            Sample(
                name=f"step-{r['seed']}",
                family=r["family"],
                structure=r["structure"],
                features=features,
                time_s=r["time_s"],
                kernel_s=kernel_s * features.runs,
                kernel_spread=spread,
                analytic_s=analytic_s,
                kernel_analytic_s=kernel_roofline_s(features, device),
                again_s=r["again_s"],
                kernel_again_s=again_s * features.runs,
            )
        )
        if tell is not None:
            tell(number + 1, len(kept))
    return samples


def kernel_roofline_s(features: Features, device: DeviceSpec) -> np.ndarray:
    """What the analytic model says of each kernel, all its runs: [K].

    launch + max( operations / rate, bytes / bandwidth ),  a function's result being `TRANSCENDENTAL_FLOPS`
    """
    operations, transcendentals, moved = features.work.T
    rate = device.peak_flops_per_s("f32") * device.matmul_efficiency
    bandwidth = device.memory_bytes_per_s * device.memory_efficiency
    operations_s = (operations + TRANSCENDENTAL_FLOPS * transcendentals) / rate
    return features.runs * (device.kernel_launch_s + np.maximum(operations_s, moved / bandwidth))


def learn_model(
    samples: Sequence[Sample],
    folder: Path,
    options: LearnOptions,
    counts: Mapping[str, Any],
    *,
    split_seed: int = 0,
    shuffled: bool = True,
    tell: Tell | None = None,
) -> Learned:
    """Trains, evaluates and stores a model.

    Args:
      samples: measured programs.
      folder: where the model goes.
      options: of the training.
      counts: of the collection, for the record.
      split_seed: which programs are held out.
      shuffled: whether to train the control as well, for as long as one member.
      tell: progress.

    Raises:
      ArgumentError: too few samples.
    """
    split = split_samples(samples, split_seed)
    trained = train(split, options, tell)
    validation = evaluate_model(trained, split, split.validation)
    held_out = evaluate_model(trained, split, split.held_out)
    part = dataclasses.replace(options, seconds=options.seconds / options.members)
    controls = shuffled_control(split, part, tell) if shuffled else []
    record = make_record(trained, split, validation, held_out, counts, split_seed)
    repeats = repeat_scores(samples)
    record["control"] = [s.to_dict() for s in controls]
    record["repeats"] = [s.to_dict() for s in repeats]
    save_model(folder, trained, record)
    return Learned(trained, split, tuple(validation), tuple(held_out), tuple(controls), tuple(repeats), record)


def agreed_scores(found: Learned, limit: float = 0.05) -> list[Score]:
    """Scores on the held-out kernels whose two fastest visits agree within `limit`; whole steps as they are.

    Which these are depends on the measuring alone, not on any model.
    """
    part = [
        dataclasses.replace(s, kernel_s=np.where(s.kernel_spread <= limit, s.kernel_s, np.nan))
        for s in found.split.held_out
    ]
    return evaluate_model(found.trained, found.split, part)


def unseen_scores(found: Learned) -> list[Score]:
    """Scores on the held-out kernels whose figures no training program has; whole steps as they are."""
    known = {row.tobytes() for s in found.split.train for row in _own(s.features)}
    part = [
        dataclasses.replace(
            s, kernel_s=np.where([row.tobytes() in known for row in _own(s.features)], np.nan, s.kernel_s)
        )
        for s in found.split.held_out
    ]
    return evaluate_model(found.trained, found.split, part)


def _own(features: Features) -> np.ndarray:
    """Figures of the kernels but for what stands around them: [K, n]."""
    return np.delete(features.nodes, np.arange(*REUSE_COLUMNS), axis=1)
