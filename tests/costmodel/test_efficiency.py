"""Measured efficiencies: curves between points, time on a calibrated device, the cluster file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Cluster, DeviceSpec, Link, Node, resolve_cluster
from autoshard.costmodel import cpu_kernels, equation_work, measured_time_s, work_time_s
from autoshard.errors import ClusterError
from autoshard.hardware import Curve
from autoshard.ir import Apply, Graph, trace

CPU = resolve_cluster("cpu").device(0)
CURVES = {
    "matmul.f32": ((1e6, 0.2), (1e8, 1.0)),
    "matmul_narrow.f32": ((1.0, 0.1), (64.0, 1.0)),
    "elementwise": ((1e4, 0.5), (1e6, 1.0), (1e8, 0.1)),
    "exp": ((65536.0, 0.5),),
    "transpose": ((1e6, 0.05),),
}


def calibrated(**changes: Any) -> DeviceSpec:
    return dataclasses.replace(CPU, efficiency={**CURVES, **changes})


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def graph_of(fun: Any, *avals: Any) -> Graph:
    return trace(lambda *args: jax.tree.leaves(fun(*args)), avals)


def work_of(fun: Any, *avals: Any) -> Any:
    return equation_work(graph_of(fun, *avals).equations[0])


def test_between_points_and_beyond_the_ends() -> None:
    curve = Curve.of(((10.0, 0.2), (1000.0, 0.6)))
    assert [curve.at(x) for x in (0.0, 1.0, 10.0, 1000.0, 1e9)] == [0.2, 0.2, 0.2, 0.6, 0.6]
    assert curve.at(100.0) == pytest.approx(0.4)  # half way in the logarithm
    assert Curve.of(((5.0, 0.3),)).at(77.0) == 0.3


def test_curves_replace_flat_efficiencies() -> None:
    device = calibrated()
    product = work_of(lambda a, b: a @ b, spec(1024, 1024), spec(1024, 1024))
    seconds = work_time_s(product, 1.0, 0.0, device, fused=True)
    assert seconds == pytest.approx(2 * 1024**3 / device.peak_flops_per_s("f32"))
    skinny = work_of(lambda a, b: a @ b, spec(1, 4096), spec(4096, 4096))
    assert work_time_s(skinny, 1.0, 0.0, device, fused=True) == pytest.approx(2 * 4096**2 / 46e9 / 0.1)
    functions = work_of(jnp.exp, spec(1024))
    assert work_time_s(functions, 1.0, 0.0, device, fused=True) == pytest.approx(16 * 1024 / 46e9 / 0.5)


def test_what_was_not_measured_runs_at_the_flat_rate() -> None:
    device = dataclasses.replace(CPU, efficiency={"exp": ((1.0, 0.5),)})
    product = work_of(lambda a, b: a @ b, spec(256, 256), spec(256, 256))
    assert work_time_s(product, 1.0, 1e6, device) == pytest.approx(work_time_s(product, 1.0, 1e6, CPU))


def test_presets_have_no_curves() -> None:
    for name in ("cpu", "h100", "v100"):
        assert not resolve_cluster(name).device(0).calibrated


@given(st.floats(1e-3, 1.0), st.floats(1.0, 1e9), st.floats(1.0, 4.0))
def test_time_grows_with_bytes_and_operations(share: float, nbytes: float, factor: float) -> None:
    device = calibrated()
    for work in (PRODUCT, FUNCTION):
        time_s = measured_time_s(work, share, nbytes, device)
        assert time_s >= device.kernel_launch_s
        assert time_s <= measured_time_s(work, share, nbytes * factor, device) * (1 + 1e-9)
    assert measured_time_s(PRODUCT, share / factor, 0.0, device) <= measured_time_s(PRODUCT, share, 0.0, device)


PRODUCT = work_of(lambda a, b: a @ b, spec(512, 512), spec(512, 512))
FUNCTION = work_of(jnp.exp, spec(512, 512))


def test_transposed_reads_cost_more() -> None:
    device = calibrated()
    work = work_of(lambda a, b: a + b, spec(512, 512), spec(512, 512))
    straight = measured_time_s(work, 1.0, work.nbytes, device)
    crossed = measured_time_s(work, 1.0, work.nbytes / 2, device, copies=2, strided=1, strided_bytes=work.nbytes / 2)
    assert crossed > 2 * straight


# Kernels of XLA:CPU


def names(graph: Graph) -> dict[str, Any]:
    kernels = cpu_kernels(graph)
    return {e.name: kernels[id(e)] for e in graph.equations if isinstance(e, Apply)}


def test_loops_fuse_and_reductions_do_not() -> None:
    found = names(graph_of(lambda x: jnp.sum(jnp.sin(x) + 2.0, 1), spec(64, 64)))
    assert found["sin"].writes == (False,)
    assert found["add"].writes == (True,)
    assert [k.launches for k in found.values()] == [0, 1, 1]


def test_a_sum_takes_the_product_it_sums() -> None:
    found = names(graph_of(lambda x: jnp.sum(jnp.sin(x) * x, 0), spec(64, 64)))
    assert found["mul"].writes == (False,)
    assert (found["reduce_sum"].fused, found["reduce_sum"].launches) == (True, 1)
    work, device = work_of(lambda x: jnp.sum(x, 0), spec(64, 64)), calibrated(reduce_major_fused=((1.0, 0.5),))
    seconds = measured_time_s(work, 1.0, 0.0, device, launches=0, fused=True)
    assert seconds == pytest.approx(64 * 64 * 4 / device.memory_bytes_per_s / 0.5)


def test_expensive_values_with_several_readers_are_stored() -> None:
    found = names(graph_of(lambda x: (jnp.exp(x) + 1.0, jnp.exp(x) * 2.0), spec(64, 64)))
    assert found["exp"].copies == 1  # of two, each has one reader
    shared = names(graph_of(lambda x: (lambda y: (y + 1.0, y * 2.0))(jnp.exp(x)), spec(64, 64)))
    assert shared["exp"].writes == (True,)
    cheap = names(graph_of(lambda x: (lambda y: (y + 1.0, y * 2.0))(-x), spec(64, 64)))
    assert (cheap["neg"].writes, cheap["neg"].copies) == ((False,), 2)


def test_gradients_over_batch_and_time_read_transposed() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w))

    graph = graph_of(jax.grad(loss), spec(32, 16), spec(4, 8, 32))
    kernels = cpu_kernels(graph)
    assert any(k.strided for k in kernels.values())
    flat = graph_of(jax.grad(loss), spec(32, 16), spec(8, 32))
    assert not any(k.strided for k in cpu_kernels(flat).values())


def test_bodies_are_looked_into() -> None:
    graph = graph_of(lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=3)[0], spec(8, 8))
    inner = [e for e, _ in graph.walk() if isinstance(e, Apply) and e.name == "tanh"]
    assert cpu_kernels(graph)[id(inner[0])].launches == 1


# The file


def cluster_of(device: DeviceSpec) -> Cluster:
    return Cluster("mine", (Node(device, 2, Link(1e9, 1e-5)),))


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    cluster = cluster_of(calibrated())
    path.write_text(cluster.to_toml() + '\n[measured]\nanything = "kept by people"\n')
    assert Cluster.from_toml(path) == cluster
    assert Cluster.from_toml(path).device(0).share(("missing", "exp"), 1.0) == 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"exp" = [[2, 0.5], [1, 0.5]]', "sizes ascending"),
        ('"exp" = [[1, 0.0]]', "above 0"),
        ('"exp" = []', "above 0"),
        ('"exp" = [1, 2]', "a list of pairs"),
        ('"matmull.f32" = [[1, 0.5]]', "'matmull.f32'"),
        ('"matmul.f33" = [[1, 0.5]]', "'matmul.f33'"),
    ],
)
def test_file_refusals(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.toml"
    text = cluster_of(dataclasses.replace(CPU, efficiency={"exp": ((1.0, 0.5),)})).to_toml()
    path.write_text(text.replace('"exp" = [[1.0, 0.5]]', line))
    with pytest.raises(ClusterError, match=message.replace("[", r"\[")):
        Cluster.from_toml(path)
