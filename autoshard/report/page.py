"""The page: a template with what needs no script, our style sheet and scripts, and the plan's content as JSON.

The page's Content-Security-Policy names style sheet and scripts by their hashes and allows nothing else: whatever a
plan has in its names, the page runs no other script and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from autoshard.errors import ArgumentError, explain
from autoshard.plan import Plan
from autoshard.report.content import embed, page_content
from autoshard.show import seconds, size_text

SCRIPTS = ("base.js", "tables.js", "timeline.js", "memory.js", "start.js")
"""In this order, as one script."""

MOST_WHY = 500
"""Lines of "why" on the page; how many there were is said."""

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which has no UTF-8; browsers end a tab over it."""


def report_html(plan: Plan) -> str:
    """A plan as one HTML page that needs nothing but a browser: no network, no other file.

    Raises:
      PlanError: the plan contradicts itself (an axis, a lane or a time that cannot be).
    """
    content = page_content(plan)
    style = _file("page.css")
    script = "\n".join(_file(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    lines = [escape(line) for line in plan.why[:MOST_WHY]]
    if len(plan.why) > MOST_WHY:
        lines.append(f"{len(plan.why) - MOST_WHY:,} more lines are in the plan's file.")
    page = Template(_file("page.html")).substitute(
        policy=policy,
        style=style,
        script=script,
        content=embed(content),
        fingerprint=escape(plan.fingerprint),
        cluster=escape(plan.cluster),
        mesh=escape(" × ".join(f"{axis} {size:,}" for axis, size in plan.mesh) or "one device"),
        devices=f"{math.prod(size for _, size in plan.mesh):,}",
        time=seconds(plan.time_s) if math.isfinite(plan.time_s) else "none",
        parts=_parts(plan),
        peak=size_text(plan.memory.peak_bytes),
        limit=size_text(plan.memory_limit),
        share=_share(plan),
        why="\n".join(f"<li>{line}</li>" for line in lines) or "<li>The plan gives no reasons.</li>",
        solver=escape(plan.solver),
    )
    return _HALF.sub("\ufffd", page)


def write_report(plan: Plan, path: Path | str) -> None:
    """Writes the page of a plan.

    Raises:
      ArgumentError: the file cannot be written, or its folder does not exist.
      PlanError: see `report_html`.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ArgumentError(
            explain(f"{path}: there is no folder {path.parent}", "a file in a folder that exists", "make the folder")
        )
    page = report_html(plan).encode()
    try:
        path.write_bytes(page)
    except OSError as error:
        raise ArgumentError(explain(f"{path}: {error}", "a file that can be written", "choose another")) from error


def _file(name: str) -> str:
    return (files("autoshard.report") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a Content-Security-Policy names a script or style sheet."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _parts(plan: Plan) -> str:
    """What the step time is made of; overlap or waiting where the parts are not the whole."""
    text = f"{seconds(plan.compute_s)} compute, {seconds(plan.traffic_s)} collectives"
    rest = plan.compute_s + plan.traffic_s - plan.time_s
    if not math.isfinite(rest) or abs(rest) <= 0.005 * plan.time_s:
        return text
    return text + (f", {seconds(rest)} of both at once" if rest > 0 else f", {seconds(-rest)} neither")


def _share(plan: Plan) -> str:
    if plan.memory_limit <= 0:
        return "no limit"
    share = plan.memory.peak_bytes / plan.memory_limit
    return f"{share:.1%} of {size_text(plan.memory_limit)}" + (": does not fit" if share > 1 else "")
