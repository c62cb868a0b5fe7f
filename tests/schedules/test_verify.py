"""Broken tables are refused with their exact error; a user's own are read."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.errors import ArgumentError, explain
from autoshard.schedules import Action, Kind, one_f_one_b, picture, read_schedule, verify, zb_v

GOOD = "F0 F1 B0 B1\nF0 B0 F1 B1"


def refused(table: Any, placement: Any = None, **options: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        read_schedule(table, placement, **options)
    return str(caught.value)


def test_own_tables() -> None:
    texts = read_schedule(GOOD)
    assert texts == read_schedule([["F0", "F1", "B0", "B1"], "F0 B0 F1 B1"])
    assert texts.rows == one_f_one_b(2, 2).rows
    assert texts.text() == GOOD
    actions = [[Action(Kind.FORWARD, 0, 0), "B0@0"], ["F0@1", "BI0@1", "BW0@1"]]
    assert read_schedule(actions).microbatches == 1
    two = read_schedule(["F0@0 F0@3 BI0@3 BW0@3 B0@0", "F0@1 F0@2 B0@2 B0@1"])
    assert two.placement == (0, 1, 1, 0)
    assert verify(two, 2).held == (2, 2)
    assert verify(two).held_by_stage == (1, 1, 1, 1)


MISSING = "of each of 2 microbatches on each of 2 stages F, and B or BI and BW"


@pytest.mark.parametrize(
    ("table", "options", "given", "expected", "todo"),
    [
        ("F0 X1", {}, "rank 0, position 1: 'X1'",
         "F, B, BI or BW, a microbatch, and '@' and a stage, as in F0 or BI3@5", "correct it"),
        ("", {}, "0 ranks, 0 stages, 0 microbatches", "at least one of each", "add what is missing"),
        (GOOD, {"placement": [0, 2]}, "stage 1 is placed on rank 2 of a table of 2 ranks",
         "a rank from 0 to 1", "correct the placement"),
        ("F0 B0", {"placement": [0, 0]}, "rank 0, position 0: 'F0' names no stage and rank 0 has 2",
         "F0@STAGE", "add the stage"),
        ("F0@0 B0@0\nF0@2 B0@2", {}, "stage 1 occurs on no rank",
         "a rank from 0 to 1", "number the stages from 0 without gaps"),
        ("F0 F1 B0 B1\nF0 B0 F1@0 B1", {}, "rank 1, position 2: F1@0, but stage 0 is on rank 0",
         "actions of stage 0 on rank 0 only", "move the action, or correct the placement"),
        ("F0 F1 B0 B1\nF0 B0 F1 B1 F1", {}, "rank 1, position 4: F1@1 for the second time, after position 2",
         "every action once", "remove one"),
        (GOOD, {"microbatches": 1}, "rank 0, position 1: F1@0 of 2 stages and 1 microbatches",
         "numbers from 0, below these", "correct the action"),
        ("F0 F1 B0 B1\nF0 B0 F1", {}, "rank 1, position 3 (its end): B1@1 is missing", MISSING, "add it to rank 1"),
        ("F0 F1 B0 B1\nF0 B0 B1", {}, "rank 1, position 3 (its end): F1@1 is missing", MISSING, "add it to rank 1"),
        ("F0 F1 BI0 B1\nF0 B0 F1 B1", {}, "rank 0, position 4 (its end): BW0@0 is missing", MISSING,
         "add it to rank 0"),
        ("F0 F1 B0 BI0 B1\nF0 B0 F1 B1", {},
         "rank 0, position 3: BI0@0, but B0@0 at position 2 is the whole backward pass",
         "B0@0, or BI0@0 and BW0@0", "remove one"),
        ("F0 B0 F1 B1\nF0 F1 B0 B1", {},
         "actions wait for each other: rank 0, position 1: B0@0 waits for B0@1 (rank 1, position 2); "
         "rank 1, position 1: F1@1 waits for F1@0 (rank 0, position 2)",
         "an order in which all can run", "move one of them"),
        ("F0 BW0 BI0", {},
         "actions wait for each other: rank 0, position 1: BW0@0 waits for BI0@0 (rank 0, position 2)",
         "an order in which all can run", "move one of them"),
        (GOOD, {"most_held": 1}, "rank 0, position 1: F1@0 makes 2 held microbatches",
         "at most 1", "run a backward pass before it, or raise the bound"),
        (GOOD, {"most_held": [2]}, "bounds for 1 ranks", "one for each of 2", "correct most_held"),
    ],
)  # fmt: skip
def test_broken_tables(table: str, options: dict[str, Any], given: str, expected: str, todo: str) -> None:
    assert refused(table, **options) == explain(given, expected, todo)


def test_a_weight_gradient_put_off_holds_memory() -> None:
    table = "F0 BI0 F1 BI1 BW0 BW1"
    assert verify(read_schedule(table)).held == (2,)
    assert "rank 0, position 2: F1@0 makes 2 held" in refused(table, most_held=1)


def test_every_loss_and_swap_is_found_or_harmless() -> None:
    """Every action taken out is missed; where neighbours are swapped, the table still runs or a circle is named."""
    good = zb_v(2, 4)
    rows = [list(row) for row in good.rows]
    circles = 0
    for rank, row in enumerate(rows):
        for k, action in enumerate(row):
            lost = [*rows[:rank], row[:k] + row[k + 1 :], *rows[rank + 1 :]]
            assert f"(its end): {action} is missing" in refused(lost, good.placement, microbatches=4)
            if k:
                swapped = [*rows[:rank], [*row[: k - 1], action, row[k - 1], *row[k + 1 :]], *rows[rank + 1 :]]
                if can_run(swapped, good.placement):
                    continue
                circles += 1
                assert "wait for each other" in refused(swapped, good.placement)
    assert 10 < circles < sum(len(row) for row in rows) - 10


def can_run(rows: list[list[Action]], placement: tuple[int, ...]) -> bool:
    """Whether all actions can run: whoever can go on goes on, until nobody can."""
    stage_rows = [list(row) for row in rows]
    done: set[tuple[str, int, int]] = set()
    last = len(placement) - 1
    moved = True
    while moved:
        moved = False
        for row in stage_rows:
            while row:
                kind, s, m = row[0].kind.value, row[0].stage, row[0].microbatch
                wants = {
                    "F": [("F", s - 1, m)] if s else [],
                    "BI": [("F", s, m), *([("BI", s + 1, m)] if s < last else [])],
                    "BW": [("BI", s, m)],
                }[kind]
                if not done.issuperset(wants):
                    break
                done.add((kind, s, m))
                row.pop(0)
                moved = True
    return not any(stage_rows)


def test_picture() -> None:
    assert picture(one_f_one_b(2, 3)) == (
        "rank 0 |F0 F1 .. .. B0 == F2 B1 == .. B2 ==|\nrank 1 |.. F0 B0 == F1 B1 == F2 B2 == .. ..|"
    )
    assert picture(zb_v(2, 1)).splitlines()[0] == "rank 0 |F0a ... ... F0b I0b W0b ... ... I0a W0a|"
