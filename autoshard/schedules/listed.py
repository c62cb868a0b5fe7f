"""Schedules by list scheduling: for any stage times, messages and memory bound.

An idle rank takes the first of what it could run: a backward pass, a forward pass that memory has room for, a weight
gradient. That runs many forward passes ahead, which can be worse than waiting, so several lists are tried and the
schedule that ends first is taken:

    among forward passes   the oldest microbatch first; the deepest stage first
    pairs held by a rank   the bound; if less, the sum over its stages s of S - s, or of 2 (S - s) - 1, or the first of
                           these of the rank where it is largest (with one stage a rank: the warm-ups of 1F1B, of eager
                           1F1B, and of ZB-H1)

The made schedules for the placement (early-backward, interleaved, ZB-H1 and ZB-H2, ZB-V) that keep the bound are tried
too, so that what is found is never worse.

A forward pass fits if after it, for every microbatch m that the rank has not finished,

    pairs held of later microbatches + pairs held of m + forward passes of m still to come <= bound

so that microbatches can always be finished one after the other, and ranks never wait for each other's memory: the
oldest microbatch has its place kept everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from operator import le
from typing import final

from autoshard.errors import ArgumentError, explain
from autoshard.schedules.fixed import bounds_of, check_sizes, early_backward, interleaved
from autoshard.schedules.table import Action, Kind, Schedule, line_placement, round_placement, v_placement
from autoshard.schedules.times import StageTimes, makespan_s, play
from autoshard.schedules.verify import verify
from autoshard.schedules.zero_bubble import zb_h1, zb_h2, zb_v


def list_schedule(
    times: StageTimes,
    microbatches: int,
    placement: Sequence[int] | None = None,
    *,
    most_held: int | Sequence[int] | None = None,
    split: bool = False,
) -> Schedule:
    """The schedule that list scheduling finds.

    Args:
      times: seconds of each virtual stage, and of what is sent.
      microbatches: number of them.
      placement: the rank of each stage; None: one stage a rank.
      most_held: bound on (stage, microbatch) pairs held, for all ranks or for each; None: no bound.
      split: whether weight gradients run apart.

    Raises:
      ArgumentError: times that fit no placement, or a bound below the number of a rank's stages.
    """
    placement = tuple(range(times.stages)) if placement is None else tuple(placement)
    ranks = max(placement, default=-1) + 1
    check_sizes(ranks, microbatches)
    most = bounds_of(most_held, ranks, len(placement) * microbatches)
    for rank, bound in enumerate(most):
        if bound < placement.count(rank):
            raise ArgumentError(
                explain(
                    f"rank {rank} may hold {bound} and has {placement.count(rank)} stages",
                    "room for a microbatch on each stage",
                    "raise the bound",
                )
            )
    found = [
        _listed(_Lister(placement, bounds, split, deepest), placement, microbatches, times)
        for bounds in _tried(placement, most)
        for deepest in ((False, True) if times.stages > ranks else (False,))
    ]
    found += _made(placement, most, split, microbatches)
    return min(found, key=lambda s: makespan_s(s, times))


def _tried(placement: tuple[int, ...], most: Sequence[int]) -> list[tuple[int, ...]]:
    """Bounds on held pairs to try; see the module."""
    size = len(placement)
    less = [[size - s for s, rank in enumerate(placement) if rank == r] for r in range(len(most))]
    short = [sum(row) for row in less]
    eager = [sum(2 * n - 1 for n in row) for row in less]
    even = [max(short)] * len(most)
    tried = [tuple(most), *(tuple(map(min, bounds, most)) for bounds in (short, eager, even))]
    return list(dict.fromkeys(tried))


def _made(placement: tuple[int, ...], most: Sequence[int], split: bool, microbatches: int) -> list[Schedule]:
    """The made schedules for a placement that keep the bound."""
    ranks = len(most)
    chunks = len(placement) // ranks
    made: list[Schedule] = []
    if placement == line_placement(ranks):
        made = [zb_h1(ranks, microbatches), zb_h2(ranks, microbatches)] if split else []
        if not split:
            made = [early_backward(ranks, microbatches, most, eager=eager) for eager in (False, True)]
    elif split and placement == v_placement(ranks):
        made = [zb_v(ranks, microbatches)]
    elif not split and placement == round_placement(ranks, chunks) and microbatches % ranks == 0:
        made = [interleaved(ranks, microbatches, chunks)]
    kept = (s for s in made if all(map(le, verify(s).held, most)))
    return [replace(s, name="listed") for s in kept]


def _listed(picker: _Lister, placement: tuple[int, ...], microbatches: int, times: StageTimes) -> Schedule:
    rows: list[list[Action]] = [[] for _ in picker.most]
    for action in play(picker, placement, microbatches, times):
        rows[placement[action.stage]].append(action)
    return Schedule("listed", placement, microbatches, tuple(tuple(row) for row in rows))


@final
class _Lister:
    """Picks by the rules of the module."""

    __slots__ = (
        "backward",
        "chunks",
        "deepest",
        "forward",
        "freed",
        "most",
        "oldest",
        "placement",
        "ran",
        "split",
        "total",
        "weight",
    )

    def __init__(self, placement: tuple[int, ...], most: Sequence[int], split: bool, deepest: bool) -> None:
        ranks = len(most)
        self.placement, self.most, self.split, self.deepest = placement, most, split, deepest
        self.chunks = [placement.count(rank) for rank in range(ranks)]
        self.forward: list[dict[int, list[int]]] = [{} for _ in range(ranks)]
        self.backward: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.weight: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.ran: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.freed: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.oldest = [0] * ranks
        self.total = [0] * ranks

    def ready(self, stage: int, microbatch: int, kind: Kind) -> None:
        rank = self.placement[stage]
        if kind is Kind.FORWARD:
            heapq.heappush(self.forward[rank].setdefault(stage, []), microbatch)
        else:
            heapq.heappush((self.weight if kind is Kind.WEIGHT_GRAD else self.backward)[rank], (microbatch, stage))

    def pick(self, rank: int) -> Action | None:
        if self.backward[rank]:
            microbatch, stage = heapq.heappop(self.backward[rank])
            return Action(Kind.INPUT_GRAD if self.split else Kind.BACKWARD, stage, microbatch)
        tops = [(waiting[0], stage) for stage, waiting in self.forward[rank].items() if waiting]
        tops.sort(key=lambda top: (-top[1], top[0]) if self.deepest else (top[0], -top[1]))
        for microbatch, stage in tops:
            if self._fits(rank, microbatch):
                heapq.heappop(self.forward[rank][stage])
                self.ran[rank][microbatch] = self.ran[rank].get(microbatch, 0) + 1
                self.total[rank] += 1
                return Action(Kind.FORWARD, stage, microbatch)
        if self.weight[rank]:
            microbatch, stage = heapq.heappop(self.weight[rank])
            return Action(Kind.WEIGHT_GRAD, stage, microbatch)
        return None

    def ended(self, action: Action) -> None:
        if action.kind is Kind.BACKWARD or action.kind is Kind.WEIGHT_GRAD:
            rank = self.placement[action.stage]
            freed = self.freed[rank]
            freed[action.microbatch] = freed.get(action.microbatch, 0) + 1
            self.total[rank] -= 1
            while freed.get(self.oldest[rank]) == self.chunks[rank]:
                self.oldest[rank] += 1

    def _fits(self, rank: int, microbatch: int) -> bool:
        if self.total[rank] + self.chunks[rank] <= self.most[rank]:
            return True  # all is well even if the oldest has everything still to come
        later = 0
        ran, freed = self.ran[rank], self.freed[rank]
        for m in range(max(microbatch, max(ran, default=0)), self.oldest[rank] - 1, -1):
            done = ran.get(m, 0)
            gone = freed.get(m, 0)
            if gone < self.chunks[rank] and later + self.chunks[rank] - gone > self.most[rank]:
                return False
            later += done - gone + (m == microbatch)
        return True
