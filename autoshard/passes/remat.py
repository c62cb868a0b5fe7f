"""Computes parts of the forward pass again where the backward pass needs them, so that less is kept in between.

The forward pass is cut into segments where little is alive. Of each segment but the last only what later segments need
is kept; what the backward pass needs of the rest is computed again from that, behind a barrier (else XLA would merge
it with the first time), once the backward pass has come that far (Chen et al., "Training deep nets with sublinear
memory cost", 2016):

    a = f x ; b = g a ; c = h b        a = f x ; b = g a ; c = h b
    ...                          -->   ...
    dx = mul dc a                      x2 = optimization_barrier x dc ; a2 = f x2 ; dx = mul dc a2

Where to cut: for every largest segment (bytes kept inside) the forward pass is cut greedily at the point with least
alive; the cut with the least (kept at cuts + largest segment) is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, final

from autoshard import jax_compat
from autoshard.ir import Apply, Equation, Graph, Place, Value, renamed

GREEDY = 24
"""Largest segments that are tried, from the whole down by a quarter each. Ours: 0.75^24 is a thousandth."""

WINDOW = 0.5
"""A segment ends between this part of its largest size and all of it, where least is alive. Ours."""


@final
@dataclass(frozen=True, slots=True)
class Remat:
    """Recomputes.

    Attributes:
      cuts: numbers of the forward equations after which the forward pass is cut (`forward_cuts`).
    """

    name: ClassVar[str] = "remat"
    cuts: tuple[int, ...]

    def apply(self, graph: Graph) -> Graph:
        """The graph with recomputation."""
        return _rewrite(graph, self.cuts) if self.cuts else graph


def is_backward(equation: Equation) -> bool:
    """Whether an equation comes from transposing (JAX's name stacks)."""
    return "transpose(" in jax_compat.name_stack_of(equation.place.source)


def is_forward(equation: Equation) -> bool:
    """Whether an equation comes from differentiating, but not from transposing."""
    stack = jax_compat.name_stack_of(equation.place.source)
    return "jvp(" in stack and "transpose(" not in stack


def forward_cuts(graph: Graph) -> tuple[int, ...]:
    """Where to cut the forward pass; () where there is no backward pass, or nothing is gained."""
    order = [i for i, e in enumerate(graph.equations) if is_forward(e)]
    place = {i: k for k, i in enumerate(order)}
    maker = {v: i for i, e in enumerate(graph.equations) for v in e.outputs}
    inside: dict[Value, int] = {}  # bytes of values that the backward pass reads, by value
    last: dict[Value, int] = {}  # last forward equation that reads a value, by place
    for i, equation in enumerate(graph.equations):
        for atom in equation.inputs:
            if not isinstance(atom, Value) or maker.get(atom, -1) not in place:
                continue
            if i in place:
                last[atom] = place[i]
            elif is_backward(equation):
                inside[atom] = atom.nbytes
    if not inside:
        return ()
    kept = [0] * len(order)
    for value, nbytes in inside.items():
        kept[place[maker[value]]] += nbytes
    alive = _alive(graph, order, place, maker, last)
    best, least = (), sum(kept)
    limit = float(sum(kept))
    for _ in range(GREEDY):
        limit *= 0.75
        cuts = _greedy(kept, alive, limit)
        parts = _largest(kept, cuts)
        total = sum(alive[c] for c in cuts) + parts
        if cuts and total < least:
            best, least = tuple(order[c] for c in cuts), total
    return best


def _alive(
    graph: Graph, order: Sequence[int], place: Mapping[int, int], maker: Mapping[Value, int], last: Mapping[Value, int]
) -> list[int]:
    """Bytes made up to each forward equation and read by a later one."""
    change = [0] * (len(order) + 1)
    for value, end in last.items():
        begin = place[maker[value]]
        if end > begin:
            change[begin] += value.nbytes
            change[end] -= value.nbytes
    total, found = 0, list[int]()
    for delta in change[:-1]:
        total += delta
        found.append(total)
    return found


def _greedy(kept: Sequence[int], alive: Sequence[int], limit: float) -> list[int]:
    """Cuts after these places: each segment keeps at most `limit`, and ends where least is alive."""
    cuts: list[int] = []
    size, best = 0.0, -1
    for k, nbytes in enumerate(kept):
        if size + nbytes > limit and best >= 0:
            cuts.append(best)
            size = float(sum(kept[best + 1 : k]))
            best = -1
        size += nbytes
        if size >= WINDOW * limit and (best < 0 or alive[k] <= alive[best]):
            best = k
    return [c for c in cuts if c + 1 < len(kept)]


def _largest(kept: Sequence[int], cuts: Sequence[int]) -> int:
    ends = [-1, *cuts, len(kept) - 1]
    return max(sum(kept[a + 1 : b + 1]) for a, b in pairwise(ends))


def _rewrite(graph: Graph, cuts: Sequence[int]) -> Graph:
    forward = [i for i, e in enumerate(graph.equations) if is_forward(e)]
    segment: dict[int, int] = {}
    for i in forward:
        segment[i] = sum(c < i for c in cuts)
    maker = {v: i for i, e in enumerate(graph.equations) for v in e.outputs}
    home = {v: segment[i] for v, i in maker.items() if i in segment}
    outputs = {a for a in graph.outputs if isinstance(a, Value)}
    crossing = outputs | {v for e in graph.equations if _has_effects(e) for v in e.outputs}
    crossing |= {
        atom
        for i in forward
        for atom in graph.equations[i].inputs
        if isinstance(atom, Value) and home.get(atom, segment[i]) < segment[i]
    }
    last = len(cuts)
    wanted: dict[int, dict[Value, None]] = {}  # by segment, what the backward pass reads of its inside
    for equation in graph.equations:
        if is_backward(equation):
            for atom in equation.inputs:
                if isinstance(atom, Value) and home.get(atom, last) < last and atom not in crossing:
                    wanted.setdefault(home[atom], {})[atom] = None
    made: dict[Value, Value] = {}
    done: set[int] = set()
    equations: list[Equation] = []
    for equation in graph.equations:
        if not is_backward(equation):
            equations.append(equation)
            continue
        for number in sorted({home[a] for a in equation.inputs if isinstance(a, Value) and a in home}):
            if number in wanted and number not in done:
                done.add(number)
                values = [a for a in equation.inputs if isinstance(a, Value)]
                trigger = next((v for v in values if _from_backward(v, maker, graph)), None)
                equations += _again(graph, tuple(wanted[number]), number, home, crossing, maker, trigger, made)
        equations.append(renamed(equation, made))
    return Graph(graph.inputs, graph.constants, tuple(equations), graph.outputs, graph.effects)


def _has_effects(equation: Equation) -> bool:
    return isinstance(equation, Apply) and bool(equation.effects)


def _from_backward(value: Value, maker: Mapping[Value, int], graph: Graph) -> bool:
    return value in maker and is_backward(graph.equations[maker[value]])


def _again(
    graph: Graph,
    wanted: Sequence[Value],
    number: int,
    home: Mapping[Value, int],
    crossing: set[Value],
    maker: Mapping[Value, int],
    trigger: Value | None,
    made: dict[Value, Value],
) -> list[Equation]:
    """The equations that compute values of a segment again, in order, after a barrier on what they start from."""
    needed: set[int] = set()
    starts: dict[Value, None] = {}
    todo = list(wanted)
    while todo:
        value = todo.pop()
        if home.get(value) != number or (value in crossing and value not in wanted):
            starts[value] = None
        elif maker[value] not in needed:
            needed.add(maker[value])
            todo += [a for a in graph.equations[maker[value]].inputs if isinstance(a, Value)]
    place = Place(graph.equations[min(needed)].place.source, 1)
    operands = (*starts, *((trigger,) if trigger is not None else ()))
    behind = tuple(Value(v.aval) for v in operands)
    inner = dict(zip(starts, behind, strict=False))
    found: list[Equation] = [
        Apply(jax_compat.optimization_barrier_p(), operands, behind, {}, (), frozenset(), None, place)
    ]
    for i in sorted(needed):
        equation = graph.equations[i]
        assert isinstance(equation, Apply), "recomputation is decided before shardings"
        results = tuple(Value(v.aval) for v in equation.outputs)
        again = Place(equation.place.source, equation.place.remat + 1)
        found.append(replace(renamed(equation, inner), outputs=results, place=again))
        inner.update(zip(equation.outputs, results, strict=True))
    made.update({v: inner[v] for v in wanted})
    return found
