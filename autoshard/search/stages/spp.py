"""SPP's stage planner for devices joined by any links (Luo et al., INFOCOM 2022; the recurrence is our reading).

    order   devices by recursive minimum cut of the bandwidth graph (Stoer-Wagner): each part is cut where the least
            bandwidth crosses, the half nearer to what is placed goes first, so that slow links fall between stages
    W(l,x,r,i)   smallest bottleneck when the first l layers form x stages on the first i devices, the last on r of them
               = min over l', r' of max{ W(l', x-1, r', i-r),   M (d_f + d_b)_l' / (r r' b),
                                         M sum_{l'+1..l}(p_f + p_b) / r + A }       A = 2 (r-1)/r * bytes / b(stage)
    execution    list scheduling (`list_schedule`), one rank a stage; the best over the number of stages x is taken

b of a link between stages is the smallest bandwidth between their devices; each of r r' pairs has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from autoshard.cluster import Cluster
from autoshard.errors import ArgumentError, explain
from autoshard.schedules import Send, StageTimes, list_schedule, makespan_s
from autoshard.search.stages.table import PlannedStage, StagePlan, StageTable, check_planned

Floats = NDArray[np.float64]


def bandwidths_of(cluster: Cluster) -> Floats:
    """Bytes a second between each two devices of a cluster, 0 on the diagonal. Shape (devices, devices)."""
    size = cluster.size
    found = np.zeros((size, size))
    for a in range(size):
        for b in range(size):
            if a != b:
                found[a, b] = cluster.link_between(a, b).bytes_per_s
    return found


def device_order(bandwidths: Floats) -> tuple[int, ...]:
    """Devices so that slow links are between neighbours in the order that are far apart; see the module.

    Raises:
      ArgumentError: bandwidths that are no square, or not above 0.
    """
    size = len(bandwidths)
    if bandwidths.shape != (size, size) or size < 1 or not (bandwidths + np.eye(size) > 0).all():
        given = f"bandwidths of shape {bandwidths.shape}"
        raise ArgumentError(explain(given, "a square of numbers above 0, its diagonal aside", "correct them"))
    return tuple(_ordered(bandwidths, list(range(size)), []))


def _ordered(bandwidths: Floats, part: list[int], placed: list[int]) -> list[int]:
    """A part's devices after those that are placed."""
    if len(part) == 1:
        return part
    graph: nx.Graph[int] = nx.Graph()
    for k, a in enumerate(part):
        for b in part[k + 1 :]:
            graph.add_edge(a, b, weight=float(bandwidths[a, b] + bandwidths[b, a]))
    cut = cast(Any, nx).stoer_wagner(graph)
    halves = cast("tuple[list[int], list[int]]", cut[1])
    first, second = (sorted(half) for half in sorted(halves, key=min))
    if placed:
        near = [float(bandwidths[np.ix_(placed, half)].mean()) for half in (first, second)]
        if near[1] > near[0]:
            first, second = second, first
    first = _ordered(bandwidths, first, placed)
    return first + _ordered(bandwidths, second, placed + first)


def plan_spp(table: StageTable, bandwidths: Floats, microbatches: int, *, most_stages: int | None = None) -> StagePlan:
    """The plan that ends first under list scheduling.

    Args:
      table: costs of the layers for one microbatch.
      bandwidths: bytes a second between each two devices; `bandwidths_of` a cluster.
      microbatches: of one step.
      most_stages: number of stages at most; None: as many as layers or devices.

    Raises:
      ArgumentError: no layers, devices, microbatches or stages, or bandwidths that are none.
    """
    check_planned(table, len(bandwidths), microbatches, most_stages)
    order = device_order(bandwidths)
    bottleneck = _Bottleneck(table, bandwidths[np.ix_(order, order)], microbatches)
    most = min(table.most_stages, len(order), most_stages or len(order))
    plans: list[tuple[float, int, tuple[PlannedStage, ...]]] = []
    for count in range(1, most + 1):
        bottleneck.more_stages()
        cuts = bottleneck.cuts(count)
        stages = tuple(PlannedStage(a, b, tuple(sorted(order[k] for k in devices))) for a, b, devices in cuts)
        plans.append((stages_s(table, stages, bandwidths, microbatches), count, stages))
    seconds, count, stages = min(plans, key=lambda plan: plan[:2])
    tried = ", ".join(f"{n}: {s:.3g} s" for s, n, _ in plans)
    return StagePlan(stages, seconds, f"the best of list-scheduled pipelines by number of stages ({tried})")


