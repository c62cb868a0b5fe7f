"""Pipelines over several processes on this machine, against plain jit (tests/process_worker.py compares)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
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
    [
        (2, 1, "transformer"),
        (2, 2, "mlp"),
        pytest.param(2, 1, "mlp", marks=pytest.mark.full),
        pytest.param(2, 2, "transformer", marks=pytest.mark.full),
        pytest.param(4, 1, "mlp", marks=pytest.mark.full),
    ],
)
def test_equals_plain_jit(tmp_path: Path, processes: int, devices: int, case: str) -> None:
    """A stage a process, of one and of two devices; a stage on two processes."""
    for text in outputs_of(tmp_path, processes, devices, case):
        assert "agrees" in text, text[-3000:]


@pytest.mark.full
def test_a_killed_process_is_named(tmp_path: Path) -> None:
    text, _ = outputs_of(tmp_path, 2, 1, "killed-1")
    assert "ProcessLostError: process 1 of 2 has told nothing for 15 s" in text, text[-3000:]


@pytest.mark.full
def test_the_first_process_is_killed(tmp_path: Path) -> None:
    start = time.monotonic()
    _, text = outputs_of(tmp_path, 2, 1, "killed-0")
    assert time.monotonic() - start < 60
    assert "the JAX distributed service detected fatal errors" in text, text[-3000:]  # JAX's own end, at once


def outputs_of(folder: Path, processes: int, devices: int, case: str) -> list[str]:
    """What each process wrote until it ended."""
    where = f"127.0.0.1:{free_port()}"
    running: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"{k}.log" for k in range(processes)]
    try:
        for k, log in enumerate(logs):
            command = [
                sys.executable,
                "-W",
                "error",
                "-m",
                "tests.process_worker",
                str(k),
                str(processes),
                str(devices),
            ]
            with log.open("wb") as file:
                running.append(
                    subprocess.Popen(
                        [*command, where, case], cwd=ROOT, env={**os.environ}, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        for process in running:
            process.wait(90)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [log.read_text() for log in logs]
