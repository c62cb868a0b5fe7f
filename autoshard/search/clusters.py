"""Which ops decide, and which follow.

Most operators have nothing to decide: an elementwise operator is split like its operand. Each op either *leads*
(it has choices of its own) or *follows* exactly one neighbour:

    leads            inputs, matrix products, convolutions, gathers and scatters, opaque calls, sums of what a loop made
    follows operand  everything else: its largest operand, the one nearest to the inputs among equals
                     (what a loop carries out: what the loop's body makes of it)
    follows reader   what can be made in any sharding: broadcasts, iota, random bits, and what only they feed

A leader and all that follow it are one cluster with one decision (Alpa calls this merging trivial operators; Zheng
et al., OSDI 2022, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from autoshard.ir import Value, aval_bytes
from autoshard.search.ops import Op, OpKind, Ops, sized

LEADERS = frozenset(
    (
        "dot_general",
        "conv_general_dilated",
        "gather",
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter_sub",
        "scatter_mul",
        "scatter_min",
        "scatter_max",
        "scatter-mul",
        "scatter-min",
        "scatter-max",
        "ragged_dot_general",
        "ragged_dot",
        "custom_linear_solve",
        "shard_map",
        "pallas_call",
        "sharding_constraint",
        "select_and_scatter_add",
        "reduce_window",
        "reduce_window_max",
        "reduce_window_sum",
    )
)


@final
@dataclass(frozen=True, slots=True)
class Follow:
    """An op's parent: the op it follows.

    Attributes:
      op: the parent.
      reads_us: True if the parent reads our result (we follow a reader), False if it makes our operand.
      own: which of our operands (or results) is shared with the parent.
      theirs: which of the parent's results (or operands) that is.
    """

    op: Op
    reads_us: bool
    own: int
    theirs: int


def find_parents(ops: Ops) -> list[Follow | None]:
    """For each op the one it follows, None for leaders."""
    depth = [0] * len(ops.ops)
    pliant = [False] * len(ops.ops)
    parents: list[Follow | None] = [None] * len(ops.ops)
    carried: dict[Any, Value] = {target: source for source, targets in ops.tied.items() for target in targets}
    for op in ops.ops:
        operands = [(k, a, *ops.maker[a]) for k, a in enumerate(op.operands) if isinstance(a, Value) and sized(a)]
        depth[op.index] = 1 + max((depth[maker.index] for _, _, maker, _ in operands), default=-1)
        if _leads(op, ops):
            continue
        source = carried.get(op.operands[0]) if op.kind is OpKind.LEAVE and sized(op.results[0]) else None
        if source in ops.maker:
            maker, result = ops.maker[source]
            if not pliant[maker.index]:
                parents[op.index] = Follow(maker, False, 0, result)
                continue
        firm = [(k, a, m, r) for k, a, m, r in operands if not pliant[m.index]]
        if not firm or _grows(op):
            pliant[op.index] = True
            continue
        k, _, maker, result = max(firm, key=lambda t: (aval_bytes(t[1].aval), -depth[t[2].index]))
        parents[op.index] = Follow(maker, False, k, result)
    for op in ops.ops:
        if pliant[op.index]:
            parents[op.index] = _reader(op, ops, pliant)
    return parents


def find_roots(ops: Ops, parents: list[Follow | None]) -> list[Op]:
    """For each op the leader of its cluster."""
    roots: list[Op | None] = [None] * len(ops.ops)
    for op in ops.ops:
        path: list[Op] = []
        current = op
        while (root := roots[current.index]) is None:
            path.append(current)
            follow = parents[current.index]
            if follow is None:
                root = current
                break
            current = follow.op
        for member in path:
            roots[member.index] = root
    return [root for root in roots if root is not None]


def _leads(op: Op, ops: Ops) -> bool:
    match op.kind:
        case OpKind.INPUT | OpKind.CONSTANT:
            return True
        case OpKind.ENTER | OpKind.LEAVE:
            return False
        case OpKind.APPLY:
            assert op.equation is not None, "an applied op has its equation"
            if op.equation.name == "reduce_sum":
                made = op.operands[0] if isinstance(op.operands[0], Value) else None
                return made in ops.maker and ops.maker[made][0].kind is OpKind.LEAVE
            return op.equation.name in LEADERS


def _grows(op: Op) -> bool:
    """Whether the op spreads a small value over a larger one; a broadcast that only adds a dimension of 1 does not."""
    if op.kind is not OpKind.APPLY or op.equation is None or op.equation.name != "broadcast_in_dim":
        return False
    return aval_bytes(op.results[0].aval) > sum(aval_bytes(a.aval) for a in op.operands)


def _reader(op: Op, ops: Ops, pliant: list[bool]) -> Follow | None:
    """The reader that a pliant op follows: one that is decided elsewhere if there is one."""
    found: Follow | None = None
    for r, value in enumerate(op.results):
        if not sized(value):
            continue
        for reader, k in ops.readers.get(value, ()):
            follow = Follow(reader, True, r, k)
            if not pliant[reader.index]:
                return follow
            found = found or follow
    return found
