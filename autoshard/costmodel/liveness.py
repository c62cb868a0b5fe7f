"""Which values are alive when: the linear form of peak memory that the solver's rows and the estimate share.

Equations are numbered in execution order, bodies in place (one trip). A value is alive from the equation that makes
it to its last reader; inputs and outputs of the whole program are alive throughout, an output that reuses a donated
input's buffer is not counted again. A result may take over the buffer of an operand that dies there, so a value's life
ends before its last reader where that reader is elementwise.

    usage(t) = sum over values alive at t of the bytes of one device's part
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from autoshard.ir import Apply, Graph, Reshard, Value


@final
@dataclass(frozen=True, slots=True, eq=False)
class Life:
    """One value in memory.

    Attributes:
      value: which.
      start, end: alive at times start <= t < end.
    """

    value: Value
    start: int
    end: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """All values that take memory.

    Attributes:
      steps: number of times.
      lives: temporaries by time, inputs and outputs throughout.
      inputs: values of the program's arguments.
      outputs: results with buffers of their own.
    """

    steps: int
    lives: tuple[Life, ...]
    inputs: frozenset[Value]
    outputs: frozenset[Value]


def find_lives(graph: Graph, reused: Sequence[int], materialized: Callable[[Value], bool]) -> Lives:
    """The lives of all values of a graph.

    Args:
      graph: the program.
      reused: outputs that take over a donated input's buffer.
      materialized: whether a value is ever written to memory.
    """
    clock = _Clock(materialized)
    clock.run(graph)
    own = frozenset(
        atom
        for k, atom in enumerate(graph.outputs)
        if isinstance(atom, Value) and k not in set(reused) and atom not in set(graph.inputs)
    )
    over = {graph.outputs[k] for k in reused}
    inputs = frozenset((*graph.inputs, *(value for value, _ in graph.constants)))
    lives = [Life(value, 0, clock.now) for value in (*inputs, *own)]
    for value, (start, end) in clock.lives.items():
        if value not in inputs and value not in own and value not in over:
            lives.append(Life(value, start, end))
    return Lives(clock.now, tuple(lives), inputs, own)


class _Clock:
    """Numbers equations and notes first and last times."""

    def __init__(self, materialized: Callable[[Value], bool]) -> None:
        self.now = 0
        self.lives: dict[Value, tuple[int, int]] = {}
        self._materialized = materialized

    def run(self, graph: Graph) -> None:
        for equation in graph.equations:
            start = self.now
            for body in equation.graphs:
                for value in body.inputs:
                    self._touch(value, self.now, self.now + 1)
                self.run(body)
            self.now += 1
            takes_over = not equation.graphs and _elementwise(equation)
            for atom in equation.inputs:
                if isinstance(atom, Value):
                    self._touch(atom, start, self.now - 1 if takes_over else self.now)
            for value in equation.outputs:
                self._touch(value, start, self.now)
        for atom in graph.outputs:
            if isinstance(atom, Value):
                self._touch(atom, self.now, self.now)

    def _touch(self, value: Value, start: int, end: int) -> None:
        if not self._materialized(value):
            return
        known = self.lives.get(value)
        self.lives[value] = (start, end) if known is None else (known[0], max(known[1], end))


def _elementwise(equation: Apply | Reshard) -> bool:
    """Whether a result may take over an operand's buffer."""
    shapes = {v.shape for v in equation.outputs}
    return len(shapes) == 1 and equation.name not in ("dot_general", "conv_general_dilated", "sort", "transpose")


def usage(lives: Lives, local_bytes: Mapping[Value, int]) -> NDArray[np.int64]:
    """Bytes alive at each time.

    Args:
      lives: from `find_lives`.
      local_bytes: of each value, one device's part.
    """
    change = np.zeros(lives.steps + 2, np.int64)
    for life in lives.lives:
        nbytes = local_bytes.get(life.value, 0)
        change[life.start] += nbytes
        change[life.end] -= nbytes
    return np.cumsum(change)[: lives.steps + 1]
