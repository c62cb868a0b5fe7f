"""Calibration on the tests' CPU devices: quick, resumable, and a fit that finds what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.calibrate import Measured, calibrate, fit_link
from autoshard.calibrate.record import Cache
from autoshard.calibrate.run import kind_curves
from autoshard.cluster import Cluster, GroupLinks, Level, Link
from autoshard.costmodel import COLLECTIVE_KINDS, CollectiveKind, collective_time_s
from autoshard.errors import ArgumentError
from autoshard.hardware import Curve


def group(n: int) -> Any:
    return lambda link: GroupLinks(n, (Level(n, link),))


@pytest.mark.parametrize("n", [2, 8])
def test_fit_recovers_a_link(n: int) -> None:
    true, rng = Link(2.5e8, 4e-5), np.random.default_rng(0)
    timed: list[tuple[CollectiveKind, float, float]] = [
        (kind, float(2**p), collective_time_s(kind, 2**p, group(n)(true)) * float(np.exp(rng.normal(0, 0.03))))
        for kind in COLLECTIVE_KINDS
        for p in range(10, 26, 2)
    ]
    timed[3] = (*timed[3][:2], 50 * timed[3][2])  # one that went wrong
    found = fit_link(timed, group(n))
    assert found.link.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.05)
    assert found.link.latency_s == pytest.approx(true.latency_s, rel=0.05)


def test_curves_leave_nothing_of_the_fit() -> None:
    """Kinds that no one latency and bandwidth describes come out as measured."""
    timed: list[tuple[CollectiveKind, float, float]] = [
        ("all_reduce", 1e4, 2e-4),
        ("all_reduce", 1e6, 9e-3),
        ("permute", 1e4, 1e-3),
        ("permute", 1e6, 2e-3),
    ]
    links = group(2)(fit_link(timed, group(2)).link)
    curves = kind_curves(timed, links, 1e-6)
    for kind, nbytes, seconds in timed:
        share = Curve.of(curves[kind]).at(nbytes)
        assert 1e-6 + collective_time_s(kind, nbytes, links) / share == pytest.approx(seconds)


def test_statistics() -> None:
    found = Measured.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.median, found.low, found.spread, found.count) == (3.0, 1.4, pytest.approx(2 / 3), 5)


def test_no_budget() -> None:
    with pytest.raises(ArgumentError, match="above 0"):
        calibrate(budget_s=0.0)


def test_quick_calibration_is_a_file_and_resumes(tmp_path: Path) -> None:
    cache = tmp_path / "c.jsonl"
    seen: list[str] = []
    first = calibrate(budget_s=1.0, quick=True, cache=cache, tell=lambda p: seen.append(p.key))
    assert first.fresh == len(seen) == len(first.record.measured)
    path = tmp_path / "c.toml"
    path.write_text(first.to_toml())
    cluster = Cluster.from_toml(path)
    device = cluster.device(0)
    assert cluster.size == jax.device_count()
    assert device.calibrated
    assert min(device.flops_per_s["f32"], device.memory_bytes_per_s, device.kernel_launch_s) > 0
    assert {"matmul.f32", "elementwise", "exp", "all_reduce"} <= set(device.efficiency)
    assert first.record.errors["node"] > 0
    again = calibrate(budget_s=1.0, quick=True, cache=cache)
    assert again.fresh == 0
    assert again.cluster == first.cluster


def test_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    cache = tmp_path / "c.jsonl"

    def tell(progress: Any) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(budget_s=1.0, quick=True, cache=cache, tell=tell)
    rows = [json.loads(line) for line in cache.read_text().splitlines()]
    assert [row["key"] for row in rows[1:]] == ["call@1", "launch@1"]


def test_cache_of_another_setup_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    Cache(path, {"jax": "1"}, fresh=False).add("call@1", Measured(1.0, 1.0, 0.0, 3))
    assert Cache(path, {"jax": "1"}, fresh=False).found == {"call@1": Measured(1.0, 1.0, 0.0, 3)}
    assert Cache(path, {"jax": "2"}, fresh=False).found == {}


def test_cache_cut_off_in_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    Cache(path, {}, fresh=False).add("call@1", Measured(1.0, 1.0, 0.0, 3))
    path.write_text(path.read_text() + '{"key": "launch@1", "med')
    assert list(Cache(path, {}, fresh=False).found) == ["call@1"]
    path.write_text("no json\n")
    with pytest.raises(ArgumentError, match="line 1"):
        Cache(path, {}, fresh=False)
