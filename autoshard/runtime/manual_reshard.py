"""A reshard with its collectives written out, where XLA may not choose them.

Of a change of sharding XLA makes collective-permutes where it can. All devices of the program wait for such a one, so
it may not stand in a branch that only some take; all-gathers and all-to-alls are done by groups.

    [(a,b), -] to [a, b]     all-to-all over b
    [a, -] to [b, -]         all-gather over a, slice by b
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard.ir import Spec, partition_spec, spec_axes


def manual_reshard(array: Any, source: Spec, target: Spec, sizes: Mapping[str, int]) -> Any:
    """The array in another spec.

    Args:
      array: a tracer, inside a `shard_map` over other axes.
      source: the spec it has.
      target: the spec it gets.
      sizes: of the mesh axes of both.
    """
    axes_used = spec_axes(target)  # where a device is on them comes in as an array: JAX 0.10 has no axis_index here

    def local(part: Any, *numbers: Any) -> Any:
        index = dict(zip(axes_used, numbers, strict=True))
        now = [list(axes) for axes in source]
        part = _exchanged(part, now, target, sizes)
        for dim, (axes, wanted) in enumerate(zip(now, target, strict=True)):
            while axes and tuple(axes) != wanted[: len(axes)]:
                part = jax.lax.all_gather(part, axes.pop(), axis=dim, tiled=True)
        for dim, (axes, wanted) in enumerate(zip(now, target, strict=True)):
            for axis in wanted[len(axes) :]:
                length = part.shape[dim] // sizes[axis]
                part = jax.lax.dynamic_slice_in_dim(part, index[axis][0] * length, length, dim)
        return part

    return jax.shard_map(
        local,
        in_specs=(partition_spec(source), *(PartitionSpec(axis) for axis in axes_used)),
        out_specs=partition_spec(target),
        axis_names=set(sizes),
        check_vma=False,
    )(array, *(jnp.arange(sizes[axis], dtype=jnp.int32) for axis in axes_used))


def _exchanged(part: Any, now: Sequence[list[str]], target: Spec, sizes: Mapping[str, int]) -> Any:
    """Moves axes from one dimension to another, in `now` too, as far as one all-to-all each does it."""
    changed = True
    while changed:
        changed = False
        for dim, axes in enumerate(now):
            if not axes or tuple(axes) == target[dim][: len(axes)]:
                continue
            for other, have in enumerate(now):
                fits = (*have, axes[-1]) == target[other][: len(have) + 1]
                if other != dim and fits and part.shape[other] % sizes[axes[-1]] == 0:
                    axis = axes.pop()
                    part = jax.lax.all_to_all(part, axis, split_axis=other, concat_axis=dim, tiled=True)
                    have.append(axis)
                    changed = True
                    break
    return part
