"""Splits by largest load: the figures the reference solver prints, and better ones that are not contiguous."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.errors import ArgumentError
from autoshard.search.stages import LoadNode, LoadProblem, Split, loads_s, split_contiguous, split_local

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "dnn-partitioning"


def read(name: str) -> LoadProblem:
    path = FOLDER / f"{name}.json"
    if not path.exists():
        pytest.skip("the graphs of shared/data are not here")
    data = json.loads(path.read_text())
    sent = {edge["sourceId"]: edge["cost"] for edge in data["edges"]}
    number = {node["id"]: k for k, node in enumerate(data["nodes"])}
    alone = 1 + max(node.get("colorClass", 0) for node in data["nodes"])
    nodes = tuple(
        LoadNode(
            node["fpgaLatency"],
            node["cpuLatency"],
            node["size"],
            sent.get(node["id"], 0.0),
            node.get("colorClass", alone + k),
            bool(node["isBackwardNode"]),
        )
        for k, node in enumerate(data["nodes"])
    )
    edges = tuple((number[edge["sourceId"]], number[edge["destId"]]) for edge in data["edges"])
    return LoadProblem(nodes, edges, data["maxFPGAs"], data["maxCPUs"], data["maxSizePerFPGA"])


@pytest.mark.parametrize(
    ("name", "one", "contiguous", "local"),
    [
        ("layer-graphs/bert24_inference", 92.406, 17.7899, 17.75),
        ("layer-graphs/bert24_training", 217.813, 41.7458, 39.9432),
        ("layer-graphs/resnet50_training", 462.381, 78.6318, 78.5),
        ("operator-graphs/bert_l-3_inference", 49.3526, 27.9186, 27.5741),
        ("operator-graphs/bert_l-3_training", 122.987, 65.3031, 65.3032),
    ],
)
def test_reference_figures(name: str, one: float, contiguous: float, local: float) -> None:
    problem = read(name)
    assert max(loads_s(problem, [0] * len(problem.nodes))) == pytest.approx(one, rel=1e-5)
    found = split_contiguous(problem)
    assert found.load_s == pytest.approx(contiguous, rel=1e-5)
    fast = replace(problem, slow_devices=0)
    better = split_local(fast, split_contiguous(fast), kicks=60)
    assert better.load_s == pytest.approx(max(loads_s(problem, better.device)))
    assert better.load_s <= local + 1e-9
    groups: dict[int, set[int]] = {}
    for node, device in zip(problem.nodes, better.device, strict=True):
        groups.setdefault(node.group, set()).add(device)
    assert all(len(devices) == 1 for devices in groups.values())


def test_human_experts() -> None:
    """The experts' loads by `loads_s`: 20.084 for inference, 49.4049 for training."""
    for kind, figure in (("inference", 20.084), ("training", 49.4049)):
        problem = read(f"layer-graphs/bert24_{kind}")
        data = json.loads((FOLDER / "layer-graphs" / f"bert24_{kind}.json").read_text())
        expert = json.loads((FOLDER / "human-experts" / f"bert24_{kind}_expert.json").read_text())
        device = {node: k for k, each in enumerate(expert["fpgas"]) for node in each["nodes"]}
        assert max(loads_s(problem, [device[node["id"]] for node in data["nodes"]])) == pytest.approx(figure, rel=1e-4)


def random_problem(draw: random.Random) -> LoadProblem:
    size = draw.randrange(2, 7)
    nodes = tuple(LoadNode(draw.uniform(0.1, 3), draw.uniform(0.1, 9), 1.0, draw.uniform(0, 1), k) for k in range(size))
    edges = tuple((a, b) for a in range(size) for b in range(a + 1, size) if draw.random() < 0.5)
    return LoadProblem(nodes, edges, 2, draw.randrange(2), draw.choice([float("inf"), size - 1.0]))


def test_all_splits_of_small_graphs() -> None:
    """Contiguous: the least of all splits whose devices can be put in an order; local: never above it, or below all."""
    draw = random.Random(0)
    for _ in range(60):
        problem = random_problem(draw)
        count = problem.devices + problem.slow_devices
        fits = [
            split
            for split in itertools.product(range(count), repeat=len(problem.nodes))
            if max(split.count(d) for d in range(problem.devices)) <= problem.memory_bytes
        ]
        ordered = [
            split
            for split in fits
            if any(
                all(order.index(split[a]) <= order.index(split[b]) for a, b in problem.edges)
                for order in itertools.permutations(range(count))
            )
        ]
        found = split_contiguous(problem)
        assert found.load_s == pytest.approx(min(max(loads_s(problem, split)) for split in ordered))
        local = split_local(problem, found, kicks=30)
        assert local.load_s <= found.load_s
        assert local.load_s >= min(max(loads_s(problem, split)) for split in fits) - 1e-9


def test_memory_too_small() -> None:
    problem = LoadProblem((LoadNode(1.0, 1.0, 5.0, 0.0, 0),), (), 2, 0, 4.0)
    with pytest.raises(ArgumentError, match="no split fits into memory"):
        split_contiguous(problem)


def test_local_repairs_a_start_that_takes_too_much_memory() -> None:
    """The repaired split has the larger load."""
    nodes = (LoadNode(1.0, 1.0, 3.0, 5.0, 0), LoadNode(1.0, 1.0, 3.0, 5.0, 1))
    problem = LoadProblem(nodes, ((0, 1),), 2, 0, 4.0)
    found = split_local(problem, Split((0, 0), 2.0))
    assert set(found.device) == {0, 1}
    assert found.load_s == pytest.approx(6.0)


def test_local_search_has_no_scale() -> None:
    """In nanoseconds as in seconds."""
    nodes = tuple(LoadNode(x, x, 1.0, 0.0, k) for k, x in enumerate((3.0, 3.0, 2.0, 2.0, 2.0)))
    small = tuple(replace(node, seconds=node.seconds * 1e-9, slow_seconds=0.0) for node in nodes)
    for each, figure in ((nodes, 6.0), (small, 6e-9)):
        problem = LoadProblem(each, (), 2)
        assert split_local(problem, Split((0,) * 5, 0.0)).load_s == pytest.approx(figure)


def test_refused() -> None:
    node = LoadNode(1.0, 1.0, 1.0, 0.0, 0)
    with pytest.raises(ArgumentError, match="0 nodes on 1 devices"):
        LoadProblem((), (), 1)
    with pytest.raises(ArgumentError, match="edge"):
        LoadProblem((node,), ((0, 1),), 1)
    problem = LoadProblem((node, node), (), 2)
    with pytest.raises(ArgumentError, match="a split of 1 nodes"):
        loads_s(problem, [0])
    with pytest.raises(ArgumentError, match="a split of 2 nodes over devices"):
        loads_s(problem, [0, 2])
    with pytest.raises(ArgumentError, match="separates"):
        split_local(problem, Split((0, 1), 1.0))
