"""Schedules in the simulator: the same times as the schedules' own clock, memory as verified, links shared."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autoshard.costmodel import RankLink, bubble_share, schedule_tasks, simulate
from autoshard.errors import ArgumentError
from autoshard.schedules import (
    Send,
    eager_one_f_one_b,
    idle_share,
    interleaved,
    list_schedule,
    makespan_s,
    one_f_one_b,
    uniform_times,
    verify,
    zb_h1,
)
from tests.schedules.problems import GENERATORS, random_listed, random_times


@pytest.mark.parametrize("name", [*GENERATORS, "listed"])
def test_the_same_clock(name: str) -> None:
    """The simulator and `makespan_s`, which list scheduling uses, agree to the simulator's ticks."""
    draw = random.Random(name)
    for _ in range(40):
        ranks, microbatches = draw.randrange(1, 6), draw.randrange(1, 10)
        if name == "listed":
            schedule, times, _ = random_listed(draw, ranks, microbatches)
        else:
            schedule = GENERATORS[name](draw, ranks, microbatches)
            times = random_times(draw, schedule.stages)
        if draw.random() < 0.5:
            times = replace(times, all_reduce_s=tuple(draw.uniform(0.0, 5.0) for _ in range(schedule.stages)))
        found = simulate(schedule_tasks(schedule, times))
        assert found.makespan_s == pytest.approx(makespan_s(schedule, times), rel=1e-9)
        assert bubble_share(found, schedule.ranks) == pytest.approx(idle_share(schedule, times), abs=1e-9)


def test_memory_over_time() -> None:
    """Activations of what is held, and what is kept."""
    for schedule in (one_f_one_b(4, 8), zb_h1(4, 8), interleaved(4, 8, 2)):
        times = replace(
            uniform_times(schedule.stages),
            held_bytes=(100,) * schedule.stages,
            kept_bytes=(7,) * schedule.stages,
        )
        chunks = schedule.stages // schedule.ranks
        peak = simulate(schedule_tasks(schedule, times)).peak_bytes()
        assert [peak[r] for r in range(4)] == [100 * n + 7 * chunks for n in verify(schedule).held]


def test_bytes_over_links() -> None:
    """A message alone takes its bytes by the bandwidth; on one wire for both directions, two at a time take longer."""
    times = replace(uniform_times(2), sends=(Send(0.5, 0.5, 100.0, 100.0),))
    own = [RankLink(0, 1, 50.0), RankLink(1, 0, 50.0)]
    found = simulate(schedule_tasks(one_f_one_b(2, 1), times, own))
    assert found.makespan_s == pytest.approx(1 + 2.5 + 1 + 2 + 2.5 + 2)
    shared = [RankLink(0, 1, 50.0, "bus"), RankLink(1, 0, 50.0, "bus")]
    many = eager_one_f_one_b(2, 8)
    apart, together = (simulate(schedule_tasks(many, times, links)).makespan_s for links in (own, shared))
    assert together > 1.1 * apart


def test_refused() -> None:
    times = replace(uniform_times(2), sends=(Send(forward_bytes=1.0),))
    schedule = one_f_one_b(2, 2)
    with pytest.raises(ArgumentError, match="rank 0 sends bytes to rank 1 and no link joins them"):
        schedule_tasks(schedule, times)
    links = [RankLink(0, 1, 1.0, "w"), RankLink(1, 0, 2.0, "w")]
    both = replace(times, sends=(Send(0.0, 0.0, 1.0, 1.0),))
    with pytest.raises(ArgumentError, match=r"wire 'w' of 1.0 and of 2.0 bytes a second"):
        schedule_tasks(schedule, both, links)
    with pytest.raises(ArgumentError, match="forward_s of 3 for 2 stages"):
        schedule_tasks(schedule, uniform_times(3))
    with pytest.raises(ArgumentError, match="sends in bytes"):
        makespan_s(schedule, times)
    with pytest.raises(ArgumentError, match="rank 0 may hold 1 and has 2 stages"):
        list_schedule(uniform_times(2), 2, (0, 0), most_held=1)
