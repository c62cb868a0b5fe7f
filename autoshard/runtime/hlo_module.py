"""Text of a compiled HLO module, taken apart: computations, instructions, types and device groups.

Only what XLA prints is read; nothing is known of what instructions mean, except how control flow nests. The text is
that of `compiled.as_text()` of jax 0.10 to 0.12 on CPU and GPU:

    module       ::= "HloModule" name attributes, tables of stack frames, computation*
    computation  ::= ["ENTRY"] name (parameters) -> type "{" instruction* "}"
    instruction  ::= ["ROOT"] name "=" type opcode "(" operands ")" attributes
    groups       ::= {{0,1},{2,3}} | [2,2]<=[4] | [2,2]<=[2,2]T(1,0) | mesh['a'=2,'b'=2] {'b'}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np

from autoshard.errors import CompileError, explain

Groups = tuple[tuple[int, ...], ...]
"""Devices that talk to one another, group by group."""

_TYPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<= ]*)\]")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?(%?[\w.\-~$]+) = ")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?(%?[\w.\-~$]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|called_computations|branch_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|%?[\w.\-~$]+)"
)
_TRIP_COUNT = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)"?')
_OPERAND = re.compile(r"%?([\w.\-~$]+)\s*$")
_COMMENT = re.compile(r"/\*.*?\*/")

_BITS: Mapping[str, int] = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32, "c64": 64, "c128": 128}
"""Types whose name does not begin with letters and then its number of bits."""


@final
@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
      name: without the percent sign.
      opcode: e.g. "all-reduce-start".
      type: of the result, as printed.
      operands: names.
      operand_text: what stands between the parentheses.
      attributes: everything behind them.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    operand_text: str
    attributes: str

    def called(self) -> tuple[tuple[str, str], ...]:
        """(role, computation) of everything it calls; roles are the attributes' names."""
        found: list[tuple[str, str]] = []
        for match in _CALLED.finditer(self.attributes):
            for name in match[2].strip("{}").split(","):
                if name.strip():
                    found.append((match[1], name.strip().lstrip("%")))
        return tuple(found)


@final
@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in the order printed, which is the order they run in where the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    def find(self, name: str) -> Instruction | None:
        """The instruction of a name."""
        return next((x for x in self.instructions if x.name == name), None)


@final
@dataclass(frozen=True, slots=True)
class Module:
    """A compiled module.

    Attributes:
      entry: name of the computation it starts with.
      computations: by name.
      devices: replicas times partitions.
      sources: "file:line" of each stack frame's number.
    """

    entry: str
    computations: Mapping[str, Computation]
    devices: int
    sources: Mapping[int, str]

    def walk(self) -> Iterator[tuple[Computation, int]]:
        """Each computation that runs by itself (not inside a kernel), with how often it runs in one call.

        The branches of a conditional count as if each were taken. A computation called from several places comes
        several times.
        """
        yield from self._walk(self.entry, 1)

    def _walk(self, name: str, times: int) -> Iterator[tuple[Computation, int]]:
        computation = self.computations[name]
        yield computation, times
        for instruction in computation.instructions:
            if instruction.opcode not in ("while", "conditional", "call", "async-start"):
                continue
            inner = times * (self.trip_count(instruction) if instruction.opcode == "while" else 1)
            for _, called in instruction.called():
                if called in self.computations:
                    yield from self._walk(called, inner)

    def trip_count(self, loop: Instruction) -> int:
        """How often a `while` goes round: from its annotation, else from a comparison with a constant, else 1."""
        known = _TRIP_COUNT.search(loop.attributes)
        if known is not None:
            return int(known[1])
        name = next((c for role, c in loop.called() if role == "condition"), "")
        condition = self.computations.get(name)
        if condition is None or not condition.instructions:
            return 1
        compare = next((x for x in condition.instructions if x.opcode == "compare"), None)
        if compare is None or "direction=LT" not in compare.attributes:
            return 1
        limits = (condition.find(x) for x in compare.operands)
        limit = next((x.operand_text for x in limits if x is not None and x.opcode == "constant"), "")
        return max(int(limit), 1) if limit.isdigit() else 1


