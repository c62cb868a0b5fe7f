"""Calibration: measures what `kernels.py` and `wires.py` list, and makes a cluster of it.

    launch      (call of many small kernels - call) / kernels
    peak        best rate of any product; best of any stream
                (of kernels the lowest tenth of all calls counts, of collectives the median)
    share       work / (time - launch) / peak, for every class and size
    link        fitted to all collectives of a level (`fit.py`); what is left is a curve for each kind of collective

Every process of `jax.distributed` does the same; the first one's figures count. Devices of one process are measured
all at once, since they run so: those that share cores get their part.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import dataclasses
import hashlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.calibrate.clock import Measured, best_clock, measure
from autoshard.calibrate.fit import Timed, fit_link, rising
from autoshard.calibrate.kernels import Kernel, kernels, operands_of, program_of, replaced
from autoshard.calibrate.record import Cache, Record, describe_setup
from autoshard.calibrate.wires import Wire, collective_call, wires
from autoshard.cluster import Cluster, DeviceSpec, GroupLinks, Level, Link, Node
from autoshard.costmodel import COLLECTIVE_KINDS, TRANSCENDENTAL_FLOPS, collective_time_s
from autoshard.errors import ArgumentError, explain
from autoshard.hardware import Curve, Points, detect_nodes

BUDGET_S = 120.0
QUICK_BUDGET_S = 20.0
COMPILE_SHARE = 0.4
"""Part of the budget for compiling; the rest is divided among what is measured."""


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a calibration is.

    Attributes:
      done, total: quantities.
      key: what is measured now.
      left_s: estimated seconds to the end.
    """

    done: int
    total: int
    key: str
    left_s: float


@final
@dataclass(frozen=True, slots=True)
class Calibration:
    """What came out.

    Attributes:
      cluster: of the devices at hand.
      record: where its figures come from.
      fresh: how many quantities were measured by this run, the others were known.
    """

    cluster: Cluster
    record: Record
    fresh: int

    def to_toml(self) -> str:
        """A cluster file with the record at its end."""
        return self.cluster.to_toml() + "\n" + self.record.to_toml()


def calibrate(
    *,
    budget_s: float | None = None,
    quick: bool = False,
    cache: Path | None = None,
    fresh: bool = False,
    name: str = "calibrated",
    tell: Callable[[Progress], None] | None = None,
) -> Calibration:
    """Measures the devices of all running processes.

    Args:
      budget_s: about how long it may take; 120 s, or 20 s with `quick`, where left out.
      quick: few sizes and operators.
      cache: file to keep measurements in, and to go on from; only the first process reads and writes it.
      fresh: forget what the cache has.
      name: of the cluster.
      tell: called before each measurement.

    Raises:
      ArgumentError: a budget of nothing, or a cache that is none.
      KeyboardInterrupt: what was measured before is in the cache.
    """
    budget = budget_s if budget_s is not None else QUICK_BUDGET_S if quick else BUDGET_S
    if budget <= 0:
        raise ArgumentError(explain(f"a budget of {budget:g} s", "seconds above 0", "leave it out or give more"))
    first = jax.process_index() == 0
    setup = describe_setup(quick)
    kept = Cache(cache if first else None, setup, fresh)
    local = jax.local_devices()
    todo: list[Kernel | Wire] = [*kernels(quick)]
    if len(local) > 1:
        todo += wires("node", quick)
    if jax.process_count() > 1:
        todo += wires("network", quick)
    known = _agree_all([int(each.key in kept.found) for each in todo])
    parts = sum(_parts(each) for each in todo)
    start, limit = time.perf_counter(), budget * (1 - COMPILE_SHARE) / max(parts, 1)
    missing = [each for each, has in zip(todo, known, strict=True) if not has]
    for done, each in enumerate(missing):
        if tell is not None:
            spent = time.perf_counter() - start
            left = spent / done * (len(missing) - done) if done else budget * len(missing) / len(todo)
            tell(Progress(len(todo) - len(missing) + done, len(todo), each.key, left))
        kept.add(each.key, _measure(each, local, limit * _parts(each)))
    made = _cluster(name, todo, kept.found)
    errors = made[1]
    return Calibration(made[0], Record.today(setup, kept.found, errors), len(missing))


def _parts(each: Kernel | Wire) -> int:
    """Collectives get twice a kernel's time: they are slower, and scatter more."""
    return 2 if isinstance(each, Wire) else 1


def _measure(each: Kernel | Wire, local: Sequence[Any], limit_s: float) -> Measured:
    if isinstance(each, Kernel):
        return measure(_kernel_call(each, local), limit_s, best_clock() if len(local) == 1 else time.perf_counter)
    devices = local if each.level == "node" else jax.devices()
    shared = jax.process_count() > 1
    return measure(collective_call(each, devices), limit_s, time.perf_counter, _agree if shared else int)


