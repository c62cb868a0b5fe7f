"""Time of work on a calibrated device: rates by operator class and size, as measured (`DeviceSpec.efficiency`).

    time = launch + max( operations / (peak * share(class, size)), bytes / (bandwidth * share(class, bytes)) )

Which classes and sizes: `roofline.py`. What no curve says has the device's flat efficiencies.
"""

from __future__ import annotations

from functools import cache

from autoshard.cluster import DeviceSpec
from autoshard.costmodel.work import Matrix, Work, WorkKind

TRANSCENDENTAL_FLOPS = 16
"""Operations in the time of one transcendental: a multiprocessor gives 16 special-function results a clock where it
gives 128 multiply-adds, each two (CUDA C++ Programming Guide, "Arithmetic instructions", capability 9.0)."""

_STREAMS = {
    WorkKind.ELEMENTWISE: ("elementwise",),
    WorkKind.REDUCE: ("reduce", "elementwise"),
    WorkKind.MOVE: ("move", "elementwise"),
    WorkKind.GATHER: ("gather", "move", "elementwise"),
    WorkKind.SCATTER: ("scatter", "elementwise"),
    WorkKind.SORT: ("elementwise",),
    WorkKind.LINALG: ("elementwise",),
    WorkKind.FFT: ("elementwise",),
    WorkKind.RANDOM: ("elementwise",),
    WorkKind.OPAQUE: ("elementwise",),
    WorkKind.COLLECTIVE: ("elementwise",),
    WorkKind.MATMUL: ("elementwise",),
    WorkKind.FREE: ("elementwise",),
}
_LIBRARY = (WorkKind.SORT, WorkKind.LINALG, WorkKind.FFT, WorkKind.RANDOM)
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def measured_time_s(
    work: Work,
    flop_share: float,
    local_bytes: float,
    device: DeviceSpec,
    *,
    fused: bool = False,
    matrix: Matrix | None = None,
) -> float:
    """Time of a device's part of some work from what was measured; arguments as of `roofline.work_time_s`."""
    launch_s = 0.0 if fused else device.kernel_launch_s
    if work.kind is WorkKind.MATMUL:
        operations_s = _product_s(work, flop_share, matrix, device)
        return launch_s + max(operations_s, _stream_s(work, local_bytes, device))
    operations_s = 0.0
    peak = device.peak_flops_per_s("f64" if work.flops_class == "f64" else "f32")
    if work.flops:
        size = work.flops * flop_share
        share = device.share(_operation_classes(work.kind), size) or device.matmul_efficiency
        operations_s = size / (device.peak_flops_per_s(work.flops_class) * share)
    if work.transcendentals:
        size = work.transcendentals * flop_share
        share = device.share((work.operator, "transcendental"), size) or device.matmul_efficiency
        operations_s += size * TRANSCENDENTAL_FLOPS / (peak * share)
    return launch_s + max(operations_s, _stream_s(work, local_bytes, device))


def _stream_s(work: Work, nbytes: float, device: DeviceSpec) -> float:
    if not nbytes:
        return 0.0
    share = device.share(_stream_classes(work.kind, work.operator, work.form), nbytes) or device.memory_efficiency
    return nbytes / (device.memory_bytes_per_s * share)


@cache
def _stream_classes(kind: WorkKind, operator: str, form: str) -> tuple[str, ...]:
    names = _STREAMS[kind]
    if operator in _CUMULATIVE:
        return ("cumulative", *names)
    if "window" in operator or operator.startswith("select_and"):
        return ("window", *names)
    if operator == "transpose" and form:
        return ("transpose", *names)
    return (f"{names[0]}_{form}", *names) if form else names


@cache
def _operation_classes(kind: WorkKind) -> tuple[str, ...]:
    return (kind.value, "vector") if kind in _LIBRARY else ("vector",)


@cache
def _product_classes(operator: str, form: str, dtype: str) -> tuple[str, ...]:
    base = "conv" if operator.startswith("conv") else "matmul"
    dtypes = (dtype, "f32") if dtype == "tf32" else (dtype,)
    names = (f"{base}_{form}", base, "matmul") if form else (base, "matmul")
    return tuple(full for name in names for full in (*(f"{name}.{d}" for d in dtypes), name))


def _product_s(work: Work, flop_share: float, matrix: Matrix | None, device: DeviceSpec) -> float:
    size = _least_extent(work, flop_share) if matrix is None else min(matrix.m, matrix.n, matrix.k)
    names = _product_classes(work.operator, work.form, work.flops_class)
    share = device.share(names, size) or device.matmul_efficiency
    return work.flops * flop_share / (device.peak_flops_per_s(work.flops_class) * share)


def _least_extent(work: Work, flop_share: float) -> float:
    """Of a device's part, split along the batch as far as it goes, then along the longest extent."""
    if work.matrix is None:
        return 1.0
    whole = work.matrix
    shorter, middle, longest = sorted((whole.m, whole.n, whole.k))
    part = max(longest * min(1.0, flop_share * whole.batch), 1.0)
    return min(shorter, middle, part)
