"""A graph as one flat list of operators to be given shardings, bodies of control flow included.

    op    ::= Op(kind, rule, operands, results, times)
    kind  ::= INPUT (of the graph) | CONSTANT (captured array) | APPLY (an equation) | ENTER, LEAVE (a body)
    tie   ::= Tie(source, target): the source must arrive in the target's sharding (loop carries, branches, state)

A scan of length n runs its body's ops n times, but those that depend on its constants alone once: XLA moves them out of
the loop, and their reshardings with them. Its operands enter the body through ops of their own: constants and
carries keep their dimensions, scanned values lose the first one, which must be whole. Carries are tied: what a body
returns is laid out like what it takes. Equations on scalars alone are left out.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from autoshard import jax_compat
from autoshard.ir import (
    Apply,
    Atom,
    FactorKind,
    FactorRule,
    Graph,
    Reshard,
    Value,
    factor_rule,
    trip_count,
)


@final
class OpKind(enum.Enum):
    """Where an op comes from."""

    INPUT = "input"
    CONSTANT = "constant"
    APPLY = "apply"
    ENTER = "enter"
    LEAVE = "leave"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operator.

    Attributes:
      index: position in the list.
      kind: where it comes from.
      rule: its factor rule.
      operands: what it reads.
      results: what it makes.
      equation: the equation; of ENTER and LEAVE the control flow; None for inputs and constants.
      position: of ENTER the equation's operand, of LEAVE its result, of a barrier both (each operand passes by
        itself); -1 for others.
      times: how often its results are made in one call of the step.
    """

    index: int
    kind: OpKind
    rule: FactorRule
    operands: tuple[Atom, ...]
    results: tuple[Value, ...]
    equation: Apply | None
    position: int
    times: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """`source` is needed in the sharding of `target`.

    Attributes:
      body: the graph whose output `source` is.
      output: which output of that graph.
    """

    source: Value
    target: Value
    body: Graph
    output: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ops:
    """All ops of a graph.

    Attributes:
      ops: in an order in which each value is made before it is read.
      ties: values that must arrive in another's sharding.
      maker: for each value the op that makes it, and which result it is.
      readers: for each value the ops that read it, and at which operand.
      tied: for each value those in whose sharding it must arrive.
    """

    ops: tuple[Op, ...]
    ties: tuple[Tie, ...]
    maker: dict[Value, tuple[Op, int]]
    readers: dict[Value, list[tuple[Op, int]]]
    tied: dict[Value, list[Value]]


def list_ops(graph: Graph, state: Sequence[tuple[int, int]] = (), hoist: bool = True) -> Ops:
    """The ops of a graph.

    Args:
      graph: what to plan.
      state: (input, output) pairs of the step's state; each output is tied to its input.
      hoist: False where each trip of an outermost loop is a program of its own, out of which nothing is moved.

    Raises:
      UnknownPrimitiveError: an equation has no factor rule.
    """
    builder = _Builder(hoist)
    for value in graph.inputs:
        builder.add(OpKind.INPUT, free_rule((), (value,)), (), (value,), None, 1)
    builder.graph(graph, 1)
    for i, o in state:
        source = graph.outputs[o]
        if isinstance(source, Value):
            builder.ties.append(Tie(source, graph.inputs[i], graph, o))
    readers: dict[Value, list[tuple[Op, int]]] = {}
    for op in builder.ops:
        for k, atom in enumerate(op.operands):
            if isinstance(atom, Value):
                readers.setdefault(atom, []).append((op, k))
    maker = {value: (op, k) for op in builder.ops for k, value in enumerate(op.results)}
    tied: dict[Value, list[Value]] = {}
    for tie in builder.ties:
        tied.setdefault(tie.source, []).append(tie.target)
    return Ops(tuple(builder.ops), tuple(builder.ties), maker, readers, tied)


def free_rule(operands: Sequence[Atom], results: Sequence[Atom], whole: Sequence[int] = ()) -> FactorRule:
    """A rule of like-shaped operands and results with one factor a dimension.

    Args:
      operands: values; `results`: values of the same shape.
      whole: dimensions that need to stay whole.
    """
    shape = tuple((*operands, *results)[0].shape)
    plain = splittable((*operands, *results)[0])
    factors = [d for d, n in enumerate(shape) if n > 1]
    dims = tuple((factors.index(d),) if n > 1 else () for d, n in enumerate(shape))
    kinds = tuple(FactorKind.PARALLEL if plain and d not in whole else FactorKind.NEED_REPLICATION for d in factors)
    sizes = tuple(shape[d] for d in factors)
    return FactorRule((dims,) * len(operands), (dims,) * len(results), sizes, kinds, ("",) * len(sizes))


def splittable(atom: Atom) -> bool:
    """Whether a value may be split at all: PRNG keys and float0 leaves may not."""
    if atom.dtype == jax.dtypes.float0:
        return False
    return not jnp.issubdtype(atom.dtype, jax.dtypes.prng_key)


