"""Which operations of one device are written to memory: XLA:CPU's fusion on `memory_program` nodes.

XLA:CPU (cpu_instruction_fusion.cc and the base class in instruction_fusion.cc) goes from the last operation to the
first and fuses an operation into its readers:

    one reader     fused, unless it is expensive and the reader reads its elements more than once
    more readers   fused into each (computed again) if it is cheap and every reader can take it, or if it is at most
                   unary, then also only into those that can; expensive ones are written

Loops and reductions are fused both into readers and with what they read; all else is a kernel of its own.
"""

from __future__ import annotations

from autoshard.costmodel.memory_program import Fusing, Node, Program

MAX_KERNELS = 32
"""Kernels that an operation is computed again in at most. Nominal: keeps the estimate linear; XLA limits code size."""


ALLOWED_DUPLICATION = 15
"""Index computations one operation may be emitted for in one kernel (XLA, fusion_node_indexing_evaluation.cc)."""

Use = tuple[bool, frozenset[int]]
"""How a kernel reads a node: whether it reuses elements, and the nodes whose index computations lead to it."""


def mark_written(program: Program) -> None:
    """Sets `written` of every node of a program for a CPU."""
    nodes = program.nodes
    uses: list[dict[int, Use]] = [{} for _ in nodes]
    emitted: dict[tuple[int, int], int] = {}
    blocked = [False] * len(nodes)
    for ref in program.outputs:
        if ref >= 0:
            blocked[ref] = True
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if node.fusing is Fusing.INPUT:
            continue
        kernels = _kernels(node, index, uses[index], emitted, blocked[index])
        if index in kernels:
            emitted[index, index] = 1
        for k, ref in enumerate(node.operands):
            if not kernels:
                break
            if node.fusing in (Fusing.ALONE, Fusing.PART):
                blocked[ref] = True
                continue
            reuse = node.reuses[k] if k < len(node.reuses) else False
            keeps = nodes[ref].nbytes == node.nbytes
            mine = uses[ref]
            for kernel, (r, users) in kernels.items():
                before = mine.get(kernel)
                through = users if keeps else frozenset((index,))
                if before is None:
                    mine[kernel] = (r or reuse, through)
                else:
                    mine[kernel] = (before[0] or r or reuse, before[1] | through)


def _kernels(
    node: Node, index: int, takers: dict[int, Use], emitted: dict[tuple[int, int], int], blocked: bool
) -> dict[int, Use]:
    """The kernels that compute a node, its own number among them if it is written; sets `written`."""
    alone: dict[int, Use] = {index: (False, frozenset((index,)))}
    if node.fusing not in (Fusing.LOOP, Fusing.REDUCE) or node.solid:
        node.written = True
        return alone
    if not takers and not blocked:
        node.written = False
        return {}
    fits: dict[int, Use] = {}
    for kernel, use in takers.items():
        count = sum(emitted[user, kernel] for user in use[1])
        emitted[index, kernel] = count
        if count <= ALLOWED_DUPLICATION and not (node.expensive and use[0]):
            fits[kernel] = use
    few = len(takers) <= MAX_KERNELS
    if node.expensive:
        node.written = blocked or len(fits) != 1 or len(takers) != 1
        return alone if node.written else fits
    unary = len(node.operands) <= 1 and node.fusing is Fusing.LOOP
    if not few or (blocked and not unary):
        node.written = True
        return alone
    node.written = blocked or len(fits) < len(takers)
    return {**fits, **alone} if node.written else fits
