"""Known devices and the clusters people rent them in: `<device>x<count>`, e.g. "h100x8", "h200x1024", "cpux8".

GPUs stand eight to a node, joined by NVLink; nodes are joined by InfiniBand as in NVIDIA's DGX systems. Device figures
are those of shared/data/gpu-targets.md (openxla/xla's target specs and NVIDIA's data sheets); rates of the matrix
units are dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from autoshard.hardware.device import DeviceSpec, GpuTarget, Link

GPUS_PER_NODE = 8
"""DGX-1, DGX A100, DGX H100, DGX H200 and DGX B200 have eight GPUs each (NVIDIA data sheets)."""

NVLINK_EFFICIENCY = 0.8
"""NCCL counts 20.0, 20.0, 20.6 and 40.1 GB/s for the 25, 25, 25 and 50 GB/s lanes of V100, A100, H100 and B200
(NVIDIA/nccl, src/graph/topo.h, SM70_ to SM100_NVLINK_BW)."""

NVLINK_LATENCY_S = 1.9e-6
"""One ring step of NCCL's LL128 protocol over NVLink (NVIDIA/nccl, src/graph/tuning.cc, hwLat)."""

NETWORK_EFFICIENCY = 0.92
"""LL128 carries 120 bytes of data in 128 (NVIDIA/nccl, src/graph/tuning.cc: busBw * 0.92)."""

NETWORK_LATENCY_S = 4.0e-6
"""One ring step of NCCL's LL128 protocol over a network (NVIDIA/nccl, src/graph/tuning.cc, hwLat)."""

ETHERNET_LINK = Link(bytes_per_s=1.25e9, latency_s=50e-6)
"""Between CPU hosts nobody described: nominal 10 Gb/s Ethernet; 50 us is a TCP round trip on such a network."""

PCIE_LINK = Link(bytes_per_s=12e9, latency_s=2.5e-6)
"""What NCCL counts for PCI Gen3 x16 (NVIDIA/nccl, src/graph/topo.h, PCI_BW 12.0; latency: tuning.cc, hwLat, LL128)."""

CPU_CORE_FLOPS_PER_S: Mapping[str, float] = {"f32": 46e9, "bf16": 46e9, "f64": 23e9}
"""One core. Measured with jnp.dot 1024^3 on 2 cores of an AMD EPYC (family 25, AVX-512), jax 0.10.1: f32 92.8e9, bf16
94.5e9, f64 46.6e9 FLOP/s for both cores."""

CPU_CORE_MEMORY_BYTES_PER_S = 3e9
"""One core. Measured with x + 1 on 32 MiB of f32, read plus written, on the same machine: 3.05e9 B/s (XLA:CPU writes to
fresh pages, which costs more than the memory itself)."""

CPU_CORE_MEMORY_BYTES = 4 * 2**30
"""Nominal: 4 GiB a core, the usual ratio of general-purpose cloud machines."""

CPU_LINK = Link(bytes_per_s=5e9, latency_s=30e-6)
"""Measured with psum between virtual devices on the same machine: 2 devices, 1 MiB, 206 us = 5.1e9 B/s; 8 devices,
1 KiB, 403 us = 14 ring steps of 29 us."""

CPU_KERNEL_LAUNCH_S = 2e-6
"""Nominal: a thunk of XLA:CPU runs in the caller's thread, a parallel one wakes a thread pool, a few microseconds."""


@final
@dataclass(frozen=True, slots=True)
class DevicePreset:
    """A known device.

    Attributes:
      device: its figures.
      link: what joins devices of a node.
      network: what joins nodes; None where a preset has one node only.
      per_node: devices a node holds; 0 for any number.
    """

    device: DeviceSpec
    link: Link
    network: Link | None
    per_node: int


def _nvlink(bytes_per_s: float) -> Link:
    return Link(bytes_per_s, NVLINK_LATENCY_S, NVLINK_EFFICIENCY)


def _infiniband(bits_per_s: float) -> Link:
    return Link(bits_per_s / 8, NETWORK_LATENCY_S, NETWORK_EFFICIENCY)


_V100 = DeviceSpec(
    name="v100",
    kind="gpu",
    # Tesla V100 data sheet (SXM2): 125 tensor (fp16), 15.7 single, 7.8 double TFLOP/s; no bf16 or tf32 unit.
    flops_per_s={"f16": 125e12, "f32": 15.7e12, "f64": 7.8e12},
    memory_bytes=16935682048,
    memory_bytes_per_s=898048000000,
    l2_bytes=6291456,
    target=GpuTarget("Tesla V100-SXM2-16GB", "v100", 80, 64, 1.53, (7, 0), 98304, 49152, 98304, 6),
)

