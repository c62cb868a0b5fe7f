"""Factor rules of control flow and of calls: those of their bodies, composed.

    scan    constants and carries as in the body, carries alike before, after and inside; the scanned dimension of
            xs and ys needs replication (steps run one after the other)
    while   carries alike before, after, in the condition and in the body
    cond    operands and results alike in all branches
    calls   as their body (those that tracing keeps: custom solves, composites, custom batching)

Planning opens these bodies and splits each equation; the rules of the whole serve everything that does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from autoshard import jax_compat
from autoshard.ir.compose import Composer
from autoshard.ir.factors import FactorRule
from autoshard.ir.graph import Apply, Atom, Graph
from autoshard.ir.rule_builder import shape_of
from autoshard.ir.rule_registry import factor_rule, register_rule
from autoshard.ir.shardy import parse_rule
from autoshard.ir.trace import from_jaxpr

MOVES = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "sharding_constraint", "copy", "name")
"""Primitives through which partial sums pass."""

CALLS = {
    "call": ("call_jaxpr",),
    "composite": ("jaxpr", "call_jaxpr"),
    "custom_vmap_call": ("call",),
    "linear_call": ("callee",),
    "remat_opt": ("fwd_jaxpr",),
    "xla_metadata_call": ("jaxpr",),
}
"""Calls that tracing keeps, and the names of the parameter that holds the body."""


def compose_graph(composer: Composer, graph: Graph) -> None:
    """Declares a graph's values and applies the rule of each of its equations."""
    for value in (*graph.inputs, *(value for value, _ in graph.constants)):
        _declare(composer, value)
    for equation in graph.equations:
        for atom in (*equation.inputs, *equation.outputs):
            _declare(composer, atom)
        if isinstance(equation, Apply):
            composer.apply(factor_rule(equation), equation.inputs, equation.outputs, equation.name in MOVES)
        else:
            composer.link(equation.input, equation.output, alias=True)
    for atom in graph.outputs:
        _declare(composer, atom)


def _declare(composer: Composer, atom: Atom) -> None:
    composer.declare(atom, shape_of(atom.aval))


def _outside(composer: Composer, equation: Apply) -> tuple[list[Hashable], list[Hashable]]:
    """Keys of operands and results, apart from those of the values: an operand may come twice."""
    operands: list[Hashable] = [("operand", k) for k in range(len(equation.inputs))]
    results: list[Hashable] = [("result", k) for k in range(len(equation.outputs))]
    for key, atom in zip((*operands, *results), (*equation.inputs, *equation.outputs), strict=True):
        composer.declare(key, shape_of(atom.aval))
    return operands, results


def _link_all(
    composer: Composer, sources: Sequence[Hashable], targets: Sequence[Hashable], alias: bool = False
) -> None:
    for source, target in zip(sources, targets, strict=True):
        composer.link(source, target, alias)


@register_rule("scan")
def _scan(equation: Apply) -> FactorRule:
    (body,) = equation.graphs
    consts, carries = jax_compat.scan_layout(equation.params)
    first = consts + carries
    composer = Composer()
    operands, results = _outside(composer, equation)
    compose_graph(composer, body)
    _link_all(composer, operands[:first], body.inputs[:first])
    _link_all(composer, body.outputs[:carries], body.inputs[consts:first])
    _link_all(composer, body.inputs[consts:first], results[:carries])
    for stacked, inner in zip(operands[first:], body.inputs[first:], strict=True):
        composer.link(stacked, inner, alias=True, source_skip=1)
    for inner, stacked in zip(body.outputs[carries:], results[carries:], strict=True):
        composer.link(inner, stacked, alias=True, target_skip=1)
    for stacked in (*operands[first:], *results[carries:]):
        composer.keep_whole(stacked, 0)
    return composer.rule(operands, results)


@register_rule("while")
def _while(equation: Apply) -> FactorRule:
    condition, body = equation.graphs
    n, m = int(equation.params["cond_nconsts"]), int(equation.params["body_nconsts"])
    composer = Composer()
    operands, results = _outside(composer, equation)
    compose_graph(composer, condition)
    compose_graph(composer, body)
    _link_all(composer, operands[:n], condition.inputs[:n])
    _link_all(composer, operands[n:], body.inputs)
    _link_all(composer, body.inputs[m:], condition.inputs[n:])
    _link_all(composer, body.outputs, body.inputs[m:])
    _link_all(composer, body.inputs[m:], results)
    return composer.rule(operands, results)


@register_rule("cond")
def _cond(equation: Apply) -> FactorRule:
    composer = Composer()
    operands, results = _outside(composer, equation)
    for branch in equation.graphs:
        compose_graph(composer, branch)
        _link_all(composer, operands[1:], branch.inputs)
        _link_all(composer, branch.outputs, results)
    return composer.rule(operands, results)


@register_rule(*CALLS)
def _call(equation: Apply) -> FactorRule:
    name = next(name for name in CALLS[equation.name] if name in equation.params)
    return _body_rule(equation, equation.params[name], range(len(equation.inputs)))


@register_rule("custom_partitioning")
def _custom_partitioning(equation: Apply) -> FactorRule:
    """The user's own rule, else that of the function whose partitioning it is.

    What a device does to its part of a reduction is the user's code; it is taken to be a sum.
    """
    given = jax_compat.custom_partitioning_rule(equation.params)
    if given is not None:
        return parse_rule(given, "add")
    return _body_rule(equation, equation.params["call"], range(len(equation.inputs)))


@register_rule("custom_linear_solve")
def _solve(equation: Apply) -> FactorRule:
    """The solve is what runs; operands that only its derivatives need may lie as they like."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    start = int(lengths.matvec) + int(lengths.vecmat)
    constants = sum(int(n) for n in lengths)
    return _body_rule(
        equation,
        jaxprs.solve,
        (*range(start, start + int(lengths.solve)), *range(constants, len(equation.inputs))),
    )


def _body_rule(equation: Apply, closed: Any, used: Sequence[int]) -> FactorRule:
    """The rule of a call.

    Args:
      equation: the call.
      closed: its body's jaxpr.
      used: the operands that are the body's inputs, in order.
    """
    body = from_jaxpr(closed)
    composer = Composer()
    operands, results = _outside(composer, equation)
    compose_graph(composer, body)
    _link_all(composer, [operands[k] for k in used], body.inputs, alias=True)
    _link_all(composer, body.outputs, results, alias=True)
    return composer.rule(operands, results)
