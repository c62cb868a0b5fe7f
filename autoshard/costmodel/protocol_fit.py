"""Protocols of a collective library on one kind of link, fitted to a table of times.

NCCL moves small buffers by other protocols than large ones (LL, LL128, Simple; NVIDIA/nccl, src/graph/tuning.cc): less
latency a step, less bandwidth. Each is a `Link` for the closed forms of `collective_time_s`, all start with one launch:

    time(kind, N, n) = launch + min over protocols p of collective_time_s(kind, N, n devices joined by link p)

Protocols are added one at a time, each from the best fit with fewer, until the table is met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from autoshard.cluster import GroupLinks, Level, Link
from autoshard.costmodel.collectives import CollectiveKind, collective_time_s, wire_bytes
from autoshard.costmodel.least_squares import FitError, Vector, check_measured, fit_error, fit_relative
from autoshard.errors import ArgumentError, explain

TOLERANCE = 0.1
"""Largest relative error at which no more parameters are added."""

_SPLITS = ((0.25, 0.5), (0.1, 0.25), (0.5, 0.8), (3.0, 1.2))
"""Where a further protocol starts: factors on latency and rate of the fastest one so far."""


@final
@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One measurement.

    Attributes:
      kind: the collective.
      size: number of devices, all joined alike.
      nbytes: as in `collective_time_s`.
      time_s: seconds, launch included.

    Raises:
      ArgumentError: a group of fewer than two, or no bytes.
    """

    kind: CollectiveKind
    size: int
    nbytes: float
    time_s: float

    def __post_init__(self) -> None:
        if self.size < 2 or self.nbytes <= 0:
            raise ArgumentError(
                explain(
                    f"{self.kind} of {self.nbytes} bytes over {self.size} devices",
                    "bytes above 0 and two devices or more",
                    "leave the row out",
                )
            )


@final
@dataclass(frozen=True, slots=True)
class ProtocolFit:
    """The fitted protocols; see the module.

    Attributes:
      launch_s: seconds of every call (`DeviceSpec.collective_launch_s`).
      links: a link a protocol, slowest rate first.
      error: on the fitted rows.
    """

    launch_s: float
    links: tuple[Link, ...]
    error: FitError

    @property
    def parameters(self) -> int:
        """How many figures were fitted."""
        return 1 + 2 * len(self.links)

    def time_s(self, kind: CollectiveKind, nbytes: float, size: int) -> float:
        """Predicted seconds, launch included."""
        return self.launch_s + float(_protocol_times(self.links, kind, nbytes, size).min())

    def link_for(self, kind: CollectiveKind, nbytes: float, size: int) -> Link:
        """The protocol that is fastest: what a `Node` takes whose collectives are about as large."""
        return self.links[int(_protocol_times(self.links, kind, nbytes, size).argmin())]

    def error_on(self, rows: Sequence[CollectiveTime]) -> FitError:
        """The error on other rows.

        Raises:
          ArgumentError: no rows, or a time that is not above 0.
        """
        check_measured("collective time", [r.time_s for r in rows], 0)
        return fit_error([self.time_s(r.kind, r.nbytes, r.size) for r in rows], [r.time_s for r in rows])


def fit_protocols(rows: Sequence[CollectiveTime], *, most: int = 3, tolerance: float = TOLERANCE) -> ProtocolFit:
    """Fits as few protocols as meet the table.

    Args:
      rows: more than parameters, 3 for one protocol and 2 for each further one, of two sizes in bytes or more.
      most: protocols to try.
      tolerance: worst relative error that is good enough.

    Returns:
      The first fit within the tolerance, else the best found.

    Raises:
      ArgumentError: too few rows, or a time that is not above 0.
    """
    measured = [r.time_s for r in rows]
    check_measured("a collective protocol", measured, 3)
    if len({r.nbytes for r in rows}) < 2:
        raise ArgumentError(
            explain("collectives of one size in bytes only", "two sizes or more", "measure a larger buffer as well")
        )
    best = _fit(rows, [0.5 * min(measured), *_first_protocol(rows)])
    for count in range(2, most + 1):
        if best.error.worst <= tolerance or len(rows) <= 1 + 2 * count:
            break
        fastest = best.links[-1]
        known = [figure for link in best.links for figure in (link.latency_s, link.bytes_per_s)]
        starts = [
            [best.launch_s, *known, fastest.latency_s * slower, fastest.bytes_per_s * rate] for slower, rate in _SPLITS
        ]
        best = min([best, *(_fit(rows, start) for start in starts)], key=lambda fit: fit.error.worst)
    return best


def _first_protocol(rows: Sequence[CollectiveTime]) -> tuple[float, float]:
    """Latency and rate of one protocol, roughly."""
    rate = max(wire_bytes(r.kind, r.nbytes, _joined(r.size, Link(1.0, 0.0))) / r.time_s for r in rows)
    return 0.05 * min(r.time_s for r in rows), rate


def _fit(rows: Sequence[CollectiveTime], start: Sequence[float]) -> ProtocolFit:
    """One descent from launch, then latency and rate of each protocol."""
    measured = [r.time_s for r in rows]

    sizes = {r.size for r in rows}

    def predict(figures: Vector) -> Vector:
        groups = {size: [_joined(size, link) for link in _links(figures)] for size in sizes}
        times = [min(collective_time_s(r.kind, r.nbytes, group) for group in groups[r.size]) for r in rows]
        return figures[0] + np.array(times, dtype=np.float64)

    found = fit_relative(predict, start, measured, "worst")
    links = sorted(_links(found), key=lambda link: link.bytes_per_s)
    return ProtocolFit(float(found[0]), tuple(links), fit_error(predict(found), measured))


def _links(figures: Vector) -> tuple[Link, ...]:
    pairs = figures[1:].reshape(-1, 2)
    return tuple(Link(float(rate), float(latency)) for latency, rate in pairs)


def _protocol_times(links: Sequence[Link], kind: CollectiveKind, nbytes: float, size: int) -> Vector:
    """(protocols,) seconds without launch."""
    return np.array([collective_time_s(kind, nbytes, _joined(size, link)) for link in links], dtype=np.float64)


def _joined(size: int, link: Link) -> GroupLinks:
    return GroupLinks(size, (Level(size, link),))
