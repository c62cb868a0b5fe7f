"""Schedules in step: order kept, messages in time, rows of buffers shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.schedules import (
    Kind,
    Schedule,
    eager_one_f_one_b,
    gpipe,
    in_ticks,
    interleaved,
    one_f_one_b,
    read_schedule,
    shared_rows,
)


def test_of_two_stages() -> None:
    rows = in_ticks(read_schedule("F0 F1 B0 B1\nF0 B0 F1 B1")).rows
    shown = [
        " ".join(".." if a is None else f"{a.kind.value}{a.microbatch}" for a in row) for row in zip(*rows, strict=True)
    ]
    assert shown == ["F0 F1 .. B0 .. B1", ".. F0 B0 F1 B1 .."]


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 8), one_f_one_b(4, 8), eager_one_f_one_b(4, 8), interleaved(2, 8, 2)], ids=lambda s: s.name
)
def test_everything_is_there_in_time(schedule: Schedule) -> None:
    ticks = in_ticks(schedule)
    assert sorted(map(str, ticks.at)) == sorted(str(a) for row in schedule.rows for a in row)
    for rank, row in enumerate(schedule.rows):
        mine = [tick[rank] for tick in ticks.rows if tick[rank] is not None]
        assert mine == list(row), "in the order of the row"
    for action, tick in ticks.at.items():
        if action.kind is Kind.FORWARD and action.stage:
            assert ticks.at[replace(action, stage=action.stage - 1)] < tick
        if action.kind is Kind.BACKWARD:
            assert ticks.at[replace(action, kind=Kind.FORWARD)] < tick


def test_seconds_are_those_of_the_slowest() -> None:
    ticks = in_ticks(one_f_one_b(2, 2))
    assert ticks.seconds((1.0, 2.0), (3.0, 4.0)) == pytest.approx(1 + 2 + 4 + 3 + 4 + 3)


def test_rows_are_shared_where_nothing_is_lost() -> None:
    found, depth = shared_rows({"a": (0, 3), "b": (1, 2), "c": (2, 5), "d": (3, 4)})
    assert depth == 2
    assert found["c"] == found["b"]
    assert found["d"] == found["a"]
