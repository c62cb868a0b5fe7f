"""A trained model in a folder: `weights.msgpack` (flax.serialization), and `record.json`, which says what it is.

The record holds the format, the layout of the figures, options, losses, split hashes, counts, versions, the machine,
and the scores; a folder of another format or layout is refused.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import jax
import numpy as np

from autoshard.costmodel.learned.evaluate import Kind, Score, wins
from autoshard.costmodel.learned.features import compile_text, hlo_features
from autoshard.costmodel.learned.hlo_graph import parse_module
from autoshard.costmodel.learned.kernel_features import LAYOUT
from autoshard.costmodel.learned.law import Law
from autoshard.costmodel.learned.recall import Recall
from autoshard.costmodel.learned.train import LearnOptions, Split, Trained, digest, predict
from autoshard.errors import ArgumentError, explain
from autoshard.ir import Graph

FORMAT = 3
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-", "ragged-all-to-all")
"""HLO's operations in which devices talk."""

WEIGHTS, RECORD = "weights.msgpack", "record.json"


@final
class LearnedModel:
    """A stored model. It predicts from the compiled program: a graph is compiled first, for one CPU device.

    Attributes:
      record: how it was trained and how good it is.
    """

    def __init__(self, trained: Trained, record: Mapping[str, Any]) -> None:
        self._trained = trained
        self.record = record

    def predict_s(self, graph: Graph) -> float:
        """Seconds of one call of a graph on one device. Compiles it, which takes a tenth of a second to seconds."""
        return self.predict_hlo_s(compile_text(graph))

    def predict_hlo_s(self, text: str) -> float:
        """Seconds of one call of a compiled program, from its optimized HLO.

        Raises:
          ArgumentError: the text is no HLO module.
        """
        return float(predict(self._trained, [hlo_features(text)]).steps[0])

    def compute_hlo_s(self, text: str) -> float:
        """Seconds of one call of a compiled program on one device without its collectives, which it never learned.

        Raises:
          ArgumentError: the text is no HLO module.
        """
        talking = {k.name for k in parse_module(text).kernels if k.instruction.opcode.startswith(COLLECTIVES)}
        features = hlo_features(text)
        times = predict(self._trained, [features])
        apart = [name in talking for name in features.names]
        return float(times.steps[0]) * (1 - float(times.kernels[0][apart].sum() / times.kernels[0].sum()))

    def differs(self) -> str:
        """How this machine and these versions differ from those it was measured with; "" where they do not."""
        here = {**machine(), "jax": jax.__version__}
        there = {**self.record["machine"], "jax": self.record["versions"]["jax"]}
        wrong = [f"{key} {there.get(key)!r} (here {value!r})" for key, value in here.items() if there.get(key) != value]
        return f"it was measured on {', '.join(wrong)}" if wrong else ""

    def kernel_times_s(self, text: str) -> Mapping[str, float]:
        """Seconds of each kernel in a call, all its runs together, by the name of its HLO instruction.

        Raises:
          ArgumentError: the text is no HLO module.
        """
        features = hlo_features(text)
        (times,) = predict(self._trained, [features]).kernels
        return {name: float(t) for name, t in zip(features.names, times, strict=True) if name}

    def wins(self, kind: Kind) -> bool:
        """Whether validation found it better than the analytic model for clusters, or for steps."""
        return bool(self.record["wins"].get(kind, False))

    def why(self, kind: Kind) -> str:
        """A line for the plan: which model gives times of this kind, and on what grounds."""
        table = {(s["model"], s["kind"]): s for s in self.record["validation"]}
        mine, other = table["learned", kind], table["analytic, scaled", kind]
        used = "learned model" if self.wins(kind) else "analytic model"
        return (
            f"{used} for {kind}s: on {mine['count']} validation {kind}s the learned model's median error is "
            f"{mine['median']:.0%}, the analytic one's, scaled, {other['median']:.0%}"
        )


def machine() -> dict[str, Any]:
    """What measured times depend on."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model" in line]
        model = " ".join(dict.fromkeys(names))
    return {"machine": platform.machine(), "system": platform.system(), "cpu": model, "threads": 1}


def make_record(
    trained: Trained,
    split: Split,
    validation: Sequence[Score],
    held_out: Sequence[Score],
    counts: Mapping[str, Any],
    split_seed: int,
) -> dict[str, Any]:
    """What is known of a model."""
    parts = {"train": split.train, "validation": split.validation, "held_out": split.held_out}
    return {
        "format": FORMAT,
        "layout": LAYOUT,
        "options": dataclasses.asdict(trained.options),
        "losses": [list(each) for each in trained.losses],
        "seconds": trained.seconds,
        "split": {
            "seed": split_seed,
            **{name: {"programs": len(part), "hash": digest(part)} for name, part in parts.items()},
        },
        "counts": dict(counts),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
        "machine": machine(),
        "validation": [s.to_dict() for s in validation],
        "held_out": [s.to_dict() for s in held_out],
        "wins": wins(validation),
    }


def save_model(folder: Path, trained: Trained, record: Mapping[str, Any]) -> None:
    """Writes both files."""
    from flax import serialization  # loads flax, which planning alone does not need

    folder.mkdir(parents=True, exist_ok=True)
    members = {str(i): member for i, member in enumerate(trained.members)}
    kept = trained.recall
    recall = {"keys": kept.keys, "x": kept.x, "y": kept.y, "weight": kept.weight, "owner": kept.owner}
    recall |= {"rates": kept.law.rates, "own": kept.law.own}
    tree = {"members": members, "recall": recall, "mean": trained.mean, "scale": trained.scale}
    write = cast(Any, serialization.msgpack_serialize)  # pyright: ignore[reportUnknownMemberType]
    (folder / WEIGHTS).write_bytes(write(tree))
    (folder / RECORD).write_text(json.dumps(record, indent=1))


def load_model(folder: Path) -> LearnedModel:
    """Reads a model.

    Raises:
      ArgumentError: no such folder, or one of another format or layout.
    """
    from flax import serialization  # loads flax, which planning alone does not need

    todo = "train one with `autoshard learn`"
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
        weights = (folder / WEIGHTS).read_bytes()
    except (OSError, json.JSONDecodeError) as error:
        raise ArgumentError(explain(f"{folder}: {error}", f"a folder with {RECORD} and {WEIGHTS}", todo)) from error
    for key, wanted in (("format", FORMAT), ("layout", LAYOUT)):
        if record.get(key) != wanted:
            raise ArgumentError(explain(f"{folder / RECORD} has {key} {record.get(key)!r}", f"{wanted!r}", todo))
    try:
        tree = cast(Any, serialization.msgpack_restore(weights))
        members = tuple(tree["members"][str(i)] for i in range(len(tree["members"])))
        kept = dict(tree["recall"])
        recall = Recall(Law(kept.pop("rates"), kept.pop("own")), **kept)
        mean, scale = tree["mean"], tree["scale"]
        options = LearnOptions(**record["options"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            explain(f"{folder / WEIGHTS} cannot be read ({error})", "weights written by `autoshard learn`", todo)
        ) from error
    return LearnedModel(Trained(members, recall, mean, scale, options, (), float(record["seconds"])), record)
