"""What one device, one link and one node can do: the hardware figures every cost is computed from.

A rate is what the data sheet (or a measurement) says, an efficiency is the part of it that real programs reach; the
cost model multiplies the two. A figure that was measured as reached goes in with efficiency 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from autoshard.errors import ClusterError, explain
from autoshard.hardware.efficiency import Curve, Points, check_efficiency

FLOPS_CLASSES = ("bf16", "f16", "tf32", "f32", "f64", "int8", "f8")
"""Kinds of arithmetic with a rate of their own. All but f32 and f64 are the matrix units' dense rates."""

DEVICE_KINDS = ("gpu", "cpu", "tpu")

DeviceKind = Literal["gpu", "cpu", "tpu"]

MATMUL_EFFICIENCY = 0.82
"""An H200 reached 788e12 of 989e12 bf16 FLOP/s on 8192^3 with random data, 0.797 (shared/data/gpu-targets.md); 4096
tiles of 128 x 128 on 132 multiprocessors fill 0.970 of 32 waves, which the roofline counts by itself."""

MEMORY_EFFICIENCY = 0.90
"""An H200 copied device to device at 4.3e12 of 4.8e12 B/s, read plus written (shared/data/gpu-targets.md)."""

GPU_KERNEL_LAUNCH_S = 1e-6
"""XLA's own figure for a kernel (openxla/xla, gpu_performance_model_base.h, kKernelLaunchOverhead)."""

GPU_COLLECTIVE_LAUNCH_S = 5e-6
"""XLA's own figure for a NCCL call (openxla/xla, gpu_performance_model_base.h, kNcclKernelLaunchOverhead)."""

F64_SHARE_OF_F32 = 0.5
"""Where no f64 rate is given: half of f32, as twice as many f32 as f64 fit a vector register."""


