"""Proves that a schedule is complete, can run, and holds no more than it may.

complete   on each virtual stage, on the rank that holds it: every microbatch's F once, and B, or BI and BW, once
can run    no circle of   F(s-1) -> F(s)   F(s) -> B(s)   B(s+1) -> B(s)   BI(s) -> BW(s)   and each row's order,
           where BI stands for B if the backward pass is in two parts
memory     at every action of a rank: (stage, microbatch) pairs whose F ran and whose B or BW did not <= the bound
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from autoshard.errors import ArgumentError, explain
from autoshard.schedules.fixed import bounds_of
from autoshard.schedules.table import Action, Kind, Schedule, parse_rows

Place = tuple[int, int]
"""Rank, and position in its row."""


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """What is proven of a schedule.

    Attributes:
      order: rank and position of every action, in an order in which they can run.
      held: for each rank, the most (stage, microbatch) pairs it holds activations of at a time.
      held_by_stage: the same for each virtual stage.
    """

    order: tuple[Place, ...]
    held: tuple[int, ...]
    held_by_stage: tuple[int, ...]


def verify(schedule: Schedule, most_held: int | Sequence[int] | None = None) -> Facts:
    """Proves what the module says.

    Args:
      schedule: the table.
      most_held: bound on held pairs, for all ranks or for each; None: no bound.

    Raises:
      ArgumentError: the first thing that is wrong, with rank, position and action.
    """
    _check_placement(schedule)
    at = _check_actions(schedule)
    _check_complete(schedule, at)
    order = _order(schedule, at)
    held, held_by_stage = _check_held(schedule, most_held)
    return Facts(order, held, held_by_stage)


def read_schedule(
    table: str | Sequence[str | Sequence[str | Action]],
    placement: Sequence[int] | None = None,
    *,
    microbatches: int | None = None,
    most_held: int | Sequence[int] | None = None,
    name: str = "own",
) -> Schedule:
    """A user's own table, verified.

    Args:
      table: a line of text or a list for each rank, as "F0 F1 B0 B1" or ["F0@0", "B0@0"].
      placement: the rank of each virtual stage; None: a stage is on the rank where it occurs first.
      microbatches: number of them; None: as many as occur.
      most_held: bound on held pairs, for all ranks or for each.
      name: for people.

    Raises:
      ArgumentError: it is no table, or `verify` refuses it.
    """
    rows, found, occurring = parse_rows(table, placement)
    schedule = Schedule(name, found, occurring if microbatches is None else microbatches, rows)
    verify(schedule, most_held)
    return schedule


def needs(action: Action, last_stage: int, at: dict[Action, Place]) -> list[Action]:
    """Actions that must be done before this one, the row's order aside."""
    s, m = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            return [Action(Kind.FORWARD, s - 1, m)] if s else []
        case Kind.WEIGHT_GRAD:
            return [Action(Kind.INPUT_GRAD, s, m)]
        case Kind.BACKWARD | Kind.INPUT_GRAD:
            found = [Action(Kind.FORWARD, s, m)]
            if s < last_stage:
                whole = Action(Kind.BACKWARD, s + 1, m)
                found.append(whole if whole in at else Action(Kind.INPUT_GRAD, s + 1, m))
            return found


