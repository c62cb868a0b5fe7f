"""The small programs whose times say what a device does: one operator at one size, several times over.

Each repeat has operands of its own, so that nothing is computed once for all, and together they are larger than a
core's own cache: in a train step a kernel's operands come from farther away too. Products share their right operand, as
a layer's weights stay near; what a product costs when it does not is counted as bytes. Streams write over their first
operand: memory fresh from the system costs more than the stream, and a step that owns its state does not ask for any.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import jax
import jax.numpy as jnp

from autoshard.costmodel import aligned

Rate = Literal["flops", "cold", "transcendentals", "bytes", "kernels", "calls"]

WORKING_SET = 3 * 2**20
"""Bytes all repeats touch together: beyond a core's own cache (1 to 2 MiB), within the one that cores share."""

WORK_FLOPS = 30e6
"""Operations of all repeats together: a third of a millisecond of a core, many times what a call costs."""

MOST_REPEATS = 24

FRESH_BYTES = 48 * 2**20
"""An array larger than what a C library keeps for itself (glibc: 32 MiB, DEFAULT_MMAP_THRESHOLD_MAX)."""


@final
@dataclass(frozen=True, slots=True)
class Kernel:
    """One thing to measure.

    Attributes:
      operator: class of `DeviceSpec.efficiency`, with the dtype where it matters; "launch", "call" for overheads.
      size: where on the class's curve.
      rate: what `work` counts; "cold": operations of a product whose right operand is far away.
      work: of one repeat.
      body: one repeat.
      operands: (shape, dtype) of one repeat's operands; integers count from 0 to below `rows`.
      repeats: how often the body is in the program.
      rows: of a table that integers point into.
      shared: whether all repeats have the same last operand.
      replaces: whether the result takes the place of the first operand.
      beside: key of the kernel that is part of this one, and whose time is taken off.
    """

    operator: str
    size: float
    rate: Rate
    work: float
    body: Callable[..., Any]
    operands: tuple[tuple[tuple[int, ...], str], ...]
    repeats: int
    rows: int = 1
    shared: bool = False
    replaces: bool = False
    beside: str = ""

    @property
    def key(self) -> str:
        """Name in the record."""
        return f"{self.operator}@{self.size:g}"


def kernels(quick: bool, rich: bool = True) -> list[Kernel]:
    """All that is measured of a device, the most telling first.

    Args:
      quick: few sizes and operators.
      rich: half and double precision too.
    """
    found = [*_overheads(), *_products(quick), *_streams(quick), *_functions(quick)]
    if not quick:
        found += [*_convolutions(), *_indexed()]
    if rich and not quick:
        found += [_product("matmul.bf16", 256, 256, 256, "bfloat16"), _product("matmul.f64", 256, 256, 256, "float64")]
    doubles = jax.dtypes.canonicalize_dtype("float64") == jnp.dtype("float64")
    return [k for k in found if doubles or "float64" not in {dtype for _, dtype in k.operands}]


def _repeats(nbytes: float, flops: float = 0.0) -> int:
    """So many that either the working set or the work is large enough."""
    enough = min(WORKING_SET / max(nbytes, 1.0), WORK_FLOPS / flops if flops else math.inf)
    return max(2, min(MOST_REPEATS, math.ceil(enough)))


def _overheads() -> Iterator[Kernel]:
    def chain(x: Any, w: Any) -> Any:
        for _ in range(32):  # a product and a function: two kernels, which do not fuse
            x = jnp.tanh(x @ w)
        return x

    yield Kernel("call", 1, "calls", 1, lambda x, w: x @ w, (((16, 16), "float32"), ((16, 16), "float32")), 1)
    yield Kernel("launch", 1, "kernels", 64, chain, (((8, 8), "float32"), ((8, 8), "float32")), 4)


def _product(operator: str, m: int, k: int, n: int, dtype: str = "float32") -> Kernel:
    flops = 2 * m * k * n
    repeats = max(2, min(MOST_REPEATS, math.ceil(WORK_FLOPS / flops)))
    operands = ((m, k), dtype), ((k, n), dtype)
    size = min(m, k, n) if operator.startswith("matmul_narrow") else flops
    return Kernel(operator, size, "flops", flops, lambda a, b: a @ b, operands, repeats, shared=True)


