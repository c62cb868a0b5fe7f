"""Phases of a stage's programs, and which equations of a microbatch can be in a later one than they must."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import final

from autoshard.ir import Apply, Value


@final
class Part(IntEnum):
    """Parts of a step on one stage, in order."""

    BEFORE = 0
    FORWARD = 1
    BACKWARD = 2
    AFTER = 3


Phase = tuple[Part, int]
"""A part and its round."""

FORWARD: Phase = (Part.FORWARD, 0)
BACKWARD: Phase = (Part.BACKWARD, 0)
WEIGHTS: Phase = (Part.BACKWARD, 1)


def set_apart(when: dict[Apply, Phase], awaited: set[Value], index: Mapping[Apply, int]) -> None:
    """Moves backward equations that make nothing of what other stages wait for to `WEIGHTS`."""
    for equation in sorted((e for e, phase in when.items() if phase == BACKWARD), key=lambda e: -index[e]):
        if awaited.isdisjoint(equation.outputs):
            when[equation] = WEIGHTS
        else:
            awaited.update(a for a in equation.inputs if isinstance(a, Value))


def delay(when: dict[Apply, Phase], kept: set[Value], index: Mapping[Apply, int]) -> None:
    """Moves forward equations that only the backward pass reads there, where less is then kept in between.

    y = tanh x ; d = sub 1 y   -->   d is made of y when the backward pass needs it, for y is kept anyway.
    """
    readers: dict[Value, list[Apply]] = {}
    for equation in when:
        for atom in equation.inputs:
            if isinstance(atom, Value):
                readers.setdefault(atom, []).append(equation)
    made = {v for e, phase in when.items() if phase == FORWARD for v in e.outputs}

    def waits(value: Value) -> bool:
        return any(when[r] == BACKWARD for r in readers.get(value, ()))

    for equation in sorted((e for e, phase in when.items() if phase == FORWARD), key=lambda e: -index[e]):
        following = [r for v in equation.outputs for r in readers.get(v, ())]
        if not following or any(v in kept for v in equation.outputs):
            continue
        if any(when[r] == FORWARD for r in following):
            continue
        operands = {a for a in equation.inputs if isinstance(a, Value) and a in made}
        more = sum(v.nbytes for v in operands if not waits(v))
        if more < sum(v.nbytes for v in equation.outputs):
            when[equation] = BACKWARD
