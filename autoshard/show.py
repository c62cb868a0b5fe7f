"""A plan as text: tables by rich, rendered without a terminal so that `print(plan)` works anywhere."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.ir import Spec, print_spec
from autoshard.plan import Argument, PipelinePlan, Plan

ROWS = 40
"""Most rows of a table before like rows are folded into a count."""


ACTIONS = 24
"""Most actions of a rank that are shown."""


def show_plan(plan: Plan, width: int = 118) -> str:
    """The plan as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(plan_view(plan))
    return out.getvalue().rstrip() + "\n"


def plan_view(plan: Plan) -> RenderableType:
    """The plan as a rich renderable."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh)
    of = f"{seconds(plan.compute_s)} compute, {seconds(plan.traffic_s)} collectives"
    if plan.pipeline is not None:
        of = f"of the fullest stage {of}; the rest is waiting for other stages"
    head = Text(
        f"plan {plan.fingerprint} on {plan.cluster}: mesh ({mesh}), {parts_text(plan)}{seconds(plan.time_s)} a step "
        f"({of}), "
        f"{size_text(plan.memory.peak_bytes)} a device of {size_text(plan.memory_limit)}"
    )
    parts: list[RenderableType] = [head, _arguments(plan)]
    if plan.pipeline is not None:
        parts += [_stages(plan.pipeline), _schedule(plan.pipeline)]
    if plan.collectives:
        parts.append(_collectives(plan))
    if plan.reshardings:
        parts.append(_reshardings(plan))
    if plan.alternatives:
        parts.append(_alternatives(plan))
    parts.append(_memory(plan))
    parts.append(Text("\n".join(["why", *(f"  {line}" for line in plan.why), f"  solver: {plan.solver}"])))
    return Group(*parts)


def _stages(pipeline: PipelinePlan) -> Table:
    table = _table("stages", "stage", "rank", "mesh", "forward", "backward", "held", "state", "first and last", "why")
    backward = [first + second for first, second in zip(pipeline.backward_s, pipeline.weights_s, strict=True)]
    rows = zip(pipeline.placement, pipeline.stages, pipeline.forward_s, backward, pipeline.held, strict=True)
    for k, (rank, plan, forward_s, backward_s, held) in enumerate(rows):
        mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh)
        state = size_text(plan.memory.state_bytes)
        why = plan.why[0] if plan.why else ""
        cells = (str(k), str(rank), mesh, seconds(forward_s), seconds(backward_s), str(held), state)
        table.add_row(*cells, _ends(plan), why)
    return table


def _ends(plan: Plan) -> str:
    """The first and the last array of a stage's state, without what their paths begin with alike."""
    paths = [a.path.split("/") for a in plan.inputs if a.state]
    if not paths:
        return ""
    first, last = paths[0], paths[-1]
    alike = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return " ... ".join(dict.fromkeys("/".join(path[alike:]) for path in (first, last)))


def _schedule(pipeline: PipelinePlan) -> Table:
    """The start of every rank's row."""
    table = _table(f"schedule {pipeline.schedule}", "rank", "order")
    for rank, row in enumerate(pipeline.rows):
        words = row.split()
        table.add_row(str(rank), " ".join(words[:ACTIONS]) + (" ..." if len(words) > ACTIONS else ""))
    return table


def parts_text(plan: Plan) -> str:
    """How the batch is cut, when gradients are summed, whether anything is computed again; "" where none is said."""
    cut = f"{plan.microbatches} microbatches, " if plan.microbatches > 1 else ""
    apart = f"gradients summed once in {plan.groups} groups, " if plan.groups > 1 else ""
    return cut + apart + ("recomputing, " if plan.remat else "")


def seconds(value: float) -> str:
    """A duration with a unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def size_text(nbytes: float) -> str:
    """Bytes with a unit that suits them."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.0f} B"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _arguments(plan: Plan) -> Table:
    table = _table("arguments", "argument", "type", "sharding", "bytes", "role", "like it")
    groups: dict[tuple[str, Spec, bool], list[Argument]] = {}
    for a in plan.inputs:
        groups.setdefault((a.type, a.spec, a.state), []).append(a)
    rows: Sequence[list[Argument]] = [[a] for a in plan.inputs] if len(plan.inputs) <= ROWS else list(groups.values())
    for group in rows:
        first = group[0]
        more = f"+{len(group) - 1}" if len(group) > 1 else ""
        role = "state" if first.state else "input"
        table.add_row(first.path, first.type, print_spec(first.spec), size_text(first.nbytes), role, more)
    return table


def _collectives(plan: Plan) -> Table:
    table = _table("collectives a step", "kind", "axes", "count", "bytes", "time")
    for c in plan.collectives:
        table.add_row(c.kind, ",".join(c.axes), str(c.count), size_text(c.nbytes), seconds(c.time_s))
    return table


def _reshardings(plan: Plan) -> Table:
    table = _table("resharding points, dearest first", "value", "from", "to", "by", "times", "time", "source")
    for r in plan.reshardings[:12]:
        kinds = ",".join(r.kinds)
        row = (r.what, print_spec(r.source), print_spec(r.target), kinds, str(r.times), seconds(r.time_s))
        table.add_row(*row, r.source_line.rsplit("/", 1)[-1])
    if len(plan.reshardings) > 12:
        table.add_row(f"and {len(plan.reshardings) - 12} more", "", "", "", "", "", "")
    return table


def _alternatives(plan: Plan) -> Table:
    table = _table("alternatives", "plan", "time", "peak", "")
    for a in plan.alternatives:
        table.add_row(a.name, seconds(a.time_s), size_text(a.peak_bytes), a.note)
    return table


def _memory(plan: Plan) -> Table:
    table = _table("memory on one device", "state", "inputs", "outputs", "temporaries", "peak", "limit")
    m = plan.memory
    parts = (m.state_bytes, m.inputs_bytes, m.outputs_bytes, m.temporary_bytes, m.peak_bytes, plan.memory_limit)
    table.add_row(*(size_text(p) for p in parts))
    return table
