"""Peak memory: predicted for a plan against XLA's own number for the compiled program.

    python -m bench.memory [--device cpu|h100] [--set zoo|real] [--mesh 2x4] [--json FILE] [--cache FILE] [NAME]...

`zoo`: tests/zoo on a 2x4 mesh, on a cluster on which splitting small arrays pays. `real`: GPT-2 124M (64 x 1024),
ViT-B/16 (256 x 224 x 224) and ResNet-50 (the same), bf16 and f32, data parallel, fully sharded and as planned, as
shapes only. XLA's number is what its buffer assignment says of one device: on CPUs arguments + outputs - outputs in
donated buffers + temporaries, of H100s (compiled without one) the peak. Names are parts of set/program/plan.

A child process does the work: a compiler that crashes ends a row, not the table. With --cache a plan that was compiled
before is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from rich.console import Console
from rich.table import Table

from bench.memory_cases import BATCH, DEVICES, SEED, ZOO_MESH, Case, Row, cases, measure

MEDIAN = 0.07
"""Most that the median relative error of a set may be."""

GROUPS = ("zoo", "real")


def attempt(case: Case, device: str, cache: Path | None) -> Row:
    """Measures; what is raised becomes the row."""
    try:
        return measure(case, device, cache)
    except Exception as error:  # one program must not end the table
        return Row(case, device, case.mesh, failure=f"{type(error).__name__}: {error}".split("\n")[0])


def measure_all(found: Sequence[Case], device: str, cache: Path | None) -> Iterator[Row]:
    """One row after the other, in a child process that is replaced when it crashes."""
    pool: ProcessPoolExecutor | None = None
    for case in found:
        if pool is None:
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_start)
        try:
            yield pool.submit(attempt, case, device, cache).result()
        except BrokenProcessPool:
            pool.shutdown()
            pool = None
            yield Row(case, device, case.mesh, failure="crashed")
    if pool is not None:
        pool.shutdown()


def _start() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)


def show(rows: Sequence[Row]) -> Table:
    """The table of all rows."""
    table = Table("program", "plan", "mesh", "predicted", "XLA", "error", "temporaries", "XLA's", box=None)
    for row in rows:
        cells = (row.case.program, row.case.plan, row.mesh)
        if row.failure:
            table.add_row(*cells, row.failure)
            continue
        sizes = [_size(n) for n in (row.predicted_bytes, row.compiled_bytes, *row.temporary_bytes)]
        table.add_row(*cells, sizes[0], sizes[1], f"{row.error:+.1%}", sizes[2], sizes[3])
    return table


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each device and set: programs, failures, median and worst relative error."""
    found: list[dict[str, Any]] = []
    for device, group in dict.fromkeys((row.device, row.case.group) for row in rows):
        mine = [row for row in rows if (row.device, row.case.group) == (device, group)]
        good = [row for row in mine if not row.failure]
        worst = max(good, key=lambda row: abs(row.error), default=None)
        found.append(
            {
                "device": device,
                "set": group,
                "plans": len(good),
                "failed": len(mine) - len(good),
                "median": statistics.median(abs(row.error) for row in good) if good else float("inf"),
                "worst": worst.error if worst is not None else float("inf"),
                "worst_of": worst.case.name if worst is not None else "",
            }
        )
    return found


def main() -> int:
    """Prints the tables; 1 if a set's median is above its limit or something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "h100"), default="cpu")
    parser.add_argument("--set", action="append", choices=GROUPS, help="both if none is given")
    parser.add_argument("--mesh", action="append", help="of the zoo; 2x4 if none is given")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--cache", type=Path, help="compiles done before, read and added to")
    parser.add_argument("names", nargs="*", help="all if none is given")
    options = parser.parse_args()
    found = cases(tuple(options.set or GROUPS), tuple(options.mesh or [ZOO_MESH]))
    if options.names:
        found = [case for case in found if any(name in case.name for name in options.names)]
    console = Console(width=130)
    rows: list[Row] = []
    for row in measure_all(found, options.device, options.cache):
        rows.append(row)
        console.print(
            f"{row.case.name} {row.failure or format(row.error, '+.1%')} {row.plan_s:.0f}+{row.compile_s:.0f} s"
        )
    console.print(show(rows))
    lines = summary(rows)
    table = Table("device", "set", "plans", "failed", "median", "worst", "of", box=None)
    for line in lines:
        errors = (f"{line['median']:.1%}", f"{line['worst']:+.1%}")
        table.add_row(*(str(line[k]) for k in ("device", "set", "plans", "failed")), *errors, str(line["worst_of"]))
    console.print(table)
    if options.json is not None:
        record = {
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "device": f"{DEVICES} x {options.device}",
            "seed": SEED,
            "batch": BATCH,
            "summary": lines,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1))
    return int(any(line["median"] > MEDIAN or line["failed"] for line in lines))


def _size(nbytes: float) -> str:
    """Bytes with a unit, to three or four digits."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 9999:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


if __name__ == "__main__":
    raise SystemExit(main())
