"""Plans as text: units, folded rows, everything that was decided."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard.plan import Argument, Resharding
from autoshard.show import ROWS, seconds, show_plan, size_text
from tests.problems import mlp
from tests.test_plan import PLAN


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (2.5, "2.5 s"), (1.0, "1 s"), (0.0125, "12.5 ms"), (3.2e-5, "32 us"), (4e-9, "4 ns")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"), (80 << 30, "80 GiB"), (2 << 40, "2 TiB")],
)
def test_sizes(value: int, text: str) -> None:
    assert size_text(value) == text


def test_every_argument_has_a_row_while_there_are_few() -> None:
    text = show_plan(mlp().plan((2, 4)))
    assert all(f"in/{i} " in text for i in range(6))
    assert "like it" in text


def test_like_arguments_are_folded_when_there_are_many() -> None:
    like = tuple(Argument(f"state/{i}", "f32[8,8]", (("data",), ()), 256, True) for i in range(ROWS + 1))
    text = show_plan(dataclasses.replace(PLAN, inputs=like))
    assert "state/0" in text
    assert "state/1 " not in text
    assert f"+{ROWS}" in text


def test_many_reshardings_are_counted() -> None:
    row = Resharding("f32[8]", "step.py:1", ((),), (("data",),), ("all_gather",), 32, 1, 1e-6)
    text = show_plan(dataclasses.replace(PLAN, reshardings=(row,) * 15))
    assert text.count("step.py:1") == 12
    assert "and 3 more" in text


def test_parts_without_content_are_left_out() -> None:
    text = show_plan(dataclasses.replace(PLAN, collectives=(), reshardings=(), alternatives=()))
    assert "collectives a step" not in text
    assert "resharding points" not in text
    assert "alternatives" not in text
    assert "memory on one device" in text


@pytest.mark.parametrize("width", [60, 118, 200])
def test_lines_keep_to_the_width(width: int) -> None:
    assert max(len(line) for line in show_plan(PLAN, width).splitlines()) <= width


def test_text_is_plain() -> None:
    text = show_plan(PLAN)
    assert "\x1b" not in text
    assert text.endswith("\n")
    assert text == show_plan(PLAN)
