"""The IOPDDL contest's JSON format (ASPLOS 2025): instances read, checked and written, answers priced.

    problem.nodes    intervals [first, last) of life, costs and usages (bytes) by strategy
    problem.edges    nodes (a tuple for each edge), costs row-major over the strategies of the tuple
    usage_limit      of the bytes of live nodes at every time

Costs of 1e18 and above mean "not allowed". An edge of three or more nodes becomes a node whose choices are the allowed
tuples, tied to each of its members. What a `Problem` has and the format has not, several lives of a node and bytes that
are always there, is written as nodes of its own. Costs are written as whole `UNIT_S`, which the key "cost_unit" names.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import orjson

from autoshard.errors import InstanceError, explain
from autoshard.search.problem import Edge, Floats, Problem, Usage

NEVER = 1e18
"""Costs from here on mean "not allowed"."""

UNIT_S = 1e-12
"""Seconds of one unit of cost in files we write."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """One file.

    Attributes:
      name: as the file states it.
      problem: its nodes first, in their order; then one node for each edge of three and more.
      nodes: how many nodes the file has.
      raw: the parsed JSON.
    """

    name: str
    problem: Problem
    nodes: int
    raw: dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer is worth.

    Attributes:
      cost: objective; infinite if something not allowed was chosen.
      peak: most bytes at any time.
      limit: of them.
      faults: why it is not legal; empty if it is.
    """

    cost: float
    peak: float
    limit: float
    faults: tuple[str, ...]

    @property
    def legal(self) -> bool:
        """Whether the answer may be used."""
        return not self.faults


