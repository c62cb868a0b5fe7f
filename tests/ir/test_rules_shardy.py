"""Hand-written factor rules against Shardy's own: by example, by random shapes, and over every program of the zoo."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.ir import Apply, FactorKind, Graph, factor_rule, from_jaxpr
from autoshard.ir.compose import Composer
from autoshard.ir.rule_builder import shape_of
from autoshard.ir.rule_compare import ELSEWHERE, LOOSER, STRICTER, Order, compare, expected
from autoshard.ir.rule_registry import registered, words
from autoshard.ir.rules_other import OPAQUE
from autoshard.ir.shardy import shardy_rule
from tests.zoo import PROGRAMS, Program

from .rule_examples import EXAMPLES, INT, Example, F, equations_of, graph_of, only, s, signature

pytestmark = pytest.mark.implicit_promotion

SEEN: dict[str, list[str]] = {}
"""Differences by signature, so that equations that programs share are lowered once."""


def differences(equation: Apply) -> list[str]:
    """Where our rule differs from Shardy's without a reason given."""
    key = signature(equation)
    if key not in SEEN:
        mine = factor_rule(equation)
        if equation.graphs or equation.name in OPAQUE:
            return []
        other = shardy_rule(equation, strict=False)
        shapes = [shape_of(atom.aval) for atom in (*equation.inputs, *equation.outputs)]
        found = compare(mine, other, shapes)
        SEEN[key] = [
            f"{equation.name}: {d}\n  ours   {mine}\n  Shardy {other}" for d in found if not expected(equation.name, d)
        ]
    return SEEN[key]


def agree(graph: Graph) -> None:
    found = [text for equation in equations_of(graph) for text in differences(equation)]
    assert not found, "\n".join(dict.fromkeys(found))


