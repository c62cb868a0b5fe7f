"""Problems with a memory limit that binds, and large ones: presolve, prices, ILP.

contract      exact presolve; a row that nothing can meet is found here
lagrange      search under prices on memory: answer and bound
ilp           where the core is small: the proof, and what is missing if nothing fits
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from autoshard.search.contract import contract
from autoshard.search.ilp import Memory, Program, solve_ilp
from autoshard.search.lagrange import Search
from autoshard.search.network import network
from autoshard.search.problem import GAP, SLACK, Problem, Progress, Result, Shortage, Solution, Usage

MEMORY_ENTRIES = 30_000
"""Most entries of tables and memory rows together: with rows that bind HiGHS is far from proving more than that."""


@final
@dataclass(frozen=True, slots=True)
class Effort:
    """How to search; see `solve`."""

    seed: int
    gap: float
    patience: int
    workers: int
    tell: Callable[[Progress], None] | None


def solve_limited(
    problem: Problem, bound: float, deadline: float, starts: Sequence[Sequence[int]], effort: Effort
) -> Solution:
    """Presolve, search under prices, and the ILP where the core is small.

    Compiling the loops, the first time in a process, does not count against the deadline.

    Args:
      problem: what to solve.
      bound: a lower bound that is known already.
      deadline: `time.monotonic` seconds.
      starts: known choices.
      effort: how to search.
    """
    gap = effort.gap
    begun = time.monotonic()
    compile_loops()
    deadline += time.monotonic() - begun
    core = contract(problem)
    if core is None:
        stats: dict[str, Any] = {"engine": "presolve", "nodes": 0}
        return Solution((), Result.INFEASIBLE, float("inf"), float("inf"), stats)
    small = core.problem
    entries = sum(e.size for e in small.edges.values())
    stats = {"engine": "presolve", "nodes": len(small.costs), "entries": entries, "rows": len(small.base)}
    if small.limit is not None and len(small.base) and small.base.max() > small.limit * (1 + SLACK):
        t = int(small.base.argmax())
        shortage = _least_missing(small, deadline, effort.seed) or Shortage(t, float(small.base[t] - small.limit))
        shortage = replace(shortage, time=int(core.times[shortage.time]))
        return Solution((), Result.INFEASIBLE, float("inf"), float("inf"), stats, shortage)
    known = [x for start in starts if (x := core.restrict(start)) is not None]
    search = Search(network(small), [np.array(x, np.int64) for x in known], _shifted(effort.tell, core.constant))
    if small.costs:
        stats["engine"] = "presolve, prices"
        search.run(deadline, seed=effort.seed, workers=effort.workers, patience=effort.patience, gap=gap)
        bound = max(bound, search.bound + core.constant)
        stats["rounds"] = search.rounds
        stats["interrupted"] = search.interrupted
    else:
        search.offer(np.zeros(0, np.int64))
        bound = core.constant
    best, cost = None if search.best is None else tuple(search.best.tolist()), search.cost + core.constant
    proved, shortage = search.infeasible, None
    if cost - bound > gap * abs(cost) or best is None:
        exact = _exact(small, best, deadline, effort.seed, search.interrupted)
        if exact is not None:
            stats["engine"] = "presolve, prices, ILP"
            # "Infeasible" beside a legal answer is the ILP's tolerance: no proof.
            if exact.result is not Result.INFEASIBLE or best is None:
                proved = proved or exact.result in (Result.OPTIMAL, Result.INFEASIBLE)
                bound = max(bound, exact.bound + core.constant)
            shortage = exact.shortage
            if exact.choice and exact.cost + core.constant < cost:
                best, cost = exact.choice, exact.cost + core.constant
    # Starts that presolve excluded (another choice is as good) are answers too.
    answers = [tuple(s) for s in starts if problem.fits(s) and np.isfinite(problem.cost(s))]
    if best is not None:
        answers.append(core.expand(best))
    if not answers:
        if shortage is None and search.closest is not None:
            shortage = _shortage(small, search.closest.tolist())
        if shortage is not None:
            shortage = replace(shortage, time=int(core.times[shortage.time]))
        result = Result.INFEASIBLE if proved else Result.UNKNOWN
        return Solution((), result, float("inf"), float("inf") if proved else bound, stats, shortage)
    choice = min(answers, key=problem.cost)
    cost = problem.cost(choice)
    proved = proved or cost - bound <= GAP * abs(cost)
    return Solution(choice, Result.OPTIMAL if proved else Result.FEASIBLE, cost, cost if proved else bound, stats)


@functools.cache
def compile_loops() -> None:
    """Compiles the loops of presolve and search, or loads them from numba's cache, by solving a small problem."""
    nodes = 8
    ring = {(i, i + 1): np.arange(9.0).reshape(3, 3) ** 2 % 7 for i in range(nodes - 1)}
    usages = tuple(Usage(i, 0, 1 + i % 2, np.array([3.0, 2.0, 1.0])) for i in range(nodes))
    problem = Problem(tuple(np.array([0.0, 1.0, 2.0]) for _ in range(nodes)), ring, usages, np.zeros(2), 12.0)
    core = contract(problem)
    assert core is not None, "every choice is allowed"
    Search(network(core.problem), []).run(time.monotonic() + 600.0, seed=0, workers=1, patience=2, gap=0.0)


