"""Which values are alive when: the linear form of peak memory that the solver's rows see.

The buffers of `memory.py` before anything is split: times are those of the order in which the device runs the program,
bodies in place (one trip), and bytes are left open, so that each value may be given those of its sharding. A donated
input is alive until its last reader and again, as the output in its buffer, from where that is made; what is not
donated is alive throughout.

    usage(t) = sum over values alive at t of the bytes of one device's part

What depends on two choices at once, copies in another sharding, is not in it; `memory.py` counts it for a whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from autoshard.costmodel.memory import find_buffers
from autoshard.costmodel.memory_program import WHOLE
from autoshard.ir import Graph, Value


@final
@dataclass(frozen=True, slots=True, eq=False)
class Life:
    """One value in memory.

    Attributes:
      value: which.
      start, end: alive at times start <= t < end.
      parts: buffers of the value's size that this stands for.
    """

    value: Value
    start: int
    end: int
    parts: float = 1.0


@final
@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """All values that take memory.

    Attributes:
      steps: number of times.
      lives: temporaries by time, inputs and outputs throughout or with the gap of a donated buffer; a value may have
        several (copies, scratch).
      inputs: values of the program's arguments and constants.
      outputs: results with buffers of their own.
    """

    steps: int
    lives: tuple[Life, ...]
    inputs: frozenset[Value]
    outputs: frozenset[Value]


def find_lives(
    graph: Graph, donated: Sequence[tuple[int, int]], kind: str, written: Callable[[Value], bool] | None = None
) -> Lives:
    """The lives of all values of a graph.

    Args:
      graph: the prepared graph.
      donated: (input, output) pairs of which the output takes over the input's buffer.
      kind: of the devices, "cpu" or "gpu".
      written: for a GPU, whether a value goes through memory.
    """
    buffers = find_buffers(graph, donated, kind, WHOLE, written)
    taken = {o for _, o in donated}
    results = [b for b in buffers.outputs if b is not None]
    lives: list[Life] = []
    for b in (*buffers.inputs, *results, *buffers.temporaries):
        if b.value is not None and b.nbytes and b.value.nbytes:
            lives.append(Life(b.value, b.start, b.end, b.nbytes / b.value.nbytes))
    inputs = frozenset(b.value for b in buffers.inputs if b.value is not None)
    own = frozenset(
        b.value for o, b in enumerate(buffers.outputs) if b is not None and b.value is not None and o not in taken
    )
    return Lives(buffers.steps, tuple(lives), inputs, own)


def usage(lives: Lives, local_bytes: Mapping[Value, int]) -> NDArray[np.float64]:
    """Bytes alive at each time.

    Args:
      lives: from `find_lives`.
      local_bytes: of each value, one device's part.
    """
    change = np.zeros(lives.steps + 2)
    for life in lives.lives:
        nbytes = local_bytes.get(life.value, 0) * life.parts
        change[life.start] += nbytes
        change[life.end] -= nbytes
    return np.cumsum(change)[: lives.steps + 1]
