"""Writes the plan's shardings into the graph.

    y:f32[16,64] = dot_general x w          -->   w2 = reshard[(-,model)] w
                                                  y0:f32[16,64] = dot_general x w2
                                                  y = keep[(data,model)] y0

Each value is fixed to its spec where it is made (`keep`), and moved (`reshard`) before the first equation that needs it
otherwise, once for each spec. A user's `sharding_constraint` becomes such a reshard. Bodies are treated alike: their
inputs are fixed at the start and their outputs moved to what the loop carries.

A sum scattered over two dimensions is kept in two steps, for of a matrix product XLA would all-reduce the whole once
for each dimension (jax 0.10.1, CPU):

    z = keep[(a,b)] z0, partial over a and b     -->   z1 = keep[(-,b)] z0     all-reduce over b, slice, over a
                                                       z = keep[(a,b)] z1      slice

So is a gather from a table whose rows are split, of which XLA would slice a part as if it were the whole ("Slice dim
size greater than dynamic slice dimension") once three mesh axes are in it (jax 0.10.1 and 0.12.0.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

from autoshard.ir import (
    Apply,
    Atom,
    Equation,
    FactorKind,
    Graph,
    Place,
    Reshard,
    Spec,
    Value,
    axes_size,
    factor_rule,
    spec_axes,
)
from autoshard.plan import Decisions

Rewrite = Callable[[Apply, tuple[Spec | None, ...], tuple[Spec | None, ...]], Apply]
"""Gives an equation another form, knowing the specs of its operands and results."""

PRODUCTS = ("dot_general",)
CONVOLUTIONS = ("conv_general_dilated",)
LOOKUPS = ("gather",)
GROUP_COUNTS = ("feature_group_count", "batch_group_count")


def _as_is(equation: Apply, _operands: tuple[Spec | None, ...], _results: tuple[Spec | None, ...]) -> Apply:
    return equation


@final
@dataclass(frozen=True, slots=True)
class Constrain:
    """Inserts reshards.

    Attributes:
      decisions: the specs of values, operands and outputs.
      sizes: of mesh axes; without them every sum is stated in one step.
      rewrite: applied to each equation, given the specs in which its operands arrive and its results are made.
    """

    name: ClassVar[str] = "constrain"
    decisions: Decisions
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    rewrite: Rewrite = _as_is

    @staticmethod
    def scattered_groups(
        result: Spec, partial: Sequence[str], sizes: Mapping[str, int]
    ) -> list[tuple[int, tuple[str, ...]]]:
        """(dimension, axes) of a result's dimensions that are split over axes of its sum, most parts first."""
        groups = [(d, tuple(a for a in axes if a in partial)) for d, axes in enumerate(result)]
        return sorted((g for g in groups if g[1]), key=lambda g: (-axes_size(g[1], sizes), g[0]))

    @staticmethod
    def first_scatter(
        name: str, result: Spec, partial: Sequence[str], sizes: Mapping[str, int]
    ) -> tuple[int, tuple[str, ...]] | None:
        """(dimension, axes) that a sum is scattered over before it is complete; None where all axes are summed first.

        A matrix product is scattered over some of its axes first if the dimension is not split otherwise and no mesh
        axis is idle; else XLA exchanges whole operands (jax 0.10.1 and 0.12.0.1, all cases on 2x4 and 2x2x2).

        Args:
          name: of the primitive.
          result: where the sum shall lie.
          partial: axes summed over.
          sizes: of mesh axes.
        """
        groups = Constrain.scattered_groups(result, partial, sizes)
        if not groups:
            return None
        dim, axes = groups[0]
        if len(axes) == len(partial):
            return groups[0]
        used = {*partial, *spec_axes(result)}
        idle = any(n > 1 and axis not in used for axis, n in sizes.items())
        if name not in PRODUCTS or idle or len(result[dim]) > len(axes):
            return None
        return groups[0]

    @staticmethod
    def sum_stop(name: str, result: Spec, partial: Sequence[str], sizes: Mapping[str, int]) -> Spec | None:
        """The spec stated before `result`, so that XLA sums no more than it has to; None where none is needed.

        Args:
          name: of the primitive.
          result: where the sum shall lie.
          partial: axes summed over.
          sizes: of mesh axes.
        """
        groups = Constrain.scattered_groups(result, partial, sizes)
        if not groups or name not in (*PRODUCTS, *CONVOLUTIONS, *LOOKUPS):
            return None
        base = tuple(tuple(a for a in axes if a not in partial) for axes in result)
        first = Constrain.first_scatter(name, result, partial, sizes)
        if name in LOOKUPS or first is None:
            return base
        if len(groups) == 1:
            return None
        dim, axes = first
        return (*base[:dim], (*base[dim], *axes), *base[dim + 1 :])

    @staticmethod
    def is_local(equation: Apply, axes: Sequence[str]) -> bool:
        """Whether an equation split over these axes is computed on the parts, for XLA would gather its operands.

        That are FFTs, top_k, and convolutions with feature or batch groups (jax 0.10.1, CPU).
        """
        if not axes:
            return False
        return equation.name in ("fft", "top_k") or any(equation.params.get(count, 1) > 1 for count in GROUP_COUNTS)

    def apply(self, graph: Graph) -> Graph:
        """The graph with every decision in it."""
        return _constrain(graph, self, top=True)


