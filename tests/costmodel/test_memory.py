"""Peak memory: the rules one by one on small graphs, then whole programs against XLA's buffer assignment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autoshard import autoshard
from autoshard.costmodel import WHOLE, Buffers, Sharding, find_buffers, find_lives, materialized, peak_memory, usage
from autoshard.costmodel.memory_packing import packed_bytes
from autoshard.ir import Graph, Spec, Value, local_bytes, trace
from autoshard.search import prepare
from bench.memory import MEDIAN
from bench.memory_cases import Case, measure
from tests.problems import Step, looped, mlp, normal, random_step

KIB = 1024
SIDE = 16
"""A square of this side is one KiB of float32."""


def square(seed: int = 0) -> jax.Array:
    return normal(seed, SIDE, SIDE)


def buffers(
    fun: Callable[..., Sequence[jax.Array]],
    *args: jax.Array,
    donated: Sequence[tuple[int, int]] = (),
    kind: str = "cpu",
) -> Buffers:
    return _of(prepare(trace(lambda *a: list(fun(*a)), args)), donated, kind)


def _of(graph: Graph, donated: Sequence[tuple[int, int]], kind: str, sharding: Sharding = WHOLE) -> Buffers:
    written = materialized(graph).__contains__ if kind == "gpu" else None
    return find_buffers(graph, donated, kind, sharding, written)


def temporaries(found: Buffers) -> list[int]:
    return sorted((b.nbytes for b in found.temporaries), reverse=True)


def xla_temporaries(
    fun: Callable[..., Sequence[jax.Array]], *args: jax.Array, donated: Sequence[tuple[int, int]] = ()
) -> int:
    jitted = jax.jit(lambda *a: list(fun(*a)), donate_argnums=tuple(i for i, _ in donated))
    stats = jitted.lower(*args).compile().memory_analysis()
    assert stats is not None
    return stats.temp_size_in_bytes


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_chain_of_elementwise_operations_is_one_kernel(kind: str) -> None:
    found = buffers(lambda x: [jnp.sin(x * 2.0) + 1.0], square(), kind=kind)
    assert temporaries(found) == []
    assert peak_memory(found).outputs_bytes == KIB + 8


def test_a_result_takes_over_what_dies_there() -> None:
    found = buffers(lambda x, w: [jnp.tanh(x @ w) @ w], square(), square(1))
    assert temporaries(found) == [KIB, KIB]
    assert peak_memory(found).temporary_bytes == KIB


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_outputs_buffer_serves_before_it_is_written(kind: str) -> None:
    """Three products in a row: the first lies where the last will."""

    def fun(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [((x @ w) @ w) @ w]

    found = buffers(fun, square(), square(1), kind=kind)
    assert temporaries(found) == [KIB, KIB]
    assert peak_memory(found).temporary_bytes == KIB
    assert xla_temporaries(fun, square(), square(1)) == KIB


def test_an_expensive_value_is_not_computed_twice() -> None:
    cheap = buffers(lambda x, w: [(-x) + w, (-x) * w], square(), square(1))
    dear = buffers(lambda x, w: [(t := jnp.tanh(x)) + w, t * w], square(), square(1))
    assert temporaries(cheap) == []
    assert temporaries(dear) == [KIB]


def _copied(found: Buffers) -> list[int]:
    inputs = {b.value for b in found.inputs}
    return [b.nbytes for b in found.temporaries if b.value in inputs]


def test_a_donated_input_needs_no_copy_where_all_readers_come_first() -> None:
    def fun(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [w - 0.1 * (x.T @ (x @ w))]

    found = buffers(fun, square(), square(1), donated=[(0, 0)])
    assert _copied(found) == []
    assert peak_memory(found).outputs_bytes == 8
    assert abs(peak_memory(found).temporary_bytes - xla_temporaries(fun, square(), square(1), donated=[(0, 0)])) <= 64


def test_a_reader_that_may_come_later_means_a_copy() -> None:
    """The gradient of x reads w and does not lead to the new w: XLA:CPU copies w first."""

    def fun(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [w - 0.1 * (x.T @ x), x @ w]

    found = buffers(fun, square(), square(1), donated=[(0, 0)])
    assert _copied(found) == [KIB]
    assert _copied(buffers(fun, square(), square(1))) == []


def test_a_scans_stack_is_there_from_the_start() -> None:
    """Stacked results are allocated before the loop, one slice a step is written in place."""

    def fun(x: jax.Array) -> list[jax.Array]:
        _, ys = jax.lax.scan(lambda c, _: (c @ c, c @ c), x, None, length=8)
        return [ys.sum(axis=0)]

    found = buffers(fun, square())
    assert temporaries(found)[0] == 8 * KIB
    assert 9 * KIB <= peak_memory(found).temporary_bytes <= 13 * KIB


def test_long_reductions_fuse_with_nothing_on_a_cpu() -> None:
    short, long = normal(0, 64, 32), normal(0, 64, 64)
    assert temporaries(buffers(lambda x: [(x * x).sum(axis=1)], short)) == []
    assert temporaries(buffers(lambda x: [(x * x).sum(axis=1)], long)) == [long.nbytes]


def _gathering(spec: Spec, target: Spec, kind: str) -> Buffers:
    """x in `spec` goes into a product that wants `target`."""
    graph = prepare(trace(lambda x, w: [(x @ w) @ w], (square(), square(1))))
    (x, w), first = graph.inputs, graph.equations[0]
    whole = ((), ())
    specs = {v: whole for e in graph.equations for v in e.outputs} | {x: spec, w: whole}
    sharding = Sharding({"a": 4}, specs, {(first, 0): target}, {}, {}, lambda v, s, t: (t,))
    return _of(graph, (), kind, sharding)


def test_gathering_rows_makes_one_copy() -> None:
    for kind in ("cpu", "gpu"):
        assert temporaries(_gathering((("a",), ()), ((), ()), kind)) == [KIB, KIB]


def test_gathering_columns_takes_layouts_before_and_after_on_a_cpu() -> None:
    """XLA:CPU gathers along the major dimension: a part and the whole transposed, the whole; then the product."""
    assert temporaries(_gathering(((), ("a",)), ((), ()), "cpu")) == [KIB, KIB, KIB, KIB // 4]
    assert temporaries(_gathering(((), ("a",)), ((), ()), "gpu")) == [KIB, KIB]


def test_partial_sums_are_there_before_and_after() -> None:
    graph = prepare(trace(lambda x, w: [jnp.tanh(x @ w) @ w], (square(), square(1))))
    first = graph.equations[0]
    specs = dict.fromkeys((*graph.inputs, *(o for e in graph.equations for o in e.outputs)), ((), ()))
    plain = _of(graph, (), "cpu", Sharding({"a": 4}, specs, {}, {}, {}, lambda v, s, t: (t,)))
    summed = _of(graph, (), "cpu", Sharding({"a": 4}, specs, {}, {}, {first: ()}, lambda v, s, t: (t,)))
    assert len(temporaries(summed)) == len(temporaries(plain)) + 1


def test_a_loops_constants_are_gathered_before_it_on_a_cpu() -> None:
    """A scan of products with one weight that lies split: the whole weight is alive around the loop."""
    graph = prepare(
        trace(lambda x, w: [jax.lax.scan(lambda h, _: (h @ w, None), x @ x, None, length=4)[0]], (square(), square(1)))
    )
    loop = next(e for e in graph.equations if e.graphs)
    (body,) = loop.graphs
    product = next(e for e in body.equations if e.name == "dot_general")
    inner = next(v for v in body.inputs if v in product.inputs[1:])
    split: Spec = (("a",), ())
    specs: dict[Value, Spec] = {v: ((), ()) for v in (*graph.inputs, *body.inputs) if len(v.shape) == 2}
    specs |= {graph.inputs[1]: split, inner: split}
    sharding = Sharding({"a": 4}, specs, {(product, 1): ((), ())}, {}, {}, lambda v, s, t: (t,))
    before = next(b for b in _of(graph, (), "cpu", sharding).temporaries if b.value is None and b.nbytes == KIB)
    inside = next(b for b in _of(graph, (), "gpu", sharding).temporaries if b.value is None and b.nbytes == KIB)
    assert before.end - before.start > inside.end - inside.start


def test_outer_products_are_loops() -> None:
    found = buffers(lambda a, b, w: [w + jnp.einsum("i,j->ij", a, b)], normal(0, SIDE), normal(1, SIDE), square())
    assert temporaries(found) == []


def test_products_read_through_transposes() -> None:
    found = buffers(lambda x, w: [x.T @ w], square(), square(1))
    assert temporaries(found) == []


STEPS: dict[str, Callable[[], Step]] = {"mlp": mlp, "looped": looped} | {
    f"random {seed}": (lambda seed=seed: random_step(seed)) for seed in range(12)
}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("name", STEPS)
def test_properties(name: str, kind: str) -> None:
    """Donating never costs more, lives are the buffers, no buffer is in use for no time."""
    step = STEPS[name]()
    graph = prepare(step.graph())
    donated = [(i, i) for i in range(step.state)]
    kept, given = _of(graph, (), kind), _of(graph, donated, kind)
    for found in (kept, given):
        assert all(0 <= b.start < b.end <= found.steps + 1 for b in found.temporaries)
        peak = peak_memory(found)
        biggest = max((b.nbytes for b in found.temporaries), default=0)
        rounded = [-(-b.nbytes // found.alignment) * found.alignment for b in found.temporaries]
        assert peak.temporary_bytes <= sum(rounded)
        assert peak.peak_bytes >= peak.inputs_bytes + peak.outputs_bytes
        assert biggest <= peak.peak_bytes
    state = sum(graph.inputs[i].nbytes for i, _ in donated)
    assert peak_memory(given).outputs_bytes == peak_memory(kept).outputs_bytes - state
    written = materialized(graph).__contains__ if kind == "gpu" else None
    lives = find_lives(graph, donated, kind, written)
    curve = usage(lives, {life.value: life.value.nbytes for life in lives.lives})
    assert curve.max() <= peak_memory(given).peak_bytes + given.alignment * len(given.temporaries)
    assert lives.inputs == frozenset((*graph.inputs, *(v for v, _ in graph.constants)))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_splitting_everything_evenly_divides_the_peak(kind: str) -> None:
    """The batch dimension of a chain of elementwise values and products, over 4 devices."""
    graph = prepare(trace(lambda x, w: [jnp.tanh(jnp.tanh(x @ w) @ w)], (normal(0, 64, SIDE), square(1))))
    whole: Spec = ((), ())
    specs: dict[Value, Spec] = {graph.inputs[1]: whole}
    for v in (graph.inputs[0], *(o for e in graph.equations for o in e.outputs)):
        specs[v] = (("a",), ())
    split = _of(graph, (), kind, Sharding({"a": 4}, specs, {}, {}, {}, lambda v, s, t: (t,)))
    everything = peak_memory(_of(graph, (), kind))
    parts = peak_memory(split)
    assert parts.temporary_bytes == everything.temporary_bytes // 4
    assert parts.inputs_bytes == local_bytes(graph.inputs[0].aval, (("a",), ()), {"a": 4}) + KIB


def test_time_grows_with_the_graph_only() -> None:
    """Twice the layers take about twice as long; the best of three times each."""

    def seconds(layers: int) -> float:
        def fun(x: jax.Array, w: jax.Array) -> jax.Array:
            h = x
            for _ in range(layers):
                h = jnp.tanh(h @ w) * 2.0 + h
            return h.sum()

        graph = prepare(trace(jax.grad(fun, 1), (square(), square(1))))
        found: list[float] = []
        for _ in range(3):
            begin = time.process_time()
            peak_memory(_of(graph, (), "cpu"))
            found.append(time.process_time() - begin)
        return min(found)

    assert seconds(800) < 3 * seconds(400)


@pytest.mark.implicit_promotion
@pytest.mark.parametrize(
    "name", ["mlp_momentum", "accumulation_scan", "scanned_remat", "fourier_mixer", "lstm_carried"]
)
def test_the_planned_peak_is_near_xlas(name: str) -> None:
    row = measure(Case("zoo", name))
    assert abs(row.error) < 0.3, row


GPU_PROGRAMS = ("mlp_two_losses", "accumulation_scan", "loss_scaling")


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.implicit_promotion
def test_the_median_error_is_small_for_gpus() -> None:
    rows = [measure(Case("zoo", name), "h100") for name in GPU_PROGRAMS]
    assert statistics.median(abs(row.error) for row in rows) <= MEDIAN, rows
    assert max(abs(row.error) for row in rows) <= 0.2, rows


def test_buffers_are_packed_with_holes() -> None:
    """Two that live apart share a place; a larger one that meets both does not fit into what is between."""
    assert packed_bytes([64, 64], [0, 2], [2, 4], 64) == 64
    assert packed_bytes([64, 64, 128], [0, 2, 1], [2, 4, 3], 64) == 192
    assert packed_bytes([1], [0], [1], 256) == 256
    assert packed_bytes([], [], [], 64) == 0


def _gpu_temporaries(fun: Callable[..., Sequence[jax.Array]], *shapes: jax.ShapeDtypeStruct) -> list[int]:
    graph = prepare(trace(lambda *a: list(fun(*a)), shapes))
    return temporaries(_of(graph, (), "gpu"))


def test_gpus_write_what_is_dearer_to_compute_again() -> None:
    """The tanh of a product, read by two kernels: written in bf16, computed again in float32."""

    def fun(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        y = x @ w
        t = jnp.tanh(y)
        return [((y * t) @ w * (1 - t * t)) @ x]

    large = (4096, 4096)
    half, single = (jax.ShapeDtypeStruct(large, d) for d in (jnp.bfloat16, jnp.float32))
    assert len(_gpu_temporaries(fun, half, half)) == len(_gpu_temporaries(fun, single, single)) + 1


@pytest.mark.deviceless
def test_the_planned_peak_is_near_xlas_for_gpus() -> None:
    """Data parallel, weights and batch of one size, so that gradients, activations and state all count."""
    layers, width, rows = 6, 1024, 8192

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            h = x
            for w in weights:
                h = jax.nn.gelu(h @ w)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    pins = {"weights/**": PartitionSpec(), "x": PartitionSpec("data")}
    planned = autoshard(devices="h100x8", mesh=(8,), pins=pins)(step)
    shape = jax.ShapeDtypeStruct
    plan = planned.plan([shape((width, width), jnp.float32)] * layers, shape((rows, width), jnp.float32))
    assert plan.memory.peak_bytes == pytest.approx(plan.compile().memory.peak, rel=0.15)


def test_the_whole_value_is_counted() -> None:
    """Arguments that are read by nothing still lie on the device."""
    found = buffers(lambda x, y: [x * 2.0], square(), square(1))
    assert peak_memory(found).inputs_bytes == 2 * KIB
    assert np.all([b.nbytes == KIB for b in found.inputs])
