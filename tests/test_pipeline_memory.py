"""A step that does not fit one process's memory trains as a pipeline of two: by the plan's limit and by the system's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autoshard import autoshard
from autoshard.errors import InfeasibleError
from tests.helpers import eager_cluster
from tests.memory_worker import STATE_BYTES, make_batch, make_state, step
from tests.test_processes import ROOT, free_port

MIB = 2**20
LIMIT = 7 * MIB
"""The small step has 6 MiB of state, and its gradients are 2 MiB more."""


@pytest.mark.slow
def test_a_step_that_does_not_fit_one_device_trains_in_two_stages() -> None:
    def small() -> Any:
        return make_state(256)

    batch, shapes = make_batch(256), jax.eval_shape(small)
    alone: Any = autoshard(step, devices=eager_cluster(1), mesh=(1,), memory_limit=LIMIT)
    with pytest.raises(InfeasibleError):
        alone.plan(shapes, batch)
    mine: Any = autoshard(step, devices=eager_cluster(2), stages=2, microbatches=4, memory_limit=LIMIT)
    assert mine.plan(shapes, batch).memory.peak_bytes <= LIMIT
    state, wanted, plain = mine.init(small), small(), jax.jit(step)
    for _ in range(3):
        state, value = mine(state, batch)
        wanted, other = plain(wanted, batch)
        np.testing.assert_allclose(float(value), float(other), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what a process maps on Linux only")
def test_a_step_that_kills_one_process_trains_in_two(tmp_path: Path) -> None:
    """Each process may have as much more as the state is, of which a stage has half; one has it all and gradients."""
    extra = STATE_BYTES // MIB
    alone = run(tmp_path, 1, extra)
    assert alone[0][0] != 0, alone[0][1][-2000:]
    assert len(losses(alone[0][1])) < 2
    both = run(tmp_path, 2, extra)
    free = run(tmp_path, 1, 8 * extra)
    for status, text in (*both, *free):
        assert status == 0, text[-3000:]
        np.testing.assert_allclose(losses(text), losses(free[0][1]), rtol=1e-4)


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"^loss (\S+)$", text, re.MULTILINE)]


def run(folder: Path, count: int, extra_mib: int) -> list[tuple[int, str]]:
    """The exit status and output of each process."""
    where, running = f"127.0.0.1:{free_port()}", list[subprocess.Popen[bytes]]()
    logs = [folder / f"{count}-{extra_mib}-{k}.log" for k in range(count)]
    try:
        for k, log in enumerate(logs):
            command = [sys.executable, "-m", "tests.memory_worker", str(k), str(count), where, str(extra_mib)]
            with log.open("wb") as file:
                made = subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=file, stderr=subprocess.STDOUT)
            running.append(made)
        for process in running:
            process.wait(120)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [(process.returncode, log.read_text(errors="replace")) for process, log in zip(running, logs, strict=True)]
