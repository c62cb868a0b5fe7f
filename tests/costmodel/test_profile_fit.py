"""Fits to profiles: known laws are found again, what cannot be fitted is refused, Galvatron's profile is met."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from autoshard.cluster import DEVICE_PRESETS, Cluster, GroupLinks, Level, Link, Node, axis_group
from autoshard.costmodel import (
    BandwidthOptions,
    CollectiveKind,
    CollectiveTime,
    FitError,
    GroupBandwidth,
    LayerPoint,
    collective_time_s,
    fit_bandwidths,
    fit_layers,
    fit_protocols,
)
from autoshard.errors import ArgumentError, ClusterError
from bench import galvatron

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "galvatron"
A100 = DEVICE_PRESETS["a100"].device
MIB = 2**20


@pytest.fixture
def profile() -> Path:
    if not DATA.exists():
        pytest.skip("Galvatron's profile is not beside the repository")
    return DATA


# Layers


def law(layers: int, batch: float) -> float:
    return 4e-3 + 2e-3 * batch + layers * (0.5e-3 + 4e-3 * batch)


def layer_points(noise: float = 0.0, stacks: Sequence[int] = (2, 4)) -> list[LayerPoint]:
    factors = iter(1 + noise * np.random.default_rng(0).standard_normal(12 * len(stacks)))
    return [LayerPoint(n, b, law(n, b) * float(next(factors))) for n in stacks for b in range(1, 13)]


def test_layers_are_found_again() -> None:
    fit = fit_layers(layer_points())
    assert fit.parameters == 4
    assert [fit.fixed_s, fit.sample_s] == pytest.approx([4e-3, 2e-3], rel=1e-3)
    assert [fit.layer_s, fit.layer_sample_s] == pytest.approx([0.5e-3, 4e-3], rel=1e-3)
    assert fit.error.worst < 1e-5
    assert fit.layer_time_s(8) == pytest.approx(32.5e-3, rel=1e-3)


def test_layers_with_noise_and_a_stray_point() -> None:
    """One point twice as slow, as by a neighbour's job: a plain least square would be 20 % off."""
    points = layer_points(noise=0.01)
    points[3] = dataclasses.replace(points[3], time_s=2 * points[3].time_s)
    fit = fit_layers(points)
    assert fit.layer_sample_s == pytest.approx(4e-3, rel=0.03)
    assert fit.time_s(32, 16) == pytest.approx(law(32, 16), rel=0.03)
    assert fit.error.worst == pytest.approx(0.5, abs=0.05)


def test_one_stack_gives_no_outside() -> None:
    fit = fit_layers(layer_points(stacks=(2,)))
    assert (fit.fixed_s, fit.sample_s, fit.parameters) == (0.0, 0.0, 2)
    assert fit.time_s(2, 20) == pytest.approx(law(2, 20), rel=1e-3)


def test_shuffled_batches_do_not_fit() -> None:
    points = layer_points()
    times = np.random.default_rng(1).permutation([p.time_s for p in points])
    shuffled = [dataclasses.replace(p, time_s=float(t)) for p, t in zip(points, times, strict=True)]
    assert fit_layers(shuffled).error.worst > 0.5
    assert fit_layers(shuffled).error_on(points).worst > galvatron.LAYER_LIMIT


def test_layers_refused() -> None:
    points = layer_points()
    with pytest.raises(ArgumentError, match="4 measured points for 4 parameters"):
        fit_layers([points[0], points[1], points[12], points[13]])
    with pytest.raises(ArgumentError, match="0 measured points"):
        fit_layers([])
    with pytest.raises(ArgumentError, match="one batch only"):
        fit_layers([LayerPoint(n, 2, law(n, 2)) for n in range(1, 8)])
    for time in (-1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="above 0"):
            fit_layers([*points, LayerPoint(2, 3, time)])
    with pytest.raises(ArgumentError, match="0 layers"):
        LayerPoint(0, 1, 1.0)
    with pytest.raises(ArgumentError, match="0 measured points"):
        fit_layers(points).error_on([])


# Protocols

PROTOCOLS = (Link(60e9, 1e-6), Link(200e9, 8e-6))
LAUNCH_S = 20e-6


def protocol_time_s(kind: CollectiveKind, nbytes: float, size: int, links: Sequence[Link], launch_s: float) -> float:
    """As a user of the links would say it."""
    return launch_s + min(collective_time_s(kind, nbytes, GroupLinks(size, (Level(size, link),))) for link in links)


