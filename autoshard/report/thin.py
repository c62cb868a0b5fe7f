"""Long timelines made short enough for a page: neighbouring spans joined, memory curves without their small steps.

A timeline with no more than the page's most is kept as it is. Otherwise neighbours in a lane are joined while the
result is no longer than a resolution, which doubles until few enough are left. Busy time and counts are kept: nothing
is lost but the order within a joined span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from autoshard.errors import PlanError, explain
from autoshard.timeline import Span, Timeline


@final
@dataclass(frozen=True, slots=True)
class Block:
    """What the page draws as one: a span, or several joined.

    Attributes:
      longest: the longest span in it, which gives name, kind and source line.
      start_s, end_s: from the first span's start to the last one's end.
      busy_s: sum of the spans' durations.
      count: operators or collectives in it.
      joined: spans in it.
    """

    longest: Span
    start_s: float
    end_s: float
    busy_s: float
    count: int
    joined: int


def lane_spans(timeline: Timeline) -> tuple[tuple[Span, ...], ...]:
    """The spans of each lane by their start.

    Raises:
      PlanError: a span of a lane that is not there, or that ends before it starts.
    """
    lanes: list[list[Span]] = [[] for _ in timeline.lanes]
    for span in timeline.spans:
        if not 0 <= span.lane < len(lanes) or not 0 <= span.start_s <= span.end_s < float("inf"):
            given = f"a span {span.name!r} in lane {span.lane} from {span.start_s} to {span.end_s} s"
            expected = f"one of {len(lanes)} lanes, a start and a later end"
            raise PlanError(explain(given, expected, "plan again"))
        lanes[span.lane].append(span)
    return tuple(tuple(sorted(lane, key=lambda s: s.start_s)) for lane in lanes)


def join_spans(lanes: Sequence[Sequence[Span]], most: int) -> tuple[tuple[Block, ...], ...]:
    """Blocks of each lane, no more than `most` in all (one for each lane that has spans, if that is more)."""
    blocks = tuple(_join(lane, 0.0) for lane in lanes)
    end = max((b.end_s for lane in blocks for b in lane), default=0.0)
    # Where nothing takes any time, any resolution joins all.
    resolution = end / max(most, 1) or 1.0
    while sum(map(len, blocks)) > max(most, sum(1 for lane in lanes if lane)):
        blocks = tuple(_join(lane, resolution) for lane in lanes)
        resolution *= 2
    return blocks


def _join(lane: Sequence[Span], resolution: float) -> tuple[Block, ...]:
    made: list[Block] = []
    run: list[Span] = []
    for span in lane:
        if run and (resolution <= 0 or max(span.end_s, run[-1].end_s) - run[0].start_s > resolution):
            made.append(_block(run))
            run = []
        run.append(span)
    return (*made, _block(run)) if run else ()


def _block(run: Sequence[Span]) -> Block:
    longest = max(run, key=lambda s: s.end_s - s.start_s)
    return Block(
        longest,
        run[0].start_s,
        max(s.end_s for s in run),
        sum(s.end_s - s.start_s for s in run),
        sum(s.count for s in run),
        len(run),
    )


def thin_curve(points: Sequence[tuple[float, int]], most: int) -> tuple[tuple[float, int], ...]:
    """At most `most` points of a memory curve: of each stretch of time the highest one, so that no peak is lost."""
    if len(points) <= most:
        return tuple(points)
    # The last point has a stretch of its own: the curve goes on at its height.
    size = -(-(len(points) - 1) // (most - 1))
    kept = [
        max(points[i : min(i + size, len(points) - 1)], key=lambda p: p[1]) for i in range(0, len(points) - 1, size)
    ]
    return (*kept, points[-1])
