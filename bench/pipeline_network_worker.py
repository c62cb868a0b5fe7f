"""One process of `bench.pipeline_network`: NUMBER COORDINATOR FOLDER, and `Asked` as JSON."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from autoshard import autoshard
from autoshard.calibrate import calibrate
from autoshard.cluster import Cluster
from bench.slow_programs import Case, convolutional, mlp, transformer

TURN = 3
"""Steps of one pipeline before it is the next one's turn; all but the first, which finds other arrays in the caches,
are timed."""


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """What the worker shall do.

    Attributes:
      programs: by name; all if empty.
      schedules: for each.
      microbatches: of every step.
      rounds: turns of each pipeline.
      budget_s: for calibrating.
      small: one small program and a quick calibration.
    """

    programs: tuple[str, ...]
    schedules: tuple[str, ...]
    microbatches: tuple[int, ...]
    rounds: int
    budget_s: float
    small: bool


def cases(small: bool) -> list[Case]:
    """Programs that take some tenths of a second on one core."""
    if small:
        return [mlp("mlp", (256,) * 5, 256, optax.sgd(0.1))]
    return [
        mlp("mlp-1024x8", (1024,) * 9, 512, optax.sgd(0.1)),
        transformer(256, 4, 128, 16, 2048),
        convolutional(64, 32, (32, 64, 128)),
    ]


@final
class Running:
    """A pipeline that is stepped turn by turn.

    Attributes:
      plan: as made.
      times: seconds of the steps that count.
    """

    def __init__(self, case: Case, schedule: str, microbatches: int, cluster: Cluster) -> None:
        options: dict[str, Any] = {"stages": 2, "microbatches": microbatches, "schedule": schedule, "devices": cluster}
        self._step: Any = autoshard(case.step, **options)
        shapes = jax.eval_shape(case.make_state, jax.random.key(0))
        self.plan = self._step.plan(shapes, case.batch)
        self._state = self._step.init(lambda: case.make_state(jax.random.key(0)))
        self._batch = case.batch
        self.times: list[float] = []
        self._once()

    def turn(self) -> None:
        """Some steps."""
        times = [self._once() for _ in range(TURN)]
        self.times += times[1:]

    def _once(self) -> float:
        begin = time.perf_counter()
        self._state, loss = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, loss))
        return time.perf_counter() - begin


def calibrated(folder: Path, asked: Asked) -> Cluster:
    """The cluster of both processes, measured once for each folder."""
    file = folder / "cluster.toml"
    if not multihost_utils.broadcast_one_to_all(np.int32(file.exists())):
        made = calibrate(budget_s=asked.budget_s, quick=asked.small, cache=folder / "measurements.jsonl")
        if jax.process_index() == 0:
            file.write_text(made.to_toml())
    multihost_utils.sync_global_devices("calibrated")
    return Cluster.from_toml(file)


def rows_of(running: Sequence[tuple[dict[str, Any], Running]]) -> list[dict[str, Any]]:
    """A row for each pipeline; a step takes as long as in the process that is slower."""
    rows: list[dict[str, Any]] = []
    for names, each in running:
        both = np.asarray(multihost_utils.process_allgather(np.asarray(each.times, np.float32)))
        times = [float(t) for t in both.max(axis=0)]
        quarters = statistics.quantiles(times, n=4)
        median = statistics.median(times)
        pipeline = each.plan.pipeline
        rows.append(
            {
                **names,
                "predicted_s": each.plan.time_s,
                "measured_s": median,
                "lowest_s": min(times),
                "spread": (quarters[2] - quarters[0]) / median,
                "forward_s": pipeline.forward_s,
                "backward_s": pipeline.backward_s,
                "why": each.plan.why[0],
                "steps": len(times),
            }
        )
    return rows


def main() -> None:
    """Calibrates, plans all pipelines, then times them in turn; the first process writes the rows."""
    number, coordinator, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    asked = Asked(**json.loads(sys.argv[4]))
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, number)
    cluster = calibrated(folder, asked)
    running: list[tuple[dict[str, Any], Running]] = []
    for case in cases(asked.small):
        if asked.programs and case.name not in asked.programs:
            continue
        for schedule in asked.schedules:
            for count in asked.microbatches:
                names = {"program": case.name, "schedule": schedule, "microbatches": count}
                print(f"{names}", flush=True)
                running.append((names, Running(case, schedule, count, cluster)))
    for turn in range(asked.rounds):
        print(f"turn {turn}", flush=True)
        for _, each in running:
            each.turn()
    rows = rows_of(running)
    if number == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    multihost_utils.sync_global_devices("done")


if __name__ == "__main__":
    main()
