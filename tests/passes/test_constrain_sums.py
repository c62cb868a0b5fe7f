"""Where sums are stated before their own spec."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from autoshard.ir import Spec, axes_size, partition_spec
from autoshard.passes import Constrain
from bench.collectives import compiled_traffic

SIZES = {"a": 2, "b": 4}
THREE = {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("name", "result", "partial", "stop"),
    [
        ("dot_general", ((), ()), ("a", "b"), None),
        ("dot_general", (("a", "b"), ()), ("a", "b"), None),
        ("dot_general", (("a",), ()), ("a", "b"), None),
        ("dot_general", (("a",), ("b",)), ("a", "b"), ((), ("b",))),
        ("conv_general_dilated", (("a",), ()), ("a", "b"), ((), ())),
        ("conv_general_dilated", ((), ("b", "a")), ("a", "b"), None),
        ("gather", (("a", "b"), ()), ("b",), (("a",), ())),
        ("gather", (("a",), ()), ("b",), None),
        ("reduce_sum", (("a",), ("b",)), ("a", "b"), None),
    ],
)
def test_stop(name: str, result: Spec, partial: tuple[str, ...], stop: Spec | None) -> None:
    assert Constrain.sum_stop(name, result, partial, SIZES) == stop


@pytest.mark.parametrize(
    ("result", "stop"),
    [
        ((("a",), ("c",)), None),  # scattered over a, then summed over b
        (((), ("c", "a")), ((), ("c",))),  # the dimension is split already
        ((("a",), ()), ((), ())),  # nobody uses c
        ((("a",), ("c", "b")), (("a",), ("c",))),
    ],
)
def test_stop_with_a_third_axis(result: Spec, stop: Spec | None) -> None:
    assert Constrain.sum_stop("dot_general", result, ("a", "b"), THREE) == stop


@pytest.mark.parametrize("kept", [((), ()), ((), ("c",)), (("c",), ())], ids=["idle", "columns", "rows"])
@pytest.mark.parametrize("scattered", [("a",), ("b",), ("b", "a")])
@pytest.mark.parametrize("dim", [0, 1])
def test_xla_sums_no_more_than_the_law_says(kept: Spec, scattered: tuple[str, ...], dim: int) -> None:
    """A product summed over a and b: what XLA compiles for the stop, against `first_scatter`."""
    mesh = jax.make_mesh(tuple(THREE.values()), tuple(THREE), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    partial = ("a", "b")
    result = tuple(axes + scattered if d == dim else axes for d, axes in enumerate(kept))
    stop = Constrain.sum_stop("dot_general", result, partial, THREE)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        y: Any = jax.lax.dot_general(keep(x, (kept[0], partial)), keep(w, (kept[1], partial)), (((1,), (1,)), ((), ())))
        return keep(y if stop is None else keep(y, stop), result)

    def keep(value: Any, spec: Spec) -> Any:
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, partition_spec(spec)))

    x, w = jax.ShapeDtypeStruct((16, 128), jnp.float32), jax.ShapeDtypeStruct((128, 128), jnp.float32)
    text = jax.jit(product).lower(x, w).compile().as_text()
    assert text is not None
    nbytes = 16 * 128 * 4 // axes_size(sum(kept, ()), THREE)
    first = Constrain.first_scatter("dot_general", result, partial, THREE)
    expected: Counter[Any] = Counter()
    if first is None:
        expected["all_reduce", partial] = nbytes
    else:
        rest = tuple(axis for axis in partial if axis not in first[1])
        expected["all_reduce", tuple(sorted(first[1]))] = nbytes
        expected["all_reduce", rest] = nbytes // axes_size(first[1], THREE) if rest else 0
    assert compiled_traffic(text, tuple(THREE.items())) == +expected
