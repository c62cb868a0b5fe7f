"""A call of a compiled step costs at most 1.2 times what JAX's own dispatch does (bench/dispatch.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.dispatch import LIMIT

ROOT = Path(__file__).parents[1]
TRIES = 6
"""The machine may be busy: the best of some tries counts, each the median over interleaved blocks."""


@pytest.mark.slow
def test_dispatch(tmp_path: Path) -> None:
    """In processes of their own: here jaxtyping and beartype check every call."""
    file = tmp_path / "dispatch.json"
    command = [sys.executable, "-m", "bench.dispatch", "--blocks", "20", "--calls", "30", "--json", str(file)]
    lowest: dict[str, float] = {}
    for _ in range(TRIES):
        run = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False)
        assert file.exists(), run.stderr
        for row in json.loads(file.read_text())["rows"]:
            name = f"{row['name']}, {row['devices']} devices"
            lowest[name] = min(row["ratio"], lowest.get(name, row["ratio"]))
        if max(lowest.values()) <= LIMIT:
            break
    assert len(lowest) == 8
    assert max(lowest.values()) <= LIMIT, lowest
