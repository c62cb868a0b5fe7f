"""Runs the solver on instances of the IOPDDL contest (ASPLOS 2025) and judges its answers."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from autoshard.search.collection import collection_paused
from autoshard.search.contest import Verdict, judge, read_instance
from autoshard.search.problem import GAP, Progress, Solution
from autoshard.search.solve import solve

BEST = {
    "asplos-2025-iopddl-A": 6_548_641_531,
    "asplos-2025-iopddl-G": 217_039,
    "asplos-2025-iopddl-M": 49_928_460_991,
    "asplos-2025-iopddl-S": 1_534_613_444,
}
"""Best cost of any team in the contest, by instance."""

MARGIN_S = 0.3
"""What is left of the time limit for the last step of the search and for writing the answer."""

FOREVER = 10**9


@final
@dataclass(frozen=True, slots=True)
class Run:
    """One instance, solved.

    Attributes:
      name: of the instance.
      answer: a strategy for each node; empty if none was found.
      verdict: of the answer, by code that shares nothing with the solver; None without an answer.
      solution: what the solver says.
      read_s, total_s: seconds of reading, and of all from the first byte read to the answer.
      peak_rss: most memory of this process so far, bytes.
    """

    name: str
    answer: tuple[int, ...]
    verdict: Verdict | None
    solution: Solution
    read_s: float
    total_s: float
    peak_rss: int

    @property
    def ratio(self) -> float | None:
        """Cost over the best known; None where none is known or the answer is not legal."""
        best = BEST.get(self.name)
        return None if best is None or self.verdict is None or not self.verdict.legal else self.verdict.cost / best

    def to_dict(self) -> dict[str, Any]:
        """What the table shows and more, for JSON."""
        verdict, shortage = self.verdict, self.solution.shortage
        return {
            "instance": self.name,
            "legal": verdict is not None and verdict.legal,
            "faults": list(verdict.faults) if verdict is not None else [self.solution.result.value],
            "cost": verdict.cost if verdict is not None else None,
            "best_known": BEST.get(self.name),
            "ratio": self.ratio,
            "bound": self.solution.bound if np.isfinite(self.solution.bound) else None,
            "gap": self.solution.gap if self.answer else None,
            "result": self.solution.result.name.lower(),
            "peak_usage": verdict.peak if verdict is not None else None,
            "usage_limit": verdict.limit if verdict is not None else None,
            "missing": None if shortage is None else {"time": shortage.time, "bytes": shortage.nbytes},
            "read_s": self.read_s,
            "total_s": self.total_s,
            "peak_rss": self.peak_rss,
            "solver": dict(self.solution.stats),
        }


def run_instance(
    path: Path, *, time_limit_s: float, seed: int, workers: int, tell: Callable[[Progress], None] | None = None
) -> Run:
    """Reads one file and solves it within a time limit, reading included.

    Args:
      path: JSON, gzipped or not.
      time_limit_s: seconds from the first byte read.
      seed: of the search.
      workers: threads of the search.
      tell: called with every better cost or bound.

    Raises:
      InstanceError: the file is malformed.
    """
    begun = time.monotonic()
    with collection_paused():
        instance = read_instance(path)
        read_s = time.monotonic() - begun
        left = max(time_limit_s - MARGIN_S - read_s, 0.0)
        solution = solve(
            instance.problem, budget_s=left, seed=seed, gap=GAP, patience=FOREVER, workers=workers, tell=tell
        )
    total_s = time.monotonic() - begun
    answer = solution.choice[: instance.nodes]
    verdict = judge(instance.raw, answer) if answer else None
    # Linux counts kilobytes, macOS bytes.
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Run(instance.name, answer, verdict, solution, read_s, total_s, rss)


def warm_up() -> float:
    """Compiles the solver's loops, or loads them from numba's cache; the seconds it took."""
    from autoshard.search.limited import compile_loops  # loads numba

    begun = time.monotonic()
    compile_loops()
    return time.monotonic() - begun