class _Builder:
    """Ops so far."""

    def __init__(self, hoist: bool) -> None:
        self._hoist = hoist
        self.ops: list[Op] = []
        self.ties: list[Tie] = []
        self._rules: dict[Hashable, FactorRule] = {}
        self._often: dict[Value, int] = {}  # how often a value of a loop's body differs; absent: as its ops run

    def add(
        self,
        kind: OpKind,
        rule: FactorRule,
        operands: tuple[Atom, ...],
        results: tuple[Value, ...],
        equation: Apply | None,
        times: int,
        position: int = -1,
    ) -> None:
        self.ops.append(Op(len(self.ops), kind, rule, operands, results, equation, position, times))
        self._often.update(dict.fromkeys(results, times))

    def graph(self, graph: Graph, times: int) -> None:
        for value, _ in graph.constants:
            rule = free_rule((), (value,), whole=range(len(value.shape)))
            self.add(OpKind.CONSTANT, rule, (), (value,), None, times)
        for equation in graph.equations:
            if isinstance(equation, Reshard):
                continue
            match equation.name:
                case "scan":
                    self._scan(equation, times)
                case "while":
                    self._while(equation, times)
                case "cond":
                    self._cond(equation, times)
                case "optimization_barrier":
                    for k, (operand, result) in enumerate(zip(equation.inputs, equation.outputs, strict=True)):
                        rule = free_rule((operand,), (result,))
                        self.add(OpKind.APPLY, rule, (operand,), (result,), equation, times, k)
                case _ if any(sized(atom) for atom in (*equation.inputs, *equation.outputs)):
                    rule = self._rule(equation)
                    often = self._runs(equation, times)
                    self.add(OpKind.APPLY, rule, equation.inputs, equation.outputs, equation, often)
                case _:
                    continue

    def _rule(self, equation: Apply) -> FactorRule:
        """The factor rule; like equations, as of repeated layers, share one."""
        atoms = (*equation.inputs, *equation.outputs)
        shapes = tuple((atom.shape, atom.dtype) for atom in atoms)
        key = (equation.primitive, len(equation.inputs), shapes, tuple(equation.params.values()))
        try:
            known = self._rules.get(key)
        except TypeError:  # a parameter without a hash
            return factor_rule(equation)
        if known is None:
            known = self._rules[key] = factor_rule(equation)
        return known

    def _runs(self, equation: Apply, times: int) -> int:
        """How often an equation runs, out of all loops that it does not depend on."""
        operands = [atom for atom in equation.inputs if isinstance(atom, Value)]
        if not operands or equation.effects:
            return times
        return min(times, max(self._often.get(atom, times) for atom in operands))

    def _enter(self, equation: Apply, position: int, inner: Value, times: int) -> None:
        outer = equation.inputs[position]
        rule = free_rule((outer,), (inner,)) if outer.shape == inner.shape else _unstack(outer, inner)
        self.add(OpKind.ENTER, rule, (outer,), (inner,), equation, times, position)

    def _leave(self, equation: Apply, position: int, inner: Atom, times: int) -> None:
        outer = equation.outputs[position]
        rule = free_rule((inner,), (outer,)) if outer.shape == inner.shape else _flip(_unstack(outer, inner))
        self.add(OpKind.LEAVE, rule, (inner,), (outer,), equation, times, position)

    def _scan(self, equation: Apply, times: int) -> None:
        (body,) = equation.graphs
        consts, carry = jax_compat.scan_layout(equation.params)
        inner_times = times * trip_count(equation)
        for k, inner in enumerate(body.inputs):
            outer = equation.inputs[k]
            often = self._often.get(outer, times) if isinstance(outer, Value) else times
            moved = k < consts and (self._hoist or times > 1)
            self._enter(equation, k, inner, often if moved else inner_times)
        self.graph(body, inner_times)
        for k in range(len(equation.outputs)):
            if k < carry:
                self._tie(body, k, body.inputs[consts + k])
            self._leave(equation, k, body.inputs[consts + k] if k < carry else body.outputs[k], times)

    def _while(self, equation: Apply, times: int) -> None:
        cond, body = equation.graphs
        n, m = int(equation.params["cond_nconsts"]), int(equation.params["body_nconsts"])
        inner_times = times * trip_count(equation)
        for k, inner in enumerate(cond.inputs[:n]):
            self._enter(equation, k, inner, times)
        for k, inner in enumerate(body.inputs):
            self._enter(equation, n + k, inner, times if k < m else inner_times)
        for outer, inner in zip(body.inputs[m:], cond.inputs[n:], strict=True):
            rule = free_rule((outer,), (inner,))
            self.add(OpKind.ENTER, rule, (outer,), (inner,), equation, inner_times)
        self.graph(cond, inner_times)
        self.graph(body, inner_times)
        for k in range(len(equation.outputs)):
            self._tie(body, k, body.inputs[m + k])
            self._leave(equation, k, body.inputs[m + k], times)

    def _cond(self, equation: Apply, times: int) -> None:
        for branch in equation.graphs:
            for k, inner in enumerate(branch.inputs):
                self._enter(equation, k + 1, inner, times)
            self.graph(branch, times)
        for k, result in enumerate(equation.outputs):
            self._leave(equation, k, equation.graphs[0].outputs[k], times)
            for branch in equation.graphs[1:]:
                self._tie(branch, k, result)

    def _tie(self, body: Graph, output: int, target: Value) -> None:
        source = body.outputs[output]
        if isinstance(source, Value) and source is not target:
            self.ties.append(Tie(source, target, body, output))


def _unstack(outer: Atom, inner: Atom) -> FactorRule:
    """The rule from a stacked value to one slice of it: the first dimension stays whole."""
    base = free_rule((inner,), ())
    if outer.shape[0] == 1:
        return FactorRule((((), *base.operands[0]),), (base.operands[0],), base.sizes, base.kinds, base.reducers)
    stack = len(base.sizes)
    return FactorRule(
        (((stack,), *base.operands[0]),),
        (base.operands[0],),
        (*base.sizes, outer.shape[0]),
        (*base.kinds, FactorKind.NEED_REPLICATION),
        (*base.reducers, ""),
    )


def _flip(rule: FactorRule) -> FactorRule:
    return FactorRule(rule.results, rule.operands, rule.sizes, rule.kinds, rule.reducers)


def sized(atom: Any) -> bool:
    """Whether a value is worth a sharding: an array with a dimension greater than 1."""
    return isinstance(atom, Value) and bool(atom.shape) and max(atom.shape) > 1
