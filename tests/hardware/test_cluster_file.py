"""Cluster files that are wrong: each error names file, line, table and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError

GOOD = """\
name = "mixed"
# [links.nvlink]
# bytes_per_s = 1
#
#

[devices.big]
preset = "h200"
memory_bytes = 120e9

[devices."small one"]
kind = "gpu"
flops_per_s = { bf16 = 312e12, f32 = 19.5e12 }
memory_bytes = 40e9
memory_bytes_per_s = 1555e9

[links]
ethernet = { bytes_per_s = 12.5e9, latency_s = 2e-5 }
pcie.bytes_per_s = 12e9
pcie.latency_s = 2e-6

[links.nvlink]
bytes_per_s = 300e9
latency_s = 2e-6
efficiency = 0.8

[[nodes]]
device = "big"
count = 8
repeat = 2

[[nodes]]
device = "small one"
count = 4
link = "nvlink"

[network]
link = "ethernet"
shared = true
"""

SMALL = '[devices."small one"]'
TARGET = """
[devices.big.target]
device_name = "x"
model = "x"
core_count = 1
fpus_per_core = 1
clock_rate_ghz = 1.0
capability = [9, 0]
shared_bytes_per_core = 1
shared_bytes_per_block = 1
shared_bytes_per_block_optin = 1
nvlinks = 1
"""


def message(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        Cluster.from_toml(path)
    assert "expected:" in str(caught.value)
    assert "to do:" in str(caught.value)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_the_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    assert Cluster.from_toml(path).size == 20


CASES = [
    # links: numbers
    ("bytes_per_s = 300e9", "bytes_per_s = -3", "23: [links.nvlink]: bytes_per_s = -3"),
    ("bytes_per_s = 300e9", "bytes_per_s = 0", "23: [links.nvlink]: bytes_per_s = 0"),
    ("bytes_per_s = 300e9", "bytes_per_s = inf", "23: [links.nvlink]: bytes_per_s = inf"),
    ("bytes_per_s = 300e9", "bytes_per_s = nan", "23: [links.nvlink]: bytes_per_s = nan"),
    ("bytes_per_s = 300e9", "bytes_per_s = 1" + "0" * 400, "23: [links.nvlink]: bytes_per_s = 1000"),
    ("bytes_per_s = 300e9", 'bytes_per_s = "fast"', "23: [links.nvlink]: bytes_per_s = 'fast'"),
    ("bytes_per_s = 300e9", "bytes_per_s = [\n300e9]", "23: [links.nvlink]: bytes_per_s = [300"),
    ("bytes_per_s = 300e9", "bytes_per_s = true", "23: [links.nvlink]: bytes_per_s = True"),
    ("bytes_per_s = 12.5e9", "bytes_per_s = 0.0", "18: [links.ethernet]: bytes_per_s = 0.0"),
    ("pcie.bytes_per_s = 12e9", "pcie.bytes_per_s = -1", "19: [links.pcie]: bytes_per_s = -1"),
    ("pcie.latency_s = 2e-6", "pcie.latency_s = -inf", "20: [links.pcie]: latency_s = -inf"),
    ("efficiency = 0.8", "efficiency = 1.2", "25: [links.nvlink]: efficiency = 1.2"),
    ("efficiency = 0.8", "efficiency = 0", "25: [links.nvlink]: efficiency = 0"),
    # links: names, missing fields, tables
    ("latency_s = 2e-6\neff", "latencys = 2e-6\neff", "24: [links.nvlink]: 'latencys' is not known"),
    ("pcie.latency_s = 2e-6\n", "", "19: [links.pcie]: 'latency_s' is missing"),
    ("latency_s = 2e-6\neff", "eff", "22: [links.nvlink]: 'latency_s' is missing"),
    (", latency_s = 2e-5", "", "18: [links.ethernet]: 'latency_s' is missing"),
    (", latency_s", ", latency", "18: [links.ethernet]: 'latency' is not known"),
    ("ethernet = { bytes_per_s = 12.5e9, latency_s = 2e-5 }", "ethernet = 3", "18: [links]: ethernet = 3"),
    ("[links.nvlink]\nb", "[link.nvlink]\nb", "22: the file: 'link' is not known"),
    # devices
    ('preset = "h200"', 'preset = "h300"', "8: [devices.big]: preset = 'h300'"),
    ('preset = "h200"', "preset = 200", "8: [devices.big]: preset = 200"),
    ('preset = "h200"', 'preest = "h200"', "8: [devices.big]: 'preest' is not known"),
    ('preset = "h200"\n', "", "7: [devices.big]: 'kind' is missing"),
    ("memory_bytes = 120e9", "memory_bytes = -1", "9: [devices.big]: memory_bytes = -1"),
    ("memory_bytes = 120e9", "flops_per_s = { bf16 = 1.0 }", "9: [devices.big]: flops_per_s has no f32"),
    ("memory_bytes = 120e9", "flops_per_s.f32 = 0", "9: [devices.big.flops_per_s]: f32 = 0"),
    ("memory_bytes = 120e9", 'kind = "gpus"', "9: [devices.big]: kind = 'gpus'"),
    ("memory_bytes = 120e9", "kernel_launch_s = -1e-6", "9: [devices.big]: kernel_launch_s = -1e-06"),
    ("memory_bytes = 120e9", "matmul_efficiency = 1.5", "9: [devices.big]: matmul_efficiency = 1.5"),
    ("memory_bytes = 120e9", "target = 3", "9: [devices.big]: target = 3"),
    ('kind = "gpu"', 'kind = "gpus"', f"12: {SMALL}: kind = 'gpus'"),
    ('kind = "gpu"\n', "", f"11: {SMALL}: 'kind' is missing"),
    ("bf16 = 312e12", "bf61 = 312e12", "13: [devices.\"small one\".flops_per_s]: 'bf61' is not known"),
    ("bf16 = 312e12", "bf16 = -312e12", '13: [devices."small one".flops_per_s]: bf16 = -312'),
    ("flops_per_s = { bf16 = 312e12, f32 = 19.5e12 }", "flops_per_s = 1e12", f"13: {SMALL}: flops_per_s = 1"),
    ("memory_bytes = 40e9\n", "", f"11: {SMALL}: 'memory_bytes' is missing"),
    ("memory_bytes = 40e9", "memory_bytes = 0.5", f"14: {SMALL}: memory_bytes = 0.5"),
    ("memory_bytes = 40e9", "reduce_scatter = 1", f"14: {SMALL}: reduce_scatter = 1"),
    ("\n[links]\n", TARGET.replace("nvlinks", "nvlink") + "[links]\n", "27: [devices.big.target]: 'nvlink' is not"),
    ("\n[links]\n", TARGET.replace("nvlinks = 1", "") + "[links]\n", "17: [devices.big.target]: 'nvlinks' is missing"),
    ("\n[links]\n", TARGET.replace("[9, 0]", "[9]") + "[links]\n", "23: [devices.big.target]: capability = [9]"),
    ("\n[links]\n", TARGET.replace("[9, 0]", "[true, 0]") + "[links]\n", "23: [devices.big.target]: capability = [Tr"),
    # nodes and network
    ('device = "big"', 'device = "bigg"', "28: [[nodes]] number 1: device = 'bigg' is not defined"),
    ('device = "small one"', "device = 1", "33: [[nodes]] number 2: device = 1"),
    ("repeat = 2", "repeat = 0", "30: [[nodes]] number 1: repeat = 0"),
    ("count = 4\n", "", "32: [[nodes]] number 2: 'count' is missing"),
    ("count = 4", "count = 1.5", "34: [[nodes]] number 2: count = 1.5"),
    ("count = 4", "counts = 4", "34: [[nodes]] number 2: 'counts' is not known"),
    ('link = "nvlink"', 'link = "nvlnk"', "35: [[nodes]] number 2: link = 'nvlnk' is not defined"),
    ('link = "nvlink"\n', "", "32: [[nodes]] number 2: 'link' is missing"),
    ('link = "ethernet"', 'link = "infiniband"', "38: [network]: link = 'infiniband' is not defined"),
    ('link = "ethernet"\n', "", "37: [network]: 'link' is missing"),
    ("shared = true", 'shared = "yes"', "39: [network]: shared = 'yes'"),
    ('[network]\nlink = "ethernet"\nshared = true\n', "", "27: the file: 3 nodes and no [network]"),
    ("[network]", "[networks]", "37: the file: 'networks' is not known"),
    ("[network]", "[[network]]", "37: the file: network = "),
    ('[[nodes]]\ndevice = "small one"\ncount = 4\nlink = "nvlink"\n', "[nodes]\n", "32: this is no TOML"),
    # the file
    ('name = "mixed"', "name = 3", "1: the file: name = 3"),
    ('name = "mixed"', "name = mixed", "1: this is no TOML"),
    ("shared = true\n", 'shared = """\n\n', "39: this is no TOML"),
    ("count = 8", "count = 8\ncount = 9", "30: this is no TOML"),
]


