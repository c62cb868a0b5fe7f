"""What a synchronous pipeline takes: DAPPLE's closed form, and the same pipeline as tasks.

DAPPLE (Fan et al., PPoPP 2021, section 4.2), stages and the links between them as one list of blocks s = 0..S-1, with
forward and backward time F_s, B_s of one microbatch, M microbatches, all-reduce AR_s of a block's gradients:

    L = Tw + Ts + Te    Tw = sum_{s<=Q} F_s    Ts = (M-1)(F_Q + B_Q)
    Te = max_s( AR_s + (sum_{a=s..Q} B_a  if s <= Q  else  -sum_{a=Q..s-1} B_a) )
    Q: from the last block down, s becomes the pivot if (M-1)(F_s+B_s) > (M-1)(F_Q+B_Q) + sum_{s<a<Q}(F_a+B_a)

The released planner does not use the closed form but recursion over the schedule (one forward, one backward, block s
runs S - s forwards ahead), which is what the tasks here say:

    forward (i, s)    after  forward (i, s-1), forward (i-1, s), backward (i - (S-s), s)
    backward (i, s)   after  backward (i, s+1), forward (i + S-s-1, s), forward (i, s)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from autoshard.costmodel.task_graph import TaskGraph, TaskGraphBuilder
from autoshard.errors import ArgumentError, explain


@final
@dataclass(frozen=True, slots=True)
class Block:
    """A stage, or a link between two, of a pipeline.

    Attributes:
      forward_s, backward_s: seconds for one microbatch.
      all_reduce_s: seconds to sum its gradients over its replicas, 0 for links.
    """

    forward_s: float
    backward_s: float
    all_reduce_s: float = 0.0


def pipeline_latency_s(blocks: Sequence[Block], microbatches: int) -> float:
    """Seconds of one step by DAPPLE's closed form; see the module.

    Raises:
      ArgumentError: no blocks, or no microbatch.
    """
    _check(blocks, microbatches)
    both = [b.forward_s + b.backward_s for b in blocks]
    steady = microbatches - 1
    pivot = len(blocks) - 1
    for s in range(len(blocks) - 2, -1, -1):
        if steady * both[s] > steady * both[pivot] + sum(both[s + 1 : pivot]):
            pivot = s
    warm = sum(b.forward_s for b in blocks[: pivot + 1])
    ends: list[float] = []
    for s, block in enumerate(blocks):
        after = sum(b.backward_s for b in blocks[s : pivot + 1])
        ends.append(block.all_reduce_s + (after if s <= pivot else -sum(b.backward_s for b in blocks[pivot:s])))
    return warm + steady * both[pivot] + max(ends)


def pipeline_tasks(blocks: Sequence[Block], microbatches: int, *, contention: bool = True) -> TaskGraph:
    """The pipeline as tasks, one forward one backward; see the module.

    Args:
      blocks: stages and links in order.
      microbatches: of one step.
      contention: whether a block does one thing at a time; else only the order above holds, as in the planner's law.

    Raises:
      ArgumentError: no blocks, or no microbatch.
    """
    _check(blocks, microbatches)
    builder = TaskGraphBuilder()
    size = len(blocks)
    streams = [(builder.stream(f"block {s}", s),) if contention else () for s in range(size)]
    done: dict[tuple[str, int, int], int] = {}
    orders = [_order(s, size, microbatches) for s in range(size)]
    left = True
    while left:
        left = False
        for s, order in enumerate(orders):
            while order:
                kind, i = order[0]
                if kind == "forward":
                    before = (("forward", i, s - 1), ("forward", i - 1, s), ("backward", i - (size - s), s))
                    time_s = blocks[s].forward_s
                else:
                    before = (("backward", i, s + 1), ("forward", i + size - s - 1, s), ("forward", i, s))
                    time_s = blocks[s].backward_s
                before = [k for k in before if 0 <= k[1] < microbatches and 0 <= k[2] < size]
                if any(k not in done for k in before):
                    break
                after = [done[k] for k in before]
                done[kind, i, s] = builder.task(
                    f"{kind} {i}", time_s=time_s, streams=streams[s], after=after, kind=kind
                )
                order.popleft()
                left = True
    for s, block in enumerate(blocks):
        if block.all_reduce_s:
            last = done["backward", microbatches - 1, s]
            builder.task("all-reduce", time_s=block.all_reduce_s, after=(last,), kind="all_reduce")
    return builder.build()


def _order(s: int, size: int, microbatches: int) -> deque[tuple[str, int]]:
    """What block s does: size - s forwards ahead, then one backward and one forward in turn."""
    ahead = min(size - s, microbatches)
    order = deque(("forward", i) for i in range(ahead))
    for i in range(microbatches):
        order.append(("backward", i))
        if ahead + i < microbatches:
            order.append(("forward", ahead + i))
    return order


def _check(blocks: Sequence[Block], microbatches: int) -> None:
    if not blocks or microbatches < 1:
        raise ArgumentError(
            explain(
                f"a pipeline of {len(blocks)} blocks and {microbatches} microbatches", "at least one of each", "add one"
            )
        )
