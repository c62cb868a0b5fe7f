"""Where to cut the forward pass into stages: the slowest stage as quick as can be.

    T     =  least over cuts of   max over stages s of   max(work(s), 2 sent(s) / bandwidth)
    cuts  :  least   max over s of   work(s) + 2 (sent(s) + sent(s + 1)) / bandwidth   where no 2 sent / bandwidth > T

work is the roofline time of a stage's forward and backward equations, sent the bytes that cross its lower boundary
(the activations, and as much for their gradients), which travel while the next microbatch is computed. Over a choice of
boundaries: of each of `BOUNDARIES` slices of equal work the one where least crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autoshard.cluster import Cluster
from autoshard.costmodel import Cost, equation_cost, time_s
from autoshard.errors import MicrobatchError, explain
from autoshard.ir import Apply, Value, trip_count
from autoshard.passes import LoopStep, equation_kinds
from autoshard.show import size_text

BOUNDARIES = 192
"""Boundaries that are tried. Ours: 192 are exact for every program of the zoo of up to as many equations."""

LOWER, NEAR = 1.5, 12
"""A low point is compared with as many on each side, and is none if it is so many times as high. Ours: the second is
more than an attention block has, the first less than between its inside and the residual stream around it."""

FEW = 16
"""With fewer low points than this every boundary may be a cut. Ours."""


def choose_cuts(step: LoopStep, stages: int, cluster: Cluster, devices: int) -> tuple[int, ...]:
    """Numbers of the forward equations that begin a stage.

    Args:
      step: in microbatches.
      stages: how many.
      cluster: whose devices the stages run on, in order.
      devices: of each stage.

    Raises:
      MicrobatchError: the forward pass has fewer equations than stages.
    """
    kinds = equation_kinds(step)
    count = len(kinds.forward)
    if count < stages:
        raise MicrobatchError(too_few(kinds.forward, stages))
    place = {v: i for i, e in enumerate(kinds.forward) for v in e.outputs}
    seconds = [_seconds(e, cluster) / devices for e in kinds.forward]
    at: dict[Value, int] = dict(place)
    for equation in kinds.backward:
        near = [at[a] for a in equation.inputs if isinstance(a, Value) and a in place]
        far = [at[a] for a in equation.inputs if isinstance(a, Value) and a in at and a not in place]
        position = max(near) if near else min(far, default=count - 1)
        position = min(position, *far) if far else position
        seconds[position] += _seconds(equation, cluster) / devices
        at.update(dict.fromkeys((v for v in equation.outputs if v not in place), position))
    crossing = _crossing(kinds.forward)
    total, so_far = sum(seconds), 0.0
    slices: dict[int, int] = {}  # of equal work: the boundary (before this equation) where least crosses
    for k in range(1, count):
        so_far += seconds[k - 1]
        number = k if count <= BOUNDARIES else int(BOUNDARIES * so_far / total) if total else k * BOUNDARIES // count
        if number not in slices or crossing[k] < crossing[slices[number]]:
            slices[number] = k
    points = sorted(set(slices.values()))
    if len(points) < stages - 1:
        points = list(range(1, count))
    link = cluster.link_between(0, devices) if cluster.size > devices else None
    rate = link.bytes_per_s if link is not None else float("inf")
    sends = [2 * c / rate for c in crossing]
    return balance(points, seconds, sends, stages)


def too_few(forward: Sequence[Apply], stages: int) -> str:
    """Why a forward pass cannot be cut into so many stages."""
    heads = ", ".join(e.name for e in forward) or "nothing"
    return explain(
        f"a forward pass of {len(forward)} equation{'s' if len(forward) != 1 else ''} that use weights ({heads}) for "
        f"{stages} stages",
        "at least one equation a stage; a loop (lax.scan) is one equation and is not cut",
        "use fewer stages, or write the layers of a scan out",
    )


def balance(points: Sequence[int], seconds: Sequence[float], sends: Sequence[float], stages: int) -> tuple[int, ...]:
    """The cuts of the module's text.

    Args:
      points: boundaries to choose from, ascending, at least one less than stages.
      seconds: of each forward equation, with the backward equations that go with it.
      sends: seconds that what crosses before each forward equation is on its way, both ways.
      stages: how many.
    """
    limit, _ = _least_largest(points, seconds, sends, stages)
    allowed = [k for k in points if sends[k] <= limit]
    return _least_largest(allowed, seconds, sends, stages, together=True)[1]


def unit_boundaries(step: LoopStep) -> tuple[int, ...]:
    """Boundaries where less crosses than around them (for a residual network, those of its blocks), ascending.

    A low point that has lower ones near it on both sides is none. Where there are few, all boundaries, or those of
    `BOUNDARIES` slices of as many equations.
    """
    crossing = crossing_bytes(step)
    count = len(crossing)
    low = [
        k
        for k in range(1, count)
        if crossing[k] <= crossing[k - 1] and (k + 1 == count or crossing[k] < crossing[k + 1])
    ]
    heights = [crossing[k] for k in low]
    low = [
        k
        for i, k in enumerate(low)
        if LOWER * min(heights[max(i - NEAR, 0) : i], default=heights[i]) > heights[i]
        or LOWER * min(heights[i + 1 : i + 1 + NEAR], default=heights[i]) > heights[i]
    ]
    if len(low) >= min(FEW, count - 1):
        return tuple(low)
    slices = min(BOUNDARIES, count)
    return tuple(sorted({count * k // slices for k in range(1, slices)}))


def _seconds(equation: Apply, cluster: Cluster) -> float:
    """Roofline time on one device, bodies as often as they run."""
    if equation.graphs:
        inside = sum(_seconds(e, cluster) for g in equation.graphs for e in g.equations if isinstance(e, Apply))
        return trip_count(equation) * inside
    cost: Cost = equation_cost(
        equation, [atom.shape for atom in equation.inputs], [value.shape for value in equation.outputs]
    )
    return time_s(cost, cluster.device(0))


def crossing_bytes(step: LoopStep) -> list[int]:
    """Bytes of a microbatch that cross the boundary before each forward equation, on the way forward."""
    return _crossing(equation_kinds(step).forward)


def _crossing(forward: Sequence[Apply]) -> list[int]:
    """Bytes made before each equation and read by it or a later one; those of weights do not count."""
    made = {v: i for i, e in enumerate(forward) for v in e.outputs}
    last: dict[Value, int] = {}
    for i, equation in enumerate(forward):
        last.update({a: i for a in equation.inputs if isinstance(a, Value) and a in made})
    change = [0] * (len(forward) + 1)
    for value, end in last.items():
        change[made[value] + 1] += value.nbytes
        change[end + 1] -= value.nbytes
    found, alive = [0] * len(forward), 0
    for k in range(len(forward)):
        alive += change[k]
        found[k] = alive
    return found


def _least_largest(
    points: Sequence[int], seconds: Sequence[float], sends: Sequence[float], stages: int, together: bool = False
) -> tuple[float, tuple[int, ...]]:
    """(largest stage, cuts) with the least largest stage, by dynamic programming over the number of stages."""
    ends = np.array([0, *points, len(seconds)])
    prefix = np.concatenate([[0.0], np.cumsum(seconds)])[ends]
    sent = np.array([0.0, *(sends[k] for k in points), 0.0])
    work = prefix[:, None] - prefix[None, :]  # of a stage that ends at the row's boundary and begins at the column's
    mine = work + sent[:, None] + sent[None, :] if together else np.maximum(work, sent[None, :])
    mine[np.triu_indices(len(ends))] = np.inf
    best = np.full(len(ends), np.inf)
    best[0] = 0.0
    before: list[list[int]] = []  # by number of stages: where the last one begins
    for _ in range(stages):
        largest = np.maximum(best[None, :], mine)
        begin = largest.argmin(axis=1)
        best = largest[np.arange(len(ends)), begin]
        before.append([int(k) for k in begin])
    cuts: list[int] = []
    j = len(ends) - 1
    for level in range(stages, 0, -1):
        j = before[level - 1][j]
        cuts.append(int(ends[j]))
    cuts = cuts[-2::-1] if len(cuts) > 1 else []
    assert all(a < b for a, b in pairwise(cuts)), f"cuts ascend: {cuts}"
    return float(best[-1]), tuple(cuts)


def describe_cuts(step: LoopStep, cuts: Sequence[int]) -> str:
    """What crosses each cut, in words."""
    crossing = crossing_bytes(step)
    return ", ".join(size_text(crossing[c]) for c in cuts)
