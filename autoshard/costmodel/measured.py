"""Time of work on a calibrated device: rates by operator class and size, as measured (`DeviceSpec.efficiency`).

    time = launch + max( operations / (peak * share(class, size)), bytes / (bandwidth * share(class, size)) )

Operations count once for each kernel that an equation is computed in; those of kernels in transposed order are part of
what reading across costs. Products add `matmul_operands`, what their largest array costs, to their operations. Which
classes and sizes: `roofline.py`. What no curve says has flat efficiencies.
"""

from __future__ import annotations

from functools import cache

from autoshard.cluster import DeviceSpec
from autoshard.costmodel.work import Matrix, Work, WorkKind

TRANSCENDENTAL_FLOPS = 16
"""Operations in the time of one transcendental: a multiprocessor gives 16 special-function results a clock where it
gives 128 multiply-adds, each two (CUDA C++ Programming Guide, "Arithmetic instructions", capability 9.0)."""

ALIGNED_BYTES = 2048
"""Half of a page, which is what one way of a first-level cache holds (64 sets of 64 bytes). Ours: from 512 floats on,
copying across took 2.5 to 4 times as long an element as from rows of 1000 (AMD EPYC, family 25)."""

KEPT_BYTES = 32 * 2**20
"""Larger blocks go back to the system when they are freed (glibc, malloc.c: DEFAULT_MMAP_THRESHOLD_MAX)."""

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
    launches: int = 1,
    matrix: Matrix | None = None,
    copies: int = 1,
    strided: int = 0,
    strided_bytes: float = 0.0,
    aligned_bytes: float = 0.0,
    fused: bool = False,
) -> float:
    """Time of a device's part of some work from what was measured.

    Args:
      work, flop_share, local_bytes, device, matrix: as of `roofline.work_time_s`.
      launches: kernels that count for it.
      copies: kernels that it is computed in.
      strided: of them those that run in transposed order.
      strided_bytes: what those read, `local_bytes` apart. Their operations are part of the class `transpose`.
      aligned_bytes: the part of it whose rows are `aligned`.
      fused: a reduction in one kernel with the loop that makes its operand; classes `_fused`.
    """
    launch_s = launches * device.kernel_launch_s
    if work.kind is WorkKind.MATMUL:
        operations_s = _product_s(work, flop_share, matrix, device)
        if (extra_s := _operands_s(work, flop_share, local_bytes, device)) is not None:
            return launch_s + operations_s + extra_s
        return launch_s + max(operations_s, _stream_s(work, flop_share, local_bytes, device))
    if fused:
        size = work.operand_bytes[0] * flop_share
        names = (f"reduce_{work.form}_fused", "reduce_fused") if work.form else ("reduce_fused",)
        share = device.share(names, work.result_bytes[0] if work.form else work.result_bytes[0] * flop_share)
        if share is not None:
            return launch_s + size / (device.memory_bytes_per_s * share)
    operations_s = (copies - strided) * _operations_s(work, flop_share, device)
    time_s = launch_s + max(operations_s, _stream_s(work, flop_share, local_bytes, device))
    for name, nbytes in (("transpose", strided_bytes - aligned_bytes), ("transpose_aligned", aligned_bytes)):
        if nbytes:
            share = device.share((name, "transpose", "elementwise"), work.largest_bytes * flop_share)
            time_s += 2 * nbytes / (device.memory_bytes_per_s * (share or device.memory_efficiency))
    return time_s


def aligned(row_bytes: float) -> bool:
    """Whether rows this far apart fall into few sets of a cache, so that a walk across them misses again and again."""
    return row_bytes >= ALIGNED_BYTES and row_bytes % ALIGNED_BYTES == 0


def _operations_s(work: Work, flop_share: float, device: DeviceSpec) -> float:
    time_s = 0.0
    if work.flops:
        size = work.flops * flop_share
        share = device.share(_operation_classes(work.kind), size) or device.matmul_efficiency
        time_s = size / (device.peak_flops_per_s(work.flops_class) * share)
    if work.transcendentals:
        size = work.transcendentals * flop_share
        share = device.share((work.operator, "transcendental"), size) or device.matmul_efficiency
        peak = device.peak_flops_per_s("f64" if work.flops_class == "f64" else "f32")
        time_s += size * TRANSCENDENTAL_FLOPS / (peak * share)
    return time_s


def fresh_pages_s(temporary_bytes: float, device: DeviceSpec) -> float:
    """What a step's temporary memory costs where the system hands it out anew, page by page, for every call.

    The class `fresh` was measured on an array larger than what the C library keeps for itself.
    """
    share = device.share(("fresh",), temporary_bytes)
    if share is None or temporary_bytes <= KEPT_BYTES:
        return 0.0
    return temporary_bytes / (device.memory_bytes_per_s * share)


def _operands_s(work: Work, flop_share: float, local_bytes: float, device: DeviceSpec) -> float | None:
    """What a product's largest operand or result costs beside the operations (packing, memory far away)."""
    size = work.largest_bytes * flop_share
    share = device.share(("matmul_operands",), size)
    if share is None or not local_bytes:
        return share and 0.0
    return min(size, local_bytes) / (device.memory_bytes_per_s * share)


def _stream_s(work: Work, flop_share: float, nbytes: float, device: DeviceSpec) -> float:
    if not nbytes:
        return 0.0
    classes = _stream_classes(work.kind, work.operator, work.form)
    share = device.share(classes, work.largest_bytes * flop_share) or device.memory_efficiency
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
def _product_classes(operator: str, form: str, dtype: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(classes by least extent, classes by operations) of a product."""
    base = "conv" if operator.startswith("conv") else "matmul"
    dtypes = (dtype, "f32") if dtype == "tf32" else (dtype,)

    def full(*names: str) -> tuple[str, ...]:
        return tuple(text for name in names for text in (*(f"{name}.{d}" for d in dtypes), name))

    if form == "weights" and base == "matmul":
        return (), full("matmul_weights", "matmul")
    if base == "conv" or form:
        named = (f"{base}_{form}", base) if form else (base,)
        return full(*(name for name in named if name != "matmul"), "matmul_narrow"), full("matmul")
    return full("matmul_narrow"), full("matmul")


def _product_s(work: Work, flop_share: float, matrix: Matrix | None, device: DeviceSpec) -> float:
    flops = work.flops * flop_share
    extent = _least_extent(work, flop_share) if matrix is None else min(matrix.m, matrix.n, matrix.k)
    narrow, plain = _product_classes(work.operator, work.form, work.flops_class)
    share = device.share(narrow, extent)
    if share is None or not narrow or narrow[0].startswith("matmul_narrow"):
        whole = device.share(plain, flops) or device.matmul_efficiency
        share = whole if share is None else min(share, whole)
    return flops / (device.peak_flops_per_s(work.flops_class) * share)


def _least_extent(work: Work, flop_share: float) -> float:
    """Of a device's part, split along the batch as far as it goes, then along the longest extent."""
    if work.matrix is None:
        return 1.0
    whole = work.matrix
    shorter, middle, longest = sorted((whole.m, whole.n, whole.k))
    part = max(longest * min(1.0, flop_share * whole.batch), 1.0)
    return min(shorter, middle, part)
