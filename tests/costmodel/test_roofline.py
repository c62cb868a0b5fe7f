"""Work of equations against closed forms and against XLA's own counts; time on devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from autoshard.cluster import resolve_cluster
from autoshard.costmodel import (
    NO_COST,
    Cost,
    Matrix,
    Work,
    WorkKind,
    equation_cost,
    equation_work,
    known_primitives,
    local_bytes,
    matmul_class,
    matrix_occupancy,
    time_s,
    work_rule,
    work_time_s,
)
from autoshard.errors import ArgumentError
from autoshard.ir import Apply, Graph, trace

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def spec(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def graph_of(fun: Callable[..., Any], *avals: jax.ShapeDtypeStruct) -> Graph:
    return trace(lambda *args: jax.tree.leaves(fun(*args)), avals)


def equation_of(name: str, fun: Callable[..., Any], *avals: jax.ShapeDtypeStruct) -> Apply:
    """The one equation of a primitive in a function."""
    found = [e for e, _ in graph_of(fun, *avals).walk() if isinstance(e, Apply) and e.name == name]
    assert len(found) == 1, [e.name for e, _ in graph_of(fun, *avals).walk()]
    return found[0]


def work_of(name: str, fun: Callable[..., Any], *avals: jax.ShapeDtypeStruct) -> Work:
    return equation_work(equation_of(name, fun, *avals))


# Against XLA


def xla_counts(stage: Any) -> dict[str, float]:
    """XLA's cost analysis of a lowered or a compiled program."""
    return stage.cost_analysis()


def conv(**options: Any) -> Callable[..., Any]:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


XLA_CASES = {
    "matmul": ("dot_general", lambda a, b: a @ b, [(128, 256), (256, 64)]),
    "batched": ("dot_general", lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(4, 32, 16), (4, 16, 8)]),
    "outer": ("dot_general", lambda a, b: jnp.einsum("i,j->ij", a, b), [(64,), (32,)]),
    "contract_two": ("dot_general", lambda a, b: jnp.einsum("abij,abjk->bik", a, b), [(3, 2, 8, 16), (3, 2, 16, 4)]),
    "conv_valid": (
        "conv_general_dilated",
        conv(window_strides=(1, 1), padding="VALID"),
        [(2, 16, 16, 8), (3, 3, 8, 4)],
    ),
    "conv_same": ("conv_general_dilated", conv(window_strides=(1, 1), padding="SAME"), [(2, 16, 16, 8), (3, 3, 8, 4)]),
    "conv_strided": (
        "conv_general_dilated",
        conv(window_strides=(2, 3), padding="SAME"),
        [(2, 17, 15, 8), (5, 3, 8, 4)],
    ),
    "conv_grouped": (
        "conv_general_dilated",
        conv(window_strides=(1, 1), padding="SAME", feature_group_count=4),
        [(2, 16, 16, 8), (3, 3, 2, 12)],
    ),
    "conv_dilated": (
        "conv_general_dilated",
        conv(window_strides=(1, 2), padding="SAME", rhs_dilation=(2, 3)),
        [(2, 16, 16, 8), (3, 3, 8, 4)],
    ),
    "conv_transposed": (
        "conv_general_dilated",
        conv(window_strides=(1, 1), padding=((2, 2), (2, 1)), lhs_dilation=(2, 2)),
        [(2, 8, 8, 8), (3, 3, 8, 4)],
    ),
    "conv_batch_grouped": (
        "conv_general_dilated",
        conv(window_strides=(1, 1), padding="VALID", batch_group_count=2),
        [(4, 8, 8, 3), (3, 3, 3, 6)],
    ),
}


@pytest.mark.parametrize("case", XLA_CASES)
def test_flops_are_xlas(case: str) -> None:
    """Of a program of one operator, unoptimised: compiled ones replace convolutions by library calls."""
    name, fun, shapes = XLA_CASES[case]
    avals = [spec(*shape) for shape in shapes]
    analysis = xla_counts(jax.jit(fun).lower(*avals))
    assert work_of(name, fun, *avals).flops == analysis["flops"]


@pytest.mark.parametrize("case", ["matmul", "batched", "conv_valid"])
def test_flops_are_those_of_the_compiled_program(case: str) -> None:
    name, fun, shapes = XLA_CASES[case]
    avals = [spec(*shape) for shape in shapes]
    analysis = xla_counts(jax.jit(fun).lower(*avals).compile())
    assert work_of(name, fun, *avals).flops == pytest.approx(analysis["flops"], rel=0.01)


