"""Pipelines over several processes on this machine, against plain jit (tests/process_worker.py compares)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "case"),
    [(2, 1, "mlp"), (2, 1, "transformer"), (2, 2, "transformer"), (4, 1, "mlp"), (2, 1, "memory")],
    ids=lambda value: str(value),
)
def test_equals_plain_jit(tmp_path: Path, processes: int, devices: int, case: str) -> None:
    """A stage a process, of one and of two devices; a stage on two processes; a step too large for one process."""
    where = f"127.0.0.1:{free_port()}"
    running: list[subprocess.Popen[bytes]] = []
    logs = [tmp_path / f"{k}.log" for k in range(processes)]
    try:
        for k, log in enumerate(logs):
            command = [sys.executable, "-W", "error", "-m", "tests.process_worker", str(k), str(processes), str(devices)]
            with log.open("wb") as file:
                running.append(
                    subprocess.Popen(
                        [*command, where, case], cwd=ROOT, env={**os.environ}, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        for process, log in zip(running, logs, strict=True):
            process.wait(90)
            assert "agrees" in log.read_text(), log.read_text()[-3000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
