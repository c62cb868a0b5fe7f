"""Collective bytes: predicted for the chosen plan against those of the compiled program, over the zoo and meshes.

    python -m bench.collectives [--mesh 2x4]... [--json FILE] [program]...

Run on eight CPU devices with a cluster on which splitting small arrays pays. Bytes are those of the whole buffer of one
group over its mesh axes, on both sides (`autoshard.runtime.hlo`); of a permute the compiled program names only pairs,
whose mesh axes are those along which linked devices differ.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from autoshard import autoshard
from autoshard.ir import MeshShape
from autoshard.plan import Plan
from autoshard.runtime import Collective, collectives
from tests.helpers import eager_cluster
from tests.zoo import PROGRAMS, Program

MESHES = ("8", "2x4", "2x2x2")
CLOSE = 0.05
"""Largest relative error of the sum that counts as met."""
SEED = 0

Row = tuple[str, tuple[str, ...]]
"""(kind, mesh axes)."""


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """One program on one mesh.

    Attributes:
      program, mesh: what was planned, where.
      predicted_bytes, compiled_bytes: of all collectives of a step.
      differences: for each kind and axes that differ, "kind axes": (predicted, compiled) bytes.
      rematerializations: XLA's warnings of an involuntary full rematerialization.
      plan_s, compile_s: seconds.
      error: what was raised instead, "" if nothing.
    """

    program: str
    mesh: str
    predicted_bytes: int = 0
    compiled_bytes: int = 0
    differences: Mapping[str, tuple[int, int]] | None = None
    rematerializations: int = 0
    plan_s: float = 0.0
    compile_s: float = 0.0
    error: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over compiled; 1 where there are none on either side."""
        if self.compiled_bytes == 0:
            return 1.0 if self.predicted_bytes == 0 else math.inf
        return self.predicted_bytes / self.compiled_bytes

    @property
    def close(self) -> bool:
        """Whether the sums agree."""
        return not self.error and abs(self.ratio - 1.0) <= CLOSE


def compiled_traffic(hlo_text: str, mesh: MeshShape) -> Counter[Row]:
    """Bytes of a compiled program's collectives by kind and mesh axes."""
    found: Counter[Row] = Counter()
    for c in collectives(hlo_text):
        axes, parts = _axes(c, mesh)
        scale = parts / c.group_size if c.kind == "permute" else 1
        found[c.kind, axes] += round(c.nbytes * scale) * c.times
    return found


def _axes(collective: Collective, mesh: MeshShape) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which devices of one group differ, and the product of their sizes."""
    shape = [size for _, size in mesh]
    differ = np.zeros(len(mesh), dtype=bool)
    for group in collective.groups:
        places = np.stack(np.unravel_index(np.array(group), shape))
        differ |= (places != places[:, :1]).any(axis=1)
    axes = tuple(name for (name, _), used in zip(mesh, differ, strict=True) if used)
    return axes, math.prod(size for (_, size), used in zip(mesh, differ, strict=True) if used)


def predicted_traffic(plan: Plan) -> Counter[Row]:
    """Bytes of a plan's collectives by kind and mesh axes."""
    names = [name for name, _ in plan.mesh]
    found: Counter[Row] = Counter()
    for c in plan.collectives:
        found[c.kind, tuple(sorted(c.axes, key=names.index))] += c.nbytes
    return found


def compare(program: Program, mesh: str) -> Comparison:
    """Plans and compiles a program in float32 on eight devices."""
    shape = tuple(int(n) for n in mesh.split("x"))
    names = tuple("abc"[: len(shape)])
    devices = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    case = program.build(jnp.float32)
    step: Any = autoshard(
        mesh=devices,
        devices=eager_cluster(),
        seed=SEED,
        static_argnums=case.static_argnums,
        static_argnames=case.static_argnames,
    )(case.step)
    args, kwargs = case.fresh()
    start = time.perf_counter()
    plan: Plan = step.plan(*args, **kwargs)
    planned = time.perf_counter()
    with _stderr() as said:
        text: str = step.lower(*args, **kwargs).compile().as_text() or ""
    done = time.perf_counter()
    mine, theirs = predicted_traffic(plan), compiled_traffic(text, plan.mesh)
    differences = {
        f"{kind} {','.join(axes)}": (mine[kind, axes], theirs[kind, axes])
        for kind, axes in sorted({*mine, *theirs})
        if mine[kind, axes] != theirs[kind, axes]
    }
    warnings = said[0].lower().count("involuntary full rematerialization")
    return Comparison(
        program.name, mesh, mine.total(), theirs.total(), differences, warnings, planned - start, done - planned
    )


@contextmanager
def _stderr() -> Generator[list[str]]:
    """What C++ writes to the standard error; the one entry is filled in at the end."""
    said = [""]
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said[0] = file.read().decode(errors="replace")


def table(rows: Sequence[Comparison]) -> Table:
    """All comparisons."""
    shown = Table(title="collective bytes a step, predicted and compiled")
    for column in ("program", "mesh", "predicted", "compiled", "ratio", "warnings", "where they differ"):
        shown.add_column(column, justify="right" if column in ("predicted", "compiled", "ratio") else "left")
    for row in rows:
        where = row.error or "; ".join(f"{k}: {a:,} / {b:,}" for k, (a, b) in (row.differences or {}).items())
        ratio = f"{row.ratio:.3f}" if row.close else f"[red]{row.ratio:.3f}"
        warnings = str(row.rematerializations or "")
        shown.add_row(
            row.program, row.mesh, f"{row.predicted_bytes:,}", f"{row.compiled_bytes:,}", ratio, warnings, where
        )
    return shown


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Collective bytes, predicted and compiled.")
    parser.add_argument("programs", nargs="*", help="names; all by default")
    parser.add_argument("--mesh", action="append", help="e.g. 2x4; several allowed")
    parser.add_argument("--json", type=Path, default=Path("collectives.json"))
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    console = Console(stderr=True)
    rows: list[Comparison] = []
    for mesh in options.mesh or MESHES:
        for program in PROGRAMS:
            if options.programs and program.name not in options.programs:
                continue
            try:
                rows.append(compare(program, mesh))
            except Exception as error:  # one broken program must not end the table
                rows.append(Comparison(program.name, mesh, error=f"{type(error).__name__}: {str(error)[:200]}"))
            console.print(f"{len(rows)}: {program.name} {mesh} {rows[-1].ratio:.3f} {rows[-1].error}")
    Console().print(table(rows))
    close = sum(row.close for row in rows)
    print(f"{close} of {len(rows)} within {CLOSE:.0%}")
    options.json.write_text(json.dumps(_record(rows), indent=1))


def _record(rows: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "seed": SEED,
        "rows": [asdict(row) | {"ratio": row.ratio if math.isfinite(row.ratio) else None} for row in rows],
    }


if __name__ == "__main__":
    main()
