"""The child process of a deviceless compile: `python -P deviceless_worker.py FOLDER`.

XLA's GPU compiler wants its settings in the environment before it starts, so it never runs in the user's process. The
folder holds what is asked (`request.json`, `program.mlir`) and gets what was found:

    started       exists as soon as XLA begins to compile
    result.json   {"memory": ..., "compile_s": ...}, or {"error": ...} where XLA refused the program
    program.hlo   the compiled program
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from autoshard.jax_compat import LoweredForGpu, compile_for_gpus

MEMORY = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
    "peak_memory_in_bytes",
)


def run(folder: Path) -> None:
    """Compiles what the folder asks for."""
    request: dict[str, Any] = json.loads((folder / "request.json").read_text())
    lowered = LoweredForGpu(
        (folder / "program.mlir").read_bytes(), tuple(request["inputs"]), tuple(request["outputs"]), request["shardy"]
    )
    (folder / "started").touch()
    begin = time.perf_counter()
    try:
        compiled = compile_for_gpus(lowered, request["topology"], request["target"], request["devices"])
    except Exception as error:  # whatever XLA raises is the answer
        _write(folder, {"error": f"{type(error).__name__}: {error}"})
        return
    seconds = time.perf_counter() - begin
    (folder / "program.hlo").write_text("\n\n".join(m.to_string() for m in compiled.hlo_modules()))
    stats = compiled.get_compiled_memory_stats()
    _write(folder, {"memory": {name: int(getattr(stats, name)) for name in MEMORY}, "compile_s": seconds})


def _write(folder: Path, result: dict[str, Any]) -> None:
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
