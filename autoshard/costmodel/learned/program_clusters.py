"""Random clusters: a few operations on arrays of a thousand to ten million elements.

The graph grows one operation at a time; each operation is drawn by weights that are themselves drawn for each program,
so that some programs are all reductions, some all transposes, some a product with what comes before and after it.
Values are tracked as shapes only; the function replays what was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from autoshard.costmodel.learned.program_ops import BINARY, HEAVY, LIGHT, REDUCERS
from autoshard.costmodel.learned.programs import Program
from autoshard.costmodel.learned.untyped import eval_shape, jnp, lax, nn

Op = Callable[..., Any]

LARGEST = 12_000_000
"""Most elements of a value: 48 MB of f32, beyond the last-level cache of most CPUs."""

MOST_ELEMENTS = 40_000_000
"""Most elements of all values of a cluster, so that one call takes milliseconds."""

MOST_FLOPS = 1.2e9
"""Most operations of a cluster's matrix products: tens of milliseconds on one core."""

FAMILIES = ("elementwise", "reduce", "move", "index", "matmul", "conv", "mixed")


@final
class Builder:
    """A program under construction.

    Attributes:
      rng: where all choices come from.
      shapes: of each value, arguments and results alike.
      arguments: numbers of the values that are arguments, with the bound of their integers.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.shapes: list[Any] = []
        self.arguments: list[tuple[int, int]] = []
        self.calls: list[tuple[int, Op, tuple[int, ...]]] = []
        self.used: set[int] = set()
        self.elements = 0
        self.flops = 0.0

    def argument(self, shape: Sequence[int], dtype: Any, bound: int = 0) -> int:
        self.arguments.append((len(self.shapes), bound))
        return self._value(jax.ShapeDtypeStruct(tuple(shape), dtype))

    def call(self, op: Op, *operands: int) -> int:
        """Applies an operation of one result."""
        made = eval_shape(op, *(self.shapes[i] for i in operands))
        self.calls.append((len(self.shapes), op, operands))
        self.used.update(operands)
        return self._value(jax.ShapeDtypeStruct(made.shape, made.dtype))

    def unary(self, op: Callable[[Any], Any], x: int) -> int:
        return self.call(op, x)

    def binary(self, op: Callable[[Any, Any], Any], x: int, y: int) -> int:
        return self.call(op, x, y)

    def ternary(self, op: Callable[[Any, Any, Any], Any], x: int, y: int, z: int) -> int:
        return self.call(op, x, y, z)

    def _value(self, aval: jax.ShapeDtypeStruct) -> int:
        self.elements += math.prod(aval.shape)
        self.shapes.append(aval)
        return len(self.shapes) - 1

    def program(self, seed: int, family: str) -> Program:
        """What was built, all unread results returned."""
        calls = tuple(self.calls)
        ends = [number for number, _, _ in calls if number not in self.used]
        args = [number for number, _ in self.arguments]

        def fun(*arrays: Any) -> tuple[Any, ...]:
            values = dict(zip(args, arrays, strict=True))
            for number, op, operands in calls:
                values[number] = op(*(values[i] for i in operands))
            return tuple(values[i] for i in ends)

        avals = tuple(self.shapes[i] for i in args)
        return Program("cluster", seed, family, fun, avals, tuple(bound for _, bound in self.arguments))


def make_cluster(seed: int) -> Program:
    """The cluster of a seed."""
    rng = np.random.default_rng([seed, 0])
    family = str(rng.choice(FAMILIES, p=(0.22, 0.18, 0.14, 0.08, 0.16, 0.07, 0.15)))
    dtype = jnp.bfloat16 if rng.random() < 0.25 else jnp.float32
    build = Builder(rng)
    weights = _weights(rng, family)
    x = build.argument(_shape(rng, family), dtype)
    steps = int(rng.integers(1, 14)) if family != "conv" else int(rng.integers(1, 7))
    if family in ("matmul", "conv"):
        steps = max(steps // 2, 1)
        at = int(rng.integers(0, steps))
    else:
        at = -1
    names = list(weights)
    p = np.array([weights[name] for name in names])
    for step in range(steps):
        if step == at:
            x = _PRODUCTS[family](build, x)
            continue
        if build.elements > MOST_ELEMENTS:
            break
        name = str(rng.choice(names, p=p / p.sum()))
        made = _OPS[name](build, x)
        if made is None:
            continue
        x = made
        if rng.random() < 0.12:  # another branch: go on from an earlier value
            x = int(rng.integers(0, len(build.shapes)))
            if not jnp.issubdtype(build.shapes[x].dtype, jnp.floating) or math.prod(build.shapes[x].shape) < 512:
                x = made
        if math.prod(build.shapes[x].shape) < 64:  # reduced away; go on from the largest float value
            floats = [i for i, a in enumerate(build.shapes) if jnp.issubdtype(a.dtype, jnp.floating)]
            x = max(floats, key=lambda i: math.prod(build.shapes[i].shape))
    if not build.calls:
        build.call(jnp.tanh, x)
    return build.program(seed, family)


def _weights(rng: np.random.Generator, family: str) -> dict[str, float]:
    """How likely each operation is, in this program."""
    base = dict.fromkeys(_OPS, 0.25)
    base.update(light=1.5, heavy=1.0, binary=1.2)
    match family:
        case "elementwise":
            base.update(light=3.0, heavy=3.0, binary=2.5, bias=1.5, select=1.0, convert=0.7)
        case "reduce":
            base.update(reduce=3.0, centre=2.0, softmax=1.5, norm=1.5)
        case "move":
            base.update(transpose=2.5, slice=2.0, concat=2.0, pad=1.0, reshape=1.0, rev=0.5, convert=0.7)
        case "index":
            base.update(gather=3.0, scatter=1.0, update=1.0, onehot=0.7)
        case "mixed":
            base.update(matmul=0.6)
        case _:
            pass
    return {name: weight * float(rng.gamma(0.7)) + 1e-3 for name, weight in base.items()}


def _shape(rng: np.random.Generator, family: str) -> tuple[int, ...]:
    """One to four dimensions, a thousand to ten million elements, half of the sizes round."""
    top = 6.0 if family in ("matmul", "conv", "index") else 7.0
    elements = 10 ** float(rng.uniform(3.0, top))
    if elements > 2e6 and rng.random() < 0.5:  # large ones are slow to measure
        elements /= 10
    if family == "conv":
        batch, channels = int(2 ** rng.integers(0, 5)), int(rng.choice([1, 3, 8, 16, 32, 48, 64, 96, 128]))
        side = int(min(max(math.sqrt(elements / batch / channels), 6), 96))
        return (batch, side, side, channels)
    rank = int(rng.choice([1, 2, 3, 4], p=(0.15, 0.45, 0.28, 0.12)))
    if family == "matmul":
        rank = int(rng.choice([2, 3, 4], p=(0.6, 0.25, 0.15)))
    logs = rng.dirichlet(np.full(rank, 2.5)) * math.log(elements)
    return tuple(_round(rng, math.exp(x)) for x in logs)


def _round(rng: np.random.Generator, size: float) -> int:
    """A multiple of 8 or a power of two as often as any number."""
    n = max(round(size), 1)
    draw = rng.random()
    if n >= 8 and draw < 0.35:
        return 2 ** round(math.log2(n))
    if n >= 12 and draw < 0.7:
        return 8 * round(n / 8)
    return n


def _axis(build: Builder, x: int) -> int:
    """A dimension, the last as often as all others together."""
    rank = len(build.shapes[x].shape)
    return rank - 1 if build.rng.random() < 0.5 else int(build.rng.integers(0, rank))


def _light(build: Builder, x: int) -> int:
    return build.call(LIGHT[int(build.rng.integers(len(LIGHT)))], x)


def _heavy(build: Builder, x: int) -> int:
    return build.call(HEAVY[int(build.rng.integers(len(HEAVY)))], x)


def _partner(build: Builder, x: int) -> int:
    """A value of the same type: an earlier one, or a new argument."""
    aval = build.shapes[x]
    same = [i for i, a in enumerate(build.shapes) if a.shape == aval.shape and a.dtype == aval.dtype and i != x]
    if same and build.rng.random() < 0.6:
        return same[int(build.rng.integers(len(same)))]
    return build.argument(aval.shape, aval.dtype)


def _binary(build: Builder, x: int) -> int:
    op = BINARY[int(build.rng.integers(len(BINARY)))]
    return build.call(op, x, _partner(build, x))


def _bias(build: Builder, x: int) -> int:
    """With an argument broadcast along all but a few dimensions."""
    shape, dtype = build.shapes[x].shape, build.shapes[x].dtype
    rank = len(shape)
    kept = sorted({_axis(build, x)} | ({_axis(build, x)} if build.rng.random() < 0.3 else set()))
    b = build.argument([shape[d] for d in kept], dtype)
    op = (lax.add, lax.mul, lax.sub)[int(build.rng.integers(3))]
    assert rank >= len(kept)
    return build.binary(lambda v, w: op(v, lax.broadcast_in_dim(w, v.shape, kept)), x, b)


def _reduce(build: Builder, x: int) -> int:
    rank = len(build.shapes[x].shape)
    axes = {_axis(build, x)}
    if rank > 1 and build.rng.random() < 0.35:
        axes.add(int(build.rng.integers(0, rank)))
    op = REDUCERS[int(build.rng.integers(len(REDUCERS)))]
    return build.unary(lambda v: op(v, axis=tuple(sorted(axes))), x)


def _centre(build: Builder, x: int) -> int:
    """Something reduced, broadcast again and combined."""
    axis = _axis(build, x)
    reducer = REDUCERS[int(build.rng.integers(len(REDUCERS)))]
    combine = (lax.sub, lax.mul, lax.max)[int(build.rng.integers(3))]

    def op(v: Any) -> Any:
        r = reducer(v, axis=(axis,), keepdims=True)
        return combine(v, jnp.broadcast_to(r.astype(v.dtype), v.shape))

    return build.call(op, x)


def _softmax(build: Builder, x: int) -> int:
    axis = _axis(build, x)
    fun = nn.softmax if build.rng.random() < 0.7 else nn.log_softmax
    return build.unary(lambda v: fun(v, axis=axis), x)


def _norm(build: Builder, x: int) -> int:
    axis = _axis(build, x)
    scale = build.argument((build.shapes[x].shape[axis],), build.shapes[x].dtype)
    rms = build.rng.random() < 0.5
    wide = build.rng.random() < 0.7

    def op(v: Any, w: Any) -> Any:
        h = v.astype(jnp.float32) if wide else v
        if not rms:
            h = h - h.mean(axis=axis, keepdims=True)
        h = h * lax.rsqrt((h * h).mean(axis=axis, keepdims=True) + 1e-5)
        return h.astype(v.dtype) * lax.broadcast_in_dim(w, v.shape, (axis,))

    return build.call(op, x, scale)


def _transpose(build: Builder, x: int) -> int | None:
    rank = len(build.shapes[x].shape)
    if rank < 2:
        return None
    order = tuple(int(i) for i in build.rng.permutation(rank))
    return build.unary(lambda v: lax.transpose(v, order), x)


def _reshape(build: Builder, x: int) -> int | None:
    shape: tuple[int, ...] = build.shapes[x].shape
    if len(shape) > 1 and build.rng.random() < 0.5:
        d = int(build.rng.integers(0, len(shape) - 1))
        new = (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :])
    else:
        d = _axis(build, x)
        parts = [p for p in (2, 3, 4, 8, 16, 32) if shape[d] % p == 0 and shape[d] > p]
        if not parts or len(shape) > 3:
            return None
        part = parts[int(build.rng.integers(len(parts)))]
        new = (*shape[:d], shape[d] // part, part, *shape[d + 1 :])
    return build.unary(lambda v: lax.reshape(v, new), x)


def _slice(build: Builder, x: int) -> int | None:
    shape: tuple[int, ...] = build.shapes[x].shape
    axis = _axis(build, x)
    n = shape[axis]
    if n < 4:
        return None
    start, size = int(build.rng.integers(0, n // 2)), int(build.rng.integers(n // 4, n // 2 + 1))
    stride = int(build.rng.integers(2, 5)) if build.rng.random() < 0.25 else 1
    return build.unary(lambda v: lax.slice_in_dim(v, start, start + max(size, 1), stride, axis), x)


def _concat(build: Builder, x: int) -> int | None:
    aval = build.shapes[x]
    if 2 * math.prod(aval.shape) > LARGEST:
        return None
    axis = _axis(build, x)
    return build.binary(lambda v, w: lax.concatenate((v, w), axis), x, _partner(build, x))


def _pad(build: Builder, x: int) -> int:
    axis = _axis(build, x)
    low, high = int(build.rng.integers(0, 4)), int(build.rng.integers(1, 9))
    config = [(low, high, 0) if d == axis else (0, 0, 0) for d in range(len(build.shapes[x].shape))]
    return build.unary(lambda v: lax.pad(v, jnp.zeros((), v.dtype), config), x)


def _rev(build: Builder, x: int) -> int:
    axis = _axis(build, x)
    return build.unary(lambda v: lax.rev(v, (axis,)), x)


def _convert(build: Builder, x: int) -> int:
    other = jnp.float32 if build.shapes[x].dtype == jnp.bfloat16 else jnp.bfloat16
    return build.unary(lambda v: v.astype(other), x)


def _select(build: Builder, x: int) -> int:
    """Where a mask is set; the mask an argument, a comparison, or a triangle."""
    shape = build.shapes[x].shape
    draw = build.rng.random()
    if draw < 0.4:
        mask = build.argument(shape, jnp.bool_)
        return build.binary(lambda v, m: jnp.where(m, v, jnp.full_like(v, -1.0)), x, mask)
    if draw < 0.7 and len(shape) >= 2:
        rank = len(shape)

        def triangle(v: Any) -> Any:
            rows, columns = (lax.broadcasted_iota(jnp.int32, v.shape, d) for d in (rank - 2, rank - 1))
            return jnp.where(rows >= columns, v, jnp.full_like(v, -1e9))

        return build.call(triangle, x)
    return build.binary(lambda v, w: jnp.where(v > w, v * v, w), x, _partner(build, x))


def _gather(build: Builder, x: int) -> int | None:
    """Rows (or columns) by index."""
    shape = build.shapes[x].shape
    axis = 0 if build.rng.random() < 0.75 else _axis(build, x)
    inner = max(math.prod(shape) // shape[axis], 1)
    rows = int(max(min(10 ** build.rng.uniform(1, 5), 4_000_000 / inner), 1))
    index = build.argument((rows,), jnp.int32, shape[axis])
    if build.elements + rows * inner > MOST_ELEMENTS:
        return None
    return build.binary(lambda v, i: jnp.take(v, i, axis=axis, mode="clip"), x, index)


def _scatter(build: Builder, x: int) -> int | None:
    """Rows added up by index."""
    shape, dtype = build.shapes[x].shape, build.shapes[x].dtype
    if math.prod(shape) > 1_000_000:
        return None
    rows = int(10 ** build.rng.uniform(1, 4))
    index = build.argument((shape[0],), jnp.int32, rows)
    return build.binary(lambda v, i: jnp.zeros((rows, *shape[1:]), dtype).at[i].add(v, mode="clip"), x, index)


def _update(build: Builder, x: int) -> int:
    """A part written over at a place known when it runs."""
    shape, dtype = build.shapes[x].shape, build.shapes[x].dtype
    axis = _axis(build, x)
    part = build.argument([max(n // 4, 1) if d == axis else n for d, n in enumerate(shape)], dtype)
    start = build.argument((), jnp.int32, max(shape[axis] // 2, 1))
    return build.ternary(lambda v, u, i: lax.dynamic_update_slice_in_dim(v, u, i, axis), x, part, start)


def _onehot(build: Builder, x: int) -> int | None:
    """Labels compared with an iota, times the value."""
    shape = build.shapes[x].shape
    if len(shape) != 2:
        return None
    labels = build.argument((shape[0],), jnp.int32, shape[1])
    return build.binary(lambda v, i: (v * nn.one_hot(i, shape[1], dtype=v.dtype)).sum(-1), x, labels)


def _matmul(build: Builder, x: int) -> int | None:
    """With a weight, with itself transposed, or batch by batch; the summed dimension anywhere."""
    rng, shape, dtype = build.rng, build.shapes[x].shape, build.shapes[x].dtype
    if len(shape) < 2:
        return None
    axis = _axis(build, x)
    k, rows = shape[axis], math.prod(shape) // shape[axis]
    batched = len(shape) >= 3 and rng.random() < 0.5
    room = (MOST_FLOPS - build.flops) / max(2.0 * k * rows, 1.0)
    n = min(_round(rng, 2 ** rng.uniform(0, 11)), int(room), LARGEST // max(rows, 1))
    if n < 1:
        return None
    build.flops += 2.0 * k * rows * n
    batch = 1 if batched else 0
    if batched and axis == 0:
        axis = len(shape) - 1
        k = shape[axis]
        n = min(n, 512)
    first = rng.random() < 0.7  # whether the weight's first dimension is summed
    wide = dtype == jnp.bfloat16 and rng.random() < 0.3
    weight_shape = (*shape[:batch], *((k, n) if first else (n, k)))
    weight = build.argument(weight_shape, dtype)
    numbers = (((axis,), (batch if first else batch + 1,)), (tuple(range(batch)), tuple(range(batch))))
    prefer = jnp.float32 if wide else None
    return build.binary(lambda v, w: lax.dot_general(v, w, numbers, preferred_element_type=prefer), x, weight)


def _conv(build: Builder, x: int) -> int | None:
    rng, shape, dtype = build.rng, build.shapes[x].shape, build.shapes[x].dtype
    if len(shape) != 4:
        return None
    size = int(rng.choice([1, 2, 3, 3, 3, 5, 7]))
    stride = int(rng.choice([1, 1, 2]))
    depthwise = rng.random() < 0.15
    channels = shape[3]
    out = channels if depthwise else int(rng.choice([8, 16, 24, 32, 64, 96, 128, 192]))
    groups = channels if depthwise else 1
    flops = 2.0 * math.prod(shape[:3]) / stride**2 * size * size * out * channels / groups
    if flops > 5e8 or min(shape[1:3]) < size:
        size, out = 1, min(out, 32)
        groups = 1
    kernel = build.argument((size, size, channels // groups, out), dtype)
    layout = ("NHWC", "HWIO", "NHWC")
    padding = "SAME" if rng.random() < 0.7 else "VALID"
    return build.binary(
        lambda v, w: lax.conv_general_dilated(
            v, w, (stride, stride), padding, dimension_numbers=layout, feature_group_count=groups
        ),
        x,
        kernel,
    )


_OPS: dict[str, Callable[[Builder, int], int | None]] = {
    "light": _light,
    "heavy": _heavy,
    "binary": _binary,
    "bias": _bias,
    "reduce": _reduce,
    "centre": _centre,
    "softmax": _softmax,
    "norm": _norm,
    "transpose": _transpose,
    "reshape": _reshape,
    "slice": _slice,
    "concat": _concat,
    "pad": _pad,
    "rev": _rev,
    "convert": _convert,
    "select": _select,
    "gather": _gather,
    "scatter": _scatter,
    "update": _update,
    "onehot": _onehot,
    "matmul": _matmul,
}


def _product(build: Builder, x: int) -> int:
    made = _matmul(build, x)
    return x if made is None else made


def _convolution(build: Builder, x: int) -> int:
    made = _conv(build, x)
    return x if made is None else made


_PRODUCTS: dict[str, Callable[[Builder, int], int]] = {"matmul": _product, "conv": _convolution}
