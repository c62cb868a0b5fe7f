"""Collectives over wires: closed forms, contention, orders, and what may never happen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster import Cluster, DeviceSpec, GroupLinks, Level, Link, Node, Routes, Wire, axis_group, loads_of
from autoshard.costmodel import COLLECTIVE_KINDS, CollectiveKind, best_algorithm, collective_time_s
from autoshard.costmodel.group_order import partitions, ring_order
from autoshard.costmodel.link_graph import tree_edges, two_trees

# beartype draws at random which items of a tuple it looks at, inside strategies too.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

DEVICE = DeviceSpec("d", "gpu", {"f32": 1e12}, 2**30, 1e11)
LINK = Link(100e9, 1e-6)
UPLINK = Link(10e9, 2e-6)
GB = 1e9


def wired(count: int, wires: Sequence[Wire]) -> Cluster:
    return Cluster("wired", (Node(DEVICE, count, LINK),), wires=tuple(wires))


def whole(count: int, wires: Sequence[Wire]) -> GroupLinks:
    """All devices as one group."""
    return axis_group(wired(count, wires), (("x", count),), ("x",))


def star(count: int, link: Link = LINK) -> list[Wire]:
    return [Wire(device, "switch", link) for device in range(count)]


def circle(order: Sequence[int], link: Link = LINK) -> list[Wire]:
    return [Wire(order[k - 1], order[k], link) for k in range(len(order))]


def two_nodes(per_node: int) -> list[Wire]:
    """Each node's devices on a switch, one uplink from each to the network."""
    wires = [Wire(device, f"node-{device // per_node}", LINK) for device in range(2 * per_node)]
    return [*wires, Wire("node-0", "network", UPLINK), Wire("node-1", "network", UPLINK)]


# Closed forms


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 12, 16, 24])
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_a_crossbar_is_one_level(kind: CollectiveKind, count: int) -> None:
    """Half of the latency on each side of a switch that never blocks."""
    group = whole(count, star(count, Link(100e9, 0.5e-6, 0.8)))
    flat = GroupLinks(count, (Level(count, Link(100e9, 1e-6, 0.8)),))
    for nbytes in (1.0, 1e4, 1e6, 1e8, 1e10):
        assert collective_time_s(kind, nbytes, group) == pytest.approx(collective_time_s(kind, nbytes, flat), rel=1e-9)


def test_wires_between_all_pairs_are_no_slower_than_a_crossbar() -> None:
    wires = [Wire(first, second, LINK) for second in range(8) for first in range(second)]
    flat = GroupLinks(8, (Level(8, LINK),))
    for kind in COLLECTIVE_KINDS:
        assert collective_time_s(kind, GB, whole(8, wires)) <= collective_time_s(kind, GB, flat) * (1 + 1e-9)


def test_two_nodes_with_one_uplink_each() -> None:
    """4 and 4 devices; 2 us between two of a node, 6 us across. By hand, for N bytes.

    flat ring        7 steps of N/8, one of them on the uplink at a time     42 us + 7/8 N / 10e9
    hierarchical     3 steps of N/4 inside; 4 flows of N/8 on the uplink     6 us + 3/4 N / 100e9 + 6 us + N/2 / 10e9
    """
    group = whole(8, two_nodes(4))
    name, time_s = best_algorithm("all_gather", GB, group)
    assert name == "hierarchical(ring, ring)"
    assert time_s == pytest.approx(12e-6 + 0.75 * GB / 100e9 + 0.5 * GB / 10e9, rel=1e-9)
    assert time_s < 42e-6 + 7 / 8 * GB / 10e9
    # All-to-all: 3 peers in the node, 4 across; 4 x 4 messages of N/64 each way on the uplink.
    expected = 3 * 2e-6 + 4 * 6e-6 + 16 * GB / 64 / 10e9
    assert collective_time_s("all_to_all", GB, group) == pytest.approx(expected, rel=1e-9)
    # Permute by half of the group: 4 messages of N/8 on the uplink.
    assert collective_time_s("permute", GB, group) == pytest.approx(6e-6 + 4 * GB / 8 / 10e9, rel=1e-9)


