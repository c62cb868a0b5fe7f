"""Runs of units as stages: sums over units, and what does not shrink with the microbatch."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard.runtime.stage_costs import PhaseCost, StageNeeds
from autoshard.runtime.stage_search import climb
from autoshard.runtime.unit_costs import UnitCost, UnitTable

NOTHING = StageNeeds(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def unit(
    ahead: tuple[float, float, float], back: tuple[float, float, float], once_s: float = 0.0, **nbytes: int
) -> UnitCost:
    return UnitCost(PhaseCost(*ahead), PhaseCost(*back), once_s, dataclasses.replace(NOTHING, **nbytes))


UNITS = (
    unit((1.0, 0.2, 0.1), (2.0, 0.4, 3.0), 5.0, there=10, before=1, kept=4, arriving=2, forward=3, backward=6, after=7),
    unit(
        (3.0, 0.5, 0.0), (4.0, 0.1, 0.5), 1.0, there=20, before=2, kept=8, arriving=1, forward=9, backward=2, after=90
    ),
)


@pytest.mark.parametrize("overlaps", [True, False])
def test_sums_of_units(overlaps: bool) -> None:
    table = UnitTable(UNITS, 1e9, overlaps)
    forward, backward = table.seconds(0, 2, 1.0, remat=False)
    if overlaps:
        assert forward == pytest.approx(max(4.0, 0.8))
        assert backward == pytest.approx(max(6.0, 0.5 + 3.5))
    else:
        assert forward == pytest.approx(4.0 + 0.1)
        assert backward == pytest.approx(6.0 + 3.5)
    assert table.seconds(0, 2, 1.0, remat=True)[1] == pytest.approx(backward + forward)
    assert table.once_s(0, 2) == 6.0
    assert table.once_s(1, 2) == 1.0


def test_gradients_travel_as_long_for_a_small_microbatch() -> None:
    table = UnitTable(UNITS, 1e9, overlaps=True)
    assert table.seconds(0, 1, 0.25, remat=False)[1] == pytest.approx(max(0.5, 0.1 + 3.0))
    assert UnitTable(UNITS, 1e9, overlaps=False).seconds(0, 1, 0.25, remat=False)[1] == pytest.approx(0.5 + 3.0)


def test_sums_of_gradients_once_a_step() -> None:
    cost = UnitCost(
        PhaseCost(1.0, 0.2, 0.1),
        PhaseCost(2.0, 0.4, 3.0, 2.5),
        5.0,
        dataclasses.replace(NOTHING, before=30, added=8, added_whole=32),
    )
    apart = cost.sums_apart()
    assert apart.forward == cost.forward
    assert apart.backward == PhaseCost(2.0, 0.4, 0.5)
    assert apart.once_s == 7.5
    assert (apart.needs.before, apart.needs.added) == (54, 32)


def test_weights_are_read_by_every_microbatch() -> None:
    table = UnitTable([unit((1.0, 0.0, 0.0), (1.0, 0.0, 0.0), read=8)], 10.0, overlaps=True)
    assert table.seconds(0, 1, 1.0, remat=False) == (1.0, 1.0)
    assert table.seconds(0, 1, 0.1, remat=False) == pytest.approx((0.8, 0.8))


def test_bytes_held() -> None:
    table = UnitTable(UNITS, 1e9, overlaps=True)
    assert table.peak(0, 2, 3, 1.0, remat=False) == 33 + max(3 * 12 + 9, 90)
    assert table.peak(0, 1, 3, 1.0, remat=False) == 11 + max(3 * 4 + 6, 7)
    assert table.peak(0, 1, 3, 0.5, remat=True) == 11 + max(3 * 1 + (6 + 4) // 2, 7)


def test_climbing_stops_where_it_gets_worse() -> None:
    tried: list[int] = []

    def cost(option: int) -> float:
        tried.append(option)
        return abs(option - 4)

    assert climb([1, 2, 4, 8, 16], 1, cost) == 4
    assert tried == [1, 2, 4, 8]
    tried.clear()
    assert climb([1, 2, 4, 8, 16], 8, cost) == 4
    assert tried == [8, 16, 4, 2]
    assert climb([1], 8, lambda option: 0.0) == 1
