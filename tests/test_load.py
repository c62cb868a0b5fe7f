"""Steps and inputs found by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.errors import ArgumentError
from autoshard.load import load_step

SOURCE = """
import neighbour

def train_step(state, batch, *, rate=0.1):
    return neighbour.double(state) + batch * rate

inputs = (1, 2)
keywords = {"state": 1, "batch": 2}

def both():
    return (1,), {"batch": 2}

def pair():
    return 3, {"x": 1}

wrong = [1, 2]
listed = [(1,), {}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "train_model.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    yield str(tmp_path / "train_model.py")
    for name in ("neighbour", "_autoshard_train_model"):
        sys.modules.pop(name, None)


def test_a_file(file: str) -> None:
    before = list(sys.path)
    step, args, kwargs = load_step(f"{file}:train_step")
    assert (args, kwargs) == ((1, 2), {})
    assert step(*args, rate=1) == 4
    assert sys.path == before


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        ("inputs", (1, 2), {}),
        ("keywords", (), {"state": 1, "batch": 2}),
        ("both", (1,), {"batch": 2}),
        ("pair", (3, {"x": 1}), {}),
    ],
)
def test_forms_of_inputs(file: str, inputs: str, args: object, kwargs: object) -> None:
    assert load_step(f"{file}:train_step", inputs)[1:] == (args, kwargs)


def test_a_module(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(file).parent))
    step, args, _ = load_step("train_model:train_step")
    assert step.__module__ == "train_model"
    assert args == (1, 2)
    sys.modules.pop("train_model")


@pytest.mark.parametrize(
    ("target", "inputs", "given", "todo"),
    [
        ("train_step", "inputs", "'train_step'", "name the step after a colon"),
        ("FILE:", "inputs", "train_model.py:'", "name the step after a colon"),
        (":train_step", "inputs", "':train_step'", "name the step after a colon"),
        ("FILE:train_stap", "inputs", "train_model.py has no 'train_stap'.\n  expected: one of train_step", "correct"),
        ("FILE:train_step", "zzz", "has no 'zzz'.\n  expected: a name defined there (", "or define it"),
        ("FILE:inputs", "inputs", "is a tuple", "name the train step"),
        ("FILE:train_step", "wrong", "train_model.py:wrong gives a list", "return the arguments of one call"),
        ("FILE:train_step", "listed", "train_model.py:listed gives a list", "return the arguments of one call"),
        ("FOLDER/train_modl.py:train_step", "inputs", "no such file", "did you mean train_model.py?"),
        ("/nowhere/step.py:train_step", "inputs", "/nowhere/step.py: no such file", "check the path"),
        ("no.such.module:step", "inputs", "module 'no.such.module': No module named 'no'", "give the path of a .py"),
    ],
)
def test_what_is_not_there_is_named(file: str, target: str, inputs: str, given: str, todo: str) -> None:
    target = target.replace("FILE", file).replace("FOLDER", str(Path(file).parent))
    with pytest.raises(ArgumentError) as error:
        load_step(target, inputs)
    message = str(error.value)
    assert given in message
    assert "expected: " in message
    assert f"to do: {todo}" in message or todo in message


def test_errors_of_the_file_itself_are_raised_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('mine')\n")
    before = list(sys.path)
    with pytest.raises(RuntimeError, match="mine"):
        load_step(f"{tmp_path / 'broken.py'}:step")
    assert sys.path == before
    assert "_autoshard_broken" not in sys.modules
