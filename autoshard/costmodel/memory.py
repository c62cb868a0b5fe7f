"""Peak memory of one device, as XLA's buffer assignment would count it.

    peak  =  inputs + outputs with buffers of their own + temporaries

Buffers come from `memory_program` nodes that are written to memory, in the order in which they run:

    cpu   breadth first (XLA:CPU's concurrency-optimized scheduler): what is ready runs in the order it became ready
    gpu   collectives beside kernels (`memory_schedule`)

A result takes over the buffer of an operand that dies there, if every element needs just the same element of it. An
output that reuses a donated input's buffer needs that all readers of the input surely come before: XLA inserts copies
before it schedules, so a reader on which the output does not depend means a copy of the input. From the last reader on
until the output is written, a donated buffer serves temporaries, and so does an output's own buffer before it is
written (buffer_assignment.cc: buffers in order of size, each into the smallest allocation in which it fits, the rest
packed).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from autoshard.costmodel.memory_fusion import mark_written
from autoshard.costmodel.memory_fusion_gpu import mark_written_gpu
from autoshard.costmodel.memory_packing import packed_bytes
from autoshard.costmodel.memory_program import Fusing, Node, Program, Sharding, build_program
from autoshard.costmodel.memory_schedule import overlapped_order
from autoshard.ir import Graph, Value

ALIGNMENT = {"cpu": 64, "gpu": 256}
"""Bytes that a buffer in the temporary allocation is rounded up to (XLA, cpu_function_runtime::Align; the offsets in
XLA:GPU's buffer assignments)."""

POINTER = 8
"""Bytes of each entry in the tuple of results (XLA:CPU and XLA:GPU on 64-bit hosts)."""

ALLOCATIONS_TRIED = 24
"""Allocations that are tried for one buffer, smallest first. Nominal: keeps the estimate linear."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """One buffer.

    Attributes:
      value: whose; None for what the partitioner adds.
      nbytes: on one device.
      start, end: in use at times start <= t < end.
    """

    value: Value | None
    nbytes: int
    start: int
    end: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """All buffers of a program.

    Attributes:
      steps: number of times.
      inputs: those of arguments and constants, in use throughout as far as they are not donated.
      outputs: of each output its buffer; None where it is an input or a literal, or shares one with an earlier output.
      temporaries: all others.
      reused: for a donated input the output in its buffer, by numbers in `inputs` and `outputs`.
      alignment: bytes that temporaries are rounded up to.
    """

    steps: int
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer | None, ...]
    temporaries: tuple[Buffer, ...]
    reused: tuple[tuple[int, int], ...]
    alignment: int = ALIGNMENT["cpu"]


@final
@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes on one device.

    Attributes:
      inputs_bytes: arguments.
      outputs_bytes: results with buffers of their own, and the table of pointers to all results.
      temporary_bytes: everything else.
    """

    inputs_bytes: int
    outputs_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The sum."""
        return self.inputs_bytes + self.outputs_bytes + self.temporary_bytes


def find_buffers(
    graph: Graph,
    donated: Sequence[tuple[int, int]],
    kind: str,
    sharding: Sharding,
    written: Callable[[Value], bool] | None = None,
) -> Buffers:
    """The buffers of a graph.

    Args:
      graph: the prepared graph.
      donated: (input, output) pairs of which the output takes the input's buffer.
      kind: of the devices, "cpu" or "gpu".
      sharding: how it is split; `WHOLE` for the graph as it is.
      written: for a GPU, whether a value goes through memory.
    """
    program = build_program(graph, sharding, kind, written)
    program.carried = [(program.inputs[i], program.outputs[o]) for i, o in donated if program.outputs[o] >= 0]
    clock = _Clock(kind)
    clock.run(program, top=True)
    return clock.collect(program, tuple(donated))


def peak_memory(buffers: Buffers) -> Peak:
    """Peak of buffers as XLA packs them."""
    given = dict(buffers.reused)
    slots: list[tuple[int, list[tuple[int, int]]]] = []
    for i, o in given.items():
        source, result = buffers.inputs[i], buffers.outputs[o]
        if result is not None:
            slots.append((source.nbytes, [(source.start, source.end), (result.start, result.end)]))
    taken = set(given.values())
    own = [b for o, b in enumerate(buffers.outputs) if b is not None and o not in taken]
    slots += [(b.nbytes, [(b.start, b.end)]) for b in own]
    rest = _absorb(buffers.temporaries, slots)
    inputs = sum(b.nbytes for b in buffers.inputs)
    outputs = sum(b.nbytes for b in own) + POINTER * len(buffers.outputs)
    lives = [b.nbytes for b in rest], [b.start for b in rest], [b.end for b in rest]
    return Peak(inputs, outputs, packed_bytes(*lives, buffers.alignment))


def _absorb(temporaries: Iterable[Buffer], slots: list[tuple[int, list[tuple[int, int]]]]) -> list[Buffer]:
    """Puts temporaries into idle times of other allocations; returns those that fit nowhere."""
    slots.sort(key=lambda s: s[0])
    sizes = [s[0] for s in slots]
    left: list[Buffer] = []
    for buffer in sorted(temporaries, key=lambda b: -b.nbytes):
        first = bisect_left(sizes, buffer.nbytes)
        for _, busy in slots[first : first + ALLOCATIONS_TRIED]:
            if all(buffer.end <= start or end <= buffer.start for start, end in busy):
                busy.append((buffer.start, buffer.end))
                break
        else:
            left.append(buffer)
    return left


@final
class _Clock:
    """Runs programs, bodies in place, and notes when each buffer is in use."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.now = 0
        self.temporaries: list[Buffer] = []
        self.spans: list[tuple[int, int]] = []

    def collect(self, program: Program, donated: tuple[tuple[int, int], ...]) -> Buffers:
        nodes = program.nodes
        given = {i for i, _ in donated}
        inputs = tuple(
            Buffer(nodes[ref].value, nodes[ref].nbytes, 0, max(self.spans[ref][1], 1) if i in given else self.now + 1)
            for i, ref in enumerate(program.inputs)
        )
        seen: set[int] = set(program.inputs)
        outputs: list[Buffer | None] = []
        for ref in program.outputs:
            if ref < 0 or ref in seen:
                outputs.append(None)
                continue
            seen.add(ref)
            outputs.append(Buffer(nodes[ref].value, nodes[ref].nbytes, self.spans[ref][0], self.now + 1))
        return Buffers(self.now + 1, inputs, tuple(outputs), tuple(self.temporaries), donated, ALIGNMENT[self.kind])

    def run(self, program: Program, top: bool) -> None:
        """One computation; buffers of its inputs and outputs belong to its caller."""
        nodes = program.nodes
        if self.kind == "cpu":
            mark_written(program)
        else:
            mark_written_gpu(program)
        _drop_unread(program)
        reads = _reads(nodes)
        cpu = self.kind == "cpu"
        order = _breadth_first(nodes, reads, program.outputs) if cpu else overlapped_order(nodes, reads)
        copied = _copies(program, reads) if cpu else set[int]()
        begin, finish, last = [0] * len(nodes), [0] * len(nodes), [self.now] * len(nodes)
        entry = self.now
        last_reader = [-1] * len(nodes)
        started: set[int] = set()
        for n in order:
            node = nodes[n]
            if node.collective and not cpu and n not in started:
                started.add(n)
                begin[n] = self.now
                self.now += 1
                continue
            if n in started:
                finish[n] = self.now
                self.now += 1
            elif node.fusing is Fusing.PART:
                begin[n], finish[n] = begin[node.operands[0]], self.now
            elif node.fusing is Fusing.INPUT:
                begin[n] = finish[n] = entry
            else:
                begin[n] = self.now
                for body in node.bodies:
                    self.run(body, top=False)
                self.now += 1
                finish[n] = self.now - 1
                if node.scratch:
                    self.temporaries.append(Buffer(node.value, node.scratch, begin[n], self.now))
            for ref in reads[n]:
                last[ref] = max(last[ref], finish[n] + 1)
                last_reader[ref] = n
        self.now += 1
        mine = set(program.inputs) | {ref for ref in program.outputs if ref >= 0}
        for n in dict.fromkeys(order):
            node = nodes[n]
            end = last[n]
            reader = last_reader[n]
            if reader >= 0 and n not in mine and _takes_over(nodes, reads, reader, n):
                end = begin[reader]
            if n in copied:
                self.temporaries.append(Buffer(node.value, node.nbytes, entry, last[n]))
                last[n] = entry + 1
            if n not in mine and node.nbytes:
                self.temporaries.append(Buffer(node.value, node.nbytes, begin[n], max(end, begin[n] + 1)))
        if top:
            self.spans = list(zip(begin, last, strict=True))


Reads = list[dict[int, bool]]
"""For each node that is written, the buffers it reads, and whether only element by element."""


def _drop_unread(program: Program) -> None:
    """Loops that nobody reads are not computed: transposes that products read through."""
    read = {ref for ref in program.outputs if ref >= 0}
    for n in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[n]
        if node.fusing in (Fusing.LOOP, Fusing.REDUCE) and n not in read:
            node.written = False
        else:
            read.update(node.operands)


def _reads(nodes: Sequence[Node]) -> Reads:
    """Operands through everything that stays in registers."""
    found: Reads = []
    for node in nodes:
        mine: dict[int, bool] = {}
        for k, ref in enumerate(node.operands):
            direct = k < len(node.elementwise) and node.elementwise[k]
            if nodes[ref].written:
                mine[ref] = mine.get(ref, True) and direct
            else:
                for source, same in found[ref].items():
                    mine[source] = mine.get(source, True) and direct and same
        found.append(mine)
    return found


def _takes_over(nodes: Sequence[Node], reads: Reads, reader: int, ref: int) -> bool:
    """Whether the last reader of a buffer writes its result into it."""
    node = nodes[reader]
    if node.nbytes != nodes[ref].nbytes:
        return False
    if node.in_place >= 0:
        operand = node.operands[node.in_place] if node.in_place < len(node.operands) else -1
        return operand == ref
    if not reads[reader].get(ref, False):
        return False
    # One operand only can be taken over.
    return next(s for s, same in reads[reader].items() if same and nodes[s].nbytes == node.nbytes) == ref


def _breadth_first(nodes: Sequence[Node], reads: Reads, outputs: Sequence[int]) -> list[int]:
    """What is ready runs in the order it became ready; what is ready at first, in post-order from the outputs."""
    rank = _post_order(nodes, reads, outputs)
    users: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for n in rank:
        waiting[n] = len(reads[n])
        for ref in reads[n]:
            users[ref].append(n)
    ready = deque(n for n in rank if not waiting[n])
    order: list[int] = []
    while ready:
        n = ready.popleft()
        order.append(n)
        for user in users[n]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return order


def _post_order(nodes: Sequence[Node], reads: Reads, outputs: Sequence[int]) -> list[int]:
    """Written nodes, operands first, from the first output to the last; what leads to no output comes at the end."""
    seen = [not node.written for node in nodes]
    order: list[int] = []
    for root in (*(ref for ref in outputs if ref >= 0), *range(len(nodes))):
        stack = [(root, False)]
        while stack:
            n, done = stack.pop()
            if done:
                order.append(n)
                continue
            if seen[n]:
                continue
            seen[n] = True
            stack.append((n, True))
            stack += [(ref, False) for ref in reversed(reads[n])]
    return order


def _copies(program: Program, reads: Reads) -> set[int]:
    """Inputs that are copied because a reader need not come before the output in their buffer."""
    if not program.carried:
        return set()
    nodes = program.nodes
    before = [0] * len(nodes)
    for bit, (_, out) in enumerate(program.carried):
        before[out] |= 1 << bit
    readers: dict[int, list[int]] = {source: [] for source, _ in program.carried}
    for n in range(len(nodes) - 1, -1, -1):
        if not nodes[n].written:
            continue
        for ref in reads[n]:
            before[ref] |= before[n]
            if ref in readers:
                readers[ref].append(n)
    found: set[int] = set()
    for bit, (source, out) in enumerate(program.carried):
        if source == out:
            continue
        for n in readers[source]:
            direct = n != out or reads[n][source] or (nodes[n].in_place >= 0)
            if not before[n] >> bit & 1 or not direct:
                found.add(source)
    return found
