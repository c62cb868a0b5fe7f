"""Which arguments hold the examples of a step, and the step with its examples in microbatches.

Arrays that are no state and share the size of a dimension (the first, else the second) are the batch; which of several
sizes it is shows when the step is traced with a part of it: what is no batch does not fit any more.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import MicrobatchError, explain
from autoshard.ir import Graph, StepInfo, aval_bytes, trace
from autoshard.passes import Axis, Microbatches, split_step

MOST_TRIED = 6
"""Candidates that a step is traced with."""


def split_batch(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    info: StepInfo,
    graph: Graph,
    count: int,
    rewrite: Callable[[Graph], Graph] = lambda graph: graph,
) -> Microbatches:
    """A step split into microbatches.

    Args:
      fun: of flat arrays.
      avals: of its arguments.
      info: names and roles.
      graph: the step, traced and rewritten.
      count: microbatches.
      rewrite: what the trace of a microbatch goes through as well.

    Raises:
      MicrobatchError: there is no batch, it does not divide, or its examples are coupled.
    """
    tried = candidates(avals, info)
    if not tried:
        raise MicrobatchError(
            explain("no argument beside the state is an array with a dimension", "a batch of examples", "pass one")
        )
    weights = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    first: Exception | None = None
    for batch in tried[:MOST_TRIED]:
        position, axis = next(iter(batch.items()))
        size = avals[position].shape[axis.dim]
        if size % count and first is not None:
            continue
        if size % count:
            raise MicrobatchError(
                explain(
                    f"microbatches={count} for {info.input_paths[position]}, which has {size} examples in dimension "
                    f"{axis.dim}",
                    f"a divisor of {size}",
                    "use another number, or another batch size",
                )
            )
        try:
            small = rewrite(trace(fun, [_smaller(a, batch.get(i), count) for i, a in enumerate(avals)]))
            return split_step(graph, small, batch, count, [i for i in weights if i not in batch])
        except MicrobatchError as error:
            first = error if first is None or not isinstance(first, MicrobatchError) else first
        except Exception as error:  # of the user's step or its libraries, which do not take such shapes
            first = first or error
    assert first is not None, "every candidate failed"
    if isinstance(first, MicrobatchError):
        raise first
    raise MicrobatchError(
        explain(
            f"the step cannot be traced with a part of its batch: {type(first).__name__}: {str(first).rstrip('.')}",
            "a step that takes any number of examples",
            "take sizes from the arguments' shapes, or use microbatches=1",
        )
    ) from first


def candidates(avals: Sequence[Any], info: StepInfo) -> list[Mapping[int, Axis]]:
    """Sets of inputs that may be the batch, with their time axes: largest first, first dimensions before second.

    An array without the size in that dimension may have it in another (labels without a time). The same with what the
    state has of that size (a recurrent net's memory of each example) comes after. Where there is no state (a step that
    returns gradients) the weights may have that size too: then one argument alone may be the batch, the last first.
    """
    state = {i for i, _ in info.pairs}
    plain = [i for i, aval in enumerate(avals) if not jnp.issubdtype(aval.dtype, jax.dtypes.extended)]
    found: list[Mapping[int, Axis]] = []
    apart: list[Mapping[int, Axis]] = []
    for dim in (0, 1):
        sizes: dict[int, int] = {}
        for i in plain:
            if i not in state and len(avals[i].shape) > dim and avals[i].shape[dim] > 1:
                size = avals[i].shape[dim]
                sizes[size] = sizes.get(size, 0) + aval_bytes(avals[i])
        for size in sorted(sizes, key=lambda n: -sizes[n]):
            mine = {i: axis for i in plain if i not in state and (axis := _axis(avals[i], size, dim))}
            held = {i: axis for i in _held(info, avals, size) if (axis := _axis(avals[i], size, dim))}
            found += [mine, {**mine, **held}] if held else [mine]
            owners = sorted({info.input_arguments[i] for i in mine}, reverse=True)
            if not info.pairs and len(owners) > 1:
                apart += [{i: axis for i, axis in mine.items() if info.input_arguments[i] == k} for k in owners]
    return [*found, *apart]


def _held(info: StepInfo, avals: Sequence[Any], size: int) -> list[int]:
    """State whose arrays, of one part of the state, all have this many rows."""
    parts: dict[str, list[int]] = {}
    for i, _ in info.pairs:
        parts.setdefault(info.input_paths[i].rpartition("/")[0], []).append(i)
    return [i for members in parts.values() if all(avals[i].shape[:1] == (size,) for i in members) for i in members]


def _axis(aval: Any, size: int, dim: int) -> Axis | None:
    """The dimension of this size, that one if it is."""
    dims = [d for d, n in enumerate(aval.shape) if n == size]
    return Axis(dim if dim in dims else dims[0], 1) if dims and (dim or dims[0] == 0) else None


def _smaller(aval: Any, axis: Axis | None, count: int) -> Any:
    shape = list(aval.shape)
    if axis is not None:
        shape[axis.dim] //= count
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))
