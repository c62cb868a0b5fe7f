"""Which operations of one device are written to memory: XLA:GPU's fusion on `memory_program` nodes.

XLA:GPU (priority_fusion.cc) fuses a producer into all its readers where its cost model finds that quicker. A loop v
with n kernels that read it, of which kernel k reads R_k from memory anyway, computed from what lies in memory, S:

    written     S + v + n v          bytes through memory, and a kernel more
    computed    sum over k of  S - R_k,  and (n - 1) times the work of the elements

Work counts as the bytes that would take as long. What lies in memory already and is no larger than what it is computed
from cuts S: a residual stream is read, not computed again from all layers before. Readers of one loop shape that cannot
depend on each other become one kernel (multi-output fusion).
"""

from __future__ import annotations

from typing import final

from autoshard.costmodel.memory_program import Fusing, Node, Program

LAUNCH = 3_000_000
"""Bytes that take as long as a kernel's launch: 1 us (XLA, gpu_performance_model_base.h, kKernelLaunchOverhead) at an
H100's 3.35 TB/s, rounded."""

MAX_SOURCES = 96
"""Most operands of one kernel (XLA, gpu_fusible.h, MaxOperandsAndOutputsPerFusion)."""

MAX_KERNELS = 64
"""Kernels that one loop is computed again in at most. Nominal: keeps the estimate linear."""

ROUNDS = 2
"""Times the estimate is made, each with what the one before found in memory."""

Key = tuple[int, int]
"""Elements of a kernel's loop, and how many kernels come before it at least."""


def mark_written_gpu(program: Program) -> None:
    """Sets `written` of every node of a program for a GPU; what is set already is where the first round begins."""
    for _ in range(ROUNDS):
        _Round(program).run()


@final
class _Round:
    """One estimate: forward what each node is computed from, backward who reads it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = program.nodes
        count = len(self.nodes)
        self.sources: list[frozenset[int]] = [frozenset()] * count
        self.work = [0.0] * count
        self.depth = [0] * count
        self.forced = [False] * count
        self.readers: list[set[int]] = [set() for _ in range(count)]
        self.key: dict[int, Key] = {}
        self.parent: dict[int, int] = {}
        self.reads: dict[int, set[int]] = {}

    def run(self) -> None:
        for ref in self.program.outputs:
            if ref >= 0:
                self.forced[ref] = True
        for n, node in enumerate(self.nodes):
            self._forward(n, node)
        for n in range(len(self.nodes) - 1, -1, -1):
            self._backward(n, self.nodes[n])

    def _forward(self, n: int, node: Node) -> None:
        depth = max((self.depth[ref] for ref in node.operands), default=0)
        self.depth[n] = depth + (node.fusing in (Fusing.ALONE, Fusing.REDUCE))
        self.sources[n] = frozenset((n,))
        if node.fusing is not Fusing.LOOP:
            if node.fusing is not Fusing.REDUCE:
                for ref in node.operands:
                    self.forced[ref] = True
            return
        found = frozenset[int]().union(*(self.sources[ref] for ref in node.operands))
        if len(found) > MAX_SOURCES:
            self.forced[n] = True
            return
        if node.written and node.nbytes <= self._bytes(found):
            return
        self.sources[n] = found
        self.work[n] = node.work + sum(self.work[ref] for ref in set(node.operands))

    def _bytes(self, refs: frozenset[int] | set[int]) -> int:
        return sum(self.nodes[ref].nbytes for ref in refs)

    def _backward(self, n: int, node: Node) -> None:
        match node.fusing:
            case Fusing.INPUT:
                return
            case Fusing.ALONE | Fusing.PART:
                node.written = True
                return
            case Fusing.REDUCE:
                node.written = True
                largest = max((self.nodes[ref].elements for ref in node.operands), default=0)
                kernels = {self._kernel(n, largest)}
            case Fusing.LOOP:
                kernels = self._loop(n, node)
        for kernel in kernels:
            reads = self.reads[kernel]
            for ref in node.operands:
                self.readers[ref].add(kernel)
                reads |= self.sources[ref]

    def _kernel(self, n: int, elements: int) -> int:
        depth = max((self.depth[ref] for ref in self.nodes[n].operands), default=0)
        self.key[n] = (elements or -1 - n, depth)
        self.reads[n] = set()
        return n

    def _loop(self, n: int, node: Node) -> set[int]:
        """The kernels that compute a loop."""
        readers = {self._find(kernel) for kernel in self.readers[n]}
        node.written = self.forced[n] or node.solid or not self._computed(n, node, readers)
        if not node.written:
            self._join(readers)
            return {self._find(kernel) for kernel in readers}
        mine = self._kernel(n, node.elements)
        for kernel in readers:
            if self.key[kernel] == self.key[mine]:
                self.parent[kernel] = mine
                self.reads[mine] |= self.reads[kernel]
        return {mine}

    def _computed(self, n: int, node: Node, readers: set[int]) -> bool:
        """Whether each reader computes it for itself."""
        count = len({self.key[kernel] for kernel in readers})
        if count <= 1:
            return True
        if len(readers) > MAX_KERNELS:
            return False
        found = self.sources[n]
        if n in found:  # cut here in the round before; what it is computed from
            found = frozenset[int]().union(*(self.sources[ref] for ref in node.operands))
        again = sum(self._bytes(found - (self.reads[kernel] - {n})) for kernel in readers)
        work = (len(readers) - 1) * (self.work[n] or node.work)
        return again + work <= self._bytes(found) + (1 + len(readers)) * node.nbytes + LAUNCH

    def _join(self, readers: set[int]) -> None:
        """Kernels of one loop shape that this operand is common to become one."""
        first: dict[Key, int] = {}
        for kernel in sorted(readers):
            kept = first.setdefault(self.key[kernel], kernel)
            if kept != kernel:
                self.parent[kernel] = kept
                self.reads[kept] |= self.reads[kernel]

    def _find(self, kernel: int) -> int:
        while kernel in self.parent:
            kernel = self.parent[kernel]
        return kernel
