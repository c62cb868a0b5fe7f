"""What collectives there are, and how long one algorithm for them takes: a + b N seconds for N bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
)

TREE_EFFICIENCY = 0.9
"""NCCL's own discount of the tree's bandwidth against the ring's (NVIDIA/nccl, src/graph/tuning.cc: busBw*.9)."""


@final
@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to run a collective on one group.

    Attributes:
      name: e.g. "ring".
      latency_s: without any bytes.
      s_per_byte: for each byte of the whole buffer.
    """

    name: str
    latency_s: float
    s_per_byte: float

    def time_s(self, nbytes: float) -> float:
        """Seconds for a buffer."""
        return self.latency_s + nbytes * self.s_per_byte

    def named(self, name: str) -> Algorithm:
        """The same under another name."""
        return Algorithm(name, self.latency_s, self.s_per_byte)

    def then(self, other: Algorithm, share: float = 1.0) -> Algorithm:
        """This one, then another on a share of the bytes; the name stays."""
        return Algorithm(self.name, self.latency_s + other.latency_s, self.s_per_byte + share * other.s_per_byte)


def useful(algorithms: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    """Those that are the quickest for some size, by growing latency."""
    kept: list[Algorithm] = []
    for each in sorted(algorithms, key=lambda algorithm: (algorithm.latency_s, algorithm.s_per_byte)):
        if not kept or each.s_per_byte < kept[-1].s_per_byte:
            kept.append(each)
    return tuple(kept)


def quickest(algorithms: Iterable[Algorithm], nbytes: float) -> Algorithm:
    """The quickest for a size."""
    return min(algorithms, key=lambda algorithm: algorithm.time_s(nbytes))
