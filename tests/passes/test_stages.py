"""Stage cutting on graphs: the pieces, run in the order of any schedule, are the step; who computes what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import ArgumentError
from autoshard.ir import Graph, StepInfo, Value, evaluate, trace, verify
from autoshard.passes import Cut, Part, Stages, cut_stages, loop_step, stage_graphs, stage_programs
from autoshard.runtime.microbatches import split_batch
from autoshard.runtime.pipeline import Pipeline
from autoshard.schedules import eager_one_f_one_b, gpipe, interleaved, one_f_one_b


@final
class Plain:
    """Programs run op by op where they are."""

    def __init__(self, stages: Stages) -> None:
        self.programs = [stage_programs(stage, stage.graph) for stage in stages.graphs]

    def program(self, stage: int, number: int) -> Callable[..., Sequence[Any]]:
        graph = self.programs[stage].programs[number].graph
        verify(graph)
        return lambda *args: evaluate(graph, args)

    def is_here(self, stage: int) -> bool:
        return True

    def send(self, source: int, target: int, pairs: Sequence[Any], arrays: Sequence[Any]) -> Sequence[Any]:
        return arrays

    def stack(self, stage: int, value: Value, rows: Sequence[Any]) -> Any:
        return jnp.stack(rows)

    def number(self, stage: int, microbatch: int) -> Any:
        return np.int32(microbatch)


def skipping(*flat: Any) -> Sequence[Any]:
    """Layers w0..w3 and a bias each; the first layer's result is used by the last again; a loss, a norm, a count."""
    weights, biases, count, x = flat[:4], flat[4:8], flat[8], flat[9]

    def loss(both: Any) -> Any:
        weights, biases = both
        h = jnp.tanh(x @ weights[0] + biases[0][None])
        first = h
        for w, b in zip(weights[1:3], biases[1:3], strict=True):
            h = jnp.tanh(h @ w + b[None])
        return jnp.sum(((h + first) @ weights[3] + biases[3][None]) ** 2)

    value, gradients = jax.value_and_grad(loss)((weights, biases))
    leaves = jax.tree.leaves(gradients)
    norm = jnp.sqrt(sum((jnp.sum(g**2) for g in leaves[1:]), jnp.sum(leaves[0] ** 2)))
    scale = 0.1 / ((1.0 + norm) * (1.0 + count.astype(jnp.float32)))
    new = [w - scale * g for w, g in zip((*weights, *biases), leaves, strict=True)]
    return [*new, count + 1, value, norm]


PAIRS = tuple((i, i) for i in range(9))


def traced() -> tuple[Graph, list[Any], StepInfo]:
    draw = np.random.default_rng(0)
    arrays: list[Any] = [draw.normal(size=(8, 8)).astype("f4") for _ in range(4)]
    arrays += [draw.normal(size=(8,)).astype("f4") for _ in range(4)]
    arrays += [np.int32(3), draw.normal(size=(8, 8)).astype("f4")]
    graph = trace(skipping, [jax.typeof(a) for a in arrays])
    names = tuple(f"a/{i}" for i in range(10))
    outs = tuple(f"out/{i}" for i in range(11))
    return graph, arrays, StepInfo(names, (0,) * 10, ("a",), outs, (0,) * 11, PAIRS, ())


def cut_into(cuts: Sequence[int], count: int = 4) -> tuple[Cut, Graph, list[Any]]:
    graph, arrays, info = traced()
    split = split_batch(skipping, [jax.typeof(a) for a in arrays], info, graph, count)
    return cut_stages(loop_step(split), cuts, PAIRS), graph, arrays


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 4), one_f_one_b(4, 4), eager_one_f_one_b(4, 4), interleaved(2, 4, 2)], ids=lambda s: s.name
)
def test_the_pieces_are_the_step(schedule: Any) -> None:
    cut, graph, arrays = cut_into((3, 7, 11))
    stages = stage_graphs(cut, PAIRS)
    backend = Plain(stages)
    found = Pipeline(stages, backend.programs, schedule, backend).run(lambda i, _: arrays[i])
    for mine, plain in zip(found, evaluate(graph, arrays), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=2e-5, atol=1e-6)


def test_weights_and_their_updates_lie_on_the_stage_that_reads_them() -> None:
    cut, _, _ = cut_into((4, 8, 12))
    stages = stage_graphs(cut, PAIRS)
    assert [stages.home[i] for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert stages.output_home[:8] == tuple(stages.home[i] for i in range(8))
    for stage in stages.graphs:
        own = {i for i in range(8) if stages.home[i] == stage.stage}
        assert set(stage.inputs) & set(range(8)) == own


def test_a_bias_at_a_cut_gets_its_gradient_at_home() -> None:
    """dh arrives from the stage above; its sum, the bias's gradient, is not made there and sent."""
    cut, _, _ = cut_into((3, 7, 11))
    for stage in stage_graphs(cut, PAIRS).graphs:
        assert not [v for v, _, phase in stage.arrivals if v.shape and phase[0] is Part.AFTER]


def test_a_skip_connection_goes_straight_to_its_reader() -> None:
    cut, _, _ = cut_into((4, 8, 12))
    stages = stage_graphs(cut, PAIRS)
    assert {(source, phase[0]) for _, source, phase in stages.graphs[3].loop_arrivals} >= {(0, Part.FORWARD)}


def test_wrong_cuts() -> None:
    with pytest.raises(ArgumentError, match=r"cuts \(3, 3\) of "):
        cut_into((3, 3))