def _kernel_call(kernel: Kernel, local: Sequence[Any]) -> Callable[[], object]:
    """The kernel's program on all devices of this process at once."""
    program = program_of(kernel)
    arrays = [jax.device_put(np.asarray(x), local[0]) for x in operands_of(kernel)]
    if len(local) > 1:
        mesh = Mesh(np.asarray(local), ("d",))
        stacked = NamedSharding(mesh, P("d"))
        arrays = [jax.device_put(np.stack([np.asarray(x)] * len(local)), stacked) for x in arrays]
        single = program

        def each(*rows: Any) -> list[Any]:
            return [y[None] for y in single(*(row[0] for row in rows))]

        program = jax.shard_map(each, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    places = replaced(kernel)
    compiled = jax.jit(program, donate_argnums=places).lower(*arrays).compile()

    def call() -> object:
        results = jax.block_until_ready(compiled(*arrays))
        for place, result in zip(places, results, strict=False):
            arrays[place] = result
        return results

    return call


def _agree(number: int) -> int:
    """The first process's number."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _agree_all(numbers: Sequence[int]) -> list[int]:
    if jax.process_count() == 1:
        return list(numbers)
    return [int(x) for x in multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.int32))]


def _cluster(
    name: str, todo: Sequence[Kernel | Wire], found: Mapping[str, Measured]
) -> tuple[Cluster, dict[str, float]]:
    """The cluster of all measurements, and the errors of its fits."""
    nodes, network = detect_nodes()
    device = _device(nodes[0].device, [each for each in todo if isinstance(each, Kernel)], found)
    device = dataclasses.replace(device, memory_bytes=device.memory_bytes // _processes_here())
    timed: dict[str, list[Timed]] = {}
    for each in todo:
        if isinstance(each, Wire):
            seconds = max(found[each.key].median - found["call@1"].median, 0.05 * found[each.key].median) / each.chain
            timed.setdefault(each.level, []).append((each.kind, float(each.nbytes), seconds))
    count, errors = nodes[0].count, {}
    link = nodes[0].link
    curves: dict[str, Points] = {}

    def inside(x: Link) -> GroupLinks:
        return GroupLinks(count, (Level(count, x),))

    def across(x: Link) -> GroupLinks:
        levels = (Level(count, link),) if count > 1 else ()
        return GroupLinks(count * len(nodes), (*levels, Level(len(nodes), x)))

    for level, group in (("node", inside), ("network", across)):
        if level not in timed:
            continue
        measured = rising(timed[level])
        fit = fit_link(measured, group, device.collective_launch_s)
        if len(timed) == 1:  # a curve is by bytes alone, so it can only speak of one level
            curves = kind_curves(measured, group(fit.link), device.collective_launch_s)
        errors[level] = fit.error
        link, network = (fit.link, network) if level == "node" else (link, fit.link)
    device = dataclasses.replace(device, efficiency={**device.efficiency, **curves})
    return Cluster(name, tuple(Node(device, node.count, link) for node in nodes), network), errors


def kind_curves(timed: Sequence[Timed], group: GroupLinks, launch_s: float) -> dict[str, Points]:
    """For each kind the share of the fitted link's speed it reached, by bytes."""
    curves: dict[str, Points] = {}
    for kind in COLLECTIVE_KINDS:
        curves[kind] = tuple(
            (n, collective_time_s(kind, n, group) / max(t - launch_s, 0.05 * t)) for k, n, t in timed if k == kind
        )
    return {kind: points for kind, points in curves.items() if points}


def _device(base: DeviceSpec, todo: Sequence[Kernel], found: Mapping[str, Measured]) -> DeviceSpec:
    """A device with measured rates."""
    call_s = found["call@1"].low
    times: dict[str, float] = {}
    for k in todo:
        other_s = found[k.beside].low if k.beside else call_s
        times[k.key] = max(found[k.key].low - other_s, 0.05 * found[k.key].low) / k.repeats
    launch_s = next(times[k.key] / k.work for k in todo if k.operator == "launch")
    rates = {k.key: k.work / max(times[k.key] - launch_s, 0.05 * times[k.key]) for k in todo}
    flops = {"f32": max(rates[k.key] for k in todo if k.operator.startswith("matmul") and k.operator.endswith(".f32"))}
    for dtype in ("bf16", "f64"):
        measured = [rates[k.key] for k in todo if k.operator == f"matmul.{dtype}"]
        if measured:
            flops[dtype] = max(measured)
    if "bf16" not in flops:
        flops["bf16"] = flops["f32"] * base.peak_flops_per_s("bf16") / base.peak_flops_per_s("f32")
    bandwidth = max(rates[k.key] for k in todo if k.rate == "bytes")
    peaks = {"flops": flops["f32"], "transcendentals": flops["f32"] / TRANSCENDENTAL_FLOPS, "bytes": bandwidth}
    curves: dict[str, dict[float, float]] = {}
    for k in todo:
        if k.rate in peaks:
            dtype = k.operator.partition(".")[2]
            peak = flops[dtype] if k.rate == "flops" and dtype else peaks[k.rate]
            curves.setdefault(k.operator, {})[float(k.size)] = rates[k.key] / peak
    # What a far operand adds to a product's operations, whose share is that of its flops and least extent.
    for k in todo:
        if k.rate == "cold":
            near = [interpolate(curves[name], x) for name, x in (("matmul.f32", k.work), ("matmul_narrow.f32", 64.0))]
            extra_s = times[k.key] - launch_s - k.work / (flops["f32"] * min(near))
            curves.setdefault(k.operator, {})[k.size] = k.size / max(extra_s, 0.02 * times[k.key]) / bandwidth
    return dataclasses.replace(
        base,
        name=f"{base.name}-measured",
        flops_per_s=flops,
        memory_bytes_per_s=bandwidth,
        kernel_launch_s=launch_s,
        collective_launch_s=launch_s,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        efficiency={name: tuple(sorted(points.items())) for name, points in curves.items()},
    )


def interpolate(points: Mapping[float, float], size: float) -> float:
    """The share at a size between measured ones."""
    return Curve.of(tuple(sorted(points.items()))).at(size)


def _processes_here() -> int:
    """How many of the processes run on this host and share its memory (GPUs: none does)."""
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return 1
    mine = int.from_bytes(hashlib.sha256(platform.node().encode()).digest()[:4], "big") >> 1
    everyone = np.asarray(multihost_utils.process_allgather(np.int32(mine)))
    return max(int((everyone == mine).sum()), 1)
