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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement, pairwise, permutations

import numpy as np

from autoshard.costmodel.collectives import CollectiveKind
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
    shape: Sequence[int],
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
    direct = reshard_collectives(shape, source, target, mesh)
    sizes = dict(mesh)
    whole = all(divides(tuple(shape), spec, sizes) for spec in (source, target))
    if not whole or (len(direct) < 2 and not rematerializes(source, target, mesh)):
        return (target,)
    price = _sent(sizes) if cost is None else cost
    costs = {} if known is None else known

    def step(a: Spec, b: Spec) -> float:
        if (a, b) not in costs:
            costs[a, b] = sum(price(*move) for move in reshard_collectives(shape, a, b, mesh))
        return costs[a, b]

    best, best_cost = (target,), WORTH_A_STEP * step(source, target)
    axes = tuple(name for name, _ in mesh if name in (*spec_axes(source), *spec_axes(target)))
    for between in _between(axes, tuple(shape), mesh):
        total = step(source, between)
        if total >= best_cost or between in (source, target):
            continue
        total += step(between, target)
        if total < best_cost:
            best, best_cost = (between, target), total
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


@lru_cache(maxsize=4096)
def _between(axes: tuple[str, ...], shape: tuple[int, ...], mesh: MeshShape) -> tuple[Spec, ...]:
    """The specs of these axes that divide a shape."""
    sizes = dict(mesh)
    return tuple(spec for spec in _specs(axes, len(shape)) if divides(shape, spec, sizes))


def _specs(axes: tuple[str, ...], rank: int) -> Iterator[Spec]:
    """Every spec that uses some of the axes, in any order."""
    for count in range(len(axes) + 1):
        for order in permutations(axes, count):
            for cuts in combinations_with_replacement(range(count + 1), rank - 1):
                ends = (0, *cuts, count)
                yield tuple(order[a:b] for a, b in pairwise(ends))


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
