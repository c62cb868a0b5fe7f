"""Shared by tests: a cluster on which plans split everything, and comparisons by norm."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autoshard.cluster import Cluster, DeviceSpec, Link, Node


def eager_cluster(count: int = 8, memory_bytes: int = 8 << 30) -> Cluster:
    """CPU devices slow enough, on links quick enough, that splitting even small arrays pays."""
    device = DeviceSpec(
        name="slow-cpu",
        kind="cpu",
        flops_per_s={"f32": 1e6, "bf16": 1e6, "f16": 1e6, "f64": 1e6, "int8": 1e6},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=1e6,
        reduce_scatter=False,
        kernel_launch_s=0.0,
        collective_launch_s=0.0,
    )
    return Cluster("eager", (Node(device, count, Link(bytes_per_s=1e9, latency_s=1e-9)),))


def slow_links() -> Cluster:
    """Where splitting state does not pay, so that only a memory limit makes it happen."""
    device = eager_cluster().device(0)
    return Cluster("slow links", (Node(device, 8, Link(bytes_per_s=1e5, latency_s=1e-3)),))


def distance(mine: Any, plain: Any) -> float:
    """Largest distance by norm between two trees, relative to the second's norm, leaf by leaf."""
    mine_leaves, mine_tree = jax.tree.flatten(mine)
    leaves, tree = jax.tree.flatten(plain)
    assert mine_tree == tree, f"{mine_tree} is not {tree}"
    worst = 0.0
    for a, b in zip(mine_leaves, leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, f"{a.shape} is not {b.shape}"
        assert a.dtype == b.dtype, f"{a.dtype} is not {b.dtype}"
        if not np.issubdtype(a.dtype, np.inexact):
            assert np.array_equal(a, b), "integers differ"
            continue
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        scale = float(np.linalg.norm(b.astype(wide).ravel()))
        worst = max(worst, float(np.linalg.norm((a.astype(wide) - b.astype(wide)).ravel())) / (scale or 1.0))
    return worst