def test_a_ring_of_wires() -> None:
    """Both directions carry half."""
    group = whole(6, circle(range(6)))
    assert best_algorithm("all_gather", GB, group) == (
        "two-way ring",
        pytest.approx(5e-6 + 5 / 6 * GB / 200e9, rel=1e-9),
    )
    assert collective_time_s("all_reduce", GB, group) == pytest.approx(10e-6 + 10 / 6 * GB / 200e9, rel=1e-9)


def test_a_line() -> None:
    """The ring's way back runs over all wires, in the direction that nothing else uses."""
    group = whole(5, [Wire(k, k + 1, LINK) for k in range(4)])
    assert collective_time_s("all_gather", GB, group) == pytest.approx(4 * 4e-6 + 4 / 5 * GB / 100e9, rel=1e-9)
    # All-to-all: 2 x 3 messages of N/25 cross the middle; an end's own go 1 + 2 + 3 + 4 wires.
    assert collective_time_s("all_to_all", GB, group) == pytest.approx(10e-6 + 6 * GB / 25 / 100e9, rel=1e-9)


def test_the_slowest_arm_of_a_star() -> None:
    wires = [*star(3), Wire(3, "switch", Link(20e9, 4e-6))]
    time_s = collective_time_s("all_gather", GB, whole(4, wires))
    assert time_s == pytest.approx(3 * 5e-6 + 3 / 4 * GB / 20e9, rel=1e-9)


def test_wires_side_by_side_add_up() -> None:
    one, two = whole(2, [Wire(0, 1, LINK)]), whole(2, [Wire(0, 1, LINK), Wire(1, 0, LINK)])
    assert collective_time_s("all_gather", GB, one) == pytest.approx(1e-6 + GB / 2 / 100e9)
    assert collective_time_s("all_gather", GB, two) == pytest.approx(1e-6 + GB / 2 / 200e9)


# Contention, orders, algorithms


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_two_groups_share_an_uplink(kind: CollectiveKind) -> None:
    cluster = wired(4, [Wire(d, f"s{d // 2}", LINK) for d in range(4)] + [Wire("s0", "s1", UPLINK)])
    both = axis_group(cluster, (("x", 2), ("y", 2)), ("x",))
    alone = whole(2, [Wire(0, "s0", LINK), Wire(1, "s1", LINK), Wire("s0", "s1", UPLINK)])
    assert both.graph is not None
    assert both.graph.groups == ((0, 2), (1, 3))
    ratio = collective_time_s(kind, 1e13, both) / collective_time_s(kind, 1e13, alone)
    assert ratio == pytest.approx(2, rel=1e-6)


def test_groups_in_nodes_do_not_meet() -> None:
    cluster = wired(8, two_nodes(4))
    inside = axis_group(cluster, (("x", 2), ("y", 4)), ("y",))
    for kind in COLLECTIVE_KINDS:
        alone = whole(4, star(4))
        assert collective_time_s(kind, GB, inside) == pytest.approx(collective_time_s(kind, GB, alone))


def test_a_better_ring_than_the_given_one() -> None:
    """Seven devices on a circle that jumps: in the order of their numbers every message takes three wires."""
    order = (0, 5, 3, 1, 6, 4, 2)
    group, good = whole(7, circle(order)), whole(7, circle(range(7)))
    assert group.graph is not None
    found = ring_order(group.graph.routes, tuple(range(7)))
    assert set(zip(found, (*found[1:], found[0]), strict=True)) in (
        {(order[k - 1], order[k]) for k in range(7)},
        {(order[k], order[k - 1]) for k in range(7)},
    )
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert collective_time_s(kind, GB, group) == pytest.approx(collective_time_s(kind, GB, good), rel=1e-9)