def test_whole_step_against_xla() -> None:
    """Gradient of a two-layer net: matrix products and elementwise operations together."""

    def loss(w: Any, v: Any, x: Any) -> Any:
        return jnp.sum((jnp.maximum(x @ w, 0.0) @ v) ** 2)

    avals = spec(64, 128), spec(128, 32), spec(256, 64)
    graph = graph_of(jax.grad(loss, argnums=(0, 1)), *avals)
    flops = sum(equation_work(equation).flops for equation in graph.equations)
    analysis = xla_counts(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*avals))
    assert flops == pytest.approx(analysis["flops"], rel=0.02)


@pytest.mark.parametrize("name", ["exp", "tanh", "log", "rsqrt", "logistic"])
def test_transcendentals_are_xlas(name: str) -> None:
    fun = {"exp": jnp.exp, "tanh": jnp.tanh, "log": jnp.log, "rsqrt": jax.lax.rsqrt, "logistic": jax.nn.sigmoid}[name]
    analysis = xla_counts(jax.jit(fun).lower(spec(100, 3)))
    assert work_of(name, fun, spec(100, 3)).transcendentals == analysis["transcendentals"] == 300


# By hand


def test_matrix_sizes() -> None:
    work = work_of("dot_general", lambda a, b: jnp.einsum("hbij,hjk->hbik", a, b), spec(3, 4, 8, 16), spec(3, 16, 32))
    assert work.matrix == Matrix(3, 32, 32, 16)
    assert work.flops == 2 * 3 * 32 * 32 * 16
    assert work.operand_bytes == (4 * 3 * 4 * 8 * 16, 4 * 3 * 16 * 32)
    assert work.result_bytes == (4 * 3 * 32 * 32,)


def test_ragged_groups_add_nothing() -> None:
    work = work_of("ragged_dot_general", jax.lax.ragged_dot, spec(128, 64), spec(4, 64, 32), spec(4, dtype="int32"))
    assert work.flops == 2 * 128 * 64 * 32


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        ("bfloat16", None, ("bf16", 1)),
        ("float16", None, ("f16", 1)),
        ("float32", None, ("tf32", 1)),
        ("float32", (jax.lax.Precision.HIGH, jax.lax.Precision.HIGH), ("tf32", 1)),
        ("float32", (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST), ("f32", 1)),
        ("float64", None, ("f64", 1)),
        ("int8", None, ("int8", 1)),
        ("int32", None, ("f32", 1)),
        ("float8_e4m3fn", None, ("f8", 1)),
        ("complex64", None, ("tf32", 1)),
        ("complex128", None, ("f64", 1)),
        ("float32", jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3, ("bf16", 3)),
        ("float32", jax.lax.DotAlgorithmPreset.TF32_TF32_F32, ("tf32", 1)),
        ("float32", jax.lax.DotAlgorithmPreset.F32_F32_F32, ("f32", 1)),
        ("float8_e5m2", jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32, ("f8", 1)),
        ("bfloat16", jax.lax.DotAlgorithmPreset.DEFAULT, ("bf16", 1)),
    ],
)
def test_unit_of_a_product(dtype: str, precision: Any, expected: tuple[str, int]) -> None:
    assert matmul_class(jnp.dtype(dtype), jnp.dtype(dtype), precision) == expected


def test_complex_product_is_four() -> None:
    aval = spec(8, 8, dtype="complex64")
    assert work_of("dot_general", lambda a, b: a @ b, aval, aval).flops == 4 * 2 * 8**3


def test_gather_and_slice_read_what_they_take() -> None:
    table, rows = spec(50000, 64), spec(16, dtype="int32")
    work = work_of("gather", lambda t, i: t.at[i].get(mode="clip"), table, rows)
    assert work.operand_bytes[0] == work.result_bytes[0] == 16 * 64 * 4
    work = work_of("slice", lambda t: t[:8], table)
    assert work.operand_bytes[0] == 8 * 64 * 4


def test_updates_are_in_place() -> None:
    table, rows, new = spec(50000, 64), spec(16, dtype="int32"), spec(16, 64)
    work = work_of("scatter-add", lambda t, i, u: t.at[i].add(u, mode="clip"), table, rows, new)
    assert (work.operand_bytes[0], work.result_bytes[0], work.flops) == (16 * 64 * 4, 16 * 64 * 4, 16 * 64)
    work = work_of(
        "dynamic_update_slice",
        lambda t, u, i: jax.lax.dynamic_update_slice(t, u, (i, i)),
        table,
        new,
        spec(dtype="int32"),
    )
    assert (work.operand_bytes[0], work.result_bytes[0]) == (0, 16 * 64 * 4)


