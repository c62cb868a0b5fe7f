"""Time of work on a device: the roofline (Williams, Waterman, Patterson, 2009), with what real kernels reach.

    time = launch + max( operations / (peak * efficiency * occupancy), bytes / (bandwidth * efficiency) )

Occupancy is what a matrix product loses because its tiles do not fill the processors evenly (NVIDIA, "Matrix
Multiplication Background User's Guide": tile and wave quantisation). Launch is left out inside a fusion.

A calibrated device (`DeviceSpec.efficiency`) has measured efficiencies by operator class and size instead:

    class                                     size                                         rate it is a share of
    matmul.dtype, matmul_weights.dtype        operations of a product                      peak FLOP/s of the dtype
    matmul_narrow, matmul_batched, conv        the least of m, n and k                      the same; the lower counts
    matmul_operands (added)                   bytes of the largest operand or result       bandwidth
    reduce_fused, reduce_major_fused          bytes of the result                          bandwidth
    exp, tanh, ... or transcendental          elements                                     peak of f32 / 16
    vector (elementwise, reduce), sort, ...   operations                                   peak of f32
    elementwise, reduce, move, gather, ...    bytes of the largest operand or result       bandwidth
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard import jax_compat
from autoshard.cluster import DeviceSpec
from autoshard.costmodel.cost import Cost
from autoshard.costmodel.measured import TRANSCENDENTAL_FLOPS, measured_time_s
from autoshard.costmodel.work import Matrix, Work, WorkKind, equation_work
from autoshard.ir import Apply, Literal, Value

TILE = 128
"""Rows and columns of the output tile of one thread block: 128 x 128 is NVIDIA's middle size (Matrix Multiplication
Background User's Guide, "Tile quantization": 256 x 128 for large, 64 x 64 for small products)."""

SPLIT_K = 1024
"""Least depth of a part when a product with few tiles is split along k to fill the GPU. Nominal: 16 steps of 64, deep
enough to hide the sum over the parts."""

DEFAULT_CORES = 108
"""Multiprocessors of a GPU that does not say: an A100's (shared/data/gpu-targets.md)."""


def work_time_s(
    work: Work,
    flop_share: float,
    local_bytes: float,
    device: DeviceSpec,
    *,
    fused: bool = False,
    matrix: Matrix | None = None,
) -> float:
    """Time of a device's part of some work.

    Args:
      work: of the whole equation (`equation_work`).
      flop_share: the part of its operations this device does, 1 / product of the sizes its factors are split in.
      local_bytes: bytes this device reads and writes in memory; 0 for a value that stays in a fusion's registers.
      device: the device.
      fused: whether the equation is part of a kernel that another equation launches.
      matrix: sizes of this device's part of a matrix product; where left out, it is split along rows or batch.

    Returns:
      Seconds.
    """
    if work.kind is WorkKind.FREE:
        return 0.0
    if device.calibrated:
        return measured_time_s(work, flop_share, local_bytes, device, launches=0 if fused else 1, matrix=matrix)
    operations_s = 0.0
    if work.flops:
        rate = device.peak_flops_per_s(work.flops_class) * device.matmul_efficiency
        if work.matrix is not None and device.kind == "gpu":
            rate *= _occupancy(work.matrix, flop_share, matrix, device)
        operations_s = work.flops * flop_share / rate
    if work.transcendentals:
        rate = device.peak_flops_per_s("f64" if work.flops_class == "f64" else "f32") * device.matmul_efficiency
        operations_s += work.transcendentals * flop_share * TRANSCENDENTAL_FLOPS / rate
    memory_s = local_bytes / (device.memory_bytes_per_s * device.memory_efficiency)
    launch_s = 0.0 if fused else device.kernel_launch_s
    return launch_s + max(operations_s, memory_s)


