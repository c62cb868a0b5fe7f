"""Gives every reader its own copy of a value that costs nothing to make.

    b = broadcast_in_dim 0.0            b = broadcast_in_dim 0.0
    c = add x b                   -->   c = add x b
    d = mul y b                         b2 = broadcast_in_dim 0.0
                                        d = mul y b2

so that each copy can take its reader's sharding. XLA merges copies that end up alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from autoshard.ir import Apply, Atom, Equation, Graph, Reshard, Value

CHEAP = ("broadcast_in_dim", "iota")


@final
@dataclass(frozen=True, slots=True)
class DuplicateCheap:
    """Copies broadcasts of scalars and iotas, one a reader."""

    name: ClassVar[str] = "duplicate_cheap"

    def apply(self, graph: Graph) -> Graph:
        """The graph with one reader for each cheap value."""
        return _duplicate(graph)


def is_cheap(equation: Equation) -> bool:
    """Whether an equation spreads scalars only."""
    return isinstance(equation, Apply) and equation.name in CHEAP and all(atom.shape == () for atom in equation.inputs)


def _duplicate(graph: Graph) -> Graph:
    made: dict[Value, Apply] = {}
    used: set[Value] = {atom for atom in graph.outputs if isinstance(atom, Value)}
    equations: list[Equation] = []
    for equation in graph.equations:
        if isinstance(equation, Reshard):
            equations.append(equation)
            continue
        if is_cheap(equation):
            made[equation.outputs[0]] = equation
        inputs: list[Atom] = []
        for atom in equation.inputs:
            if isinstance(atom, Value) and atom in made:
                if atom in used:
                    source = made[atom]
                    atom = Value(atom.aval)
                    equations.append(
                        Apply(
                            source.primitive,
                            source.inputs,
                            (atom,),
                            source.params,
                            (),
                            source.effects,
                            source.context,
                            source.place,
                        )
                    )
                else:
                    used.add(atom)
            inputs.append(atom)
        bodies = tuple(_duplicate(body) for body in equation.graphs)
        equations.append(
            Apply(
                equation.primitive,
                tuple(inputs),
                equation.outputs,
                equation.params,
                bodies,
                equation.effects,
                equation.context,
                equation.place,
            )
        )
    return Graph(graph.inputs, graph.constants, tuple(equations), graph.outputs, graph.effects)
