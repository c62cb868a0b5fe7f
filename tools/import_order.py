"""Holds the floor plan: what may import what, and where private JAX may be used.

    errors, jax_compat < ir < cluster < timeline, schedules < plan < costmodel < passes < search < runtime < api < demo
        < cli

A unit is one of these: a folder of `autoshard` or a module directly in it. Every import is read from the syntax tree,
wherever it stands (in functions and under TYPE_CHECKING too). Refused are:

    upward        a unit imports one that stands later in the order
    deep          a module imports from inside another folder instead of from its face (`autoshard.ir.graph`)
    private-jax   `jax._src` or `jaxlib` or a comparison with JAX's version outside jax_compat.py
    bare          `passes`, `costmodel` or `runtime` by the name of the symlink at the top
    face          logic or a star import in an `__init__.py`, or a name not handed on as `from .x import Y as Y`
    long          a file of more than 600 lines
    unknown       a unit that is not on the floor plan

Examples, bench and tools are users: they may import everything that has a face. Tests may also import deep.

    python tools/import_order.py [ROOT]
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

FLOORS = (
    ("errors",),
    ("jax_compat", "loops"),
    ("ir",),
    ("hardware",),  # what cluster.py hands on
    ("cluster",),
    ("timeline", "schedules"),
    ("plan", "show", "report"),  # a plan prints itself with show.py, which reads plans
    ("dump",),
    ("costmodel",),
    ("passes",),
    ("search",),
    ("runtime", "calibrate"),
    ("api",),
    ("__init__",),  # the package's own face
    ("load",),
    ("demo",),
    ("cli_calibrate",),
    ("cli_learn",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {unit: number for number, units in enumerate(FLOORS) for unit in units}
PACKAGE = "autoshard"
USERS = ("examples", "bench", "tools", "tests")
SYMLINKS = ("passes", "costmodel", "runtime")
PRIVATE_JAX = ("jax._src", "jaxlib")
VERSIONS = ("jax.__version__", "jax.__version_info__")
COMPAT = "autoshard/jax_compat.py"
MAX_LINES = 600
UNKNOWN = "is not on the floor plan; give it a place in tools/import_order.py"


@final
@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing refused.

    Attributes:
      path: of the file, from the root.
      line: from 1.
      rule: see the module's docstring.
      message: what was found and what to do.
    """

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@final
@dataclass(frozen=True, slots=True)
class Import:
    """`import module` (name None) or `from module import name`, relative ones resolved."""

    line: int
    module: str
    name: str | None

    @property
    def dotted(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


def check(root: Path) -> list[Problem]:
    """All problems of the repository at `root`, sorted."""
    problems: list[Problem] = []
    for folder in (PACKAGE, *USERS):
        for path in sorted((root / folder).rglob("*.py")):
            problems += check_file(root, path)
    return sorted(problems)


def check_file(root: Path, path: Path) -> list[Problem]:
    """Problems of one file."""
    name = path.relative_to(root).as_posix()
    text = path.read_text(encoding="utf-8")
    found: list[tuple[int, str, str]] = []
    lines = text.count("\n")
    if lines > MAX_LINES:
        found.append((MAX_LINES + 1, "long", f"{lines} lines; split it before {MAX_LINES}"))
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [Problem(name, error.lineno or 1, "syntax", str(error.msg))]
    imports = list(_imports(tree, path.relative_to(root)))
    found += _check_outside(name, tree, imports)
    if name.startswith(f"{PACKAGE}/"):
        found += _check_order(root, name, imports)
    if not name.startswith("tests/"):
        found += _check_deep(root, name, imports)
    if path.name == "__init__.py":
        found += _check_face(tree)
    return [Problem(name, *each) for each in sorted(set(found))]


def _imports(tree: ast.Module, path: Path) -> Iterator[Import]:
    """Every import of a file, relative ones made absolute."""
    package = path.parent.parts
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(node.lineno, alias.name, None)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else ()
                dotted = ".".join((*base, *(module.split(".") if module else ())))
                for alias in names:
                    yield Import(node.lineno, dotted, alias.name)
            case _:
                pass


def _under(dotted: str, prefix: str) -> bool:
    return dotted == prefix or dotted.startswith(f"{prefix}.")


def _check_outside(name: str, tree: ast.Module, imports: Sequence[Import]) -> Iterator[tuple[int, str, str]]:
    """Private JAX and the symlinks' names."""
    for each in imports:
        if each.module.split(".")[0] in SYMLINKS:
            todo = f"import {PACKAGE}.{each.module}; the folder at the top is a symlink"
            yield each.line, "bare", f"{each.module}: {todo}"
        if name != COMPAT and any(_under(each.dotted, private) for private in PRIVATE_JAX):
            yield each.line, "private-jax", f"{each.dotted}: move its use to {COMPAT}"
    if name == COMPAT:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _dotted(node) in PRIVATE_JAX:
            yield node.lineno, "private-jax", f"{_dotted(node)}: move its use to {COMPAT}"
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                part = side.value if isinstance(side, ast.Subscript) else side
                if _dotted(part) in VERSIONS:
                    yield node.lineno, "private-jax", f"{_dotted(part)} compared: version switches live in {COMPAT}"


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute of a name, "" of any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            base = _dotted(value)
            return f"{base}.{attr}" if base else ""
        case _:
            return ""


def _unit(root: Path, each: Import) -> tuple[str, str] | None:
    """(unit, path inside it) that an import names, or None where it is not one of ours."""
    parts = each.dotted.split(".")
    if parts[0] != PACKAGE:
        return None
    rest = parts[1:]
    if not rest or not _is_module(root, (PACKAGE, rest[0])):
        return "__init__", ""
    depth = 1
    while depth < len(rest) and _is_module(root, (PACKAGE, *rest[: depth + 1])):
        depth += 1
    # A face may hand on a name that is a module's too, as in `from .verify import verify as verify`.
    if each.name is not None and len(rest) == 2 and each.name in _handed_on(root / PACKAGE / rest[0] / "__init__.py"):
        depth = 1
    return rest[0], ".".join(rest[1:depth])


@functools.cache
def _handed_on(face: Path) -> frozenset[str]:
    """Names that a folder's `__init__.py` hands on."""
    if not face.is_file():
        return frozenset()
    tree = ast.parse(face.read_text(encoding="utf-8"))
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return frozenset(alias.asname or alias.name for node in froms for alias in node.names)


def _is_module(root: Path, parts: Sequence[str]) -> bool:
    path = root.joinpath(*parts)
    return path.with_suffix(".py").is_file() or path.is_dir()


def _own_unit(name: str) -> str:
    """The unit a file of the package belongs to."""
    return Path(name).parts[1].removesuffix(".py")


def _check_order(root: Path, name: str, imports: Sequence[Import]) -> Iterator[tuple[int, str, str]]:
    """Never upward."""
    own = _own_unit(name)
    if own not in FLOOR_OF:
        yield 1, "unknown", f"{own} {UNKNOWN}"
        return
    for each in imports:
        target = _unit(root, each)
        if target is None or target[0] == own:
            continue
        if target[0] not in FLOOR_OF:
            yield each.line, "unknown", f"{target[0]} {UNKNOWN}"
        elif FLOOR_OF[target[0]] > FLOOR_OF[own]:
            yield each.line, "upward", f"{own} imports {each.dotted}, which stands above it"


def _check_deep(root: Path, name: str, imports: Sequence[Import]) -> Iterator[tuple[int, str, str]]:
    """Only faces across folders."""
    own = _own_unit(name) if name.startswith(f"{PACKAGE}/") else None
    for each in imports:
        target = _unit(root, each)
        if target is None or target[0] == own or not target[1]:
            continue
        face = f"{PACKAGE}.{target[0]}"
        yield each.line, "deep", f"{face}.{target[1]} from outside; hand the name on in {face} and import it there"


def _check_face(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """An `__init__.py` only hands names on."""
    for position, node in enumerate(tree.body):
        match node:
            case ast.Expr(value=ast.Constant(value=str())) if position == 0:
                pass
            case ast.ImportFrom(module="__future__"):
                pass
            case ast.ImportFrom(names=names):
                for alias in names:
                    if alias.asname != alias.name:
                        yield node.lineno, "face", f"write `from .x import {alias.name} as {alias.name}`"
            case _:
                yield node.lineno, "face", "only a docstring and `from .x import Y as Y`; move the rest to a module"


def main(arguments: Sequence[str]) -> int:
    """Prints the problems; 1 if there are any."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not (root / PACKAGE).is_dir():
        print(f"{root} has no folder {PACKAGE}: give the repository's root", file=sys.stderr)
        return 2
    problems = check(root)
    for problem in problems:
        print(problem)
    print(f"import order: {len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
