"""Factor rules: what they say of chosen equations, of control flow and calls, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

from autoshard.errors import ArgumentError, UnknownPrimitiveError
from autoshard.ir import Apply, FactorBuilder, FactorKind, FactorRule, factor_rule, register_rule
from autoshard.ir.compose import Composer
from autoshard.ir.graph import Value
from autoshard.ir.rule_builder import refine
from autoshard.ir.rule_registry import registered
from autoshard.jax_compat import aval_of

from .rule_examples import INT, F, only, s

pytestmark = pytest.mark.implicit_promotion


def conv(stride: int, padding: str, groups: int = 1) -> Callable[..., Any]:
    numbers = ("NWC", "WIO", "NWC")
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride,), padding, dimension_numbers=numbers, feature_group_count=groups
    )


WRITTEN: tuple[tuple[str, Callable[..., Any], tuple[Any, ...], str], ...] = (
    ("add", lambda x, y: x + y, (s(4, 6), s(4, 6)), "([i, j], [i, j])->([i, j]) {i=4, j=6}"),
    ("scalar", lambda x: x * 2, (s(4, 6),), "([i, j], [])->([i, j]) {i=4, j=6}"),
    ("size 1", lambda x: -x, (s(4, 1),), "([i, 1])->([i, 1]) {i=4}"),
    ("dot", lambda x, y: x @ y, (s(4, 6), s(6, 3)), "([i, k], [k, j])->([i, j]) {i=4, j=3, k=6} reduction={k}"),
    (
        "batched dot",
        lambda x, y: jnp.einsum("bij,bkj->bik", x, y, preferred_element_type=F),
        (s(2, 4, 6), s(2, 3, 6)),
        "([i, j, l], [i, k, l])->([i, j, k]) {i=2, j=4, k=3, l=6} reduction={l}",
    ),
    (
        "ragged dot",
        lambda x, w, g: lax.ragged_dot(x, w, g),
        (s(8, 6), s(3, 6, 5), s(3, dtype=INT)),
        "([i, k], [l, k, j], [m])->([i, j]) {i=8, j=5, k=6, l=3, m=3} reduction={k} need_replication={l, m}",
    ),
    (
        "conv",
        conv(1, "SAME"),
        (s(2, 8, 6), s(3, 6, 5)),
        "([i, j, k], [m, k, l])->([i, j, l]) {i=2, j=8, k=6, l=5, m=3} reduction={k} permutation={j}"
        " need_replication={m}",
    ),
    (
        "conv 1x1",
        conv(1, "VALID"),
        (s(2, 8, 6), s(1, 6, 5)),
        "([i, j, k], [1, k, l])->([i, j, l]) {i=2, j=8, k=6, l=5} reduction={k}",
    ),
    (
        "patches",
        conv(2, "VALID"),
        (s(2, 8, 6), s(2, 6, 5)),
        "([i, jk, l], [k, l, m])->([i, j, m]) {i=2, j=4, k=2, l=6, m=5} reduction={l} permutation={j, k}",
    ),
    (
        "conv groups",
        conv(1, "VALID", groups=4),
        (s(2, 8, 8), s(1, 2, 12)),
        "([i, j, kl], [1, l, km])->([i, j, km]) {i=2, j=8, k=4, l=2, m=3} reduction={l}",
    ),
    ("merge", lambda x: x.reshape(32), (s(8, 4),), "([i, j])->([ij]) {i=8, j=4}"),
    ("split", lambda x: x.reshape(4, 2, 1, 4), (s(8, 4),), "([ij, k])->([i, j, 1, k]) {i=4, j=2, k=4}"),
    (
        "odd reshape",
        lambda x: x.reshape(4, 6),
        (s(6, 4),),
        "([ij, mn])->([ik, ln]) {i=2, j=3, k=2, l=3, m=2, n=2} need_replication={j, k, l, m}",
    ),
    ("empty reshape", lambda x: x.reshape(0, 6), (s(3, 0),), "([i, 1])->([1, j]) {i=3, j=6} need_replication={i, j}"),
    ("transpose", lambda x: x.T, (s(4, 6),), "([j, i])->([i, j]) {i=6, j=4}"),
    (
        "broadcast",
        lambda x: lax.broadcast_in_dim(x, (6, 4, 8), (0, 2)),
        (s(6, 1),),
        "([i, 1])->([i, j, k]) {i=6, j=4, k=8}",
    ),
    ("tile", lambda x: lax.tile(x, (3, 1)), (s(4, 6),), "([j, k])->([ij, k]) {i=3, j=4, k=6}"),
    ("iota", lambda: lax.iota(INT, 8), (), "()->([i]) {i=8}"),
    ("pad", lambda x: lax.pad(x, 0.0, [(1, 0, 0)]), (s(8),), "([i], [])->([i]) {i=8} permutation={i}"),
    ("pad shift", lambda x: lax.pad(x, 0.0, [(1, -1, 0)]), (s(8),), "([i], [])->([i]) {i=8} permutation={i}"),
    ("slice", lambda x: x[:, 2:], (s(4, 6),), "([i, j])->([i, j]) {i=4, j=6} permutation={j}"),
    ("rev", lambda x: lax.rev(x, (0,)), (s(4, 6),), "([i, j])->([i, j]) {i=4, j=6} permutation={i}"),
    (
        "concatenate",
        lambda x, y: lax.concatenate((x, y), 1),
        (s(4, 6), s(4, 2)),
        "([i, j], [i, k])->([i, l]) {i=4, j=6, k=2, l=8} need_replication={j, k, l}",
    ),
    (
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)),
        (s(4, 6), s(dtype=INT)),
        "([j, i], [], [])->([k, i]) {i=6, j=4, k=2} need_replication={j, k}",
    ),
    (
        "embedding",
        lambda t, i: t.at[i].get(mode="clip"),
        (s(16, 6), s(4, 3, dtype=INT)),
        "([l, k], [i, j, 1])->([i, j, k]) {i=4, j=3, k=6, l=16} reduction={l}",
    ),
    (
        "scatter-add",
        lambda x, i, u: x.at[i].add(u),
        (s(8, 6), s(3, dtype=INT), s(3, 6)),
        "([k, j], [i, 1], [i, j])->([k, j]) {i=3, j=6, k=8} reduction={i}",
    ),
    (
        "scatter",
        lambda x, i, u: x.at[i].set(u),
        (s(8, 6), s(3, dtype=INT), s(3, 6)),
        "([k, j], [i, 1], [i, j])->([k, j]) {i=3, j=6, k=8} need_replication={i}",
    ),
    ("sum", lambda x: x.sum(1), (s(4, 6),), "([i, j])->([i]) {i=4, j=6} reduction={j}"),
    ("argmax", lambda x: lax.argmax(x, 1, INT), (s(4, 6),), "([i, j])->([i]) {i=4, j=6} need_replication={j}"),
    ("cumsum", lambda x: lax.cumsum(x, 1), (s(4, 6),), "([i, j])->([i, k]) {i=4, j=6, k=6} need_replication={j, k}"),
    (
        "top_k",
        lambda x: lax.top_k(x, 2),
        (s(4, 6),),
        "([i, j])->([i, k], [i, l]) {i=4, j=6, k=2, l=2} need_replication={j, k, l}",
    ),
    (
        "fft",
        lambda x: jnp.fft.rfft(x),
        (s(4, 6),),
        "([i, j])->([i, k]) {i=4, j=6, k=4} need_replication={j, k}",
    ),
    (
        "eigh",
        lambda x: lax.linalg.eigh(x, symmetrize_input=False),
        (s(2, 4, 4),),
        "([i, j, k])->([i, l, m], [i, n]) {i=2, j=4, k=4, l=4, m=4, n=4} need_replication={j, k, l, m, n}",
    ),
    (
        "random bits",
        lambda: jax.vmap(lambda k: jax.random.bits(k, (6,)))(jax.random.split(jax.random.key(0), 4)),
        (),
        "([i])->([i, j]) {i=4, j=6}",
    ),
    (
        "callback",
        lambda x: jax.pure_callback(lambda x: x, s(4), x),
        (s(4),),
        "([i])->([j]) {i=4, j=4} need_replication={i, j}",
    ),
)


@pytest.mark.parametrize(("name", "function", "avals", "text"), WRITTEN, ids=[row[0] for row in WRITTEN])
def test_written_rules(name: str, function: Callable[..., Any], avals: tuple[Any, ...], text: str) -> None:
    assert str(factor_rule(only(function, *avals))) == text


def test_reducers() -> None:
    for function, reducer in ((jnp.sum, "add"), (jnp.prod, "mul"), (jnp.max, "max"), (jnp.min, "min")):
        assert factor_rule(only(function, s(4, 6))).reducers == (reducer, reducer)
    assert factor_rule(only(jnp.all, s(4, dtype=jnp.bool_))).reducers == ("and",)
    assert factor_rule(only(jnp.any, s(4, dtype=jnp.bool_))).reducers == ("or",)
    assert factor_rule(only(lambda x: lax.reduce_xor_p.bind(x, axes=(0,)), s(4, dtype=INT))).reducers == ("",)


def test_refine_cuts_both_shapes() -> None:
    left, right, sizes, common = refine((2, 3, 4), (6, 2, 2))
    assert (left, right) == (((0,), (1,), (2, 3)), ((0, 1), (2,), (3,)))
    assert sizes == (2, 3, 2, 2)
    assert common == (True, True, True, True)
    assert refine((4, 9), (9, 4)) == (((0,), (2,)), ((1,), (3,)), (4, 9, 9, 4), (False,) * 4)


def test_threefry_that_is_not_partitionable_stays_whole() -> None:
    equation = only(lambda: jax.random.bits(jax.random.key(0), (4, 6)), name="random_bits")
    with jax.threefry_partitionable(False):
        assert str(factor_rule(equation)) == "([])->([i, j]) {i=4, j=6} need_replication={i, j}"
    other = only(lambda: jax.random.bits(jax.random.key(0, impl="rbg"), (4,)), name="random_bits")
    assert str(factor_rule(other)) == "([])->([i]) {i=4} need_replication={i}"


# Control flow and calls.


def scan(w: jax.Array, h: jax.Array, xs: jax.Array) -> Any:
    def body(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w) + x
        return h, h.sum(1)

    return lax.scan(body, h, xs)


def test_scan() -> None:
    # Features are carried, so splitting their sum would split a result as well.
    rule = str(factor_rule(only(scan, s(6, 6), s(4, 6), s(5, 4, 6))))
    assert rule == ("([i, i], [j, i], [k, j, i])->([j, i], [l, j]) {i=6, j=4, k=5, l=5} need_replication={i, k, l}")


def test_scan_keeps_partial_sums_of_its_results_only() -> None:
    def stacked(x: jax.Array, y: jax.Array) -> Any:
        return lax.scan(lambda c, x: (c, x @ y), 0.0, x)[1]

    def carried(x: jax.Array, y: jax.Array) -> Any:
        return lax.scan(lambda c, x: (c + x @ y, 0.0), jnp.zeros((3, 5)), x)[0]

    rule = factor_rule(only(stacked, s(2, 3, 4), s(4, 5), name="scan"))
    assert str(rule) == (
        "([], [i, j], [k, l, i])->([m, l, j]) {i=4, j=5, k=2, l=3, m=2} reduction={i} need_replication={k, m}"
    )
    rule = factor_rule(only(carried, s(2, 3, 4), s(4, 5), name="scan"))
    assert not rule.of_kind(FactorKind.REDUCTION)


def test_while() -> None:
    def loop(w: jax.Array, x: jax.Array) -> Any:
        return lax.while_loop(lambda s: jnp.max(s[1]) < 9, lambda s: (s[0] + 1, s[1] @ w), (0, x))

    rule = str(factor_rule(only(loop, s(6, 6), s(4, 6))))
    # The condition reduces over both dimensions of the carry, which is a result as well.
    assert rule == "([i, i], [], [j, i])->([], [j, i]) {i=6, j=4} need_replication={i, j}"

    def fixed(w: jax.Array, x: jax.Array) -> Any:
        return lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 1, s[1] @ w), (0, x))

    rule = str(factor_rule(only(fixed, s(6, 6), s(4, 6))))
    assert rule == "([i, i], [], [j, i])->([], [j, i]) {i=6, j=4} need_replication={i}"


def test_cond() -> None:
    def branch(p: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        return lax.cond(p, lambda x, y: x @ y, lambda x, y: x[:, :3] + 1, x, y)

    # One branch sums over a dimension of x that the other slices.
    rule = str(factor_rule(only(branch, s(dtype=jnp.bool_), s(4, 6), s(6, 3))))
    assert rule == "([], [i, j], [j, k])->([i, k]) {i=4, j=6, k=3} permutation={j, k}"


def test_custom_partitioning_takes_the_users_rule() -> None:
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.cumsum(x, 1) @ y

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        raise NotImplementedError

    scaled.def_partition(partition=partition, sharding_rule="i j, j k -> i k", need_replication_factors=("j",))
    rule = str(factor_rule(only(scaled, s(4, 6), s(6, 3))))
    assert rule == "([i, j], [j, k])->([i, k]) {i=4, j=6, k=3} need_replication={j}"


def test_shard_map_and_kernels_stay_whole() -> None:
    from jax.experimental import pallas as pl

    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    whole = "([i])->([j]) {i=8, j=8} need_replication={i, j}"
    assert str(factor_rule(only(mapped, s(8), name="shard_map"))) == whole

    def kernel(x: Any, o: Any) -> None:
        o[...] = x[...]

    called = pl.pallas_call(kernel, out_shape=s(8), interpret=True)
    assert str(factor_rule(only(called, s(8), name="pallas_call"))) == whole


def test_cudnn_attention() -> None:
    # Made by hand: tracing asks for the library.
    def bind(dropout: float = 0.0) -> Apply:
        q = s(2, 5, 8, 16, dtype=jnp.bfloat16)
        kv = s(2, 7, 4, 16, dtype=jnp.bfloat16)
        none = s(0, dtype=INT)
        operands = [q, kv, kv, s(0, dtype=jnp.bfloat16), *[none] * 6]
        params = {
            "scale": 1.0,
            "seed": 0,
            "dropout_rate": dropout,
            "variadic_args": (False, False),
            "layout": 0,
            "sliding_window_length": None,
        }
        results = (q, s(2, 8, 5))
        values = [Value(aval_of(x.shape, x.dtype)) for x in (*operands, *results)]
        return Apply(
            Primitive("dot_product_attention_fwd_wrapper"),
            tuple(values[:10]),
            tuple(values[10:]),
            params,
            (),
            frozenset(),
            None,
            only(jnp.sin, s(2)).place,
        )

    rule = factor_rule(bind())
    examples, heads = rule.operands[0][0], rule.operands[0][2][:1]
    assert rule.operands[1][0] == rule.results[0][0] == rule.results[1][0] == examples
    assert rule.operands[1][2] == rule.results[0][2][:1] == rule.results[1][1][:1] == heads
    split = {f for f, kind in enumerate(rule.kinds) if kind is FactorKind.PARALLEL}
    assert split == {*examples, *heads}
    assert all(kind is FactorKind.NEED_REPLICATION for kind in factor_rule(bind(dropout=0.1)).kinds)


# Unknown primitives.


def made_up(name: str, lowered: bool = False) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    if lowered:
        mlir.register_lowering(primitive, mlir.lower_fun(lambda x: jnp.sort(x * 2, axis=1), multiple_results=False))
    return primitive


def test_a_made_up_primitive_is_an_error() -> None:
    primitive = made_up("dream")
    with pytest.raises(UnknownPrimitiveError) as error:
        factor_rule(only(lambda x: primitive.bind(x), s(4, 6)))
    message = str(error.value)
    assert "the primitive 'dream' has no factor rule" in message
    assert "test_rules.py" in message
    assert "register_rule('dream')" in message


def test_an_unknown_custom_call_is_an_error() -> None:
    primitive = made_up("foreign")
    mlir.register_lowering(primitive, jax.ffi.ffi_lowering("foreign_target"))
    with pytest.raises(UnknownPrimitiveError, match=r"no rule for stablehlo\.custom_call @foreign_target"):
        factor_rule(only(lambda x: primitive.bind(x), s(4, 6)))


def test_a_primitive_made_of_known_operators_has_their_rule() -> None:
    primitive = made_up("sorted_twice", lowered=True)
    rule = str(factor_rule(only(lambda x: primitive.bind(x), s(4, 6))))
    assert rule == "([i, j])->([i, j]) {i=4, j=6} need_replication={j}"


def test_a_reduction_inside_is_none_of_the_whole() -> None:
    primitive = made_up("centred")
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda x: jnp.exp(x.sum(1, keepdims=True)) + 0 * x[:, :1], multiple_results=False)
    )
    primitive.def_abstract_eval(lambda x: x.update(shape=(x.shape[0], 1)))
    rule = factor_rule(only(lambda x: primitive.bind(x), s(4, 6)))
    assert not rule.of_kind(FactorKind.REDUCTION)
    assert rule.kinds[rule.operands[0][0][0]] is FactorKind.PARALLEL


def test_registering() -> None:
    primitive = made_up("mine")

    @register_rule("mine")
    def rows(equation: Apply) -> FactorRule:
        return FactorBuilder(equation).pointwise(dims=(0,)).build()

    rule = factor_rule(only(lambda x: primitive.bind(x), s(4, 6)))
    assert str(rule) == "([i, j])->([i, k]) {i=4, j=6, k=6} need_replication={j, k}"
    with pytest.raises(ArgumentError, match="'mine' was registered twice"):
        register_rule("mine")(rows)
    register_rule("mine", replace=True)(lambda equation: FactorBuilder(equation).pointwise().build())
    assert str(factor_rule(only(lambda x: primitive.bind(x), s(4, 6)))) == "([i, j])->([i, j]) {i=4, j=6}"
    assert "mine" in registered()


# Composition.


def identity(shape: tuple[int, ...], factors: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> FactorRule:
    count = len(sizes)
    return FactorRule((factors,), (factors,), sizes, (FactorKind.PARALLEL,) * count, ("",) * count)


def composed(shape: tuple[int, ...], *rules: FactorRule) -> str:
    composer = Composer()
    for k in range(len(rules) + 1):
        composer.declare(k, shape)
    for k, rule in enumerate(rules):
        composer.apply(rule, [k], [k + 1])
    return str(composer.rule([0], [len(rules)]))


def test_coarser_factors_are_cut() -> None:
    assert composed((8,), identity((8,), ((0,),), (8,)), identity((8,), ((0, 1),), (2, 4))) == (
        "([ij])->([ij]) {i=2, j=4}"
    )


def test_cuts_that_do_not_meet_need_replication() -> None:
    rule = composed((6,), identity((6,), ((0, 1),), (2, 3)), identity((6,), ((0, 1),), (3, 2)))
    assert "need_replication={i, j, k, l}" in rule


def test_a_factor_twice_in_a_value_needs_replication() -> None:
    assert str(
        factor_rule(only(lambda p, x: lax.cond(p, lambda x: x + x.T, lambda x: x, x), s(dtype=jnp.bool_), s(4, 4)))
    ) == ("([], [i, i])->([i, i]) {i=4} need_replication={i}")