def parse_module(text: str) -> Module:
    """Takes the text of a compiled module apart.

    Raises:
      CompileError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    name: str | None = None
    instructions: list[Instruction] = []
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw)
        if name is None:
            head = _COMPUTATION.match(line)
            if head is not None:
                name, instructions = head[2].lstrip("%"), []
                entry = name if head[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions))
            name = None
        else:
            instruction = _instruction(line)
            if instruction is not None:
                instructions.append(instruction)
    if not entry:
        start = text.strip().splitlines()[0][:80] if text.strip() else "nothing"
        raise CompileError(
            explain(f"a text that begins with {start!r}", "the HLO of a compiled program", "pass compiled.as_text()")
        )
    head = text.split("\n", 1)[0]
    counts = (re.search(rf"{field}=(\d+)", head) for field in ("num_partitions", "replica_count"))
    devices = math.prod(int(m[1]) for m in counts if m is not None)
    return Module(entry, computations, devices, _sources(text))


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    end = _type_end(line, head.end())
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : close]
    operands = [m[1] for part in _split(inside) if (m := _OPERAND.search(part.strip())) is not None]
    return Instruction(
        head[2].lstrip("%"), opcode[1], line[head.end() : end], tuple(operands), inside, line[close + 1 :]
    )


def _type_end(line: str, start: int) -> int:
    """Where a type ends: a tuple's parenthesis, else the next space."""
    if line.startswith("(", start):
        return _closing(line, start) + 1
    end = line.find(" ", start)
    return len(line) if end < 0 else end


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; strings are skipped."""
    depth, quoted = 0, False
    for index in range(start, len(text)):
        character = text[index]
        if character == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
            if depth == 0:
                return index
    return len(text)


def _split(text: str) -> Iterator[str]:
    """Parts at commas that stand in no bracket."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        if character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if text[start:].strip():
        yield text[start:]


def type_bytes(text: str) -> int:
    """Bytes of a printed type, tuples summed; dimensions with a bound (`<=4`) count in full."""
    total = 0
    for match in _TYPE.finditer(text):
        dims = [int(d.strip().removeprefix("<=")) for d in match[2].split(",") if d.strip()]
        total += (math.prod(dims) * _bits(match[1]) + 7) // 8
    return total


def _bits(name: str) -> int:
    """Bits of one element: `s4`, `u32`, `f8e4m3fn`, `f4e2m1fn`, `bf16`, ..."""
    if name in _BITS:
        return _BITS[name]
    match = re.match(r"[a-z]+?(\d+)", name)
    if match is None:
        raise CompileError(explain(f"the HLO type {name!r}", "a type with its bits in its name", "report this"))
    return int(match[1])


def _sources(text: str) -> dict[int, str]:
    """From the module's tables: stack frame -> "file:line"."""
    files = {int(m[1]): m[2] for m in re.finditer(r'^(\d+) "([^"]*)"$', _table(text, "FileNames"), re.M)}
    places = {
        int(m[1]): (int(m[2]), int(m[3]))
        for m in re.finditer(r"^(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", _table(text, "FileLocations"), re.M)
    }
    found: dict[int, str] = {}
    for match in re.finditer(r"^(\d+) \{file_location_id=(\d+)", _table(text, "StackFrames"), re.M):
        file, line = places.get(int(match[2]), (0, 0))
        if file in files:
            found[int(match[1])] = f"{files[file]}:{line}"
    return found


