"""Schedules with one forward and one backward pass in turn, and GPipe.

gpipe            all forwards, then all backwards (Huang et al., NeurIPS 2019)
one_f_one_b      stage i runs S - i forwards ahead (PipeDream-flush; Narayanan et al., ICML 2021)
eager_one_f_one_b   2 (S - i) - 1 ahead, so that transfers hide behind compute (Zhuang et al., MLSys 2023)
early_backward   DAPPLE's warm-up, min(S - i, D) or min(2 (S - i) - 1, D) with D what memory holds (Fan et al.,
                 PPoPP 2021, section 3)
interleaved      several virtual stages a rank, in Megatron's order (Narayanan et al., SC 2021, section 2.2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from autoshard.errors import ArgumentError, explain
from autoshard.schedules.table import Action, Kind, Schedule, line_placement, round_placement


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    check_sizes(ranks, microbatches)
    rows = (_alternating(s, microbatches, microbatches) for s in range(ranks))
    return Schedule("gpipe", line_placement(ranks), microbatches, tuple(rows))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward; stage s holds at most S - s microbatches."""
    return early_backward(ranks, microbatches, name="1f1b")


def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward, with twice the warm-up: transfers as long as compute are hidden."""
    return early_backward(ranks, microbatches, eager=True, name="eager-1f1b")


def early_backward(
    ranks: int,
    microbatches: int,
    most_held: int | Sequence[int] | None = None,
    *,
    eager: bool = False,
    name: str = "early-backward",
) -> Schedule:
    """DAPPLE's schedule.

    Args:
      ranks, microbatches: numbers of them.
      most_held: D, the microbatches that memory holds, for all ranks or for each.
      eager: DAPPLE's second policy, for links that weigh much.
      name: of the schedule.

    Raises:
      ArgumentError: a number below 1.
    """
    check_sizes(ranks, microbatches)
    most = bounds_of(most_held, ranks, microbatches)
    if min(most) < 1:
        raise ArgumentError(explain(f"most_held = {min(most)}", "1 or more", "use a larger one"))
    ahead = [min(2 * (ranks - s) - 1 if eager else ranks - s, most[s], microbatches) for s in range(ranks)]
    # A stage that runs further ahead than the one before it would wait for forwards that wait for its backwards.
    rows = (_alternating(s, k, microbatches) for s, k in enumerate(accumulate(ahead, min)))
    return Schedule(name, line_placement(ranks), microbatches, tuple(rows))


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B: stage s on rank s mod ranks, microbatches in groups of `ranks`.

    Raises:
      ArgumentError: a number below 1, or microbatches that are no multiple of ranks.
    """
    check_sizes(ranks, microbatches)
    if chunks < 1:
        raise ArgumentError(explain(f"{chunks} chunks a rank", "1 or more", "use more"))
    if microbatches % ranks:
        raise ArgumentError(
            explain(
                f"interleaved 1F1B with {microbatches} microbatches on {ranks} ranks",
                "as many microbatches as ranks, or a multiple of that",
                f"use {microbatches // ranks * ranks or ranks} or {(microbatches // ranks + 1) * ranks} microbatches",
            )
        )
    total = microbatches * chunks
    rows: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forward = list(_interleaved(Kind.FORWARD, rank, ranks, microbatches, chunks))
        backward = list(_interleaved(Kind.BACKWARD, rank, ranks, microbatches, chunks))
        # One less than those held: each later forward runs before its backward, as in Megatron.
        ahead = total if microbatches == ranks else min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
        row = forward[:ahead]
        for k in range(ahead, total):
            row += [forward[k], backward[k - ahead]]
        rows.append((*row, *backward[total - ahead :]))
    return Schedule("interleaved-1f1b", round_placement(ranks, chunks), microbatches, tuple(rows))


def check_sizes(ranks: int, microbatches: int) -> None:
    """Raises ArgumentError where there is no rank or microbatch."""
    if ranks < 1 or microbatches < 1:
        raise ArgumentError(
            explain(f"a schedule of {ranks} ranks and {microbatches} microbatches", "at least one of each", "add one")
        )


def bounds_of(most_held: int | Sequence[int] | None, ranks: int, otherwise: int) -> list[int]:
    """A bound for each rank.

    Raises:
      ArgumentError: bounds for another number of ranks.
    """
    if most_held is None or isinstance(most_held, int):
        return [otherwise if most_held is None else most_held] * ranks
    if len(most_held) != ranks:
        given = f"bounds for {len(most_held)} ranks"
        raise ArgumentError(explain(given, f"one for each of {ranks}", "correct most_held"))
    return list(most_held)


def _alternating(stage: int, ahead: int, microbatches: int) -> tuple[Action, ...]:
    """`ahead` forwards, then one backward and one forward in turn."""
    row = [Action(Kind.FORWARD, stage, m) for m in range(ahead)]
    for m in range(microbatches):
        row.append(Action(Kind.BACKWARD, stage, m))
        if ahead + m < microbatches:
            row.append(Action(Kind.FORWARD, stage, ahead + m))
    return tuple(row)


def _interleaved(kind: Kind, rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Groups of `ranks` microbatches through one chunk after the other, backward from the last chunk on."""
    order: Sequence[int] = range(chunks) if kind is Kind.FORWARD else range(chunks)[::-1]
    for first in range(0, microbatches, ranks):
        for chunk in order:
            for m in range(first, first + ranks):
                yield Action(kind, chunk * ranks + rank, m)
