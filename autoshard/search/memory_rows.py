"""Memory as the solver sees it: bytes by time and choice, for the times that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.costmodel import Lives, usage
from autoshard.ir import Value, local_bytes
from autoshard.search.model import Layout, Model
from autoshard.search.problem import Floats, Problem


def layout_usage(lives: Lives, layout: Layout, sizes: Mapping[str, int]) -> NDArray[np.int64]:
    """Bytes on one device at each time under a layout."""
    parts = {life.value: local_bytes(life.value.aval, layout.spec[life.value], sizes) for life in lives.lives}
    return usage(lives, parts)


def peak_times(curve: NDArray[np.int64], count: int) -> list[int]:
    """Times of the highest local peaks of a usage curve, highest first."""
    padded = np.concatenate(([-1], curve, [-1]))
    peaks = np.flatnonzero((padded[1:-1] >= padded[:-2]) & (padded[1:-1] > padded[2:]))
    return [int(t) for t in peaks[np.argsort(-curve[peaks], kind="stable")][:count]]


def with_memory(
    problem: Problem, model: Model, lives: Lives, times: Sequence[int], sizes: Mapping[str, int], limit: float
) -> Problem:
    """The problem with one memory row for each of `times`."""
    wanted = np.array(sorted(set(times)))
    usages: list[Floats] = [np.zeros((len(wanted), len(c))) for c in problem.costs]
    known: dict[tuple[int, int], Floats] = {}
    for life in lives.lives:
        alive = (life.start <= wanted) & (wanted < life.end)
        if not alive.any():
            continue
        op, result = model.ops.maker[life.value]
        kind = model.kinds.kind[op.index]
        if (kind, result) not in known:
            known[kind, result] = _bytes_of(life.value, [c.results[result] for c in model.choices[kind]], sizes)
        usages[model.variable[kind]] += alive[:, None] * known[kind, result]
    return Problem(problem.costs, problem.edges, tuple(usages), np.zeros(len(wanted)), limit)


def _bytes_of(value: Value, specs: Sequence[object], sizes: Mapping[str, int]) -> Floats:
    known: dict[object, int] = {}
    for spec in specs:
        if spec not in known:
            known[spec] = local_bytes(value.aval, spec, sizes)  # pyright: ignore[reportArgumentType]
    return np.array([known[spec] for spec in specs], float)
