"""One table of a TOML file, read field by field; an error names file, line, table and field."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, final

from autoshard.errors import ClusterError, explain
from autoshard.hardware.toml_lines import Place, nearest_line, toml_lines

T = TypeVar("T")

MAY_BE_ZERO = ("l2_bytes", "kernel_launch_s", "collective_launch_s", "latency_s")
"""Numbers that need not be above zero."""


@final
@dataclass(frozen=True, slots=True)
class TomlTable:
    """One table.

    Attributes:
      file: path of the file.
      lines: where its keys stand.
      place: of this table; empty for the file itself.
      data: its fields.
    """

    file: str
    lines: Mapping[Place, int]
    place: Place
    data: Mapping[str, Any]

    @property
    def where(self) -> str:
        """The table's name for messages: the file, [links.nvlink], [[nodes]] number 2."""
        match self.place:
            case ():
                return "the file"
            case (str(name), int(position)):
                return f"[[{name}]] number {position + 1}"
            case _:
                return "[" + ".".join(_key_text(part) for part in self.place) + "]"

    def line(self, name: str = "") -> int:
        """The line of a field, or of the table where the field is not there."""
        return nearest_line(self.lines, (*self.place, name) if name else self.place)

    def fail(self, name: str, given: str, expected: str, todo: str) -> ClusterError:
        """An error at the line of a field, or of the table where the field is not there."""
        return ClusterError(explain(f"{self.file}:{self.line(name)}: {self.where}: {given}", expected, todo))

    def only(self, *names: str) -> None:
        """Refuses names that mean nothing."""
        for name in self.data:
            if name in names:
                continue
            close = difflib.get_close_matches(name, names, 1)
            todo = f"did you mean {close[0]!r}?" if close else "remove it"
            raise self.fail(name, f"{name!r} is not known", "one of " + ", ".join(names), todo)

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return name in self.data

    def need(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self.data:
            raise self.fail("", f"{name!r} is missing", f"a value for {name}", f"add a line {name} = ...")
        return self.data[name]

    def table(self, name: str) -> TomlTable:
        """A table in this one, empty where it is not there."""
        value = self.data.get(name, {})
        inner = TomlTable(self.file, self.lines, (*self.place, name), {})
        if not isinstance(value, dict):
            where = inner.where
            raise self.fail(name, f"{name} = {value!r}", f"a table {where}", f"write {where} and its fields below it")
        return TomlTable(self.file, self.lines, inner.place, cast("dict[str, Any]", value))

    def rows(self, name: str, fields: str) -> tuple[TomlTable, ...]:
        """The tables of an array of tables, none where it is not there."""
        rows = self.data.get(name, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in cast("list[Any]", rows)):
            raise self.fail(name, f"{name} = {rows!r}", f"tables [[{name}]]", f"write [[{name}]] with {fields}")
        tables = cast("list[dict[str, Any]]", rows)
        return tuple(TomlTable(self.file, self.lines, (*self.place, name, k), row) for k, row in enumerate(tables))

    def text(self, name: str) -> str:
        """A field that is a text."""
        value = self.need(name)
        if not isinstance(value, str):
            raise self.fail(name, f"{name} = {value!r}", "a text in quotes", f"correct {name}")
        return value

    def boolean(self, name: str) -> bool:
        """A field that is true or false."""
        value = self.need(name)
        if not isinstance(value, bool):
            raise self.fail(name, f"{name} = {value!r}", "true or false", f"correct {name}")
        return value

    def number(self, name: str) -> float:
        """A field that is a finite number above zero, or not below it (`MAY_BE_ZERO`)."""
        value = self.need(name)
        zero = name in MAY_BE_ZERO
        if isinstance(value, bool) or not isinstance(value, int | float) or not _usable(value, zero):
            expected = "a finite number, 0 or more" if zero else "a finite number above 0"
            raise self.fail(name, f"{name} = {value!r}", expected, f"correct {name}")
        return value

    def share(self, name: str) -> float:
        """A field that is a number above zero and at most one."""
        value = self.number(name)
        if value > 1:
            raise self.fail(name, f"{name} = {value!r}", "a share above 0 and at most 1", f"correct {name}")
        return float(value)

    def integer(self, name: str) -> int:
        """A field that is a whole number."""
        value = self.number(name)
        if value != int(value):
            raise self.fail(name, f"{name} = {value!r}", "a whole number", f"correct {name}")
        return int(value)

    def pick(self, name: str, known: Mapping[str, T], tables: str) -> T:
        """What a field's text stands for."""
        text = self.text(name)
        if text in known:
            return known[text]
        close = difflib.get_close_matches(text, known, 1)
        raise self.fail(
            name,
            f"{name} = {text!r} is not defined",
            "one of " + (", ".join(known) or f"the [{tables}.NAME] tables (there are none)"),
            f"did you mean {close[0]!r}?" if close else f"add a table [{tables}.{_key_text(text)}]",
        )

    def tables(self, name: str) -> Iterator[tuple[str, TomlTable]]:
        """The tables in a table of this one: [links.a] and [links.b] for "links"."""
        outer = self.table(name)
        for each in outer.data:
            yield each, outer.table(each)


def read_toml(path: Path) -> TomlTable:
    """The whole of a file.

    Raises:
      ClusterError: the file cannot be read, or is no TOML.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ClusterError(
            explain(f"cluster file {path}: {error.strerror}", "a readable file", "check the path")
        ) from error
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
        data = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise _no_toml(path, raw.count(b"\n", 0, error.start) + 1, error) from error
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"at line (\d+)", str(error))
        line = int(match[1]) if match else raw.count(b"\n", 0, len(raw.rstrip())) + 1
        raise _no_toml(path, line, error) from error
    return TomlTable(str(path), toml_lines(text), (), data)


def _no_toml(path: Path, line: int, error: Exception) -> ClusterError:
    return ClusterError(explain(f"{path}:{line}: this is no TOML: {error}", "a TOML file", "correct that line"))


def _usable(value: float, zero: bool) -> bool:
    try:
        return math.isfinite(value) and (value > 0 or (zero and value == 0))
    except OverflowError:  # a whole number that no float holds
        return False


def _key_text(key: str | int) -> str:
    """A key as one writes it."""
    text = str(key)
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else json.dumps(text, ensure_ascii=False)
