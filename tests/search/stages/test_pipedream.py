"""PipeDream's published replicas, from its own profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.costmodel import read_profile
from autoshard.errors import ArgumentError
from autoshard.search.stages import layer_table, plan_pipedream, profile_table

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "pipedream"
RATE = 1e9  # the released optimizer's default


@pytest.mark.parametrize(
    ("name", "devices", "replicas"),
    [
        ("image_classification__vgg16", 4, (3, 1)),
        ("image_classification__vgg16", 8, (7, 1)),
        ("image_classification__vgg16", 16, (13, 2, 1)),
        ("image_classification__alexnet", 4, (3, 1)),
        ("image_classification__alexnet", 16, (15, 1)),
        ("translation__gnmt", 4, (1, 1, 1, 1)),
    ],
)
def test_published_replicas(name: str, devices: int, replicas: tuple[int, ...]) -> None:
    """All as published but vgg16 on 16.

    There 15-1 is published and 13-2-1 has a slowest stage 4 % faster (56.5 and 58.8 ms at 1 GB/s) by the optimizer's
    own formulas; the published plan is the best of two stages.
    """
    path = FOLDER / f"{name}.graph.txt"
    if not path.exists():
        pytest.skip("the profiles of shared/data are not here")
    table = profile_table(read_profile(path))
    plan = plan_pipedream(table, devices, RATE, transfers=True)
    assert plan.replicas == replicas
    if devices == 16 and "vgg16" in name:
        assert plan.latency_s < 0.0588


def test_straight() -> None:
    table = layer_table([1.0] * 4, [1.0] * 4, [0.0] * 4, [0.0] * 4)
    plan = plan_pipedream(table, 4, 1.0, straight=True)
    assert plan.replicas == (1, 1, 1, 1)
    assert plan.latency_s == 2.0
    with pytest.raises(ArgumentError, match="4 layers on 5 devices"):
        plan_pipedream(table, 5, 1.0, straight=True)
    with pytest.raises(ArgumentError, match=r"0.0 bytes a second"):
        plan_pipedream(table, 2, 0.0)
