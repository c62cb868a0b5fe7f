"""What XLA's SPMD partitioner does where a value's sharding changes: which collectives, over which devices.

A *tiling* is an array of device numbers: one dimension for each dimension of the value, giving the device that holds
each tile, and a last one for the replicas of a tile. The partitioner sees only tilings, never mesh axes, and tries in
this order (its behaviour is modelled, not its code; openxla/xla, xla/service/spmd/spmd_partitioner.cc):

    same tile counts, other devices              permute
    tile counts swapped between dimensions       all-to-all, one a swap (disjoint swaps in one), then permute
    every dimension split further                slice, then permute
    every dimension split less                   permute, then all-gather, one a dimension
    one dimension's count divides into another   view that dimension as two, and again
    source replicas are as many as ...           replicate or split one dimension first, and again
    some dimensions split alike                  the others within each group of those, and again
    anything else                                all-gather everything, slice

Compared with compiled programs of jax 0.10.1 (CPU and GPU) in tests/costmodel/test_reshard.py. Dimensions are taken to
divide evenly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from autoshard.costmodel.algorithms import CollectiveKind

Tiling = np.ndarray[Any, np.dtype[Any]]
"""Device numbers by tile, and by replica in the last dimension."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One collective.

    Attributes:
      kind: all_gather, all_to_all or permute.
      elements: of one device: the result of an all-gather, the operand (= the result) of the others.
      groups: devices, one group a row; of a permute the (source, target) pairs.
    """

    kind: CollectiveKind
    elements: int
    groups: Tiling


@final
@dataclass(frozen=True, slots=True)
class Moved:
    """A change of tiling.

    Attributes:
      transfers: collectives in order.
      full: whether the whole value is gathered on the way although the target is split ("Involuntary full
        rematerialization" in XLA's words).
    """

    transfers: tuple[Transfer, ...] = ()
    full: bool = False

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.transfers + other.transfers, self.full or other.full)


def partition_move(shape: Sequence[int], source: Tiling, target: Tiling) -> Moved:
    """The collectives from one tiling to another, of a value of that global shape.

    Args:
      shape: of the whole value; divisible by the tile counts of both.
      source, target: tilings over the same devices.
    """
    moved = _reshard(math.prod(shape), _sorted(source), _sorted(target), full=True)
    assert moved is not None, "full replication always works"
    return moved


def _reshard(size: int, source: Tiling, target: Tiling, full: bool) -> Moved | None:
    """`size` elements in all; None where only full replication would do and it is not allowed."""
    if _same(source, target):
        return Moved()
    if _replicated(source):
        return Moved()
    if _replicated(target):
        return _gather(size, source, [d for d in range(source.ndim - 1) if source.shape[d] > 1])
    if source.shape == target.shape:
        return _permute(size, source, target)
    swaps = _swaps(source, target)
    if swaps is not None:
        return _all_to_all(size, source, target, swaps)
    for found in (_split_further(size, source, target), _split_less(size, source, target)):
        if found is not None:
            return found
    found = _complex(size, source, target)
    if found is not None:
        return found
    alike = [d for d in range(source.ndim - 1) if source.shape[d] == target.shape[d] > 1]
    if alike:
        return _within_groups(size, source, target, alike, full)
    if not full:
        return None
    gathered = _gather(size, source, [d for d in range(source.ndim - 1) if source.shape[d] > 1])
    return gathered + Moved((), True)


def _tiles(tiling: Tiling) -> int:
    return math.prod(tiling.shape[:-1])


def _replicated(tiling: Tiling) -> bool:
    return _tiles(tiling) == 1


def _sorted(tiling: Tiling) -> Tiling:
    return np.sort(tiling, axis=-1)


def _same(a: Tiling, b: Tiling) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _partial(tiling: Tiling) -> bool:
    return tiling.shape[-1] > 1


def _local(size: int, tiling: Tiling) -> int:
    """Elements one device holds."""
    return size // _tiles(tiling)


def _permute(size: int, source: Tiling, target: Tiling) -> Moved:
    """Each device gets its tile from one that has it."""
    if _same(source, target):
        return Moved()
    pairs = np.stack([source.ravel(), target.ravel()], axis=1)
    return Moved((Transfer("permute", _local(size, source), pairs),))


def _gather(size: int, source: Tiling, dims: Sequence[int], parts: Sequence[int] = ()) -> Moved:
    """All-gathers dimensions, last one first, each by its number of parts (all of its tiles where not given)."""
    transfers: list[Transfer] = []
    local = _local(size, source)
    counts = list(parts) or [source.shape[d] for d in dims]
    for dim, count in reversed(list(zip(dims, counts, strict=True))):
        local *= count
        cut = source.reshape(*source.shape[:dim], source.shape[dim] // count, count, *source.shape[dim + 1 :])
        groups = np.moveaxis(cut, dim + 1, -1).reshape(-1, count)
        transfers.append(Transfer("all_gather", local, groups))
    return Moved(tuple(transfers))


def _swaps(source: Tiling, target: Tiling) -> list[tuple[int, int]] | None:
    """Pairs (from, to) of dimensions that exchange tile counts, one after the other; None where that is not enough."""
    if _partial(source) != _partial(target) or _tiles(source) != _tiles(target):
        return None
    rank = source.ndim if _partial(source) else source.ndim - 1
    have, want = list(source.shape[:rank]), list(target.shape[:rank])
    differ = [d for d in range(rank) if have[d] != want[d]]
    if not differ or Counter(have[d] for d in differ) != Counter(want[d] for d in differ):
        return None
    found: list[tuple[int, int]] = []
    open_dims = {n: [d for d in differ if have[d] == n] for n in {have[d] for d in differ}}
    while open_dims:
        count = min(open_dims)
        into = open_dims[count][-1]
        wanted = want[into]
        if wanted == count:
            _drop(open_dims, count, into)
            continue
        holders = open_dims[wanted]
        if count == 1:
            pick = next((d for d in holders if want[d] != 1), holders[-1])
        elif wanted % count == 0:
            pick = next((d for d in holders if want[d] == count), holders[-1])
        else:
            return None
        found.append((pick, into))
        open_dims[count][-1] = pick
        _drop(open_dims, wanted, pick)
    return found


def _drop(by_count: dict[int, list[int]], count: int, dim: int) -> None:
    by_count[count] = [d for d in by_count[count] if d != dim]
    if not by_count[count]:
        del by_count[count]


def _all_to_all(size: int, source: Tiling, target: Tiling, swaps: list[tuple[int, int]]) -> Moved:
    """Swaps, disjoint ones in one all-to-all, then the order of devices."""
    if _same(source, target):
        return Moved()
    if not swaps:
        return _permute(size, source, target)
    seen: set[int] = set()
    chosen: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for pair in sorted(swaps, key=lambda p: p[1]):
        (rest if seen & set(pair) else chosen).append(pair)
        seen |= set(pair)
    if len(chosen) < 2:
        chosen, rest = [swaps[0]], swaps[1:]
    parts = [source.shape[a] // source.shape[b] for a, b in chosen]
    moved = source
    for pair in chosen:
        moved = _swap(moved, *pair)
    cut, inner = moved, list[int]()
    for (_, into), count in sorted(zip(chosen, parts, strict=True), reverse=True, key=lambda x: x[0][1]):
        cut = cut.reshape(*cut.shape[:into], cut.shape[into] // count, count, *cut.shape[into + 1 :])
        inner = [into + 1, *(d + 1 for d in inner)]
    groups = np.moveaxis(cut, inner, range(cut.ndim - len(inner), cut.ndim)).reshape(-1, math.prod(parts))
    local = _local(size, source)
    here = Moved((Transfer("all_to_all", local, groups),))
    return here + _all_to_all(size, _sorted(moved), target, rest)


def _swap(tiling: Tiling, source: int, into: int) -> Tiling:
    """The tile counts of two dimensions exchanged: the minor part of `source` becomes the minor part of `into`."""
    parts = tiling.shape[source] // tiling.shape[into]
    shape = list[int]()
    at: dict[int, int] = {}
    for d, n in enumerate(tiling.shape):
        shape += [n // parts, parts] if d == source else [n, 1] if d == into else [n]
        at[d] = len(shape) - 1
    swapped = [*tiling.shape]
    swapped[source], swapped[into] = swapped[into], swapped[source]
    return tiling.reshape(shape).swapaxes(at[source], at[into]).reshape(swapped)


def _compatible(partial: Tiling, finer: Tiling) -> Tiling | None:
    """A tiling with the counts of `finer` into which `partial` can be sliced; `finer` itself where that is one."""
    if not _partial(partial) or any(f % p for p, f in zip(partial.shape[:-1], finer.shape[:-1], strict=True)):
        return None
    if _within(finer, partial):
        return finer
    rank = partial.ndim - 1
    grown = [f // p for p, f in zip(partial.shape[:-1], finer.shape[:-1], strict=True)]
    split = [d for d in range(rank) if grown[d] > 1]
    shape = [*partial.shape[:-1], *(grown[d] for d in split), finer.shape[-1]]
    order = list[int]()
    for d in range(rank):
        order += [d, rank + split.index(d)] if d in split else [d]
    sliced = np.transpose(partial.reshape(shape), [*order, len(shape) - 1])
    return _sorted(sliced.reshape(finer.shape))


def _within(finer: Tiling, coarser: Tiling) -> bool:
    """Whether each device's finer tile lies in its coarser one."""
    return all(
        bool((_places(finer, d) * coarser.shape[d] // finer.shape[d] == _places(coarser, d)).all())
        for d in range(finer.ndim - 1)
    )


def _places(tiling: Tiling, dim: int) -> Tiling:
    """For each device the position of its tile in a dimension."""
    found = np.empty(tiling.size, dtype=np.int64)
    found[tiling.ravel()] = np.unravel_index(np.arange(tiling.size), tiling.shape)[dim]
    return found


def _split_further(size: int, source: Tiling, target: Tiling) -> Moved | None:
    """Slices, then permutes; or, from replicas to none, an all-to-all and then a slice."""
    if not _partial(source):
        return None
    between = _compatible(source, target)
    if between is not None:
        return _permute(size, between, target)
    return _partial_all_to_all(size, source, target)


def _split_less(size: int, source: Tiling, target: Tiling) -> Moved | None:
    """Permutes, then gathers."""
    if not _partial(target):
        return None
    between = _compatible(target, source)
    if between is None:
        return _partial_all_to_all(size, source, target)
    dims = [d for d in range(source.ndim - 1) if source.shape[d] > target.shape[d]]
    parts = [source.shape[d] // target.shape[d] for d in dims]
    return _permute(size, source, between) + _gather(size, between, dims, parts)


def _partial_all_to_all(size: int, source: Tiling, target: Tiling) -> Moved | None:
    """[1, a, b replicas] <-> [a, b] with the devices in the same order: by way of [a, 1, b replicas]."""
    forward = _partial(source)
    partial, tiled = (source, target) if forward else (target, source)
    rank = tiled.ndim - 1
    if _partial(tiled) or _replicated(tiled) or partial.shape[0] != 1:
        return None
    if tuple(partial.shape[1:]) != tuple(tiled.shape[:-1]):
        return None
    last = max(d for d in range(rank) if tiled.shape[d] > 1)
    if tiled.shape[last] != partial.shape[-1] or not (partial.reshape(tiled.shape) == tiled).all():
        return None
    shape = [*tiled.shape[:-1], partial.shape[-1]]
    shape[last] = 1
    between = _sorted(tiled.reshape(shape))
    first = _reshard(size, source, between, full=True)
    second = _reshard(size, between, target, full=True)
    assert first is not None
    assert second is not None
    return first + second


def _complex(size: int, source: Tiling, target: Tiling) -> Moved | None:
    """The three ways in which a reshard is taken apart into easier ones."""
    cut = _cut(source, target)
    if cut is not None:
        dim, count = cut
        views = (_view(source, dim, count), _view(target, dim, count))
        return _reshard(size, _sorted(views[0]), _sorted(views[1]), full=False)
    if _partial(target):
        for dim in range(source.ndim - 1):
            if source.shape[dim] > 1 and source.shape[dim] * source.shape[-1] == target.shape[-1]:
                return _by_way_of(size, source, _replicate(source, dim), target)
    if _partial(source) and not _partial(target):
        for dim in range(source.ndim - 1):
            if source.shape[dim] == 1 and target.shape[dim] > 1 and target.shape[dim] % source.shape[-1] == 0:
                return _by_way_of(size, source, source.swapaxes(dim, -1), target)
    return None


def _by_way_of(size: int, source: Tiling, between: Tiling, target: Tiling) -> Moved | None:
    first = _reshard(size, source, _sorted(between), full=True)
    second = _reshard(size, _sorted(between), target, full=False)
    return None if first is None or second is None else first + second


def _replicate(tiling: Tiling, dim: int) -> Tiling:
    """The dimension whole, its tiles as replicas."""
    moved = np.moveaxis(tiling, dim, -2)
    return np.expand_dims(moved.reshape(*moved.shape[:-2], -1), dim)


def _cut(source: Tiling, target: Tiling) -> tuple[int, int] | None:
    """(dimension, tile count of its major part) where a dimension is best viewed as two."""
    if source.shape[-1] != target.shape[-1]:
        return None
    pairs = list(zip(source.shape[:-1], target.shape[:-1], strict=True))
    ones = [d for d, (s, t) in enumerate(pairs) if s != t and min(s, t) == 1]
    twos = [d for d, (s, t) in enumerate(pairs) if s != t and min(s, t) > 1 and max(s, t) % min(s, t) == 0]
    for d in twos:
        if any(pairs[d][0] * pairs[e][0] == pairs[d][1] * pairs[e][1] for e in ones):
            return d, min(pairs[d])
    return next(((d, pairs[d][1]) for d in twos if pairs[d][0] > pairs[d][1]), None)


def _view(tiling: Tiling, dim: int, count: int) -> Tiling:
    """A dimension as two, the major one of `count` tiles."""
    return tiling.reshape(*tiling.shape[:dim], count, tiling.shape[dim] // count, *tiling.shape[dim + 1 :])


def _within_groups(size: int, source: Tiling, target: Tiling, alike: list[int], full: bool) -> Moved | None:
    """Within the devices of each tile of the dimensions that are split alike, then the order of devices."""
    rows, inner = _group(source, alike)
    target_rows, target_inner = _group(target, alike)
    if (np.sort(target_rows, axis=1) == np.sort(rows, axis=1)).all():
        where = {int(d): i for i, d in enumerate(rows[0])}
        renumber = np.array([where[int(d)] for d in target_rows[0]])
        target_inner = _sorted(renumber[target_inner])
    moved = _reshard(size // len(rows), inner, target_inner, full=True)
    assert moved is not None
    transfers = tuple(
        Transfer(t.kind, t.elements, rows[:, t.groups].reshape(-1, t.groups.shape[1])) for t in moved.transfers
    )
    reached = np.empty(target.shape, dtype=np.int64)
    for number, row in enumerate(rows):
        at = np.unravel_index(number, [target.shape[d] for d in alike])
        index: list[Any] = [slice(None)] * target.ndim
        for d, position in zip(alike, at, strict=True):
            index[d] = slice(int(position), int(position) + 1)
        reached[tuple(index)] = row[target_inner]
    rest = _reshard(size, _sorted(reached), target, full=full)
    return None if rest is None else Moved(transfers, moved.full) + rest


def _group(tiling: Tiling, dims: list[int]) -> tuple[Tiling, Tiling]:
    """(devices of each tile of some dimensions, tiling of the other dimensions within one such group)."""
    front = np.moveaxis(tiling, dims, range(len(dims)))
    inner_shape = [1 if d in dims else n for d, n in enumerate(tiling.shape)]
    count = math.prod(tiling.shape[d] for d in dims)
    return front.reshape(count, -1), np.arange(tiling.size // count).reshape(inner_shape)