def test_interleaved_nodes_are_found() -> None:
    """Even devices on one switch, odd ones on another."""
    wires = [Wire(d, f"s{d % 2}", LINK) for d in range(8)] + [Wire("s0", "s1", UPLINK)]
    graph = whole(8, wires).graph
    assert graph is not None
    assert partitions(graph.routes, graph.groups) == ((((0, 2, 4, 6), (1, 3, 5, 7)),),)
    found = [device % 2 for device in ring_order(graph.routes, tuple(range(8)))]
    assert sum(a != b for a, b in zip(found, (*found[1:], found[0]), strict=True)) == 2


def test_algorithms_by_size() -> None:
    """Few bytes: few steps. Many bytes: little sent."""
    assert [best_algorithm("all_reduce", n, whole(12, star(12)))[0] for n in (1e3, 1e9)] == ["tree", "ring"]
    assert best_algorithm("all_reduce", 1e3, whole(8, star(8)))[0] == "recursive doubling"
    assert best_algorithm("all_reduce", 1e9, whole(8, circle(range(8))))[0] == "two-way ring"
    assert best_algorithm("all_to_all", 1e9, whole(8, star(8)))[0] == "pairwise"
    assert best_algorithm("permute", 1e9, whole(8, star(8)))[0] == "direct"
    assert best_algorithm("permute", 0, whole(8, star(8))) == ("none", 0.0)


@given(st.integers(2, 70))
def test_two_trees(count: int) -> None:
    edges = dict(tree_edges(count))
    assert set(edges) == set(range(1, count))
    depth = 0
    for place in edges:
        steps = 0
        while place:
            place, steps = edges[place], steps + 1
        depth = max(depth, steps)
    assert depth == (count - 1).bit_length()
    first, second = ({parent for _, parent in tree} for tree in two_trees(tuple(range(count))))
    if count > 3:  # but for the roots, a device is inside one tree only
        assert len(first & second) <= 2


# Routes


def test_widest_and_quickest_ways() -> None:
    routes = Routes(2, (Wire(0, 1, Link(1e9, 1e-6)), Wire(0, "a", Link(5e9, 2e-6)), Wire("a", 1, Link(4e9, 3e-6))))
    assert routes.width(0, 1) == 4e9
    assert routes.link(0, 1).latency_s == pytest.approx(5e-6)
    assert routes.route(0, 1, "widest").latency_s == pytest.approx(5e-6)
    assert routes.route(0, 1, "quickest").latency_s == pytest.approx(1e-6)


def test_equal_ways_share() -> None:
    wires = [Wire(d, s, LINK) for s in ("a", "b") for d in range(2)]
    route = Routes(2, wires).route(0, 1, "widest")
    assert sorted(share for _, share in route.shares) == [0.5] * 4
    assert route.latency_s == pytest.approx(2e-6)


links = st.builds(Link, st.sampled_from([1e9, 2e9, 5e9, 10e9]), st.sampled_from([0.0, 1e-6, 3e-6]))


@st.composite
def graphs(draw: st.DrawFn, trees: bool = False) -> tuple[int, list[Wire]]:
    """Devices and switches, joined: each to an earlier one, and some wires more."""
    count = draw(st.integers(2, 7))
    ends: list[int | str] = list(draw(st.permutations([*range(count), *("s1", "s2", "s3")[: draw(st.integers(0, 3))]])))
    wires = [Wire(ends[k], ends[draw(st.integers(0, k - 1))], draw(links)) for k in range(1, len(ends))]
    for _ in range(0 if trees else draw(st.integers(0, 5))):
        a, b = draw(st.lists(st.sampled_from(ends), min_size=2, max_size=2, unique=True))
        wires.append(Wire(a, b, draw(links)))
    return count, wires


kinds = st.sampled_from(COLLECTIVE_KINDS)
sizes = st.floats(1, 1e12)


