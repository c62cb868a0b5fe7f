"""A schedule in step: one action a rank and tick, for a program in which all ranks go from tick to tick together.

    F0 F1 B0 B1          tick    0  1  2  3  4  5
    F0 B0 F1 B1    -->   rank 0  F0 F1 .  B0 .  B1
                         rank 1  .  F0 B0 F1 B1 .

What an action sends at the end of its tick is there at the next one.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

from autoshard.schedules.table import Action, Kind, Schedule
from autoshard.schedules.verify import needs, verify

K = TypeVar("K", bound=Hashable)


@final
@dataclass(frozen=True, slots=True)
class Ticks:
    """Who does what at which tick.

    Attributes:
      rows: for each tick the action of each rank, None where it waits.
      at: the tick of each action.
    """

    rows: tuple[tuple[Action | None, ...], ...]
    at: Mapping[Action, int]

    def seconds(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
        """Seconds of all ticks, each as long as its slowest action; arguments are those of a microbatch, by stage."""
        total = 0.0
        for row in self.rows:
            took = [
                (forward_s if action.kind is Kind.FORWARD else backward_s)[action.stage] for action in row if action
            ]
            total += max(took, default=0.0)
        return total


def in_ticks(schedule: Schedule) -> Ticks:
    """The schedule in step: every action at the first tick that its rank's row and what it needs allow.

    Args:
      schedule: a table, which is verified.

    Raises:
      ArgumentError: it cannot run.
    """
    order = verify(schedule).order
    places = {schedule.rows[rank][position]: (rank, position) for rank, position in order}
    at: dict[Action, int] = {}
    free = [0] * schedule.ranks
    for action, (rank, _) in places.items():
        known = [at[n] + 1 for n in needs(action, schedule.stages - 1, places)]
        at[action] = max([free[rank], *known])
        free[rank] = at[action] + 1
    rows: list[list[Action | None]] = [[None] * schedule.ranks for _ in range(max(free))]
    for action, tick in at.items():
        rows[tick][places[action][0]] = action
    return Ticks(tuple(map(tuple, rows)), at)


def shared_rows(spans: Mapping[K, tuple[int, int]]) -> tuple[dict[K, int], int]:
    """A row of a buffer for each of these, and how many rows there are: as few as can be.

    Args:
      spans: (tick at whose end it is written, tick that reads it last); a row may be written when it was read.
    """
    found: dict[K, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    count = 0
    for key, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(count)
            count += 1
        found[key] = heapq.heappop(free)
        heapq.heappush(busy, (end, found[key]))
    return found, count
