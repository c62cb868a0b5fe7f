"""One factor rule out of many: the rule of a whole graph, from the rules of its equations.

Every dimension of every value is a list of factors. Where two equations name one value, their factors of it are the
same; where they cut it differently, the coarser factor is cut further:

    [i(8)] and [j(2) k(4)]     -->   i = jk
    [i(2) j(3)] and [k(3) l(2)]   -->   no common cut: all four need replication

What a factor of the whole costs is the worst of what its parts cost. A reduction inside is one of the whole only if
its partial result leaves the graph untouched; if the graph goes on computing with it, devices have to meet inside,
and the factor needs replication.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from autoshard.ir.factors import Dims, FactorKind, FactorRule


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """An applied rule: what it read and made, and whether it only moves elements."""

    operands: tuple[Hashable, ...]
    results: tuple[Hashable, ...]
    moves: bool


@final
class Composer:
    """Factors of the values of a graph, unified equation by equation.

    Factors are numbered; a factor is equal to another (`_parent`), cut into parts (`_parts`), or neither. Notes on a
    factor are its kinds and the reductions over it, as (step, reducer).
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._parts: list[tuple[int, int] | None] = []
        self._size: list[int] = []
        self._kinds: list[set[FactorKind]] = []
        self._reductions: list[set[tuple[int, str]]] = []
        self._values: dict[Hashable, list[list[int]]] = {}
        self._steps: list[_Step] = []

    def declare(self, value: Hashable, shape: Sequence[int]) -> None:
        """Introduces a value; again is harmless."""
        if value not in self._values:
            self._values[value] = [[self._new(n)] if n > 1 else [] for n in shape]

    def apply(
        self,
        rule: FactorRule,
        operands: Sequence[Hashable],
        results: Sequence[Hashable],
        moves: bool = False,
    ) -> None:
        """Unifies the factors of an equation's values.

        Args:
          rule: of the equation.
          operands, results: declared values.
          moves: whether the equation only moves elements of its operand, so that partial sums stay partial sums.
        """
        step = len(self._steps)
        self._steps.append(_Step(tuple(operands), tuple(results), moves))
        factors: list[int] = []
        for size, kind, reducer in zip(rule.sizes, rule.kinds, rule.reducers, strict=True):
            factor = self._new(size)
            factors.append(factor)
            if kind is FactorKind.REDUCTION and reducer:
                self._reductions[factor].add((step, reducer))
            elif kind is not FactorKind.PARALLEL:
                self._kinds[factor].add(FactorKind.NEED_REPLICATION if kind is FactorKind.REDUCTION else kind)
        values = zip((*operands, *results), (*rule.operands, *rule.results), strict=True)
        for value, dims in values:
            for own, dim in zip(self._values[value], dims, strict=True):
                self._meet(own, [factors[f] for f in dim if rule.sizes[f] > 1])

    def link(
        self, source: Hashable, target: Hashable, alias: bool = False, source_skip: int = 0, target_skip: int = 0
    ) -> None:
        """Two values are split alike.

        Args:
          source, target: the second gets its contents from the first.
          alias: whether it is just the first under another name, so that partial sums stay partial sums. A loop's
            carry is not: the next round computes with it.
          source_skip, target_skip: leading dimensions that only one of them has.
        """
        for x, y in zip(self._values[source][source_skip:], self._values[target][target_skip:], strict=True):
            self._meet(x, y)
        self._steps.append(_Step((source,), (target,), alias))

    def keep_whole(self, value: Hashable, dim: int) -> None:
        """A dimension may not be split."""
        for factor in self._leaves(self._values[value][dim]):
            self._kinds[factor].add(FactorKind.NEED_REPLICATION)

    def rule(
        self,
        operands: Sequence[Hashable],
        results: Sequence[Hashable],
        ranks: Sequence[int] | None = None,
        strict: bool = True,
    ) -> FactorRule:
        """The rule of the graph with these inputs and outputs.

        Args:
          operands, results: declared values; an output may be an input.
          ranks: dimensions to give of each (default all; typed keys hide their last one).
          strict: whether a reduction inside must leave the graph untouched to stay one. If not, it only must not
            split a result as well (how Shardy sees a chain of operators).
        """
        values = (*operands, *results)
        self._spread_repeats()
        readers: dict[Hashable, list[_Step]] = {}
        for step in self._steps:
            for value in step.operands:
                readers.setdefault(value, []).append(step)
        intact = [self._leaves_intact(step, frozenset(results), readers) for step in self._steps] if strict else []
        chosen: dict[int, int] = {}
        sides: list[Dims] = []
        for k, value in enumerate(values):
            dims = self._values[value][: None if ranks is None else ranks[k]]
            cut = [self._leaves(dim) for dim in dims]
            sides.append(tuple(tuple(chosen.setdefault(f, len(chosen)) for f in dim) for dim in cut))
        split_results = {f for value in results for dim in self._values[value] for f in self._leaves(dim)}
        kinds: list[FactorKind] = []
        reducers: list[str] = []
        for factor in chosen:
            kind, reducer = self._kind(factor, split_results, intact)
            kinds.append(kind)
            reducers.append(reducer)
        count = len(operands)
        sizes = tuple(self._size[f] for f in chosen)
        return FactorRule(tuple(sides[:count]), tuple(sides[count:]), sizes, tuple(kinds), tuple(reducers))

    def _kind(self, factor: int, split_results: set[int], intact: Sequence[bool]) -> tuple[FactorKind, str]:
        found = self._kinds[factor]
        for kind in (FactorKind.NEED_REPLICATION, FactorKind.PERMUTATION):
            if kind in found:
                return kind, ""
        reductions = self._reductions[factor]
        if not reductions:
            return FactorKind.PARALLEL, ""
        names = {reducer for _, reducer in reductions}
        partial = not intact or all(intact[step] for step, _ in reductions)
        if factor in split_results or len(names) > 1 or not partial:
            return FactorKind.NEED_REPLICATION, ""
        return FactorKind.REDUCTION, names.pop()

    def _leaves_intact(
        self, step: _Step, results: frozenset[Hashable], readers: Mapping[Hashable, Sequence[_Step]]
    ) -> bool:
        """Whether the results of a step reach the outputs through nothing but moves."""
        todo = list(step.results)
        seen: set[Hashable] = set()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            next_steps = readers.get(value, ())
            if any(not s.moves for s in next_steps):
                return False
            todo.extend(r for s in next_steps for r in s.results)
        return bool(seen & results)

    def _spread_repeats(self) -> None:
        """Factors that stand in a value twice (x + x.T) cannot be split: one axis cannot cut two dimensions."""
        for dims in self._values.values():
            found: set[int] = set()
            for factor in (f for dim in dims for f in self._leaves(dim)):
                if factor in found:
                    self._kinds[factor].add(FactorKind.NEED_REPLICATION)
                found.add(factor)

    def _new(self, size: int) -> int:
        self._parent.append(len(self._parent))
        self._parts.append(None)
        self._size.append(size)
        self._kinds.append(set())
        self._reductions.append(set())
        return len(self._parent) - 1

    def _leaves(self, factors: Sequence[int]) -> list[int]:
        """The factors, replaced by what they are equal to or cut into."""
        found: list[int] = []
        todo = list(reversed(factors))
        while todo:
            factor = todo.pop()
            while self._parent[factor] != factor:
                factor = self._parent[factor]
            parts = self._parts[factor]
            if parts is None:
                found.append(factor)
            else:
                todo.extend(reversed(parts))
        return found

    def _meet(self, own: Sequence[int], other: Sequence[int]) -> None:
        """Both are factors of the same dimension."""
        while True:
            a, b = self._leaves(own), self._leaves(other)
            at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            if at == len(a) == len(b):
                return
            if at == min(len(a), len(b)) or self._product(a) != self._product(b):
                # Sizes differ (a permutation, a concatenation): no factor of one is a factor of the other.
                kinds = {kind for f in (*a[at:], *b[at:]) for kind in self._kinds[f]}
                mark = FactorKind.PERMUTATION if kinds == {FactorKind.PERMUTATION} else FactorKind.NEED_REPLICATION
                self._mark((*a[at:], *b[at:]), mark)
                return
            x, y = a[at], b[at]
            if self._size[x] == self._size[y]:
                self._parent[y] = x
                self._kinds[x] |= self._kinds[y]
                self._reductions[x] |= self._reductions[y]
            elif self._size[x] % self._size[y] == 0:
                self._cut(x, self._size[y])
            elif self._size[y] % self._size[x] == 0:
                self._cut(y, self._size[x])
            else:
                self._mark((*a[at:], *b[at:]), FactorKind.NEED_REPLICATION)
                return

    def _cut(self, factor: int, major: int) -> None:
        parts = (self._new(major), self._new(self._size[factor] // major))
        for part in parts:
            self._kinds[part] |= self._kinds[factor]
            self._reductions[part] |= self._reductions[factor]
        self._parts[factor] = parts

    def _mark(self, factors: Sequence[int], kind: FactorKind) -> None:
        for factor in factors:
            self._kinds[factor].add(kind)

    def _product(self, factors: Sequence[int]) -> int:
        product = 1
        for factor in factors:
            product *= self._size[factor]
        return product
