"""How XLA packs temporaries into one allocation: the holes between buffers count as well.

XLA (heap_simulator.cc, GlobalDecreasingSizeBestFitHeap) takes the buffers by size, or by how long they live, largest
first, and puts each into the smallest hole among those that live at the same time; the better of both orders counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PACKED_ONE_BY_ONE = 256
"""Buffers, the largest, that are placed; all others are taken to fill holes. Nominal: some 20 ms at most."""


def packed_bytes(sizes: Sequence[int], starts: Sequence[int], ends: Sequence[int], alignment: int) -> int:
    """Bytes of the allocation.

    Args:
      sizes: of each buffer.
      starts, ends: in use at times start <= t < end.
      alignment: what sizes are rounded up to.
    """
    if not sizes:
        return 0
    size = -(-np.array(sizes, np.int64) // alignment) * alignment
    start, end = np.array(starts, np.int64), np.array(ends, np.int64)
    change = np.zeros(int(end.max()) + 1, np.int64)
    np.add.at(change, start, size)
    np.add.at(change, end, -size)
    least = int(np.cumsum(change).max())
    life = end - start
    placed = np.argsort(-size, kind="stable")[:PACKED_ONE_BY_ONE]
    size, start, end, life = size[placed], start[placed], end[placed], life[placed]
    heaps: list[int] = []
    for order in (np.lexsort((-life, -size)), np.lexsort((-size, -life))):
        heaps.append(_heap(order, size, start, end))
        if heaps[-1] <= least:
            return least
    return max(least, min(heaps))


def _heap(order: Ints, size: Ints, start: Ints, end: Ints) -> int:
    """Height of the heap when buffers are placed in an order."""
    start, end, size = start[order], end[order], size[order]
    low, high = np.zeros_like(size), np.zeros_like(size)
    for k in range(len(order)):
        beside = np.flatnonzero((start[:k] < end[k]) & (end[:k] > start[k]))
        at = 0
        if len(beside):
            beside = beside[np.argsort(low[beside], kind="stable")]
            tops = np.maximum.accumulate(high[beside])
            floors = np.concatenate(([0], tops[:-1]))
            holes = low[beside] - floors
            fits = np.flatnonzero(holes >= size[k])
            at = int(floors[fits[np.argmin(holes[fits])]]) if len(fits) else int(tops[-1])
        low[k], high[k] = at, at + size[k]
    return int(high.max(initial=0))
