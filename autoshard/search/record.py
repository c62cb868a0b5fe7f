"""Writes an answer down as a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoshard import jax_compat
from autoshard.cluster import Cluster
from autoshard.ir import (
    Equation,
    Graph,
    MeshShape,
    Spec,
    StepInfo,
    Value,
    aval_bytes,
    replicated,
    short_type,
)
from autoshard.plan import (
    Alternative,
    Argument,
    Collective,
    Detour,
    Memory,
    Plan,
    Resharding,
    fingerprint,
    graph_operands,
    graph_outputs,
    graph_values,
)
from autoshard.search.layout import Layout
from autoshard.search.ops import OpKind, Ops, sized, splittable
from autoshard.search.problem import Solution
from autoshard.search.rates import Traffic
from autoshard.search.why import reasons
from autoshard.timeline import Timeline


def record_plan(
    graph: Graph,
    ops: Ops,
    info: StepInfo,
    cluster: Cluster,
    mesh: MeshShape,
    layout: Layout,
    time_s: float,
    memory: Memory,
    limit: int,
    name: str,
    solution: Solution,
    alternatives: tuple[Alternative, ...],
    pins: Mapping[int, Spec],
    traffic_s: Callable[[Traffic], float],
    times: Timeline,
) -> Plan:
    """The plan of a layout; `name` says how it was found, `times` is its simulated step of `time_s`."""
    table: dict[Spec, int] = {}

    def number(spec: Spec | None) -> int:
        return -1 if spec is None else table.setdefault(spec, len(table))

    stated = {v: s for v, s in layout.spec.items() if sized(v) and splittable(v)}
    operands = _operands(ops, layout)
    outputs = _outputs(graph, ops, layout)
    values = tuple(number(stated.get(v)) for v in graph_values(graph))
    operand_ids = tuple(number(operands.get(key)) for key in graph_operands(graph))
    output_ids = tuple(number(outputs.get(key)) for key in graph_outputs(graph))
    paired_in = {i for i, _ in info.pairs}
    paired_out = {o for _, o in info.pairs}
    inputs = tuple(
        Argument(path, short_type(v.aval), layout.spec[v], aval_bytes(v.aval), i in paired_in)
        for i, (path, v) in enumerate(zip(info.input_paths, graph.inputs, strict=True))
    )
    results = tuple(
        Argument(
            path,
            short_type(atom.aval),
            outputs.get((graph, k)) or replicated(len(atom.shape)),
            aval_bytes(atom.aval),
            k in paired_out,
        )
        for k, (path, atom) in enumerate(zip(info.output_paths, graph.outputs, strict=True))
    )
    detours = _detours(layout, number)
    pinned = [info.input_paths[i] for i in pins]
    return Plan(
        fingerprint=fingerprint(graph),
        cluster=cluster.name,
        mesh=mesh,
        inputs=inputs,
        outputs=results,
        specs=tuple(table),
        values=values,
        operands=operand_ids,
        output_ids=output_ids,
        detours=detours,
        time_s=time_s,
        compute_s=layout.compute_s,
        traffic_s=layout.traffic_s,
        memory=memory,
        memory_limit=limit,
        collectives=_collectives(layout, traffic_s),
        reshardings=_reshardings(graph, ops, info, layout),
        alternatives=alternatives,
        why=reasons(name, inputs, mesh, ops, layout, time_s, solution, alternatives, pinned),
        solver=f"{solution.stats.get('engine', '')}: {solution.result.value}, gap {solution.gap:.2%}",
        donated=info.donated,
        timeline=times,
    )


def _operands(ops: Ops, layout: Layout) -> dict[tuple[Equation, int], Spec]:
    """The spec in which each operand must arrive at its equation; of control flow, at the way into its body."""
    found: dict[tuple[Equation, int], Spec] = {}
    for op in ops.ops:
        if op.equation is None:
            continue
        if op.kind is OpKind.APPLY:
            specs = layout.choice[op.index].operands
            first = max(op.position, 0)
            found.update({(op.equation, first + k): specs[k] for k, atom in enumerate(op.operands) if sized(atom)})
        elif op.kind is OpKind.ENTER and op.position >= 0 and op.equation.name != "cond" and sized(op.operands[0]):
            found[op.equation, op.position] = layout.choice[op.index].operands[0]
    return found


def _outputs(graph: Graph, ops: Ops, layout: Layout) -> dict[tuple[Graph, int], Spec]:
    """The spec in which each output must leave its graph."""
    found: dict[tuple[Graph, int], Spec] = {}
    for owner, k in graph_outputs(graph):
        atom = owner.outputs[k]
        if isinstance(atom, Value) and atom in layout.spec:
            found[owner, k] = layout.spec[atom]
    for op in ops.ops:
        if op.kind is OpKind.LEAVE and op.equation is not None and isinstance(op.operands[0], Value):
            body = op.equation.graphs[-1] if op.equation.name == "while" else op.equation.graphs[0]
            if body.outputs[op.position] is op.operands[0]:
                found[body, op.position] = layout.choice[op.index].operands[0]
    for tie in ops.ties:
        found[tie.body, tie.output] = layout.spec[tie.target]
    return found


def _detours(layout: Layout, number: Callable[[Spec | None], int]) -> tuple[Detour, ...]:
    """Reshardings that go through a spec in between."""
    found: dict[Detour, None] = {}
    for move in layout.moves:
        if len(move.route.path) > 1:
            way = tuple(number(spec) for spec in move.route.path)
            found[(move.value.shape, number(move.source), way)] = None
    return tuple(found)


def _collectives(layout: Layout, traffic_s: Callable[[Traffic], float]) -> tuple[Collective, ...]:
    rows: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    every = [(t, times) for _, t, times in layout.sums]
    every += [(t, move.times) for move in layout.moves for t in move.route.traffic]
    for traffic, times in every:
        row = rows.setdefault((traffic.kind, traffic.axes), [0, 0, 0.0])
        row[0] += times
        row[1] += times * traffic.nbytes
        row[2] += times * traffic_s(traffic)
    made = [Collective(kind, axes, int(n), int(b), s) for (kind, axes), (n, b, s) in rows.items()]
    return tuple(sorted(made, key=lambda c: -c.time_s))


def _reshardings(graph: Graph, ops: Ops, info: StepInfo, layout: Layout) -> tuple[Resharding, ...]:
    paths = dict(zip(graph.inputs, info.input_paths, strict=True))
    rows: list[Resharding] = []
    for move in layout.moves:
        if not move.route.traffic:
            continue
        op, _ = ops.maker[move.value]
        line = jax_compat.source_line(op.equation.place.source) if op.equation is not None else ""
        what = (
            f"{paths[move.value]} {short_type(move.value.aval)}" if move.value in paths else short_type(move.value.aval)
        )
        nbytes = move.times * sum(t.nbytes for t in move.route.traffic)
        kinds = tuple(t.kind for t in move.route.traffic)
        seconds = move.times * move.route.time_s
        rows.append(Resharding(what, line, move.source, move.route.path[-1], kinds, nbytes, move.times, seconds))
    return tuple(sorted(rows, key=lambda r: -r.time_s))