@final
@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What XLA's GPU compiler wants to know of a GPU beside the fields of its `DeviceSpec`.

    Attributes:
      device_name: as the driver reports it, e.g. "NVIDIA H100 80GB HBM3".
      model: short name, e.g. "h100".
      core_count: streaming multiprocessors.
      fpus_per_core: f32 lanes of one multiprocessor.
      clock_rate_ghz: boost clock.
      capability: compute capability (major, minor).
      shared_bytes_per_core: shared memory of a multiprocessor.
      shared_bytes_per_block: shared memory a block gets by default.
      shared_bytes_per_block_optin: shared memory a block may ask for.
      nvlinks: active NVLink links.
    """

    device_name: str
    model: str
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    capability: tuple[int, int]
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    shared_bytes_per_block_optin: int
    nvlinks: int

    def text(self, memory_bytes: int, memory_bytes_per_s: float, l2_bytes: int) -> str:
        """The target config for `jax.experimental.topologies.get_topology_desc(target_config=...)`.

        Field names and the values that are the same for all NVIDIA GPUs: shared/data/gpu-targets.md, taken from
        openxla/xla's target specs.
        """
        major, minor = self.capability
        info = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": self.shared_bytes_per_block,
            "shared_memory_per_core": self.shared_bytes_per_core,
            "threads_per_core_limit": 2048,
            "core_count": self.core_count,
            "fpus_per_core": self.fpus_per_core,
            "block_dim_limit_x": 2147483647,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": int(memory_bytes_per_s),
            "l2_cache_size": l2_bytes,
            "clock_rate_ghz": self.clock_rate_ghz,
            "device_memory_size": memory_bytes,
            "shared_memory_per_block_optin": self.shared_bytes_per_block_optin,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "device_address_bits": 64,
            "pcie_bandwidth": 34359738368,
        }
        texts = {
            "device_vendor": "NVIDIA Corporation",
            "platform_version": f"Compute Capability {major}.{minor}",
            "model_str": self.model,
            "name": self.device_name,
            "driver_version": "13.0.0",
            "runtime_version": "12.8.0",
            "compile_time_toolkit_version": "12.8.0",
            "dnn_version": "9.10.0",
        }
        lines = [
            "gpu_device_info {",
            *(f"  {name}: {value}" for name, value in info.items()),
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "  ecc_enabled: true",
            *(f'  {name}: "{value}"' for name, value in texts.items()),
            f"  device_interconnect_info {{ active_links: {self.nvlinks} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 patch: 0 }",
            f'device_description_str: "{self.device_name}"',
        ]
        return "\n".join(lines) + "\n"


@final
@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device.

    Attributes:
      name: short name.
      kind: "gpu", "cpu" or "tpu".
      flops_per_s: peak FLOP/s by class (`FLOPS_CLASSES`); "f32" must be there. A multiply-add counts as two.
      memory_bytes: memory of the device.
      memory_bytes_per_s: its bandwidth, reads plus writes.
      l2_bytes: size of the last-level cache, 0 where not known.
      reduce_scatter: whether the backend's compiler turns an all-reduce followed by a slice into a
        reduce-scatter (XLA does on GPU, not on CPU, as tried by hand).
      kernel_launch_s: time from one kernel to the next that no roofline shows.
      collective_launch_s: the same for a collective.
      matmul_efficiency: part of `flops_per_s` that large matrix products reach.
      memory_efficiency: part of `memory_bytes_per_s` that streaming kernels reach.
      target: what XLA's deviceless GPU compiler needs; None where that is not known.
      efficiency: measured shares of the peak rates by operator class and size (`hardware/efficiency.py`); a class
        that is there replaces `matmul_efficiency` and `memory_efficiency`.

    Raises:
      ClusterError: a figure is missing, not finite, or not positive.
    """

    name: str
    kind: DeviceKind
    flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_s: float
    l2_bytes: int = 0
    reduce_scatter: bool = True
    kernel_launch_s: float = GPU_KERNEL_LAUNCH_S
    collective_launch_s: float = GPU_COLLECTIVE_LAUNCH_S
    matmul_efficiency: float = MATMUL_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY
    target: GpuTarget | None = None
    efficiency: Mapping[str, Points] = field(default_factory=dict[str, Points], hash=False)
    _curves: Mapping[str, Curve] = field(init=False, repr=False, hash=False, compare=False)

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if self.kind not in DEVICE_KINDS:
            raise ClusterError(
                explain(f"{where} has kind = {self.kind!r}", "one of " + ", ".join(DEVICE_KINDS), "correct the kind")
            )
        unknown = [key for key in self.flops_per_s if key not in FLOPS_CLASSES]
        if unknown or "f32" not in self.flops_per_s:
            raise ClusterError(
                explain(
                    f"{where} has flops_per_s for {', '.join(self.flops_per_s) or 'nothing'}",
                    f"classes among {', '.join(FLOPS_CLASSES)}, f32 always",
                    "give the vector unit's f32 rate, and the matrix units' rates the device has",
                )
            )
        object.__setattr__(self, "flops_per_s", dict(self.flops_per_s))  # a copy no caller can change
        for key, value in self.flops_per_s.items():
            check_positive(where, f"flops_per_s.{key}", value)
        check_positive(where, "memory_bytes", self.memory_bytes)
        check_positive(where, "memory_bytes_per_s", self.memory_bytes_per_s)
        check_not_negative(where, "l2_bytes", self.l2_bytes)
        check_not_negative(where, "kernel_launch_s", self.kernel_launch_s)
        check_not_negative(where, "collective_launch_s", self.collective_launch_s)
        check_share(where, "matmul_efficiency", self.matmul_efficiency)
        check_share(where, "memory_efficiency", self.memory_efficiency)
        points, curves = check_efficiency(where, self.efficiency, FLOPS_CLASSES)
        object.__setattr__(self, "efficiency", points)
        object.__setattr__(self, "_curves", curves)

    @property
    def calibrated(self) -> bool:
        """Whether it has measured efficiencies."""
        return bool(self._curves)

    def share(self, names: Sequence[str], size: float) -> float | None:
        """The measured share of the peak rate of the first class among `names` that was measured, at a size."""
        for name in names:
            curve = self._curves.get(name)
            if curve is not None:
                return curve.at(size)
        return None

    def peak_flops_per_s(self, flops_class: str) -> float:
        """Peak FLOP/s of a class; a class the device has no unit for runs as f32, f64 at half of f32."""
        rate = self.flops_per_s.get(flops_class)
        if rate is not None:
            return rate
        share = F64_SHARE_OF_F32 if flops_class == "f64" else 1.0
        return self.flops_per_s["f32"] * share

    def target_text(self) -> str:
        """The target config of XLA's deviceless GPU compiler.

        Raises:
          ClusterError: the device has no `target`.
        """
        if self.target is None:
            raise ClusterError(
                explain(
                    f"device {self.name!r} has no compile target",
                    "a GPU with core count, clock, compute capability and shared memory sizes",
                    "use a GPU preset, or add a [devices.NAME.target] table to the cluster file",
                )
            )
        return self.target.text(self.memory_bytes, self.memory_bytes_per_s, self.l2_bytes)


