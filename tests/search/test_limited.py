"""Problems under a memory limit: the engine against brute force and python-mip."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

from autoshard.search import Problem, Progress, Result, Solution, Usage, limited, solve
from autoshard.search.ilp import Memory, Program, solve_ilp
from autoshard.search.limited import Effort, solve_limited
from tests.problems import brute_force, least_shortage

SHAPES = ("tree", "cycle", "dense", "tight", "hopeless", "holes")


def make(seed: int) -> Problem:
    """A small problem of one of several shapes; nodes live over random times, some twice."""
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    n, steps = int(rng.integers(3, 8)), int(rng.integers(2, 6))
    sizes = [int(rng.integers(1, 5)) for _ in range(n)]
    pairs = {(int(rng.integers(0, j)), j) for j in range(1, n)}
    if shape == "cycle":
        pairs |= {(0, n - 1)}
    if shape in ("dense", "holes"):
        pairs |= {(i, j) for i in range(n) for j in range(i + 1, n) if rng.random() < 0.5}
    hole = 0.4 if shape == "holes" else 0.1
    costs = tuple(np.where(rng.random(k) < hole / 2, np.inf, rng.integers(0, 100, k)).astype(float) for k in sizes)
    edges = {
        (i, j): np.where(
            rng.random((sizes[i], sizes[j])) < hole, np.inf, rng.integers(0, 100, (sizes[i], sizes[j]))
        ).astype(float)
        for i, j in sorted(pairs)
    }
    usages: list[Usage] = []
    for i, k in enumerate(sizes):
        for _ in range(int(rng.integers(0, 3))):
            start = int(rng.integers(0, steps))
            usages.append(Usage(i, start, int(rng.integers(start, steps + 1)), rng.integers(0, 50, k).astype(float)))
    base = rng.integers(0, 10, steps).astype(float)
    least, most = _extent(usages, base)
    where = {"tight": 0.15, "hopeless": -0.1}.get(shape, 0.5)
    return Problem(costs, edges, tuple(usages), base, float(np.floor(least + where * (most - least))))


def _extent(usages: list[Usage], base: np.ndarray[Any, Any]) -> tuple[float, float]:
    low, high = base.copy(), base.copy()
    for u in usages:
        low[u.start : u.end] += u.nbytes.min()
        high[u.start : u.end] += u.nbytes.max()
    return float(low.max()), float(high.max())


def run(problem: Problem, patience: int = 5) -> Solution:
    return solve_limited(problem, float("-inf"), time.monotonic() + 30.0, (), Effort(0, 1e-9, patience, 1, None))


def mip_optimum(problem: Problem) -> float:
    """python-mip on the whole problem, nothing presolved; infinite if infeasible."""
    tables = [((i,), c) for i, c in enumerate(problem.costs)] + list(problem.edges.items())
    assert problem.limit is not None
    memory = Memory(problem.usages, problem.base, problem.limit)
    sizes = {i: len(c) for i, c in enumerate(problem.costs)}
    answer = solve_ilp(Program(sizes, tables, memory), budget_s=60.0, start=None, seed=0)
    assert answer.proved
    return problem.cost([answer.choice[i] for i in range(len(sizes))]) if answer.choice else float("inf")


@pytest.mark.parametrize("seed", range(300))
def test_equals_python_mip_and_brute_force(seed: int) -> None:
    problem = make(seed)
    best = mip_optimum(problem)
    assert brute_force(problem) == pytest.approx(best, rel=1e-9)
    for solution in (run(problem), solve(problem, budget_s=30.0, seed=0)):
        if np.isfinite(best):
            assert solution.result is Result.OPTIMAL
            assert problem.fits(solution.choice)
            assert solution.cost == pytest.approx(problem.cost(solution.choice), rel=1e-12)
            assert solution.cost == pytest.approx(best, rel=1e-9, abs=1e-9)
            assert solution.bound <= best + 1e-6
            continue
        assert solution.result is Result.INFEASIBLE
        assert solution.choice == ()
        missing = least_shortage(problem)
        if not np.isfinite(missing):  # not allowed, whatever the limit
            assert solution.shortage is None
        else:
            assert solution.shortage is not None
            assert solution.shortage.nbytes == pytest.approx(missing)
            assert 0 <= solution.shortage.time < len(problem.base)


def test_enough_are_infeasible_and_enough_are_bound_by_memory() -> None:
    """The comparison above says something of each kind."""
    infeasible = binding = 0
    for seed in range(300):
        problem = make(seed)
        best = brute_force(problem)
        infeasible += not np.isfinite(best)
        free = Problem(problem.costs, problem.edges, (), np.zeros(0), None)
        binding += np.isfinite(best) and brute_force(free) < best
    assert infeasible > 40
    assert binding > 60


def test_the_search_alone_finds_nearly_all_optima_and_its_bounds_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MEMORY_ENTRIES", -1)
    feasible = found = 0
    for seed in range(300):
        problem = make(seed)
        best = brute_force(problem)
        solution = run(problem, patience=30)
        assert solution.bound <= best + 1e-6 or not np.isfinite(best)
        if np.isfinite(best):
            feasible += 1
            assert not solution.choice or solution.cost >= best - 1e-6
            found += bool(solution.choice) and solution.cost <= best + 1e-6
            assert solution.result is not Result.INFEASIBLE
        else:
            assert not solution.choice
    assert found >= 0.97 * feasible


def test_one_worker_repeats_itself() -> None:
    problem = grid(0, 5)
    first, second = (run(problem, patience=3) for _ in range(2))
    assert first.choice == second.choice
    assert first.bound == second.bound


def test_two_workers_agree_with_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MEMORY_ENTRIES", -1)
    problem = grid(1, 8)
    effort = Effort(0, 1e-9, 20, 2, None)
    solution = solve_limited(problem, float("-inf"), time.monotonic() + 10.0, (), effort)
    assert problem.fits(solution.choice)
    assert solution.bound <= solution.cost


def test_interrupting_returns_the_best_answer() -> None:
    problem = grid(2, 20)

    def tell(progress: Progress) -> None:
        if np.isfinite(progress.cost):
            raise KeyboardInterrupt

    effort = Effort(0, 0.0, 10**9, 1, tell)
    solution = solve_limited(problem, float("-inf"), time.monotonic() + 60.0, (), effort)
    assert solution.stats["interrupted"]
    assert problem.fits(solution.choice)


def test_progress_only_gets_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MEMORY_ENTRIES", -1)
    problem = grid(3, 12)
    seen: list[Progress] = []
    effort = Effort(0, 1e-9, 10, 1, seen.append)
    solution = solve_limited(problem, float("-inf"), time.monotonic() + 20.0, (), effort)
    assert seen
    assert all(a.cost >= b.cost and a.bound <= b.bound for a, b in itertools.pairwise(seen))
    assert seen[-1].cost == pytest.approx(solution.cost)


def test_keeps_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MEMORY_ENTRIES", -1)
    problem = grid(4, 40)
    run(grid(0, 4))  # compiled now
    begun = time.monotonic()
    solution = solve_limited(problem, float("-inf"), begun + 3.0, (), Effort(0, 0.0, 10**9, 1, None))
    assert time.monotonic() - begun < 9.0
    assert problem.fits(solution.choice)


def grid(seed: int, side: int) -> Problem:
    """A square grid whose limit binds everywhere."""
    rng = np.random.default_rng(seed)
    count = side * side
    edges = {(i, i + 1): rng.random((4, 4)) for i in range(count) if (i + 1) % side}
    edges |= {(i, i + side): rng.random((4, 4)) for i in range(count - side)}
    usages = tuple(Usage(i, i // side, i // side + 3, np.array([4.0, 3.0, 2.0, 1.0])) for i in range(count))
    costs = tuple(np.sort(rng.random(4)) for _ in range(count))
    return Problem(costs, edges, usages, np.zeros(side + 2), 6.0 * side)


def test_a_legal_start_is_kept_even_if_the_search_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first node takes a choice that presolve drops: another one costs and holds less."""
    monkeypatch.setattr(limited, "MEMORY_ENTRIES", -1)
    problem = grid(5, 6)
    start = (3,) * 36
    worse = Problem(
        (np.append(problem.costs[0], 50.0), *problem.costs[1:]),
        {key: np.vstack([e, e.max(axis=0)]) if key[0] == 0 else e for key, e in problem.edges.items()},
        tuple(Usage(u.node, u.start, u.end, np.append(u.nbytes, 1.0)) if u.node == 0 else u for u in problem.usages),
        problem.base,
        problem.limit,
    )
    start = (4, *start[1:])
    assert worse.fits(start)
    solution = solve_limited(worse, float("-inf"), time.monotonic(), [start], Effort(0, 0.0, 1, 1, None))
    assert solution.choice
    assert solution.cost <= worse.cost(start)


def test_interrupting_from_any_thread() -> None:
    """`tell` runs in the thread that found something."""

    def tell(progress: Progress) -> None:
        if np.isfinite(progress.cost) and threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt

    effort = Effort(0, 0.0, 10**9, 2, tell)
    solution = solve_limited(grid(6, 16), float("-inf"), time.monotonic() + 30.0, (), effort)
    assert solution.choice
    assert solution.stats["interrupted"]
