"""What work costs: frozen values that add and scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of some work on one device.

    Attributes:
      flops: floating-point (or integer) operations by class (`autoshard.cluster` FLOPS_CLASSES); a multiply-add is two.
      transcendentals: exponentials, logarithms, roots and the like, one an element.
      hbm_bytes: bytes read from and written to the device's memory.
      time_s: time, where a device is known; 0 before.
    """

    flops: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    transcendentals: float = 0.0
    hbm_bytes: float = 0.0
    time_s: float = 0.0

    @property
    def total_flops(self) -> float:
        """Operations of all classes."""
        return sum(self.flops.values())

    def __add__(self, other: Cost) -> Cost:
        flops = dict(self.flops)
        for name, count in other.flops.items():
            flops[name] = flops.get(name, 0.0) + count
        return Cost(
            flops,
            self.transcendentals + other.transcendentals,
            self.hbm_bytes + other.hbm_bytes,
            self.time_s + other.time_s,
        )

    def __mul__(self, factor: float) -> Cost:
        return Cost(
            {name: count * factor for name, count in self.flops.items()},
            self.transcendentals * factor,
            self.hbm_bytes * factor,
            self.time_s * factor,
        )

    __rmul__ = __mul__


NO_COST = Cost()
"""The neutral element of +."""
