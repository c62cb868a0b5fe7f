"""What a step is predicted to do over time: lanes of spans, memory, cost by operator. Part of a plan, saved with it.

Devices that do the same are one group, named by their numbers, so that a plan for 1,024 of them is as small as one for
eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Lane:
    """What runs one thing at a time (a device's compute or collective stream), or a link.

    Attributes:
      name: "compute", "collectives", or the link's name.
      devices: the devices that do this alike, "0" or "0-1023"; "" for a link.
      busy_s: seconds of a step in which something runs here.
    """

    name: str
    devices: str
    busy_s: float


@final
@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work in a lane; neighbours of one kind may be joined to one.

    Attributes:
      lane: index of the lane.
      name: operator or collective, the longest of those joined.
      kind: class of work ("matmul", "elementwise", ...) or of collective ("all_reduce", ...).
      start_s, end_s: from the step's start.
      count: how many operators or collectives were joined.
      source_line: where the longest stands in the user's code, "" if nobody knows.
    """

    lane: int
    name: str
    kind: str
    start_s: float
    end_s: float
    count: int
    source_line: str


@final
@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes in use over a step.

    Attributes:
      devices: the devices this holds for, as in `Lane`.
      points: (seconds, bytes) in order of time; the bytes hold until the next point.
    """

    devices: str
    points: tuple[tuple[float, int], ...]


@final
@dataclass(frozen=True, slots=True)
class OperatorCost:
    """What like operators cost in a step, on one device.

    Attributes:
      name: of the primitive or collective.
      kind: as in `Span`.
      source_line: where it stands in the user's code.
      count: how many run in a step.
      time_s: seconds of all of them.
      flops: operations of all of them, 0 for collectives.
      nbytes: bytes they read and write in device memory; of collectives, of the whole buffers.
    """

    name: str
    kind: str
    source_line: str
    count: int
    time_s: float
    flops: float
    nbytes: float


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes:
      lanes: streams and links; spans: what they do, by lane and start.
      memory: a curve for each group of like devices.
      costs: operators, dearest first.
    """

    lanes: tuple[Lane, ...] = ()
    spans: tuple[Span, ...] = ()
    memory: tuple[MemoryCurve, ...] = ()
    costs: tuple[OperatorCost, ...] = ()


NO_TIMELINE = Timeline()
"""Of a plan that was not simulated."""
