"""The IOPDDL contest's format: reading, checking, judging, writing."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.errors import InstanceError
from autoshard.search import Problem, Usage, judge, read_instance, run_instance, solve, write_instance
from autoshard.search.contest import UNIT_S
from tests.problems import brute_force
from tests.search.test_limited import make

NEVER = 10**18

RAW: dict[str, Any] = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 3], [1, 4], [2, 2], [3, 6]],
            "costs": [[1, 5], [4, 2, 3], [0, 7], [6, 1]],
            "usages": [[10, 4], [3, 8, 6], [9, 9], [5, 12]],
        },
        "edges": {
            "nodes": [[0, 1], [3, 1], [2, 2], [0, 1, 3], [1, 0]],
            "costs": [
                [1, 2, 3, 4, 5, 6],
                [6, 5, 4, 3, 2, 1],
                [3, 99, 99, 1],
                [0, NEVER, 2, 3, 4, 5, 6, 7, 8, NEVER, 10, 11],
                [1, 1, 2, 2, 3, 3],
            ],
        },
        "usage_limit": 18,
    }
}


def write(path: Path, raw: Any) -> Path:
    path.write_text(json.dumps(raw))
    return path


def test_every_answer_has_the_cost_and_memory_that_the_judge_finds(tmp_path: Path) -> None:
    """Larger edges, a node twice in one edge, a pair in both orders, an empty life."""
    instance = read_instance(write(tmp_path / "a.json", RAW))
    assert instance.nodes == 4
    best = np.inf
    for answer in itertools.product(range(2), range(3), range(2), range(2)):
        verdict = judge(instance.raw, answer)
        extra = _tuples(instance.problem, answer)
        assert extra == pytest.approx(verdict.cost)
        assert instance.problem.usage([*answer, 0]).max() == verdict.peak
        if verdict.legal:
            best = min(best, verdict.cost)
    solution = solve(instance.problem, budget_s=10.0, seed=0)
    assert solution.cost == best
    assert judge(instance.raw, solution.choice[:4]).cost == best


def _tuples(problem: Problem, answer: tuple[int, ...]) -> float:
    """The least cost of an answer over the choices of the nodes that stand for larger edges."""
    return min(problem.cost([*answer, t]) for t in range(len(problem.costs[4])))


@pytest.mark.parametrize("seed", range(40))
def test_larger_edges_equal_trying_everything(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 4)) for _ in range(5)]
    scopes = [rng.choice(5, int(rng.integers(1, 5)), replace=bool(rng.integers(2))).tolist() for _ in range(5)]
    raw = {
        "problem": {
            "nodes": {
                "intervals": [[int(t), int(t) + 2] for t in rng.integers(0, 3, 5)],
                "costs": [rng.integers(0, 50, n).tolist() for n in sizes],
                "usages": [rng.integers(0, 20, n).tolist() for n in sizes],
            },
            "edges": {
                "nodes": scopes,
                "costs": [
                    [
                        int(c) if rng.random() > 0.15 else NEVER
                        for c in rng.integers(0, 50, np.prod([sizes[i] for i in s]))
                    ]
                    for s in scopes
                ],
            },
            "usage_limit": int(rng.integers(20, 60)),
        }
    }
    instance = read_instance(write(tmp_path / "a.json", raw))
    verdicts = [judge(raw, answer) for answer in itertools.product(*map(range, sizes))]
    best = min((v.cost for v in verdicts if v.legal), default=np.inf)
    solution = solve(instance.problem, budget_s=10.0, seed=0)
    if np.isfinite(best):
        assert judge(raw, solution.choice[:5]).legal
        assert solution.cost == pytest.approx(best)
    else:
        assert solution.choice == ()


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("seed", range(12))
def test_a_problem_written_and_read_is_the_same(seed: int, suffix: str, tmp_path: Path) -> None:
    problem = make(seed)
    scaled = Problem(
        tuple(c * 1e-6 for c in problem.costs),
        {key: e * 1e-6 for key, e in problem.edges.items()},
        problem.usages,
        problem.base,
        problem.limit,
    )
    path = tmp_path / f"p{suffix}"
    write_instance(scaled, path, "made")
    instance = read_instance(path)
    assert instance.name == "made"
    n = len(problem.costs)
    assert all(np.allclose(a, b, atol=UNIT_S) for a, b in zip(scaled.costs, instance.problem.costs, strict=False))
    expected = brute_force(scaled)
    solution = solve(instance.problem, budget_s=10.0, seed=0)
    if not np.isfinite(expected):
        assert solution.choice == ()
        return
    assert solution.cost == pytest.approx(expected, rel=1e-6)
    assert scaled.fits(solution.choice[:n])
    assert scaled.cost(solution.choice[:n]) == pytest.approx(expected, rel=1e-6)


def test_files_hold_whole_numbers(tmp_path: Path) -> None:
    """The contest's own programs read nothing else."""
    problem = Problem(
        (np.array([1.5e-9, np.inf]), np.array([0.25e-6])),
        {(0, 1): np.array([[1e-3], [2e-3]])},
        (Usage(0, 0, 2, np.array([0.5, 8.0])), Usage(0, 3, 4, np.array([1.0, 2.0]))),
        np.array([1.0, 1.0, 0.0, 2.0]),
        100.0,
    )
    path = tmp_path / "p.json"
    write_instance(problem, path, "p")
    raw = json.loads(path.read_text())["problem"]
    assert raw["nodes"]["costs"] == [[1500, NEVER], [250000], [0, 0], [0], [0]]
    assert raw["nodes"]["usages"] == [[1, 8], [0], [1, 2], [1], [2]]
    assert raw["edges"]["costs"][0] == [10**9, 2 * 10**9]
    assert raw["nodes"]["intervals"] == [[0, 2], [0, 0], [3, 4], [0, 2], [3, 4]]


