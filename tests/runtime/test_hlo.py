"""The reader of compiled HLO, on snippets of every syntax and on programs compiled here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.errors import CompileError
from autoshard.runtime.hlo import Collective, collectives, kernels
from autoshard.runtime.hlo_module import parse_module, replica_groups, type_bytes

P = PartitionSpec


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def _sharding(*spec: Any) -> NamedSharding:
    return NamedSharding(_mesh(), P(*spec))


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _text(function: Any, args: Any, shardings: Any) -> str:
    return jax.jit(function, in_shardings=shardings).lower(*args).compile().as_text() or ""


def _module(*lines: str, devices: int = 8, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    head = f"HloModule m, is_scheduled=true, num_partitions={devices}\n\n"
    return f"{head}{before}\nENTRY %main (a: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def _one(*lines: str, devices: int = 8, before: str = "") -> Collective:
    (found,) = collectives(_module(*lines, devices=devices, before=before))
    return found


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={}, to_apply=%add", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("source_target_pairs={{0,1},{1,0},{2,2},{3,3}}", ((0, 1),)),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, metadata={}", ((0, 1, 2, 3),)),
    ],
)
def test_groups(text: str, groups: Any) -> None:
    assert replica_groups(f", channel_id=1, {text}", 8) == groups


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[32,128]{1,0}", 4 * 32 * 128),
        ("bf16[3]{0}", 6),
        ("pred[10]{0}", 10),
        ("c64[2,2]{1,0}", 32),
        ("c128[2]", 32),
        ("f8e4m3fn[16]{0}", 16),
        ("f8e5m2fnuz[5]", 5),
        ("s4[16]{0:E(4)}", 8),
        ("u2[16]", 4),
        ("f4e2m1fn[7]", 4),
        ("f32[]", 4),
        ("token[]", 0),
        ("f32[<=8,2]{1,0}", 64),
        ("(f32[4]{0:T(256)S(5)}, s32[])", 20),
        ("f64[0,5]{1,0}", 0),
    ],
)
def test_type_bytes(text: str, nbytes: int) -> None:
    assert type_bytes(text) == nbytes


def test_all_reduce_of_several_arrays() -> None:
    found = _one(
        "%a = f32[4]{0} parameter(0)",
        "%b = bf16[8,2]{1,0} parameter(1)",
        "%all-reduce.1 = (f32[4]{0}, /*index=1*/bf16[8,2]{1,0}) all-reduce(%a, %b), channel_id=1, "
        'replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="jit(f)/dot" source_file="x.py" source_line=7}',
    )
    assert (found.kind, found.nbytes, found.group_size, found.arrays) == ("all_reduce", 48, 4, 2)
    assert (found.op_name, found.source) == ("jit(f)/dot", "x.py:7")
    assert not found.asynchronous


def test_operands_printed_with_types() -> None:
    found = _one("ROOT r = f32[16]{0} all-gather(f32[4]{0} %p.1), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}")
    assert (found.kind, found.nbytes) == ("all_gather", 64)


def test_reduce_scatter_and_all_to_all_and_permute() -> None:
    kinds = {}
    for line in (
        "%r = f32[1]{0} reduce-scatter(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add",
        "%r = f32[4]{0} all-to-all(%a), replica_groups=[2,4]<=[8], dimensions={0}",
        "%r = f32[4]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
    ):
        found = _one("%a = f32[4]{0} parameter(0)", line)
        kinds[found.kind] = (found.nbytes, found.group_size)
    assert kinds == {"reduce_scatter": (16, 4), "all_to_all": (64, 4), "permute": (32, 2)}


def test_start_and_done_with_a_kernel_between() -> None:
    lines = (
        "%a = f32[4]{0} parameter(0)",
        "%s = f32[4]{0} all-reduce-start(%a), replica_groups={}, to_apply=%add",
        "%k = f32[4]{0} fusion(%a), kind=kLoop, calls=%f",
        "%d = f32[4]{0} all-reduce-done(%s)",
    )
    found = _one(*lines)
    assert (found.nbytes, found.asynchronous, found.overlaps) == (16, True, True)
    found = _one(lines[0], lines[1], "%g = f32[4]{0} bitcast(%a)", lines[3], lines[2])
    assert (found.asynchronous, found.overlaps) == (True, False)
    sync = lines[1] + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    found = _one(lines[0], sync, lines[2], lines[3])
    assert (found.asynchronous, found.overlaps) == (False, False)


def test_collective_wrapped_in_async_start() -> None:
    wrapped = (
        "%wrapped (p: f32[4]) -> f32[1] {\n  %p = f32[4]{0} parameter(0)\n"
        "  ROOT %rs = f32[1]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add\n}\n"
    )
    found = _one(
        "%a = f32[4]{0} parameter(0)",
        "%s = ((f32[4]{0}), f32[1]{0}) async-start(%a), calls=%wrapped",
        "%k = f32[4]{0} fusion(%a), kind=kLoop, calls=%f",
        "%d = f32[1]{0} async-done(%s)",
        before=wrapped,
    )
    assert (found.kind, found.nbytes, found.asynchronous, found.overlaps) == ("reduce_scatter", 16, True, True)


def test_start_of_an_all_to_all_as_gpu_prints_it() -> None:
    found = _one(
        "%a = f32[32,2,64]{2,0,1} parameter(0)",
        "%s = ((f32[32,2,64]{2,0,1}), f32[32,2,64]{2,0,1}) all-to-all-start(%a), channel_id=1, "
        "replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_1'}, dimensions={1}",
        "%d = f32[32,2,64]{2,0,1} all-to-all-done(%s)",
    )
    assert (found.kind, found.nbytes, found.group_size) == ("all_to_all", 2 * 4 * 32 * 2 * 64, 2)


def test_loops_multiply_and_conditions_bound_them() -> None:
    body = (
        "%body (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
        "  ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add\n}\n"
        "%cond (p: f32[4]) -> pred[] {\n  %p = f32[4]{0} parameter(0)\n  %i = s32[] get-tuple-element(%p), index=0\n"
        "  %n = s32[] constant(12)\n  ROOT %c = pred[] compare(%i, %n), direction=LT\n}\n"
    )
    line = "%w = f32[4]{0} while(%a), condition=%cond, body=%body"
    assert _one("%a = f32[4]{0} parameter(0)", line, before=body).times == 12
    known = line + ', backend_config={"known_trip_count":{"n":"5"}}'
    assert _one("%a = f32[4]{0} parameter(0)", known, before=body).times == 5
    unknown = body.replace("direction=LT", "direction=NE")
    assert _one("%a = f32[4]{0} parameter(0)", line, before=unknown).times == 1


def test_kernels_of_a_gpu_program() -> None:
    text = _module(
        "%a = f32[4]{0} parameter(0)",
        "%f = f32[4]{0} fusion(%a), kind=kInput, calls=%fc",
        '%g = f32[4]{0} fusion(%a), kind=kCustom, calls=%gc, backend_config={"fusion_backend_config":'
        '{"kind":"__triton_gemm","triton_gemm_config":{}}}',
        '%h = (f32[4]{0}, s8[64]{0}) custom-call(%a, %f), custom_call_target="__cublas$lt$matmul"',
        '%i = (f32[4]{0}, s8[64]{0}) custom-call(%a, %f), custom_call_target="__cublas$gemm"',
        '%t = f32[4]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"',
        '%u = f32[4]{0} custom-call(%a), custom_call_target="my_call"',
        "%c = f32[4]{0} copy(%a)",
    )
    found = {(k.kind, k.detail): (k.count, k.runs) for k in kernels(text)}
    assert found == {
        ("fusion", "input"): (1, 1),
        ("gemm", "triton_gemm"): (1, 1),
        ("gemm", "cublas_lt"): (1, 1),
        ("gemm", "cublas_gemm"): (1, 1),
        ("triton", "gpu_xla.gpu.triton"): (1, 1),
        ("custom_call", "my_call"): (1, 1),
        ("other", "copy"): (1, 1),
    }


def test_text_that_is_no_module() -> None:
    with pytest.raises(CompileError, match="to do: pass compiled"):
        parse_module("func.func @main()")


def test_compiled_contraction_is_one_all_reduce() -> None:
    text = _text(lambda a, b: a @ b, (_f32(64, 128), _f32(128, 32)), (_sharding(None, "y"), _sharding("y", None)))
    (found,) = collectives(text)
    assert (found.kind, found.nbytes, found.group_size, found.times) == ("all_reduce", 4 * 64 * 32, 4, 1)
    assert found.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert "dot_general" in found.op_name
    assert "test_hlo.py" in found.source


def test_compiled_scan_multiplies() -> None:
    whole, columns, rows = _sharding(), _sharding(None, "y"), _sharding("y", None)

    def program(x: Any, a: Any, b: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            hidden = jax.lax.with_sharding_constraint(jnp.tanh(carry @ a), columns)
            return jax.lax.with_sharding_constraint(hidden @ b, whole), None

        return jax.lax.scan(body, x, None, length=6)[0]

    text = _text(program, (_f32(16, 64), _f32(64, 128), _f32(128, 64)), (whole, columns, rows))
    (found,) = collectives(text)
    assert (found.kind, found.nbytes, found.times) == ("all_reduce", 4 * 16 * 64, 6)


def test_compiled_nested_loops_multiply() -> None:
    whole, columns = _sharding(), _sharding(None, "y")

    def program(x: Any) -> Any:
        def inner(_: int, x: Any) -> Any:
            x = jax.lax.with_sharding_constraint(jnp.sin(x), columns)
            return jax.lax.with_sharding_constraint(jnp.cos(x), whole)

        return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.fori_loop(0, 5, inner, x), x)

    found = collectives(_text(program, (_f32(16, 64),), (whole,)))
    assert sum(c.times for c in found if c.kind == "all_gather") == 15


def test_compiled_conditional_counts_its_branches() -> None:
    rows = _sharding("y", None)

    def program(flag: Any, x: Any) -> Any:
        return jax.lax.cond(flag, lambda x: jnp.sum(x), lambda x: jnp.max(x), x)

    args = (jax.ShapeDtypeStruct((), jnp.bool_), _f32(16, 64))
    found = collectives(_text(program, args, (_sharding(), rows)))
    assert [(c.kind, c.nbytes, c.times) for c in found] == [("all_reduce", 4, 1)] * 2


def test_compiled_kernels_count_loops() -> None:
    text = _text(lambda x: jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(x @ x), x), (_f32(64, 64),), (_sharding(),))
    found = kernels(text)
    assert any(k.runs >= 7 * k.count for k in found)
    assert all(k.count >= 1 for k in found)