@pytest.mark.parametrize(
    ("name", "fun", "flops"),
    [
        ("cholesky", jax.lax.linalg.cholesky, 64**3 / 3),
        ("eigh", jnp.linalg.eigvalsh, 9 * 64**3),
        ("lu", jax.lax.linalg.lu, 2 / 3 * 64**3),
        ("reduce_sum", jnp.sum, 64 * 64),
        ("argmax", jnp.argmax, 64 * 64),
        ("cumsum", lambda x: jnp.cumsum(x, 0), 2 * 64 * 64),
        ("sort", lambda x: jnp.sort(x, axis=0), 64 * 64 * 6 * 7 / 2),
        ("fft", jnp.fft.fft, 5 * 64 * 64 * 6),
        ("integer_pow", lambda x: x**5, 3 * 64 * 64),
        (
            "reduce_window_sum",
            lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 4), (1, 1), "SAME"),
            8 * 64 * 64,
        ),
    ],
)
def test_leading_order(name: str, fun: Callable[..., Any], flops: float) -> None:
    dtype = "complex64" if name == "fft" else "float32"
    assert work_of(name, fun, spec(64, 64, dtype=dtype)).flops == pytest.approx(flops)


def test_control_flow_itself_is_free() -> None:
    def fun(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0]

    graph = graph_of(fun, spec(8, 8))
    assert [(e.name, equation_work(e).flops * n) for e, n in graph.walk()] == [
        ("scan", 0),
        ("dot_general", 5 * 2 * 8**3),
    ]
    assert equation_work(graph.equations[0]).kind is WorkKind.FREE


def test_shard_map_counts_its_body_on_every_device() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    fun = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    work = work_of("shard_map", fun, spec(64, 32), spec(32, 16))
    assert (work.flops, work.flops_class) == (2 * 64 * 32 * 16, "tf32")


def test_pallas_says_itself() -> None:
    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...]

    def call(estimate: Any) -> Callable[..., Any]:
        return lambda x: pl.pallas_call(kernel, out_shape=spec(64, 64), cost_estimate=estimate)(x)

    work = work_of("pallas_call", call(pl.CostEstimate(flops=10, transcendentals=20, bytes_accessed=30)), spec(64, 64))
    assert (work.flops, work.transcendentals, work.nbytes) == (10, 20, 30)
    work = work_of("pallas_call", call(None), spec(64, 64))
    assert (work.kind, work.flops, work.nbytes) == (WorkKind.OPAQUE, 0, 2 * 64 * 64 * 4)


def test_literals_are_no_bytes() -> None:
    assert work_of("mul", lambda x: x * 2.0, spec(4)).operand_bytes == (16, 0)


# Registry


def test_every_primitive_of_jax_numpy_has_a_rule() -> None:
    """What inlined programs consist of: all of jax.lax but calls, which tracing opens."""
    names = {value.name for value in vars(jax.lax).values() if isinstance(value, Primitive)}
    opened = {"jit", "custom_jvp_call", "custom_vjp_call"}
    assert len(names) > 90
    assert names - known_primitives() - opened == set()


def test_unknown_primitive() -> None:
    primitive = Primitive("my_op")
    primitive.def_abstract_eval(lambda x: x)
    graph = graph_of(lambda x: primitive.bind(x), spec(4))
    work = equation_work(graph.equations[0])
    assert (work.kind, work.flops, work.operand_bytes, work.result_bytes) == (WorkKind.OPAQUE, 0.0, (16.0,), (16.0,))


def test_two_rules_for_one_name() -> None:
    with pytest.raises(ArgumentError, match="'dot_general' was registered twice"):
        work_rule("dot_general")(equation_work)


# Time

H200 = resolve_cluster("h200").device(0)
V100 = resolve_cluster("v100").device(0)
CPU = resolve_cluster("cpu").device(0)


def product(n: int, dtype: Any = "bfloat16") -> Work:
    return work_of("dot_general", lambda a, b: a @ b, spec(n, n, dtype=dtype), spec(n, n, dtype=dtype))


def test_measured_product_of_an_h200() -> None:
    """788e12 FLOP/s on 8192^3 (shared/data/gpu-targets.md)."""
    work = product(8192)
    assert work.flops / work_time_s(work, 1.0, work.nbytes, H200) == pytest.approx(788e12, rel=0.01)


def test_measured_copy_of_an_h200() -> None:
    """4.3e12 B/s, read plus written (shared/data/gpu-targets.md)."""
    work = work_of("neg", jnp.negative, spec(2**30))
    assert work.nbytes / work_time_s(work, 1.0, work.nbytes, H200) == pytest.approx(4.3e12, rel=0.01)


