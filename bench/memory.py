"""Peak memory: predicted for the chosen plan against XLA's own number for the compiled program, over the zoo.

    python -m bench.memory [--mesh 2x4]... [--json FILE] [program]...

Run on eight CPU devices with a cluster on which splitting small arrays pays. XLA's number is what its buffer assignment
says of one device: arguments + outputs - outputs in donated buffers + temporaries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from autoshard import autoshard
from tests.helpers import eager_cluster
from tests.zoo import PROGRAMS, Program, get

MEDIAN = 0.10
"""Most that the median relative error may be."""

WORST = 0.30
"""Most that any may be."""

SEED = 0


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One program on one mesh.

    Attributes:
      program, mesh: what was planned, where.
      predicted_bytes, compiled_bytes: peak of one device.
      temporary_bytes: (predicted, compiled) of it.
      plan_s, compile_s: seconds.
      failure: what was raised instead, "" if nothing.
    """

    program: str
    mesh: str
    predicted_bytes: int = 0
    compiled_bytes: int = 0
    temporary_bytes: tuple[int, int] = (0, 0)
    plan_s: float = 0.0
    compile_s: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        """Relative error, positive where too much was predicted."""
        return self.predicted_bytes / self.compiled_bytes - 1.0


def measure(program: Program, mesh: str) -> Row:
    """Plans and compiles one program."""
    sizes = tuple(int(n) for n in mesh.split("x"))
    names = tuple("abc")[: len(sizes)]
    case = program.build(jnp.float32)
    over = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    step: Any = autoshard(
        mesh=over,
        devices=eager_cluster(),
        seed=SEED,
        static_argnums=case.static_argnums,
        static_argnames=case.static_argnames,
    )(case.step)
    args, kwargs = case.fresh()
    begin = time.perf_counter()
    memory = step.plan(*args, **kwargs).memory
    planned = time.perf_counter()
    stats = step.lower(*args, **kwargs).compile().memory_analysis()
    return Row(
        program.name,
        mesh,
        memory.peak_bytes,
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes,
        (memory.temporary_bytes, stats.temp_size_in_bytes),
        planned - begin,
        time.perf_counter() - planned,
    )


def show(rows: Sequence[Row]) -> Table:
    """The table."""
    table = Table("program", "mesh", "predicted KiB", "XLA KiB", "error", "temporaries KiB", "of XLA KiB", box=None)
    for row in rows:
        if row.failure:
            table.add_row(row.program, row.mesh, row.failure)
            continue
        kib = [n / 1024 for n in (row.predicted_bytes, row.compiled_bytes, *row.temporary_bytes)]
        cells = (f"{kib[0]:.1f}", f"{kib[1]:.1f}", f"{row.error:+.1%}", f"{kib[2]:.1f}", f"{kib[3]:.1f}")
        table.add_row(row.program, row.mesh, *cells)
    return table


def main() -> int:
    """Prints the table; 1 if an error is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help="2x4 if none is given; may be given several times")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("programs", nargs="*", help="all if none is given")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    programs = [get(name) for name in options.programs] if options.programs else PROGRAMS
    console = Console(width=130)
    rows: list[Row] = []
    for mesh in options.mesh or ["2x4"]:
        for program in programs:
            with console.status(f"{program.name}, {mesh}"):
                try:
                    rows.append(measure(program, mesh))
                except Exception as error:  # one program must not end the table
                    rows.append(Row(program.name, mesh, failure=f"{type(error).__name__}: {error}".split("\n")[0]))
    console.print(show(rows))
    errors = [abs(row.error) for row in rows if not row.failure]
    median, worst = statistics.median(errors), max(errors)
    failures = len(rows) - len(errors)
    console.print(f"{len(errors)} compared, {failures} failed; median error {median:.1%}, worst {worst:.1%}")
    if options.json is not None:
        record = {
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "device": "8 x cpu",
            "seed": SEED,
            "median": median,
            "worst": worst,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1))
    return int(median > MEDIAN or worst > WORST or failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
