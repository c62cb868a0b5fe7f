"""Which planned sharding a value has that is not (yet) an argument of a call: results of `init`, values to `place`.

A value, or a part of it, stands for a planned argument, or a part of one, if both hold arrays of the same relative
paths, shapes and dtypes:

    make_state() = (params, opt_state)      step(state, batch), state = TrainState(step, params, opt_state, ...)
    part "0" of the value                   part "params" of argument "state"
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from autoshard.errors import ArgumentError, explain
from autoshard.runtime import nnx_objects
from autoshard.runtime.arguments import ArrayLeaf, ObjectLeaf, Sorted, Static, sort_leaves
from autoshard.runtime.compiled import Compiled
from autoshard.runtime.outputs import Outputs
from autoshard.runtime.parameters import Slot
from autoshard.runtime.settle import move

DEPTH = 2
"""How deep parts are looked for, on both sides."""

SMALL_BYTES = 1 << 20
"""Arrays that nothing in the plan stands for are put whole on every device up to this many bytes together."""


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tree by its paths: the flat positions, and path below the part, shape and dtype of each array."""

    name: str
    positions: tuple[int, ...]
    arrays: tuple[tuple[str, tuple[int, ...], Any], ...]


def parts(paths: Sequence[str], avals: Sequence[Any], depth: int = DEPTH) -> Iterator[Part]:
    """All parts of slash paths, whole arguments first, then deeper ones."""
    cut = [tuple(path.split("/")) for path in paths]
    for length in range(1, depth + 2):
        grouped: dict[tuple[str, ...], list[int]] = {}
        for i, path in enumerate(cut):
            if len(path) >= length:
                grouped.setdefault(path[:length], []).append(i)
        for prefix, positions in grouped.items():
            below = tuple(("/".join(cut[i][length:]), tuple(avals[i].shape), avals[i].dtype) for i in positions)
            yield Part("/".join(prefix), tuple(positions), below)


def match_parts(
    paths: Sequence[str], avals: Sequence[Any], compiled: Compiled, first: str | None = None
) -> dict[int, int]:
    """For each flat array with a counterpart in the plan, the flat input it stands for.

    Args:
      paths, avals: of the arrays; paths start with a common root.
      compiled: the planned step.
      first: the argument to try first.
    """
    info = compiled.planned.info
    state = {i for i, _ in info.pairs}
    candidates = list(parts(info.input_paths, compiled.planned.avals))
    candidates.sort(key=lambda part: (part.name != first, not any(i in state for i in part.positions)))
    found: dict[int, int] = {}
    used: set[int] = set()
    for part in parts(paths, avals):
        if any(i in found for i in part.positions):
            continue
        for candidate in candidates:
            if candidate.arrays == part.arrays and not used.intersection(candidate.positions):
                found.update(zip(part.positions, candidate.positions, strict=True))
                used.update(candidate.positions)
                break
    return found


def check_rest(paths: Sequence[str], avals: Sequence[Any], found: Mapping[int, int], compiled: Compiled) -> None:
    """Raises ArgumentError if arrays of some size have no counterpart in the plan."""
    rest = [i for i in range(len(paths)) if i not in found]
    if sum(avals[i].size * 8 for i in rest) <= SMALL_BYTES:
        return
    large = max(rest, key=lambda i: avals[i].size)
    info = compiled.planned.info
    raise ArgumentError(
        explain(
            f"{paths[large]} has shape {tuple(avals[large].shape)} and dtype {avals[large].dtype}, "
            "and no argument of the planned step has such a part",
            f"parts of the step's arguments ({', '.join(info.argument_names)}), with their paths and shapes",
            "plan the step with such arguments first, or return only what the step takes",
        )
    )


def place(compiled: Compiled, values: Sequence[Any]) -> list[Any]:
    """The values moved to the shardings planned for them; NNX objects are updated in place.

    Raises:
      ArgumentError: a value is not part of the step's arguments.
      MeshError: an array lies on devices the plan does not have.
    """
    names = compiled.planned.info.argument_names
    result: list[Any] = []
    for position, value in enumerate(values):
        root = names[position] if position < len(names) else f"value{position}"
        found = sort_leaves([value], [Slot(root.replace("/", "."), root.replace("/", "."))])
        avals = [jax.typeof(x) for x in found.flat]
        matched = match_parts(found.slashes, avals, compiled, root)
        check_rest(found.slashes, avals, matched, compiled)
        whole = jax.sharding.NamedSharding(compiled.mesh, jax.sharding.PartitionSpec())
        moved = [
            move(x, compiled.inputs[matched[i]] if i in matched else whole, found.paths[i], compiled.mesh)
            for i, x in enumerate(found.flat)
        ]
        result.append(_refill(found, moved))
    return result


def _refill(found: Sorted, flat: Sequence[Any]) -> Any:
    """The sorted value with other arrays, its NNX objects updated in place."""
    arrays = iter(flat)
    values: list[Any] = []
    definitions: list[Any] = []
    split: list[list[Any]] = []
    for leaf in found.leaves:
        if isinstance(leaf, ObjectLeaf):
            definitions.append(leaf.definition)
            split.append([next(arrays) for _ in range(leaf.size)])
            values.append(leaf)
        else:
            values.append(leaf.value if isinstance(leaf, Static) else next(arrays))
    if definitions:
        nnx_objects.write(found.objects, split)
    objects = iter(found.objects)
    return found.tree.unflatten([next(objects) if isinstance(v, ObjectLeaf) else v for v in values])[0]


def sharding_trees(compiled: Compiled) -> tuple[Any, Any]:
    """(in_shardings, out_shardings) of the step as trees like its arguments and result.

    in_shardings is a tuple of the positional arguments without static ones; if there are keyword arguments, it is
    (tuple, dict). Static leaves have None, NNX objects a `nnx.State` of shardings.
    """
    planned = compiled.planned
    template = planned.template
    dynamic = iter(template.tree.unflatten(_fill(template.leaves, compiled.inputs, planned.info.input_paths)))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for slot in template.slots:
        if slot.static:
            continue
        if slot.keyword is None:
            args.append(next(dynamic))
        else:
            kwargs[slot.keyword] = next(dynamic)
    outputs: Outputs = planned.outputs
    hidden = sum(leaf.size for leaf in outputs.hidden)
    out = outputs.tree.unflatten(_fill(outputs.leaves, compiled.outputs[hidden:], outputs.paths[hidden:]))
    return ((tuple(args), kwargs) if kwargs else tuple(args)), out


def _fill(leaves: Sequence[Any], flat: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    filled: list[Any] = []
    i = 0
    for leaf in leaves:
        if isinstance(leaf, ArrayLeaf):
            filled.append(flat[i])
            i += 1
        elif isinstance(leaf, ObjectLeaf):
            filled.append(nnx_objects.state_of(leaf.definition, list(flat[i : i + leaf.size])))
            i += leaf.size
        else:
            filled.append(None)
    assert i == len(flat) == len(paths), "every sharding has its place"
    return filled
