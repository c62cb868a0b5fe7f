"""Solving the sharding problem.

    no limit, or the optimum fits      descents give an answer, message passing a bound that prunes choices;
                                       eliminate what is left: optimal; else ILP on the core
    the optimum does not fit, or       `limited`: presolve, search under prices on memory, and where the core is small
    the problem is large               the ILP with memory rows, which proves the optimum

Every answer has a lower bound; where there is none that fits, the solution says what is missing and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.search.dual import prune
from autoshard.search.eliminate import Reduced, reduce
from autoshard.search.ilp import Program, solve_ilp
from autoshard.search.problem import GAP, Floats, Problem, Progress, Result, Solution, neighbours, pair

MAX_TABLE = 4_000_000
"""Largest table of the elimination: 32 MB of float64."""

SWEEPS = 100
"""Most sweeps of message passing; it stops when the bound stands still."""

CORE_TABLE = 20_000
"""Largest table when the rest goes to the ILP, whose variables these entries become."""

ILP_ENTRIES = 300_000
"""Most table entries given to the ILP: its solver needs minutes to load more."""

LARGE = 600
"""Nodes from which on a problem is presolved and searched by the compiled loops, limit or not."""

PATIENCE = 100
"""Rounds without anything better after which a search of the compiler's problems ends."""


def solve(
    problem: Problem,
    *,
    budget_s: float,
    seed: int,
    starts: Sequence[Sequence[int]] = (),
    gap: float = GAP,
    patience: int = PATIENCE,
    workers: int = 1,
    tell: Callable[[Progress], None] | None = None,
) -> Solution:
    """The best choice found within the budget.

    Args:
      problem: what to solve.
      budget_s: seconds; exact methods that end sooner return sooner.
      seed: of every random decision.
      starts: known choices, which the answer is never worse than (if they are legal).
      gap: relative distance of cost and bound with which a search under a limit is content.
      patience: rounds without anything better after which such a search ends.
      workers: its threads; with one, the course depends on the seed alone as long as the budget does not end it.
      tell: called with every better cost or bound. `KeyboardInterrupt` ends a search, the best answer is returned, and
        `stats["interrupted"]` says so.
    """
    deadline = time.monotonic() + budget_s
    bound = float("-inf")
    if len(problem.costs) < LARGE:
        relaxed = _unconstrained(problem, deadline, seed, starts)
        if relaxed.result is Result.INFEASIBLE or (relaxed.choice and problem.fits(relaxed.choice)):
            return relaxed
        bound = relaxed.bound
    from autoshard.search.limited import Effort, solve_limited  # loads numba: half a second that most plans do not need

    return solve_limited(problem, bound, deadline, starts, Effort(seed, gap, patience, workers, tell))


def _unconstrained(problem: Problem, deadline: float, seed: int, starts: Sequence[Sequence[int]]) -> Solution:
    """The optimum without memory rows, or the best found."""
    kept = [np.flatnonzero(np.isfinite(c)) for c in problem.costs]
    if any(len(k) == 0 for k in kept):
        return Solution((), Result.INFEASIBLE, float("inf"), float("inf"), {"engine": "elimination"})
    best = _descend(problem, starts, seed)
    cost, bound = problem.cost(best), float("-inf")
    if np.isfinite(cost):
        pruned = prune(problem, kept, best, deadline=deadline, sweeps=SWEEPS)
        kept, best, bound = list(pruned.kept), pruned.best, pruned.bound
        cost = problem.cost(best)
    reduced = reduce(problem, MAX_TABLE, kept)
    if not reduced.core:
        choice = reduced.complete({})
        if problem.cost(choice) < cost:
            best, cost = choice, problem.cost(choice)
        if not np.isfinite(cost):
            return Solution((), Result.INFEASIBLE, cost, cost, {"engine": "elimination"})
        return Solution(best, Result.OPTIMAL, cost, cost, {"engine": "message passing, elimination", **_sizes(reduced)})
    return _core(problem, reduce(problem, CORE_TABLE, kept), best, bound, deadline, seed)


def _core(
    problem: Problem, reduced: Reduced, best: tuple[int, ...], bound: float, deadline: float, seed: int
) -> Solution:
    """The ILP on what elimination left, started from a known answer."""
    cost = problem.cost(best)
    entries = sum(t.size for s, t in reduced.tables if len(s) > 1)
    stats: dict[str, object] = {"engine": "message passing", "core": len(reduced.core), "entries": entries}
    proved = False
    if entries <= ILP_ENTRIES and deadline > time.monotonic():
        stats["engine"] = "message passing, ILP"
        position = [{int(s): k for k, s in enumerate(kept)} for kept in reduced.kept]
        known = all(best[i] in position[i] for i in reduced.core) and np.isfinite(cost)
        start = {i: position[i][best[i]] for i in reduced.core} if known else None
        program = Program({i: len(reduced.kept[i]) for i in reduced.core}, reduced.tables, None)
        answer = solve_ilp(program, budget_s=deadline - time.monotonic(), start=start, seed=seed)
        bound = max(bound, answer.bound + reduced.constant)
        proved = answer.proved
        if answer.choice:
            choice = reduced.complete(answer.choice)
            if problem.cost(choice) < cost:
                best, cost = choice, problem.cost(choice)
    if not np.isfinite(cost):
        result = Result.INFEASIBLE if proved else Result.UNKNOWN
        return Solution((), result, cost, bound, stats)
    result = Result.OPTIMAL if proved else Result.FEASIBLE
    return Solution(best, result, cost, cost if proved else min(bound, cost), stats)


def _descend(problem: Problem, starts: Sequence[Sequence[int]], seed: int) -> tuple[int, ...]:
    """The best of several single-move descents, memory left out."""
    rng = np.random.default_rng(seed)
    begin = [list(start) for start in starts]
    begin.append([int(np.argmin(c)) for c in problem.costs])
    begin += [[int(rng.choice(np.flatnonzero(np.isfinite(c)))) for c in problem.costs] for _ in range(8)]
    around = neighbours(problem)
    return min((_polish(problem, around, start) for start in begin), key=problem.cost)


def _polish(problem: Problem, around: Sequence[Sequence[int]], choice: Sequence[int]) -> tuple[int, ...]:
    """Single moves that lower the cost, until none is left."""
    current = list(choice)
    improved = True
    while improved:
        improved = False
        for i in range(len(problem.costs)):
            total = _local(problem, around[i], i, current)
            s = int(np.argmin(total))
            if total[s] * (1 + 1e-12) < total[current[i]]:
                current[i] = s
                improved = True
    return tuple(current)


def _local(problem: Problem, around: Sequence[int], i: int, current: Sequence[int]) -> Floats:
    """Cost of each choice of one node with all others as they are."""
    total = problem.costs[i].copy()
    for j in around:
        total += pair(problem, i, j)[:, current[j]]
    return total


def _sizes(reduced: Reduced) -> dict[str, int]:
    return {
        "nodes": len(reduced.kept),
        "choices": int(sum(len(k) for k in reduced.kept)),
        "width": max((len(r.scope) for r in reduced.removed), default=0),
    }
