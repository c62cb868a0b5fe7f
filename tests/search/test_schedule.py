"""The simulated step of a layout: against the sum of its parts, in the right order, and what a plan keeps of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from autoshard.cluster import Cluster, Link, Node
from autoshard.costmodel import materialized
from autoshard.ir import Value
from autoshard.search.layout import Layout, lay_out
from autoshard.search.memory_rows import answer_buffers
from autoshard.search.meshes import named_mesh
from autoshard.search.ops import OpKind
from autoshard.search.schedule import Schedule, schedule, timeline
from tests.helpers import eager_cluster
from tests.problems import Ground, Step, ground, looped, mlp, normal, random_answers, random_step

STEPS = {"mlp": mlp, "looped": looped, "random": lambda: random_step(3)}


def gpus() -> Cluster:
    """Devices of which collectives run beside compute, and take about as long."""
    node = eager_cluster().nodes[0]
    return Cluster("eager gpus", (Node(dataclasses.replace(node.device, kind="gpu"), node.count, Link(200.0, 1e-9)),))


def layouts(step: Step, cluster: Cluster, count: int = 8) -> list[tuple[Ground, Layout, Schedule]]:
    on = ground(step, named_mesh((2, 4)), cluster)
    made = [lay_out(on.model, answer, on.pricer) for answer in random_answers(on.model, count)]
    return [(on, layout, schedule(on.ops, layout, on.pricer)) for layout in made]


@pytest.mark.parametrize("name", STEPS)
def test_without_overlap_it_is_the_sum(name: str) -> None:
    for _, layout, made in layouts(STEPS[name](), eager_cluster()):
        assert made.time_s == pytest.approx(layout.time_s, rel=1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_with_overlap_it_is_between_the_longer_and_the_sum(name: str) -> None:
    shorter = 0
    for _, layout, made in layouts(STEPS[name](), gpus()):
        assert made.time_s >= max(layout.compute_s, layout.traffic_s) * (1 - 1e-6)
        assert made.time_s <= layout.time_s * (1 + 1e-6)
        shorter += made.time_s < 0.999 * layout.time_s
    assert shorter > 0, "something overlaps"


@pytest.mark.parametrize("name", STEPS)
def test_what_is_read_was_made(name: str) -> None:
    for _, _, made in layouts(STEPS[name](), gpus(), 3):
        begins = {op.index: k for k, (op, traffic) in reversed(list(enumerate(made.source))) if traffic is None}
        for index, task in begins.items():
            op = made.source[task][0]
            assert op.index == index
            for atom in op.operands:
                if isinstance(atom, Value) and atom in made.made:
                    assert made.simulation.end[made.made[atom]] <= made.simulation.start[task]


def scanned() -> Step:
    """A scan whose body sums over devices last, then work that reads what it carries."""

    def fun(stack: jax.Array, x: jax.Array) -> list[jax.Array]:
        h, _ = jax.lax.scan(lambda c, w: (c @ w, None), x, stack)
        return [stack * 2.0, h @ stack[0]]

    return Step(fun, (normal(0, 4, 16, 16), normal(1, 8, 16)), 1)


@pytest.mark.parametrize("step", [scanned, looped])
def test_what_follows_a_loop_waits_for_its_body(step: Callable[[], Step]) -> None:
    sums = 0
    for on, _, made in layouts(step(), gpus(), 40):
        ends = {tie.target: tie.source for tie in on.ops.ties}
        for op in on.ops.ops:
            if op.kind is not OpKind.LEAVE or op.operands[0] not in ends:
                continue
            source, result = ends[op.operands[0]], op.results[0]
            if source not in made.made:
                continue
            last = made.made[source]
            sums += made.source[last][1] is not None
            for reader, _ in on.ops.readers.get(result, ()):
                tasks = [k for k, (owner, t) in enumerate(made.source) if owner is reader and t is None]
                for k in tasks:
                    assert made.simulation.start[k] >= made.simulation.end[last]
    assert sums > 0, "some body ends with a sum over devices"


def test_the_timeline_tells_all() -> None:
    cluster = gpus()
    for on, layout, made in layouts(mlp(), cluster, 4):
        buffers = answer_buffers(on.graph, on.ops, layout, on.pricer, (), materialized(on.graph).__contains__)
        found = timeline(made, layout, buffers, on.pricer.mesh, on.pricer)
        assert [lane.devices for lane in found.lanes] == ["0-7", "0-7"]
        assert [lane.busy_s for lane in found.lanes] == pytest.approx([layout.compute_s, layout.traffic_s], rel=1e-6)
        assert sum(s.end_s - s.start_s for s in found.spans) == pytest.approx(layout.time_s, rel=1e-6)
        assert sum(c.time_s for c in found.costs) == pytest.approx(layout.time_s, rel=1e-6)
        assert max(s.end_s for s in found.spans) == pytest.approx(made.time_s)
        times = [t for t, _ in found.memory[0].points]
        assert times == sorted(times)
        alive = np.array([n for _, n in found.memory[0].points])
        assert alive.min() >= 0
        assert alive.max() >= sum(b.nbytes for b in buffers.inputs)
