"""Writes the plan's shardings into the graph.

    y:f32[16,64] = dot_general x w          -->   w2 = reshard[(-,model)] w
                                                  y0:f32[16,64] = dot_general x w2
                                                  y = keep[(data,model)] y0

Each value is fixed to its spec where it is made (`keep`), and moved (`reshard`) before the first equation that needs it
otherwise, once for each spec. A user's `sharding_constraint` becomes such a reshard. Bodies are treated alike: their
inputs are fixed at the start and their outputs moved to what the loop carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from autoshard.ir import Apply, Atom, Equation, Graph, Place, Reshard, Spec, Value
from autoshard.plan import Decisions


@final
@dataclass(frozen=True, slots=True)
class Constrain:
    """Inserts reshards.

    Attributes:
      decisions: the specs of values, operands and outputs.
    """

    name: ClassVar[str] = "constrain"
    decisions: Decisions

    def apply(self, graph: Graph) -> Graph:
        """The graph with every decision in it."""
        return _constrain(graph, self.decisions, top=True)


def _constrain(graph: Graph, decisions: Decisions, top: bool) -> Graph:
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
        bodies = tuple(_constrain(body, decisions, top=False) for body in equation.graphs)
        writer.equations.append(
            Apply(
                equation.primitive,
                tuple(operands),
                raw,
                equation.params,
                bodies,
                equation.effects,
                equation.context,
                equation.place,
            )
        )
        for value, made in zip(equation.outputs, raw, strict=True):
            if made is not value:
                writer.fix(value, made, equation.place)
    place = graph.equations[-1].place if graph.equations else None
    outputs = tuple(
        atom if place is None else writer.arrive(atom, decisions.outputs.get((graph, k)), place)
        for k, atom in enumerate(graph.outputs)
    )
    return Graph(graph.inputs, graph.constants, tuple(writer.equations), outputs, graph.effects)


class _Writer:
    """Equations of one graph so far, and where each value stands."""

    def __init__(self, decisions: Decisions) -> None:
        self.equations: list[Equation] = []
        self._decisions = decisions
        self._now: dict[Value, Atom] = {}
        self._moved: dict[tuple[Value, Spec], Value] = {}

    def fixes(self, value: Value) -> bool:
        """Whether the plan has a spec for the value that is worth stating."""
        return value in self._decisions.values

    def fix(self, value: Value, made: Value, place: Place) -> None:
        """States the spec of a value just made; `made` may be the value itself (inputs of bodies)."""
        if not self.fixes(value):
            return
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
        if (atom, spec) not in self._moved:
            for stop in self._decisions.detours.get((atom.shape, have, spec), (spec,)):
                moved = Value(atom.aval)
                self.equations.append(Reshard(now, moved, stop, True, place))
                now = moved
            self._moved[atom, spec] = now
        return self._moved[atom, spec]
