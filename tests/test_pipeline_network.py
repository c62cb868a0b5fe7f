"""Pipelines over two processes of a core each, calibrated and planned. Figures: `python -m bench.pipeline_network`."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cluster import Cluster
from bench.pipeline_network import LOOPBACK, lacking, run_pipelines
from bench.pipeline_network_worker import Asked

SMALL = Asked((), ("1f1b", "gpipe"), (4,), 2, 15.0, True)


@pytest.mark.full
@pytest.mark.parametrize("link", [LOOPBACK, "200mbit"])
def test_a_pipeline_over_two_processes(link: str, tmp_path: Path) -> None:
    if reason := lacking(link):
        pytest.skip(reason)
    rows = run_pipelines(link, tmp_path, SMALL)
    assert {row["schedule"] for row in rows} == {"1f1b", "gpipe"}
    network = Cluster.from_toml(tmp_path / "cluster.toml").network
    assert network is not None
    if link != LOOPBACK:
        assert 15e6 < network.rate_bytes_per_s < 40e6  # 200 Mbit are 25 MB a second
    for row in rows:  # other tests run beside this one
        assert 0.1 < row["predicted_s"] / row["measured_s"] < 5.0, row
