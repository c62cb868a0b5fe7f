"""DAPPLE's stage planner (Fan et al., PPoPP 2021, section 4): which layers, on how many devices, where.

    TPL(j, m, g)   latency with the first j layers planned on the m devices g and the rest as one stage on the others;
                   extended by cutting a stage of layers j..j' on m' devices off the rest, placed

        fresh-first     on unused servers first          append-first     on partly used servers first
        scatter-first   on all servers evenly

    and, where there are few, in every other way (on small clusters these three miss the best plan by up to 30 %).

Latency is that of `pipeline_law`: the closed form in the search, and for the best plans, if wished, the recursion over
the schedule that the released planner uses. "Upstream" accounting counts a stage's boundary layer twice, as that
planner's evaluation does. The paper keeps one plan for each (j, g); here a few are, since the best start of a longer
pipeline is not always the start that is best with the rest as one stage. A start is dropped when (M - 1) times its
slowest block, or times the rest's work by its devices, is more than the plans found so far take: no plan from it takes
less.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

from autoshard.costmodel import Block, pipeline_latency_s, pipeline_tasks, simulate
from autoshard.errors import ArgumentError, explain
from autoshard.search.stages.pipedream import plan_pipedream
from autoshard.search.stages.table import Group, PlannedStage, Servers, StagePlan, StageTable, check_planned

Cut = tuple[int, int, Group]
"""First and last layer of a stage, and its devices."""


@final
@dataclass(frozen=True, slots=True)
class DappleOptions:
    """How to plan.

    Attributes:
      upstream: whether boundary layers are counted twice.
      recursion: whether the best plans are compared by the schedule's recursion, else by the closed form.
      most_stages: number of stages at most; None: as many as devices.
      width: starts kept for each (layers, devices used).
      compared: plans compared by recursion.
      most_ways: ways of placing a stage up to which all are tried, else DAPPLE's three; 0: always these.
      overlap: whether plain data parallelism, each device's part of the batch in one pass and each layer's all-reduce
        beside the rest of its backward pass (`data_parallel_s`), is among the plans.
    """

    upstream: bool = False
    recursion: bool = False
    most_stages: int | None = None
    width: int = 4
    compared: int = 16
    most_ways: int = 16
    overlap: bool = False


def plan_dapple(
    table: StageTable, servers: Servers, microbatches: int, options: DappleOptions | None = None
) -> StagePlan:
    """The plan of least latency that the search finds.

    Args:
      table: costs of the layers for one microbatch.
      servers: the devices; every plan uses all of them.
      microbatches: of one step.
      options: see there; None: the defaults.

    Raises:
      ArgumentError: no layers, devices, microbatches or stages, or options that keep or compare no plan.
    """
    options = DappleOptions() if options is None else options
    check_planned(table, sum(servers.devices), microbatches, options.most_stages)
    if options.width < 1 or options.compared < 1:
        given = f"width {options.width}, compared {options.compared}"
        raise ArgumentError(explain(given, "at least 1 each", "keep a start and compare a plan"))
    found = _Search(table, servers, microbatches, options).run()
    if options.recursion:
        blocks = [stage_blocks(table, servers, cuts, options.upstream) for _, cuts in found]
        found = [(recursion_s(b, microbatches), cuts) for b, (_, cuts) in zip(blocks, found, strict=True)]
    seconds, cuts = min(found, key=lambda plan: plan[0])
    if options.overlap:
        together_s = data_parallel_s(table, servers, microbatches)
        if together_s <= seconds:
            stage = PlannedStage(0, table.layers - 1, tuple(range(sum(servers.devices))))
            return StagePlan((stage,), together_s, f"no pipeline is below {seconds:.3g} s")
    return _plan(seconds, cuts, servers, table, microbatches, options)


def data_parallel_s(table: StageTable, servers: Servers, microbatches: int) -> float:
    """Seconds of a step in which all devices do all layers, all-reduces in order beside the backward pass."""
    count = sum(servers.devices)
    share = microbatches / count
    now = table.forward_s[-1] * share
    free = 0.0
    for layer in reversed(range(table.layers)):
        _, backward_s, nbytes = table.cost(layer, layer)
        now += backward_s * share
        free = max(free, now) + servers.all_reduce_s(servers.devices, nbytes)
    return max(now, free)


def stage_blocks(table: StageTable, servers: Servers, cuts: Sequence[Cut], upstream: bool = False) -> list[Block]:
    """Stages and the links between them, for `pipeline_latency_s` and `pipeline_tasks`."""
    blocks: list[Block] = []
    for k, cut in enumerate(cuts):
        if k:
            seconds = _link_s(table, servers, cuts[k - 1][2], cut)
            blocks.append(Block(seconds, seconds))
        blocks.append(_block(table, servers, cut, upstream))
    return blocks


def recursion_s(blocks: Sequence[Block], microbatches: int) -> float:
    """Latency by the recursion over the schedule."""
    return simulate(pipeline_tasks(blocks, microbatches, contention=False), contention=False).makespan_s


@cache
def placements(free: Group, whole: Group, count: int, most_ways: int) -> tuple[Group, ...]:
    """Ways to take devices: fresh-first, append-first and scatter-first; all, if they are no more than `most_ways`."""
    fresh = sorted(range(len(free)), key=lambda k: (free[k] < whole[k], k))
    append = sorted(range(len(free)), key=lambda k: (not 0 < free[k] < whole[k], k))
    found = [_filled(free, fresh, count), _filled(free, append, count), _scattered(free, count)]
    if math.prod(n + 1 for n in free) <= most_ways * (max(free) + 1):
        every = [g for g in itertools.product(*(range(n + 1) for n in free)) if sum(g) == count]
        found += every if len(every) <= most_ways else []
    return tuple(dict.fromkeys(found))


def _filled(free: Group, order: Sequence[int], count: int) -> Group:
    taken = [0] * len(free)
    for k in order:
        taken[k] = min(free[k], count)
        count -= taken[k]
    return tuple(taken)


def _scattered(free: Group, count: int) -> Group:
    taken = [0] * len(free)
    while count:
        for k in range(len(free)):
            if count and taken[k] < free[k]:
                taken[k] += 1
                count -= 1
    return tuple(taken)


def _link_s(table: StageTable, servers: Servers, sources: Group, cut: Cut) -> float:
    """Seconds in which a stage gets its input from the stage before."""
    return servers.send_s(sources, cut[2], table.output_bytes[cut[0] - 1])


def _block(table: StageTable, servers: Servers, cut: Cut, upstream: bool) -> Block:
    first, last, group = cut
    forward_s, backward_s, nbytes = table.cost(first, min(last + upstream, table.layers - 1))
    count = sum(group)
    return Block(forward_s / count, backward_s / count, servers.all_reduce_s(group, nbytes))


@final
@dataclass(frozen=True, slots=True)
class _Start:
    """Stages so far with their blocks, the seconds with the rest as one stage, and those of the slowest block."""

    seconds: float
    slowest_s: float
    cuts: tuple[Cut, ...]
    blocks: tuple[Block, ...]


@final
class _Search:
    """The table of TPL, filled from few layers to many."""

    __slots__ = ("best", "limit_s", "microbatches", "options", "servers", "starts", "table")

    def __init__(self, table: StageTable, servers: Servers, microbatches: int, options: DappleOptions) -> None:
        self.table, self.servers, self.microbatches, self.options = table, servers, microbatches, options
        self.starts: list[dict[Group, list[_Start]]] = [{} for _ in range(table.layers)]
        self.best: list[tuple[float, int, tuple[Cut, ...]]] = []
        self.limit_s = float("inf")  # what a plan may take to be among the best

    def run(self) -> list[tuple[float, tuple[Cut, ...]]]:
        """The best plans, best first."""
        empty = _Start(0.0, 0.0, (), ())
        self._whole(empty, self.servers.devices)
        self._even()
        self.starts[0][self.servers.devices] = [empty]
        most = self.options.most_stages or sum(self.servers.devices)
        for layer in range(self.table.layers - 1):
            for free, starts in self.starts[layer].items():
                for start in starts:
                    if len(start.cuts) + 1 < most:
                        self._extend(start, layer, free)
        return [(-seconds, cuts) for seconds, _, cuts in sorted(self.best, reverse=True)]

    def _even(self) -> None:
        """Pipelines with as many devices for each stage, down to the straight one: too long for cutting."""
        total = sum(self.servers.devices)
        most = min(self.options.most_stages or total, self.table.most_stages)
        for count in range(2, most + 1):
            if total % count:
                continue
            each = total // count
            rate = self.servers.message_bytes_per_s * each
            stages = plan_pipedream(self.table, count, rate, transfers=True, straight=True).stages
            free, cuts = self.servers.devices, list[Cut]()
            for stage in stages:
                group = _filled(free, range(len(free)), each)
                free = tuple(a - b for a, b in zip(free, group, strict=True))
                cuts.append((stage.first, stage.last, group))
            blocks = stage_blocks(self.table, self.servers, cuts, self.options.upstream)
            self._found(tuple(cuts), blocks)

    def _found(self, cuts: tuple[Cut, ...], blocks: Sequence[Block]) -> float:
        """A plan; its seconds."""
        seconds = pipeline_latency_s(blocks, self.microbatches)
        plan = (-seconds, -len(cuts), cuts)
        if plan in self.best:
            return seconds
        if len(self.best) < self.options.compared:
            heapq.heappush(self.best, plan)
        elif plan > self.best[0]:
            heapq.heapreplace(self.best, plan)
        if len(self.best) == self.options.compared:
            self.limit_s = -self.best[0][0]
        return seconds

    def _extend(self, start: _Start, first: int, free: Group) -> None:
        """Cuts every stage off the rest."""
        count = sum(free)
        steady = self.microbatches - 1
        end = self.table.layers - 1
        for last in range(first, end):
            if first and first - 1 not in self.table.before_of(last):
                continue
            rest_s = sum(self.table.cost(last + 1, end)[:2])
            own_s = sum(self.table.cost(first, last)[:2])
            for used in range(1, count):
                if steady * max(rest_s / (count - used), own_s / used, start.slowest_s) > self.limit_s:
                    continue
                for group in placements(free, self.servers.devices, used, self.options.most_ways):
                    cut = (first, last, group)
                    link: tuple[Block, ...] = ()
                    slowest = start.slowest_s
                    if start.cuts:
                        seconds = _link_s(self.table, self.servers, start.cuts[-1][2], cut)
                        if steady * 2 * seconds > self.limit_s:
                            continue
                        link = (Block(seconds, seconds),)
                        slowest = max(slowest, 2 * seconds)
                    stage = _block(self.table, self.servers, cut, self.options.upstream)
                    slowest = max(slowest, stage.forward_s + stage.backward_s)
                    left = tuple(a - b for a, b in zip(free, group, strict=True))
                    more = _Start(0.0, slowest, (*start.cuts, cut), (*start.blocks, *link, stage))
                    self._keep(last + 1, left, self._whole(more, left))

    def _whole(self, start: _Start, free: Group) -> _Start:
        """A start with the rest as one stage: a plan."""
        first = start.cuts[-1][1] + 1 if start.cuts else 0
        rest = (first, self.table.layers - 1, free)
        blocks = [*start.blocks]
        if start.cuts:
            seconds = _link_s(self.table, self.servers, start.cuts[-1][2], rest)
            blocks.append(Block(seconds, seconds))
        blocks.append(_block(self.table, self.servers, rest, self.options.upstream))
        seconds = self._found((*start.cuts, rest), blocks)
        return _Start(seconds, start.slowest_s, start.cuts, start.blocks)

    def _keep(self, layer: int, free: Group, start: _Start) -> None:
        kept = self.starts[layer].setdefault(free, [])
        kept.append(start)
        kept.sort(key=lambda s: s.seconds)
        del kept[self.options.width :]


def _plan(
    seconds: float,
    cuts: tuple[Cut, ...],
    servers: Servers,
    table: StageTable,
    microbatches: int,
    options: DappleOptions,
) -> StagePlan:
    """Devices get their numbers, in order in each server; the slowest block says why."""
    offsets = [sum(servers.devices[:k]) for k in range(len(servers.devices))]
    stages: list[PlannedStage] = []
    for first, last, group in cuts:
        numbers: list[int] = []
        for k, count in enumerate(group):
            numbers += range(offsets[k], offsets[k] + count)
            offsets[k] += count
        stages.append(PlannedStage(first, last, tuple(numbers)))
    blocks = stage_blocks(table, servers, cuts, options.upstream)
    k = max(range(len(blocks)), key=lambda b: blocks[b].forward_s + blocks[b].backward_s)
    name = f"the link after stage {k // 2}" if k % 2 else f"stage {k // 2}"
    each = blocks[k].forward_s + blocks[k].backward_s
    reduce_s = max(b.all_reduce_s for b in blocks)
    why = f"{name} takes longest, {each:.3g} s for each of {microbatches} microbatches; all-reduce {reduce_s:.3g} s"
    return StagePlan(tuple(stages), seconds, why)
