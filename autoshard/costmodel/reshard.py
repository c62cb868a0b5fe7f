"""What moving a value from one sharding to another costs in collectives, and by which steps it is best done.

`reshard_collectives` says what XLA makes of one sharding constraint, exactly (`autoshard.costmodel.partitioner`). Where
that is wasteful, a second constraint in between helps, which XLA honours; `reshard_path` finds it:

    (-,x) -> (y,-)     one step: all-gather of the whole value ("involuntary full rematerialization"), then slice
    (-,x) -> (y,x) -> (y,-)     slice, then all-gather of a y-th of it

Elements of a collective are those of the whole buffer of one group over its mesh axes, as `collective_time_s` takes
bytes: of an all-gather the result, of an all-to-all and a permute the array whose n-th part each device holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement, pairwise, permutations, product, takewhile

import numpy as np

from autoshard.costmodel.algorithms import CollectiveKind
from autoshard.costmodel.partitioner import Tiling, Transfer, partition_move
from autoshard.ir import MeshShape, Spec, axes_size, divides, spec_axes

Move = tuple[CollectiveKind, int, tuple[str, ...]]
"""(kind, elements of the whole buffer of one group, mesh axes it runs over in mesh order)."""

MoveCost = Callable[[CollectiveKind, int, tuple[str, ...]], float]
"""What a collective costs, in any unit."""

WORTH_A_STEP = 0.9
"""A step in between is taken only if it leaves at most this part of the cost: below, launching one more collective may
eat what is saved. Chosen, not measured."""


def reshard_collectives(shape: Sequence[int], source: Spec, target: Spec, mesh: MeshShape) -> tuple[Move, ...]:
    """The collectives XLA inserts for one sharding constraint, in order; none where slicing is enough.

    Exact where all dimensions divide evenly. Else XLA pads, which is counted, and may shift the borders with further
    permutes of small parts, which are not.

    Args:
      shape: of the whole value.
      source, target: how it is sharded and shall be.
      mesh: all axes, major first.
    """
    if source == target:
        return ()
    sizes = dict(mesh)
    devices = math.prod(sizes.values())
    padded = 1
    for n, before, after in zip(shape, source, target, strict=True):
        parts = math.lcm(axes_size(before, sizes), axes_size(after, sizes))
        padded *= -(-n // parts) * parts
    moves, _ = _moves(source, target, mesh)
    return tuple((kind, padded * share // devices, axes) for kind, share, axes in moves)


def rematerializes(source: Spec, target: Spec, mesh: MeshShape) -> bool:
    """Whether XLA gathers the whole value although the target is split, and warns of it."""
    return source != target and _moves(source, target, mesh)[1]


def path_collectives(shape: Sequence[int], source: Spec, path: Sequence[Spec], mesh: MeshShape) -> tuple[Move, ...]:
    """The collectives of several sharding constraints one after the other."""
    stops = (source, *path)
    return tuple(move for a, b in zip(stops, path, strict=False) for move in reshard_collectives(shape, a, b, mesh))


def reshard_path(
    shape: tuple[int, ...],
    source: Spec,
    target: Spec,
    mesh: MeshShape,
    cost: MoveCost | None = None,
    known: dict[tuple[Spec, Spec], float] | None = None,
) -> tuple[Spec, ...]:
    """The constraints to state, in order, the target last: one, or two where that is cheaper.

    A single collective is taken as it is, and so is what does not divide evenly. The step in between uses only axes
    of source and target, and must divide the shape.

    Args:
      shape: of the whole value.
      source, target: how it is sharded and shall be.
      mesh: all axes, major first.
      cost: of one collective; by default the elements one device sends.
      known: what single constraints cost, filled in here; to share between calls of one shape, mesh and cost.
    """
    if source == target:
        return ()
    sizes = dict(mesh)
    whole = divides(shape, source, sizes) and divides(shape, target, sizes)
    moves, rematerialized = _moves(source, target, mesh)
    if not whole or (len(moves) < 2 and not rematerialized):
        return (target,)
    price = _sent(sizes) if cost is None else cost
    costs = {} if known is None else known
    elements, devices = math.prod(shape), math.prod(sizes.values())

    def step(a: Spec, b: Spec) -> float:
        if (a, b) not in costs:  # all of these divide evenly: nothing is padded
            found = _moves(a, b, mesh)[0] if a != b else ()
            costs[a, b] = sum(price(kind, elements * share // devices, axes) for kind, share, axes in found)
        return costs[a, b]

    best, best_cost = (target,), WORTH_A_STEP * step(source, target)
    for candidates in (_between, _every):
        for between in candidates(source, target):
            if between in (source, target) or not divides(shape, between, sizes):
                continue
            total = step(source, between)
            if total < best_cost and (total := total + step(between, target)) < best_cost:
                best, best_cost = (between, target), total
        if not any(rematerializes(a, b, mesh) for a, b in pairwise((source, *best))):
            break
    return best


def _sent(sizes: Mapping[str, int]) -> MoveCost:
    """Elements one device sends (the ring's and the pairwise exchange's volume)."""

    def cost(kind: CollectiveKind, elements: int, axes: tuple[str, ...]) -> float:
        n = axes_size(axes, sizes)
        match kind:
            case "permute":
                return elements / n
            case "all_to_all":
                return (n - 1) / n * elements / n
            case _:
                return (n - 1) / n * elements

    return cost


@lru_cache(maxsize=65536)
def _between(source: Spec, target: Spec) -> tuple[Spec, ...]:
    """Specs worth stopping at: each dimension as before, as after, what both begin with, or split further.

    Further: by the axes that only the other spec has, so that they are in place (for free, by slicing) before others
    move or go.
    """
    new = tuple(axis for axis in spec_axes(target) if axis not in spec_axes(source))
    old = tuple(axis for axis in spec_axes(source) if axis not in spec_axes(target))
    options: list[tuple[tuple[str, ...], ...]] = []
    for before, after in zip(source, target, strict=True):
        if not before and not after:
            options.append(((),))
            continue
        shared = tuple(pair[0] for pair in takewhile(lambda p: p[0] == p[1], zip(before, after, strict=False)))
        options.append(tuple(dict.fromkeys((before, after, shared, (*before, *new), (*after, *old)))))
    found: list[Spec] = []
    for spec in product(*options):
        axes = spec_axes(spec)
        if len(set(axes)) == len(axes) and spec not in (source, target):
            found.append(spec)
    return tuple(found)


@lru_cache(maxsize=4096)
def _every(source: Spec, target: Spec) -> tuple[Spec, ...]:
    """Every spec that uses some of the axes of both, in any order: many, for where no other stop avoids the worst."""
    axes = tuple(dict.fromkeys((*spec_axes(source), *spec_axes(target))))
    found: list[Spec] = []
    for count in range(len(axes) + 1):
        for order in permutations(axes, count):
            for cuts in combinations_with_replacement(range(count + 1), len(source) - 1):
                ends = (0, *cuts, count)
                found.append(tuple(order[a:b] for a, b in pairwise(ends)))
    return tuple(found)


@lru_cache(maxsize=65536)
def _moves(source: Spec, target: Spec, mesh: MeshShape) -> tuple[tuple[Move, ...], bool]:
    """Collectives of a value of as many elements as the mesh has devices, and whether the whole was gathered."""
    devices = math.prod(size for _, size in mesh)
    moved = partition_move((devices,), _tiling(source, mesh), _tiling(target, mesh))
    return tuple(_move(t, mesh) for t in moved.transfers), moved.full


def _tiling(spec: Spec, mesh: MeshShape) -> Tiling:
    """The devices of each tile, replicas last; devices are numbered row-major over the mesh."""
    names = [name for name, _ in mesh]
    sizes = dict(mesh)
    devices = np.arange(math.prod(sizes.values())).reshape([size for _, size in mesh])
    used = [names.index(axis) for axis in spec_axes(spec)]
    rest = [d for d in range(len(names)) if d not in used]
    return devices.transpose(used + rest).reshape(*(axes_size(axes, sizes) for axes in spec), -1)


def _move(transfer: Transfer, mesh: MeshShape) -> Move:
    """A transfer in terms of mesh axes: those along which the devices of some group differ."""
    places = np.stack(np.unravel_index(transfer.groups, [size for _, size in mesh]))
    differ = (places != places[:, :, :1]).any(axis=(1, 2))
    axes = tuple(name for (name, _), used in zip(mesh, differ, strict=True) if used)
    scale = 1 if transfer.kind == "all_gather" else axes_size(axes, dict(mesh))
    return transfer.kind, transfer.elements * scale, axes
