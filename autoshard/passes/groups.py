"""Sums over examples that every group of devices keeps for itself until the loop over microbatches has ended.

    for m:  g += x[m]^T dy[m]              an all-reduce of a gradient for every microbatch
    for m:  g[k] += x[m, k]^T dy[m, k]     g [groups, ...]: nothing travels where group k is on devices k, then sum

A microbatch's examples fall into equal groups, in order. The products and sums that make partial values are mapped over
them (`jax.vmap`), and so are sums of what they make; everything else is as it was. Where `groups` is the size of the
mesh axes that examples are split over, this is what an expert writes by hand (`no_sync` of data-parallel training).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax

from autoshard.ir import Apply, Value, bind_equation
from autoshard.passes.batch_roles import Batched, Partial, Role, Roles

MAKERS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter_add", "scatter-add"})
"""Equations that sum over examples whose parameters do not speak of how many there are."""

KEPT = -1
"""Of an operand that is [groups, ...] already."""


def apart_values(
    pairs: Sequence[tuple[Apply, Apply]], roles: Roles, sums: Collection[Value], examples: int, groups: int
) -> frozenset[Value]:
    """The partial values that can be kept apart.

    Args:
      pairs: equations of the loop, of all examples and of a microbatch, in order.
      roles: of all values.
      sums: values that the loop hands on.
      examples: of a microbatch.
      groups: how many, a divisor of it.
    """
    assert examples % groups == 0, "groups are of equal size"
    apart: set[Value] = set()
    for equation, part in pairs:
        if _can_be_apart(equation, part, roles, apart, examples):
            apart.update(equation.outputs)
    changed = True
    while changed:
        before = len(apart)
        for equation, _ in reversed(pairs):
            read = [a for k, a in enumerate(equation.inputs) if a in apart and (equation, k) not in roles.ahead]
            if apart.isdisjoint(equation.outputs):
                apart.difference_update(read)
            elif any(isinstance(roles.role(a), Partial) and a not in apart for a in equation.inputs):
                apart.difference_update(equation.outputs)
        changed = len(apart) < before
    made = [v for equation, _ in pairs for v in equation.outputs if v in apart]
    read_in_loop = {a for equation, _ in pairs for a in equation.inputs}
    return frozenset(v for v in made if v in sums or v in read_in_loop)


def _can_be_apart(equation: Apply, part: Apply, roles: Roles, apart: Collection[Value], examples: int) -> bool:
    if any(roles.of[v] != Partial("add") for v in equation.outputs):
        return False
    dims = dims_in_groups(roles, apart, equation)
    if all(d is None for d in dims):
        return False
    makes = any(d is not None and d != KEPT for d in dims)
    if makes and equation.name not in MAKERS:
        return False
    for k, (atom, small) in enumerate(zip(equation.inputs, part.inputs, strict=True)):
        role = _role(roles, equation, k)
        if isinstance(role, Partial) and atom not in apart:
            return False
        if isinstance(role, Batched) and small.shape[role.axis.dim] != examples * role.axis.inner:
            return False  # groups of examples lie elsewhere
    return True


def _role(roles: Roles, equation: Apply, k: int) -> Role:
    if (equation, k) in roles.slices:
        return Batched(roles.slices[equation, k])
    return roles.role(equation.inputs[k])


def dims_in_groups(roles: Roles, apart: Collection[Value], equation: Apply) -> list[int | None]:
    """For each operand the dimension in which its examples are, `KEPT`, or None where groups share it."""
    dims: list[int | None] = []
    for k, atom in enumerate(equation.inputs):
        role = _role(roles, equation, k)
        if (equation, k) in roles.ahead:
            dims.append(None)
        elif isinstance(role, Batched):
            dims.append(role.axis.dim)
        else:
            dims.append(KEPT if atom in apart else None)
    return dims


def bind_in_groups(equation: Apply, operands: Sequence[Any], dims: Sequence[int | None], groups: int) -> list[Any]:
    """The results, [groups, ...] each, of an equation mapped over groups of examples.

    Args:
      equation: of a microbatch.
      operands: arrays.
      dims: as `dims_in_groups` says.
      groups: how many.
    """
    opened: list[Any] = []
    for x, d in zip(operands, dims, strict=True):
        if d is not None and d != KEPT:
            x = x.reshape(*x.shape[:d], groups, x.shape[d] // groups, *x.shape[d + 1 :])
        opened.append(x)
    axes = [None if d is None else 0 if d == KEPT else d for d in dims]
    return jax.vmap(lambda *xs: list(bind_equation(equation, xs)), axes)(*opened)