def _constrain(graph: Graph, how: Constrain, top: bool) -> Graph:
    decisions = how.decisions
    writer = _Writer(decisions)
    if not top:
        place = next((e.place for e in graph.equations), None)
        if place is not None:
            for value in graph.inputs:
                writer.fix(value, value, place)
    for equation in graph.equations:
        assert isinstance(equation, Apply), "a graph is constrained once"
        operands = [
            writer.arrive(atom, decisions.operands.get((equation, k)), equation.place)
            for k, atom in enumerate(equation.inputs)
        ]
        if equation.name == "sharding_constraint":
            writer.alias(equation.outputs[0], operands[0])
            continue
        raw = tuple(Value(value.aval) if writer.fixes(value) else value for value in equation.outputs)
        bodies = tuple(_constrain(body, how, top=False) for body in equation.graphs)
        written = Apply(
            equation.primitive,
            tuple(operands),
            raw,
            equation.params,
            bodies,
            equation.effects,
            equation.context,
            equation.place,
        )
        specs = tuple(decisions.operands.get((equation, k)) for k in range(len(operands)))
        results = tuple(decisions.values.get(value) for value in equation.outputs)
        writer.equations.append(how.rewrite(written, specs, results))
        for value, made in zip(equation.outputs, raw, strict=True):
            if made is not value:
                writer.fix(value, made, equation.place, _stop(equation, specs, decisions.values[value], how.sizes))
    place = graph.equations[-1].place if graph.equations else None
    outputs = tuple(
        atom if place is None else writer.arrive(atom, decisions.outputs.get((graph, k)), place)
        for k, atom in enumerate(graph.outputs)
    )
    return Graph(graph.inputs, graph.constants, tuple(writer.equations), outputs, graph.effects)


def _stop(equation: Apply, operands: Sequence[Spec | None], result: Spec, sizes: Mapping[str, int]) -> Spec | None:
    """The spec in which a sum is stated first, None where its own spec will do."""
    if not sizes or equation.name not in (*PRODUCTS, *CONVOLUTIONS, *LOOKUPS):
        return None  # before the rule is worked out
    first = operands[0]
    if first is None or not set(spec_axes(first)) & set(spec_axes(result)):
        return None
    rule = factor_rule(equation)
    summed = {(f,) for f in rule.of_kind(FactorKind.REDUCTION)}
    partial = [axis for dim, axes in zip(rule.operands[0], first, strict=True) if dim in summed for axis in axes]
    return Constrain.sum_stop(equation.name, result, partial, sizes)


class _Writer:
    """Equations of one graph so far, and where each value stands."""

    def __init__(self, decisions: Decisions) -> None:
        self.equations: list[Equation] = []
        self._decisions = decisions
        self._now: dict[Value, Atom] = {}
        self._moved: dict[tuple[Value, tuple[Spec, ...]], Value] = {}

    def fixes(self, value: Value) -> bool:
        """Whether the plan has a spec for the value that is worth stating."""
        return value in self._decisions.values

    def fix(self, value: Value, made: Value, place: Place, stop: Spec | None = None) -> None:
        """States the spec of a value just made, after `stop`; `made` may be the value itself (inputs of bodies)."""
        if not self.fixes(value):
            return
        if stop is not None:
            stated = Value(value.aval)
            self.equations.append(Reshard(made, stated, stop, False, place))
            made = stated
        fixed = value if made is not value else Value(value.aval)
        self.equations.append(Reshard(made, fixed, self._decisions.values[value], False, place))
        if fixed is not value:
            self._now[value] = fixed

    def alias(self, value: Value, atom: Atom) -> None:
        """From here on `value` is `atom`."""
        self._now[value] = atom

    def arrive(self, atom: Atom, spec: Spec | None, place: Place) -> Atom:
        """The atom in the spec an equation needs, moved if it is not there yet."""
        if not isinstance(atom, Value):
            return atom
        now = self._now.get(atom, atom)
        have = self._decisions.values.get(atom)
        if spec is None or have is None or have == spec or not isinstance(now, Value):
            return now
        way = self._decisions.detours.get((atom.shape, have, spec), (spec,))
        for k, stop in enumerate(way):
            key = (atom, way[: k + 1])
            if key not in self._moved:
                self._moved[key] = Value(atom.aval)
                self.equations.append(Reshard(now, self._moved[key], stop, True, place))
            now = self._moved[key]
        return now
