"""In which order a GPU runs a program's kernels: XLA's latency-hiding scheduler on `memory_program` nodes.

XLA (latency_hiding_scheduler.cc) lists the program from its end. What all readers of are listed is ready. A collective
that is ready is listed as done at once, if no other is on its way, and as started when its time has passed or nothing
else is ready. Kernels that nothing waits for, such as products for weight gradients, fill these times and so run late,
with all that they read alive until then.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from autoshard.costmodel.memory_program import Fusing, Node

LAUNCH_S = 1e-6
"""A kernel (XLA, gpu_performance_model_base.h, kKernelLaunchOverhead)."""

COLLECTIVE_S = 4e-6
"""A collective. Fitted on jax 0.10.1: of 2 to 10 us it came nearest to XLA's count of the zoo's memory."""

LINK_BYTES_PER_S = 4e12
"""What a collective moves meanwhile. Fitted: at NVLink's 4.5e11 products in ViT-B/16 wait for three times as
many collectives as XLA lets them; XLA's estimate of a collective hardly grows with its bytes."""

BYTES_PER_S = 3.35e12
FLOPS_PER_S = 8e14
"""An H100's memory, and bf16 products at 80 % (data sheet)."""


def overlapped_order(nodes: Sequence[Node], reads: Sequence[Mapping[int, bool]]) -> list[int]:
    """The written nodes in the order of a GPU; a collective stands where it starts and again where it is done."""
    unit = list(range(len(nodes)))  # results of one kernel go with it
    parts: dict[int, list[int]] = {}
    for n, node in enumerate(nodes):
        if node.written and node.fusing is Fusing.PART:
            unit[n] = unit[node.operands[0]]
            parts.setdefault(unit[n], []).append(n)
    operands: list[set[int]] = [set() for _ in nodes]
    for n, node in enumerate(nodes):
        if node.written:
            operands[unit[n]].update(unit[ref] for ref in reads[n])
    waiting = [0] * len(nodes)
    for n, node in enumerate(nodes):
        operands[n].discard(n)
        if node.written and unit[n] == n:
            for ref in operands[n]:
                waiting[ref] += 1
    kernels: list[int] = []
    collectives: list[int] = []

    def ready(n: int) -> None:
        heapq.heappush(collectives if nodes[n].collective else kernels, -n)

    for n, node in enumerate(nodes):
        if node.written and unit[n] == n and not waiting[n]:
            ready(n)
    backward: list[int] = []
    now, moving, arrives = 0.0, -1, 0.0
    while kernels or collectives or moving >= 0:
        listed = -1
        if moving >= 0 and (arrives <= now or not kernels):
            listed, now, moving = moving, max(now, arrives), -1
            backward.append(listed)
        elif moving < 0 and collectives:
            moving = -heapq.heappop(collectives)
            arrives = now + COLLECTIVE_S + nodes[moving].nbytes / LINK_BYTES_PER_S
            backward.append(moving)
        else:
            listed = -heapq.heappop(kernels)
            now += _seconds(nodes, listed, operands[listed])
            backward += [*reversed(parts.get(listed, ())), listed]
        if listed >= 0:
            for ref in operands[listed]:
                waiting[ref] -= 1
                if not waiting[ref]:
                    ready(ref)
    return backward[::-1]


def _seconds(nodes: Sequence[Node], n: int, operands: set[int]) -> float:
    """Of a kernel; a product of a x b and b x c elements has 2 a b c operations."""
    node = nodes[n]
    if node.fusing is Fusing.INPUT:
        return 0.0
    nbytes = node.nbytes + sum(nodes[ref].nbytes for ref in operands)
    flops = 0.0
    if node.fusing is Fusing.ALONE and len(operands) == 2:
        flops = 2.0
        for ref in (*operands, n):
            flops *= float(nodes[ref].elements or nodes[ref].nbytes / 2) ** 0.5
    return LAUNCH_S + max(nbytes / BYTES_PER_S, flops / FLOPS_PER_S)
