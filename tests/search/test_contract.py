"""Presolve keeps the optimum, and its answers are the problem's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoshard.search import Problem, Usage
from autoshard.search.contract import contract
from autoshard.search.rows import keep_rows, needed_rows
from tests.problems import brute_force
from tests.search.test_limited import make


@pytest.mark.parametrize("seed", range(120))
def test_keeps_the_optimum(seed: int) -> None:
    problem = make(seed)
    core = contract(problem)
    if core is None:
        free = Problem(problem.costs, problem.edges, (), np.zeros(0), None)
        assert not np.isfinite(brute_force(free))
        return
    small = core.problem
    best = brute_force(small) if small.costs else (0.0 if small.fits(()) else np.inf)
    assert best + core.constant == pytest.approx(brute_force(problem), rel=1e-9)


@pytest.mark.parametrize("seed", range(120))
def test_answers_are_the_problems(seed: int) -> None:
    problem = make(seed)
    core = contract(problem)
    if core is None:
        return
    for choice in itertools.islice(itertools.product(*(range(len(c)) for c in core.problem.costs)), 200):
        full = core.expand(choice)
        assert core.problem.cost(choice) + core.constant == pytest.approx(problem.cost(full), rel=1e-9)
        assert core.problem.fits(choice) == problem.fits(full)
        assert core.restrict(full) == choice


def test_a_chain_without_memory_vanishes() -> None:
    rng = np.random.default_rng(0)
    costs = tuple(rng.random(5) for _ in range(50))
    edges = {(i, i + 1): rng.random((5, 5)) for i in range(49)}
    core = contract(Problem(costs, edges, (), np.zeros(0), None))
    assert core is not None
    assert not core.problem.costs
    choice = core.expand(())
    least = costs[0]
    for i in range(49):
        least = (least[:, None] + edges[i, i + 1]).min(axis=0) + costs[i + 1]
    assert Problem(costs, edges, (), np.zeros(0), None).cost(choice) == pytest.approx(least.min())


def test_followers_are_merged_through_a_cycle() -> None:
    """Three nodes tied to one another in a ring of permutations have one decision, and only where the ring closes."""
    tie = np.where(np.eye(3) > 0, 0.0, np.inf)
    shift = np.roll(tie, 1, axis=1)
    costs = tuple(np.array([1.0, 2.0, 4.0]) for _ in range(3))
    same = contract(Problem(costs, {(0, 1): tie, (1, 2): tie, (0, 2): tie}, (), np.zeros(0), None))
    assert same is not None
    assert same.expand([0] * len(same.nodes)) == (0, 0, 0)
    assert contract(Problem(costs, {(0, 1): tie, (1, 2): tie, (0, 2): shift}, (), np.zeros(0), None)) is None


@pytest.mark.parametrize("seed", range(60))
def test_rows_that_are_dropped_say_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = 12
    usages: list[Usage] = []
    for i in range(6):
        start = int(rng.integers(0, steps))
        usages.append(Usage(i, start, int(rng.integers(start, steps + 1)), np.array([0.0, *rng.integers(0, 9, 2)])))
    base = rng.integers(0, 6, steps).astype(float)
    problem = Problem(tuple(np.zeros(3) for _ in range(6)), {}, tuple(usages), base, 14.0)
    rows = needed_rows(problem.usages, base, 14.0)
    held, less = keep_rows(problem.usages, base, rows)
    small = Problem(problem.costs, {}, held, less, 14.0)
    for choice in itertools.product(range(3), repeat=6):
        assert small.fits(choice) == problem.fits(choice)


def test_most_rows_of_a_sweep_are_implied() -> None:
    usages = tuple(Usage(i, i, i + 5, np.array([0.0, 1.0])) for i in range(100))
    assert len(needed_rows(usages, np.zeros(105), 3.5)) < 105