def _table(text: str, name: str) -> str:
    """The lines of one table, up to the empty line behind it."""
    match = re.search(rf"^{name}\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    return match[1] if match is not None else ""


def replica_groups(attributes: str, devices: int) -> Groups:
    """The groups of `replica_groups=`, in any of the ways XLA writes them; all devices where none are given.

    A collective-permute has `source_target_pairs` instead: its groups are the devices that its pairs link.
    """
    start = attributes.find("source_target_pairs=")
    if start >= 0:
        opened = start + len("source_target_pairs=")
        inside = attributes[opened : _closing(attributes, opened)]
        return _linked(re.findall(r"\{(\d+),(\d+)\}", inside))
    start = attributes.find("replica_groups=")
    whole = (tuple(range(devices)),)
    if start < 0:
        return whole
    text = attributes[start + len("replica_groups=") :]
    if text.startswith("{"):
        rows = re.findall(r"\{([0-9, ]+)\}", text[: _closing(text, 0) + 1])
        return tuple(tuple(int(d) for d in row.split(",")) for row in rows) or whole
    if text.startswith("["):
        match = re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
        assert match is not None, f"replica groups {text[:60]!r}"
        return _rows(_iota(match[2]).reshape(_ints(match[1])))
    return _mesh_groups(text)


def _mesh_groups(text: str) -> Groups:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`: groups along axes and parts of axes.

    `'b':(m)n` is the part of axis b that has m parts before it (major to it) and n of its own.
    """
    match = re.match(r"(?:@\w+|mesh)\[([^\]]*)\](?:,\s*device_ids=\(([^)]*(?:\([^)]*\))?)\))?\s*\{([^}]*)\}", text)
    assert match is not None, f"replica groups {text[:80]!r}"
    names = re.findall(r"['\"]?([\w.]+)['\"]?=(\d+)", match[1])
    sizes = [int(size) for _, size in names]
    ids = np.arange(math.prod(sizes))
    if match[2]:
        ids = _iota(match[2]) if match[2].startswith("[") else np.array(_ints(match[2]))
    used = re.findall(r"['\"]?([\w.]+)['\"]?(?::\((\d+)\)(\d+))?", match[3])
    order = [name for name, _ in names]
    cuts: list[list[int]] = [[1, size] for size in sizes]  # for each axis the products of its parts, ascending
    wanted: list[tuple[int, int, int]] = []
    for name, before, size in used:
        axis = order.index(name)
        first = int(before) if before else 1
        last = first * int(size) if size else sizes[axis]
        cuts[axis] = sorted({*cuts[axis], first, last})
        wanted.append((axis, first, last))
    shape: list[int] = []
    place: dict[tuple[int, int], int] = {}
    for axis, points in enumerate(cuts):
        for low, high in pairwise(points):
            place[axis, low] = len(shape)
            shape.append(high // low)
        if len(points) == 1:
            place[axis, 1] = len(shape)
            shape.append(1)
    inner = [place[a, low] for a, first, last in wanted for low in cuts[a] if first <= low < last]
    outer = [d for d in range(len(shape)) if d not in inner]
    size = math.prod(shape[d] for d in inner)
    return _rows(ids.reshape(shape).transpose(outer + inner).reshape(-1, size))


def _linked(pairs: list[tuple[str, str]]) -> Groups:
    """Connected devices of a permutation's pairs; those that only send to themselves are left out."""
    group: dict[int, set[int]] = {}
    for a, b in pairs:
        joined = group.get(int(a), {int(a)}) | group.get(int(b), {int(b)})
        for device in joined:
            group[device] = joined
    found = {tuple(sorted(g)) for g in group.values() if len(g) > 1}
    return tuple(sorted(found))


def _iota(text: str) -> np.ndarray[Any, np.dtype[Any]]:
    """`[2,4]T(1,0)`: numbers in order, laid out, transposed, flat again."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert match is not None, f"device list {text[:60]!r}"
    shape = _ints(match[1])
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return (numbers.transpose(_ints(match[2])) if match[2] else numbers).reshape(-1)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _rows(array: np.ndarray[Any, np.dtype[Any]]) -> Groups:
    return tuple(tuple(int(d) for d in row) for row in array)
