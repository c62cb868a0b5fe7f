"""The plain choices that the search must never lose against, as restrictions on leaders.

    data parallel               state whole everywhere, the batch split over all axes
    fully sharded (ZeRO-3)      state split over all axes on one dimension, the batch split over all axes
    tensor parallel (Megatron)  state split over the last axis only, the batch over the others
    hybrid                      the batch over all axes but the last, state over any

Each is solved by the same engine with only these choices, so a template is the best plan of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from autoshard.ir import MeshShape, Spec, Value, aval_bytes, axes_size, spec_axes
from autoshard.search.choices import Choice
from autoshard.search.model import Model
from autoshard.search.ops import OpKind
from autoshard.search.problem import Problem

SMALL_BYTES = 4096
"""State leaves up to this size may stay whole in a fully sharded plan, as in PyTorch's FSDP and others."""


@final
@dataclass(frozen=True, slots=True)
class Template:
    """A plain plan.

    Attributes:
      name: as shown in the plan.
      state_axes: axes that state may use.
      whole_state: whether state leaves must use all of these axes wherever they divide.
      batch_axes: axes that the first dimension of other arguments is split over, None for any sharding.
    """

    name: str
    state_axes: tuple[str, ...]
    whole_state: bool
    batch_axes: tuple[str, ...] | None


def templates(mesh: MeshShape) -> list[Template]:
    """The templates of a mesh."""
    names = tuple(axis for axis, size in mesh if size > 1)
    if not names:
        return []
    found = [
        Template("data parallel", (), True, names),
        Template("fully sharded (ZeRO-3)", names, True, names),
        Template("tensor parallel (Megatron)", names[-1:], False, names[:-1]),
    ]
    if len(names) > 1:
        found.append(Template("hybrid (tensor parallel, fully sharded)", names, True, names[:-1]))
    return found


def split_state(axes: tuple[str, ...]) -> Template:
    """State split over these axes, the rest as the search finds it."""
    return Template("split state", axes, True, None)


def restrict(
    problem: Problem,
    model: Model,
    template: Template,
    state: frozenset[Value],
    mesh: Mapping[str, int],
    pins: Mapping[Value, Spec],
) -> Problem | None:
    """The problem with only the template's choices, None if some argument has none."""
    costs = list(problem.costs)
    for variable, kind in enumerate(model.leaders):
        op = model.kinds.members[kind][0]
        if op.kind is not OpKind.INPUT or op.results[0] in pins:
            continue
        value = op.results[0]
        check = _state if value in state else _batch
        allowed = np.array([check(template, value, choice, mesh) for choice in model.choices[kind]])
        if not allowed.any():
            return None
        costs[variable] = np.where(allowed, costs[variable], np.inf)
    return Problem(tuple(costs), problem.edges, problem.usages, problem.base, problem.limit)


def _state(template: Template, value: Value, choice: Choice, mesh: Mapping[str, int]) -> bool:
    spec = choice.results[0]
    used = set(spec_axes(spec))
    if not template.whole_state:
        return used <= set(template.state_axes)
    parts = axes_size(template.state_axes, mesh)
    fits = any(n % parts == 0 and n > 1 for n in value.shape)
    if not template.state_axes or not fits or aval_bytes(value.aval) <= SMALL_BYTES:
        return not used
    return used == set(template.state_axes)


def _batch(template: Template, value: Value, choice: Choice, mesh: Mapping[str, int]) -> bool:
    spec = choice.results[0]
    if template.batch_axes is None:
        return True
    if not value.shape or value.shape[0] == 1:
        return not spec_axes(spec)
    parts = axes_size(template.batch_axes, mesh)
    if not template.batch_axes or value.shape[0] % parts:
        return not spec_axes(spec)
    return set(spec[0]) == set(template.batch_axes) and len(spec_axes(spec)) == len(spec[0])