@final
@dataclass(frozen=True, slots=True)
class Link:
    """A way between devices, alpha-beta.

    Attributes:
      bytes_per_s: bandwidth of each device in each direction.
      latency_s: time of one step of a collective, or of one message, with no bytes in it.
      efficiency: part of the bandwidth that collectives reach.
      efficiency_by_members: of a network, (members, share) with rising members: a collective of a group that has at
        least so many members in a node reaches that share of `efficiency`; below the first entry all of it. Measured
        by `autoshard.costmodel.fit_bandwidths`. A permute sends one message a device and is not slowed.
    """

    bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    efficiency_by_members: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_positive("a link", "bytes_per_s", self.bytes_per_s)
        check_not_negative("a link", "latency_s", self.latency_s)
        check_share("a link", "efficiency", self.efficiency)
        counts = [members for members, _ in self.efficiency_by_members]
        if counts != sorted(set(counts)) or min(counts, default=1) < 1:
            raise ClusterError(
                explain(
                    f"a link has efficiency_by_members for {counts} members",
                    "rising counts from 1 on",
                    "sort the entries",
                )
            )
        for members, share in self.efficiency_by_members:
            check_share("a link", f"efficiency_by_members of {members}", share)

    @property
    def rate_bytes_per_s(self) -> float:
        """Bandwidth that is reached, per device and direction."""
        return self.bytes_per_s * self.efficiency

    def share_of_members(self, members: int) -> float:
        """The share of `rate_bytes_per_s` for a group with so many members in a node."""
        reached = [share for least, share in self.efficiency_by_members if least <= members]
        return reached[-1] if reached else 1.0


@final
@dataclass(frozen=True, slots=True)
class Wire:
    """One cable between two ends, full duplex: the link's bandwidth in each direction at once.

    Attributes:
      first: number of a device, or name of a switch, which starts with a letter.
      second: the other end.
      link: what goes over it.

    Raises:
      ClusterError: an end is neither, or both are the same.
    """

    first: int | str
    second: int | str
    link: Link

    def __post_init__(self) -> None:
        for end in (self.first, self.second):
            if (end < 0) if isinstance(end, int) else not end[:1].isalpha():
                raise ClusterError(
                    explain(
                        f"a wire has the end {end!r}",
                        "the number of a device, or the name of a switch, which starts with a letter",
                        "correct the end",
                    )
                )
        if self.first == self.second:
            raise ClusterError(
                explain(f"a wire joins {self.first!r} to itself", "two ends that differ", "correct one of them")
            )


@final
@dataclass(frozen=True, slots=True)
class Node:
    """Devices of one kind in one machine.

    Attributes:
      device: what each of them is.
      count: how many.
      link: what joins them.
    """

    device: DeviceSpec
    count: int
    link: Link

    def __post_init__(self) -> None:
        check_positive(f"a node of {self.device.name}", "count", self.count)


def check_positive(where: str, name: str, value: float) -> None:
    """Raises ClusterError unless the figure is a finite number above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(explain(f"{where} has {name} = {value}", "a finite number above 0", f"correct {name}"))


def check_not_negative(where: str, name: str, value: float) -> None:
    """Raises ClusterError unless the figure is a finite number, zero or more."""
    if not (math.isfinite(value) and value >= 0):
        raise ClusterError(explain(f"{where} has {name} = {value}", "a finite number, 0 or more", f"correct {name}"))


def check_share(where: str, name: str, value: float) -> None:
    """Raises ClusterError unless the figure is a share, above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ClusterError(explain(f"{where} has {name} = {value}", "a share above 0 and at most 1", f"correct {name}"))
