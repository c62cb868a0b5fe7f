"""Random schedules and times for tests."""

from __future__ import annotations

import random
from collections.abc import Callable

from autoshard.schedules import (
    Schedule,
    Send,
    StageTimes,
    dual_pipe_v,
    eager_one_f_one_b,
    early_backward,
    gpipe,
    interleaved,
    line_placement,
    list_schedule,
    one_f_one_b,
    round_placement,
    v_placement,
    zb_h1,
    zb_h2,
    zb_v,
)

Draw = random.Random

GENERATORS: dict[str, Callable[[Draw, int, int], Schedule]] = {
    "gpipe": lambda _, p, m: gpipe(p, m),
    "1f1b": lambda _, p, m: one_f_one_b(p, m),
    "eager-1f1b": lambda _, p, m: eager_one_f_one_b(p, m),
    "early-backward": lambda draw, p, m: early_backward(p, m, draw.randrange(1, 9), eager=draw.random() < 0.5),
    "interleaved-1f1b": lambda draw, p, m: interleaved(p, p * -(-m // p), draw.randrange(1, 5)),
    "zb-h1": lambda _, p, m: zb_h1(p, m),
    "zb-h2": lambda _, p, m: zb_h2(p, m),
    "zb-v": lambda _, p, m: zb_v(p, m),
    "dualpipe-v": lambda _, p, m: dual_pipe_v(p, 2 * p + m - 1),
}


def random_times(draw: Draw, stages: int) -> StageTimes:
    """Stages unlike each other; messages half of the time."""

    def some() -> tuple[float, ...]:
        return tuple(draw.uniform(0.2, 3.0) for _ in range(stages))

    sends = tuple(Send(draw.uniform(0.0, 2.0), draw.uniform(0.0, 2.0)) for _ in range(stages - 1))
    return StageTimes(some(), some(), some(), sends if draw.random() < 0.5 else ())


def random_listed(draw: Draw, ranks: int, microbatches: int) -> tuple[Schedule, StageTimes, int | None]:
    """A listed schedule, the times it was made for, and its bound."""
    chunks = draw.randrange(1, 4)
    placements = (line_placement(ranks), round_placement(ranks, chunks), v_placement(ranks))
    placement = draw.choice(placements)
    times = random_times(draw, len(placement))
    least = len(placement) // ranks
    bound = None if draw.random() < 0.3 else draw.randrange(least, least * ranks + 3)
    found = list_schedule(times, microbatches, placement, most_held=bound, split=draw.random() < 0.5)
    return found, times, bound
