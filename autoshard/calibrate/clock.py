"""How long a call takes: the median of calls, repeated until their spread is small or time is up.

Where a process has one core only, its time is what it used of that core: other programs that got the core meanwhile
are not the device's doing. Everywhere else it is the time on the wall.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import jax
import numpy as np

Clock = Callable[[], float]

ENOUGH = 9
"""Fewest calls of which a median and a spread are worth something."""

SMALL_SPREAD = 0.03
"""Interquartile range over median below which more calls say nothing new."""


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one quantity.

    Attributes:
      median: of all calls, in `unit`.
      low: what a tenth of the calls stay below, which other programs disturbed least.
      spread: interquartile range over median.
      count: number of calls.
      unit: "s".
    """

    median: float
    low: float
    spread: float
    count: int
    unit: str = "s"

    @classmethod
    def of(cls, samples: Sequence[float]) -> Measured:
        """Statistics of samples in seconds."""
        least, low, median, high = (float(x) for x in np.percentile(np.asarray(samples), [10, 25, 50, 75]))
        return cls(median, least, (high - low) / median if median > 0 else 0.0, len(samples))


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def best_clock() -> Clock:
    """The clock for work that stays in this process."""
    alone = jax.default_backend() == "cpu" and usable_cores() == 1
    return time.process_time if alone else time.perf_counter


def measure(call: Callable[[], object], limit_s: float, clock: Clock, agree: Callable[[int], int] = int) -> Measured:
    """Calls again and again.

    Args:
      call: runs the program and waits for its results.
      limit_s: seconds on the wall after which it ends, once there are three calls at least.
      clock: what is read before and after.
      agree: makes one number of the processes' numbers, that of the first; for calls that need all processes.
    """
    start = time.perf_counter()
    call()  # pages, caches, threads
    first = time.perf_counter() - start
    block = agree(max(3, min(ENOUGH, round(limit_s / 4 / max(first, 1e-7)))))
    samples: list[float] = []
    more = True
    while more:
        for _ in range(block):
            begin = clock()
            call()
            samples.append(clock() - begin)
        spent = time.perf_counter() - start
        calm = len(samples) >= ENOUGH and Measured.of(samples).spread < SMALL_SPREAD
        more = bool(agree(int(not calm and spent + block * spent / (len(samples) + 1) < limit_s)))
        block = agree(max(block, min(64, round(limit_s / 8 * len(samples) / spent))))
    return Measured.of(samples)
