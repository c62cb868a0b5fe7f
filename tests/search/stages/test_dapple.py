"""DAPPLE's planner: its published plans and speed-ups, and exhaustive search on small instances.

Devices of `shared/data`: A is 2 servers of 8 V100, NVLink; B and C are 16 servers of one, at 25 and 10 Gbit/s.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from autoshard.cluster import preset_cluster
from autoshard.costmodel import pipeline_latency_s, read_profile
from autoshard.errors import ArgumentError
from autoshard.search.stages import (
    DappleOptions,
    Servers,
    StagePlan,
    StageTable,
    chain_of,
    data_parallel_s,
    layer_table,
    plan_dapple,
    plan_pipedream,
    plan_spp,
    profile_table,
    servers_of,
    stage_blocks,
)

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "dapple"
VGG, XLNET, BERT, GNMT = "vgg-19-pbs-32.txt", "xlnet-36-pbs-1.txt", "bert-48-pbs-2.txt", "gnmt-16-pbs-64.txt"

RATES = Servers((8, 8), 25e9, 3e9, 1e9)  # of the table of published speed-ups, shared/data/README.md
A = Servers((8, 8), 25e9, 25e9 / 8, 25e9 / 8)
B = Servers((1,) * 16, 25e9 / 8, 25e9 / 8, 25e9 / 8)
C = Servers((1,) * 16, 10e9 / 8, 10e9 / 8, 10e9 / 8)


def table_of(name: str, *, chain: bool = True) -> StageTable:
    """A profile; the plans of Table 4 are made over a chain of nested states, the speed-ups over all states."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip("the profiles of shared/data are not here")
    states = read_profile(path)
    return profile_table(chain_of(states) if chain else states)


def speedup(table: StageTable, plan: StagePlan, microbatches: int) -> float:
    return microbatches * (table.forward_s[-1] + table.backward_s[-1]) / plan.latency_s


@pytest.mark.parametrize(
    ("name", "microbatches", "upstream", "replicas", "cuts", "figure"),
    [
        (VGG, 32, False, (15, 1), (21,), 13.313),
        (VGG, 32, True, (15, 1), (20,), 9.982),
        (XLNET, 128, False, (8, 8), (22,), 15.551),
        (XLNET, 128, True, (8, 8), (22,), 14.929),
        (BERT, 64, False, (8, 8), (30,), 15.328),
    ],
)
def test_best_two_stage_plans(
    name: str, microbatches: int, upstream: bool, replicas: tuple[int, ...], cuts: tuple[int, ...], figure: float
) -> None:
    """The table of shared/data: same plans and speed-ups (published 14.9 for XLNet-36), with one deviation.

    BERT-48: same plan, 15.328 where the table says 15.529; the same 1.3 % as in test_pipeline_law.py, not understood.
    """
    table = table_of(name, chain=False)
    plan = plan_dapple(table, RATES, microbatches, DappleOptions(upstream=upstream, recursion=True, most_stages=2))
    assert (plan.replicas, plan.cuts) == (replicas, cuts)
    assert speedup(table, plan, microbatches) == pytest.approx(figure, abs=1e-3)


# name, microbatches of the published global batch, servers, our replicas, our first layers
TABLE_4 = [
    (VGG, 64, A, (16,), ()),
    (VGG, 64, B, (16,), ()),
    (VGG, 64, C, (15, 1), (21,)),
    (GNMT, 16, A, (8, 8), (38,)),
    (BERT, 32, A, (8, 8), (28,)),
    (XLNET, 128, A, (8, 8), (21,)),
]