def _products(quick: bool) -> Iterator[Kernel]:
    for size in (32, 128, 512) if quick else (16, 32, 48, 64, 128, 256, 512, 1024):
        yield _product("matmul.f32", size, size, size)
    if quick:
        return
    for least in (1, 4, 8, 16, 32, 64):
        yield _product("matmul_narrow.f32", least, 384, 384)
    for width in (128, 256, 512, 1024, 2048):
        flops = 2 * 64 * width * width
        operands = ((64, width), "float32"), ((width, width), "float32")
        yield Kernel(
            "matmul_operands", 4 * width * width, "cold", flops, lambda a, b: a @ b, operands, 4 if width > 256 else 8
        )
    for rows, width, wider in ((64, 64, 128), (128, 128, 512), (256, 256, 1024), (256, 256, 4000)):

        def weights(x: Any, g: Any) -> Any:
            kernel = jnp.zeros((x.shape[-1], g.shape[-1]))
            return jax.linear_transpose(lambda w: x @ w, kernel)(g)[0]

        flops = 2 * 4 * rows * width * wider
        shapes = ((4, rows, width), "float32"), ((4, rows, wider), "float32")
        yield Kernel("matmul_weights.f32", flops, "flops", flops, weights, shapes, _repeats(1e6, flops))
    for rows, width in ((64, 16), (128, 32), (128, 64), (256, 128)):

        def scores(q: Any, k: Any) -> Any:
            return jnp.einsum("bthd,bshd->bhts", q, k)

        flops = 2 * 4 * 4 * rows * rows * width
        shapes = ((4, rows, 4, width), "float32"), ((4, rows, 4, width), "float32")
        nbytes = 64 * rows * (2 * width + rows)
        yield Kernel("matmul_batched.f32", width, "flops", flops, scores, shapes, _repeats(nbytes, flops))


