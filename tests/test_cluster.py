"""Cluster descriptions: presets, what JAX sees, cluster files, communication groups."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster import (
    DEVICE_PRESETS,
    Cluster,
    DeviceSpec,
    Level,
    Link,
    Node,
    Wire,
    axis_group,
    mesh_size,
    resolve_cluster,
)
from autoshard.errors import ClusterError, MeshError
from autoshard.hardware import detect_nodes

NVLINK = Link(450e9, 2e-6)
NETWORK = Link(50e9, 5e-6)
DEVICE = DeviceSpec("d", "gpu", {"f32": 1e12}, 2**30, 1e11)


def cluster_of(*counts: int, shared: bool = False) -> Cluster:
    nodes = tuple(Node(DEVICE, count, NVLINK) for count in counts)
    return Cluster("test", nodes, NETWORK, shared)


# Presets


@pytest.mark.parametrize(
    ("text", "size", "nodes", "bf16", "nvlink", "network"),
    [
        ("h100x8", 8, 1, 989e12, 450e9, 50e9),
        ("a100x16", 16, 2, 312e12, 300e9, 25e9),
        ("h200x1024", 1024, 128, 989e12, 450e9, 50e9),
        ("b200x8", 8, 1, 2250e12, 900e9, 50e9),
        ("a100x12", 12, 2, 312e12, 300e9, 25e9),
    ],
)
def test_gpu_presets(text: str, size: int, nodes: int, bf16: float, nvlink: float, network: float) -> None:
    cluster = resolve_cluster(text)
    assert (cluster.name, cluster.size, len(cluster.nodes)) == (text, size, nodes)
    assert cluster.device(size - 1).peak_flops_per_s("bf16") == bf16
    assert cluster.nodes[0].link.bytes_per_s == nvlink
    assert cluster.network is not None
    assert cluster.network.bytes_per_s == network
    assert cluster.device(0).reduce_scatter


def test_v100_has_no_bf16_unit() -> None:
    device = resolve_cluster("v100x4").device(0)
    assert device.peak_flops_per_s("f16") == 125e12
    assert device.peak_flops_per_s("bf16") == device.peak_flops_per_s("tf32") == 15.7e12


def test_cpu_presets() -> None:
    assert resolve_cluster("cpu").size == 1
    cluster = resolve_cluster("cpux8")
    assert (cluster.size, len(cluster.nodes), cluster.network) == (8, 1, None)
    assert not cluster.device(0).reduce_scatter


def test_last_node_of_an_odd_count_is_smaller() -> None:
    cluster = resolve_cluster("a100x12")
    assert [node.count for node in cluster.nodes] == [8, 4]
    assert not cluster.homogeneous
    assert resolve_cluster("a100x16").homogeneous


@pytest.mark.parametrize(
    ("text", "hint"),
    [("h10x8", "did you mean 'h100x8'?"), ("H-100x8", "did you mean 'h100"), ("rtx", "pass a DeviceSpec")],
)
def test_unknown_preset(text: str, hint: str) -> None:
    with pytest.raises(ClusterError) as caught:
        resolve_cluster(text)
    message = str(caught.value)
    assert f"cluster {text!r} is not known" in message
    assert hint in message
    assert all(name in message for name in DEVICE_PRESETS)


def test_no_device() -> None:
    with pytest.raises(ClusterError, match="preset 'h100x0' has no device"):
        resolve_cluster("h100x0")


# Resolving


def test_count_of_a_mesh() -> None:
    assert resolve_cluster("h100").size == 1
    assert resolve_cluster("h100", count=16).size == 16
    assert resolve_cluster("cpux8", count=4).size == 4
    assert resolve_cluster("h100x16", count=8).size == 8
    assert resolve_cluster(DEVICE, count=4).nodes[0].count == 4
    with pytest.raises(ClusterError, match="16 devices wanted of cluster 'h100x8', which has 8"):
        resolve_cluster("h100x8", count=16)
    with pytest.raises(ClusterError, match="DeviceSpec 'd' alone says nothing of how many there are"):
        resolve_cluster(DEVICE)


def test_a_cluster_is_itself() -> None:
    cluster = cluster_of(4, 4)
    assert resolve_cluster(cluster) is cluster


def test_auto_shares_the_host() -> None:
    cluster = resolve_cluster("auto")
    assert cluster.size == len(jax.devices())
    device = cluster.device(0)
    assert device.kind == "cpu"
    more = detect_nodes(list(jax.devices()) * 2)[0][0]
    assert more.device.flops_per_s["f32"] == pytest.approx(device.flops_per_s["f32"] / 2)
    assert more.device.memory_bytes == device.memory_bytes // 2


@dataclass(frozen=True)
class FakeDevice:
    """As much of a JAX device as detection looks at."""

    device_kind: str
    process_index: int = 0
    slice_index: int = 0
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 60 * 2**30}


def test_gpus_are_recognised() -> None:
    devices = [FakeDevice("NVIDIA H100 80GB HBM3", 0, host) for host in (0, 0, 1, 1)]
    nodes, network = detect_nodes(devices)
    assert [node.count for node in nodes] == [2, 2]
    assert network == DEVICE_PRESETS["h100"].network
    assert nodes[0].device.name == "h100"
    assert nodes[0].device.memory_bytes == 60 * 2**30


def test_small_a100() -> None:
    nodes, network = detect_nodes([FakeDevice("NVIDIA A100-SXM4-40GB", 1)])
    assert network is None
    assert nodes[0].device.memory_bytes == 40 * 2**30  # another process's device: no statistics
    assert nodes[0].device.memory_bytes_per_s == 1555e9


def test_unknown_gpu() -> None:
    with pytest.raises(ClusterError, match=r"'NVIDIA H100 PCIe'.*\n.*\n.*cluster file"):
        detect_nodes([FakeDevice("NVIDIA H100 PCIe")])


# Figures


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 0}, "device 'd' has memory_bytes = 0"),
        ({"memory_bytes_per_s": -1.0}, "device 'd' has memory_bytes_per_s = -1.0"),
        ({"flops_per_s": {"bf16": 1.0}}, "device 'd' has flops_per_s for bf16"),
        ({"flops_per_s": {"f32": 1.0, "fp8": 1.0}}, "device 'd' has flops_per_s for f32, fp8"),
        ({"flops_per_s": {"f32": float("nan")}}, "flops_per_s.f32 = nan"),
        ({"matmul_efficiency": 1.5}, "matmul_efficiency = 1.5"),
        ({"kernel_launch_s": -1e-6}, "kernel_launch_s = -1e-06"),
    ],
)
def test_wrong_figures(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        dataclasses.replace(DEVICE, **changes)
    assert message in str(caught.value)
    assert "expected:" in str(caught.value)


def test_several_nodes_need_a_network() -> None:
    with pytest.raises(ClusterError, match="has 2 nodes and no network"):
        Cluster("c", (Node(DEVICE, 1, NVLINK), Node(DEVICE, 1, NVLINK)))
    with pytest.raises(ClusterError, match="no nodes"):
        Cluster("c", ())


def test_smallest_memory_counts() -> None:
    small = dataclasses.replace(DEVICE, memory_bytes=2**20)
    cluster = Cluster("c", (Node(DEVICE, 4, NVLINK), Node(small, 2, NVLINK)), NETWORK)
    assert cluster.memory_bytes == 2**20
    assert (cluster.device(3), cluster.device(4)) == (DEVICE, small)
    with pytest.raises(MeshError, match="device 6"):
        cluster.device(6)


def test_part() -> None:
    cluster = cluster_of(4, 4, 4)
    assert [node.count for node in cluster.part(2, 6).nodes] == [2, 4]
    assert cluster.part(0, 12) is cluster
    with pytest.raises(MeshError, match="devices 8 to 15"):
        cluster.part(8, 8)
    assert cluster.link_between(0, 3) == NVLINK
    assert cluster.link_between(3, 4) == NETWORK


def test_describe() -> None:
    assert resolve_cluster("a100x16").describe() == (
        "a100x16: 16 devices\n"
        "  2 nodes of 8 a100: 79.3 GiB at 2039 GB/s, 312 TFLOP/s bf16, link 300 GB/s, 1.9 us\n"
        "  network 25 GB/s, 4 us a device"
    )


def test_target_text() -> None:
    text = resolve_cluster("h100x8").device(0).target_text()
    for line in (
        "  core_count: 132",
        "  clock_rate_ghz: 1.98",
        "  device_memory_size: 84942979072",
        "  memory_bandwidth: 3352320000000",
        "  cuda_compute_capability { major: 9 minor: 0 }",
        '  name: "NVIDIA H100 80GB HBM3"',
        "  device_interconnect_info { active_links: 18 }",
        'platform_name: "CUDA"',
    ):
        assert line in text.splitlines()
    with pytest.raises(ClusterError, match="no compile target"):
        DEVICE.target_text()


# Groups


def test_groups_of_a_gpu_cluster() -> None:
    cluster = resolve_cluster("h200x1024")
    nvlink, network = cluster.nodes[0].link, cluster.network
    assert network is not None
    mesh = (("data", 64), ("pipe", 2), ("model", 8))
    assert axis_group(cluster, mesh, ("model",)).levels == (Level(8, nvlink),)
    assert axis_group(cluster, mesh, ("data",)).levels == (Level(64, network),)
    assert axis_group(cluster, mesh, ("pipe", "model")).levels == (Level(8, nvlink), Level(2, network))
    assert axis_group(cluster, mesh, ("model", "pipe")) == axis_group(cluster, mesh, ("pipe", "model"))
    assert axis_group(cluster, mesh, ("data", "pipe", "model")).levels == (Level(8, nvlink), Level(128, network))


def test_axes_inside_and_across_nodes() -> None:
    """(data=4, model=4) on 2 nodes of 8: model within, data two in each node."""
    cluster = cluster_of(8, 8)
    mesh = (("data", 4), ("model", 4))
    assert axis_group(cluster, mesh, ("model",)).levels == (Level(4, NVLINK),)
    assert axis_group(cluster, mesh, ("data",)).levels == (Level(2, NVLINK), Level(2, NETWORK))


def test_groups_of_one() -> None:
    group = axis_group(cluster_of(8), (("data", 8), ("model", 1)), ("model",))
    assert (group.size, group.levels) == (1, ())


def test_uneven_groups_are_flat_and_slow() -> None:
    group = axis_group(cluster_of(8, 4), (("data", 12),), ("data",))
    assert group.levels == (Level(12, NETWORK),)


def test_slowest_link_of_unlike_nodes() -> None:
    slow = Link(1e9, 1e-6)
    cluster = Cluster("c", (Node(DEVICE, 4, NVLINK), Node(DEVICE, 4, slow)), NETWORK)
    assert axis_group(cluster, (("data", 2), ("model", 4)), ("model",)).levels == (Level(4, slow),)


def test_shared_network_is_divided() -> None:
    """8 groups of 2 nodes go through one adapter of each node; a group of all 16 devices as well."""
    cluster = cluster_of(8, 8, shared=True)
    mesh = (("data", 2), ("model", 8))
    eighth = Link(50e9 / 8, 5e-6)
    assert axis_group(cluster, mesh, ("data",)).levels == (Level(2, eighth),)
    assert axis_group(cluster, mesh, ("data", "model")).levels == (Level(8, NVLINK), Level(2, eighth))
    assert axis_group(cluster, mesh, ("model",)).levels == (Level(8, NVLINK),)


def test_mesh_on_the_first_devices() -> None:
    assert axis_group(cluster_of(8, 8), (("data", 8),), ("data",)).levels == (Level(8, NVLINK),)


def test_mesh_errors() -> None:
    with pytest.raises(MeshError, match="mesh axis 'expert'"):
        axis_group(cluster_of(8), (("data", 8),), ("expert",))
    with pytest.raises(MeshError, match=r"16 devices \(data=16\) on cluster 'test'"):
        axis_group(cluster_of(8), (("data", 16),), ("data",))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_levels_multiply_to_the_group(sizes: list[int], per_node: int, data: st.DataObject) -> None:
    mesh = tuple((f"a{i}", n) for i, n in enumerate(sizes))
    names = data.draw(st.lists(st.sampled_from([name for name, _ in mesh]), unique=True, min_size=1))
    count = mesh_size(mesh)
    cluster = cluster_of(*[per_node] * -(-count // per_node))
    group = axis_group(cluster, mesh, tuple(names))
    expected = 1
    for name, n in mesh:
        expected *= n if name in names else 1
    assert group.size == expected


# Cluster files


@pytest.mark.parametrize("text", ["h100x8", "a100x12", "v100x4", "h200x64", "cpux8", "auto"])
def test_file_round_trip(text: str, tmp_path: Path) -> None:
    cluster = resolve_cluster(text)
    path = tmp_path / "cluster.toml"
    path.write_text(cluster.to_toml())
    assert Cluster.from_toml(path) == cluster
    assert resolve_cluster(path) == resolve_cluster(str(path)) == cluster


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.floats(1, 1e15), st.floats(0, 1)), min_size=1, max_size=4), st.booleans()
)
def test_any_cluster_round_trips(rows: list[tuple[int, float, float]], shared: bool) -> None:
    nodes = tuple(
        Node(dataclasses.replace(DEVICE, memory_bytes_per_s=rate), count, Link(rate, latency))
        for count, rate, latency in rows
    )
    cluster = Cluster('a "name" \\ ü', nodes, NETWORK, shared)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.toml"
        path.write_text(cluster.to_toml(), encoding="utf-8")
        assert Cluster.from_toml(path) == cluster


GOOD = """
name = "mixed"
[devices.big]
preset = "h200"
memory_bytes = 120e9
[devices.small]
kind = "gpu"
flops_per_s = { bf16 = 312e12, f32 = 19.5e12 }
memory_bytes = 40e9
memory_bytes_per_s = 1555e9
[links.nvlink]
bytes_per_s = 300e9
latency_s = 2e-6
efficiency = 0.8
[links.ethernet]
bytes_per_s = 12.5e9
latency_s = 2e-5
[[nodes]]
device = "big"
count = 8
repeat = 2
[[nodes]]
device = "small"
count = 4
link = "nvlink"
[network]
link = "ethernet"
shared = true
"""


def test_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(GOOD)
    cluster = Cluster.from_toml(path)
    assert (cluster.name, cluster.size, cluster.shared_network) == ("mixed", 20, True)
    assert [node.device.name for node in cluster.nodes] == ["h200", "h200", "small"]
    assert cluster.device(0).memory_bytes == 120_000_000_000
    assert cluster.device(0).memory_bytes_per_s == 4.8e12
    assert cluster.nodes[0].link == DEVICE_PRESETS["h200"].link
    assert cluster.device(19).reduce_scatter
    assert cluster.network == Link(12.5e9, 2e-5)


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("bytes_per_s = 300e9", "bytes_per_s = -1", ["[links.nvlink]", "bytes_per_s = -1", "above 0"]),
        ("latency_s = 2e-6", "latencys = 2e-6", ["[links.nvlink]", "'latencys'", "did you mean 'latency_s'?"]),
        ("efficiency = 0.8", "efficiency = 1.2", ["[links.nvlink]", "efficiency = 1.2"]),
        ("efficiency = 0.8", "efficiency_by_members = 2", ["[links.nvlink]", "efficiency_by_members = 2"]),
        ("efficiency = 0.8", "efficiency_by_members = [[4, 2]]", ["[links.nvlink]", "[[4, 0.7]]"]),
        ("memory_bytes = 40e9\n", "", ["[devices.small]", "'memory_bytes' is missing"]),
        ("memory_bytes = 40e9", "memory_bytes = true", ["[devices.small]", "memory_bytes = True"]),
        ("memory_bytes = 40e9", "memory_bytes = 0.5", ["[devices.small]", "a whole number"]),
        ('kind = "gpu"', 'kind = "gpus"', ["[devices.small]", "kind = 'gpus'"]),
        (", f32 = 19.5e12", "", ["[devices.small]", "flops_per_s has no f32"]),
        ("bf16 = 312e12", "bf61 = 312e12", ["[devices.small.flops_per_s]", "did you mean 'bf16'?"]),
        ('preset = "h200"', 'preset = "h300"', ["[devices.big]", "preset = 'h300'", "one of v100"]),
        ('device = "small"', 'device = "smal"', ["[[nodes]] number 2", "device = 'smal'", "did you mean 'small'?"]),
        ("count = 4\n", "", ["[[nodes]] number 2", "'count' is missing"]),
        ("count = 4", "count = 1.5", ["[[nodes]] number 2", "a whole number"]),
        ('link = "nvlink"\n', "", ["[[nodes]] number 2", "'link' is missing"]),
        ('link = "nvlink"', 'link = "pcie"', ["[[nodes]] number 2", "link = 'pcie'", "[links.pcie]"]),
        ('link = "ethernet"\n', "", ["[network]", "'link' is missing"]),
        ("shared = true", 'shared = "yes"', ["[network]", "true or false"]),
        ('[network]\nlink = "ethernet"\nshared = true\n', "", ["3 nodes and no [network]"]),
        ("[network]", "[networks]", ["the file", "'networks'", "did you mean 'network'?"]),
        ('name = "mixed"', "name = mixed", ["this is no TOML"]),
        ('name = "mixed"', "name = 3", ["name = 3"]),
    ],
)
def test_file_errors(old: str, new: str, messages: list[str], tmp_path: Path) -> None:
    assert old in GOOD
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ClusterError) as caught:
        Cluster.from_toml(path)
    text = str(caught.value)
    assert "cluster.toml" in text
    assert "expected:" in text
    assert "to do:" in text
    for message in messages:
        assert message in text


def test_missing_file_and_no_nodes(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No such file"):
        Cluster.from_toml(tmp_path / "none.toml")
    path = tmp_path / "empty.toml"
    path.write_text('name = "x"\n')
    with pytest.raises(ClusterError, match="'nodes' is missing"):
        Cluster.from_toml(path)
    path.write_text("nodes = 3\n")
    with pytest.raises(ClusterError, match=r"nodes = 3\.\n  expected: tables \[\[nodes\]\]"):
        Cluster.from_toml(path)


# Wires

WIRES = """
[links.nvlink]
bytes_per_s = 450e9
latency_s = 1e-6
efficiency = 0.8
[links.infiniband]
bytes_per_s = 50e9
latency_s = 2e-6
[[nodes]]
device = "h100"
count = 4
repeat = 2
[[wires]]
ends = ["0-3", "switch-a"]
link = "nvlink"
[[wires]]
ends = ["switch-b", "4-7"]
link = "nvlink"
[[wires]]
ends = ["0-3", "4-7"]
link = "infiniband"
[[wires]]
ends = [0, "7"]
link = "infiniband"
"""


def wired(tmp_path: Path, text: str = WIRES) -> Cluster:
    path = tmp_path / "wires.toml"
    path.write_text(text)
    return Cluster.from_toml(path)


def test_file_with_wires(tmp_path: Path) -> None:
    cluster = wired(tmp_path)
    nvlink, infiniband = Link(450e9, 1e-6, 0.8), Link(50e9, 2e-6)
    assert len(cluster.wires) == 13
    assert cluster.wires[0] == Wire(0, "switch-a", nvlink)
    assert cluster.wires[7] == Wire("switch-b", 7, nvlink)
    assert cluster.wires[8:] == (*(Wire(k, k + 4, infiniband) for k in range(4)), Wire(0, 7, infiniband))
    assert cluster.network is None
    assert [node.link for node in cluster.nodes] == [Link(360e9, 2e-6)] * 2
    assert cluster.link_between(0, 3) == Link(360e9, 2e-6)
    assert cluster.link_between(0, 4) == Link(50e9, 2e-6)
    assert cluster.link_between(1, 4).latency_s == pytest.approx(4e-6)
    assert cluster.describe().splitlines()[2:] == [
        "  8 wires of 450 GB/s, 1 us",
        "  5 wires of 50 GB/s, 2 us",
    ]
    assert wired(tmp_path, cluster.to_toml()) == cluster
    assert cluster.to_toml().count("[[wires]]") == 4
    assert cluster.times(2) is None
    assert cluster.homogeneous


def test_wires_beside_links(tmp_path: Path) -> None:
    text = WIRES.replace("count = 4", 'count = 4\nlink = "infiniband"') + '[network]\nlink = "infiniband"\n'
    cluster = wired(tmp_path, text)
    assert cluster.nodes[0].link == cluster.network == Link(50e9, 2e-6)
    assert cluster.link_between(0, 1) == Link(360e9, 2e-6)
    assert wired(tmp_path, cluster.to_toml()) == cluster


def test_wires_of_one_device(tmp_path: Path) -> None:
    cluster = wired(
        tmp_path,
        WIRES.split("[[nodes]]")[0] + '[[nodes]]\ndevice = "h100"\ncount = 1\nrepeat = 2\n'
        '[[wires]]\nends = ["0-1", "s"]\nlink = "infiniband"\n',
    )
    assert [node.link for node in cluster.nodes] == [Link(50e9, 4e-6)] * 2
    assert cluster.part(1, 1).wires == ()


def test_part_of_wires(tmp_path: Path) -> None:
    cluster = wired(tmp_path)
    part = cluster.part(4, 4)
    nvlink = Link(450e9, 1e-6, 0.8)
    assert part.wires == tuple(Wire("switch-b", k, nvlink) for k in range(4))
    assert [node.count for node in cluster.part(2, 4).nodes] == [2, 2]
    assert cluster.part(2, 4).link_between(0, 2) == cluster.link_between(2, 4)


def test_part_goes_through_other_devices() -> None:
    """A ring of eight whose numbers alternate: the first four have no wires between them."""
    wires = tuple(Wire(k, (k + 3) % 8, NVLINK) for k in range(8))
    cluster = Cluster("ring", (Node(DEVICE, 8, NVLINK),), wires=wires)
    part = cluster.part(0, 3)
    assert Wire("device-3", 0, NVLINK) not in part.wires
    assert Wire(0, "device-3", NVLINK) in part.wires
    again = part.part(0, 2)
    assert again.link_between(0, 1) == part.link_between(0, 1) == cluster.link_between(0, 1)


def test_groups_over_wires(tmp_path: Path) -> None:
    cluster = wired(tmp_path)
    group = axis_group(cluster, (("data", 2), ("model", 4)), ("data",))
    assert group.levels == (Level(2, Link(50e9, 2e-6)),)
    assert group.graph is not None
    assert group.graph.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert axis_group(cluster, (("data", 2), ("model", 4)), ("data",)) == group


def test_wrong_wires_in_code() -> None:
    nodes = (Node(DEVICE, 4, NVLINK),)
    with pytest.raises(ClusterError, match="cluster 'c': device 2 is not reachable from device 0"):
        Cluster("c", nodes, wires=(Wire(0, 1, NVLINK), Wire(2, 3, NVLINK)))
    with pytest.raises(ClusterError, match="a wire ends at device 4"):
        Cluster("c", nodes, wires=(Wire(0, 4, NVLINK),))
    with pytest.raises(ClusterError, match="joins 1 to itself"):
        Wire(1, 1, NVLINK)
    with pytest.raises(ClusterError, match="starts with a letter"):
        Wire(1, "1-3", NVLINK)


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ('ends = ["0-3", "switch-a"]', 'end = ["0-3", "a"]', [":14: [[wires]] number 1: 'end' is not known"]),
        ('ends = ["0-3", "switch-a"]\n', "", [":13: [[wires]] number 1: 'ends' is missing"]),
        ('ends = ["0-3", "switch-a"]', "ends = 3", [":14: [[wires]] number 1: ends = 3"]),
        ('ends = ["0-3", "switch-a"]', 'ends = ["0-3"]', [":14: [[wires]] number 1: ends = ['0-3']"]),
        ('ends = ["0-3", "switch-a"]', 'ends = ["0-3", 1.5]', [":14: [[wires]] number 1: ends has 1.5"]),
        ('ends = ["0-3", "switch-a"]', 'ends = ["0-3", true]', [":14: [[wires]] number 1: ends has True"]),
        ('ends = ["0-3", "switch-a"]', 'ends = ["0-3", "-a"]', [":14: [[wires]] number 1: ends has '-a'"]),
        ('ends = ["0-3", "switch-a"]', 'ends = ["3-0", "a"]', [":14: [[wires]] number 1: ends has '3-0'", "counts up"]),
        ('ends = [0, "7"]', 'ends = [0, "8"]', [":23: [[wires]] number 4: ends has '8': device 8 is not defined"]),
        ('ends = [0, "7"]', "ends = [0, -1]", [":23: [[wires]] number 4: ends has -1"]),
        ('ends = [0, "7"]', "ends = [0, 0]", [":23: [[wires]] number 4: ends: 0 is joined to itself"]),
        ('["0-3", "4-7"]', '["0-3", "4-6"]', [":20: [[wires]] number 3: ends = ", "4 and 3 devices"]),
        ('"7"]\nlink = "infiniband"', '"7"]\nlink = "ib"', [":24: [[wires]] number 4: link = 'ib' is not defined"]),
        ('"7"]\nlink = "infiniband"', '"7"]', [":22: [[wires]] number 4: 'link' is missing"]),
        (
            '["0-3", "4-7"]',
            '["0-2", "switch-c"]',
            [":17: [[wires]] number 2: device 4 is not reachable from device 0"],
        ),
        (
            'ends = ["switch-b", "4-7"]',
            'ends = ["switch-b", "4"]\nlink = "nvlink"\n[[wires]]\nends = [5, "swich-b"]',
            [],
        ),
    ],
)
def test_wire_errors(old: str, new: str, messages: list[str], tmp_path: Path) -> None:
    text = WIRES if messages else WIRES.replace('["0-3", "4-7"]', "[0, 4]")
    if old == '["0-3", "4-7"]' and "switch-c" in new:
        text = text.replace('ends = [0, "7"]', "ends = [0, 3]")
    assert old in text
    with pytest.raises(ClusterError) as caught:
        wired(tmp_path, text.replace(old, new))
    for message in messages or [":20: [[wires]] number 3: device 5 is not reachable from device 0", "'swich-b'"]:
        assert message in str(caught.value)


def test_device_without_a_wire(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"wires\.toml:13: .*device 8 is not reachable"):
        wired(tmp_path, WIRES.replace("count = 4\nrepeat = 2", "count = 9"))
