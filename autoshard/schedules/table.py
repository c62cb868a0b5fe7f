"""Pipeline schedules as tables: what each rank does, in which order.

    schedule  ::= Schedule(name, placement, microbatches, row*)    a row for each rank
    placement ::= rank*                                            of virtual stage 0, 1, ...
    row       ::= action*
    action    ::= kind microbatch ["@" stage]                      F0, BI3@5
    kind      ::= F | B | BI | BW

F is the forward pass of a microbatch through a virtual stage, B its whole backward pass. BI and BW are B in two parts:
the gradient by the stage's input, which the stage before waits for, and the gradient by its weights, which nobody waits
for (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024). A rank may hold several virtual stages. In text, "@" and
the stage may be left out where the rank has but one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from autoshard.errors import ArgumentError, explain

_ACTION = re.compile(r"(F|BI|BW|B)(\d+)(?:@(\d+))?")


@final
class Kind(Enum):
    """What is done to a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "BI"
    WEIGHT_GRAD = "BW"


@final
@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does.

    Attributes:
      kind: what.
      stage: virtual stage, from 0.
      microbatch: from 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}@{self.stage}"


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """A table; `verify` says whether it can run.

    Attributes:
      name: for people.
      placement: the rank that holds each virtual stage.
      microbatches: number of them.
      rows: for each rank its actions in order.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of virtual stages."""
        return len(self.placement)

    def text(self) -> str:
        """A line for each rank, which `read_schedule` reads."""
        short = self.placement == tuple(range(self.ranks))
        return "\n".join(" ".join(str(a).split("@")[0] if short else str(a) for a in row) for row in self.rows)


def line_placement(ranks: int) -> tuple[int, ...]:
    """One stage on each rank."""
    return tuple(range(ranks))


def round_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two stages on each rank, down and up again: the first and the last stage on rank 0."""
    return (*range(ranks), *reversed(range(ranks)))


def parse_rows(
    table: str | Sequence[str | Sequence[str | Action]], placement: Sequence[int] | None
) -> tuple[tuple[tuple[Action, ...], ...], tuple[int, ...], int]:
    """Rows, placement and number of microbatches of a table given as text or lists.

    Args:
      table: a line or list for each rank; of texts like "F0", "BI3@5", or of actions.
      placement: the rank of each stage; None: a stage is where it occurs first, and what names no stage is of the
        stage that has the rank's number.

    Raises:
      ArgumentError: something that is no action, or a stage left out where it must be named.
    """
    lines = table.strip().splitlines() if isinstance(table, str) else table
    own: list[list[int]] = [[] for _ in lines]
    for stage, rank in enumerate(placement or ()):
        if not 0 <= rank < len(lines):
            raise ArgumentError(
                explain(
                    f"stage {stage} is placed on rank {rank} of a table of {len(lines)} ranks",
                    f"a rank from 0 to {len(lines) - 1}",
                    "correct the placement",
                )
            )
        own[rank].append(stage)
    if placement is None:
        own = [[rank] for rank in range(len(lines))]
    rows: list[tuple[Action, ...]] = []
    for rank, line in enumerate(lines):
        words = line.split() if isinstance(line, str) else line
        rows.append(tuple(_action(word, rank, k, own[rank]) for k, word in enumerate(words)))
    found = tuple(placement) if placement is not None else _found_placement(rows)
    microbatches = 1 + max((a.microbatch for row in rows for a in row), default=-1)
    return tuple(rows), found, microbatches


def _action(word: str | Action, rank: int, position: int, own: Sequence[int]) -> Action:
    if isinstance(word, Action):
        return word
    where = f"rank {rank}, position {position}: {word!r}"
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ArgumentError(
            explain(where, "F, B, BI or BW, a microbatch, and '@' and a stage, as in F0 or BI3@5", "correct it")
        )
    if match[3] is None and len(own) != 1:
        raise ArgumentError(
            explain(f"{where} names no stage and rank {rank} has {len(own)}", f"{word}@STAGE", "add the stage")
        )
    return Action(Kind(match[1]), own[0] if match[3] is None else int(match[3]), int(match[2]))


def _found_placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Each stage where it occurs first; -1 for those that do not."""
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            found.setdefault(action.stage, rank)
    return tuple(found.get(stage, -1) for stage in range(1 + max(found, default=-1)))
