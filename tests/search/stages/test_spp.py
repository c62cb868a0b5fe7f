"""SPP's planner: the order of devices, its bottleneck against all plans, and list-scheduled pipelines."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from autoshard.cluster import preset_cluster
from autoshard.costmodel import read_profile
from autoshard.errors import ArgumentError
from autoshard.search.stages import (
    StageTable,
    bandwidths_of,
    chain_of,
    device_order,
    layer_table,
    plan_spp,
    profile_table,
    stages_s,
)
from autoshard.search.stages.spp import _Bottleneck

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "dapple"


def two_servers() -> np.ndarray:
    found = np.full((16, 16), 3e9)
    for k in (0, 8):
        found[k : k + 8, k : k + 8] = 25e9
    return found


def test_order_keeps_servers_together() -> None:
    mixed = np.random.default_rng(0).permutation(16)
    order = device_order(two_servers()[np.ix_(mixed, mixed)])
    assert sorted(order) == list(range(16))
    assert len({int(mixed[d]) // 8 for d in order[:8]}) == 1
    chain = np.array([[0, 1, 9, 1], [1, 0, 1, 9], [9, 1, 0, 2], [1, 9, 2, 0]], float)
    assert device_order(chain) in {(0, 2, 3, 1), (0, 2, 1, 3)}
    with pytest.raises(ArgumentError, match="shape"):
        device_order(np.zeros((2, 2)))
    with pytest.raises(ArgumentError, match="shape"):
        device_order(np.full((2, 2), np.nan))


def test_bottleneck_is_the_least_of_all() -> None:
    """The recurrence against all cuts and device counts, 60 instances."""
    draw = random.Random(0)
    for _ in range(60):
        layers, devices, microbatches = draw.randrange(2, 6), draw.randrange(2, 5), draw.randrange(1, 9)
        columns = [[draw.uniform(a, b) for _ in range(layers)] for a, b in ((0.5, 3), (0.5, 3), (0, 10), (0, 5))]
        table = layer_table(*columns)
        half = np.triu(np.array([[draw.uniform(1, 10) for _ in range(devices)] for _ in range(devices)]), 1)
        rates = half + half.T
        found = _Bottleneck(table, rates, microbatches)
        for count in range(1, min(layers, devices) + 1):
            found.more_stages()
            assert found.values[-1][layers, :, devices].min() == pytest.approx(
                least_bottleneck(table, rates, microbatches, count)
            )
            cuts = found.cuts(count)
            assert [x for a, b, _ in cuts for x in range(a, b + 1)] == list(range(layers))
            assert [d for _, _, each in cuts for d in each] == list(range(devices))


def least_bottleneck(table: StageTable, rates: np.ndarray, microbatches: int, count: int) -> float:
    best = float("inf")
    for cuts in itertools.combinations(range(1, table.layers), count - 1):
        for parts in itertools.combinations(range(1, len(rates)), count - 1):
            layers, places = (0, *cuts, table.layers), (0, *parts, len(rates))
            worst = 0.0
            for k in range(count):
                own = range(places[k], places[k + 1])
                forward_s, backward_s, nbytes = table.cost(layers[k], layers[k + 1] - 1)
                inside = min((rates[a, b] for a in own for b in own if a != b), default=np.inf)
                size = len(own)
                worst = max(
                    worst, microbatches * (forward_s + backward_s) / size + 2 * (size - 1) / size * nbytes / inside
                )
                if k:
                    before = range(places[k - 1], places[k])
                    between = min(rates[a, b] for a in before for b in own)
                    sent = 2 * table.output_bytes[layers[k] - 1]
                    worst = max(worst, microbatches * sent / (len(before) * size * between))
            best = min(best, worst)
    return best


def test_profiles_on_two_servers() -> None:
    """The best over the number of stages is taken, and every device and layer is used once."""
    path = FOLDER / "vgg-19-pbs-32.txt"
    if not path.exists():
        pytest.skip("the profiles of shared/data are not here")
    table = profile_table(chain_of(read_profile(path)))
    rates = two_servers()
    plan = plan_spp(table, rates, 32, most_stages=4)
    assert plan.replicas == (11, 4, 1)
    assert sorted(d for s in plan.stages for d in s.devices) == list(range(16))
    assert plan.latency_s == pytest.approx(stages_s(table, plan.stages, rates, 32))
    assert 32 * (table.forward_s[-1] + table.backward_s[-1]) / plan.latency_s > 14.7


def test_clusters_give_bandwidths() -> None:
    cluster = preset_cluster("h100", 16)
    rates = bandwidths_of(cluster)
    assert rates[0, 1] == cluster.nodes[0].link.bytes_per_s
    assert rates[0, 8] < rates[0, 1]