@settings(deadline=None, max_examples=50)
@given(graphs(), st.sampled_from(["widest", "quickest"]))
def test_all_pairs_are_the_sum_of_their_ways(graph: tuple[int, list[Wire]], choice: str) -> None:
    count, wires = graph
    routes = Routes(count, wires)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    loads = loads_of([(routes.route(a, b, choice), 1.0) for a, b in pairs])  # pyright: ignore[reportArgumentType]
    latency, whole_loads = routes.all_pairs([range(count)], choice)  # pyright: ignore[reportArgumentType]
    assert np.allclose(whole_loads, [loads.get(wire, 0.0) for wire in range(len(whole_loads))])
    by_source = [sum(routes.route(a, b, choice).latency_s for b in range(count) if a != b) for a in range(count)]  # pyright: ignore[reportArgumentType]
    assert latency == pytest.approx(max(by_source))


@settings(deadline=None, max_examples=50)
@given(graphs(), kinds, sizes, st.floats(1, 4))
def test_more_bytes_are_never_quicker(graph: tuple[int, list[Wire]], kind: CollectiveKind, n: float, f: float) -> None:
    group = whole(*graph)
    assert 0 < collective_time_s(kind, n, group) <= collective_time_s(kind, n * f, group) * (1 + 1e-12)


@settings(deadline=None, max_examples=50)
@given(graphs(), kinds, sizes, st.floats(1, 4))
def test_more_bandwidth_is_never_slower(
    graph: tuple[int, list[Wire]], kind: CollectiveKind, n: float, f: float
) -> None:
    count, wires = graph
    faster = [
        dataclasses.replace(w, link=dataclasses.replace(w.link, bytes_per_s=w.link.bytes_per_s * f)) for w in wires
    ]
    time_s = collective_time_s(kind, n, whole(count, wires))
    assert collective_time_s(kind, n, whole(count, faster)) <= time_s * (1 + 1e-9)


TWO_UPLINKS = [Wire("node-0", "network", UPLINK), Wire("node-1", "network", UPLINK)]


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize(
    ("count", "wires", "more"),
    [
        (8, star(8), [Wire(0, 1, LINK)]),
        (8, star(8), [Wire(0, "switch", UPLINK)]),
        (6, [Wire(k, k + 1, LINK) for k in range(5)], [Wire(5, 0, LINK)]),
        (6, [Wire(k, k + 1, LINK) for k in range(5)], [Wire(5, 0, UPLINK)]),
        (8, circle(range(8)), [Wire(0, 4, LINK)]),
        (8, circle(range(8)), [Wire(0, 4, UPLINK)]),
        (8, two_nodes(4), [Wire(0, 4, UPLINK)]),
        (8, two_nodes(4), TWO_UPLINKS),
        (8, two_nodes(4), [Wire("node-0", "node-1", UPLINK)]),
        (8, two_nodes(4), star(8, UPLINK)),
    ],
)
def test_one_wire_more(kind: CollectiveKind, count: int, wires: list[Wire], more: list[Wire]) -> None:
    """Not slower; in graphs without any pattern one more wire can mislead the search for orders and ways."""
    before, after = whole(count, wires), whole(count, [*wires, *more])
    for nbytes in (1.0, 1e3, 1e5, 1e7, 1e9, 1e11):
        time_s = collective_time_s(kind, nbytes, before)
        assert collective_time_s(kind, nbytes, after) <= time_s * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(graphs(trees=True), st.sampled_from(["all_to_all", "permute"]), sizes, st.data())
def test_a_second_wire_in_a_tree(
    graph: tuple[int, list[Wire]], kind: CollectiveKind, n: float, data: st.DataObject
) -> None:
    """Nothing is searched for here, so it holds always."""
    count, wires = graph
    again = data.draw(st.sampled_from(wires))
    time_s = collective_time_s(kind, n, whole(count, wires))
    more = [*wires, Wire(again.second, again.first, data.draw(links))]
    assert collective_time_s(kind, n, whole(count, more)) <= time_s * (1 + 1e-9)
