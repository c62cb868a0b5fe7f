"""Dumps: one numbered, readable file for each item."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.dump import Dumper, dump_folder
from autoshard.errors import ArgumentError
from autoshard.ir import print_graph
from autoshard.plan import Plan
from tests.problems import mlp


def test_planning_writes_every_part(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "step-00"
    plan = mlp().plan((8,), on_event=Dumper(folder))
    names = sorted(path.name for path in folder.iterdir())
    assert [name[:3] for name in names] == [f"{i:03d}" for i in range(len(names))]
    assert names[0] == "000-duplicate_cheap.txt"
    assert names[-2:] == [f"{len(names) - 2:03d}-plan.json", f"{len(names) - 1:03d}-plan.txt"]
    assert any("mesh" in name for name in names)
    assert Plan.from_json((folder / names[-2]).read_text()) == plan
    assert (folder / names[-1]).read_text() == str(plan)


def test_items_by_kind(tmp_path: Path) -> None:
    dump = Dumper(tmp_path)
    graph = mlp().graph()
    dump("trace", graph)
    dump("stablehlo-before", "module {}")
    dump("search: 2 x 4", ("data", 2))
    assert (tmp_path / "000-trace.txt").read_text() == print_graph(graph, sources=True)
    assert "problems.py:" in (tmp_path / "000-trace.txt").read_text()
    assert (tmp_path / "001-stablehlo-before.mlir").read_text() == "module {}"
    assert (tmp_path / "002-search_2_x_4.txt").read_text() == "('data', 2)\n"


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError) as error:
        Dumper(tmp_path / "file" / "sub")
    assert "dump_dir" in str(error.value)
    assert "expected: a folder that can be written" in str(error.value)
    assert "to do: name another dump_dir" in str(error.value)


def test_folders_of_signatures() -> None:
    assert dump_folder("dumps", "train_step", 0) == Path("dumps/train_step-00")
    assert dump_folder("dumps", "Model.<locals>.step", 12) == Path("dumps/Model._locals_.step-12")
