"""What choices and reshardings cost on one mesh of one cluster; every answer is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import final

from autoshard.cluster import Cluster
from autoshard.costmodel import (
    WHOLE,
    EquationKernels,
    Work,
    WorkKind,
    aligned,
    cpu_kernels,
    equation_work,
    find_buffers,
    fresh_pages_s,
    materialized,
    measured_time_s,
    peak_memory,
    stored_anywhere,
    work_time_s,
)
from autoshard.ir import Atom, FactorKind, Graph, MeshShape, Spec, Value, axes_size, local_bytes, spec_axes
from autoshard.passes import Constrain
from autoshard.search.choices import Choice
from autoshard.search.ops import Op, OpKind, list_ops
from autoshard.search.problem import Floats
from autoshard.search.rates import Route, Traffic, rates

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
BY_DIMENSION = frozenset(("dot_general", "conv_general_dilated", *REDUCTIONS))
"""Primitives whose sums XLA combines once for each summed dimension (jax 0.10.1, CPU)."""


@final
class Pricer:
    """Costs on one mesh.

    Attributes:
      cluster: the devices and links.
      mesh: axes and sizes.
      sizes: the same as a mapping.
      overlaps: whether collectives run beside compute: XLA makes them asynchronous on GPUs, on CPUs it does not.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: MeshShape,
        written: Callable[[Value], bool],
        kernels: Mapping[int, EquationKernels] | None = None,
    ) -> None:
        self.cluster = cluster
        self.mesh = mesh
        self.sizes = dict(mesh)
        self._device = cluster.device(0)
        self.overlaps = self._device.kind != "cpu"
        self._materialized = written
        self._kernels = kernels
        self._rates = rates(cluster, mesh)
        self._work: dict[int, Work] = {}

    def traffic_s(self, traffic: Traffic) -> float:
        """Seconds of one collective."""
        return self._rates.traffic_s(traffic)

    def reshard(self, value: Value, source: Spec, target: Spec) -> Route:
        """How a value gets from one spec to another, and what that costs."""
        return self._rates.route(value, source, target)

    def reshard_s(self, value: Value, sources: Sequence[Spec], targets: Sequence[Spec]) -> Floats:
        """Seconds from each of the sources to each of the targets, shape (sources, targets)."""
        return self._rates.table(value, sources, targets)

    def reshards(self, value: Value, source: Spec, targets: Iterable[Spec]) -> Iterator[Route]:
        """The routes of one value to several specs; a step that routes begin alike with is paid by the first."""
        paid: set[tuple[Spec, ...]] = set()
        for target in targets:
            route = self.reshard(value, source, target)
            shared = 0
            for k in range(len(route.path)):
                if route.path[: k + 1] in paid:
                    shared = k + 1
                paid.add(route.path[: k + 1])
            if shared:
                steps = ((),) * shared + route.steps[shared:]
                route = Route(route.path, steps, sum(self.traffic_s(t) for step in steps for t in step))
            yield route

    def sums(self, op: Op, choice: Choice) -> tuple[Traffic, ...]:
        """Collectives that combine an op's partial results.

        XLA all-reduces a sum over several dimensions once for each of them, last one first; other ops once. A sum that
        is scattered over all its axes on one dimension is one all-reduce, or reduce-scatter, of the whole; of a matrix
        product scattered over some of its axes the others may follow on what is left (see `Constrain.first_scatter`):

            partial over a and b, to (-,b):    all-reduce over b of n bytes, slice, all-reduce over a of n / b bytes
        """
        if not choice.partial:
            return ()
        return tuple(t for v, s in zip(op.results, choice.results, strict=True) for t in self._sum(op, choice, v, s))

    def _sum(self, op: Op, choice: Choice, value: Value, spec: Spec) -> Iterator[Traffic]:
        name = op.equation.name if op.equation is not None else ""
        base = tuple(tuple(a for a in axes if a not in choice.scattered) for axes in spec)
        nbytes = local_bytes(value.aval, base, self.sizes)
        first = Constrain.first_scatter(name, spec, choice.partial, self.sizes)
        left = choice.partial
        groups = [set(axes) for _, axes in Constrain.scattered_groups(spec, choice.scattered, self.sizes)]
        local = op.equation is not None and Constrain.is_local(op.equation, choice.split_axes)
        if first is not None:
            _, axes = first
            yield self._combine(nbytes, axes, groups)
            nbytes //= axes_size(axes, self.sizes)
            left = tuple(axis for axis in left if axis not in axes)
        by_dimension = not local and name in BY_DIMENSION
        factors = op.rule.of_kind(FactorKind.REDUCTION) if by_dimension else ()
        for factor in reversed(factors):
            axes = tuple(axis for axis in choice.assignment[factor] if axis in left)
            if axes:
                yield self._combine(nbytes, axes, groups)
        if left and not factors:
            yield self._combine(nbytes, left, groups)

    def _combine(self, nbytes: int, axes: tuple[str, ...], groups: Sequence[set[str]]) -> Traffic:
        """One collective; a reduce-scatter where the result is split over all its axes in one dimension."""
        scatters = self._device.reduce_scatter and any(group.issuperset(axes) for group in groups)
        return Traffic("reduce_scatter" if scatters else "all_reduce", nbytes, axes)

    def compute_s(self, op: Op, choice: Choice) -> float:
        """Seconds of an op's own work on one device, collectives apart."""
        if op.kind is not OpKind.APPLY or op.equation is None:
            return 0.0
        if op.index not in self._work:
            self._work[op.index] = equation_work(op.equation)
        work = self._work[op.index]
        if self._kernels is not None and work.kind is not WorkKind.FREE:
            found = self._kernels.get(id(op.equation))
            if found is not None:
                return self._measured_s(op, choice, work, found)
        moved = 0.0
        for k, (atom, spec) in enumerate(zip(op.operands, choice.operands, strict=True)):
            if isinstance(atom, Value) and self._materialized(atom):
                moved += work.operand_bytes[k] / axes_size(spec_axes(spec), self.sizes)
        for k, (value, spec) in enumerate(zip(op.results, choice.results, strict=True)):
            if self._materialized(value):
                moved += work.result_bytes[k] / axes_size(spec_axes(spec), self.sizes)
        share = 1.0 / axes_size(choice.split_axes, self.sizes)
        fused = not any(self._materialized(value) for value in op.results)
        return work_time_s(work, share, moved, self._device, fused=fused)

    def _measured_s(self, op: Op, choice: Choice, work: Work, kernels: EquationKernels) -> float:
        """Of a calibrated device: bytes, launches and copies are those of its compiler's kernels."""
        moved, across, hard = 0.0, 0.0, 0.0
        for k, spec in enumerate(choice.operands):
            if kernels.reads[k] or kernels.strided_reads[k]:
                nbytes = work.operand_bytes[k] / axes_size(spec_axes(spec), self.sizes)
                moved += kernels.reads[k] * nbytes
                across += kernels.strided_reads[k] * nbytes
                if kernels.strided_reads[k] and aligned(_row_bytes(op.operands[k], spec, self.sizes)):
                    hard += kernels.strided_reads[k] * nbytes
        for nbytes, written, spec in zip(work.result_bytes, kernels.writes, choice.results, strict=True):
            if written:
                moved += nbytes / axes_size(spec_axes(spec), self.sizes)
        return measured_time_s(
            work,
            1.0 / axes_size(choice.split_axes, self.sizes),
            moved,
            self._device,
            launches=kernels.launches,
            copies=kernels.copies,
            strided=kernels.strided,
            strided_bytes=across,
            aligned_bytes=hard,
            fused=kernels.fused,
        )


