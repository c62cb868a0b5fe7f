"""Readable files of everything planning and emission made: one numbered file a pass.

000-trace.txt  001-duplicate_cheap.txt  002-mesh.txt ... 007-plan.json  008-plan.txt  009-constrain.txt
010-stablehlo-before.mlir (plain jit)  011-stablehlo-after.mlir (with the plan's shardings)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, final

from autoshard.errors import ArgumentError, explain
from autoshard.ir import Graph, print_graph
from autoshard.plan import Plan


@final
class Dumper:
    """Writes what it is told into a folder, in order; each step and signature gets a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                explain(f"dump_dir {str(folder)!r}: {error}", "a folder that can be written", "name another dump_dir")
            ) from error

    def __call__(self, name: str, what: Any) -> None:
        """Writes one item: a graph, a plan, or anything printable."""
        if isinstance(what, Graph):
            self._write(name, "txt", print_graph(what, sources=True))
        elif isinstance(what, Plan):
            self._write(name, "json", what.to_json())
            self._write(name, "txt", str(what))
        elif name.startswith("stablehlo"):
            self._write(name, "mlir", str(what))
        else:
            self._write(name, "txt", f"{what}\n")

    def _write(self, name: str, suffix: str, text: str) -> None:
        safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
        (self.folder / f"{self._count:03d}-{safe}.{suffix}").write_text(text)
        self._count += 1


def dump_folder(root: str | Path, step_name: str, number: int) -> Path:
    """The folder of one signature of one step."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", step_name)
    return Path(root) / f"{safe}-{number:02d}"
