"""What must hold of every graph, checked after each pass.

each value is defined once, before its uses; inputs and constants are defined at the start
a reshard keeps shape and dtype; its spec has one entry a dimension, no axis twice
bodies verify; their inputs and outputs match the operands and results of their equation
"""

from __future__ import annotations

from typing import Any

from autoshard import jax_compat
from autoshard.errors import VerifyError
from autoshard.ir.graph import Apply, Atom, Equation, Graph, Literal, Reshard, Value
from autoshard.ir.printer import Names, print_equation


def verify(graph: Graph) -> None:
    """Checks the graph.

    Raises:
      VerifyError: what is broken, in which equation, from which source line.
    """
    defined: set[Value] = set()
    for value in (*graph.inputs, *(value for value, _ in graph.constants)):
        if value in defined:
            raise VerifyError("an input or constant stands twice")
        defined.add(value)
    for index, equation in enumerate(graph.equations):
        for atom in equation.inputs:
            if isinstance(atom, Value) and atom not in defined:
                _fail("an operand is used before it is defined", graph, index)
        match equation:
            case Reshard():
                _reshard(equation, graph, index)
            case Apply():
                _apply(equation, graph, index)
        for value in equation.outputs:
            if value in defined:
                _fail("a value is defined twice", graph, index)
            defined.add(value)
    for atom in graph.outputs:
        if isinstance(atom, Value) and atom not in defined:
            raise VerifyError("an output of the graph is not defined by it")


def _reshard(equation: Reshard, graph: Graph, index: int) -> None:
    if not _same_type(equation.input, equation.output):
        _fail("a reshard changes shape or dtype", graph, index)
    if len(equation.spec) != len(equation.input.shape):
        _fail(f"a spec of {len(equation.spec)} entries on {len(equation.input.shape)} dimensions", graph, index)
    axes = [axis for dim in equation.spec for axis in dim]
    if len(set(axes)) != len(axes):
        _fail("a mesh axis stands twice in a spec", graph, index)


def _apply(equation: Apply, graph: Graph, index: int) -> None:
    for body in equation.graphs:
        verify(body)
    match equation.name:
        case "scan":
            _scan(equation, graph, index)
        case "while":
            _while(equation, graph, index)
        case "cond":
            for branch in equation.graphs:
                _types(branch.inputs, equation.inputs[1:], "a branch's inputs", graph, index)
                _types(branch.outputs, equation.outputs, "a branch's outputs", graph, index)
        case _:
            if equation.graphs:
                _fail("only scan, while and cond have bodies", graph, index)


def _scan(equation: Apply, graph: Graph, index: int) -> None:
    (body,) = equation.graphs
    consts, carry = jax_compat.scan_layout(equation.params)
    if len(body.inputs) != len(equation.inputs) or len(body.outputs) != len(equation.outputs):
        _fail("a scan's body has another number of inputs or outputs", graph, index)
    fixed = consts + carry
    _types(body.inputs[:fixed], equation.inputs[:fixed], "a scan's constants and carries", graph, index)
    _types(body.outputs[:carry], equation.outputs[:carry], "a scan's carries", graph, index)
    scanned = (
        *zip(body.inputs[fixed:], equation.inputs[fixed:], strict=True),
        *zip(body.outputs[carry:], equation.outputs[carry:], strict=True),
    )
    for inner, outer in scanned:
        if (equation.params["length"], *inner.shape) != tuple(outer.shape):
            _fail("a scanned value lacks the scan's length as its first dimension", graph, index)


def _while(equation: Apply, graph: Graph, index: int) -> None:
    cond, body = equation.graphs
    n, m = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    carry = equation.inputs[n + m :]
    _types(cond.inputs, (*equation.inputs[:n], *carry), "a while condition's inputs", graph, index)
    _types(body.inputs, (*equation.inputs[n : n + m], *carry), "a while body's inputs", graph, index)
    _types(body.outputs, carry, "a while body's outputs", graph, index)
    _types(equation.outputs, carry, "a while's results", graph, index)


def _types(inner: tuple[Atom, ...], outer: tuple[Atom, ...], what: str, graph: Graph, index: int) -> None:
    if len(inner) != len(outer):
        _fail(f"{what}: {len(inner)} for {len(outer)} outside", graph, index)
    for a, b in zip(inner, outer, strict=True):
        if not _same_type(a, b):
            _fail(f"{what}: {a.aval} inside, {b.aval} outside", graph, index)


def _same_type(a: Atom, b: Atom) -> bool:
    return tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype


def _fail(message: str, graph: Graph, index: int) -> None:
    names = Names()
    lines: list[str] = []
    for i, equation in enumerate(graph.equations[: index + 2]):
        text = print_equation(equation, names)
        if i >= index - 2:
            lines.append(("> " if i == index else "  ") + text[0])
    raise VerifyError(
        f"{message}\nin equation: {_head(graph.equations[index])}\n"
        f"from source: {jax_compat.source_line(graph.equations[index].place.source)}\n" + "\n".join(lines)
    )


def _head(equation: Equation) -> str:
    shapes = ", ".join(_short(atom) for atom in equation.inputs)
    return f"{equation.name}({shapes})"


def _short(atom: Atom) -> Any:
    return str(atom.aval) if isinstance(atom, Value) else Literal.__name__.lower()
