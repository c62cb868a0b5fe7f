"""A schedule as text: a line for each rank, a column for each tick.

    rank 0 |F0 F1 .. .. B0 == F2 B1 == ..|
    rank 1 |.. F0 B0 == F1 B1 == ...

F is a forward pass, B a whole backward pass, I and W its two parts; "==" goes on with what is to its left, ".." is
idle. Where a rank holds several stages, a, b, ... is the first, second, ... of them.
"""

from __future__ import annotations

from autoshard.schedules.table import Kind, Schedule
from autoshard.schedules.times import StageTimes, start_times

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT_GRAD: "I", Kind.WEIGHT_GRAD: "W"}


def picture(schedule: Schedule, forward: int = 1, input_grad: int = 1, weight_grad: int = 1) -> str:
    """A verified schedule over time.

    Args:
      schedule: the table.
      forward, input_grad, weight_grad: ticks that each takes; a whole backward pass takes the last two together.
    """
    size = schedule.stages
    times = StageTimes((float(forward),) * size, (float(input_grad),) * size, (float(weight_grad),) * size)
    starts = start_times(schedule, times)
    chunk = [schedule.placement[:s].count(rank) for s, rank in enumerate(schedule.placement)]
    marks = [chr(ord("a") + c) if max(chunk) else "" for c in chunk]
    cells: list[dict[int, str]] = []
    for row in schedule.rows:
        cells.append({})
        for action in row:
            first = round(starts[action])
            cells[-1][first] = f"{LETTERS[action.kind]}{action.microbatch}{marks[action.stage]}"
            cells[-1].update((t, "=") for t in range(first + 1, first + round(times.action_s(action))))
    last = 1 + max(t for row in cells for t in row)
    width = max(len(cell) for row in cells for cell in row.values())
    lines: list[str] = []
    for rank, row in enumerate(cells):
        texts = [row.get(t, "." * width) for t in range(last)]
        texts = ["=" * width if text == "=" else text.ljust(width) for text in texts]
        lines.append(f"rank {rank:>{len(str(len(cells) - 1))}} |{' '.join(texts)}|")
    return "\n".join(lines)
