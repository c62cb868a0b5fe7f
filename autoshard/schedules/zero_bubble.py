"""Schedules that run the gradient by weights apart, where ranks would be idle.

zb_h1        Qi et al., ICLR 2024: 1F1B's warm-up; rank i does weight gradients i microbatches late. All ranks
             hold as many microbatches as 1F1B's first; its bubble is a third of 1F1B's where F = BI = BW
zb_h2        2 (S - i) - 1 forwards ahead, 2 i late: no bubble after a rank's start, 2 S - 1 microbatches held
zb_v         Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024: two stages a rank, down and
             up again; no bubble after a rank's start where F = BI = BW, and held as much as by 1F1B
dual_pipe_v  DeepSeek, DualPipeV (2025): the same placement; a forward of one stage beside a backward of the other
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final

from autoshard.errors import ArgumentError, explain
from autoshard.schedules.fixed import check_sizes
from autoshard.schedules.table import Action, Kind, Schedule, line_placement, v_placement


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """A third of 1F1B's bubble at the same memory; see the module."""
    check_sizes(ranks, microbatches)
    rows = (_late(s, ranks - s, s, microbatches) for s in range(ranks))
    return Schedule("zb-h1", line_placement(ranks), microbatches, tuple(rows))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No bubble at about twice the memory of 1F1B; see the module."""
    check_sizes(ranks, microbatches)
    rows = (_late(s, 2 * (ranks - s) - 1, 2 * s, microbatches) for s in range(ranks))
    return Schedule("zb-h2", line_placement(ranks), microbatches, tuple(rows))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No bubble at the memory of 1F1B; see the module."""
    check_sizes(ranks, microbatches)
    rows = tuple(_zb_v_row(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zb-v", v_placement(ranks), microbatches, rows)


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
    """Forwards beside backwards on two stages a rank; see the module.

    Raises:
      ArgumentError: a number below 1, or fewer than two microbatches a rank.
    """
    check_sizes(ranks, microbatches)
    if microbatches < 2 * ranks:
        raise ArgumentError(
            explain(
                f"DualPipe-V with {microbatches} microbatches on {ranks} ranks",
                "at least two microbatches a rank",
                f"use {2 * ranks} or more, or another schedule",
            )
        )
    rows = tuple(_dual_pipe_row(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("dualpipe-v", v_placement(ranks), microbatches, rows)


def _late(stage: int, ahead: int, late: int, microbatches: int) -> tuple[Action, ...]:
    """`ahead` forwards, then BI, the BW of `late` microbatches before, and F in turn; the other BW at the end."""
    row = [Action(Kind.FORWARD, stage, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        row.append(Action(Kind.INPUT_GRAD, stage, m))
        if m >= late:
            row.append(Action(Kind.WEIGHT_GRAD, stage, m - late))
        if ahead + m < microbatches:
            row.append(Action(Kind.FORWARD, stage, ahead + m))
    row += [Action(Kind.WEIGHT_GRAD, stage, m) for m in range(max(microbatches - late, 0), microbatches)]
    return tuple(row)


@final
@dataclass(slots=True)
class _Row:
    """A rank's actions so far, on its stages `down` and `up`; the next microbatch of each kind on each.

    Actions of microbatches that are not there are left out: the fill and drain of a short run is that of a long one.
    """

    down: int
    up: int
    microbatches: int
    actions: list[Action] = field(default_factory=list[Action])
    next_of: dict[tuple[Kind, int], int] = field(default_factory=dict[tuple[Kind, int], int])
    late: deque[Action] = field(default_factory=deque[Action])

    def count(self, kind: Kind, stage: int) -> int:
        return self.next_of.get((kind, stage), 0)

    def add(self, kind: Kind, stage: int) -> None:
        m = self.count(kind, stage)
        self.next_of[kind, stage] = m + 1
        if m < self.microbatches:
            self.actions.append(Action(kind, stage, m))

    def backward(self, stage: int, *, split: bool) -> None:
        """A whole backward pass, or its first part, the second being put off."""
        m = self.count(Kind.INPUT_GRAD, stage)
        if split:
            self.add(Kind.INPUT_GRAD, stage)
            self.late.append(Action(Kind.WEIGHT_GRAD, stage, m))
        else:
            self.next_of[Kind.INPUT_GRAD, stage] = m + 1
            self.actions.append(Action(Kind.BACKWARD, stage, m))

    def weight(self) -> None:
        """The first backward part that was put off."""
        self.actions.append(self.late.popleft())


def _zb_v_row(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Built for at least 2 S - 1 microbatches."""
    down, up = rank, 2 * ranks - 1 - rank
    row = _Row(down, up, microbatches)
    total = max(microbatches, 2 * ranks - 1)
    for _ in range(2 * (ranks - rank) - 1):
        row.add(Kind.FORWARD, down)
    for _ in range(rank):
        row.add(Kind.FORWARD, up)
        row.add(Kind.FORWARD, down)
    for _ in range(ranks - rank):
        for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
            row.add(kind, up)
    while row.count(Kind.FORWARD, up) < total:
        if row.count(Kind.FORWARD, down) < total:
            row.add(Kind.FORWARD, down)
        for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
            row.add(kind, down)
        for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
            row.add(kind, up)
    for _ in range(rank):
        row.add(Kind.INPUT_GRAD, down)
        row.add(Kind.INPUT_GRAD, up)
    for _ in range(ranks - rank):
        row.add(Kind.INPUT_GRAD, down)
        row.add(Kind.WEIGHT_GRAD, down)
    for stage in (up, down):
        while row.count(Kind.WEIGHT_GRAD, stage) < total:
            row.add(Kind.WEIGHT_GRAD, stage)
    return tuple(row.actions)


def _dual_pipe_row(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """The eight steps of the released schedule."""
    down, up = rank, 2 * ranks - 1 - rank
    row = _Row(down, up, microbatches)
    rest = ranks - rank - 1
    for _ in range(2 * rest):
        row.add(Kind.FORWARD, down)
    for _ in range(rank + 1):
        row.add(Kind.FORWARD, down)
        row.add(Kind.FORWARD, up)
    for _ in range(rest):
        row.backward(up, split=True)
        row.weight()
        row.add(Kind.FORWARD, up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.add(Kind.FORWARD, down)
        row.backward(up, split=False)
        row.add(Kind.FORWARD, up)
        row.backward(down, split=False)
    for _ in range(rest):
        row.backward(up, split=False)
        row.add(Kind.FORWARD, up)
        row.backward(down, split=False)
    half = (rank + 1) // 2
    for k in range(rank + 1):
        row.backward(up, split=k > half or (k == half and rank % 2 == 1))
        row.backward(down, split=k >= half)
    for _ in range(rest):
        row.weight()
        row.backward(down, split=True)
    while row.late:
        row.weight()
    return tuple(row.actions)
