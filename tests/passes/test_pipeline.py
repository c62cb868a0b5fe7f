"""Passes in order, verified after each, the culprit named."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest

from autoshard.errors import VerifyError
from autoshard.ir import Graph, print_graph
from autoshard.passes import DuplicateCheap, Pass, run_passes
from tests.problems import mlp


@dataclass(frozen=True, slots=True)
class Break:
    """Turns the equations round."""

    name: ClassVar[str] = "break"

    def apply(self, graph: Graph) -> Graph:
        return dataclasses.replace(graph, equations=tuple(reversed(graph.equations)))


@dataclass(frozen=True, slots=True)
class Nothing:
    """Changes nothing."""

    name: ClassVar[str] = "nothing"

    def apply(self, graph: Graph) -> Graph:
        return graph


def test_passes_are_passes() -> None:
    assert isinstance(DuplicateCheap(), Pass)
    assert isinstance(Break(), Pass)


def test_the_culprit_is_named() -> None:
    with pytest.raises(VerifyError, match=r"^pass break broke the graph: an operand is used before it is defined"):
        run_passes(mlp().graph(), [Break()])


def test_those_before_are_named_and_those_after_do_not_run() -> None:
    seen: list[str] = []
    passes = [DuplicateCheap(), Nothing(), Break(), Nothing()]
    with pytest.raises(VerifyError, match=r"^pass break \(after duplicate_cheap, nothing\) broke the graph: ") as error:
        run_passes(mlp().graph(), passes, lambda name, _: seen.append(name))
    assert seen == ["duplicate_cheap", "nothing"]
    assert "in equation: " in str(error.value)
    assert "from source: " in str(error.value)
    assert isinstance(error.value.__cause__, VerifyError)


def test_the_callback_sees_every_graph() -> None:
    seen: dict[str, str] = {}
    graph = mlp().graph()
    made = run_passes(graph, [Nothing(), DuplicateCheap()], lambda name, g: seen.update({name: print_graph(g)}))
    assert list(seen) == ["nothing", "duplicate_cheap"]
    assert seen["nothing"] == print_graph(graph)
    assert seen["duplicate_cheap"] == print_graph(made)


def test_no_passes() -> None:
    graph = mlp().graph()
    assert run_passes(graph, []) is graph