def _stream(operator: str, elements: int, passes: int, body: Callable[..., Any], count: int = 1) -> Kernel:
    """Over rows of 256 floats; `passes` arrays are read or written by a repeat."""
    shape = (max(elements // 256, 1), 256), "float32"
    nbytes = 4 * elements * passes
    replaces = operator == "elementwise"
    repeats = max(_repeats(nbytes), 4 if 2**20 <= elements < 2**24 else 2)  # as many such arrays as an optimizer has
    return Kernel(operator, 4 * elements, "bytes", nbytes, body, (shape,) * count, repeats, replaces=replaces)


def _streams(quick: bool) -> Iterator[Kernel]:
    sizes = [2**p for p in ((16, 21) if quick else (12, 14, 16, 18, 20, 22, 24))]
    for elements in sizes:
        yield _stream("elementwise", elements, 3, lambda a, b: a * b + a, 2)
    for elements in sizes[:1] if quick else sizes[1:-1:2]:
        yield _stream("reduce", elements, 1, lambda a: a.sum(1))
        yield _stream("reduce_major", elements, 1, lambda a: a.sum(0))
        if not quick:
            yield _stream("cumulative", elements, 2, lambda a: jnp.cumsum(a, 0))

    # Of a product of two arrays, as in a norm's gradient; bytes are those of what goes into the sum.
    for width in (64,) if quick else (16, 32, 64, 256):
        for name, size in (("reduce_fused", 4 * 2**18 // width), ("reduce_major_fused", 4 * width)):
            axis = 1 if name == "reduce_fused" else 0

            def fused(a: Any, b: Any, axis: int = axis) -> Any:
                return ((a - b[:1, :1, :1]) * b).sum((0, 1, 2) if axis == 0 else 3)

            operands = (((8, 2**10 // width, 32, width), "float32"),) * 2
            yield Kernel(name, size, "bytes", 2**20, fused, operands, 1)

    def fresh(a: Any) -> Any:
        return jnp.zeros((FRESH_BYTES // 2**14, 2**12)) + a

    yield Kernel("fresh", FRESH_BYTES, "bytes", FRESH_BYTES, fresh, (((1, 4096), "float32"),), 1)
    for rows, columns in ((512, 512),) if quick else ((512, 128), (512, 512), (1024, 1024), (1024, 1000), (1024, 4000)):
        yield from _across(rows, columns)


def _across(rows: int, columns: int) -> Iterator[Kernel]:
    """A transposed copy, and what makes its operands.

    Made in the program, the operands lie in one block of memory; as arguments of their own, with rows a multiple of
    512 floats apart, they are copied in a third of the time.
    """

    def made(x: Any, y: Any, z: Any, w: Any) -> Any:
        return x @ w, y @ w, z @ w

    def across(*operands: Any) -> Any:
        # An activation's gradient (GELU's), of which a weight's gradient takes a transposed copy.
        a, b, c = made(*operands)
        inner = b * c * 0.5 * (1.0 - a)
        inner = inner + inner * a
        outer = b * ((a + 1.0) * 0.5) + inner * 0.8 + inner * 0.04 * (c * c * 3.0)
        return outer.T + 0.0

    nbytes = 4 * rows * columns
    operands = (*(((rows, 16), "float32"),) * 3, ((16, columns), "float32"))
    name = "transpose_aligned" if aligned(4 * columns) else "transpose"
    # One alone: of several the compiler changes the layout first.
    base = Kernel(f"{name}.operands", nbytes, "calls", 1, made, operands, 1)
    yield base
    yield Kernel(name, nbytes, "bytes", 2 * 3 * nbytes, across, operands, 1, beside=base.key)


def _functions(quick: bool) -> Iterator[Kernel]:
    functions: dict[str, Callable[[Any], Any]] = {"exp": jnp.exp, "tanh": jnp.tanh, "rsqrt": jax.lax.rsqrt}
    if not quick:
        functions |= {
            "log": jnp.log,
            "logistic": jax.nn.sigmoid,
            "sqrt": jnp.sqrt,
            "sin": jnp.sin,
            "erf": jax.lax.erf,
            "pow": lambda x: jnp.abs(x) ** jnp.float32(2.3),
        }
    elements, square = 2**16, (((256, 256), "float32"),)
    for name, body in functions.items():

        def part(x: Any, y: Any, function: Callable[[Any], Any] = body) -> Any:
            # In a loop with others, as in a step: rsqrt alone is not vectorised, and takes 7 times as long.
            return x * 0.5 + function(y + 0.25) * 0.5

        yield Kernel(name, elements, "transcendentals", elements, part, square * 2, 8, replaces=True)

    def polynomial(x: Any) -> Any:
        y = x
        for _ in range(16):
            y = y * x + x
        return y

    yield Kernel("vector", 32 * elements, "flops", 32 * elements, polynomial, square, 8, replaces=True)

    def draw(x: Any) -> Any:
        return jax.random.bits(jax.random.wrap_key_data(x[0, :2]), (256, 256))

    # 60 operations a word: RANDOM_FLOPS of stream_rules.py.
    yield Kernel("random", 60 * elements, "flops", 60 * elements, draw, (((1, 2), "uint32"),), 4)
    if quick:
        return
    comparisons = 8 * 9 / 2 * elements  # Batcher's network over rows of 256, as stream_rules.py counts
    yield Kernel("sort", comparisons, "flops", comparisons, lambda x: jnp.sort(x, 1), (((256, 256), "float32"),), 2)


def _convolutions() -> Iterator[Kernel]:
    def conv(x: Any, w: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    def weights(x: Any, g: Any) -> Any:
        kernel = jnp.zeros((3, 3, x.shape[-1], g.shape[-1]))
        return jax.linear_transpose(lambda w: conv(x, w), kernel)(g)[0]

    for channels in (8, 32, 64):
        flops = 2 * 8 * 16 * 16 * channels * channels * 9 * (45 / 48) ** 2
        image = (8, 16, 16, channels), "float32"
        kernel = (3, 3, channels, channels), "float32"
        yield Kernel("conv.f32", channels, "flops", flops, conv, (image, kernel), _repeats(2e6, flops))
        yield Kernel("conv_weights.f32", channels, "flops", flops, weights, (image, image), _repeats(2e6, flops))


def _indexed() -> Iterator[Kernel]:
    for rows in (512, 4096):
        table, taken = 4 * 8192 * 64, 4 * rows * 64
        index = (rows,), "int32"
        operands = ((8192, 64), "float32"), index
        yield Kernel("gather", taken, "bytes", 2 * taken, lambda t, i: t[i], operands, 4, 8192)

        def add(u: Any, i: Any) -> Any:
            return jnp.zeros((8192, 64)).at[i].add(u)

        # What is touched is read, added to and written; the zeros are written first.
        nbytes = 3 * taken
        operands = ((rows, 64), "float32"), index
        yield Kernel("scatter", taken, "bytes", nbytes + table / 4, add, operands, 4, 8192)


def operands_of(kernel: Kernel, seed: int = 0) -> list[Any]:
    """Arrays for all repeats, one after the other."""
    keys = jax.random.split(jax.random.key(seed), kernel.repeats * len(kernel.operands))
    step = len(kernel.operands)
    drawn = [_draw(key, kernel, *each) for key, each in zip(keys, list(kernel.operands) * kernel.repeats, strict=True)]
    return [drawn[step - 1] if kernel.shared and i % step == step - 1 else x for i, x in enumerate(drawn)]


def _draw(key: Any, kernel: Kernel, shape: Sequence[int], dtype: str) -> Any:
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        return jax.random.randint(key, shape, 0, max(kernel.rows, 2), jnp.int32).astype(dtype)
    return jax.random.uniform(key, shape, jnp.float32, 0.1, 1.0).astype(dtype)


def replaced(kernel: Kernel) -> tuple[int, ...]:
    """The arrays that the program's results take the place of."""
    return tuple(range(0, kernel.repeats * len(kernel.operands), len(kernel.operands))) if kernel.replaces else ()


def program_of(kernel: Kernel) -> Callable[..., list[Any]]:
    """The program over those arrays."""
    step = len(kernel.operands)

    def program(*arrays: Any) -> list[Any]:
        results = [kernel.body(*arrays[i : i + step]) for i in range(0, len(arrays), step)]
        return jax.tree.leaves(results)

    return program
