"""What measured kernels like this one took, against the law's time (`law.py`): a memory the network starts from.

Kernels are alike in three ways, each closer than the one before: the class they are called after, the operations in
them, the same body with other sizes. Among alike kernels the near ones count most (Nadaraya, 1964; Watson, 1964), and
each way leans on the one before where it knows little:

    m_l  =  ( sum_i w_i y_i + LEAN m_(l-1) )  /  ( sum_i w_i + LEAN ),     w_i = weight_i exp( -|x - x_i|^2 / 2 h_l^2 )

y is log( measured / law ), x logarithms of sizes, bytes and strides. Programs of a kernel's own structure are left out
while the network trains, so that it learns how far the memory of other programs can be trusted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from autoshard.costmodel.learned.hlo_graph import FREE, Instruction, Kernel
from autoshard.costmodel.learned.kernel_features import MAINS, PLACE_COLUMNS, PLACE_SCALES
from autoshard.costmodel.learned.law import Law

Array = np.ndarray

LEVELS = (0, 1, 2, 2)
"""Which key each way looks up: class, operations, body, body."""

REACH = (1.5, 0.8, 0.5, 0.2)
"""The widths h_l, of x in natural logarithms. Ours, by the validation programs."""

LEAN = 0.3
COLUMNS = 2 * len(LEVELS) + 1
MOST = 3000
"""Kernels of one key that are kept, evenly spread over those measured."""


def kernel_keys(kernel: Kernel) -> tuple[int, int, int]:
    """Numbers that alike kernels share: class, operations, body."""
    inner = list(kernel.body.values()) if kernel.instruction.opcode == "fusion" else [kernel.instruction]
    opcodes = {i.opcode for i in inner}
    main = next((name for name in MAINS if name in opcodes), kernel.instruction.opcode)
    dtype = kernel.instruction.shape.dtype
    operations = sorted(opcodes - FREE)
    known = {i.name: n for n, i in enumerate(kernel.body.values())}
    body = "\n".join(_line(i, known) for i in kernel.body.values())
    ynn = "ynn" in kernel.instruction.attributes
    ways = [_way(i) for i in inner if i.opcode in ("reduce", "reduce-window", "dot")]
    return (
        _number(f"{main} {dtype}"),
        _number(f"{main} {dtype} {ynn} {operations} {ways}"),
        _number(f"{ynn} {body}"),
    )


def _line(instruction: Instruction, known: Mapping[str, int]) -> str:
    operands = ",".join(str(known.get(o, -1)) for o in instruction.operands)
    shapes = " ".join(f"{s.dtype}{len(s.packed)}" for s in instruction.shapes)
    return f"{instruction.opcode} {operands} {shapes} {_way(instruction)}"


def _way(instruction: Instruction) -> str:
    """Which dimensions it works along."""
    shape = instruction.shape
    found = [
        f"{key}{instruction.numbers(key)}" for key in ("dimensions", "lhs_contracting_dims", "rhs_contracting_dims")
    ]
    return f"{found} {shape.order} {instruction.region}"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def places(nodes: Array) -> Array:
    """Where kernels lie: [K, n]."""
    return nodes[:, list(PLACE_COLUMNS)] * np.array(PLACE_SCALES, np.float32)


@final
@dataclass(frozen=True, slots=True)
class Recall:
    """Measured kernels.

    Attributes:
      law: of their base times.
      keys: [n, 3].
      x: places, [n, d].
      y: logarithms of measured over base time, [n].
      weight: [n].
      owner: numbers of the programs' structures, [n].
    """

    law: Law
    keys: Array
    x: Array
    y: Array
    weight: Array
    owner: Array
    _groups: tuple[Mapping[int, Array], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups: list[dict[int, Array]] = []
        for column in range(self.keys.shape[1]):
            order = np.argsort(self.keys[:, column], kind="stable")
            found, starts = np.unique(self.keys[order, column], return_index=True)
            parts = np.split(order, starts[1:])
            groups.append(
                {
                    int(key): part if len(part) <= MOST else part[np.linspace(0, len(part) - 1, MOST).astype(int)]
                    for key, part in zip(found, parts, strict=True)
                }
            )
        object.__setattr__(self, "_groups", tuple(groups))

    def look_up(self, nodes: Array, keys: Array, owner: int = -1) -> tuple[Array, Array]:
        """What is remembered of some kernels.

        Args:
          nodes: their figures, [K, n].
          keys: [K, 3].
          owner: structure whose kernels are left out.

        Returns:
          The logarithm of the factor to expect, [K], and `COLUMNS` figures of what it rests on, [K, COLUMNS].
        """
        x = places(nodes)
        mean = np.zeros(len(x))
        columns = np.zeros((len(x), COLUMNS), np.float32)
        for way, (level, reach) in enumerate(zip(LEVELS, REACH, strict=True)):
            for key in np.unique(keys[:, level]):
                alike = self._groups[level].get(int(key))
                if alike is None:
                    continue
                at = np.flatnonzero(keys[:, level] == key)
                w, y = self._weights(x[at], alike, reach, owner), self.y[alike]
                total = w.sum(1)
                before = mean[at]
                mean[at] = (w @ y + LEAN * before) / (total + LEAN)
                columns[at, way] = mean[at]
                columns[at, len(LEVELS) + way] = np.log1p(total)
                if way == len(LEVELS) - 1:
                    columns[at, -1] = np.sqrt(((w * (y - mean[at][:, None]) ** 2).sum(1)) / (total + LEAN))
        return mean, columns

    def _weights(self, x: Array, alike: Array, reach: float, owner: int) -> Array:
        there = self.x[alike]
        square = (x**2).sum(1)[:, None] + (there**2).sum(1)[None] - 2 * x @ there.T
        w = np.exp(np.maximum(square, 0.0) / (-2 * reach**2)) * self.weight[alike]
        return np.where(self.owner[alike] == owner, 0.0, w)


def owner_number(structure: str) -> int:
    """Of a program's structure."""
    return _number(structure)


def make_recall(
    law: Law,
    parts: Sequence[tuple[Array, Array, Array, Array, str]],
) -> Recall:
    """Of measured programs: figures [K, n], keys [K, 3], logarithms of factors [K] (nan: none), weights, structure."""
    rows: list[tuple[Array, ...]] = []
    for nodes, each, logs, weights, structure in parts:
        known = np.isfinite(logs) & (weights > 0)
        owner = np.full(int(known.sum()), owner_number(structure), np.int64)
        rows.append((each[known], places(nodes[known]), logs[known], weights[known], owner))
    return Recall(law, *(np.concatenate([row[k] for row in rows]) for k in range(5)))
