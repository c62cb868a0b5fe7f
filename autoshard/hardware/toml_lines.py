"""Where in a TOML file each key stands: tomllib reads the values but keeps no lines.

The scanner runs over text that tomllib has accepted, so it only has to find where things end:

    file       ::= ( header | pair )*
    header     ::= "[" key "]" | "[[" key "]]"
    pair       ::= key "=" value
    key        ::= part ( "." part )*            part bare, "basic" or 'literal'
    value      ::= string | "[" ( value "," )* "]" | "{" ( pair "," )* "}"
                 | anything else, up to a comma, bracket, brace, "#" or the line's end

A place is a tuple of keys and, in arrays, positions: ("nodes", 1, "device") is `device` of the second [[nodes]].
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import final

Place = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}(?!")'  # up to two quotes may stand before the closing three
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'",
    re.DOTALL,
)
_BARE = re.compile(r"[^\s.=\]\"'#]+")
_SCALAR = re.compile(r"[^,\]}#\n]*")


def toml_lines(text: str) -> Mapping[Place, int]:
    """The line, from 1, on which each table's header and each key of a file stands.

    A table that only its parts name, `a` in [a.b], stands where the first of them does.

    Args:
      text: what `tomllib.loads` accepts.
    """
    return _Scanner(text).lines


def nearest_line(lines: Mapping[Place, int], place: Place) -> int:
    """The line of a place, of the table it would be in where it is not there, or 1."""
    for length in range(len(place), 0, -1):
        if place[:length] in lines:
            return lines[place[:length]]
    return 1


@final
class _Scanner:
    """One run over a text, which fills `lines`."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Place, int] = {}
        self._text = text
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._at = 0
        self._lengths: dict[Place, int] = {}  # of arrays of tables
        base: Place = ()
        while self._skip(_SPACE) < len(text):
            if self._peek("["):
                base = self._header()
            else:
                self._pair(base)

    def _header(self) -> Place:
        line, many = self._line(), self._peek("[[")
        self._at += 2 if many else 1
        keys = self._key()
        self._at += 2 if many else 1
        place: Place = ()
        for key in keys[:-1]:
            place = self._last(self._note((*place, key), line))
        place = self._note((*place, keys[-1]), line)
        if not many:
            self.lines[place] = line
            return place
        self._lengths[place] = self._lengths.get(place, 0) + 1
        return self._note(self._last(place), line)

    def _last(self, place: Place) -> Place:
        """A table itself, or the newest one of an array of tables."""
        return (*place, self._lengths[place] - 1) if place in self._lengths else place

    def _pair(self, base: Place) -> None:
        line = self._line()
        place = base
        for key in self._key():
            place = self._note((*place, key), line)
        self._at += 1  # "="
        self._value(place)

    def _value(self, place: Place) -> None:
        self._skip(_SPACE)
        if self._peek("["):
            for position in self._items("]"):
                self._value(self._note((*place, position), self._line()))
        elif self._peek("{"):
            for _ in self._items("}"):
                self._pair(place)
        elif self._skip_string() is None:
            self._skip(_SCALAR)

    def _items(self, end: str) -> Iterator[int]:
        """Positions of the items of an array or inline table; the caller moves over each."""
        self._at += 1
        position = 0
        self._skip(_SPACE)
        while not self._peek(end):
            yield position
            position += 1
            self._skip(_SPACE)
            if self._peek(","):
                self._at += 1
                self._skip(_SPACE)
        self._at += 1

    def _key(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            quoted = self._skip_string()
            if quoted is not None:
                keys.append(tomllib.loads(f"x = {quoted}")["x"])
            else:
                start = self._at
                keys.append(self._text[start : self._skip(_BARE)])
            self._skip(_BLANK)
            if not self._peek("."):
                return keys
            self._at += 1

    def _note(self, place: Place, line: int) -> Place:
        self.lines.setdefault(place, line)
        return place

    def _line(self) -> int:
        return bisect_right(self._starts, self._at)

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self._at)
        assert match is not None, f"a key was expected on line {self._line()} of a file that tomllib has read"
        self._at = match.end()
        return self._at

    def _skip_string(self) -> str | None:
        match = _STRING.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[0]
