"""One small use of every primitive that has a factor rule, by hand: what the zoo's programs do not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autoshard.ir import Apply, Graph, from_jaxpr
from autoshard.ir.rules_elementwise import ELEMENTWISE

F, INT, B, C = jnp.float32, jnp.int32, jnp.bool_, jnp.complex64
Example = tuple[str, Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


def s(*shape: int, dtype: Any = F) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def elementwise() -> Iterator[Example]:
    """Each elementwise primitive on operands of one shape."""
    integer = [
        "and",
        "clz",
        "mulhi",
        "not",
        "or",
        "population_count",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "xor",
    ]
    complexes = ["conj", "imag", "real"]
    operands = {"clamp": 3, "complex": 2, "regularized_incomplete_beta": 3, "select_n": 3}
    two = [
        "add",
        "add_any",
        "and",
        "atan2",
        "div",
        "eq",
        "eq_to",
        "ge",
        "gt",
        "igamma",
        "igamma_grad_a",
        "igammac",
        "le",
        "le_to",
        "lt",
        "lt_to",
        "max",
        "min",
        "mul",
        "mulhi",
        "ne",
        "nextafter",
        "or",
        "polygamma",
        "pow",
        "rem",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sub",
        "xor",
        "zeta",
    ]
    params: dict[str, dict[str, Any]] = {
        "convert_element_type": {"new_dtype": np.dtype(jnp.bfloat16), "weak_type": False, "sharding": None},
        "integer_pow": {"y": 3},
        "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 5},
        "conj": {"input_dtype": np.dtype(C)},
    }
    params |= {"round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN}}
    params |= {
        n: {"accuracy": None}
        for n in [
            "cbrt",
            "cos",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log1p",
            "log2",
            "logistic",
            "rsqrt",
            "sin",
            "sqrt",
            "tan",
            "tanh",
        ]
    }
    for name in ELEMENTWISE:
        primitive = getattr(lax, f"{name}_p", None)
        if primitive is None or name == "polynomial":
            continue
        dtype = INT if name in integer else C if name in complexes else F
        shapes = [s(4, 6, dtype=dtype)] * operands.get(name, 2 if name in two else 1)
        if name == "select_n":
            shapes[0] = s(4, 6, dtype=B)
        yield (
            name,
            lambda *args, primitive=primitive, name=name: primitive.bind(*args, **params.get(name, {})),
            tuple(shapes),
        )


GATHER = lax.GatherDimensionNumbers
SCATTER = lax.ScatterDimensionNumbers
NHWC = ("NHWC", "HWIO", "NHWC")


def _solve(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.custom_linear_solve(lambda x: a @ x, b, solve=lambda _, y: y * 2, symmetric=True)


def _vmapped(x: jax.Array, w: jax.Array) -> jax.Array:
    @jax.custom_batching.custom_vmap
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    f.def_vmap(lambda size, split, x, w: (x @ w, True))
    return f(x, w)


def _linear_call(x: jax.Array) -> jax.Array:
    return jax.custom_derivatives.linear_call(lambda r, x: x * r, lambda r, y: y * r, jnp.ones(x.shape, x.dtype), x)


def _composite(x: jax.Array) -> jax.Array:
    return lax.composite(lambda x: jnp.tanh(x), name="my.tanh")(x)


def _ragged(numbers: tuple[Any, ...], ragged: int, groups: tuple[int, ...]) -> Callable[..., Any]:
    dims = lax.RaggedDotDimensionNumbers(numbers, [ragged], list(groups))
    return lambda x, w, g: lax.ragged_dot_general(x, w, g, dims)


EXAMPLES: tuple[Example, ...] = (
    *elementwise(),
    ("scalar operand", lambda x, y: lax.mul_p.bind(x, y), (s(4, 6), s())),
    ("clamp scalars", lambda x: lax.clamp(0.0, x, 1.0), (s(4, 6),)),
    ("scalar predicate", lambda p, x, y: lax.select_n(p, x, y), (s(dtype=B), s(4, 6), s(4, 6))),
    ("bitcast apart", lambda x: lax.bitcast_convert_type(x, jnp.uint8), (s(4, 6),)),
    ("bitcast together", lambda x: lax.bitcast_convert_type(x, jnp.uint32), (s(4, 6, 4, dtype=jnp.uint8),)),
    ("copy", lambda x: lax.copy_p.bind(x), (s(4, 6),)),
    ("barrier", lambda x, y: lax.optimization_barrier((x, y)), (s(4, 6), s(3))),
    ("name", lambda x: checkpoint_name(x, "x"), (s(4, 6),)),
    ("device_put", lambda x, y: jax.device_put((x, y)), (s(4, 6), s(3))),
    # Products and convolutions.
    ("dot", lambda x, y: x @ y, (s(4, 6), s(6, 3))),
    ("dot batch", lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (s(2, 4, 6), s(2, 3, 6))),
    ("dot two sums", lambda x, y: jnp.einsum("bij,bij->b", x, y), (s(2, 4, 6), s(2, 4, 6))),
    ("ragged free", _ragged((((1,), (1,)), ((), ())), 0, (0,)), (s(8, 6), s(3, 6, 5), s(3, dtype=INT))),
    ("ragged sum", _ragged((((0,), (0,)), ((), ())), 0, ()), (s(8, 6), s(8, 5), s(3, dtype=INT))),
    (
        "conv",
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC),
        (s(2, 8, 8, 3), s(3, 3, 3, 4)),
    ),
    (
        "conv 1x1",
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC),
        (s(2, 8, 8, 3), s(1, 1, 3, 4)),
    ),
    (
        "conv 1x1 strided",
        lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=NHWC),
        (s(2, 8, 8, 3), s(1, 1, 3, 4)),
    ),
    (
        "patches",
        lambda x, w: lax.conv_general_dilated(x, w, (4, 4), "VALID", dimension_numbers=NHWC),
        (s(2, 8, 8, 3), s(4, 4, 3, 6)),
    ),
    (
        "conv groups",
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4
        ),
        (s(2, 8, 8), s(3, 2, 12)),
    ),
    (
        "conv batch groups",
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), batch_group_count=2
        ),
        (s(4, 8, 6), s(3, 6, 8)),
    ),
    (
        "conv dilated",
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), [(2, 2)], (2,), (2,), dimension_numbers=("NWC", "WIO", "NWC")
        ),
        (s(2, 8, 6), s(3, 6, 8)),
    ),
    (
        "conv gradients",
        lambda x, w: jax.grad(
            lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=NHWC).sum(), (0, 1)
        )(x, w),
        (s(2, 8, 8, 3), s(3, 3, 3, 4)),
    ),
    # Shapes.
    ("reshape merge", lambda x: x.reshape(32, 3), (s(8, 4, 3),)),
    ("reshape split", lambda x: x.reshape(2, 4, 1, 3), (s(8, 3),)),
    ("reshape odd", lambda x: x.reshape(4, 6), (s(6, 4),)),
    ("reshape coprime", lambda x: x.reshape(9, 4), (s(4, 9),)),
    ("transpose", lambda x: x.transpose(2, 0, 1), (s(2, 3, 4),)),
    ("broadcast", lambda x: lax.broadcast_in_dim(x, (6, 4, 8), (0, 2)), (s(6, 1),)),
    ("broadcast_to", lambda x: jnp.broadcast_to(x, (5, 4, 6)), (s(4, 6),)),
    ("squeeze", lambda x: lax.squeeze(x, (1,)), (s(4, 1, 6),)),
    ("iota", lambda: lax.broadcasted_iota(INT, (4, 6), 1), ()),
    ("concatenate", lambda x, y: lax.concatenate((x, y), 1), (s(4, 6), s(4, 2))),
    ("stack", lambda x, y: jnp.stack((x, y), 1), (s(4, 6), s(4, 6))),
    ("unstack", lambda x: jnp.unstack(x, axis=1), (s(4, 3),)),
    ("split", lambda x: lax.split(x, (2, 4), 1), (s(4, 6),)),
    ("tile", lambda x: jnp.tile(x, (3, 1)), (s(4, 6),)),
    ("pad", lambda x: lax.pad(x, 0.0, [(1, 1, 0), (0, 0, 0)]), (s(4, 6),)),
    ("pad shift", lambda x: lax.pad(x, 0.0, [(-1, 1, 0), (0, 0, 0)]), (s(4, 6),)),
    ("slice", lambda x: lax.slice(x, (0, 1), (4, 5)), (s(4, 6),)),
    ("slice strides", lambda x: lax.slice(x, (0, 0), (4, 6), (1, 2)), (s(4, 6),)),
    ("rev", lambda x: lax.rev(x, (1,)), (s(4, 6),)),
    ("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)), (s(4, 6), s(dtype=INT))),
    ("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), (s(4, 6), s(2, 6), s(dtype=INT))),
    # Gathers and scatters.
    ("embedding", lambda t, i: t[i], (s(16, 6), s(4, 3, dtype=INT))),
    ("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, 1), (s(4, 6), s(4, 3, dtype=INT))),
    ("gather two", lambda x, i, j: x[i, j], (s(6, 8, 5), s(3, dtype=INT), s(3, dtype=INT))),
    ("gather middle", lambda x, i: x[:, i], (s(6, 8, 5), s(3, dtype=INT))),
    ("gather windows", lambda x, i: lax.gather(x, i, GATHER((1, 2), (), (0,)), (2, 8)), (s(6, 8), s(3, 1, dtype=INT))),
    ("gather rows", lambda x, i: lax.gather(x, i, GATHER((1, 2), (), (0,)), (1, 8)), (s(6, 8), s(3, 1, dtype=INT))),
    ("gather batch", lambda x, i: jax.vmap(lambda x, i: x[i])(x, i), (s(4, 6, 5), s(4, 3, dtype=INT))),
    ("scatter set", lambda x, i, u: x.at[i].set(u), (s(8, 6), s(3, dtype=INT), s(3, 6))),
    ("scatter add", lambda x, i, u: x.at[i].add(u), (s(8, 6), s(3, dtype=INT), s(3, 6))),
    ("scatter mul", lambda x, i, u: x.at[i].mul(u), (s(8, 6), s(3, dtype=INT), s(3, 6))),
    ("scatter min", lambda x, i, u: x.at[i].min(u), (s(8, 6), s(3, dtype=INT), s(3, 6))),
    ("scatter max", lambda x, i, u: x.at[i].max(u), (s(8, 6), s(3, dtype=INT), s(3, 6))),
    ("scatter sub", lambda x, i, u: x.at[i].subtract(u), (s(8, 6), s(3, dtype=INT), s(3, 6))),
    (
        "scatter batch",
        lambda x, i, u: jax.vmap(lambda x, i, u: x.at[i].add(u))(x, i, u),
        (s(4, 8), s(4, 3, dtype=INT), s(4, 3)),
    ),
    ("scatter static", lambda x, u: x.at[2:5].set(u), (s(8, 6), s(3, 6))),
    (
        "scatter windows",
        lambda x, i, u: lax.scatter_add(x, i, u, SCATTER((1, 2), (), (0,))),
        (s(6, 8), s(3, 1, dtype=INT), s(3, 2, 8)),
    ),
    # Reductions and what needs a whole axis.
    ("sum", lambda x: x.sum(1), (s(4, 6),)),
    ("max", lambda x: x.max(0), (s(4, 6),)),
    ("min", lambda x: x.min(), (s(4, 6),)),
    ("prod", lambda x: x.prod(1), (s(4, 6),)),
    ("all", lambda x: x.all(1), (s(4, 6, dtype=B),)),
    ("any", lambda x: x.any(1), (s(4, 6, dtype=B),)),
    ("xor", lambda x: lax.reduce_xor_p.bind(x, axes=(1,)), (s(4, 6, dtype=INT),)),
    ("reduce", lambda x: lax.reduce(x, 0.0, lambda a, b: a * b + a + b, (0,)), (s(4, 6),)),
    ("argmax", lambda x: lax.argmax(x, 1, INT), (s(4, 6),)),
    ("argmin", lambda x: lax.argmin(x, 0, INT), (s(4, 6),)),
    ("cumsum", lambda x: lax.cumsum(x, 1), (s(4, 6),)),
    ("cumprod", lambda x: lax.cumprod(x, 1), (s(4, 6),)),
    ("cummax", lambda x: lax.cummax(x, 1), (s(4, 6),)),
    ("cummin", lambda x: lax.cummin(x, 1, reverse=True), (s(4, 6),)),
    ("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (s(4, 6),)),
    ("sort", lambda x: lax.sort(x, dimension=0), (s(4, 6),)),
    ("sort two", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (s(4, 6), s(4, 6))),
    ("top_k", lambda x: lax.top_k(x, 2), (s(4, 6),)),
    ("approx_top_k", lambda x: lax.approx_max_k(x, 2), (s(4, 6),)),
    ("fft", lambda x: jnp.fft.rfft(x), (s(4, 6),)),
    ("reduce_window", lambda x: lax.reduce_window(x, 0.0, lambda a, b: a * b + a, (1, 2), (1, 2), "VALID"), (s(4, 6),)),
    ("sum window", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"), (s(4, 6),)),
    ("max window", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), (s(4, 6),)),
    ("min window", lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID"), (s(4, 6),)),
    (
        "max window gradient",
        lambda x: jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum())(x),
        (s(4, 6),),
    ),
    (
        "max window tangent",
        lambda x: jax.jvp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), (x,), (x,)),
        (s(4, 6),),
    ),
    # Linear algebra.
    ("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (s(2, 4, 4),)),
    ("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), (s(2, 4, 4),)),
    ("eig", lambda x: lax.linalg.eig(x), (s(2, 4, 4),)),
    ("schur", lambda x: lax.linalg.schur(x), (s(2, 4, 4),)),
    ("hessenberg", lambda x: lax.linalg.hessenberg(x), (s(2, 4, 4),)),
    ("tridiagonal", lambda x: lax.linalg.tridiagonal(x), (s(2, 4, 4),)),
    ("lu", lambda x: lax.linalg.lu(x), (s(2, 4, 4),)),
    ("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (s(2, 6, 4),)),
    ("householder", lambda x, t: lax.linalg.householder_product(x, t), (s(2, 6, 4), s(2, 4))),
    ("svd", lambda x: lax.linalg.svd(x, full_matrices=False), (s(2, 6, 4),)),
    (
        "triangular_solve",
        lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True, lower=True),
        (s(2, 4, 4), s(2, 4, 3)),
    ),
    ("tridiagonal_solve", lambda x, y: lax.linalg.tridiagonal_solve(x, x, x, y), (s(2, 4), s(2, 4, 3))),
    ("symmetric_product", lambda x, c: lax.linalg.symmetric_product(x, c), (s(4, 6), s(4, 4))),
    ("pivots", lambda x: lax.linalg.lu_pivots_to_permutation(x, 4), (s(2, 4, dtype=INT),)),
    # Random bits.
    ("normal", lambda: jax.random.normal(jax.random.key(0), (4, 6)), ()),
    ("split keys", lambda: jax.vmap(lambda k: jax.random.bits(k, (6,)))(jax.random.split(jax.random.key(0), 4)), ()),
    (
        "fold_in",
        lambda i: jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(i)),
        (s(4, dtype=INT),),
    ),
    ("raw keys", lambda k: jax.random.bits(jax.random.wrap_key_data(k), (6,)), (s(2, dtype=jnp.uint32),)),
    ("clone", lambda: jax.random.key_data(jax.random.clone(jax.random.key(0))), ()),
    ("threefry", lambda k, x: lax_threefry(k, x), (s(2, dtype=jnp.uint32), s(4, 6, dtype=jnp.uint32))),
    ("generator", lambda k: lax.rng_bit_generator(k, (4, 6)), (s(4, dtype=jnp.uint32),)),
    ("uniform", lambda: lax.rng_uniform(0.0, 1.0, (4, 6)), ()),
    ("gamma", lambda a: jax.random.gamma(jax.random.key(0), a), (s(4, 6),)),
    # Calls.
    ("custom_linear_solve", _solve, (s(4, 4), s(4))),
    ("custom_vmap", _vmapped, (s(4, 6), s(6, 3))),
    ("linear_call", _linear_call, (s(4, 6),)),
    ("composite", _composite, (s(4, 6),)),
)


def lax_threefry(key: jax.Array, x: jax.Array) -> Any:
    from jax.extend.random import threefry2x32_p

    return threefry2x32_p.bind(jnp.broadcast_to(key[0], x.shape), jnp.broadcast_to(key[1], x.shape), x, x)


def graph_of(function: Callable[..., Any], avals: tuple[Any, ...]) -> Graph:
    return from_jaxpr(jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*avals))


def equations_of(graph: Graph) -> Iterator[Apply]:
    """Every equation, bodies included."""
    for equation, _ in graph.walk():
        if isinstance(equation, Apply):
            yield equation


def only(function: Callable[..., Any], *avals: Any, name: str | None = None) -> Apply:
    """The last equation of a function, or the last of that name; bodies are not searched."""
    equations = graph_of(function, avals).equations
    return [e for e in equations if isinstance(e, Apply) and name in (None, e.name)][-1]


def signature(equation: Apply) -> str:
    """What a rule depends on, as text."""
    avals = [str(atom.aval) for atom in (*equation.inputs, *equation.outputs)]
    return f"{equation.name} {sorted((k, str(v)) for k, v in equation.params.items())} {avals}"
