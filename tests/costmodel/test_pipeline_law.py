"""DAPPLE's pipeline law: closed form, simulator and the planner's published figures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from autoshard.costmodel import Block, State, pipeline_latency_s, pipeline_tasks, read_profile, simulate
from autoshard.errors import ArgumentError

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "dapple"

# 2 servers of 8 V100 (shared/data/README.md).
SERVER = 8
NVLINK, ETHERNET, POINT_TO_POINT = 25e9, 3e9, 1e9


def same_server(devices: Sequence[int]) -> bool:
    return len({d // SERVER for d in devices}) == 1


def all_reduce_s(devices: Sequence[int], nbytes: float) -> float:
    """Ring all-reduce; NVLink gives each pair of devices a ring of its own, as the released planner counts."""
    n = len(devices)
    if n == 1:
        return 0.0
    rate = NVLINK * (n // 2) if same_server(devices) else ETHERNET
    return 2 * (n - 1) / n * nbytes / rate


def send_s(sources: Sequence[int], targets: Sequence[int], nbytes: float) -> float:
    """Split and concatenated between the replicas of two stages: what crosses servers goes point to point."""
    if not same_server(targets):
        return nbytes / ETHERNET
    crossing = sum(d // SERVER != targets[0] // SERVER for d in sources)
    return nbytes * crossing / len(sources) / POINT_TO_POINT if crossing else nbytes / NVLINK


def blocks_of(states: Sequence[State], cuts: Sequence[int], replicas: Sequence[int], upstream: bool) -> list[Block]:
    """Stages and links of a plan; stage k begins at state cuts[k]. `upstream` counts boundary layers twice."""
    starts = [0, *cuts, len(states)]
    groups: list[range] = []
    for n in replicas:
        first = groups[-1].stop if groups else 0
        groups.append(range(first, first + n))
    blocks: list[Block] = []
    for k, group in enumerate(groups):
        last = starts[k + 1] - 1
        end = states[last + 1 if upstream and k + 1 < len(groups) else last]
        begin = states[starts[k] - 1] if starts[k] else State(0.0, 0.0, 0.0)
        half = (end.compute_s - begin.compute_s) / 2 / len(group)
        blocks.append(Block(half, half, all_reduce_s(group, end.parameter_bytes - begin.parameter_bytes)))
        if k + 1 < len(groups):
            seconds = send_s(group, groups[k + 1], states[last].output_bytes)
            blocks.append(Block(seconds, seconds))
    return blocks


def speedup(name: str, cuts: Sequence[int], replicas: Sequence[int], microbatches: int, upstream: bool) -> float:
    states = profile(name)
    blocks = blocks_of(states, cuts, replicas, upstream)
    found = simulate(pipeline_tasks(blocks, microbatches, contention=False), contention=False)
    return microbatches * states[-1].compute_s / found.makespan_s


def profile(name: str) -> tuple[State, ...]:
    path = FOLDER / name
    if not path.exists():
        pytest.skip("the profiles of shared/data are not here")
    return read_profile(path)


VGG, XLNET, BERT = "vgg-19-pbs-32.txt", "xlnet-36-pbs-1.txt", "bert-48-pbs-2.txt"


@pytest.mark.parametrize(
    ("name", "cuts", "replicas", "microbatches", "exact", "upstream"),
    [
        (VGG, (16,), (14, 2), 32, 9.753, 9.635),
        (VGG, (11, 17, 19), (8, 6, 1, 1), 32, 3.189, 3.18),
        (XLNET, (22,), (8, 8), 128, 15.551, 14.929),
        (VGG, (21,), (15, 1), 32, 13.313, None),
        (VGG, (20,), (15, 1), 32, None, 9.982),
    ],
)
def test_published_plans(
    name: str, cuts: tuple[int, ...], replicas: tuple[int, ...], microbatches: int, exact: float, upstream: float
) -> None:
    for figure, twice in ((exact, False), (upstream, True)):
        if figure is not None:
            assert speedup(name, cuts, replicas, microbatches, twice) == pytest.approx(figure, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "replicas", "microbatches", "upstream", "cut"),
    [(VGG, (15, 1), 32, False, 21), (VGG, (15, 1), 32, True, 20), (XLNET, (8, 8), 128, False, 22),
     (BERT, (8, 8), 64, False, 30)],
)  # fmt: skip
def test_best_two_stage_cuts(name: str, replicas: tuple[int, ...], microbatches: int, upstream: bool, cut: int) -> None:
    states = profile(name)
    found = {c: speedup(name, (c,), replicas, microbatches, upstream) for c in range(1, len(states))}
    assert max(found, key=lambda c: found[c]) == cut


def test_closed_form_where_it_is_exact() -> None:
    """The closed form bounds the schedule from below, and holds where one block is the slowest throughout."""
    draw = random.Random(0)
    for _ in range(200):
        size, microbatches = draw.randrange(1, 6), draw.randrange(1, 12)
        blocks = [Block(draw.uniform(1, 3), draw.uniform(1, 3), draw.choice([0.0, 2.0])) for _ in range(size)]
        free = simulate(pipeline_tasks(blocks, microbatches, contention=False), contention=False).makespan_s
        held = simulate(pipeline_tasks(blocks, microbatches)).makespan_s
        assert free <= held + 1e-9
    for size in range(1, 6):
        blocks = [Block(1.0, 1.0)] * (size - 1) + [Block(1.0, 2.0, 0.5)]
        law = pipeline_latency_s(blocks, 8)
        assert simulate(pipeline_tasks(blocks, 8, contention=False)).makespan_s == pytest.approx(law)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", r"bad.txt:1: 'nonsense'"),
        ("\ta -- b\n", "bad.txt:1: an edge between layers"),
        ("", "has no layers"),
        ("a -- A -- forward_compute_time=x, backward_compute_time=1, activation_size=1, parameter_size=1\n", "txt:1"),
    ],
)
def test_malformed_profiles(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_profile(path)


def test_no_blocks() -> None:
    with pytest.raises(ArgumentError, match="0 blocks"):
        pipeline_latency_s([], 1)
    with pytest.raises(ArgumentError, match="0 microbatches"):
        pipeline_tasks([Block(1.0, 1.0)], 0)
