"""Predicted against measured step time: two processes, one core each, in two network namespaces joined by a link.

    python -m bench.slow_network [--rate 200mbit]... [--budget 120] [--folder DIR] [--json FILE]

For each link the devices and the link are calibrated first (`autoshard.calibrate`; no program below is part of that),
then each program is planned with what was measured, in up to four ways, and timed: data parallel, fully sharded (state
split along its first dimension that can be), tensor parallel (the batch whole), and the planner's own choice. Like
plans are timed once. Needs root (namespaces) and two cores; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.namespaces import ADDRESSES, RATES, missing, run_both, two_hosts

MOST_ERROR = 0.15
LEAST_RANK = 0.95
LEAST_PAIRS = 15
TIMEOUT_S = 3000.0


def run_link(rate: str, folder: Path, budget_s: float, small: bool, port: int) -> list[dict[str, Any]]:
    """All (program, plan) pairs over one link."""
    with two_hosts(RATES[rate]) as hosts:
        commands: list[Sequence[str]] = []
        for i in range(2):
            command = [sys.executable, "-m", "bench.slow_network_worker", str(i), f"{ADDRESSES[0]}:{port}"]
            command += [str(folder), str(budget_s), *(["--small"] if small else [])]
            commands.append(hosts.command(i, command, core=i))
        return run_both(commands, rate, folder, TIMEOUT_S)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    if len(a) < 2:
        return float("nan")
    first, second = (np.argsort(np.argsort(x)) for x in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def summary(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Mean absolute relative error, rank correlation."""
    predicted, measured = ([row[key] for row in rows] for key in ("predicted_s", "measured_s"))
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return float(np.mean(errors)), rank_correlation(predicted, measured)


def main() -> int:
    """Prints the table; 1 if a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", action="append", choices=list(RATES), help="all if none is given")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for each calibration")
    parser.add_argument("--folder", type=Path, help="for cluster files and logs; a new one if left out")
    parser.add_argument("--small", action="store_true", help="one small program: a look at whether it runs")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    if reason := missing():
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and processes end with this one
    folder = options.folder or Path(tempfile.mkdtemp(prefix="autoshard-slow-"))
    rows: list[dict[str, Any]] = []
    console = Console(width=130)
    for k, rate in enumerate(options.rate or list(RATES)):
        with console.status(f"{rate}: calibrating and timing"):
            rows += run_link(rate, folder / rate, options.budget, options.small, 9911 + k)
    table = Table(
        "link", "program", "plan", "predicted ms", "measured ms", "spread", "error", "of it collectives", box=None
    )
    for row in rows:
        error = row["predicted_s"] / row["measured_s"] - 1
        cells = (f"{row['predicted_s'] * 1e3:.1f}", f"{row['measured_s'] * 1e3:.1f}", f"{row['spread']:.0%}")
        share = f"{row['traffic_s'] / row['predicted_s']:.0%}"
        table.add_row(row["link"], row["program"], row["plan"], *cells, f"{error:+.1%}", share)
    console.print(table)
    error, rank = summary(rows)
    console.print(
        f"{len(rows)} pairs; mean absolute error {error:.1%}, rank correlation {rank:.3f}; files in {folder.name}"
    )
    if options.json is not None:
        record = {
            "versions": {"python": platform.python_version()},
            "seed": 0,
            "error": error,
            "rank": rank,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1))
    if options.small:
        return 0
    return int(error > MOST_ERROR or rank < LEAST_RANK or len(rows) < LEAST_PAIRS)


if __name__ == "__main__":
    raise SystemExit(main())
