"""What an op may do: the choices of a leader, and what a follower does given its parent's choice.

    choice ::= Choice(assignment, operands: Spec*, results: Spec*, partial axes, scattered axes)

A leader chooses an assignment of mesh axes to its factors; where a reduction factor is split, its results are partial
sums, combined by an all-reduce, or, as another choice, by a reduce-scatter along one of the result's dimensions.
A follower takes the largest assignment that agrees with the sharding it shares with its parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from autoshard.ir import (
    Assignment,
    Dims,
    FactorKind,
    FactorRule,
    MeshShape,
    Spec,
    assignment_of,
    assignments,
    axes_size,
    spec_axes,
    spec_of,
)


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """How one op is split.

    Attributes:
      assignment: mesh axes of each factor.
      operands: the sharding each operand must arrive in.
      results: the sharding of each result.
      partial: axes over which results are combined (all-reduce).
      scattered: those of them that end up splitting a result's dimension (reduce-scatter).
    """

    assignment: Assignment
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    partial: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes over which the op's work is divided."""
        return tuple(axis for axes in self.assignment for axis in axes)


def choice_of(rule: FactorRule, assignment: Assignment) -> Choice:
    """The choice an assignment makes, partial sums combined by all-reduce."""
    return Choice(
        assignment,
        tuple(spec_of(dims, assignment) for dims in rule.operands),
        tuple(spec_of(dims, assignment) for dims in rule.results),
        tuple(axis for f in rule.of_kind(FactorKind.REDUCTION) for axis in assignment[f]),
    )


def follow(rule: FactorRule, dims: Dims, spec: Spec, sizes: Mapping[str, int]) -> Choice:
    """The choice of a follower that shares a value of these `dims` and `spec` with its parent."""
    return choice_of(rule, assignment_of(rule, dims, spec, sizes))


def leader_choices(rule: FactorRule, mesh: MeshShape) -> list[Choice]:
    """Every choice of a leader: the replicated one first."""
    sizes = dict(mesh)
    found: list[Choice] = []
    for assignment in assignments(rule, mesh):
        choice = choice_of(rule, assignment)
        found.append(choice)
        if len(rule.results) == 1:
            found += _scattered(rule, choice, sizes)
    return found


def _scattered(rule: FactorRule, choice: Choice, sizes: Mapping[str, int]) -> list[Choice]:
    """The choice with its sums scattered: each summed axis at the end of one dimension of the result."""
    sums = [f for f in rule.of_kind(FactorKind.REDUCTION) if choice.assignment[f]]
    if not sums or any(rule.reducers[f] != "add" for f in sums):
        return []
    (base,) = choice.results
    found: list[Choice] = []
    stack: list[tuple[Spec, tuple[str, ...], int]] = [(base, (), 0)]
    partial = choice.partial
    while stack:
        spec, scattered, at = stack.pop()
        if at == len(partial):
            if scattered:
                found.append(Choice(choice.assignment, choice.operands, (spec,), partial, scattered))
            continue
        stack.append((spec, scattered, at + 1))
        for d, dim in enumerate(rule.results[0]):
            axes = (*spec[d], partial[at])
            size = _dim_size(rule, dim)
            if size % axes_size(axes, sizes) == 0:
                stack.append(((*spec[:d], axes, *spec[d + 1 :]), (*scattered, partial[at]), at + 1))
    assert all(len(set(spec_axes(c.results[0]))) == len(spec_axes(c.results[0])) for c in found), "axis twice"
    return found


def _dim_size(rule: FactorRule, dim: tuple[int, ...]) -> int:
    size = 1
    for factor in dim:
        size *= rule.sizes[factor]
    return size