def change(path: str, value: Any) -> Any:
    """RAW with one place changed; `value` None removes it."""
    raw = copy.deepcopy(RAW)
    where: Any = raw
    *parents, last = [int(k) if k.isdigit() else k for k in path.split(".")]
    for key in parents:
        where = where[key]
    if value is None:
        del where[last]
    else:
        where[last] = value
    return raw


MALFORMED = {
    "problem": (None, "no key 'problem'"),
    "problem.nodes": ([1], r"problem\.nodes: a list.*expected: an object"),
    "problem.edges": (None, "problem: no key 'edges'"),
    "problem.usage_limit": ("12", r"problem\.usage_limit: '12'.*a number"),
    "problem.nodes.usages": (None, r"problem\.nodes: no key 'usages'"),
    "problem.nodes.costs.1": ([4, 2], r"problem\.nodes\.usages\[1\]: 3 usages.*2, one for each strategy"),
    "problem.nodes.costs.2": ([], r"problem\.nodes\.costs\[2\]: no strategies"),
    "problem.nodes.costs.3": (["a", 1], r"problem\.nodes\.costs\[3\]: \['a', 1\].*a list of numbers"),
    "problem.nodes.costs.0": (5, r"problem\.nodes\.costs\[0\]: 5"),
    "problem.nodes.usages.0": ([1, -2], r"problem\.nodes\.usages\[0\]: -2.*not negative"),
    "problem.nodes.intervals.1": ([3, 1], r"problem\.nodes\.intervals\[1\]: \[3, 1\].*0 <= first <= last"),
    "problem.nodes.intervals.0": ([-1, 1], r"problem\.nodes\.intervals\[0\]: \[-1, 1\]"),
    "problem.nodes.intervals.2": ([1], r"problem\.nodes\.intervals\[2\]: \[1\].*two whole numbers"),
    "problem.nodes.intervals.3": ([0.5, 2], r"problem\.nodes\.intervals\[3\]"),
    "problem.nodes.intervals": ([[0, 1]], r"problem\.nodes: 1 intervals, 4 costs, 4 usages.*the same number"),
    "problem.edges.nodes.0": ([0, 9], r"problem\.edges\.nodes\[0\]: node 9.*from 0 to 3"),
    "problem.edges.nodes.1": ([], r"problem\.edges\.nodes\[1\]: \[\]"),
    "problem.edges.costs.0": (
        [1, 2],
        r"problem\.edges\.costs\[0\]: 2 costs.*6 = 2 x 3, the strategies of nodes \[0, 1\]",
    ),
    "problem.edges.costs": ([[1]], r"problem\.edges: 5 nodes, 1 costs"),
    "problem.edges.costs.2": ([[1, 2], [3, 4]], r"problem\.edges\.costs\[2\]"),
    "problem.nodes.usages.1": ([1, None, 3], r"problem\.nodes\.usages\[1\]"),
}


@pytest.mark.parametrize("place", MALFORMED)
def test_malformed_files_are_refused_with_the_place(place: str, tmp_path: Path) -> None:
    value, message = MALFORMED[place]
    path = write(tmp_path / "bad.json", change(place, value))
    with pytest.raises(InstanceError, match="(?s)" + message) as caught:
        read_instance(path)
    assert "bad.json" in str(caught.value)
    assert "to do:" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "a list"),
        (gzip.compress(b"{}")[:-4], "gzipped|ended"),
        (b"\x1f\x8bnonsense", "readable JSON file"),
    ],
    ids=["broken-json", "a-list", "truncated-gzip", "broken-gzip"],
)
def test_files_that_are_no_json_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(InstanceError, match=message):
        read_instance(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InstanceError, match=r"absent\.json"):
        read_instance(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ([0, 0, 0], "3 choices for 4 nodes"),
        ([0, 0, 0, 5], "node 3 has no strategy 5"),
        ([0, 0, 0, -1], "node 3 has no strategy -1"),
        ([0, 0, 0, 1], "not allowed"),
        ([0, 1, 0, 1], "2 over the limit of 18 at time 3"),
    ],
)
def test_the_judge_refuses_what_is_not_legal(answer: list[int], fault: str) -> None:
    verdict = judge(RAW, answer)
    assert not verdict.legal
    assert any(fault in f for f in verdict.faults), verdict.faults


def test_nothing_fits(tmp_path: Path) -> None:
    run = run_instance(write(tmp_path / "a.json", change("problem.usage_limit", 6)), time_limit_s=5, seed=0, workers=1)
    assert run.answer == ()
    assert run.verdict is None
    found = run.to_dict()
    assert not found["legal"]
    assert found["missing"]["bytes"] > 0
    assert found["result"] == "infeasible"
