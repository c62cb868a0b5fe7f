"""The cluster this process runs on, from `jax.devices()`: what `devices="auto"` means.

CPU: virtual devices share the host's cores and memory, so each gets its part. GPU: recognised by the name the driver
reports; memory is what JAX's allocator may use. Anything else needs a cluster file.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import jax

from autoshard.errors import ClusterError, explain
from autoshard.hardware.device import DeviceSpec, Link, Node
from autoshard.hardware.presets import CPU_LINK, DEVICE_PRESETS, ETHERNET_LINK, cpu_device


@final
@dataclass(frozen=True, slots=True)
class _Known:
    """A device name as the driver reports it, the preset it is, and what differs from the preset."""

    pattern: str
    preset: str
    changes: Mapping[str, Any]


_KNOWN = (
    _Known(r"(NVIDIA )?B200", "b200", {}),
    _Known(r"(NVIDIA )?H200", "h200", {}),
    _Known(r"(NVIDIA )?H100 80GB HBM3", "h100", {}),
    _Known(r"(NVIDIA )?A100-SXM4-80GB", "a100", {}),
    # A100 data sheet, 40 GB: 1,555 GB/s.
    _Known(r"(NVIDIA )?A100-SXM4-40GB", "a100", {"memory_bytes": 40 * 2**30, "memory_bytes_per_s": 1555e9}),
    _Known(r"Tesla V100-SXM2-16GB", "v100", {}),
    _Known(r"Tesla V100-SXM[23]-32GB", "v100", {"memory_bytes": 32 * 2**30}),
)


def detect_nodes(devices: Sequence[Any] | None = None) -> tuple[tuple[Node, ...], Link | None]:
    """The nodes of the running JAX processes and the network between them.

    Args:
      devices: JAX devices; all of `jax.devices()` where left out.

    Raises:
      ClusterError: a device nobody knows.
    """
    found = cast("Sequence[Any]", jax.devices() if devices is None else devices)  # pyright: ignore[reportUnknownMemberType]
    hosts: dict[Any, list[Any]] = {}
    for device in found:
        hosts.setdefault(_host(device), []).append(device)
    nodes = tuple(_node(members) for members in hosts.values())
    if len(nodes) == 1:
        return nodes, None
    preset = DEVICE_PRESETS[nodes[0].device.name]
    return nodes, preset.network or ETHERNET_LINK


def _host(device: Any) -> Any:
    """What devices of one node share: JAX's slice (hosts or NVLink domains) for GPUs, the process for CPUs."""
    if device.platform == "cpu":
        return device.process_index
    return getattr(device, "slice_index", device.process_index)


def _node(members: Sequence[Any]) -> Node:
    first = members[0]
    if first.platform == "cpu":
        return _cpu_node(len(members))
    for known in _KNOWN:
        if re.fullmatch(known.pattern, str(first.device_kind)):
            preset = DEVICE_PRESETS[known.preset]
            spec = dataclasses.replace(preset.device, **known.changes)
            return Node(_with_memory(spec, members), len(members), preset.link)
    raise ClusterError(
        explain(
            f"devices of kind {first.device_kind!r} (platform {first.platform!r}) are not known to autoshard",
            "CPU, or one of the GPUs " + ", ".join(name for name in DEVICE_PRESETS if name != "cpu"),
            "describe them in a cluster file and pass its path: devices='cluster.toml' (docs: cluster files)",
        )
    )


def _with_memory(spec: DeviceSpec, members: Sequence[Any]) -> DeviceSpec:
    limits = [stats["bytes_limit"] for stats in map(_memory_stats, members) if stats.get("bytes_limit")]
    if not limits:
        return spec
    return dataclasses.replace(spec, memory_bytes=int(min(limits)))


def _memory_stats(device: Any) -> Mapping[str, int]:
    """What the allocator says; nothing for devices of other processes."""
    if device.process_index != jax.process_index():  # pyright: ignore[reportUnknownMemberType]
        return {}
    return device.memory_stats() or {}


def _cpu_node(count: int) -> Node:
    """Virtual devices of this host: in a sharded program all run at once, on all cores together."""
    cores = _usable_cores()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # More devices than cores: each gets its part of what one core moves. Fewer: one core moves one device's bytes.
    share = min(1.0, cores / count)
    link = dataclasses.replace(CPU_LINK, bytes_per_s=CPU_LINK.bytes_per_s * share)
    return Node(cpu_device(cores / count, memory_bytes // count), count, link)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
