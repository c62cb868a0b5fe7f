"""Step time of single-device train steps, predicted from a calibrated cluster file against measured.

    taskset -c 0 python -m bench.calibrated_steps [--cluster FILE] [--budget SECONDS] [--json FILE] [program]...

Without a file the device is calibrated first. None of the programs is among what calibration measures. A step's state
is donated and fed back, as in training; a process on one core is timed by what it used of it (`autoshard.calibrate`).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from autoshard.calibrate import Measured, best_clock, calibrate, measure
from autoshard.cluster import Cluster
from autoshard.ir import trace
from autoshard.search import step_compute
from bench.steps import STEPS

SEED = 0
LIMIT_S = 3.0
"""Seconds for each program's calls."""


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One program.

    Attributes:
      program: name.
      predicted_s: sum over all operators, whole.
      measured: of the compiled step.
      parts: predicted seconds by primitive, most first.
    """

    program: str
    predicted_s: float
    measured: Measured
    parts: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured.median - 1.0


def compare(name: str, cluster: Cluster) -> Row:
    """Predicts and measures one program."""
    step, state, batch = STEPS[name](np.random.default_rng(SEED))
    flat, tree = jax.tree.flatten((state, batch))
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
    graph = trace(lambda *xs: jax.tree.leaves(step(*jax.tree.unflatten(tree, xs))), avals)
    parts: dict[str, float] = {}
    for primitive, seconds in step_compute(graph, cluster, [(i, i) for i in range(len(jax.tree.leaves(state)))]):
        parts[primitive] = parts.get(primitive, 0.0) + seconds
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    kept = [state]

    def call() -> object:
        kept[0], metric = compiled(kept[0], batch)
        return jax.block_until_ready((kept[0], metric))

    most = dict(sorted(parts.items(), key=lambda part: -part[1]))
    return Row(name, sum(parts.values()), measure(call, LIMIT_S, best_clock()), most)


def rank_correlation(rows: Sequence[Row]) -> float:
    """Spearman's, of predicted and measured times."""
    if len(rows) < 2:
        return 1.0
    order: Callable[[list[float]], Any] = lambda x: np.argsort(np.argsort(x))  # noqa: E731
    predicted, measured = [r.predicted_s for r in rows], [r.measured.median for r in rows]
    return float(np.corrcoef(order(predicted), order(measured))[0, 1])


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="step time, predicted and measured")
    for column in ("program", "predicted", "measured", "spread", "error"):
        shown.add_column(column, justify="left" if column == "program" else "right")
    for r in rows:
        times = f"{r.predicted_s * 1e3:.2f} ms", f"{r.measured.median * 1e3:.2f} ms"
        shown.add_row(r.program, *times, f"{r.measured.spread:.0%}", f"{r.error:+.1%}")
    return shown


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Step times, predicted and measured.")
    parser.add_argument("programs", nargs="*", help="names; all by default")
    parser.add_argument("--cluster", type=Path, help="a calibrated cluster file")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for calibrating")
    parser.add_argument("--json", type=Path, default=Path("calibrated_steps.json"))
    options = parser.parse_args()
    console = Console(stderr=True)
    if options.cluster is not None:
        cluster = Cluster.from_toml(options.cluster)
    else:
        cluster = calibrate(
            budget_s=options.budget, tell=lambda p: console.print(f"{p.done}/{p.total} {p.key}")
        ).cluster
    rows: list[Row] = []
    for name in options.programs or STEPS:
        rows.append(compare(name, cluster))
        console.print(f"{name}: {rows[-1].error:+.1%}")
    Console().print(table(rows))
    error = sum(abs(r.error) for r in rows) / len(rows)
    print(f"mean absolute error {error:.1%}, rank correlation {rank_correlation(rows):.3f}")
    record = {
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "seed": SEED,
        "mean_absolute_error": error,
        "rank_correlation": rank_correlation(rows),
        "rows": [asdict(r) for r in rows],
    }
    options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