def stages_s(table: StageTable, stages: Sequence[PlannedStage], bandwidths: Floats, microbatches: int) -> float:
    """Seconds of a step of a plan, list-scheduled."""
    forward: list[float] = []
    backward: list[float] = []
    sums: list[float] = []
    sends: list[Send] = []
    for k, stage in enumerate(stages):
        forward_s, backward_s, nbytes = table.cost(stage.first, stage.last)
        count = len(stage.devices)
        forward.append(forward_s / count)
        backward.append(backward_s / count)
        inside = bandwidths[np.ix_(stage.devices, stage.devices)] + np.diag([np.inf] * count)
        sums.append(2 * (count - 1) / count * nbytes / float(inside.min()) if count > 1 else 0.0)
        if k + 1 < len(stages):
            others = stages[k + 1].devices
            slowest = float(bandwidths[np.ix_(stage.devices, others)].min())
            seconds = table.output_bytes[stage.last] / (count * len(others) * slowest)
            sends.append(Send(seconds, seconds))
    zero = (0.0,) * len(stages)
    times = StageTimes(tuple(forward), tuple(backward), zero, tuple(sends), tuple(sums))
    return makespan_s(list_schedule(times, microbatches), times)


@final
class _Bottleneck:
    """W as arrays over (layers, last stage's devices, devices), one for each number of stages."""

    __slots__ = ("bandwidths", "came", "link_s", "may", "microbatches", "stage_s", "table", "values")

    def __init__(self, table: StageTable, bandwidths: Floats, microbatches: int) -> None:
        self.table, self.bandwidths, self.microbatches = table, bandwidths, microbatches
        both = np.array(table.forward_s) + np.array(table.backward_s)
        self.stage_s = both[None, :] - both[:, None]  # [l', l]
        self.may = np.zeros((table.layers + 1, table.layers + 1), bool)  # [l', l]: a stage of layers l'+1..l
        for last in range(table.layers):
            self.may[[0, *(k + 1 for k in table.before_of(last))], last + 1] = True
        self.link_s = 2 * np.array((0.0, *table.output_bytes))  # [l'], there and back
        self.values: list[Floats] = []
        self.came: list[NDArray[np.int64]] = []

    def more_stages(self) -> None:
        """W for one stage more."""
        layers, devices = self.table.layers, len(self.bandwidths)
        shape = (layers + 1, devices + 1, devices + 1)
        value, came = np.full(shape, np.inf), np.zeros((*shape, 2), np.int64)
        nbytes = np.array(self.table.parameter_bytes)
        size = nbytes[None, :] - nbytes[:, None]
        for last in range(1, devices + 1):
            for own in range(1, last + 1):
                inside = self.bandwidths[last - own : last, last - own : last]
                slowest = float((inside + np.diag([np.inf] * own)).min()) if own > 1 else np.inf
                stage = self.microbatches * self.stage_s / own + 2 * (own - 1) / own * size / slowest
                stage = np.where(self.may, stage, np.inf)
                if not self.values:
                    if own == last:
                        value[:, own, last] = stage[0]
                    continue
                before = last - own
                for other in range(1, before + 1):
                    between = self.bandwidths[before - other : before, before:last]
                    link = self.microbatches * self.link_s / (own * other * float(between.min()))
                    start = np.maximum(self.values[-1][:, other, before], link)
                    found = np.maximum(start[:, None], stage)
                    at = found.argmin(axis=0)
                    least = found[at, np.arange(layers + 1)]
                    better = least < value[:, own, last]
                    value[better, own, last] = least[better]
                    came[better, own, last, 0] = at[better]
                    came[better, own, last, 1] = other
        self.values.append(value)
        self.came.append(came)

    def cuts(self, count: int) -> list[tuple[int, int, range]]:
        """First and last layer and places in the order of each of `count` stages on all devices."""
        layers, devices = self.table.layers, len(self.bandwidths)
        own = int(self.values[count - 1][layers, :, devices].argmin())
        found: list[tuple[int, int, range]] = []
        for x in reversed(range(count)):
            below, other = (int(k) for k in self.came[x][layers, own, devices])
            found.append((below if x else 0, layers - 1, range(devices - own, devices)))
            layers, own, devices = below, other, devices - own
        return found[::-1]
