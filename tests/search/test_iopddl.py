"""The contest's own instances, where they lie beside the repository, and the command that runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.search import Progress, judge, read_instance, run_instance
from tests.search.test_contest import RAW, change, write

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "iopddl"
XLA_A = 13_214_846_074
"""Cost of XLA's own solver on A, published with the contest."""


def instance(letter: str) -> Path:
    path = DATA / f"asplos-2025-iopddl-{letter}.json.gz"
    if not path.exists():
        pytest.skip(f"the contest's instances are not beside the repository ({path.name})")
    return path


def test_the_example_is_solved() -> None:
    if not (DATA / "example.json").exists():
        pytest.skip("the contest's example is not beside the repository")
    run = run_instance(DATA / "example.json", time_limit_s=10.0, seed=0, workers=1)
    assert run.verdict is not None
    assert run.verdict.legal
    assert run.solution.gap == 0.0


def until(good: Callable[[Progress], bool]) -> Callable[[Progress], None]:
    """Ends a search as Ctrl-C does, once it is good enough: machines differ too much for a fixed time."""

    def tell(progress: Progress) -> None:
        if good(progress):
            raise KeyboardInterrupt

    return tell


def test_g_is_as_good_as_the_best_known_with_a_gap_below_one_percent() -> None:
    good = until(lambda p: p.cost < 217_040 and p.cost - p.bound < 0.009 * p.cost)
    run = run_instance(instance("G"), time_limit_s=120.0, seed=0, workers=1, tell=good)
    assert run.verdict is not None
    assert run.verdict.legal
    assert run.ratio == pytest.approx(1.0, abs=1e-9)
    assert run.solution.gap < 0.01


def test_a_is_far_below_xla() -> None:
    good = until(lambda p: p.cost < XLA_A / 1.9)
    run = run_instance(instance("A"), time_limit_s=200.0, seed=0, workers=1, tell=good)
    assert run.verdict is not None
    assert run.verdict.legal
    assert run.verdict.cost < XLA_A / 1.9


def test_the_command_prints_a_table_and_writes_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "small.json", RAW)
    out = tmp_path / "runs.json"
    command = ["bench", "iopddl", str(path), "--time-limit", "5", "--seed", "1", "-o", str(out)]
    result = CliRunner().invoke(app, [*command, "--solutions", str(tmp_path / "answers")])
    assert result.exit_code == 0, result.output
    assert "small" in result.output
    answer = json.loads((tmp_path / "answers" / "small.json").read_text())
    (figures,) = json.loads(out.read_text())
    assert figures["legal"]
    assert figures["cost"] == judge(read_instance(path).raw, answer).cost
    assert figures["bound"] <= figures["cost"]
    assert figures["peak_usage"] <= figures["usage_limit"]


def test_the_command_says_what_is_missing_and_fails(tmp_path: Path) -> None:
    path = write(tmp_path / "small.json", change("problem.usage_limit", 6))
    result = CliRunner().invoke(app, ["bench", "iopddl", str(path), "--time-limit", "5"])
    assert result.exit_code == 1
    assert "no choice meets the memory limit" in result.output
    assert "bytes too much at time" in result.output
