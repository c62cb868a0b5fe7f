"""State in and out: which argument an output is the new value of, and which buffers may be donated.

By structure, in order and greedily, each output leaf used once:

    argument (else its children)   ~   whole result, else its children, else their children
    where both have the same tree, shapes and dtypes (weak types may differ)

then by flow, so that gradients do not pass for new parameters (`autoshard.ir.step`).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from autoshard.ir import Graph, StepInfo, state_groups
from autoshard.runtime.arguments import ArrayLeaf, Call, Leaf, ObjectLeaf, Static
from autoshard.runtime.outputs import Outputs

Pairs = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A subtree: its tree and the range of its leaves."""

    tree: Any
    start: int
    stop: int


def describe(call: Call, outputs: Outputs, graph: Graph) -> StepInfo:
    """Names, state pairs and donated inputs of a traced step."""
    groups = match(call, outputs)
    hidden = tuple((source, o) for o, source in enumerate(outputs.hidden_sources) if source >= 0)
    state = state_groups(graph, list(groups))
    pairs = tuple(sorted({*hidden, *(pair for group in state for pair in group)}))
    return StepInfo(
        input_paths=call.slashes,
        input_arguments=call.owners,
        argument_names=tuple(slot.slash for slot in call.template.slots),
        output_paths=outputs.paths,
        output_parts=outputs.parts,
        pairs=pairs,
        donated=donated(call, pairs),
    )


def donated(call: Call, pairs: Pairs) -> tuple[int, ...]:
    """Flat inputs whose buffers the step may reuse.

    What the user says holds. Otherwise state is donated, but an array that stands alone only as the first
    argument: a batch that happens to have an output's shape must not vanish under the user's feet.
    """
    slots = call.template.slots
    leaves = [0] * len(slots)
    for owner in call.owners:
        leaves[owner] += 1
    state = {i for i, _ in pairs}
    found: list[int] = []
    for i, owner in enumerate(call.owners):
        choice = slots[owner].donate
        if choice is None:
            choice = i in state and (owner == 0 or leaves[owner] > 1)
        if choice:
            found.append(i)
    return tuple(found)


def match(call: Call, outputs: Outputs) -> tuple[Pairs, ...]:
    """The pairs of each argument subtree that has an output of its structure."""
    inputs = call.avals
    before = _ranges(call.template.leaves, 0)
    after = _ranges(outputs.leaves, sum(leaf.size for leaf in outputs.hidden))
    candidates = list(pieces(_skeleton(outputs.tree), 2))
    used: set[int] = set()
    found: list[Pairs] = []
    dynamic = list(pieces(_skeleton(call.template.tree), 2))
    matched: set[int] = set()
    for piece in dynamic[1:]:
        if any(i in matched for i in range(piece.start, piece.stop)):
            continue
        for candidate in candidates:
            if candidate.tree != piece.tree or any(i in used for i in range(candidate.start, candidate.stop)):
                continue
            pairs = _pairs(piece, candidate, call.template.leaves, outputs.leaves, before, after)
            if pairs is None or not all(_same(inputs[i], outputs.avals[o]) for i, o in pairs):
                continue
            used.update(range(candidate.start, candidate.stop))
            matched.update(range(piece.start, piece.stop))
            found.append(pairs)
            break
    return tuple(found)


def pieces(tree: Any, depth: int) -> Iterator[Piece]:
    """The tree itself, its children, their children, down to `depth`; without empty ones. Breadth first."""
    level = [Piece(jax.tree.structure(tree), 0, len(jax.tree.leaves(tree)))]
    subtrees = [tree]
    for _ in range(depth + 1):
        yield from (piece for piece in level if piece.stop > piece.start)
        grown: list[Piece] = []
        children: list[Any] = []
        for piece, subtree in zip(level, subtrees, strict=True):
            start = piece.start
            for child in _children(subtree):
                size = len(jax.tree.leaves(child))
                grown.append(Piece(jax.tree.structure(child), start, start + size))
                children.append(child)
                start += size
        level, subtrees = grown, children


def _children(tree: Any) -> list[Any]:
    if jax.tree.structure(tree).num_nodes == 1:
        return []
    return jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)


def _skeleton(tree: Any) -> Any:
    return tree.unflatten([_Mark()] * tree.num_leaves)


@final
class _Mark:
    """Stands for a leaf."""


def _ranges(leaves: Sequence[Leaf], start: int) -> list[int]:
    """Of each leaf the flat position of its first array."""
    found: list[int] = []
    for leaf in leaves:
        found.append(start)
        start += leaf.size if isinstance(leaf, ObjectLeaf) else 0 if isinstance(leaf, Static) else 1
    return found


def _pairs(
    piece: Piece,
    candidate: Piece,
    inputs: Sequence[Leaf],
    outputs: Sequence[Leaf],
    before: Sequence[int],
    after: Sequence[int],
) -> Pairs | None:
    found: list[tuple[int, int]] = []
    ranges = zip(range(piece.start, piece.stop), range(candidate.start, candidate.stop), strict=True)
    for i, o in ranges:
        here, there = inputs[i], outputs[o]
        if isinstance(here, ArrayLeaf) and isinstance(there, ArrayLeaf):
            found.append((before[i], after[o]))
        elif isinstance(here, ObjectLeaf) or not (isinstance(here, Static) and here == there):
            return None
    return tuple(found) or None


def _same(first: Any, second: Any) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype
