"""Profiled layer graphs, in the text format of PipeDream and DAPPLE, and the states at which they can be cut.

    node1 -- Conv2d -- forward_compute_time=3.4, backward_compute_time=6.8, activation_size=96000.0, parameter_size=68.0
    <tab>node1 -- node2

Times are milliseconds, sizes bytes; an activation may be a list, `[a; b]`. A state is a set of layers that holds with
each layer all it needs (PipeDream, Narayanan et al., SOSP 2019, calls its border an antichain); they are numbered from
the smallest on. The layer "Input" is everybody's and left out, and so is a "__getitem__" that nobody uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

import networkx as nx

from autoshard.errors import ArgumentError, explain

_NODE = re.compile(
    r"(\S+) -- (.*?) -- forward_compute_time=(\S+), backward_compute_time=(\S+), "
    r"activation_size=(.*?), parameter_size=([^\s,]+)"
)
_EDGE = re.compile(r"\s+(\S+) -- (\S+)")
MOST_STATES = 100_000


@final
@dataclass(frozen=True, slots=True)
class ProfiledLayer:
    """One layer of a profile.

    Attributes:
      name: its name.
      forward_s, backward_s: seconds for the profiled batch.
      activation_bytes: its result; parameter_bytes: its weights.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float


@final
@dataclass(frozen=True, slots=True)
class State:
    """A place to cut at: what is before it.

    Attributes:
      compute_s: seconds of forward and backward of all layers up to here.
      parameter_bytes: their weights.
      output_bytes: activations that later layers need.
      smaller: numbers of the states that are part of this one; of a chain, all earlier ones.
    """

    compute_s: float
    parameter_bytes: float
    output_bytes: float
    smaller: tuple[int, ...] = ()


def read_profile(path: Path) -> tuple[State, ...]:
    """The states of a profile, from the first layer's to the whole graph's.

    Raises:
      ArgumentError: the file is not readable, or a line is neither a layer nor an edge.
    """
    layers: dict[str, ProfiledLayer] = {}
    graph: nx.DiGraph[str] = nx.DiGraph()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(explain(f"profile {path}: {error}", "a readable text file", "check the path")) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        edge = _EDGE.match(line)
        try:
            if edge is not None:
                if edge[1] not in layers or edge[2] not in layers:
                    raise ValueError("an edge between layers that are not listed before it")
                graph.add_edge(edge[1], edge[2])
            else:
                name, layer = _layer(line)
                layers[name] = layer
                graph.add_node(name)
        except ValueError as error:
            expected = "a layer (NAME -- TEXT -- forward_compute_time=...) or an edge (<tab>NAME -- NAME)"
            raise ArgumentError(explain(f"{path.name}:{number}: {error}", expected, "correct the line")) from error
    for name, layer in layers.items():
        if layer.name.startswith("Input") and graph.in_degree(name) == 0:
            graph.remove_node(name)
        if layer.name.startswith("__getitem__") and name in graph and graph.out_degree(name) == 0:
            graph.remove_node(name)
    if not graph:
        raise ArgumentError(explain(f"profile {path.name} has no layers", "at least one", "check the file"))
    parts = _closed_sets(graph)
    smaller = [tuple(k for k, other in enumerate(parts) if other < part) for part in parts]
    return tuple(_state(graph, layers, part, less) for part, less in zip(parts, smaller, strict=True))


def _layer(line: str) -> tuple[str, ProfiledLayer]:
    found = _NODE.match(line)
    if found is None:
        raise ValueError(f"{line.strip()[:80]!r}")
    activation = sum(float(part) for part in found[5].strip("[]").split(";"))
    forward_s, backward_s = float(found[3]) * 1e-3, float(found[4]) * 1e-3
    return found[1], ProfiledLayer(found[2], forward_s, backward_s, activation, float(found[6]))


def _closed_sets(graph: nx.DiGraph[str]) -> list[frozenset[str]]:
    """Sets that grow from the first source a layer at a time; side branches, which do not come from it, are added with
    the layer that needs them.
    """
    needs = {n: frozenset(nx.ancestors(graph, n)) | {n} for n in graph}  # pyright: ignore[reportUnknownMemberType]
    source = next(name for name in graph if graph.in_degree(name) == 0)
    reached = {name for name in graph if source in needs[name]}
    first = needs[source]
    found, open_sets = {first}, [first]
    while open_sets:
        part = open_sets.pop()
        if len(found) > MOST_STATES:
            raise ArgumentError(explain("a profile with too many states", f"at most {MOST_STATES}", "join its layers"))
        for name in {user for member in part for user in graph.successors(member)} - part:
            larger = part | needs[name]
            if all(p in part or p not in reached for p in graph.predecessors(name)) and larger not in found:
                found.add(larger)
                open_sets.append(larger)
    return sorted(found, key=lambda part: (len(part), sorted(part)))


def _state(
    graph: nx.DiGraph[str], layers: dict[str, ProfiledLayer], part: frozenset[str], smaller: tuple[int, ...]
) -> State:
    ends = [name for name in part if not set(graph.successors(name)) <= part or graph.out_degree(name) == 0]
    return State(
        sum(layers[name].forward_s + layers[name].backward_s for name in part),
        sum(layers[name].parameter_bytes for name in part),
        sum(layers[name].activation_bytes for name in ends),
        smaller,
    )
