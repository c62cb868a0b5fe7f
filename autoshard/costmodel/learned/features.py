"""A compiled program as arrays: one row a kernel (and one for the call), edges from producer to reader.

nodes    [K, WIDTH]   kernel_features.py
base_s   [K]          seconds the network corrects, runs of the kernel included
work     [K, 3]       operations, results of functions, bytes moved: what the roofline asks for
edges    [E, 2]       producer, reader
bytes    [E]          log of the bytes handed on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from autoshard.costmodel.learned.access import accesses
from autoshard.costmodel.learned.hlo_graph import parse_module
from autoshard.costmodel.learned.kernel_features import call_features, kernel_features, log1
from autoshard.costmodel.learned.recall import kernel_keys
from autoshard.costmodel.learned.untyped import jax
from autoshard.ir import Graph, evaluate

Array = np.ndarray

NODES = 2048
"""Nodes of a batch; only a program that is larger alone makes a larger one."""


CONTAINERS = frozenset(("while", "conditional"))


@final
@dataclass(frozen=True, slots=True)
class Features:
    """One program; see the module.

    Attributes:
      names: HLO instructions of the kernels; empty for loops and branches, whose time is not their own, and for the
        call, which stands last.
      runs: how often each kernel runs in a call.
      keys: what alike kernels share, [K, 3] (`recall.py`).
    """

    nodes: Array
    base_s: Array
    edges: Array
    edge_bytes: Array
    work: Array
    names: tuple[str, ...]
    runs: Array
    keys: Array


def hlo_features(text: str) -> Features:
    """The arrays of an optimized HLO module.

    Raises:
      ArgumentError: the text is no HLO module.
    """
    module = parse_module(text)
    rows: list[Array] = []
    bases: list[float] = []
    edges: list[tuple[int, int]] = []
    sizes: list[float] = []
    work: list[tuple[float, float, float]] = []
    found = accesses(module)
    footprint = float(sum(sum(a.read) + a.written for a in found))
    names: list[str] = []
    keys: list[tuple[int, int, int]] = []
    for index, (kernel, access) in enumerate(zip(module.kernels, found, strict=True)):
        figures = kernel_features(kernel, access, footprint)
        rows.append(figures.row)
        keys.append(kernel_keys(kernel))
        bases.append(figures.base_s * kernel.trips)
        names.append("" if kernel.instruction.opcode in CONTAINERS else kernel.name)
        work.append((figures.operations, figures.transcendentals, figures.moved))
        for producer, nbytes in kernel.producers:
            edges.append((producer, index))
            sizes.append(log1(nbytes))
    row, base = call_features(module.arguments, module.results, len(rows))
    rows.append(row)
    bases.append(base)
    return Features(
        np.stack(rows),
        np.array(bases, np.float32),
        np.array(edges, np.int32).reshape(-1, 2),
        np.array(sizes, np.float32),
        np.array([*work, (0.0, 0.0, 0.0)]),
        (*names, ""),
        np.array([*(kernel.trips for kernel in module.kernels), 1.0]),
        np.array([*keys, (-1, -1, -1)], np.int64),
    )


def compile_text(graph: Graph) -> str:
    """Optimized HLO of a graph on one CPU device, one thread, as the measured programs were compiled."""
    device: Any = jax.devices("cpu")[0]
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in graph.inputs]
    place = jax.sharding.SingleDeviceSharding(device)

    def call(*args: Any) -> tuple[Any, ...]:
        return tuple(evaluate(graph, args))

    fun = jax.jit(call, in_shardings=place)
    return str(fun.lower(*avals).compile({"xla_cpu_multi_thread_eigen": False}).as_text())


def pack(sizes: Sequence[tuple[int, int]], order: Sequence[int], most: int) -> list[list[int]]:
    """Programs into batches, in the order given: at most `most` programs, and what `NODES` and its edges hold.

    Args:
      sizes: nodes and edges of each program.
      order: their numbers.
      most: programs in a batch.
    """
    batches: list[list[int]] = []
    nodes, edges = NODES, 0
    for i in order:
        n, e = sizes[i]
        if not batches or nodes + n >= NODES or edges + e > 2 * NODES or len(batches[-1]) == most:
            batches.append([])
            nodes = edges = 0
        batches[-1].append(i)
        nodes, edges = nodes + n, edges + e
    return batches


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """Several programs as one graph, padded.

    Attributes:
      nodes, base_s, edges, edge_bytes: as in `Features`; padding has base 0, its edges join the last node with itself.
      program: for each node the number of its program; padding belongs to the last program, which is nobody's.
      real: for each edge whether it is one.
      count: programs, padding left out.
    """

    nodes: Array
    base_s: Array
    edges: Array
    edge_bytes: Array
    real: Array
    program: Array
    count: int


def pad_size(n: int) -> int:
    """The next of few sizes, so that few programs are compiled."""
    size = NODES // 8
    while size < n:
        size *= 8
    return size


def make_batch(programs: Sequence[Features], slots: int, nodes: int = 0) -> Batch:
    """One padded graph.

    Args:
      programs: at least one, fewer than `slots`.
      slots: programs to pad to.
      nodes: least number of nodes to pad to; edges are twice as many, so that one size decides both.
    """
    counts = [len(p.base_s) for p in programs]
    total, joined = sum(counts), sum(len(p.edges) for p in programs)
    n = max(nodes, pad_size(max(total + 1, joined // 2)))
    e = 2 * n
    starts = np.cumsum([0, *counts[:-1]])
    batch = Batch(
        np.zeros((n, programs[0].nodes.shape[1]), np.float32),
        np.zeros(n, np.float32),
        np.full((e, 2), n - 1, np.int32),
        np.zeros(e, np.float32),
        np.zeros(e, np.float32),
        np.full(n, slots - 1, np.int32),
        len(programs),
    )
    batch.nodes[:total] = np.concatenate([p.nodes for p in programs])
    batch.base_s[:total] = np.concatenate([p.base_s for p in programs])
    batch.program[:total] = np.repeat(np.arange(len(programs)), counts)
    batch.edges[:joined] = np.concatenate([p.edges + s for p, s in zip(programs, starts, strict=True)])
    batch.edge_bytes[:joined] = np.concatenate([p.edge_bytes for p in programs])
    batch.real[:joined] = 1.0
    return batch
