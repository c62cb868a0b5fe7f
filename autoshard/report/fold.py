"""Like arguments as one row: same type, spec, role and size, and paths that differ only in numbers.

    layers/0/kernel, layers/1/kernel, layers/7/kernel  -->  texts (layers/, /kernel), numbers ((0), (1), (7))

Paths are kept as texts and numbers, so that the page of a plan with thousands of arguments stays small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from autoshard.errors import PlanError, explain
from autoshard.ir import Spec, axes_size
from autoshard.plan import Argument, Plan

# ASCII digits only: every page's reader takes the texts and numbers together again the same way.
_NUMBER = re.compile(r"[0-9]+")


@final
@dataclass(frozen=True, slots=True)
class Fold:
    """Arguments of one type, spec, role and size.

    Attributes:
      texts: what the paths share, one more than there are numbers.
      numbers: for each argument the digits between the texts.
      type, spec: as in `Argument`.
      role: "state", "input" or "output", with ", donated" where the buffer is reused.
      nbytes: of one argument, whole.
      local_bytes: of one argument, on one device.
    """

    texts: tuple[str, ...]
    numbers: tuple[tuple[str, ...], ...]
    type: str
    spec: Spec
    role: str
    nbytes: int
    local_bytes: int

    @property
    def paths(self) -> tuple[str, ...]:
        """Of each argument."""
        return tuple(
            "".join(text + number for text, number in zip(self.texts, (*row, ""), strict=True)) for row in self.numbers
        )


def fold_arguments(plan: Plan) -> tuple[Fold, ...]:
    """Inputs and outputs of a plan, those that take most of a device first.

    Raises:
      PlanError: a spec has an axis that the mesh has not.
    """
    sizes = dict(plan.mesh)
    donated = frozenset(plan.donated)
    rows: dict[tuple[tuple[str, ...], str, Spec, str, int], list[tuple[str, ...]]] = {}
    for i, a in enumerate(plan.inputs):
        role = ("state" if a.state else "input") + (", donated" if i in donated else "")
        _add(rows, a, role)
    for a in plan.outputs:
        _add(rows, a, "output")
    folds = [
        Fold(texts, tuple(numbers), type_, spec, role, nbytes, local_bytes(nbytes, spec, sizes))
        for (texts, type_, spec, role, nbytes), numbers in rows.items()
    ]
    return tuple(sorted(folds, key=lambda f: -f.local_bytes * len(f.numbers)))


def local_bytes(nbytes: int, spec: Spec, sizes: Mapping[str, int]) -> int:
    """Bytes on one device of a value of `nbytes`, rounded up."""
    try:
        parts = math.prod(axes_size(axes, sizes) for axes in spec)
    except KeyError as error:
        raise PlanError(
            explain(f"a spec over the axis {error}", f"axes of the mesh {sorted(sizes)}", "plan again")
        ) from error
    return -(-nbytes // parts)


def _add(
    rows: dict[tuple[tuple[str, ...], str, Spec, str, int], list[tuple[str, ...]]], a: Argument, role: str
) -> None:
    texts, numbers = split_path(a.path)
    rows.setdefault((texts, a.type, a.spec, role, a.nbytes), []).append(numbers)


def split_path(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The texts between the numbers of a path, and the numbers."""
    return tuple(_NUMBER.split(path)), tuple(_NUMBER.findall(path))


def within(folds: Sequence[Fold], characters: int) -> tuple[Fold, ...]:
    """The first folds whose texts and numbers take no more than so many characters."""
    total = 0
    for i, f in enumerate(folds):
        total += sum(map(len, f.texts)) + sum(len(n) + 1 for row in f.numbers for n in row) + len(f.numbers) + 80
        if total > characters:
            return tuple(folds[:i])
    return tuple(folds)
