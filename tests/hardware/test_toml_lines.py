"""Lines of keys in TOML files."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.hardware.toml_lines import Place, nearest_line, toml_lines

AWKWARD = '''\
# [not.a.table]
name = "[links.fake]"          # x = 1
text = """
[links.nvlink]
bytes_per_s = 1
\\"""
also = "text" """
raw = \'\'\'
[[nodes]] \'\'
\'\'\'\'
"quoted key" . 'and = ] this'.bare = 2
list = [ 1, # one ]
  "two, ]", [
    3,
    { a = 1, b.c = [ 2, { d = "}" } ] },
  ],
]

[links . "my link"]
a.b = 1
a.c = 2
[[nodes]]
x = 1
[nodes.inner]
y = 1
[[nodes.rows]]
[[nodes.rows]]
z = 1979-05-27 07:32:00
[[nodes]]
x = "" # an empty one
y = """"quoted""""
[links]
c = 1
'''


def test_awkward_file() -> None:
    tomllib.loads(AWKWARD)
    lines = toml_lines(AWKWARD)
    expected: dict[Place, int] = {
        ("name",): 2,
        ("text",): 3,
        ("raw",): 8,
        ("quoted key",): 11,
        ("quoted key", "and = ] this", "bare"): 11,
        ("list",): 12,
        ("list", 0): 12,
        ("list", 1): 13,
        ("list", 2, 0): 14,
        ("list", 2, 1, "a"): 15,
        ("list", 2, 1, "b", "c", 1, "d"): 15,
        ("links",): 32,
        ("links", "my link"): 19,
        ("links", "my link", "a"): 20,
        ("links", "my link", "a", "c"): 21,
        ("nodes",): 22,
        ("nodes", 0): 22,
        ("nodes", 0, "x"): 23,
        ("nodes", 0, "inner", "y"): 25,
        ("nodes", 0, "rows", 0): 26,
        ("nodes", 0, "rows", 1, "z"): 28,
        ("nodes", 1, "x"): 30,
        ("nodes", 1, "y"): 31,
        ("links", "c"): 33,
    }
    assert {place: lines.get(place) for place in expected} == expected


def test_every_value_has_a_line() -> None:
    assert places(tomllib.loads(AWKWARD)) <= set(toml_lines(AWKWARD))


def places(value: Any, place: Place = ()) -> set[Place]:
    if isinstance(value, dict):
        items: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return {place}
    inner = {each for key, item in items for each in places(item, (*place, key))}
    return inner | {place} if place else inner


def test_nearest_line() -> None:
    lines = toml_lines("\n[a]\nb = 1\n")
    assert nearest_line(lines, ("a", "b")) == 3
    assert nearest_line(lines, ("a", "c", 0)) == 2
    assert nearest_line(lines, ("z",)) == 1
    assert nearest_line(lines, ()) == 1


texts = st.text(st.sampled_from("ab=[]{}#,.'\"\\\n é"), max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(texts, texts, st.booleans()), max_size=6))
def test_strings_hide_what_looks_like_keys(rows: list[tuple[str, str, bool]]) -> None:
    """Keys and values of any characters: each key is found where it was written."""
    written: list[str] = []
    expected: dict[Place, int] = {}
    line = 1
    for k, (key, value, table) in enumerate(rows):
        name = f"{k}{key}"
        text = f"[{quoted(name)}]\nx = {quoted(value)}\n" if table else f'{quoted(name)} = """\\\n{escaped(value)}"""\n'
        if table or any(row[2] for row in rows[:k]):
            text = f"[{quoted(name)}]\nx = [{quoted(value)},\n{quoted(name)}]\n"
            expected[(name,)], expected[(name, "x", 1)] = line, line + 2
        else:
            expected[(name,)] = line
        written.append(text)
        line += text.count("\n")
    whole = "".join(written)
    tomllib.loads(whole)
    lines = toml_lines(whole)
    assert {place: lines.get(place) for place in expected} == expected


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def quoted(text: str) -> str:
    return '"' + escaped(text).replace("\n", "\\n") + '"'
