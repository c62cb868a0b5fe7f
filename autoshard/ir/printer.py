"""Graphs as text: stable, one equation a line, names by order of definition, types shown.

inputs  a:f32[16,32] b:f32[32,64]
c:f32[16,64] = dot_general[dimension_numbers=(([1], [0]), ([], []))] a b   # mlp.py:12
d:f32[16,64] = reshard[(data,-)] c
outputs d
"""

from __future__ import annotations

import functools
import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import jax_compat
from autoshard.ir.graph import Apply, Atom, Equation, Graph, Literal, Spec, Value


class Names:
    """Short names given in order of first sight."""

    def __init__(self) -> None:
        self._names: dict[Value, str] = {}

    def of(self, value: Value) -> str:
        """The name of a value."""
        if value not in self._names:
            self._names[value] = _name(len(self._names))
        return self._names[value]


def print_graph(graph: Graph, *, sources: bool = False) -> str:
    """The graph as text.

    Args:
      graph: what to print.
      sources: append the user's source line to each equation.
    """
    return "\n".join(_graph(graph, Names(), "", sources)) + "\n"


def print_equation(equation: Equation, names: Names, indent: str = "", sources: bool = False) -> list[str]:
    """One equation: a line, and its bodies indented below."""
    inputs = [_atom(atom, names) for atom in equation.inputs]
    outputs = " ".join(_typed(value, names) for value in equation.outputs)
    params = _params(equation)
    shown = f"[{params}]" if params else ""
    line = f"{indent}{outputs} = {equation.name}{shown} {' '.join(inputs)}".rstrip()
    where = jax_compat.source_line(equation.place.source) if sources else ""
    lines = [line + (f"   # {where}" if where else "")]
    for body in equation.graphs:
        lines += _graph(body, names, indent + "  ", sources)
    return lines


def print_spec(spec: Spec) -> str:
    """`(data,-,model)`: mesh axes of each dimension; axes on one dimension are joined by `+`."""
    return "(" + ",".join("+".join(axes) or "-" for axes in spec) + ")"


@functools.cache
def short_dtype(dtype: Any) -> str:
    """f32, bf16, i32, key<fry>, ..."""
    if dtype == jax.dtypes.float0:
        return "float0"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return str(dtype)
    name = np.dtype(dtype).name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def short_type(aval: Any) -> str:
    """`f32[16,64]`, with `~` before weakly typed values."""
    weak = "~" if aval.weak_type else ""
    return f"{weak}{short_dtype(aval.dtype)}[{','.join(str(n) for n in aval.shape)}]"


def _graph(graph: Graph, names: Names, indent: str, sources: bool) -> list[str]:
    lines = [f"{indent}inputs {' '.join(_typed(v, names) for v in graph.inputs)}".rstrip()]
    if graph.constants:
        lines.append(f"{indent}constants {' '.join(_typed(v, names) for v, _ in graph.constants)}")
    for equation in graph.equations:
        lines += print_equation(equation, names, indent, sources)
    lines.append(f"{indent}outputs {' '.join(_atom(atom, names) for atom in graph.outputs)}".rstrip())
    return lines


def _atom(atom: Atom, names: Names) -> str:
    if isinstance(atom, Literal):
        return f"{atom.value}:{short_type(atom.aval)}"
    return names.of(atom)


def _typed(value: Value, names: Names) -> str:
    return f"{names.of(value)}:{short_type(value.aval)}"


def _params(equation: Equation) -> str:
    if not isinstance(equation, Apply):
        return print_spec(equation.spec)
    shown: list[str] = []
    for key, param in sorted(equation.params.items()):
        text = _param(param)
        if text:
            shown.append(f"{key}={text}")
    return " ".join(shown)


def _param(param: Any) -> str:
    """A parameter's text, "" if it says nothing or is not stable (functions, jaxprs, object addresses)."""
    if param is None or (callable(param) and not isinstance(param, type)):
        return ""
    text = " ".join(str(param).split())
    if " at 0x" in text or "\n" in text or len(text) > 160:
        return f"<{type(param).__name__}>"
    return text


def _name(index: int) -> str:
    letters = string.ascii_lowercase
    text = letters[index % 26]
    while index >= 26:
        index = index // 26 - 1
        text = letters[index % 26] + text
    return text