def read_instance(path: Path) -> Instance:
    """Reads one instance, gzipped or not.

    Raises:
      InstanceError: the file is no instance; names the place.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise InstanceError(
            explain(f"{path}: {error}", "a readable JSON file, gzipped or not", "check the path")
        ) from error
    try:
        raw: Any = orjson.loads(data)
    except ValueError as error:
        raise _wrong(path, f"not JSON ({error})", "a JSON object", "download the file again") from error
    return _Reader(path).instance(raw)


def _wrong(path: Path, given: str, expected: str, hint: str) -> InstanceError:
    return InstanceError(explain(f"{path}: {given}", expected, hint))


@final
class _Reader:
    """Checks a parsed file and builds its problem."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, place: str, given: str, expected: str) -> InstanceError:
        return _wrong(self.path, f"{place}: {given}", expected, "correct the file; docs/solver.md has the format")

    def instance(self, raw: Any) -> Instance:
        if not isinstance(raw, dict):
            raise self.fail("the file", f"a {type(raw).__name__}", "an object with the key 'problem'")
        top = cast("dict[str, Any]", raw)
        problem = self.member(top, "the file", "problem", dict)
        nodes = self.member(problem, "problem", "nodes", dict)
        edges = self.member(problem, "problem", "edges", dict)
        limit = self.number(problem, "problem", "usage_limit")
        unit = self.number(problem, "problem", "cost_unit") if "cost_unit" in problem else 1.0
        if not unit > 0:
            raise self.fail("problem.cost_unit", f"{unit}", "a positive number")
        costs = self.tables(nodes, "costs", unit=unit)
        usages = self.tables(nodes, "usages")
        self.same(nodes, ("intervals", "costs", "usages"), "problem.nodes")
        for i, (c, u) in enumerate(zip(costs, usages, strict=True)):
            if len(c) == 0:
                raise self.fail(f"problem.nodes.costs[{i}]", "no strategies", "at least one")
            if len(c) != len(u):
                raise self.fail(
                    f"problem.nodes.usages[{i}]", f"{len(u)} usages", f"{len(c)}, one for each strategy of the node"
                )
            if u.min() < 0:
                raise self.fail(f"problem.nodes.usages[{i}]", f"{u.min():g}", "bytes, not negative")
        lives = self.lives(self.member(nodes, "problem.nodes", "intervals", list))
        held = [Usage(i, a, b, usages[i]) for i, (a, b) in enumerate(lives) if a < b]
        steps = max((b for _, b in lives), default=0)
        tables = self.edges(edges, costs, unit)
        made = Problem(tuple(costs), tables, tuple(held), np.zeros(steps), limit)
        name = problem.get("name", self.path.name)
        return Instance(str(name), made, len(lives), top)

    def member(self, where: dict[str, Any], place: str, key: str, kind: type) -> Any:
        if key not in where:
            raise self.fail(place, f"no key {key!r}", f"keys {', '.join([*map(repr, where), repr(key)])}")
        if not isinstance(where[key], kind):
            word = {dict: "an object", list: "a list"}[kind]
            raise self.fail(f"{place}.{key}", f"a {type(where[key]).__name__}", word)
        return where[key]

    def number(self, where: dict[str, Any], place: str, key: str) -> float:
        value = where.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(f"{place}.{key}", "missing" if key not in where else f"{value!r}", "a number")
        return float(value)

    def same(self, where: dict[str, Any], keys: tuple[str, ...], place: str) -> None:
        lengths = {key: len(where[key]) for key in keys}
        if len(set(lengths.values())) > 1:
            stated = ", ".join(f"{n} {key}" for key, n in lengths.items())
            raise self.fail(place, stated, "the same number of each")

    def tables(
        self, where: dict[str, Any], key: str, place: str = "problem.nodes", unit: float | None = None
    ) -> list[Floats]:
        """The rows of numbers under a key; with a unit they are costs."""
        rows = self.member(where, place, key, list)
        place = f"{place}.{key}"
        found = [self.row(row, place, i) for i, row in enumerate(rows)]
        if not found:
            return found
        flat = np.concatenate(found)  # there are many rows: what can be done for all at once is
        if np.isnan(flat).any():  # a null in the file
            i = next(i for i, row in enumerate(found) if np.isnan(row).any())
            raise self.fail(f"{place}[{i}]", f"{str(rows[i])[:60]}", "a list of numbers")
        if unit is None:
            return found
        never = flat >= NEVER
        if unit != 1.0:
            flat *= unit
        flat[never] = np.inf
        ends = np.cumsum([len(row) for row in found]).tolist()
        return [flat[end - len(row) : end] for row, end in zip(found, ends, strict=True)]

    def row(self, row: Any, place: str, i: int) -> Floats:
        try:
            found = np.array(row, np.float64)
        except (TypeError, ValueError):
            found = None
        if found is None or found.ndim != 1:
            raise self.fail(f"{place}[{i}]", f"{str(row)[:60]}", "a list of numbers")
        return found

    def lives(self, rows: list[Any]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for i, life in enumerate(rows):
            place = f"problem.nodes.intervals[{i}]"
            numbers = self.whole(life)
            if numbers is None or len(numbers) != 2:
                raise self.fail(place, f"{str(life)[:60]}", "two whole numbers: first, and last excluded")
            first, last = numbers
            if first < 0 or last < first:
                raise self.fail(place, f"[{first}, {last}]", "0 <= first <= last")
            found.append((first, last))
        return found

    def whole(self, row: Any) -> list[int] | None:
        """A list of whole numbers, None if it is something else."""
        if not isinstance(row, list):
            return None
        members = cast("list[Any]", row)
        return members if all(type(t) is int for t in members) else None

    def edges(self, where: dict[str, Any], costs: list[Floats], unit: float) -> dict[Edge, Floats]:
        """Tables of pairs; appends nodes to `costs` for larger edges."""
        scopes = self.member(where, "problem.edges", "nodes", list)
        rows = self.tables(where, "costs", "problem.edges", unit)
        self.same(where, ("nodes", "costs"), "problem.edges")
        sizes = [len(c) for c in costs]
        found: dict[Edge, Floats] = {}
        for e, (scope, flat) in enumerate(zip(scopes, rows, strict=True)):
            place = f"problem.edges.nodes[{e}]"
            nodes = self.whole(scope)
            if not nodes:
                raise self.fail(place, f"{str(scope)[:60]}", "a list of one or more node numbers")
            for i in nodes:
                if not 0 <= i < len(sizes):
                    raise self.fail(place, f"node {i}", f"node numbers from 0 to {len(sizes) - 1}")
            shape = [sizes[i] for i in nodes]
            if flat.size != math.prod(shape):
                stated = " x ".join(map(str, shape))
                raise self.fail(
                    f"problem.edges.costs[{e}]",
                    f"{flat.size} costs",
                    f"{math.prod(shape)} = {stated}, the strategies of nodes {nodes}",
                )
            _add_edge(costs, found, nodes, flat.reshape(shape))
        return found


def _add_edge(costs: list[Floats], edges: dict[Edge, Floats], nodes: list[int], table: Floats) -> None:
    """Adds a table over any nodes: a node may stand twice, there may be one, two or more."""
    scope = list(dict.fromkeys(nodes))
    if len(scope) < len(nodes):  # the diagonal of equal nodes
        at = np.indices([table.shape[nodes.index(i)] for i in scope])
        table = table[tuple(at[scope.index(i)] for i in nodes)]
    if len(scope) == 1:
        costs[scope[0]] = costs[scope[0]] + table
    elif len(scope) == 2:
        i, j = scope
        if i > j:
            i, j, table = j, i, table.T
        edges[i, j] = edges[i, j] + table if (i, j) in edges else table
    else:
        allowed = np.argwhere(np.isfinite(table))
        if not len(allowed):  # nothing is: one choice that says so
            costs.append(np.full(1, np.inf))
            return
        costs.append(table[tuple(allowed.T)])
        for position, i in enumerate(scope):
            tie = np.where(allowed[:, position] == np.arange(len(costs[i]))[:, None], 0.0, np.inf)
            edges[i, len(costs) - 1] = tie


def judge(raw: dict[str, Any], answer: Sequence[int]) -> Verdict:
    """Prices an answer from the parsed file alone, in plain Python integers where the file has integers."""
    nodes, edges = raw["problem"]["nodes"], raw["problem"]["edges"]
    limit = raw["problem"]["usage_limit"]
    faults: list[str] = []
    if len(answer) != len(nodes["costs"]):
        faults.append(f"{len(answer)} choices for {len(nodes['costs'])} nodes")
    bad = [i for i, (x, c) in enumerate(zip(answer, nodes["costs"], strict=False)) if not 0 <= x < len(c)]
    faults += [f"node {i} has no strategy {answer[i]}" for i in bad[:3]]
    if faults:
        return Verdict(math.inf, math.inf, limit, tuple(faults))
    prices = [c[x] for c, x in zip(nodes["costs"], answer, strict=True)]
    for scope, table in zip(edges["nodes"], edges["costs"], strict=True):
        index = 0
        for i in cast("list[int]", scope):
            index = index * len(nodes["costs"][i]) + answer[i]
        prices.append(table[index])
    if any(p >= NEVER for p in prices):
        faults.append("something not allowed is chosen")
    change: dict[int, float] = {}
    for (first, last), usage, x in zip(nodes["intervals"], nodes["usages"], answer, strict=True):
        if first < last:
            change[first] = change.get(first, 0) + usage[x]
            change[last] = change.get(last, 0) - usage[x]
    peak = held = 0
    worst = 0
    for t in sorted(change):
        held += change[t]
        if held > peak:
            peak, worst = held, t
    if peak > limit:
        faults.append(f"{peak - limit:g} over the limit of {limit:g} at time {worst}")
    cost = math.inf if any(p >= NEVER for p in prices) else sum(prices)
    return Verdict(float(cost), float(peak), float(limit), tuple(faults))


def write_instance(problem: Problem, path: Path, name: str) -> None:
    """Writes a problem; its nodes keep their numbers, nodes for more lives and for the base come after them."""
    intervals: list[list[int]] = [[0, 0] for _ in problem.costs]
    costs = [_units(c) for c in problem.costs]
    usages: list[list[int]] = [[0] * len(c) for c in problem.costs]
    scopes = [[i, j] for i, j in problem.edges]
    tables = [_units(e.ravel()) for e in problem.edges.values()]
    taken: set[int] = set()
    for u in problem.usages:
        nbytes = [math.ceil(n) for n in u.nbytes.tolist()]
        if u.node not in taken:
            taken.add(u.node)
            intervals[u.node], usages[u.node] = [u.start, u.end], nbytes
            continue
        n = len(nbytes)
        scopes.append([u.node, len(costs)])
        tables.append([0 if s == t else int(NEVER) for s in range(n) for t in range(n)])
        intervals.append([u.start, u.end])
        costs.append([0] * n)
        usages.append(nbytes)
    for start, end, nbytes in _runs(problem.base):
        intervals.append([start, end])
        costs.append([0])
        usages.append([nbytes])
    limit = sum(map(max, usages)) if problem.limit is None else math.floor(problem.limit)
    body = {
        "name": name,
        "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
        "edges": {"nodes": scopes, "costs": tables},
        "usage_limit": limit,
        "cost_unit": UNIT_S,
    }
    text = json.dumps({"problem": body}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def _units(seconds: Floats) -> list[int]:
    return [round(c / UNIT_S) if math.isfinite(c) else int(NEVER) for c in seconds.tolist()]


def _runs(base: Floats) -> Iterator[tuple[int, int, int]]:
    """(start, end, bytes) of the stretches over which bytes that are always there stay the same."""
    start = 0
    for t in range(1, len(base) + 1):
        if t == len(base) or base[t] != base[start]:
            if base[start] > 0:
                yield start, t, math.ceil(base[start])
            start = t