def collective_rows(noise: float = 0.0, kind: CollectiveKind = "all_gather") -> list[CollectiveTime]:
    random = np.random.default_rng(0)
    return [
        CollectiveTime(
            kind,
            size,
            float(2**power),
            protocol_time_s(kind, 2**power, size, PROTOCOLS, LAUNCH_S) * (1 + noise * random.uniform(-1, 1)),
        )
        for size in (2, 4, 8)
        for power in range(16, 31)
    ]


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_protocols_are_found_again(kind: CollectiveKind) -> None:
    fit = fit_protocols(collective_rows(kind=kind), tolerance=0.001)
    assert len(fit.links) == 2
    assert fit.parameters == 5
    assert fit.launch_s == pytest.approx(LAUNCH_S, rel=0.02)
    for found, true in zip(fit.links, PROTOCOLS, strict=True):
        assert found.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.02)
        assert found.latency_s == pytest.approx(true.latency_s, rel=0.05)
    assert fit.link_for(kind, 2**16, 8) == fit.links[0]
    assert fit.link_for(kind, 2**30, 8) == fit.links[1]


def test_protocols_with_noise() -> None:
    fit = fit_protocols(collective_rows(noise=0.03), most=2, tolerance=0.0)
    assert fit.error.worst < 0.04
    assert fit.error_on(collective_rows()).worst < 0.03
    assert fit.links[-1].bytes_per_s == pytest.approx(200e9, rel=0.05)


def test_no_more_protocols_than_needed() -> None:
    times = [protocol_time_s(r.kind, r.nbytes, r.size, PROTOCOLS[1:], LAUNCH_S) for r in collective_rows()]
    one = [dataclasses.replace(r, time_s=t) for r, t in zip(collective_rows(), times, strict=True)]
    assert len(fit_protocols(one).links) == 1


def test_protocols_refused() -> None:
    rows = collective_rows()
    with pytest.raises(ArgumentError, match="3 measured points for 3 parameters"):
        fit_protocols(rows[:3])
    with pytest.raises(ArgumentError, match="one size in bytes only"):
        fit_protocols([dataclasses.replace(r, nbytes=1e6) for r in rows])
    with pytest.raises(ArgumentError, match=r"is -1\.0"):
        fit_protocols([*rows, dataclasses.replace(rows[0], time_s=-1.0)])
    with pytest.raises(ArgumentError, match="over 1 devices"):
        CollectiveTime("all_reduce", 1, 1.0, 1.0)


# Bandwidths

LINK = Link(150e9, 0.0)
NETWORK = Link(10e9, 0.0, 1.0, ((4, 0.6),))
SHAPES = (
    *((1, n, strided) for n in (2, 4) for strided in (False, True)),
    (1, 8, False),
    *((2, n, strided) for n in (2, 4, 8) for strided in (False, True)),
    (2, 16, False),
)


def bandwidth_rows(noise: float = 0.0) -> list[GroupBandwidth]:
    """What `axis_group` and `collective_time_s` say of a cluster."""
    random = np.random.default_rng(0)
    rows: list[GroupBandwidth] = []
    for nodes, size, strided in SHAPES:
        row = GroupBandwidth(nodes, 8, size, strided, 1.0)
        cluster = Cluster("true", (Node(A100, 8, LINK),) * nodes, NETWORK)
        rate = 2 * (size - 1) / size * 64 * MIB / collective_time_s("all_reduce", 64 * MIB, row.group(cluster))
        rows.append(dataclasses.replace(row, bus_bytes_per_s=rate * (1 + noise * random.uniform(-1, 1))))
    return rows


def test_bandwidths_are_found_again() -> None:
    fit = fit_bandwidths(bandwidth_rows(), BandwidthOptions(tolerance=0.01))
    assert fit.parameters == 3
    assert fit.link.bytes_per_s == pytest.approx(150e9, rel=0.01)
    assert fit.network is not None
    assert fit.network.bytes_per_s == pytest.approx(10e9, rel=0.01)
    ((members, share),) = fit.network.efficiency_by_members
    assert (members, share) == (4, pytest.approx(0.6, rel=0.02))


def test_bandwidths_with_noise() -> None:
    fit = fit_bandwidths(bandwidth_rows(noise=0.04))
    assert fit.error_on(bandwidth_rows()).worst < 0.05


def test_bandwidths_with_latencies() -> None:
    """Means over sizes with known latencies: the rates without them."""
    sizes = (16.0 * MIB, 64.0 * MIB)
    options = BandwidthOptions(sizes, latency_s=5e-6, network_latency_s=20e-6, tolerance=0.01)
    cluster = Cluster("true", (Node(A100, 8, Link(150e9, 5e-6)),) * 2, Link(10e9, 20e-6))
    rows: list[GroupBandwidth] = []
    for nodes, size, strided in SHAPES:
        row = GroupBandwidth(nodes, 8, size, strided, 1.0)
        group = row.group(cluster.part(0, 8 * nodes))
        rates = [2 * (size - 1) / size * n / collective_time_s("all_reduce", n, group) for n in sizes]
        rows.append(dataclasses.replace(row, bus_bytes_per_s=sum(rates) / 2))
    fit = fit_bandwidths(rows, options)
    assert fit.parameters == 2
    assert fit.network is not None
    assert (fit.link.latency_s, fit.network.latency_s) == (5e-6, 20e-6)
    assert [fit.link.bytes_per_s, fit.network.bytes_per_s] == pytest.approx([150e9, 10e9], rel=0.01)