@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_line_and_field(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert GOOD.count(old) == 1
    assert f"cluster.toml:{expected}" in message(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_lines_end_as_on_windows(old: str, new: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(GOOD.replace(old, new).replace("\n", "\r\n").encode())
    with pytest.raises(ClusterError) as caught:
        Cluster.from_toml(path)
    assert f"cluster.toml:{expected}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: the file: 'nodes' is missing"),
        ('name = "x"\nnodes = []\n', "2: the file: 'nodes' is missing"),
        ("\nnodes = 3\n", "2: the file: nodes = 3"),
        ("\n[nodes]\ncount = 8\n", "2: the file: nodes = {'count': 8}"),
        ('nodes = [\n  { device = "h100", count = 8 },\n  { device = "h100" },\n]\n', "3: [[nodes]] number 2: 'count'"),
        ("devices = 3\n", "1: the file: devices = 3"),
    ],
)
def test_other_shapes(text: str, expected: str, tmp_path: Path) -> None:
    assert f"cluster.toml:{expected}" in message(tmp_path, text)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b'name = "x"\n\nother = "\xff"\n')
    with pytest.raises(ClusterError, match=r"cluster\.toml:3: this is no TOML"):
        Cluster.from_toml(path)


def test_renamed_preset_keeps_its_link(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[devices.mine]\npreset = "h200"\nname = "mine"\n[[nodes]]\ndevice = "mine"\ncount = 8\n')
    assert Cluster.from_toml(path).nodes[0].link.bytes_per_s == 450e9
