"""Time of a whole graph on one device, by the roofline: what a learned model is measured against."""

from __future__ import annotations

from autoshard.cluster import DeviceSpec
from autoshard.costmodel.fusion import materialized
from autoshard.costmodel.roofline import work_time_s
from autoshard.costmodel.work import equation_work
from autoshard.ir import Graph, Value, trip_count


def graph_time_s(graph: Graph, device: DeviceSpec) -> float:
    """Seconds of all equations one after the other, nothing split.

    Values that stay in a fusion's registers move no bytes, and an equation with only such results is launched by
    another. Bodies of control flow count as often as they are known to run (`ir.trip_count`).
    """
    in_memory = materialized(graph)
    total = 0.0
    for equation in graph.equations:
        work = equation_work(equation)
        moved = sum(
            nbytes
            for atom, nbytes in zip(equation.inputs, work.operand_bytes, strict=True)
            if isinstance(atom, Value) and atom in in_memory
        )
        moved += sum(
            nbytes for value, nbytes in zip(equation.outputs, work.result_bytes, strict=True) if value in in_memory
        )
        fused = not any(value in in_memory for value in equation.outputs)
        total += work_time_s(work, 1.0, moved, device, fused=fused)
        total += trip_count(equation) * sum(graph_time_s(body, device) for body in equation.graphs)
    return total
