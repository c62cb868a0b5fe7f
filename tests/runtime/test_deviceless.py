"""Programs compiled for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.cluster import preset_cluster
from autoshard.costmodel.reshard import path_collectives
from autoshard.errors import AutoshardError, ClusterError, CompileError, MeshError
from autoshard.ir import MeshShape, Spec, axes_size, partition_spec
from autoshard.runtime import deviceless
from autoshard.runtime.compile_report import CompiledReport, MemoryParts
from autoshard.runtime.deviceless import compile_deviceless, deviceless_mesh
from autoshard.runtime.hlo import collectives

P = PartitionSpec
EIGHT: MeshShape = (("data", 8),)
LAYERS, WIDTH, BATCH = 3, 512, 4096


def _mlp(axes: Any = "data") -> Any:
    """A data-parallel training step of an MLP in bf16."""

    def loss(weights: list[Any], x: Any, y: Any) -> Any:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x - y).astype(jnp.float32) ** 2)

    def step(weights: list[Any], x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value

    def build(mesh: Mesh) -> tuple[Any, Sequence[Any]]:
        whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(axes))
        jitted = jax.jit(
            step,
            in_shardings=([whole] * LAYERS, rows, rows),
            out_shardings=([whole] * LAYERS, whole),
            donate_argnums=0,
        )
        weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * LAYERS
        batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
        return jitted, (weights, batch, batch)

    return build


def _constraints(shape: tuple[int, ...], specs: tuple[Spec, ...]) -> Any:
    """Constraints one after the other."""

    def build(mesh: Mesh) -> tuple[Any, Sequence[Any]]:
        shardings = [NamedSharding(mesh, partition_spec(spec)) for spec in specs]

        def program(x: Any) -> Any:
            x = x * 2
            for sharding in shardings:
                x = jax.lax.with_sharding_constraint(x, sharding)
            return x + 1

        jitted = jax.jit(program, in_shardings=shardings[0], out_shardings=shardings[-1])
        return jitted, (jax.ShapeDtypeStruct(shape, jnp.float32),)

    return build


@pytest.mark.deviceless
def test_data_parallel_mlp_on_eight() -> None:
    said: list[str] = []
    report = compile_deviceless(_mlp(), "h100x8", EIGHT, ptx=True, hlo=True, on_progress=said.append)
    weights = LAYERS * WIDTH * WIDTH * 2
    assert report.device == "NVIDIA H100 80GB HBM3"
    assert report.memory.arguments == weights + 2 * BATCH // 8 * WIDTH * 2
    assert report.memory.aliased == weights
    assert report.memory.arguments < report.memory.peak < 40 << 20
    assert report.memory.fits
    (group,) = report.collectives
    assert (group.kind, group.group_size) == ("all_reduce", 8)
    assert group.nbytes == weights + 4  # the gradients and the loss
    assert report.kernel_count("gemm") >= 3 * LAYERS - 1
    assert ".visible .entry" in report.ptx
    assert "all-reduce" in report.hlo
    assert not report.warnings
    assert any("compiling" in text for text in said)
    assert CompiledReport.from_json(report.to_json()) == report
    text = str(report)
    assert "all-reduce" in text
    assert "fits" in text


@pytest.mark.deviceless
def test_a_thousand_gpus() -> None:
    report = compile_deviceless(_mlp(("data", "model")), "h100x1024", (("data", 128), ("model", 8)))
    assert [(g.kind, g.group_size) for g in report.collectives] == [("all_reduce", 1024)]
    assert report.memory.arguments == LAYERS * WIDTH * WIDTH * 2 + 2 * BATCH // 1024 * WIDTH * 2
    assert report.ptx == report.hlo == ""


@pytest.mark.deviceless
def test_memory_may_be_another() -> None:
    report = compile_deviceless(_mlp(), "h100", EIGHT, memory_bytes=8 << 20)
    assert report.memory.capacity == 8 << 20
    assert not report.memory.fits
    assert "DOES NOT FIT" in str(report)
    assert any("rematerialization" in warning for warning in report.warnings)


@pytest.mark.deviceless
def test_arrays_as_arguments() -> None:
    def build(mesh: Mesh) -> tuple[Any, Sequence[Any]]:
        rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        return jax.jit(lambda x, n: x * n, in_shardings=(rows, whole)), (jnp.zeros((8, 4)), 2.0)

    report = compile_deviceless(build, "h100x8", EIGHT)
    assert report.memory.outputs == 4 * 4


@pytest.mark.deviceless
def test_target_as_text() -> None:
    text = preset_cluster("a100").device(0).target_text()
    report = compile_deviceless(_mlp(), text, EIGHT, memory_bytes=24 << 30)
    assert report.device == "NVIDIA A100-SXM4-80GB"
    assert report.memory.capacity == 24 << 30


@pytest.mark.deviceless
def test_partitioner_warnings_are_reported_and_the_law_holds() -> None:
    mesh: MeshShape = (("x", 2), ("y", 4))
    specs: tuple[Spec, ...] = (
        (("x",), ()),
        ((), ("y",)),
        (("y", "x"), ()),
        (("x", "y"), ()),
        (("x",), ("y",)),
        ((), ()),
    )
    report = compile_deviceless(_constraints((64, 128), specs), "h100x8", mesh, hlo=True)
    assert any("Involuntary full rematerialization" in warning for warning in report.warnings)
    expected = [
        (kind, 4 * elements // (1 if kind == "all_gather" else axes_size(axes, dict(mesh))))
        for kind, elements, axes in path_collectives((64, 128), specs[0], specs[1:], mesh)
    ]
    found = [(c.kind, c.nbytes // (1 if c.kind == "all_gather" else c.group_size)) for c in collectives(report.hlo)]
    assert found == expected


@pytest.mark.deviceless
def test_contraction_becomes_a_reduce_scatter() -> None:
    def build(mesh: Mesh) -> tuple[Any, Sequence[Any]]:
        columns, rows = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P("data", None))
        jitted = jax.jit(lambda a, b: a @ b, in_shardings=(columns, rows), out_shardings=rows)
        return jitted, (jax.ShapeDtypeStruct((512, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 256), jnp.float32))

    report = compile_deviceless(build, "h100x8", EIGHT)
    assert [(g.kind, g.count, g.nbytes) for g in report.collectives] == [("reduce_scatter", 1, 4 * 512 * 256)]


@pytest.mark.deviceless
def test_pallas_kernel() -> None:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.sin(x_ref[...])

    def local(x: Any) -> Any:
        block = pallas.BlockSpec((64, 128), lambda i: (i, 0))
        return pallas.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // 64,),
            in_specs=[block],
            out_specs=block,
            name="sine",
            compiler_params=triton.CompilerParams(num_warps=4),
        )(x)

    def build(mesh: Mesh) -> tuple[Any, Sequence[Any]]:
        mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        jitted = jax.jit(mapped, in_shardings=NamedSharding(mesh, P("data")))
        return jitted, (jax.ShapeDtypeStruct((1024, 128), jnp.float32),)

    report = compile_deviceless(build, "h100x8", EIGHT, ptx=True)
    assert report.kernel_count("triton") == 1
    assert ".entry sine(" in report.ptx


@pytest.mark.deviceless
def test_device_too_old_for_cuda_13() -> None:
    with pytest.raises(CompileError, match=r"capability 7\.0"):
        compile_deviceless(_mlp(), "v100x8", EIGHT)


@pytest.mark.deviceless
def test_crash_shows_the_end_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('F0101 fatal: it broke', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(deviceless, "worker_command", lambda folder: [sys.executable, "-c", script])
    with pytest.raises(CompileError, match=r"exit status 3(.|\n)*it broke"):
        compile_deviceless(_mlp(), "h100x8", EIGHT)


@pytest.mark.deviceless
def test_refusal_shows_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match=r"refused the program(.|\n)*message:"):
        compile_deviceless(_mlp(), 'gpu_device_info { core_count: "many" }', EIGHT)


@pytest.mark.deviceless
def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(deviceless, "worker_command", lambda folder: command)
    with pytest.raises(CompileError, match="did not finish within"):
        compile_deviceless(_mlp(), "h100x8", EIGHT, timeout_s=0.3)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == deviceless.PLUGIN else real(name, *rest)
    )
    with pytest.raises(CompileError, match=r"pip install 'autoshard\[deviceless\]'"):
        compile_deviceless(_mlp(), "h100x8", EIGHT)


def test_mesh_of_stand_ins() -> None:
    mesh = deviceless_mesh("h100x16", (("data", 4), ("model", 4)))
    assert mesh.axis_names == ("data", "model")
    assert mesh.devices.shape == (4, 4)
    assert [d.id for d in mesh.devices.flat] == list(range(16))
    lowered = jax.jit(lambda x: x + 1, in_shardings=NamedSharding(mesh, P("data"))).trace(
        jax.ShapeDtypeStruct((8,), jnp.float32)
    )
    assert "num_partitions = 16" in lowered.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("target", "mesh", "error"),
    [
        ("h100x8", (("data", 16),), MeshError),
        ("nothing", EIGHT, ClusterError),
        ("cpux8", EIGHT, ClusterError),
    ],
)
def test_wrong_targets(target: str, mesh: MeshShape, error: type[AutoshardError]) -> None:
    with pytest.raises(error, match="to do:"):
        deviceless_mesh(target, mesh)


def test_environment_is_clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    environment = deviceless._environment(tmp_path, ("--xla_a=1",))
    assert "JAX_ENABLE_X64" not in environment
    assert "autotune" not in environment["XLA_FLAGS"]
    assert environment["XLA_FLAGS"].endswith(f"--xla_a=1 --xla_dump_to={tmp_path}")
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_warnings_are_read_from_the_log() -> None:
    log = (
        "W1201 05:12:35.234755   13209 spmd_partitioner.cc:668] [SPMD] Involuntary full rematerialization. Because.\n"
        "W1201 05:12:35.334755   13210 spmd_partitioner.cc:668] [SPMD] Involuntary full rematerialization. Because.\n"
        "I1201 05:12:35.234755   13209 other.cc:1] for your information\n"
        "W1201 05:12:35.304530   13209 gpu_compiler.cc:1690] Slow. To avoid this, compile with a GPU present.\n"
    )
    assert deviceless._warnings(log) == ("[SPMD] Involuntary full rematerialization. Because.",)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 99}', '{"version": 1, "device": "x"}'])
def test_unreadable_report(text: str) -> None:
    with pytest.raises(CompileError, match="to do: compile the program again"):
        CompiledReport.from_json(text)


def test_memory_that_fits() -> None:
    assert MemoryParts(1, 1, 1, 1, 0, peak=10, capacity=10).fits
    assert not MemoryParts(1, 1, 1, 1, 0, peak=11, capacity=10).fits