def _row_bytes(atom: Atom, spec: Spec, sizes: Mapping[str, int]) -> float:
    """Bytes of the last dimension of a device's part."""
    if not atom.shape:
        return 0.0
    return atom.shape[-1] * atom.dtype.itemsize / axes_size(spec[-1], sizes)


def step_compute(
    graph: Graph, cluster: Cluster, donated: Sequence[tuple[int, int]] = ()
) -> Iterator[tuple[str, float]]:
    """(primitive, seconds in a step) of all that one device runs of a graph that nothing splits.

    Args:
      graph: a step.
      cluster: its first device counts.
      donated: (input, output) pairs of which the output takes the input's memory.
    """
    device = cluster.device(0)
    kernels = cpu_kernels(graph) if device.calibrated and device.kind == "cpu" else None
    written = materialized(graph).__contains__ if device.kind == "gpu" else None
    pricer = Pricer(cluster, (), stored_anywhere(graph).__contains__, kernels)
    for op in list_ops(graph).ops:
        if op.kind is not OpKind.APPLY or op.equation is None:
            continue
        specs = tuple(((),) * len(atom.shape) for atom in op.operands)
        choice = Choice((), specs, tuple(((),) * len(v.shape) for v in op.results))
        yield op.equation.name, op.times * pricer.compute_s(op, choice)
    peak = peak_memory(find_buffers(graph, donated, device.kind, WHOLE, written))
    yield "fresh pages", fresh_pages_s(peak.temporary_bytes, device)