@pytest.mark.parametrize(("name", "microbatches", "servers", "replicas", "cuts"), TABLE_4)
def test_table_4(
    name: str, microbatches: int, servers: Servers, replicas: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    """Table 4's plans: DP / DP / 15:1 for VGG-19, 8:8 on A for the others, chosen here too.

    Data parallelism is timed with all-reduces beside the backward pass (`overlap`); without that 15:1 wins on A and B.
    Cuts: XLNet-36 18:18 layers as published. BERT-48 24:24, published 23:25, which is 3.6 % slower here (14.40 and
    14.92 times one device). GNMT-16 10:6, published 9:7: in the profile the first ten layers take 126 of 249 ms, for
    the last one takes 36 and the classifier 20. VGG-19 on C: all 16 convolutions before the cut, published 13:6, which
    sends 12 MB a microbatch in place of 3 (7.0 and 12.9 times one device).
    """
    table = table_of(name)
    options = DappleOptions(recursion=True, width=1, compared=8, overlap=True, most_stages=3, most_ways=0)
    plan = plan_dapple(table, servers, microbatches, options)
    assert (plan.replicas, plan.cuts) == (replicas, cuts)


@pytest.mark.parametrize(
    ("name", "microbatches", "servers", "published", "straight"),
    [
        pytest.param(BERT, 32, B, 10.14, True, marks=pytest.mark.full),
        pytest.param(BERT, 32, C, 9.18, True, marks=pytest.mark.full),
        (XLNET, 128, C, 10.51, True),
        (XLNET, 128, B, 12.65, False),
    ],
)
def test_table_4_where_ours_is_another(
    name: str, microbatches: int, servers: Servers, published: float, straight: bool
) -> None:
    """On flat clusters Table 4 has straight pipelines and 8:8; under the same accounting ours is at least as fast.

    Speed-ups by recursion, ours / best cut of the published form: BERT-48 B 10.9 (8 stages of 2) / 10.14 (straight),
    C 9.18 (straight itself); XLNet-36 B 13.3 (4:6:6) / 12.65 (8:8), C 12.2 (8 of 2) / 10.51 (straight): two replicas
    halve the fill of 16 stages, which costs more than their all-reduce. GNMT-16 on B and C is left out: a straight
    pipeline of its layers stays below 7 times one device, for the profile's longest takes 36 of 249 ms.
    """
    table = table_of(name)
    options = DappleOptions(recursion=True, width=1, compared=8, most_stages=16 if straight else 3, most_ways=0)
    plan = plan_dapple(table, servers, microbatches, options)
    assert speedup(table, plan, microbatches) >= published - 0.005


def exhaustive_s(table: StageTable, servers: Servers, microbatches: int, upstream: bool) -> float:
    """The least closed-form latency of all cuts, device counts and placements."""

    def plans(first: int, free: tuple[int, ...]) -> Iterator[tuple[tuple[int, int, tuple[int, ...]], ...]]:
        yield ((first, table.layers - 1, free),)
        for last in range(first, table.layers - 1):
            for group in itertools.product(*(range(n + 1) for n in free)):
                if 0 < sum(group) < sum(free):
                    left = tuple(a - b for a, b in zip(free, group, strict=True))
                    for rest in plans(last + 1, left):
                        yield ((first, last, group), *rest)

    every = (stage_blocks(table, servers, plan, upstream) for plan in plans(0, servers.devices))
    return min(pipeline_latency_s(blocks, microbatches) for blocks in every)


def test_exhaustive_search_agrees() -> None:
    """100 small instances: never below, and within 2 % (in fact equal)."""
    draw = random.Random(0)
    for _ in range(100):
        layers = draw.randrange(2, 6)
        columns = [[draw.uniform(a, b) for _ in range(layers)] for a, b in ((0.5, 3), (0.5, 3), (0, 10), (0, 5))]
        table = layer_table(*columns)
        devices = draw.choice([(2, 2), (3, 1), (2, 1), (1, 1, 2), (4,), (1, 2)])
        servers = Servers(devices, 25.0, draw.uniform(1, 10), draw.uniform(1, 10))
        microbatches, upstream = draw.randrange(1, 9), draw.random() < 0.5
        least = exhaustive_s(table, servers, microbatches, upstream)
        plan = plan_dapple(table, servers, microbatches, DappleOptions(upstream=upstream))
        assert least - 1e-9 <= plan.latency_s <= 1.02 * least


def test_a_plan_covers_layers_and_devices() -> None:
    """Uneven servers; every layer and every device once; the reason names a stage or link."""
    table = layer_table([1.0, 2.0, 3.0, 2.0], [2.0, 4.0, 6.0, 4.0], [1e9] * 4, [1e6] * 4)
    plan = plan_dapple(table, Servers((3, 2), 25e9, 1e9, 1e9), 16)
    assert [x for s in plan.stages for x in range(s.first, s.last + 1)] == [0, 1, 2, 3]
    assert sorted(d for s in plan.stages for d in s.devices) == [0, 1, 2, 3, 4]
    assert "takes longest" in plan.why


def test_data_parallel_overlaps() -> None:
    table = layer_table([1.0, 1.0], [2.0, 2.0], [10.0, 10.0], [1.0, 1.0])
    servers = Servers((1, 1), 10.0, 10.0, 10.0)  # an all-reduce of one layer: 1 s
    assert data_parallel_s(table, servers, 2) == pytest.approx(2 + 4 + 1)
    plan = plan_dapple(table, servers, 2, DappleOptions(overlap=True))
    assert plan.replicas == (2,)
    assert plan.latency_s == pytest.approx(7.0)


@pytest.mark.parametrize("devices", [(3,), (1, 1, 1, 1), (2, 2)])
def test_stages_of_a_branched_table_are_nested(devices: tuple[int, ...]) -> None:
    """States a, ab, ac, abc: no pipeline has ab and then ac, which would look free, nor four stages."""
    seconds = (0.0, 1.0, 5.0, 5.0, 9.0)
    table = StageTable(seconds, seconds, (0.0,) * 5, (0.1,) * 4, ((), (0,), (0,), (0, 1, 2)))
    assert table.most_stages == 3
    rates = np.full((sum(devices),) * 2, 10.0)
    plans = (
        plan_dapple(table, Servers(devices, 10.0, 10.0, 10.0), 50),
        plan_pipedream(table, sum(devices), 10.0),
        plan_spp(table, rates, 50),
    )
    for plan in plans:
        ends = [stage.last for stage in plan.stages]
        assert ends[-1] == 3
        assert all(a in table.before[b] for a, b in itertools.pairwise(ends))


def test_refused() -> None:
    table = layer_table([1.0], [1.0], [0.0], [0.0])
    for options in (DappleOptions(width=0), DappleOptions(compared=0)):
        with pytest.raises(ArgumentError, match="at least 1 each"):
            plan_dapple(table, A, 1, options)
    with pytest.raises(ArgumentError, match="most_stages 0"):
        plan_dapple(table, A, 1, DappleOptions(most_stages=0))
    with pytest.raises(ArgumentError, match="backward_s of layer 0 is -1"):
        layer_table([1.0], [-1.0], [0.0], [0.0])
    with pytest.raises(ArgumentError, match="rates above 0"):
        Servers((1, 1), 1.0, 0.0, 1.0)
    assert chain_of(()) == ()
    with pytest.raises(ArgumentError, match="0 microbatches"):
        plan_dapple(layer_table([1.0], [1.0], [0.0], [0.0]), A, 0)
    with pytest.raises(ArgumentError, match="columns of"):
        layer_table([1.0], [1.0, 2.0], [0.0], [0.0])


def test_servers_of_a_cluster() -> None:
    cluster = preset_cluster("h100", 16)
    servers = servers_of(cluster)
    assert servers.devices == (8, 8)
    assert servers.inside_bytes_per_s == cluster.nodes[0].link.bytes_per_s
