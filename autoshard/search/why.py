"""The plan's "why": what was chosen, the next best, what was refused, and what every device does or holds whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autoshard import jax_compat
from autoshard.costmodel import known_primitives
from autoshard.ir import SPLITTABLE, FactorRule, MeshShape, Value, short_type, spec_axes
from autoshard.plan import Alternative, Argument
from autoshard.search.layout import Layout
from autoshard.search.ops import OpKind, Ops, sized
from autoshard.search.problem import Solution

LARGE_BYTES = 1 << 16
"""Arguments, and values of operators that cannot be split, from this size on are explained where they stay whole."""

NOTABLE = 0.01
"""Operators that take this part of the compute are explained where every device does all of their work."""

HIDDEN = 0.01
"""From this part of the collectives on, that they run beside compute is worth a line."""

MOST_LINES = 12
"""Lines of one sort, those of the largest first."""


def reasons(
    name: str,
    inputs: Sequence[Argument],
    mesh: MeshShape,
    ops: Ops,
    layout: Layout,
    time_s: float,
    solution: Solution,
    alternatives: Sequence[Alternative],
    pinned: Sequence[str],
) -> tuple[str, ...]:
    """The lines.

    Args:
      name: of the answer that was chosen.
      inputs: the arguments with their specs.
      mesh: axes and sizes.
      ops: the ops; `layout`: what they do; `time_s`: the simulated step.
      solution: of the solver.
      alternatives: other answers, quickest first.
      pinned: paths of the pinned arguments.
    """
    lines: list[str] = []
    shape = "x".join(str(n) for _, n in mesh)
    waiting = max(time_s - layout.compute_s, 0.0)
    share = waiting / time_s if time_s else 0.0
    lines.append(f"chosen: {name}, mesh {shape}, {time_s * 1e3:.4g} ms a step, {share:.0%} waiting for collectives")
    hidden = 1 - waiting / layout.traffic_s if layout.traffic_s else 0.0
    if hidden > HIDDEN:
        lines.append(f"overlap: {hidden:.0%} of {layout.traffic_s * 1e3:.4g} ms of collectives run beside compute")
    fitting = [a for a in alternatives if "does not fit" not in a.note]
    if fitting:
        lines.append(f"next best: {fitting[0].name}, {fitting[0].time_s * 1e3:.4g} ms ({fitting[0].note})")
    lines += [f"refused: {a.name}: {a.note}" for a in alternatives if "does not fit" in a.note]
    lines += [f"pinned: {path}" for path in pinned]
    sizes = {axis: n for axis, n in mesh if n > 1}
    if sizes:
        lines += _grouped("whole on every device", _whole(inputs, sizes))
        lines += _grouped("computed on every device", _repeated(ops, layout, sizes))
    lines += _guessed(ops)
    if solution.gap > 0:
        lines.append(f"not proved optimal: {solution.gap:.2%} above the lower bound")
    return tuple(lines)


def _grouped(what: str, found: Iterator[tuple[str, str, float]]) -> Iterator[str]:
    """One line for all with the same reason, of (name, reason, size); the largest first."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for name, reason, size in found:
        groups.setdefault(reason, []).append((name, size))
    ordered = sorted(groups.items(), key=lambda group: -sum(size for _, size in group[1]))
    for reason, members in ordered[:MOST_LINES]:
        more = f" and {len(members) - 1} more like it" if len(members) > 1 else ""
        yield f"{what}: {members[0][0]}{more} {reason}"
    if len(ordered) > MOST_LINES:
        yield f"{what}: {len(ordered) - MOST_LINES} more sorts of smaller ones"


def _whole(inputs: Sequence[Argument], sizes: Mapping[str, int]) -> Iterator[tuple[str, str, float]]:
    """Large arguments, and batches, that are not split."""
    for a in inputs:
        if spec_axes(a.spec) or not a.spec or (a.state and a.nbytes < LARGE_BYTES):
            continue
        shape = [int(n) for n in a.type[a.type.index("[") + 1 : -1].split(",") if n]
        if max(shape, default=1) == 1:
            continue
        odd = [f"dimension {d} of {n}" for d, n in enumerate(shape) if n > 1 and all(n % s for s in sizes.values())]
        stuck = f"{', '.join(odd)} divides by no mesh axis {dict(sizes)}"
        if len(odd) == sum(n > 1 for n in shape):
            yield a.path, f"{a.type}: {stuck}", a.nbytes
        else:
            reason = "splitting it costs more than it saves" + (f"; {stuck}" if odd else "")
            yield a.path, f"{a.type}: {reason}", a.nbytes


def _repeated(ops: Ops, layout: Layout, sizes: Mapping[str, int]) -> Iterator[tuple[str, str, float]]:
    """Operators of which every device does all the work, if that is much or cannot be otherwise."""
    for op in ops.ops:
        if op.kind is not OpKind.APPLY or op.equation is None or layout.choice[op.index].split_axes:
            continue
        values = [atom for atom in (*op.operands, *op.results) if isinstance(atom, Value) and sized(atom)]
        largest = max(values, key=lambda value: value.nbytes, default=None)
        if largest is None:
            continue
        reason = _unsplittable(op.rule, sizes)
        heavy = layout.work_s[op.index] > NOTABLE * layout.compute_s
        if heavy or (reason and largest.nbytes >= LARGE_BYTES):
            line = jax_compat.source_line(op.equation.place.source)
            where = f" ({line})" if line else ""
            reason = reason or "splitting it costs more than it saves"
            yield op.equation.name, f"{short_type(largest.aval)}: {reason}{where}", largest.nbytes * op.times


def _guessed(ops: Ops) -> Iterator[str]:
    """Primitives whose cost nobody registered."""
    names = {op.equation.name for op in ops.ops if op.kind is OpKind.APPLY and op.equation is not None}
    for name in sorted(names - known_primitives()):
        yield f"cost of {name}: one pass over operands and results, for it has no rule (autoshard.costmodel.work_rule)"


def _unsplittable(rule: FactorRule, sizes: Mapping[str, int]) -> str:
    """Why nothing of an operator can be split, "" where something can."""
    able = [n for n, kind in zip(rule.sizes, rule.kinds, strict=True) if kind in SPLITTABLE]
    if not able:
        return "it needs every dimension whole"
    if all(n % s for n in able for s in sizes.values()):
        return f"what could be split, of {', '.join(str(n) for n in able)}, divides by no mesh axis {dict(sizes)}"
    return ""