@pytest.mark.parametrize("example", EXAMPLES, ids=[example[0] for example in EXAMPLES])
def test_examples(example: Example) -> None:
    agree(graph_of(*example[1:]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_programs(program: Program) -> None:
    """Building and stepping are traced together, so nothing is compiled or run."""

    def whole(build: Callable[[], Any]) -> list[jax.Array]:
        case = build()
        args, kwargs = case.fresh()
        out = case.step(*args, **kwargs)
        return [x for x in jax.tree.leaves(case.observe(args, kwargs, out)) if isinstance(x, jax.Array)]

    def build() -> Any:
        return program.build(F)

    try:
        closed = jax.make_jaxpr(lambda: whole(build))()
    except jax.errors.TracerArrayConversionError:
        # Some build their state with numpy: build first, then trace the step in the arrays.
        case = build()
        leaves, tree = jax.tree.flatten(case.fresh())
        arrays = [k for k, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def step(values: list[Any]) -> list[jax.Array]:
            mixed = [values[arrays.index(k)] if k in arrays else leaf for k, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(tree, mixed)
            return [x for x in jax.tree.leaves(case.step(*args, **kwargs)) if isinstance(x, jax.Array)]

        closed = jax.make_jaxpr(step)([leaves[k] for k in arrays])
    agree(from_jaxpr(closed))


NEVER_TRACED = words(
    # Not in this version of jax, made by lowering only, of manual regions, or of libraries that are not installed.
    "add_any bitcast call call_exported check copy_p core_map create_token cudnn_fusion custom_lin dce_sink "
    "after_all dim_as_value dimension_size inspect_sharding platform_index shape_assertion unreachable "
    "dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fwd "
    "dot_product_attention_fwd_wrapper ffi_call mosaic_gpu_p tpu_custom_call triton_kernel_call "
    "mesh_cast pcast pin preduced pvary reduced_vary_cast reduced_vary_cast_p relayout reshard unpin "
    "vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint "
    "broadcast_to cholesky_update empty empty2 expand_dims from_edtype geqp3 geqrf iota_2x32_shape layout_constraint "
    "log2 mulhi one_minus_square ormqr philox2x32 philox4x32 polynomial ragged_dot reciprocal remat_opt scaled_matmul "
    "scaled_matmul_wrapper scatter_add "
    "scatter_max scatter_min scatter_mul select_and_scatter stop_gradient threefry4x32 tie to_edtype "
    "xla_metadata_call xla_metadata_value"
)
TESTED_ELSEWHERE = words(
    # In test_rules.py, or in the zoo.
    "cond custom_partitioning debug_callback debug_print io_callback mine pallas_call pure_callback scan shard_map "
    "sharding_constraint while"
)


def test_every_rule_has_an_example() -> None:
    names = {equation.name for _, function, avals in EXAMPLES for equation in equations_of(graph_of(function, avals))}
    assert registered() - names - {*NEVER_TRACED, *TESTED_ELSEWHERE} == set()


def test_tables_name_rules_that_exist() -> None:
    assert (set(STRICTER) | set(LOOSER) | set(ELSEWHERE)) <= registered()


# Random shapes.

quick = settings(max_examples=25, deadline=None, derandomize=True)
size = st.sampled_from((1, 2, 3, 4, 6))
shapes = st.lists(size, min_size=1, max_size=4)


def check(function: Callable[..., Any], *avals: Any) -> None:
    agree(graph_of(function, avals))


@quick
@given(
    st.lists(size, max_size=2),
    st.lists(size, max_size=2),
    st.lists(size, max_size=2),
    st.lists(size, max_size=2),
    st.randoms(),
)
def test_random_products(batch: list[int], sums: list[int], left: list[int], right: list[int], random: Any) -> None:
    letters = "abcdefgh"
    dims = [letters[2 * k : 2 * k + len(part)] for k, part in enumerate((batch, sums, left, right))]
    of = dict(zip("".join(dims), (*batch, *sums, *left, *right), strict=True))
    x, y = list(dims[0] + dims[1] + dims[2]), list(dims[0] + dims[1] + dims[3])
    random.shuffle(x)
    random.shuffle(y)
    numbers: Any = tuple(tuple(tuple(z.index(d) for d in part) for z in (x, y)) for part in (dims[1], dims[0]))
    check(lambda a, b: lax.dot_general(a, b, numbers), s(*(of[d] for d in x)), s(*(of[d] for d in y)))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of equal size: primes in one order, grouped twice; or in two orders."""
    primes: list[int] = list(draw(st.lists(st.sampled_from((2, 2, 3, 5)), min_size=1, max_size=5)))

    def grouped(items: list[int]) -> list[int]:
        shape: list[int] = []
        for prime in items:
            if shape and draw(st.booleans()):
                shape[-1] *= prime
            else:
                shape.append(prime)
        for _ in range(draw(st.integers(0, 1))):
            shape.insert(draw(st.integers(0, len(shape))), 1)
        return shape

    return grouped(primes), grouped(draw(st.permutations(primes)) if draw(st.booleans()) else primes)


@settings(quick, max_examples=60)
@given(reshapes())
def test_random_reshapes(pair: tuple[list[int], list[int]]) -> None:
    before, after = pair
    assert math.prod(before) == math.prod(after)
    if before != after:
        check(lambda x: lax.reshape(x, after), s(*before))


@quick
@given(shapes, st.data())
def test_random_transposes_and_broadcasts(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    check(lambda x: lax.transpose(x, order), s(*shape))
    rank = len(shape) + data.draw(st.integers(0, 2))
    places = sorted(data.draw(st.permutations(range(rank)))[: len(shape)])
    target = [data.draw(size) for _ in range(rank)]
    for place, n in zip(places, shape, strict=True):
        target[place] = n if n > 1 else target[place]
    check(lambda x: lax.broadcast_in_dim(x, target, places), s(*shape))


@quick
@given(shapes, st.data())
def test_random_reductions(shape: list[int], data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    for reduce in (jnp.sum, jnp.max):
        check(lambda x, reduce=reduce: reduce(x, axis=tuple(axes)), s(*shape))
    axis = data.draw(st.integers(0, len(shape) - 1))
    check(lambda x: (lax.cumsum(x, axis), lax.sort(x, dimension=axis), lax.argmax(x, axis, INT)), s(*shape))


@quick
@given(shapes, st.data())
def test_random_pads_slices_and_concatenations(shape: list[int], data: st.DataObject) -> None:
    edge = st.integers(0, 2)
    padding = [(data.draw(edge), data.draw(edge), data.draw(st.integers(0, 1))) for _ in shape]
    check(lambda x: lax.pad(x, 0.0, padding), s(*shape))
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    stops = [data.draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)]
    check(lambda x: lax.slice(x, starts, stops), s(*shape))
    taken = [b - a for a, b in zip(starts, stops, strict=True)]
    zero = jnp.int32(0)
    check(lambda x: lax.dynamic_slice(x, [zero] * len(shape), taken), s(*shape))
    check(lambda x, u: lax.dynamic_update_slice(x, u, [zero] * len(shape)), s(*shape), s(*taken))
    axis = data.draw(st.integers(0, len(shape) - 1))
    other = [*shape]
    other[axis] = data.draw(size)
    check(lambda x, y: lax.concatenate((x, y), axis), s(*shape), s(*other))


@st.composite
def gathers(draw: st.DrawFn) -> tuple[list[int], list[int], lax.GatherDimensionNumbers, list[int]]:
    """An operand's shape, the indices' shape, dimension numbers and slice sizes."""
    operand: list[int] = list(draw(st.lists(st.sampled_from((2, 3, 4, 6)), min_size=1, max_size=4)))
    rank = len(operand)
    batch_count = draw(st.integers(0, min(1, rank - 1)))
    order = draw(st.permutations(range(rank)))
    batch, rest = sorted(order[:batch_count]), sorted(order[batch_count:])
    indexed = sorted(draw(st.lists(st.sampled_from(rest), min_size=1, unique=True)))
    collapsed = [d for d in indexed if draw(st.booleans())]
    free = draw(st.lists(st.sampled_from((2, 3)), max_size=2))
    slices = [
        1 if d in batch or d in collapsed else draw(st.integers(1, n)) if d in indexed else n
        for d, n in enumerate(operand)
    ]
    indices = [*(operand[d] for d in batch), *free, len(indexed)]
    windows = rank - len(batch) - len(collapsed)
    total = len(indices) - 1 + windows
    offsets = sorted(draw(st.permutations(range(total)))[:windows])
    numbers = lax.GatherDimensionNumbers(
        tuple(offsets), tuple(collapsed), tuple(indexed), tuple(batch), tuple(range(len(batch)))
    )
    return operand, indices, numbers, slices


@settings(quick, max_examples=50)
@given(gathers())
def test_random_gathers_and_scatters(
    case: tuple[list[int], list[int], lax.GatherDimensionNumbers, list[int]],
) -> None:
    operand, indices, numbers, slices = case
    start = s(*indices, dtype=INT)

    def gather(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.gather(x, i, numbers, slices, mode="clip")

    check(gather, s(*operand), start)
    updates = jax.eval_shape(gather, s(*operand), start)
    scattered = lax.ScatterDimensionNumbers(
        numbers.offset_dims,
        numbers.collapsed_slice_dims,
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    for scatter in (lax.scatter, lax.scatter_add, lax.scatter_max):
        check(lambda x, i, u, scatter=scatter: scatter(x, i, u, scattered, mode="clip"), s(*operand), start, updates)


@settings(quick, max_examples=40)
@given(st.data())
def test_random_convolutions(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from((1, 1, 2)))
    by_features = data.draw(st.booleans())
    window, stride = data.draw(st.sampled_from((1, 2, 3))), data.draw(st.sampled_from((1, 2)))
    padding = data.draw(st.sampled_from(("SAME", "VALID")))
    space = data.draw(st.sampled_from((4, 6, 8)))
    per_feature, out = 2 * data.draw(st.integers(1, 2)), 2 * data.draw(st.integers(1, 3))
    lhs = s(4, space, per_feature * (groups if by_features else 1))
    layout = data.draw(st.sampled_from((("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"))))
    order = (0, 2, 1) if layout[0] == "NCW" else (0, 1, 2)
    rhs = (window, per_feature, out * groups)
    rhs_order = (2, 1, 0) if layout[1] == "OIW" else (0, 1, 2)
    check(
        lambda x, w: lax.conv_general_dilated(
            x,
            w,
            (stride,),
            padding,
            dimension_numbers=layout,
            feature_group_count=groups if by_features else 1,
            batch_group_count=1 if by_features else groups,
        ),
        s(*(lhs.shape[d] for d in order)),
        s(*(rhs[d] for d in rhs_order)),
    )


# The comparison itself, and Shardy as a fallback.


def test_compare_names_what_differs() -> None:
    equation = only(lambda x: lax.rev(x, (1,)), s(4, 6))
    plain = only(lambda x: -x, s(4, 6))
    shapes = [(4, 6), (4, 6)]
    (operand, result) = compare(factor_rule(equation), factor_rule(plain), shapes)
    assert (operand.order, operand.place) == (Order.STRICTER, "operand 0, dimension 1")
    assert str(result) == ("result 0, dimension 1: 6 permutation, Shardy 6 parallel at [(0, 1), (1, 1)] (stricter)")
    assert [d.order for d in compare(factor_rule(plain), factor_rule(equation), shapes)] == [Order.LOOSER] * 2
    summed = only(lambda x, y: x @ y, s(4, 6), s(6, 4))
    other = only(lambda x, y: x + y.T, s(4, 6), s(6, 4))
    assert compare(factor_rule(summed), factor_rule(summed), [(4, 6), (6, 4), (4, 4)]) == ()
    assert other.name == "add"


def test_merged_factors_are_equal_to_one() -> None:
    equation = only(lambda x: -x, s(8))
    composer = Composer()
    for k in range(3):
        composer.declare(k, (8,))
    composer.apply(factor_rule(equation), [0], [1])
    composer.apply(factor_rule(only(lambda x: x.reshape(2, 4), s(8))), [1], [composer_shape(composer)])
    composer.apply(factor_rule(equation), [1], [2])
    rule = composer.rule([0], [2])
    assert str(rule) == "([ij])->([ij]) {i=2, j=4}"
    assert compare(rule, factor_rule(equation), [(8,), (8,)]) == ()


def composer_shape(composer: Composer) -> str:
    composer.declare("reshaped", (2, 4))
    return "reshaped"


def test_shardy_reads_every_operator_of_an_equation() -> None:
    rule = shardy_rule(only(lambda: jax.random.bits(jax.random.key(0), (4, 6)), name="random_bits"))
    assert str(rule) == "([])->([i, j]) {i=4, j=6}"
    assert shardy_rule(only(lambda x, y: x @ y, s(4, 6), s(6, 3))).kinds.count(FactorKind.REDUCTION) == 1


@pytest.mark.parametrize(
    ("function", "shapes", "specs", "result"),
    [
        (lambda x: x.reshape(4, 6), [(6, 4)], [("a",)], ("a",)),
        (lambda x: x.reshape(24, 6), [(36, 4)], [("a",)], ("a",)),
        (
            lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
            [(2, 8, 6), (1, 6, 4)],
            [(None, "b"), ()],
            (None, "b"),
        ),
    ],
)
def test_what_is_looser_needs_no_collective(function: Any, shapes: Any, specs: Any, result: Any) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    placed = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    jitted = jax.jit(function, in_shardings=placed, out_shardings=NamedSharding(mesh, PartitionSpec(*result)))
    text = str(jitted.lower(*(s(*shape) for shape in shapes)).compile().as_text())
    assert not re.search(r"all-(reduce|gather|to-all)|collective-permute|reduce-scatter", text)
