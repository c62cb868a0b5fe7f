"""Collectives against closed forms, and their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import GroupLinks, Level, Link
from autoshard.costmodel import COLLECTIVE_KINDS, CollectiveKind, best_algorithm, collective_time_s, wire_bytes

LINK = Link(100e9, 1e-6)
SLOW = Link(10e9, 5e-6)
MB = 1e6


def flat(n: int, link: Link = LINK) -> GroupLinks:
    return GroupLinks(n, (Level(n, link),))


def two_levels(m: int, k: int) -> GroupLinks:
    return GroupLinks(m * k, (Level(m, LINK), Level(k, SLOW)))


shapes = st.lists(st.integers(2, 64), min_size=1, max_size=2)


def group_of(sizes: list[int]) -> GroupLinks:
    """One level or two; built in the test, as the type checker draws random numbers of its own."""
    return flat(sizes[0]) if len(sizes) == 1 else two_levels(*sizes)


def test_ring_closed_forms() -> None:
    group = flat(8)
    nbytes = 800 * MB
    half = 7 * 1e-6 + 7 / 8 * nbytes / 100e9
    assert collective_time_s("all_gather", nbytes, group) == pytest.approx(half)
    assert collective_time_s("reduce_scatter", nbytes, group) == pytest.approx(half)
    odd = 12 * 1e-6 + 12 / 7 * nbytes / 100e9
    assert best_algorithm("all_reduce", nbytes, flat(7)) == ("ring", pytest.approx(odd))
    assert collective_time_s("all_to_all", nbytes, group) == pytest.approx(7e-6 + 7 / 8 * 100 * MB / 100e9)
    assert collective_time_s("permute", nbytes, group) == pytest.approx(1e-6 + 100 * MB / 100e9)


def test_small_all_reduce_takes_the_tree() -> None:
    """63 devices, 1 KB: 2 ceil(log2(63)) steps and not 124."""
    expected = 12e-6 + 2 * 1e3 / (100e9 * 0.9)
    assert best_algorithm("all_reduce", 1e3, flat(63)) == ("tree", pytest.approx(expected))


def test_powers_of_two_halve_and_double() -> None:
    expected = 12e-6 + 2 * 63 / 64 * 1e3 / 100e9
    assert best_algorithm("all_reduce", 1e3, flat(64)) == ("recursive doubling", pytest.approx(expected))


def test_names_of_levels() -> None:
    assert best_algorithm("all_gather", MB, two_levels(8, 128))[0] == "hierarchical(ring, ring)"
    assert best_algorithm("all_gather", 1e9, two_levels(8, 4))[0] == "ring"
    assert best_algorithm("all_reduce", 1e3, two_levels(8, 128))[0] == "tree"
    assert best_algorithm("all_reduce", 1e3, GroupLinks(1, ())) == ("none", 0.0)


def test_efficiency_of_a_link() -> None:
    whole, half = flat(4, Link(100e9, 0.0)), flat(4, Link(200e9, 0.0, 0.5))
    assert collective_time_s("all_gather", MB, whole) == collective_time_s("all_gather", MB, half)


def test_dapple_all_reduce() -> None:
    """DAPPLE's cluster (shared/data/README.md): ring 2 (n-1)/n over Ethernet at 3e9 B/s, two servers."""
    group = flat(2, Link(3e9, 0.0))
    assert collective_time_s("all_reduce", 574e6, group) == pytest.approx(2 * 0.5 * 574e6 / 3e9)


def test_flat_ring_over_nodes_uses_every_adapter() -> None:
    """8 in a node at 100e9, each with its own 10e9: the ring moves min(100e9, 8 * 10e9)."""
    group = two_levels(8, 4)
    steps = 28 * 1e-6 + 3 * 5e-6
    ring = steps + 31 / 32 * 1e9 / 80e9
    by_level = (7 * 1e-6 + 7 / 8 * 1e9 / 100e9) + (3 * 5e-6 + 3 / 4 * (1e9 / 8) / 10e9)
    assert collective_time_s("all_gather", 1e9, group) == pytest.approx(min(ring, by_level))
    assert ring < by_level


def test_level_by_level_wins_on_latency() -> None:
    """1 MB over 8 x 128: 1023 ring steps are more than 7 in the node and 127 across."""
    group = two_levels(8, 128)
    by_level = (7 * 1e-6 + 7 / 8 * MB / 100e9) + (127 * 5e-6 + 127 / 128 * (MB / 8) / 10e9)
    assert collective_time_s("all_gather", MB, group) == pytest.approx(by_level)


def test_all_to_all_moves_levels_at_once() -> None:
    """16 devices in 2 nodes: of 15 peers 7 are near, 8 far."""
    share = 160 * MB / 16
    expected = 7 * 1e-6 + 8 * 5e-6 + max(share * 7 / 16 / 100e9, share * 8 / 16 / 10e9)
    assert collective_time_s("all_to_all", 160 * MB, two_levels(8, 2)) == pytest.approx(expected)


def test_permute_goes_over_the_slowest_link() -> None:
    assert collective_time_s("permute", 16 * MB, two_levels(8, 2)) == pytest.approx(5e-6 + MB / 10e9)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_alone_or_empty_is_free(kind: CollectiveKind) -> None:
    assert collective_time_s(kind, 1e9, GroupLinks(1, ())) == 0
    assert collective_time_s(kind, 0, flat(8)) == 0
    assert wire_bytes(kind, 1e9, GroupLinks(1, ())) == 0


def test_wire_bytes() -> None:
    group = flat(8)
    assert {kind: wire_bytes(kind, 64.0, group) for kind in COLLECTIVE_KINDS} == {
        "all_reduce": 112.0,
        "all_gather": 56.0,
        "reduce_scatter": 56.0,
        "all_to_all": 7.0,
        "permute": 8.0,
    }


@given(shapes, st.sampled_from(COLLECTIVE_KINDS), st.floats(1, 1e12), st.floats(1, 4))
def test_more_bytes_take_longer(sizes: list[int], kind: CollectiveKind, nbytes: float, factor: float) -> None:
    group = group_of(sizes)
    time_s = collective_time_s(kind, nbytes, group)
    assert 0 < time_s <= collective_time_s(kind, nbytes * factor, group)


@given(shapes, st.sampled_from(COLLECTIVE_KINDS), st.floats(1, 1e12))
def test_no_faster_than_the_wire(sizes: list[int], kind: CollectiveKind, nbytes: float) -> None:
    group = group_of(sizes)
    fastest = max(level.link.rate_bytes_per_s for level in group.levels)
    assert collective_time_s(kind, nbytes, group) * fastest >= wire_bytes(kind, nbytes, group) * (1 - 1e-9)


@given(shapes, st.floats(1, 1e12))
def test_all_reduce_is_at_most_its_two_halves(sizes: list[int], nbytes: float) -> None:
    group = group_of(sizes)
    halves = collective_time_s("reduce_scatter", nbytes, group) + collective_time_s("all_gather", nbytes, group)
    assert collective_time_s("all_reduce", nbytes, group) <= halves * (1 + 1e-9)
