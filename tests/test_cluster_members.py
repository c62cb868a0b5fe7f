"""A network whose rate depends on how many members a group has in a node."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard.cluster import Cluster, DeviceSpec, Level, Link, Node, axis_group
from autoshard.errors import ClusterError

NVLINK = Link(450e9, 2e-6)
NETWORK = Link(50e9, 5e-6)
DEVICE = DeviceSpec("d", "gpu", {"f32": 1e12}, 2**30, 1e11)


def test_efficiency_by_members() -> None:
    """2 members in a node reach the whole rate, 4 and 8 the share of 4; a group in one node does not care."""
    network = dataclasses.replace(NETWORK, efficiency_by_members=((4, 0.5),))
    cluster = Cluster("test", (Node(DEVICE, 8, NVLINK),) * 2, network)
    for size, share in ((2, 1.0), (4, 1.0), (8, 0.5), (16, 0.5)):
        group = axis_group(cluster, (("x", size), ("y", 16 // size)), ("x",))
        assert group.levels[-1] == Level(2, network, share)
        assert group.levels[-1].rate_bytes_per_s == 50e9 * share
    assert axis_group(cluster, (("y", 2), ("x", 8)), ("x",)).levels == (Level(8, NVLINK),)


@pytest.mark.parametrize("entries", [((4, 0.5), (2, 0.7)), ((0, 0.5),), ((4, 1.5),), ((4, 0.5), (4, 0.4))])
def test_efficiency_by_members_refused(entries: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ClusterError, match="efficiency_by_members"):
        Link(50e9, 5e-6, 1.0, entries)