def test_one_node_has_no_network() -> None:
    rows = [r for r in bandwidth_rows() if r.nodes == 1]
    fit = fit_bandwidths(rows)
    assert (fit.network, fit.parameters) == (None, 1)
    with pytest.raises(ClusterError, match="no network"):
        fit.cluster("two", A100, 2, 8)


def test_members_of_a_group() -> None:
    shapes = {(2, False): 2, (2, True): 1, (4, True): 2, (8, False): 8, (8, True): 4, (16, False): 8}
    for (size, strided), members in shapes.items():
        assert GroupBandwidth(2, 8, size, strided, 1.0).members == members


def test_bandwidths_refused() -> None:
    rows = bandwidth_rows()
    with pytest.raises(ArgumentError, match="2 measured points for 2 parameters"):
        fit_bandwidths(rows[-2:])
    with pytest.raises(ArgumentError, match="no group that lies in one node"):
        fit_bandwidths([r for r in rows if r.members < r.size])
    with pytest.raises(ArgumentError, match=r"is -2\.0"):
        fit_bandwidths([*rows, dataclasses.replace(rows[0], bus_bytes_per_s=-2.0)])
    with pytest.raises(ArgumentError, match="groups of 3 of 2 nodes of 8"):
        GroupBandwidth(2, 8, 3, True, 1.0)


# Galvatron's profile


def test_galvatron_layers(profile: Path) -> None:
    """Fitted on batches 1 to 6, 7 to 12 are predicted within 5 %: steps, and a layer alone."""
    for section in galvatron.layer_sections(profile):
        assert section.limit == 0.05
        assert section.error.worst <= 0.05, section.title
    points = galvatron.read_layers(profile)
    assert len(points) == 24
    fit = galvatron.layer_fit(points)
    assert fit.error.points == 12
    assert fit.error_on([p for p in points if p.batch > 6]).worst <= 0.05


def test_galvatron_layers_shuffled(profile: Path) -> None:
    """The promise can fail: with batches 1 to 6 exchanged it does."""
    points = galvatron.read_layers(profile)
    turned = [dataclasses.replace(p, batch=7 - p.batch) if p.batch <= 6 else p for p in points]
    fit = galvatron.layer_fit(turned)
    assert fit.error_on([p for p in points if p.batch > 6]).worst > 0.05


def test_galvatron_times(profile: Path) -> None:
    """Every point within 10 % by the links alone, 5 figures for 33 points."""
    rows = galvatron.read_times(profile, "all_reduce")
    fit = fit_protocols(rows)
    times = [protocol_time_s(r.kind, r.nbytes, r.size, fit.links, fit.launch_s) for r in rows]
    errors = [abs(t / r.time_s - 1) for t, r in zip(times, rows, strict=True)]
    assert (len(rows), fit.parameters) == (33, 5)
    assert max(errors) <= 0.1
    assert fit.error.worst == pytest.approx(max(errors))


def test_galvatron_bandwidths(profile: Path) -> None:
    """Every point within 10 %, one node and two, from a cluster through `axis_group` and `collective_time_s`."""
    rows = galvatron.read_bandwidths(profile)
    fit = fit_bandwidths(rows)
    assert len(rows) == 12
    assert fit.parameters <= 4
    errors: list[float] = []
    for row in rows:
        cluster = fit.cluster("galvatron", A100, row.nodes, row.devices_per_node)
        rest = cluster.size // row.size
        mesh = (("x", row.size), ("y", rest)) if row.strided else (("y", rest), ("x", row.size))
        time = collective_time_s("all_reduce", 1e9, axis_group(cluster, mesh, ("x",)))
        measured_s = 2 * (row.size - 1) / row.size * 1e9 / row.bus_bytes_per_s
        errors.append(abs(time / measured_s - 1))
    assert max(errors) <= 0.1


def test_galvatron_cluster_file(profile: Path, tmp_path: Path) -> None:
    """The fitted cluster survives its file."""
    cluster = fit_bandwidths(galvatron.read_bandwidths(profile)).cluster("galvatron", A100, 2, 8)
    path = tmp_path / "galvatron.toml"
    path.write_text(cluster.to_toml())
    assert Cluster.from_toml(path) == cluster


def test_bench(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert galvatron.main([str(profile), "--json", str(tmp_path / "record.json")]) == 0
    assert (tmp_path / "record.json").exists()
    monkeypatch.setattr(galvatron, "LAYER_LIMIT", 0.001)
    monkeypatch.setattr(galvatron, "sections", galvatron.layer_sections)
    assert galvatron.main([str(profile)]) == 1


def test_error_counts_both_sides() -> None:
    section = galvatron.Section("", (galvatron.Row("", 2.0, 1.0), galvatron.Row("", 1.0, 1.25)), 0.1, 0, {})
    assert section.error == FitError(0.5, 0.375, 2)
    assert not section.met
