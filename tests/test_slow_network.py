"""Two hosts joined by a slow link: calibrated, planned, run. The figures come from `python -m bench.slow_network`."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cluster import Cluster
from bench.namespaces import missing
from bench.slow_network import rank_correlation, run_link, summary


@pytest.mark.slow
def test_a_step_over_a_slow_link(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    rows = run_link("200mbit", tmp_path, 20.0, True, 9931)
    assert {"data parallel", "fully sharded"} <= {row["plan"] for row in rows}
    cluster = Cluster.from_toml(tmp_path / "cluster.toml")
    assert cluster.size == 2
    assert cluster.network is not None
    # 200 Mbit are 25 MB; a burst and the protocol's own bytes leave some room.
    assert 15e6 < cluster.network.rate_bytes_per_s < 40e6
    for row in rows:
        assert 0.2 < row["predicted_s"] / row["measured_s"] < 5.0, row
    talking = [row for row in rows if row["traffic_s"] > 0.5 * row["predicted_s"]]
    assert talking, "a plan that talks over the link takes most of its time for that"


def test_rank_correlation() -> None:
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 90.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)


def test_summary() -> None:
    error, rank = summary([{"predicted_s": 1.1, "measured_s": 1.0}, {"predicted_s": 1.6, "measured_s": 2.0}])
    assert error == pytest.approx(0.15)
    assert rank == pytest.approx(1.0)
