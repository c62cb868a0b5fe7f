"""The simulator: bounds, hand-worked tables, closed forms, re-simulation."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.costmodel import Block, Change, TaskGraph, TaskGraphBuilder, pipeline_tasks, simulate
from autoshard.errors import ArgumentError

US = 1e-6


def random_graph(seed: int, tasks: int, streams: int = 4, links: int = 2, reach: int = 30) -> TaskGraph:
    """Tasks on one or several streams, transfers over one or several links, reading earlier tasks."""
    draw = random.Random(seed)
    b = TaskGraphBuilder()
    for s in range(streams):
        b.stream("compute", s)
    for _ in range(links):
        b.link("link", draw.choice([1e9, 2e9, 3e9]))
    for i in range(tasks):
        first = max(0, i - reach)
        after = [draw.randrange(first, i) for _ in range(draw.randrange(1, 4))] if i > 2 else []
        rank = draw.randrange(3)
        if links and draw.random() < 0.3:
            some = draw.sample(range(links), draw.randrange(1, links + 1))
            nbytes, late = draw.randrange(1, 10**6), draw.choice([0, US])
            b.task("send", nbytes=nbytes, latency_s=late, links=some, after=after, priority=rank)
        else:
            held = draw.sample(range(streams), min(streams, draw.choice([1, 1, 1, 2, 3])))
            b.task("work", time_s=draw.randrange(1000) * US, streams=held, after=after, priority=rank)
    return b.build()


def random_changes(draw: random.Random, graph: TaskGraph) -> list[Change]:
    """One to three tasks changed in time, size, order or needs, and perhaps a new one."""
    found: list[Change] = []
    for i in draw.sample(range(graph.size), min(graph.size, draw.randrange(1, 4))):
        match draw.randrange(5):
            case 0 | 1 if graph.row(graph.shares, i):
                found.append(Change(i, nbytes=draw.randrange(1, 10**6)))
            case 0 | 1:
                found.append(Change(i, time_s=draw.randrange(1000) * US))
            case 2:
                found.append(Change(i, priority=draw.randrange(3)))
            case 3:
                found.append(Change(i, after=tuple(draw.randrange(max(0, i - 9), i) for _ in range(2)) if i else ()))
            case _:
                found.append(Change(i, latency_s=draw.randrange(3) * US))
    if draw.random() < 0.3:
        found.append(Change(graph.size, time_s=100 * US, streams=(0,), after=(draw.randrange(graph.size),)))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200), st.booleans())
def test_no_schedule_beats_its_bounds(seed: int, tasks: int, contention: bool) -> None:
    graph = random_graph(seed, tasks)
    found = simulate(graph, contention=contention)
    streams, links = found.busy_s()
    assert found.makespan_s >= found.critical_path_s() - 1e-11
    assert found.makespan_s >= streams.max() - 1e-11
    assert not contention or found.makespan_s >= links.max() - 1e-9
    assert found.makespan_s >= found.lower_bound_s() - 1e-9
    # Each task after those it needs; a stream holds one at a time.
    for i in range(graph.size):
        assert all(found.end[p] <= found.start[i] for p in graph.row(graph.after, i))
    for s in range(len(graph.streams)):
        held = sorted((found.start[i], found.end[i]) for i in range(graph.size) if s in graph.row(graph.holds, i))
        held = [(a, b) for a, b in held if a < b]
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(held))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 100))
def test_no_stream_idles_while_a_task_could_run(seed: int, tasks: int) -> None:
    graph = random_graph(seed, tasks, links=0)
    found = simulate(graph)
    for i in range(graph.size):
        if found.start[i] == found.ready[i]:
            continue
        # From when it is ready until it starts, at every time one of its streams is held by another task.
        held = [(found.start[j], found.end[j]) for j in range(graph.size) if j != i
                and set(graph.row(graph.holds, j)) & set(graph.row(graph.holds, i))]  # fmt: skip
        at = found.ready[i]
        while at < found.start[i]:
            ends = [b for a, b in held if a <= at < b]
            assert ends, f"task {i} waits at {at} for nothing"
            at = max(ends)


def hand_worked() -> list[tuple[str, TaskGraph, list[tuple[float, float]]]]:
    """Ten small cases, worked out by hand: (start, end) of each task in microseconds."""
    cases: list[tuple[str, TaskGraph, list[tuple[float, float]]]] = []

    def case(name: str, b: TaskGraphBuilder, table: list[tuple[float, float]]) -> None:
        cases.append((name, b.build(), table))

    b = TaskGraphBuilder()
    s = b.stream("s")
    first = b.task("a", time_s=3 * US, streams=[s])
    b.task("b", time_s=2 * US, streams=[s], after=[first])
    case("a chain", b, [(0, 3), (3, 5)])

    b = TaskGraphBuilder()
    s = b.stream("s")
    b.task("a", time_s=3 * US, streams=[s], priority=1)
    b.task("b", time_s=2 * US, streams=[s])
    case("priority before number", b, [(2, 5), (0, 2)])

    b = TaskGraphBuilder()
    s = [b.stream("s", d) for d in range(2)]
    a = b.task("a", time_s=3 * US, streams=[s[0]])
    c = b.task("c", time_s=5 * US, streams=[s[1]])
    b.task("join", time_s=1 * US, streams=[s[0]], after=[a, c])
    b.task("other", time_s=1 * US, streams=[s[0]], after=[a])
    case("a join waits for the later", b, [(0, 3), (0, 5), (5, 6), (3, 4)])

    b = TaskGraphBuilder()
    s = [b.stream("s", d) for d in range(2)]
    b.task("a", time_s=4 * US, streams=[s[0]])
    b.task("both", time_s=2 * US, streams=s)
    b.task("b", time_s=3 * US, streams=[s[1]])
    case("a task on two streams waits for both, another passes it", b, [(0, 4), (4, 6), (0, 3)])

    b = TaskGraphBuilder()
    link = b.link("l", 1e9)
    b.task("a", nbytes=1000, links=[link])
    b.task("b", nbytes=1000, links=[link])
    case("two transfers of 1 us share a link", b, [(0, 2), (0, 2)])

    b = TaskGraphBuilder()
    link = b.link("l", 1e9)
    b.task("a", nbytes=1000, links=[link])
    b.task("b", nbytes=3000, links=[link])
    # Half the rate each until a is done at 2 us (b has sent 1000), then the whole rate for the other 2000.
    case("the longer one speeds up", b, [(0, 2), (0, 4)])

    b = TaskGraphBuilder()
    link = b.link("l", 1e9)
    b.task("a", nbytes=2000, links=[link])
    b.task("b", nbytes=1000, latency_s=1 * US, links=[link])
    # b joins at 1 us, when a has 1000 left; both at half rate are done at 3 us.
    case("latency does not use the link", b, [(0, 3), (0, 3)])

    b = TaskGraphBuilder()
    fast, slow = b.link("fast", 2e9), b.link("slow", 1e9)
    b.task("both", nbytes=2000, links=[fast, slow])
    b.task("fast only", nbytes=2000, links=[fast])
    # On the fast link each may have 1 GB/s, which is all the first can use on the slow one.
    case("the narrowest link counts", b, [(0, 2), (0, 2)])

    b = TaskGraphBuilder()
    compute, wire = b.stream("compute"), b.stream("collectives")
    grads = [b.task("backward", time_s=2 * US, streams=[compute]) for _ in range(3)]
    sums = [b.task("all-reduce", time_s=3 * US, streams=[wire], after=[g]) for g in grads]
    b.task("update", time_s=1 * US, streams=[compute], after=sums)
    # DisCo's law: all-reduces one after the other, each from max(its gradient ready, channel free).
    case("gradients and their sums", b, [(0, 2), (2, 4), (4, 6), (2, 5), (5, 8), (8, 11), (11, 12)])

    b = TaskGraphBuilder()
    s = b.stream("s")
    a = b.task("a", time_s=1 * US, streams=[s])
    c = b.task("nothing", after=[a])
    b.task("b", time_s=1 * US, streams=[s], after=[c])
    case("a task of no time passes on at once", b, [(0, 1), (1, 1), (1, 2)])
    return cases


@pytest.mark.parametrize(("name", "graph", "table"), hand_worked(), ids=[c[0] for c in hand_worked()])
def test_hand_worked(name: str, graph: TaskGraph, table: list[tuple[float, float]]) -> None:
    found = simulate(graph)
    times = [(found.start_s(i), found.end_s(i)) for i in range(graph.size)]
    assert np.allclose(times, np.array(table) * US, rtol=0, atol=2e-12), times


def test_memory_is_counted_by_reference() -> None:
    b = TaskGraphBuilder()
    s = b.stream("s")
    forward = b.task("forward", time_s=2 * US, streams=[s])
    loss = b.task("loss", time_s=1 * US, streams=[s], after=[forward])
    backward = b.task("backward", time_s=3 * US, streams=[s], after=[loss])
    b.buffer(0, 100, kept=True)  # state
    b.buffer(0, 50, maker=forward, readers=[loss, backward])  # activation
    b.buffer(0, 10, maker=loss, readers=[backward])
    b.buffer(0, 7, maker=backward, kept=True)
    b.buffer(1, 3, maker=loss)
    found = simulate(b.build())
    times, nbytes = found.memory()[0]
    assert np.allclose(times, np.array([0, 2, 3, 6]) * US)
    assert nbytes.tolist() == [150, 160, 167, 107]
    assert found.peak_bytes() == {0: 167, 1: 3}


def test_bubble_of_an_even_pipeline() -> None:
    """1F1B over p stages and m microbatches: (p - 1) / m more than the work of one stage (PAPERS)."""
    for stages, microbatches in ((1, 4), (4, 4), (4, 8), (8, 32)):
        blocks = [Block(1e-3, 2e-3)] * stages
        found = simulate(pipeline_tasks(blocks, microbatches))
        assert found.makespan_s == pytest.approx((microbatches + stages - 1) * 3e-3)


@pytest.mark.parametrize(("average_s", "delay"), [(0.3, 1), (1.5, 1), (3.5, 2), (0.0, 1)])
def test_delayed_averaging(average_s: float, delay: int) -> None:
    """Step time = T_compute + max(0, T_allreduce - d T_compute) / tau, with an average every period (DaSGD)."""
    period, periods, step_s = 4, 50, 1.0
    b = TaskGraphBuilder()
    compute, wire = b.stream("compute"), b.stream("network")
    steps: list[int] = []
    average = -1
    for k in range(period * periods):
        after = steps[-1:]
        if average >= 0 and k % period == delay % period and k >= delay:
            after = [*after, average]  # merged `delay` steps after it began
        steps.append(b.task("step", time_s=step_s, streams=[compute], after=after))
        if (k + 1) % period == 0:
            average = b.task("average", time_s=average_s, streams=[wire], after=steps[-1:])
    found = simulate(b.build())
    law = step_s + max(0.0, average_s - delay * step_s) / period
    merged = periods - 1
    assert found.end_s(steps[-1]) == pytest.approx(
        period * periods * step_s + merged * (law - step_s) * period, rel=1e-9
    )


def test_resimulation_equals_simulation() -> None:
    """A thousand random changes, each on top of the last."""
    done = 0
    for seed in range(50):
        draw = random.Random(seed)
        found = simulate(random_graph(seed, draw.randrange(5, 300), draw.randrange(1, 6), draw.randrange(0, 3)))
        for _ in range(20):
            found = found.change(random_changes(draw, found.graph))
            anew = simulate(found.graph)
            assert np.array_equal(found.start, anew.start)
            assert np.array_equal(found.end, anew.end)
            assert np.array_equal(found.ready, anew.ready)
            done += 1
    assert done == 1000


def test_a_task_is_taken_out() -> None:
    b = TaskGraphBuilder()
    s = b.stream("s")
    tasks = [b.task("t", time_s=1 * US, streams=[s], after=[i - 1] if i else []) for i in range(5)]
    found = simulate(b.build()).change([Change(tasks[2], time_s=0.0, streams=())])
    assert found.makespan_s == pytest.approx(4 * US)


def test_a_circle_is_named() -> None:
    b = TaskGraphBuilder()
    first = b.task("one", time_s=1.0)
    second = b.task("two", time_s=1.0, after=[first])
    with pytest.raises(ArgumentError, match=r"wait for each other: 1 \(two\) -> 0 \(one\)"):
        simulate(b.build()).change([Change(first, after=(second,))])


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda b: b.task("t", time_s=-1.0), "time_s = -1.0"),
        (lambda b: b.task("t", time_s=float("nan")), "time_s = nan"),
        (lambda b: b.task("t", nbytes=5), "0 links"),
        (lambda b: b.task("t", streams=[3]), "stream 3"),
        (lambda b: b.task("t", after=[0]), "task 0"),
        (lambda b: b.link("l", 0.0), "0.0 bytes a second"),
        (lambda b: b.buffer(0, -1), "-1 bytes"),
        (lambda b: (b.buffer(0, 1, maker=7), b.build()), "task 7"),
    ],
)
def test_what_cannot_be_is_refused(add, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        add(TaskGraphBuilder())
    found = simulate(random_graph(0, 20))
    for change in (Change(50), Change(3, time_s=-1.0), Change(3, streams=(99,)), Change(3, after=(3,))):
        with pytest.raises(ArgumentError):
            found.change([change])
