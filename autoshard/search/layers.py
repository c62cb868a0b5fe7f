"""Repeated structure: ops that look alike, neighbourhood included, share one decision.

Each op gets a colour; colours are refined by those of its neighbours a fixed number of times (Weisfeiler-Leman), so two
ops of one colour have like surroundings within that distance. Layers in the middle of a deep model agree, the first and
last ones stay apart. Tying never makes a plan wrong, it only searches fewer plans: like ops have like choices.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import final

from autoshard.ir import FactorRule, Spec, Value
from autoshard.search.ops import Op, Ops, sized

ROUNDS = 8
"""Distance within which surroundings must agree: more than from one matrix product of a layer to the next."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Ops grouped by colour.

    Attributes:
      kind: for each op the number of its kind.
      members: for each kind its ops, in order; the first one stands for all in what they do themselves.
      makers: ops of one kind whose results go to the same kinds, by one of them and their number; what their
        results cost to reshard is the same.
    """

    kind: tuple[int, ...]
    members: tuple[tuple[Op, ...], ...]
    makers: tuple[tuple[Op, int], ...]


def find_kinds(
    ops: Ops,
    roots: list[Op],
    pins: Mapping[Value, Spec],
    tie: bool = True,
    written: frozenset[Value] = frozenset(),
) -> Kinds:
    """Groups ops by surroundings.

    Args:
      ops: the ops.
      roots: the leader of each op; ops of one kind have leaders of one colour.
      pins: fixed specs, which make values differ.
      tie: False gives every op its own kind.
      written: values that go through memory, on which costs depend.
    """
    if not tie:
        return Kinds(tuple(range(len(ops.ops))), tuple((op,) for op in ops.ops), tuple((op, 1) for op in ops.ops))
    rules: dict[Hashable, int] = {}
    numbers = {id(op.rule): _number(rules, _rule_key(op.rule)) for op in {id(op.rule): op for op in ops.ops}.values()}
    colours = _refine(ops, [_look(op, numbers[id(op.rule)], pins, written) for op in ops.ops])
    table: dict[Hashable, int] = {}
    kind = [_number(table, (colours[op.index], colours[roots[op.index].index])) for op in ops.ops]
    members: list[list[Op]] = [[] for _ in table]
    for op in ops.ops:
        members[kind[op.index]].append(op)
    return Kinds(tuple(kind), tuple(tuple(group) for group in members), _makers(ops, kind))


def _makers(ops: Ops, kind: list[int]) -> tuple[tuple[Op, int], ...]:
    """Ops by their own kind and those of their readers."""
    groups: dict[Hashable, list[Op]] = {}
    for op in ops.ops:
        goes: list[Hashable] = [kind[op.index]]
        for value in op.results:
            if sized(value):
                readers = {(kind[reader.index], k) for reader, k in ops.readers.get(value, ())}
                tied = {(kind[ops.maker[target][0].index], -1) for target in ops.tied.get(value, ())}
                goes.append(tuple(sorted(readers | tied)))
        groups.setdefault(tuple(goes), []).append(op)
    return tuple((group[0], len(group)) for group in groups.values())


def _look(op: Op, rule: int, pins: Mapping[Value, Spec], written: frozenset[Value]) -> Hashable:
    """All that the op's own choices and costs depend on; `rule` is the number of its factor rule."""
    name = op.equation.name if op.equation is not None else ""
    shapes = tuple((a.shape, a.dtype, a in written) for a in op.operands)
    results = tuple((v.shape, v.dtype, pins.get(v), v in written) for v in op.results)
    return (op.kind, name, shapes, results, rule, op.times)


def _rule_key(rule: FactorRule) -> Hashable:
    return (rule.operands, rule.results, rule.sizes, rule.kinds)


def _refine(ops: Ops, looks: list[Hashable]) -> list[int]:
    table: dict[Hashable, int] = {}
    colours = [_number(table, look) for look in looks]
    above: list[list[tuple[int, int, int]]] = [[] for _ in ops.ops]
    below: list[list[tuple[int, int, int]]] = [[] for _ in ops.ops]

    def join(value: Value, reader: int, position: int) -> None:
        maker, result = ops.maker[value]
        above[reader].append((position, result, maker.index))
        below[maker.index].append((position, result, reader))

    for op in ops.ops:
        for k, atom in enumerate(op.operands):
            if isinstance(atom, Value) and sized(atom):
                join(atom, op.index, k)
    for tie in ops.ties:
        if sized(tie.source):
            join(tie.source, ops.maker[tie.target][0].index, -1)
    count = len(set(colours))
    for _ in range(ROUNDS):
        table = {}
        colours = [
            _number(
                table,
                (
                    colours[i],
                    tuple((p, r, colours[n]) for p, r, n in above[i]),
                    tuple(sorted((p, r, colours[n]) for p, r, n in below[i])),
                ),
            )
            for i in range(len(colours))
        ]
        if len(table) == count:
            break
        count = len(table)
    return colours


def _number(table: dict[Hashable, int], key: Hashable) -> int:
    return table.setdefault(key, len(table))