_A100 = DeviceSpec(
    name="a100",
    kind="gpu",
    # A100 data sheet: bf16/fp16 312, tf32 156, fp32 19.5, fp64 tensor 19.5 TFLOP/s, int8 624 TOP/s.
    flops_per_s={"bf16": 312e12, "f16": 312e12, "tf32": 156e12, "f32": 19.5e12, "f64": 19.5e12, "int8": 624e12},
    memory_bytes=85100068864,
    memory_bytes_per_s=2039040000000,
    l2_bytes=41943040,
    target=GpuTarget("NVIDIA A100-SXM4-80GB", "a100", 108, 64, 1.41, (8, 0), 167936, 49152, 166912, 12),
)

_HOPPER_FLOPS_PER_S = {
    # H100 data sheet (SXM), half of the "with sparsity" figures: bf16/fp16 989, tf32 494, int8 and fp8 1979; fp32 67,
    # fp64 tensor 67 TFLOP/s. H200's data sheet has the same.
    "bf16": 989e12,
    "f16": 989e12,
    "tf32": 494e12,
    "f32": 67e12,
    "f64": 67e12,
    "int8": 1979e12,
    "f8": 1979e12,
}

_H100 = DeviceSpec(
    name="h100",
    kind="gpu",
    flops_per_s=_HOPPER_FLOPS_PER_S,
    memory_bytes=84942979072,
    memory_bytes_per_s=3352320000000,
    l2_bytes=52428800,
    target=GpuTarget("NVIDIA H100 80GB HBM3", "h100", 132, 128, 1.98, (9, 0), 233472, 49152, 232448, 18),
)

_H200 = DeviceSpec(
    name="h200",
    kind="gpu",
    flops_per_s=_HOPPER_FLOPS_PER_S,
    memory_bytes=151397597184,
    memory_bytes_per_s=4800000000000,
    l2_bytes=52428800,
    target=GpuTarget("NVIDIA H200", "h200", 132, 128, 1.98, (9, 0), 233472, 49152, 232448, 18),
)

_B200 = DeviceSpec(
    name="b200",
    kind="gpu",
    # DGX B200 and HGX B200 data sheets, dense, one GPU: bf16/fp16 2250, tf32 1125, int8 and fp8 4500, fp32 75,
    # fp64 37 TFLOP/s.
    flops_per_s={
        "bf16": 2250e12,
        "f16": 2250e12,
        "tf32": 1125e12,
        "f32": 75e12,
        "f64": 37e12,
        "int8": 4500e12,
        "f8": 4500e12,
    },
    memory_bytes=191514411008,
    memory_bytes_per_s=7672320000000,
    l2_bytes=132644864,
    target=GpuTarget("NVIDIA B200", "b200", 148, 128, 1.965, (10, 0), 233472, 49152, 232448, 18),
)


def cpu_device(cores: float, memory_bytes: int) -> DeviceSpec:
    """A device of XLA:CPU that has `cores` cores (a part of one, where virtual devices share them)."""
    return DeviceSpec(
        name="cpu",
        kind="cpu",
        flops_per_s={name: rate * cores for name, rate in CPU_CORE_FLOPS_PER_S.items()},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=CPU_CORE_MEMORY_BYTES_PER_S * cores,
        reduce_scatter=False,
        kernel_launch_s=CPU_KERNEL_LAUNCH_S,
        collective_launch_s=CPU_LINK.latency_s,
        matmul_efficiency=1.0,  # the rates above are measured ones
        memory_efficiency=1.0,
    )


DEVICE_PRESETS: Mapping[str, DevicePreset] = {
    # NVLink per GPU and direction: shared/data/gpu-targets.md (data sheets). Networks, NVIDIA data sheets:
    # DGX-1: 4 x EDR 100 Gb/s for 8 GPUs.
    "v100": DevicePreset(_V100, _nvlink(150e9), _infiniband(50e9), GPUS_PER_NODE),
    # DGX A100: 8 x HDR 200 Gb/s for 8 GPUs.
    "a100": DevicePreset(_A100, _nvlink(300e9), _infiniband(200e9), GPUS_PER_NODE),
    # DGX H100, DGX H200, DGX B200: 8 x NDR 400 Gb/s for 8 GPUs.
    "h100": DevicePreset(_H100, _nvlink(450e9), _infiniband(400e9), GPUS_PER_NODE),
    "h200": DevicePreset(_H200, _nvlink(450e9), _infiniband(400e9), GPUS_PER_NODE),
    "b200": DevicePreset(_B200, _nvlink(900e9), _infiniband(400e9), GPUS_PER_NODE),
    # Virtual devices of one nominal host, one core each; "auto" describes the host there is.
    "cpu": DevicePreset(cpu_device(1.0, CPU_CORE_MEMORY_BYTES), CPU_LINK, None, 0),
}


def default_link(device: DeviceSpec) -> Link:
    """What joins devices when only the device is known: its preset's link, else PCI Gen3 or the host's memory."""
    preset = DEVICE_PRESETS.get(device.name)
    if preset is not None:
        return preset.link
    return CPU_LINK if device.kind == "cpu" else PCIE_LINK
