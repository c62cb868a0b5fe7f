"""The solver against brute force, python-mip and random choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoshard.search import Problem, Result, solve
from tests.problems import brute_force, random_problem


@pytest.mark.parametrize("seed", range(70))
@pytest.mark.parametrize("tight", [False, True])
def test_equals_brute_force(seed: int, tight: bool) -> None:
    problem = random_problem(seed, tight)
    best = brute_force(problem)
    solution = solve(problem, budget_s=20.0, seed=0)
    if not np.isfinite(best):
        assert solution.result is Result.INFEASIBLE
        assert solution.choice == ()
        return
    assert problem.fits(solution.choice)
    assert solution.cost == pytest.approx(problem.cost(solution.choice))
    assert solution.cost == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert solution.bound <= best + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_never_above_random_choices(seed: int) -> None:
    problem = random_problem(seed, False, nodes=14, choices=6)
    rng = np.random.default_rng(seed)
    solution = solve(problem, budget_s=20.0, seed=0)
    for _ in range(200):
        assert solution.cost <= problem.cost([int(rng.integers(len(c))) for c in problem.costs])


def test_never_above_a_start() -> None:
    problem = random_problem(3, True, nodes=10, choices=6)
    rng = np.random.default_rng(0)
    starts = [tuple(int(rng.integers(len(c))) for c in problem.costs) for _ in range(50)]
    legal = [s for s in starts if problem.fits(s)]
    solution = solve(problem, budget_s=5.0, seed=0, starts=legal)
    for start in legal:
        assert solution.cost <= problem.cost(start)


def test_dense_problems_go_to_the_ilp() -> None:
    rng = np.random.default_rng(0)
    nodes, choices = 12, 4
    costs = tuple(rng.random(choices) for _ in range(nodes))
    edges = {pair: rng.random((choices, choices)) for pair in itertools.combinations(range(nodes), 2)}
    none = np.zeros(0)
    problem = Problem(costs, edges, (), none, None)
    solution = solve(problem, budget_s=60.0, seed=0)
    assert solution.result is Result.OPTIMAL
    assert solution.cost == pytest.approx(problem.cost(solution.choice))