def _check_placement(schedule: Schedule) -> None:
    if not schedule.rows or not schedule.placement or schedule.microbatches < 1:
        raise _wrong(
            f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches",
            "at least one of each",
            "add what is missing",
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            where = "occurs on no rank" if rank == -1 else f"is placed on rank {rank}"
            raise _wrong(
                f"stage {stage} {where}",
                f"a rank from 0 to {schedule.ranks - 1}",
                "number the stages from 0 without gaps",
            )


def _check_actions(schedule: Schedule) -> dict[Action, Place]:
    """Each action in range, on its stage's rank, once; where each is."""
    at: dict[Action, Place] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            where = f"rank {rank}, position {position}: {action}"
            if not 0 <= action.stage < schedule.stages or not 0 <= action.microbatch < schedule.microbatches:
                raise _wrong(
                    f"{where} of {schedule.stages} stages and {schedule.microbatches} microbatches",
                    "numbers from 0, below these",
                    "correct the action",
                )
            own = schedule.placement[action.stage]
            if own != rank:
                raise _wrong(
                    f"{where}, but stage {action.stage} is on rank {own}",
                    f"actions of stage {action.stage} on rank {own} only",
                    "move the action, or correct the placement",
                )
            if action in at:
                raise _wrong(
                    f"{where} for the second time, after position {at[action][1]}", "every action once", "remove one"
                )
            at[action] = rank, position
    return at


def _check_complete(schedule: Schedule, at: dict[Action, Place]) -> None:
    """Of each microbatch on each stage F, and B or BI and BW."""
    for stage, rank in enumerate(schedule.placement):
        for m in range(schedule.microbatches):
            forward, whole, part, weight = (Action(kind, stage, m) for kind in Kind)
            if whole in at:
                for other in (part, weight):
                    if other in at:
                        raise _wrong(
                            f"rank {rank}, position {at[other][1]}: {other}, but {whole} at position {at[whole][1]} "
                            "is the whole backward pass",
                            f"{whole}, or {part} and {weight}",
                            "remove one",
                        )
            for wanted in (forward, whole) if part not in at and weight not in at else (forward, part, weight):
                if wanted not in at:
                    raise _wrong(
                        f"rank {rank}, position {len(schedule.rows[rank])} (its end): {wanted} is missing",
                        f"of each of {schedule.microbatches} microbatches on each of {schedule.stages} stages F, "
                        "and B or BI and BW",
                        f"add it to rank {rank}",
                    )


def _order(schedule: Schedule, at: dict[Action, Place]) -> tuple[Place, ...]:
    """An order in which all can run: ranks go on as far as what they need is done."""
    done: set[Action] = set()
    next_of = [0] * schedule.ranks
    waiting: dict[Action, list[int]] = {}
    order: list[Place] = []
    open_ranks = list(reversed(range(schedule.ranks)))
    last = schedule.stages - 1
    while open_ranks:
        rank = open_ranks.pop()
        row = schedule.rows[rank]
        while next_of[rank] < len(row):
            action = row[next_of[rank]]
            missing = next((n for n in needs(action, last, at) if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            order.append((rank, next_of[rank]))
            next_of[rank] += 1
            open_ranks += waiting.pop(action, ())
    if len(order) < len(at):
        raise _circle(schedule, at, done, next_of)
    return tuple(order)


def _circle(schedule: Schedule, at: dict[Action, Place], done: set[Action], next_of: Sequence[int]) -> ArgumentError:
    """Follows what each stuck rank waits for until a rank comes again."""
    rank = next(r for r, k in enumerate(next_of) if k < len(schedule.rows[r]))
    seen: list[int] = []
    steps: list[str] = []
    while rank not in seen:
        seen.append(rank)
        action = schedule.rows[rank][next_of[rank]]
        missing = next(n for n in needs(action, schedule.stages - 1, at) if n not in done)
        other, position = at[missing]
        steps.append(
            f"rank {rank}, position {next_of[rank]}: {action} waits for {missing} (rank {other}, position {position})"
        )
        rank = other
    text = "; ".join(steps[seen.index(rank) :])
    return _wrong(f"actions wait for each other: {text}", "an order in which all can run", "move one of them")


def _check_held(schedule: Schedule, most_held: int | Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The most held on each rank and each stage."""
    pairs = schedule.stages * schedule.microbatches
    bounds = bounds_of(most_held, schedule.ranks, pairs)
    most, by_stage, now_of = [0] * schedule.ranks, [0] * schedule.stages, [0] * schedule.stages
    for rank, (row, bound) in enumerate(zip(schedule.rows, bounds, strict=True)):
        now = 0
        for position, action in enumerate(row):
            if action.kind is Kind.FORWARD:
                now += 1
                now_of[action.stage] += 1
            elif action.kind is not Kind.INPUT_GRAD:
                now -= 1
                now_of[action.stage] -= 1
            most[rank] = max(most[rank], now)
            by_stage[action.stage] = max(by_stage[action.stage], now_of[action.stage])
            if now > bound:
                raise _wrong(
                    f"rank {rank}, position {position}: {action} makes {now} held microbatches",
                    f"at most {bound}",
                    "run a backward pass before it, or raise the bound",
                )
    return tuple(most), tuple(by_stage)


def _wrong(given: str, expected: str, todo: str) -> ArgumentError:
    return ArgumentError(explain(given, expected, todo))
