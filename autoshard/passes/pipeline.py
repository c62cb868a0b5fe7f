"""Runs passes in order, verifying after each.

A pass is a frozen dataclass with a class attribute `name` and a method `apply(graph) -> graph` that never changes its
input. `on_pass` sees every graph (dumps, timing and progress hang there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from autoshard.errors import VerifyError
from autoshard.ir import Graph, verify


@runtime_checkable
class Pass(Protocol):
    """What every pass offers."""

    name: ClassVar[str]

    def apply(self, graph: Graph) -> Graph:
        """The rewritten graph."""
        ...


def run_passes(graph: Graph, passes: Sequence[Pass], on_pass: Callable[[str, Graph], None] | None = None) -> Graph:
    """Applies each pass and verifies what it returns.

    Raises:
      VerifyError: a pass returned a broken graph; names it and those before it.
    """
    done: list[str] = []
    for each in passes:
        graph = each.apply(graph)
        try:
            verify(graph)
        except VerifyError as error:
            before = f" (after {', '.join(done)})" if done else ""
            raise VerifyError(f"pass {each.name}{before} broke the graph: {error}") from error
        done.append(each.name)
        if on_pass is not None:
            on_pass(each.name, graph)
    return graph
