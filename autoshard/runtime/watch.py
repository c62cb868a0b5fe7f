"""Whether the other processes of a pipeline live: each tells the coordination service of `jax.distributed` so.

A process that tells nothing new for `LOST_S` is lost. What happens then, in the others:

    in a call of the step           `ProcessLostError` is raised; so too where a program of the call failed
    anywhere else (`float(loss)`)   after `GRACE_S` the error is printed and the process ends with status 1: a wait in
                                    XLA cannot be interrupted, and may never end on GPUs

On CPUs Gloo notices first: `float(loss)` raises JAX's own error, and where nobody catches it the process says who was
lost when it exits. Process 0 has the coordination service; JAX itself ends the others at once when it is gone ("the JAX
distributed service detected fatal errors"), before a message of ours.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from typing import Any, final

import jax

from autoshard import jax_compat
from autoshard.errors import ProcessLostError, explain

BEAT_S = 1.0
LOST_S = 15.0
"""Ours: a loaded machine may keep a thread from running for seconds; JAX itself waits 100 s."""
GRACE_S = 5.0

FOLDER = "autoshard/alive/"
ENDED = "ended"


@final
class Watch:
    """The thread of one process that tells that it lives, and looks at the others."""

    def __init__(self, client: Any) -> None:
        self._client, self._me = client, jax.process_index()
        self._seen: dict[int, tuple[str, float]] = {}
        self._lost: tuple[int, ...] = ()
        self._told = False
        self._stop = threading.Event()
        self._beat(0)
        threading.Thread(target=self._run, name="autoshard-watch", daemon=True).start()
        atexit.register(self._exit)

    def check(self, cause: BaseException | None = None) -> None:
        """Raises ProcessLostError if a process is lost; after a failure it waits until that would be known."""
        until = time.monotonic() + (LOST_S + 3 * BEAT_S if cause is not None else 0.0)
        while not self._lost and time.monotonic() < until and not self._stop.is_set():
            time.sleep(BEAT_S / 5)
        if self._lost:
            self._told = True
            raise ProcessLostError(self._message(), self._lost) from cause

    def _message(self) -> str:
        names = ", ".join(map(str, self._lost))
        return explain(
            f"process {names} of {jax.process_count()} has told nothing for {LOST_S:.0f} s: it has died or cannot be "
            f"reached (this is process {self._me})",
            "all processes of a pipeline to run until its end",
            f"look at the log of process {names}, and start all processes again from the last checkpoint",
        )

    def _beat(self, count: int) -> None:
        self._client.key_value_set(f"{FOLDER}{self._me}", str(count), allow_overwrite=True)

    def _run(self) -> None:
        count, failures = 0, 0
        while not self._stop.wait(BEAT_S):
            count += 1
            try:
                self._beat(count)
                found = self._client.key_value_dir_get(FOLDER)
            except jax.errors.JaxRuntimeError:
                failures += 1
                if jax_compat.coordination_client() is None:  # jax.distributed.shutdown() was called
                    return
                if failures * BEAT_S >= LOST_S:
                    self._end((0,))
                    return
                continue
            failures = 0
            lost = self._look(found, time.monotonic())
            if lost:
                self._end(lost)
                return

    def _look(self, found: list[tuple[str, str]], now: float) -> tuple[int, ...]:
        """Who is lost, by what the service knows."""
        for key, text in found:
            process = int(key.rpartition("/")[2])
            known = self._seen.get(process)
            if known is None or known[0] != text:
                self._seen[process] = (text, now)
        return tuple(
            process
            for process, (text, since) in sorted(self._seen.items())
            if process != self._me and text != ENDED and now - since > LOST_S
        )

    def _end(self, lost: tuple[int, ...]) -> None:
        self._lost = lost
        if self._stop.wait(GRACE_S) or self._told:
            return
        self._say_and_exit()

    def _say_and_exit(self) -> None:
        if not self._told:
            print(f"autoshard.errors.ProcessLostError: {self._message()}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # JAX's own end would wait for the lost process

    def _exit(self) -> None:
        """At the end of the program: who was lost, if it fails; else that this process has ended."""
        failed: Any = getattr(sys, "last_value", None)
        if isinstance(failed, jax.errors.JaxRuntimeError | ValueError) and not self._lost:
            try:
                self.check(failed)
            except ProcessLostError:
                self._told = False
        if self._lost:
            self._say_and_exit()
        self._stop.set()
        if jax_compat.coordination_client() is not None:
            self._client.key_value_set(f"{FOLDER}{self._me}", ENDED, allow_overwrite=True)


@functools.cache
def watch() -> Watch | None:
    """This process's watch, None where it is the only process."""
    client = jax_compat.coordination_client()
    return None if client is None or jax.process_count() == 1 else Watch(client)
