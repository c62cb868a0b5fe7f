"""Collects measured programs into a file of JSON lines; what is there is not measured again.

Workers (`worker.py`) measure, one on each core asked for. A program's time is the process's CPU time, so that other
processes on a shared machine cost little of it; its kernels' times are the profiler's. Each is the lowest quartile of a
visit, and the fastest of five visits. Where the two fastest visits differ by more than 10 %, the program's time is
noisy and left out; its kernels have spreads of their own.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from autoshard.errors import ArgumentError, explain

FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
"""One thread: XLA's own flag for its thread pool, and that of the runtime's."""

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
"""glibc keeps memory that was freed, so that a call finds its buffers mapped, as in a train loop that runs on."""

TIMEOUT_S = 400.0
BATCH = 10
"""Programs a worker visits in turn, and the most seconds they may take."""
SAMPLES = "samples.jsonl"


@final
@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did.

    Attributes:
      measured, noisy, failed: programs of this run.
      there: programs the file held before.
      seconds: of this run.
    """

    measured: int
    noisy: int
    failed: int
    there: int
    seconds: float


Tell = Callable[[int, int, Mapping[str, Any]], None]
"""Called after each program with how many are done, how many are wanted, and its record."""


def wanted_programs(programs: int, seed: int) -> list[int]:
    """The seeds of a collection; a longer list begins with the shorter."""
    return [seed * 1_000_000 + i for i in range(programs)]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """All records of a collection; a line cut short by an interrupt is left out.

    Raises:
      ArgumentError: no such file.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ArgumentError(
            explain(f"{path}: {error}", "samples collected by `autoshard learn`", "collect first")
        ) from error
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def good_samples(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One record a program, those left out that failed.

    What else runs on a machine only ever slows a program down, so the fastest visit of all sessions is nearest to the
    truth, of a program and of each kernel.

    Returns:
      Records with `time_s` (nan where all sessions were too noisy), `kernel_s` (seconds a run), `kernel_spread` (how
      much slower the second fastest visit was, as a part), and, of programs with two sessions, `again_s` and
      `kernel_again_s`: what the session found that was not the fastest.
    """
    found: dict[int, list[Mapping[str, Any]]] = {}
    for r in records:
        if "error" not in r:
            found.setdefault(r["seed"], []).append(r)
    merged: list[Mapping[str, Any]] = []
    for same in found.values():
        times = sorted(float(r["time_s"]) for r in same if not r["noisy"])
        sessions: dict[str, list[float]] = {}
        visits: dict[str, list[float]] = {}
        for r in same:
            for name, (_, *each) in r["kernels"].items():
                sessions.setdefault(name, []).append(min(each))
                visits.setdefault(name, []).extend(each)
        kernels = {name: sorted(each) for name, each in visits.items()}
        merged.append(
            {
                **same[0],
                "time_s": times[0] if times else float("nan"),
                "again_s": times[1] if len(times) > 1 else float("nan"),
                "kernel_s": {name: each[0] for name, each in kernels.items()},
                "kernel_spread": {n: each[1] / each[0] - 1 for n, each in kernels.items() if len(each) > 1},
                "kernel_again_s": {name: sorted(each)[1] for name, each in sessions.items() if len(each) > 1},
            }
        )
    return merged


def collect_samples(
    path: Path,
    names: Sequence[int],
    environment: Mapping[str, str],
    *,
    cores: Sequence[int] = (-1,),
    minutes: float = float("inf"),
    session: int = 0,
    tell: Tell | None = None,
) -> Collected:
    """Measures programs that the file does not hold yet, and appends them one by one.

    Args:
      path: file of JSON lines.
      names: seeds.
      environment: of this process; the workers get it with one thread and the host's CPU.
      cores: a worker for each, pinned to it; -1 is not pinned.
      minutes: when to stop, whatever is left.
      session: programs are measured once in each session; what another session found does not count as there.
      tell: progress.

    Returns:
      What was done. An interrupt ends the collection and keeps what is measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read_samples(path) if path.exists() else []
    there = {r["seed"] for r in known if r.get("session", 0) == session}
    todo = [name for name in names if name not in there]
    begun = time.monotonic()
    counts = {"measured": 0, "noisy": 0, "failed": 0}
    _end_line(path)
    with path.open("a") as file, _Pool(environment, cores, todo) as pool:
        try:
            for done in range(len(todo)):
                record = pool.next(begun + minutes * 60)
                if record is None:
                    break
                file.write(json.dumps(record | {"session": session}) + "\n")
                file.flush()
                outcome = "failed" if "error" in record else "noisy" if record["noisy"] else "measured"
                counts[outcome] += 1
                if tell is not None:
                    tell(done + 1, len(todo), record)
        except KeyboardInterrupt:
            pass
    return Collected(**counts, there=len(names) - len(todo), seconds=time.monotonic() - begun)


def _end_line(path: Path) -> None:
    """Ends a line that an interrupt cut short."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


@final
class _Pool:
    """Workers, each with a thread that feeds it and restarts it where it dies or takes too long."""

    def __init__(self, environment: Mapping[str, str], cores: Sequence[int], todo: Sequence[int]) -> None:
        self._environment = {
            **environment,
            **ALLOCATOR,
            "XLA_FLAGS": FLAGS,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for name in todo:
            self._todo.put(name)
        self._done: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._threads = [threading.Thread(target=self._feed, args=(core,), daemon=True) for core in cores]

    def __enter__(self) -> _Pool:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for process in list(self._processes.values()):
            process.kill()
        for thread in self._threads:
            thread.join(timeout=10)

    def next(self, deadline: float) -> dict[str, Any] | None:
        """The next record; None after the deadline, or when all workers are gone."""
        while time.monotonic() < deadline:
            try:
                return self._done.get(timeout=0.2)
            except queue.Empty:
                if not any(thread.is_alive() for thread in self._threads):
                    return None
        return None

    def _feed(self, core: int) -> None:
        while not self._stop.is_set():
            batch: list[int] = []
            while len(batch) < BATCH and not self._todo.empty():
                batch.append(self._todo.get())
            if not batch:
                break
            answers = self._ask(core, batch)
            if not self._stop.is_set():
                lost = batch[len(answers) :]
                answers += [{"seed": seed, "error": "the worker ended or took too long"} for seed in lost]
            for answer in answers:
                self._done.put(answer)
        process = self._processes.pop(core, None)
        if process is not None:
            _end(process)

    def _ask(self, core: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
        process = self._processes.get(core)
        if process is not None and process.poll() is not None:
            _end(process)
            process = None
        if process is None:
            process = self._processes[core] = self._start(core)
        assert process.stdin is not None, "the worker was started with pipes"
        assert process.stdout is not None, "the worker was started with pipes"
        watch = threading.Timer(TIMEOUT_S, process.kill)
        watch.start()
        answers: list[dict[str, Any]] = []
        try:
            process.stdin.write(" ".join(str(seed) for seed in seeds) + "\n")
            process.stdin.flush()
            for _ in seeds:
                answers.append(json.loads(process.stdout.readline()))
        except (OSError, json.JSONDecodeError):
            return answers
        finally:
            watch.cancel()
        return answers

    def _start(self, core: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "autoshard.costmodel.learned.worker", str(core)]
        return subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # An interrupt at the terminal is for the parent, which keeps what is measured.
            start_new_session=os.name == "posix",
        )


def _end(process: subprocess.Popen[str]) -> None:
    with process:  # closes its pipes and waits for it
        process.kill()
