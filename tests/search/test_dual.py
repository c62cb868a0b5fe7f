"""The bound is a bound, and pruning keeps the best answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest

from autoshard.search import Problem
from autoshard.search.dual import Dual, prune
from autoshard.search.eliminate import reduce, undominated
from tests.problems import brute_force, random_problem

SEEDS = range(40)


def everything(problem: Problem) -> list[np.ndarray]:
    return [np.flatnonzero(np.isfinite(c)) for c in problem.costs]


def least(problem: Problem, kept: Sequence[np.ndarray]) -> float:
    """The best cost among the kept choices."""
    return min(problem.cost(c) for c in itertools.product(*(k.tolist() for k in kept)))


def some_answer(problem: Problem) -> tuple[int, ...] | None:
    kept = everything(problem)
    if any(len(k) == 0 for k in kept):
        return None
    return tuple(int(k[0]) for k in kept)


def feasible(seed: int, nodes: int = 6) -> tuple[Problem, tuple[int, ...]]:
    problem = random_problem(seed, False, nodes=nodes)
    start = some_answer(problem)
    if start is None:
        pytest.skip("no finite choice at some node")
    return problem, start


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_rises_and_stays_below_the_optimum(seed: int) -> None:
    problem, start = feasible(seed)
    best = brute_force(problem)
    dual = Dual(problem, everything(problem), start)
    last = dual.bound()
    for _ in range(15):
        dual.sweep()
        assert dual.bound() >= last - 1e-9
        last = dual.bound()
        assert last <= best + 1e-9
        assert dual.best_cost == problem.cost(dual.best) >= best - 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_sweeps_move_costs_and_change_no_total(seed: int) -> None:
    problem, start = feasible(seed)
    kept = everything(problem)
    dual = Dual(problem, kept, start)
    for _ in range(3):
        dual.sweep()
    rng = np.random.default_rng(seed)
    for _ in range(20):
        at = [int(rng.integers(len(k))) for k in kept]
        moved = sum(float(c[s]) for c, s in zip(dual.nodes, at, strict=True))
        moved += sum(float(e[at[i], at[j]]) for (i, j), e in dual.edges.items())
        assert moved == pytest.approx(problem.cost([int(k[s]) for k, s in zip(kept, at, strict=True)]))


@pytest.mark.parametrize("seed", SEEDS)
def test_pruning_keeps_the_best_answer(seed: int) -> None:
    problem, start = feasible(seed)
    best = brute_force(problem)
    pruned = prune(problem, everything(problem), start, deadline=time.monotonic() + 20, sweeps=100)
    assert min(least(problem, pruned.kept), problem.cost(pruned.best)) == pytest.approx(best)
    assert pruned.bound <= best + 1e-9


def test_trees_are_solved_by_the_bound() -> None:
    rng = np.random.default_rng(0)
    costs = tuple(rng.random(4) for _ in range(7))
    edges = {((i - 1) // 2, i): rng.random((4, 4)) for i in range(1, 7)}
    problem = Problem(costs, edges, (), np.zeros(0), None)
    pruned = prune(problem, everything(problem), (0,) * 7, deadline=time.monotonic() + 20, sweeps=100)
    best = brute_force(problem)
    assert pruned.bound == pytest.approx(best)
    assert problem.cost(pruned.best) == pytest.approx(best)


@pytest.mark.parametrize("seed", SEEDS)
def test_dominated_choices_are_superfluous(seed: int) -> None:
    problem, _ = feasible(seed)
    kept = undominated(problem, everything(problem))
    assert least(problem, kept) == pytest.approx(brute_force(problem))


@pytest.mark.parametrize("table", [1, 16, 10_000])
@pytest.mark.parametrize("seed", range(15))
def test_elimination_completes_a_core_to_the_best_answer(seed: int, table: int) -> None:
    problem, _ = feasible(seed)
    reduced = reduce(problem, table, everything(problem))
    ranges = [range(len(reduced.kept[i])) for i in reduced.core]
    answers = [reduced.complete(dict(zip(reduced.core, core, strict=True))) for core in itertools.product(*ranges)]
    assert min(problem.cost(a) for a in answers) == pytest.approx(brute_force(problem))