def local_bytes(work: Work, operand_shares: Sequence[float], result_shares: Sequence[float]) -> float:
    """Bytes a device reads and writes of work whose operands and results it holds these parts of."""
    reads = sum(nbytes * share for nbytes, share in zip(work.operand_bytes, operand_shares, strict=True))
    writes = sum(nbytes * share for nbytes, share in zip(work.result_bytes, result_shares, strict=True))
    return reads + writes


def _occupancy(whole: Matrix, share: float, local: Matrix | None, device: DeviceSpec) -> float:
    """The part of the device's tile slots that hold results: tiles are rounded up, then waves of tiles."""
    cores = device.target.core_count if device.target is not None else DEFAULT_CORES
    if local is not None:
        return matrix_occupancy(local, cores)
    tiles = whole.batch * math.ceil(whole.m / TILE) * math.ceil(whole.n / TILE) * share
    return _wave_share(max(tiles, 1.0), whole.k, cores) * _tile_share(whole)


def matrix_occupancy(matrix: Matrix, cores: int) -> float:
    """The part of `cores` processors' tile slots that a matrix product fills.

    One wave is `cores` tiles. Fewer tiles than cores are split along k, down to `SPLIT_K`.
    """
    tiles = matrix.batch * math.ceil(matrix.m / TILE) * math.ceil(matrix.n / TILE)
    return _wave_share(max(tiles, 1.0), matrix.k, cores) * _tile_share(matrix)


def _tile_share(matrix: Matrix) -> float:
    """What of the tiles is results: a part of a tile costs as much as a whole one."""
    rows = matrix.m / (math.ceil(matrix.m / TILE) * TILE) if matrix.m else 1.0
    columns = matrix.n / (math.ceil(matrix.n / TILE) * TILE) if matrix.n else 1.0
    return rows * columns


def _wave_share(tiles: float, k: int, cores: int) -> float:
    if tiles < cores:
        return min(1.0, tiles * max(1, k // SPLIT_K) / cores)
    return tiles / (math.ceil(tiles / cores) * cores)


def equation_cost(
    equation: Apply, operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]]
) -> Cost:
    """Operations and bytes of one device's part, from local shapes. `time_s` is left 0.

    For one equation under many shardings, `equation_work` once and `work_time_s` for each is much faster.

    Args:
      equation: the equation.
      operand_shapes: local shape of each operand.
      result_shapes: local shape of each result.
    """
    work = local_work(equation, operand_shapes, result_shapes)
    return Cost({work.flops_class: work.flops}, work.transcendentals, work.nbytes)


def local_work(
    equation: Apply, operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]]
) -> Work:
    """The work of an equation as if its values had these shapes."""
    inputs = tuple(
        atom if isinstance(atom, Literal) else Value(jax_compat.aval_of(shape, atom.dtype))
        for atom, shape in zip(equation.inputs, operand_shapes, strict=True)
    )
    outputs = tuple(
        Value(jax_compat.aval_of(shape, value.dtype))
        for value, shape in zip(equation.outputs, result_shapes, strict=True)
    )
    small = Apply(
        equation.primitive,
        inputs,
        outputs,
        equation.params,
        equation.graphs,
        equation.effects,
        equation.context,
        equation.place,
    )
    return equation_work(small)


def time_s(cost: Cost, device: DeviceSpec, fused: bool = False) -> float:
    """Time of a cost whose matrix sizes are not known: no occupancy.

    Operations of different classes run one after the other.
    """
    if not cost.flops and not cost.transcendentals and not cost.hbm_bytes:
        return 0.0
    operations_s = sum(count / device.peak_flops_per_s(name) for name, count in cost.flops.items())
    slow = device.peak_flops_per_s("f64" if cost.flops.get("f64") else "f32")
    operations_s += cost.transcendentals * TRANSCENDENTAL_FLOPS / slow
    memory_s = cost.hbm_bytes / (device.memory_bytes_per_s * device.memory_efficiency)
    return (0.0 if fused else device.kernel_launch_s) + max(operations_s / device.matmul_efficiency, memory_s)
