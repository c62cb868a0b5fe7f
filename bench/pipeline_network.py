"""Predicted against measured step time of pipelines: two processes, one core each, a stage in each.

    python -m bench.pipeline_network [--link loopback]... [--program NAME]... [--schedule NAME]... [--microbatches N]...
                                     [--rounds N] [--budget 120] [--folder DIR] [--nice N] [--json FILE]

Links: "loopback" is none but the host's own; the others join two network namespaces (`bench.namespaces`) and need root.
For each link devices and link are calibrated first (no program below is part of that; a folder that has a cluster file
is used as it is), then each program is planned as a pipeline of two stages on what was measured, under each schedule.
All pipelines are stepped in turn, `--rounds` times; the median of their steps counts, each as long as in the slower
process. Needs two cores; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.namespaces import ADDRESSES, RATES, missing, run_both, two_hosts
from bench.pipeline_network_worker import Asked

LOOPBACK = "loopback"
MOST_ERROR = 0.15
TIMEOUT_S = 1500.0


def run_pipelines(link: str, folder: Path, asked: Asked, nice: int = 0) -> list[dict[str, Any]]:
    """Predicted and measured times of all pipelines over one link.

    Args:
      link: "loopback" or one of `bench.namespaces.RATES`.
      folder: for the cluster file, the rows and logs.
      asked: what to run.
      nice: of the processes.

    Raises:
      RuntimeError: a process failed; with the ends of both logs.
    """
    wanted = json.dumps(asdict(asked))
    with _hosts(link) as (host, wrap):
        where, commands = f"{host}:{_free_port()}", list[Sequence[str]]()
        for i in range(2):
            command = [sys.executable, "-m", "bench.pipeline_network_worker", str(i), where, str(folder), wanted]
            commands.append(wrap(i, ["nice", "-n", str(nice), *command] if nice else command))
        return run_both(commands, link, folder, TIMEOUT_S)


@contextlib.contextmanager
def _hosts(link: str) -> Iterator[tuple[str, Any]]:
    """The coordinator's address, and what makes a command run on host i, core i."""
    if link == LOOPBACK:
        yield "127.0.0.1", lambda i, command: ["taskset", "-c", str(i), *command]
        return
    with two_hosts(RATES[link]) as hosts:
        yield ADDRESSES[0], lambda i, command: hosts.command(i, command, core=i)


def lacking(link: str) -> str:
    """What is missing for a link on this machine, "" if nothing."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        return "two processes on a core each need two cores"
    if shutil.which("taskset") is None:
        return "taskset is not installed (Debian: util-linux)"
    return "" if link == LOOPBACK else missing()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each pipeline."""
    shown = Table("link", "program", "schedule", "microbatches", "predicted ms", "measured ms", "spread", "ratio",
                  box=None)  # fmt: skip
    for row in rows:
        cells = (f"{row['predicted_s'] * 1e3:.1f}", f"{row['measured_s'] * 1e3:.1f}", f"{row['spread']:.0%}")
        ratio = f"{row['measured_s'] / row['predicted_s']:.2f}"
        shown.add_row(row["link"], row["program"], row["schedule"], str(row["microbatches"]), *cells, ratio)
    return shown


def main() -> int:
    """Prints the table; 1 if the promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", action="append", choices=[LOOPBACK, *RATES], help="loopback and 200mbit if left out")
    parser.add_argument("--program", action="append", default=[], help="all if left out")
    parser.add_argument("--schedule", action="append", help="1f1b and gpipe if left out")
    parser.add_argument("--microbatches", action="append", type=int, help="4 and 8 if left out")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for each calibration")
    parser.add_argument("--folder", type=Path, help="for cluster files and logs; a new one if left out")
    parser.add_argument("--nice", type=int, default=0, help="of the timed processes; below 0 needs root")
    parser.add_argument("--small", action="store_true", help="one small program: a look at whether it runs")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    links = options.link or [LOOPBACK, "200mbit"]
    if reason := next(filter(None, map(lacking, links)), ""):
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and processes end with this one
    folder = options.folder or Path(tempfile.mkdtemp(prefix="autoshard-pipelines-"))
    asked = Asked(
        tuple(options.program), tuple(options.schedule or ("1f1b", "gpipe")), tuple(options.microbatches or (4, 8)),
        options.rounds, options.budget, options.small,
    )  # fmt: skip
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    console = Console(width=130)
    for link in links:
        with console.status(f"{link}: calibrating and timing"):
            rows += run_pipelines(link, folder / link, asked, options.nice)
    console.print(table_of(rows))
    errors = [abs(row["measured_s"] / row["predicted_s"] - 1) for row in rows]
    console.print(
        f"{len(rows)} pipelines, off by {np.mean(errors):.1%} on average, {max(errors):.1%} at most; "
        f"load before {load:.1f}; files in {folder.name}"
    )
    if options.json is not None:
        record = {"versions": {"python": platform.python_version()}, "seed": 0, "load": load, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1))
    return int(not options.small and max(errors) > MOST_ERROR)


if __name__ == "__main__":
    raise SystemExit(main())
