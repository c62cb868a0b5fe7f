"""How quick the simulator is; without checks at run time, which cost more than what is measured."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from autoshard.costmodel import Block, Change, Simulation, pipeline_tasks, simulate


def test_resimulation_is_quick() -> None:
    graph = pipeline_tasks(uneven(8), 627)
    assert graph.size > 10_000
    found = simulate(graph)
    draw = random.Random(0)
    ratios: list[float] = []
    for _ in range(40):
        change = Change(draw.randrange(graph.size), time_s=draw.uniform(0.5, 3.0) * 1e-3)
        again, quick = best_of(15, lambda change=change: found.change([change]), time.thread_time)
        anew, slow = best_of(5, lambda again=again: simulate(again.graph), time.thread_time)
        assert np.array_equal(again.end, anew.end)
        ratios.append(slow / quick)
    assert np.median(ratios) >= 10.0, f"{np.median(ratios):.1f} times as fast"


def test_a_hundred_thousand_tasks_in_a_second() -> None:
    graph = pipeline_tasks(uneven(8), 6260)
    assert graph.size > 100_000
    _, took = best_of(3, lambda: simulate(graph), time.perf_counter)
    assert took < 1.0


def uneven(blocks: int) -> list[Block]:
    """Stages that take a little more or less."""
    draw = random.Random(1)
    return [Block(draw.uniform(0.8, 1.2) * 1e-3, draw.uniform(1.6, 2.4) * 1e-3) for _ in range(blocks)]


def best_of(times: int, run: Callable[[], Simulation], clock: Callable[[], float]) -> tuple[Simulation, float]:
    """What was returned last, and the least seconds it took."""
    found: list[tuple[Simulation, float]] = []
    for _ in range(times):
        start = clock()
        result = run()
        found.append((result, clock() - start))
    return found[-1][0], min(seconds for _, seconds in found)
