"""Hand-written shardings as pins: data parallel and fully sharded, for steps `step(state, batch)`."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

SMALL = 1024
"""Elements up to which an array stays whole in a fully sharded plan."""

DATA_PARALLEL = {"state/**": P(), "batch/**": P("data")}
"""Pins over a mesh with one axis, "data"."""


def fully_sharded(state: Any, devices: int = 8) -> dict[str, P]:
    """ZeRO-3: of every array of the state the largest dimension that divides, over all devices; the batch as well."""

    def largest(leaf: Any) -> P:
        fits = [d for d, n in enumerate(leaf.shape) if n % devices == 0]
        if leaf.size <= SMALL or not fits:
            return P()
        at = max(fits, key=lambda d: leaf.shape[d])
        return P(*("data" if d == at else None for d in range(at + 1)))

    leaves = jax.tree_util.tree_flatten_with_path({"state": state})[0]
    pins = {jax.tree_util.keystr(path, simple=True, separator="/"): largest(leaf) for path, leaf in leaves}
    return {**pins, "batch/**": P("data")}