def _exact(
    problem: Problem, best: tuple[int, ...] | None, deadline: float, seed: int, interrupted: bool
) -> Solution | None:
    """The ILP with memory rows, and where nothing fits the least that is missing; None if it is too large."""
    left = deadline - time.monotonic()
    program = _program(problem)
    if interrupted or left <= 0 or program is None:
        return None
    start = None if best is None else dict(enumerate(best))
    answer = solve_ilp(program, budget_s=left, start=start, seed=seed)
    choice = tuple(answer.choice[i] for i in range(len(problem.costs))) if answer.choice else ()
    if choice and problem.fits(choice) and np.isfinite(cost := problem.cost(choice)):
        result = Result.OPTIMAL if answer.proved else Result.FEASIBLE
        return Solution(choice, result, cost, cost if answer.proved else answer.bound, {})
    if choice or not answer.proved:
        return Solution((), Result.UNKNOWN, float("inf"), answer.bound if not choice else float("-inf"), {})
    shortage = None if problem.limit is None else _least_missing(problem, deadline, seed)
    return Solution((), Result.INFEASIBLE, float("inf"), float("inf"), {}, shortage)


def _program(problem: Problem) -> Program | None:
    """The ILP of a problem; None if it is too large."""
    rows = sum((u.end - u.start) * len(u.nbytes) for u in problem.usages)
    if rows + sum(e.size for e in problem.edges.values()) > MEMORY_ENTRIES:
        return None
    tables = [((i,), c) for i, c in enumerate(problem.costs)] + list(problem.edges.items())
    memory = None if problem.limit is None else Memory(problem.usages, problem.base, problem.limit)
    return Program({i: len(c) for i, c in enumerate(problem.costs)}, tables, memory)


def _least_missing(problem: Problem, deadline: float, seed: int) -> Shortage | None:
    """By how much the best answer misses the limit, by the ILP; None if that is too large, or nothing is allowed."""
    program = _program(problem)
    if program is None or not problem.costs:
        return None
    left = max(deadline - time.monotonic(), 1.0)
    least = solve_ilp(replace(program, soft=True), budget_s=left, start=None, seed=seed)
    return _shortage(problem, [least.choice[i] for i in range(len(problem.costs))]) if least.choice else None


def _shortage(problem: Problem, choice: Sequence[int]) -> Shortage | None:
    """Where an answer misses the limit by most."""
    assert problem.limit is not None, "only a limit can be missed"
    over = problem.usage(choice) - problem.limit
    t = int(over.argmax())
    return Shortage(t, float(over[t])) if over[t] > 0 else None


def _shifted(tell: Callable[[Progress], None] | None, constant: float) -> Callable[[Progress], None] | None:
    """Progress of the core as progress of the whole."""
    if tell is None:
        return None
    return lambda p: tell(replace(p, cost=p.cost + constant, bound=p.bound + constant))
