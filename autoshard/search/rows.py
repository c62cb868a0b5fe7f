"""Times whose memory row says nothing: exact.

    a row that no answer breaks                     base_t + sum max u <= limit
    a row that its neighbour implies                usage_t(x) <= usage_t'(x) for every x:
        base_t - base_t' + sum of the largest that is held at t and not at t' <= 0

What is left are the crests of the memory curve.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.search.problem import Floats, Usage

Times = NDArray[np.intp]


def needed_rows(usages: tuple[Usage, ...], base: Floats, limit: float) -> Times:
    """The times whose rows have to be kept; `usages` must be zero for some choice of each."""
    begins, ends = np.zeros(len(base) + 1), np.zeros(len(base) + 1)
    for u in usages:
        most = u.nbytes.max()
        begins[u.start] += most
        ends[u.end] += most
    largest = base + np.cumsum(begins - ends)[:-1]
    (rows,) = np.nonzero(largest > limit)
    return _crests(_crests(rows, base, begins), base, ends, backwards=True)


def _crests(rows: Times, base: Floats, change: Floats, backwards: bool = False) -> Times:
    """Drops rows implied by the one kept before (or after) them; `change` is what may begin (or end) at each time."""
    total = np.concatenate(([0.0], np.cumsum(change)))
    kept: list[int] = []
    for t in reversed(rows.tolist()) if backwards else rows.tolist():
        if kept:
            low, high = (t, kept[-1]) if backwards else (kept[-1], t)
            if base[t] - base[kept[-1]] + total[high + 1] - total[low + 1] <= 0:
                continue
        kept.append(t)
    return np.array(sorted(kept), np.intp)


def keep_rows(usages: tuple[Usage, ...], base: Floats, rows: Times) -> tuple[tuple[Usage, ...], Floats]:
    """Usages and base over only some of the times."""
    found: list[Usage] = []
    starts = np.searchsorted(rows, [u.start for u in usages])
    ends = np.searchsorted(rows, [u.end for u in usages])
    for u, start, end in zip(usages, starts.tolist(), ends.tolist(), strict=True):
        if start < end:
            found.append(Usage(u.node, start, end, u.nbytes))
    return tuple(found), base[rows]
