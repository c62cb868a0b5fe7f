"""tools/import_order.py: the repository passes, and each kind of bad input fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_order import FLOOR_OF, check, main

REPOSITORY = Path(__file__).resolve().parent.parent


def build(root: Path, files: dict[str, str]) -> Path:
    """A small repository on the floor plan, with these files added or replaced."""
    skeleton = {
        "autoshard/__init__.py": '"""Face."""\n\nfrom .api import autoshard as autoshard\n',
        "autoshard/errors.py": "",
        "autoshard/jax_compat.py": "import jax\nfrom jax._src import core\nOLD = jax.__version_info__ < (0, 11)\n",
        "autoshard/ir/__init__.py": '"""Face."""\n\nfrom .graph import Graph as Graph\n',
        "autoshard/ir/graph.py": "from autoshard.errors import AutoshardError\nclass Graph: pass\n",
        "autoshard/ir/trace.py": "from autoshard.ir.graph import Graph\nfrom .graph import Graph\n",
        "autoshard/passes/__init__.py": "",
        "autoshard/passes/cut.py": "import jax\nfrom autoshard import jax_compat\nfrom autoshard.ir import Graph\n",
        "autoshard/api.py": "from autoshard.passes import *\nimport autoshard.ir\n",
        "autoshard/cli.py": "from autoshard import autoshard\n",
        "examples/mlp.py": "from autoshard import autoshard\nimport jax\nprint(jax.__version__)\n",
        "tests/ir/test_graph.py": "from autoshard.ir.graph import Graph\n",
    }
    for name, text in {**skeleton, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_repository() -> None:
    assert [str(problem) for problem in check(REPOSITORY)] == []


def test_skeleton_is_clean(tmp_path: Path) -> None:
    assert check(build(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("name", "text", "rule", "line"),
    [
        ("autoshard/ir/bad.py", "import jax\nfrom autoshard.passes import Cut\n", "upward", 2),
        ("autoshard/ir/bad.py", "from autoshard import autoshard\n", "upward", 1),
        ("autoshard/ir/bad.py", "from ..passes import X\n", "upward", 1),
        ("autoshard/ir/bad.py", "from .. import api\n", "upward", 1),
        ("autoshard/ir/bad.py", "import autoshard.api\n", "upward", 1),
        ("autoshard/ir/bad.py", "def f():\n    from autoshard.api import autoshard\n", "upward", 2),
        (
            "autoshard/ir/bad.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from autoshard.passes import X\n",
            "upward",
            3,
        ),
        ("autoshard/errors.py", "from autoshard import jax_compat\n", "upward", 1),
        ("autoshard/passes/bad.py", "from autoshard.ir.graph import Graph\n", "deep", 1),
        ("autoshard/passes/bad.py", "from autoshard.ir import graph\n", "deep", 1),
        ("autoshard/passes/bad.py", "import autoshard.ir.graph as g\n", "deep", 1),
        ("autoshard/passes/bad.py", "from ..ir.graph import Graph\n", "deep", 1),
        ("autoshard/cli.py", "from autoshard.ir.graph import Graph\n", "deep", 1),
        ("examples/bad.py", "from autoshard.ir.graph import Graph\n", "deep", 1),
        ("autoshard/passes/bad.py", "from jax._src import core\n", "private-jax", 1),
        ("autoshard/passes/bad.py", "import jax._src.core\n", "private-jax", 1),
        ("autoshard/passes/bad.py", "from jax import _src\n", "private-jax", 1),
        ("autoshard/passes/bad.py", "from jaxlib.mlir import ir\n", "private-jax", 1),
        ("autoshard/passes/bad.py", "import jax\nx = jax._src.core.Jaxpr\n", "private-jax", 2),
        ("autoshard/passes/bad.py", "import jax\nif jax.__version_info__ > (0, 11):\n    pass\n", "private-jax", 2),
        ("autoshard/ir/bad.py", "import jax\nif (0, 11) > jax.__version_info__[:2]:\n    pass\n", "private-jax", 2),
        ("tests/bad.py", "from jax._src import core\n", "private-jax", 1),
        ("tests/bad.py", "from passes import cut\n", "bare", 1),
        ("autoshard/api.py", "import costmodel.roofline\n", "bare", 1),
        ("autoshard/ir/__init__.py", "from .graph import Graph\n", "face", 1),
        ("autoshard/ir/__init__.py", "from .graph import *\n", "face", 1),
        ("autoshard/ir/__init__.py", "from .graph import Graph as Graph\nX = 1\n", "face", 2),
        ("autoshard/ir/long.py", "x = 1\n" * 601, "long", 601),
        ("autoshard/novel.py", "", "unknown", 1),
        ("autoshard/ir/bad.py", "def f(:\n", "syntax", 1),
    ],
)
def test_refused(tmp_path: Path, name: str, text: str, rule: str, line: int) -> None:
    problems = check(build(tmp_path, {name: text}))
    assert [(p.path, p.line, p.rule) for p in problems] == [(name, line, rule)]


def test_import_of_an_unknown_unit(tmp_path: Path) -> None:
    root = build(tmp_path, {"autoshard/novel.py": "", "autoshard/api.py": "from autoshard.novel import x\n"})
    assert [(p.path, p.rule) for p in check(root)] == [
        ("autoshard/api.py", "unknown"),
        ("autoshard/novel.py", "unknown"),
    ]


def test_600_lines_pass(tmp_path: Path) -> None:
    assert check(build(tmp_path, {"autoshard/ir/long.py": "x = 1\n" * 600})) == []


def test_a_face_hands_on_a_name_that_is_a_module_too(tmp_path: Path) -> None:
    user = {"autoshard/passes/cut.py": "from autoshard.ir import verify\n", "autoshard/ir/verify.py": ""}
    assert [p.rule for p in check(build(tmp_path / "hidden", user))] == ["deep"]
    face = {"autoshard/ir/__init__.py": "from .verify import verify as verify\n"}
    assert check(build(tmp_path / "handed-on", {**user, **face})) == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build(tmp_path, {"autoshard/ir/bad.py": "import autoshard.api\n"})
    assert main([str(root)]) == 1
    printed = capsys.readouterr().out
    assert printed == (
        "autoshard/ir/bad.py:1: upward: ir imports autoshard.api, which stands above it\nimport order: 1 problem\n"
    )
    assert main([str(build(tmp_path, {"autoshard/ir/bad.py": ""}))]) == 0
    assert main([str(tmp_path / "autoshard" / "ir")]) == 2


def test_order_is_the_floor_plan() -> None:
    floor_plan = "errors, jax_compat < ir < cluster < plan < costmodel < passes < search < runtime < api < cli"
    units = floor_plan.replace(",", " <").split(" < ")
    assert sorted(units, key=FLOOR_OF.__getitem__) == units
