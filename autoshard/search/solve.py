"""Solving the sharding problem: message passing, elimination, prices and the ILP.

    no limit, or the optimum fits      descents give an answer, message passing a bound that prunes choices;
                                       eliminate what is left: optimal; else ILP on the core
    the optimum does not fit           price memory: min cost + sum_t lambda_t usage_t, lambda raised on the rows
                                       that are broken (subgradient); the cheapest legal answer starts the ILP

The ILP's bound and time limit give the gap that the plan reports.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from autoshard.search.dual import prune
from autoshard.search.eliminate import Reduced, reduce
from autoshard.search.ilp import Memory, solve_ilp
from autoshard.search.problem import Floats, Problem, Result, Solution, neighbours, pair

MAX_TABLE = 4_000_000
"""Largest table of the elimination: 32 MB of float64."""

SWEEPS = 100
"""Most sweeps of message passing; it stops when the bound stands still."""

CORE_TABLE = 20_000
"""Largest table when the rest goes to the ILP, whose variables these entries become."""

ILP_ENTRIES = 300_000
"""Most table entries given to the ILP: CBC needs minutes to load more."""


def solve(problem: Problem, *, budget_s: float, seed: int, starts: Sequence[Sequence[int]] = ()) -> Solution:
    """The best choice found within the budget.

    Args:
      problem: what to solve.
      budget_s: seconds; exact methods that end sooner return sooner.
      seed: of every random decision.
      starts: known choices, which the answer is never worse than (if they are legal).
    """
    deadline = time.monotonic() + budget_s
    relaxed = _unconstrained(problem, deadline, seed, starts)
    if relaxed.result is Result.INFEASIBLE or problem.fits(relaxed.choice):
        return relaxed
    return _priced(problem, relaxed, deadline, seed, starts)


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
        sizes = {i: len(reduced.kept[i]) for i in reduced.core}
        left = deadline - time.monotonic()
        answer = solve_ilp(sizes, reduced.tables, None, budget_s=left, start=start, seed=seed)
        bound = max(bound, answer.bound + reduced.constant)
        proved = answer.proved
        if answer.choice:
            choice = reduced.complete(answer.choice)
            if problem.cost(choice) < cost:
                best, cost = choice, problem.cost(choice)
    if not np.isfinite(cost):
        return Solution((), Result.INFEASIBLE, cost, bound, stats)
    result = Result.OPTIMAL if proved else Result.FEASIBLE
    return Solution(best, result, cost, cost if proved else min(bound, cost), stats)


def _priced(
    problem: Problem, relaxed: Solution, deadline: float, seed: int, starts: Sequence[Sequence[int]]
) -> Solution:
    """The cheapest legal choice found by pricing memory, improved by the ILP with memory rows."""
    assert problem.limit is not None, "only a limit can be broken"
    limit = problem.limit
    best: tuple[int, ...] = ()
    best_cost = float("inf")
    bound = relaxed.bound
    for start in starts:
        if problem.fits(start) and problem.cost(start) < best_cost:
            best, best_cost = tuple(start), problem.cost(start)
    for choice, dual in _price_path(problem, relaxed, deadline, seed):
        bound = max(bound, dual)
        polished = _polish(problem, choice) if problem.fits(choice) else _repair(problem, choice)
        if polished and problem.cost(polished) < best_cost:
            best, best_cost = polished, problem.cost(polished)
    entries = sum(e.size for e in problem.edges.values())
    stats: dict[str, object] = {"engine": "prices", "nodes": len(problem.costs), "entries": entries}
    left = deadline - time.monotonic()
    if entries <= ILP_ENTRIES and left > 0.2 and (best_cost - bound) > 1e-4 * abs(best_cost):
        tables = [((i,), c) for i, c in enumerate(problem.costs)]
        tables += [(pair_, e) for pair_, e in problem.edges.items()]
        memory = Memory(dict(enumerate(problem.usages)), problem.base, limit)
        start = dict(enumerate(best)) if best else None
        sizes = {i: len(c) for i, c in enumerate(problem.costs)}
        answer = solve_ilp(sizes, tables, memory, budget_s=left, start=start, seed=seed)
        stats["engine"] = "prices+ilp"
        if np.isfinite(answer.bound):
            bound = max(bound, answer.bound)
        if answer.choice:
            choice = tuple(answer.choice[i] for i in range(len(problem.costs)))
            if problem.fits(choice) and problem.cost(choice) < best_cost:
                best, best_cost = choice, problem.cost(choice)
            if answer.proved:
                return Solution(best, Result.OPTIMAL, best_cost, best_cost, stats)
        elif answer.proved and not best:
            return Solution((), Result.INFEASIBLE, float("inf"), float("inf"), stats)
    if not best:
        return Solution((), Result.INFEASIBLE, float("inf"), bound, stats)
    return Solution(best, Result.FEASIBLE, best_cost, min(bound, best_cost), stats)


def _price_path(problem: Problem, relaxed: Solution, deadline: float, seed: int):
    """(choice, dual bound) for rising prices of memory."""
    assert problem.limit is not None
    used = problem.usage(relaxed.choice)
    scale = max(abs(relaxed.cost), 1e-12) / problem.limit
    prices = np.where(used > problem.limit, scale * 0.1, 0.0)
    low, high = np.zeros_like(prices), None
    for step in range(24):
        if time.monotonic() > deadline and step > 6:
            return
        choice, value = _solve_priced(problem, prices, deadline, seed)
        if not choice:
            return
        yield choice, value
        used = problem.usage(choice)
        broken = used > problem.limit
        if broken.any():
            low = prices
            grow = np.where(broken, np.maximum(prices, scale * 0.05), prices)
            prices = np.where(broken, grow * 3.0, prices) if high is None else np.maximum((low + high) / 2, grow)
        else:
            high = prices
            if float(np.sum(np.abs(high - low))) <= 1e-3 * float(np.sum(np.abs(high))):
                return
            prices = (low + high) / 2


def _solve_priced(problem: Problem, prices: Floats, deadline: float, seed: int) -> tuple[tuple[int, ...], float]:
    """Best choice of the priced problem and, where it was solved exactly, the dual bound it proves."""
    assert problem.limit is not None
    costs = tuple(c + prices @ u for c, u in zip(problem.costs, problem.usages, strict=True))
    priced = Problem(costs, problem.edges, problem.usages, problem.base, None)
    solution = _unconstrained(priced, min(deadline, time.monotonic() + 5.0), seed, ())
    if not solution.choice:
        return (), float("-inf")
    return solution.choice, solution.bound + float(prices @ (problem.base - problem.limit))


def _polish(problem: Problem, choice: Sequence[int]) -> tuple[int, ...]:
    """Single moves that lower the cost and keep the limit, until none is left."""
    around = neighbours(problem)
    current = list(choice)
    used = problem.usage(current)
    limit = np.inf if problem.limit is None else problem.limit
    improved = True
    while improved:
        improved = False
        for i in range(len(problem.costs)):
            total = _local(problem, around[i], i, current)
            after = used[:, None] - problem.usages[i][:, [current[i]]] + problem.usages[i]
            total = np.where((after <= limit).all(axis=0), total, np.inf)
            s = int(np.argmin(total))
            if total[s] * (1 + 1e-12) < total[current[i]]:
                used = after[:, s]
                current[i] = s
                improved = True
    return tuple(current)


def _local(problem: Problem, around: Sequence[int], i: int, current: Sequence[int]) -> Floats:
    """Cost of each choice of one node with all others as they are."""
    total = problem.costs[i].copy()
    for j in around:
        total += pair(problem, i, j)[:, current[j]]
    return total


def _repair(problem: Problem, choice: Sequence[int]) -> tuple[int, ...]:
    """A legal choice from an illegal one: moves with the least cost per byte saved on broken rows; () if stuck."""
    assert problem.limit is not None
    around = neighbours(problem)
    current = list(choice)
    used = problem.usage(current)
    for _ in range(4 * len(current)):
        over = np.maximum(used - problem.limit, 0.0)
        if not over.any():
            return _polish(problem, current)
        best: tuple[float, int, int] | None = None
        for i, costs in enumerate(problem.costs):
            if len(costs) < 2:
                continue
            total = _local(problem, around[i], i, current)
            after = used[:, None] - problem.usages[i][:, [current[i]]] + problem.usages[i]
            saved = over.sum() - np.maximum(after - problem.limit, 0.0).sum(axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = np.where(saved > 0, (total - total[current[i]]) / saved, np.inf)
            s = int(np.argmin(rate))
            if np.isfinite(rate[s]) and (best is None or rate[s] < best[0]):
                best = (float(rate[s]), i, s)
        if best is None:
            return ()
        _, i, s = best
        used = used - problem.usages[i][:, current[i]] + problem.usages[i][:, s]
        current[i] = s
    return ()


def _descend(problem: Problem, starts: Sequence[Sequence[int]], seed: int) -> tuple[int, ...]:
    """The best of several single-move descents, memory left out."""
    rng = np.random.default_rng(seed)
    free = Problem(problem.costs, problem.edges, problem.usages, problem.base, None)
    begin = [list(start) for start in starts]
    begin.append([int(np.argmin(c)) for c in problem.costs])
    begin += [[int(rng.choice(np.flatnonzero(np.isfinite(c)))) for c in problem.costs] for _ in range(8)]
    return min((_polish(free, start) for start in begin), key=free.cost)


def _sizes(reduced: Reduced) -> dict[str, int]:
    return {
        "nodes": len(reduced.kept),
        "choices": int(sum(len(k) for k in reduced.kept)),
        "width": max((len(r.scope) for r in reduced.removed), default=0),
    }