def test_tf32_needs_a_unit() -> None:
    work = product(8192, "float32")
    assert work_time_s(work, 1.0, 0.0, H200) == pytest.approx(2 * work_time_s(product(8192), 1.0, 0.0, H200), rel=0.01)
    assert work_time_s(work, 1.0, 0.0, V100) > work.flops / 15.7e12


def test_small_products_are_less_efficient() -> None:
    rates = [product(n).flops / work_time_s(product(n), 1.0, 0.0, H200, fused=True) for n in (128, 512, 2048, 8192)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] / 50


def test_wave_quantisation() -> None:
    """132 tiles fill an H200 once, 133 need a second wave."""
    assert matrix_occupancy(Matrix(132, 128, 128, 64), 132) == 1
    assert matrix_occupancy(Matrix(133, 128, 128, 64), 132) == pytest.approx(133 / 264)
    assert matrix_occupancy(Matrix(1, 128, 128, 64), 132) == pytest.approx(1 / 132)
    assert matrix_occupancy(Matrix(1, 128, 128, 64 * 1024), 132) == pytest.approx(64 / 132)  # split along k
    assert matrix_occupancy(Matrix(132, 64, 128, 64), 132) == pytest.approx(0.5)  # half of each tile


def test_split_products() -> None:
    """Half of the rows on each of two devices, with the exact local sizes or without."""
    work = product(8192)
    half = work_time_s(work, 0.5, 0.0, H200)
    exact = work_time_s(work, 0.5, 0.0, H200, matrix=Matrix(1, 4096, 8192, 8192))
    assert half == pytest.approx(exact, rel=0.05)
    assert half == pytest.approx(work_time_s(work, 1.0, 0.0, H200) / 2, rel=0.05)


def test_fused_work_has_no_launch() -> None:
    work = work_of("add", jnp.add, spec(4), spec(4))
    assert work_time_s(work, 1.0, 0.0, H200) == pytest.approx(H200.kernel_launch_s, rel=1e-3)
    assert work_time_s(work, 1.0, 0.0, H200, fused=True) < 1e-12
    free = work_of("reshape", lambda x: x.reshape(2, 2), spec(4))
    assert work_time_s(free, 1.0, free.nbytes, H200) == 0


def test_exponentials_take_time() -> None:
    work = work_of("exp", jnp.exp, spec(2**20))
    assert work_time_s(work, 1.0, 0.0, CPU, fused=True) == pytest.approx(16 * 2**20 / 46e9)


@given(st.floats(0.001, 1), st.floats(0, 1e9), st.floats(1, 8), st.sampled_from(["h200", "v100", "cpu"]))
def test_time_is_monotone(share: float, nbytes: float, factor: float, name: str) -> None:
    device, work = {"h200": H200, "v100": V100, "cpu": CPU}[name], PRODUCT
    time = work_time_s(work, share, nbytes, device)
    assert time >= device.kernel_launch_s
    assert time <= work_time_s(work, share, nbytes * factor, device) * (1 + 1e-9)


PRODUCT = product(1024)


def test_local_bytes() -> None:
    work = product(64)
    assert local_bytes(work, (0.5, 1.0), (0.5,)) == 2 * 64 * 64 * 2


def test_local_cost_of_shapes() -> None:
    """Half of the batch: half of the operations, all of the weights."""
    equation = equation_of("dot_general", lambda a, b: a @ b, spec(64, 32), spec(32, 16))
    cost = equation_cost(equation, [(32, 32), (32, 16)], [(32, 16)])
    assert cost == Cost({"tf32": 2 * 32 * 32 * 16}, 0.0, 4 * (32 * 32 + 32 * 16 + 32 * 16))
    assert time_s(cost, H200) >= H200.kernel_launch_s
    assert time_s(NO_COST, H200) == 0


def test_costs_add_and_scale() -> None:
    one, two = Cost({"f32": 1.0}, 2.0, 3.0, 4.0), Cost({"f32": 10.0, "bf16": 5.0}, 0.0, 1.0, 1.0)
    assert one + two == Cost({"f32": 11.0, "bf16": 5.0}, 2.0, 4.0, 5.0)
    assert 2 * one == one * 2 == Cost({"f32": 2.0}, 4.0, 6.0, 8.0)
    assert one + NO_COST == one
    assert (one + two).total_flops == 16
    assert math.isclose(sum([one, two], NO_COST).time_s, 5.0)
