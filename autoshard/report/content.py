"""What the page's scripts draw, as one JSON value: numbers and texts only, names in tables and referred to by number.

Times of spans and curves are whole ticks of a billionth of the drawn time. What JSON cannot say (infinite, not a
number) is null, which the page shows as "none".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

from autoshard.ir import print_spec
from autoshard.plan import Plan
from autoshard.report.fold import Fold, fold_arguments, within
from autoshard.report.thin import Block, join_spans, lane_spans, thin_curve
from autoshard.timeline import OperatorCost, Span

MOST_SPANS = 30_000
"""Spans kept one by one, about 1 MB of page; more are joined."""

MOST_POINTS = 4_000
"""Points kept of all memory curves together, at least 8 of each."""

MOST_ROWS = 3_000
"""Rows kept of each table of operators, resharding points and alternatives; the page says how many there were."""

MOST_CHARACTERS = 1_500_000
"""Characters kept of the arguments' paths; those that take least of a device are left out, and the page counts them."""

MOST_TEXT = 2_000
"""Characters kept of one name or note, which then ends with an ellipsis."""

TICKS = 1_000_000_000

COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "collective"})
"""Kinds that are communication; every other kind is compute."""


def page_content(plan: Plan) -> dict[str, Any]:
    """Everything the page's scripts draw.

    Raises:
      PlanError: a spec or span of the plan cannot be (see `fold_arguments`, `lane_spans`).
    """
    folds = fold_arguments(plan)
    kept = within(folds, MOST_CHARACTERS)
    lanes = lane_spans(plan.timeline)
    return {
        "mesh": [list(axis) for axis in plan.mesh],
        "limit": plan.memory_limit,
        "memory": asdict(plan.memory),
        "timeline": _timeline(plan, lanes),
        "kinds": _kinds(plan.timeline.spans, plan.timeline.costs),
        "folds": [_fold(f) for f in kept],
        "folds_left_out": sum(len(f.numbers) for f in folds[len(kept) :]),
        "costs": _rows(asdict(c) for c in plan.timeline.costs),
        "collectives": _rows({**asdict(c), "axes": ", ".join(c.axes)} for c in plan.collectives),
        "reshardings": _rows(
            {
                **asdict(r),
                "source": print_spec(r.source),
                "target": print_spec(r.target),
                "kinds": ", ".join(r.kinds),
            }
            for r in plan.reshardings
        ),
        "alternatives": _rows(asdict(a) for a in plan.alternatives),
        "plan": {
            "time_s": number(plan.time_s),
            "compute_s": number(plan.compute_s),
            "traffic_s": number(plan.traffic_s),
            "peak_bytes": plan.memory.peak_bytes,
        },
    }


def embed(content: Mapping[str, Any]) -> str:
    """JSON text that may stand in a script element: no character in it can end the element or open a comment."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: float) -> float | None:
    """The value if JSON has it."""
    return value if math.isfinite(value) else None


def short(text: str) -> str:
    """A text with no more than `MOST_TEXT` characters."""
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"


def _rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The first `MOST_ROWS` rows and how many there are."""
    found = list(rows)
    return {"rows": [{k: _plain(v) for k, v in row.items()} for row in found[:MOST_ROWS]], "total": len(found)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return number(value)
    return short(value) if isinstance(value, str) else value


def _fold(f: Fold) -> dict[str, Any]:
    return {
        "texts": list(f.texts),
        "numbers": [list(row) for row in f.numbers],
        "type": short(f.type),
        "spec": [list(axes) for axes in f.spec],
        "role": f.role,
        "bytes": f.nbytes,
        "local": f.local_bytes,
    }


def _kinds(spans: Sequence[Span], costs: Sequence[OperatorCost]) -> list[dict[str, Any]]:
    """Kinds of work by their time in the spans, those only in the costs at the end."""
    times: dict[str, float] = {}
    for span in spans:
        times[span.kind] = times.get(span.kind, 0.0) + span.end_s - span.start_s
    for cost in costs:
        times.setdefault(cost.kind, 0.0)
    order = sorted(times, key=lambda kind: -times[kind])
    return [{"name": kind, "time_s": times[kind], "collective": kind in COLLECTIVES} for kind in order]


def _timeline(plan: Plan, lanes: Sequence[Sequence[Span]]) -> dict[str, Any]:
    made = plan.timeline
    ends = [lane[-1].end_s for lane in lanes if lane] + [s.end_s for s in made.spans]
    times = [t for curve in made.memory for t, _ in curve.points]
    end_s = max((t for t in (plan.time_s, *ends, *times) if math.isfinite(t)), default=0.0) or 1.0
    blocks = join_spans(lanes, MOST_SPANS)
    names, kinds, sources = _Table(), _Table(), _Table()
    for kind in _kinds(made.spans, made.costs):
        kinds.number(kind["name"])
    most = max(MOST_POINTS // max(len(made.memory), 1), 8)
    curves: list[dict[str, Any]] = []
    for curve in made.memory:
        points = thin_curve(curve.points, most)
        flat = [n for t, nbytes in points for n in (round(t / end_s * TICKS), nbytes)]
        curves.append({"devices": short(curve.devices), "points": flat, "total": len(curve.points)})
    return {
        "end_s": end_s,
        "ticks": TICKS,
        "lanes": [
            {
                "name": short(lane.name),
                "devices": short(lane.devices),
                "busy_s": number(lane.busy_s),
                "spans": [n for block in row for n in _flat(block, end_s, names, kinds, sources)],
            }
            for lane, row in zip(made.lanes, blocks, strict=True)
        ],
        "names": names.texts,
        "sources": sources.texts,
        "spans": len(made.spans),
        "blocks": sum(map(len, blocks)),
        "curves": curves,
    }


@final
class _Table:
    """Texts by number."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return [short(text) for text in self._numbers]

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))


def _flat(block: Block, end_s: float, names: _Table, kinds: _Table, sources: _Table) -> tuple[int, ...]:
    """start, length and busy time in ticks, name, kind, source line, count, joined."""
    start, end = round(block.start_s / end_s * TICKS), round(block.end_s / end_s * TICKS)
    busy = end - start if block.joined == 1 else round(block.busy_s / end_s * TICKS)
    span = block.longest
    numbers = (names.number(span.name), kinds.number(span.kind), sources.number(span.source_line))
    return (start, end - start, busy, *numbers, block.count, block.joined)
