"""A link's latency and bandwidth from measured collectives.

    minimise over (latency a, bandwidth b)    sum of huber( log( (launch + T(kind, bytes; a, b)) / measured ) )

T is `collective_time_s`. Errors of the logarithm weigh a kilobyte and a gigabyte alike; Huber's loss (Huber, "Robust
estimation of a location parameter", 1964) keeps a measurement that went wrong from bending the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from autoshard.cluster import GroupLinks, Link
from autoshard.costmodel import COLLECTIVE_KINDS, CollectiveKind, collective_time_s

HUBER = 0.1
"""Errors above this count in proportion. Nominal: what a good measurement scatters by."""

Timed = tuple[CollectiveKind, float, float]
"""(kind, bytes as of `collective_time_s`, seconds)."""


@final
@dataclass(frozen=True, slots=True)
class LinkFit:
    """A fitted link.

    Attributes:
      link: latency and bandwidth.
      error: mean of |predicted / measured - 1|.
    """

    link: Link
    error: float


def rising(timed: Sequence[Timed]) -> list[Timed]:
    """The same measurements, those of one kind made to take no less time for more bytes.

    Neighbours in the wrong order get their common geometric mean (pool adjacent violators: Ayer et al., "An empirical
    distribution function for sampling with incomplete information", 1955). On a busy core a small collective waits for
    the scheduler, now and then several milliseconds.
    """
    found: list[Timed] = []
    for kind in COLLECTIVE_KINDS:
        pools: list[tuple[float, list[float]]] = []
        for nbytes, seconds in sorted((n, t) for k, n, t in timed if k == kind):
            pools.append((math.log(seconds), [nbytes]))
            while len(pools) > 1 and pools[-1][0] < pools[-2][0]:
                (a, first), (b, second) = pools[-2:]
                pools[-2:] = [((a * len(first) + b * len(second)) / (len(first) + len(second)), first + second)]
        for mean, sizes in pools:
            for nbytes in sizes:
                found.append((kind, nbytes, math.exp(mean)))
    return found


def fit_link(timed: Sequence[Timed], group: Callable[[Link], GroupLinks], launch_s: float = 0.0) -> LinkFit:
    """The link with which collectives take the time they were measured to take.

    Args:
      timed: measurements, at least one.
      group: the group that was measured, over a link.
      launch_s: part of each time that is no link's.
    """

    def errors(latency_s: float, bytes_per_s: float) -> list[float]:
        links = group(Link(bytes_per_s, latency_s))
        return [math.log((launch_s + collective_time_s(kind, n, links)) / t) for kind, n, t in timed]

    def loss(point: tuple[float, float]) -> float:
        return sum(_huber(e) for e in errors(math.exp(point[0]), math.exp(point[1])))

    # A grid that halves around its best point: two unknowns, and a loss with flat parts where one of them says nothing.
    best, width = (math.log(1e-5), math.log(1e9)), math.log(1e4)
    while width > 1e-4:
        steps = [width * k / 4 for k in range(-4, 5)]
        best = min(((best[0] + x, best[1] + y) for x in steps for y in steps), key=loss)
        width /= 2
    latency_s, bytes_per_s = math.exp(best[0]), math.exp(best[1])
    found = [abs(math.exp(e) - 1.0) for e in errors(latency_s, bytes_per_s)]
    return LinkFit(Link(bytes_per_s, latency_s), sum(found) / len(found))


def _huber(error: float) -> float:
    size = abs(error)
    return size * size / 2 if size <= HUBER else HUBER * (size - HUBER / 2)
