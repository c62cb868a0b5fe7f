"""What a run of units takes as a stage, from what each unit takes: sums over units, worked out once for a table.

s is a microbatch over the table's; each unit takes  w work,  m collectives of examples,  g of weights and gradients:

    gpu   max(s sum w, s sum m + sum g)        one unit moves its weights or gradients while another computes
    cpu   s sum w + sum g

What every microbatch does with weights alone does not shrink with s: reading them, adding to their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from autoshard.runtime.stage_costs import PhaseCost, StageNeeds
from autoshard.search import Floats

ACCUMULATION = 3
"""How often an accumulator's bytes move for a microbatch: two reads and a write."""


@final
@dataclass(frozen=True, slots=True)
class UnitCost:
    """One unit on one mesh, with the table's microbatches.

    Attributes:
      forward, backward: of a microbatch.
      once_s: of a step.
      needs: bytes on a device.
    """

    forward: PhaseCost
    backward: PhaseCost
    once_s: float
    needs: StageNeeds

    def sums_apart(self) -> UnitCost:
        """Of the unit that sums its gradients over devices once a step."""
        more = self.needs.added_whole - self.needs.added
        needs = replace(self.needs, before=self.needs.before + more, added=self.needs.added_whole)
        once_s = self.once_s + self.forward.summed_s + self.backward.summed_s
        return UnitCost(self.forward.unsummed(), self.backward.unsummed(), once_s, needs)

    def times(self, factor: float) -> UnitCost:
        """Of a unit that is so many times as much."""
        return UnitCost(
            self.forward.times(factor), self.backward.times(factor), factor * self.once_s, self.needs.times(factor)
        )


@final
class UnitTable:
    """Units in their order, of which runs are asked for."""

    def __init__(self, costs: Sequence[UnitCost], bytes_per_s: float, overlaps: bool) -> None:
        """`bytes_per_s`: of a device's memory; `overlaps`: whether collectives run beside compute."""
        self.size = len(costs)
        self._costs, self._overlaps = costs, overlaps

        def total(of: Callable[[UnitCost], float]) -> Floats:
            return np.concatenate([[0.0], np.cumsum([of(cost) for cost in costs])])

        self._forward = [total(lambda c: c.forward.work_s), *_moved(total, lambda c: c.forward)]
        self._backward = [total(lambda c: c.backward.work_s), *_moved(total, lambda c: c.backward)]
        self._once = total(lambda c: c.once_s)
        self._read = total(lambda c: c.needs.read / bytes_per_s)
        self._added = total(lambda c: min(ACCUMULATION * c.needs.added / bytes_per_s, c.backward.work_s))
        self._rest = total(lambda c: c.needs.there + c.needs.before)
        self._kept = total(lambda c: c.needs.kept)
        self._arriving = total(lambda c: c.needs.arriving)

    def seconds(self, i: int, j: int, share: float, remat: bool) -> tuple[float, float]:
        """Forward and backward of a microbatch by units i to j."""
        read_s, added_s = self._read[j] - self._read[i], self._added[j] - self._added[i]
        work, moved, fixed = (float(each[j] - each[i]) for each in self._forward)
        forward = PhaseCost(max(share * work, read_s), share * moved, fixed).time_s(self._overlaps)
        work, moved, fixed = (float(each[j] - each[i]) for each in self._backward)
        work = max(share * (work - added_s), read_s) + added_s
        backward = PhaseCost(work, share * moved, fixed).time_s(self._overlaps)
        return forward, backward + (forward if remat else 0.0)

    def once_s(self, i: int, j: int) -> float:
        """Of a step."""
        return float(self._once[j] - self._once[i])

    def peak(self, i: int, j: int, held: int, share: float, remat: bool) -> int:
        """Bytes with so many microbatches held; recomputing, what arrives at each unit is kept, and one unit's rest."""
        needs = [cost.needs for cost in self._costs[i:j]]
        kept = self._arriving if remat else self._kept
        working = max(max(n.forward, n.backward) for n in needs) + (max(n.kept for n in needs) if remat else 0)
        held_bytes = share * (held * float(kept[j] - kept[i]) + working)
        return int(self._rest[j] - self._rest[i] + max(held_bytes, max(n.after for n in needs)))


def _moved(
    total: Callable[[Callable[[UnitCost], float]], Floats], of: Callable[[UnitCost], PhaseCost]
) -> tuple[Floats, Floats]:
    return total(lambda c: of(c).moved_s), total(lambda c: of(c).fixed_s)
