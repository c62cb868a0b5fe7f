"""PipeDream's planner (Narayanan et al., SOSP 2019, section 3.1): the slowest stage as fast as can be.

    A(j, m) = min over k, m' of max{ A(k, m - m'), 2 max(a_k, a_j) / (b m') if transfers count, T(k+1, j, m') }
    T(i, j, m) = (seconds of layers i..j + 4 (m-1)/m * parameter bytes / b) / m

for asynchronous pipelines, in which each replica sums its gradients after each microbatch of its own. The factor 4 and
2 are the released optimizer's, whose published replicas this reproduces.
"""

from __future__ import annotations

from autoshard.errors import ArgumentError, explain
from autoshard.search.stages.table import PlannedStage, StagePlan, StageTable, check_planned


def plan_pipedream(
    table: StageTable, devices: int, bytes_per_s: float, *, transfers: bool = False, straight: bool = False
) -> StagePlan:
    """The plan whose slowest stage is fastest.

    Args:
      table: costs of the layers for one microbatch.
      devices: number of them, all joined alike.
      bytes_per_s: of each.
      transfers: whether activations between stages count.
      straight: whether each stage has one device.

    Raises:
      ArgumentError: no layers or devices, a rate not above 0, or fewer layers than devices of a straight pipeline.
    """
    check_planned(table, devices, 1)
    if not bytes_per_s > 0:
        raise ArgumentError(explain(f"{bytes_per_s} bytes a second", "a rate above 0", "correct it"))
    size = table.layers
    if straight and table.most_stages < devices:
        given = f"a straight pipeline of {table.most_stages} layers on {devices} devices"
        raise ArgumentError(explain(given, "at least a layer for each", "use fewer devices"))
    best = [[float("inf")] * (devices + 1) for _ in range(size)]
    came: list[list[tuple[int, int]]] = [[(-1, 0)] * (devices + 1) for _ in range(size)]
    for last in range(size):
        for count in range(1, devices + 1):
            if not straight or count == 1:
                best[last][count], came[last][count] = _stage_s(table, 0, last, count, bytes_per_s), (-1, count)
            for k in table.before_of(last):
                for own in range(1, 2 if straight else count):
                    seconds = max(best[k][count - own], _stage_s(table, k + 1, last, own, bytes_per_s))
                    if transfers:
                        sent = max(table.output_bytes[k], table.output_bytes[last] if last < size - 1 else 0.0)
                        seconds = max(seconds, 2 * sent / (bytes_per_s * own))
                    if seconds < best[last][count]:
                        best[last][count], came[last][count] = seconds, (k, own)
    stages: list[PlannedStage] = []
    last, left = size - 1, devices
    while last >= 0:
        k, own = came[last][left]
        stages.append(PlannedStage(k + 1, last, tuple(range(left - own, left))))
        last, left = k, left - own
    seconds = best[size - 1][devices]
    why = f"no split has a slowest stage below {seconds:.3g} s a microbatch"
    return StagePlan(tuple(reversed(stages)), seconds, why)


def _stage_s(table: StageTable, first: int, last: int, count: int, bytes_per_s: float) -> float:
    forward_s, backward_s, nbytes = table.cost(first, last)
    return (forward_s + backward_s + 4 * (count - 1) / count * nbytes / bytes_per_s) / count
