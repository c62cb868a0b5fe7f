"""Work rules of matrix products, convolutions and attention: what runs on matrix units.

A product of a b by m by k with a b by k by n array takes 2 b m n k operations. A convolution takes two for each pair of
an output and a kernel element that meets the operand (not its padding, not a hole of its dilation), as XLA counts
(xla/service/hlo_cost_analysis.cc, HandleConvolution).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.costmodel.work import Matrix, Work, WorkKind, is_double, make_work, size_of, work_rule
from autoshard.ir import Apply, Atom

COMPLEX_PRODUCT = 4
"""Real products in a complex one."""

ATTENTION_BACKWARD = 2.5
"""Flash attention's backward pass has five matrix products where the forward pass has two (Dao, "FlashAttention-2",
2023, section 4.1)."""


def matmul_class(lhs: Any, rhs: Any, precision: Any) -> tuple[str, int]:
    """The unit a product runs on, and how many passes it takes.

    f32 runs as TF32 unless HIGHEST is asked for: XLA's default on GPUs that have it (jax.lax.Precision: "DEFAULT ...
    TensorFloat32 where available"); a device without TF32 runs it as f32. An algorithm says itself what it does, e.g.
    BF16_BF16_F32_X3: three bf16 passes.

    Args:
      lhs: dtype of the left operand.
      rhs: dtype of the right operand.
      precision: the primitive's `precision`: None, one, a pair, or a `DotAlgorithm` (preset).
    """
    algorithm = _algorithm(precision)
    if algorithm is not None:
        return algorithm
    if is_double(lhs) or is_double(rhs):
        return "f64", 1
    narrow = {str(jnp.dtype(dtype)) for dtype in (lhs, rhs)}
    if narrow == {"bfloat16"}:
        return "bf16", 1
    if narrow == {"float16"}:
        return "f16", 1
    if narrow <= {"int8", "uint8"}:
        return "int8", 1
    if all(name.startswith("float8") for name in narrow):
        return "f8", 1
    if not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in (lhs, rhs)):
        return "f32", 1
    exact = jax.lax.Precision.HIGHEST in (precision if isinstance(precision, tuple) else (precision,))
    return ("f32" if exact else "tf32"), 1


def _algorithm(precision: Any) -> tuple[str, int] | None:
    """Of presets like TF32_TF32_F32_X3 the first word and the passes; of a `DotAlgorithm` its fields."""
    if isinstance(precision, jax.lax.DotAlgorithm):
        name = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}.get(
            str(jnp.dtype(precision.lhs_precision_type)), "tf32"
        )
        return name, int(precision.num_primitive_operations)
    if not isinstance(precision, jax.lax.DotAlgorithmPreset) or precision.name in ("DEFAULT", "ANY_F8_ANY_F8_F32"):
        return None
    words = precision.name.split("_")
    name = {"F8": "f8", "ANY": "f8"}.get(words[0], words[0].lower())
    passes = int(words[-1][1:]) if words[-1].startswith("X") else 1
    return name, passes


def _extent(atom: Atom, dims: Sequence[int]) -> int:
    return math.prod(atom.shape[int(d)] for d in dims)


def _factor(*atoms: Atom) -> int:
    return COMPLEX_PRODUCT if any(jnp.issubdtype(atom.dtype, jnp.complexfloating) for atom in atoms) else 1


def _product(
    equation: Apply, matrix: Matrix, precision: Any, rhs: Atom, operations: float | None = None, form: str = ""
) -> Work:
    lhs = equation.inputs[0]
    name, passes = matmul_class(lhs.dtype, rhs.dtype, precision)
    count = 2 * matrix.batch * matrix.m * matrix.n * matrix.k if operations is None else operations
    flops = passes * _factor(lhs, rhs) * count
    return make_work(equation, WorkKind.MATMUL, flops, 0, name, matrix, form)


@work_rule("dot_general")
def _dot(equation: Apply) -> Work:
    lhs, rhs = equation.inputs[:2]
    (contract, _), (batch, _) = equation.params["dimension_numbers"]
    k = _extent(lhs, contract)
    b = _extent(lhs, batch)
    matrix = Matrix(b, _quotient(size_of(lhs), b * k), _quotient(size_of(rhs), b * k), k)
    leading = tuple(range(len(contract)))
    form = "batched" if batch else "weights" if len(contract) > 1 and tuple(contract) == leading else ""
    return _product(equation, matrix, equation.params["precision"], rhs, form=form)


@work_rule("ragged_dot_general")
def _ragged_dot(equation: Apply) -> Work:
    """Rows meet one group's matrix each, so groups add no operations: m k n, not g m k n."""
    lhs, rhs = equation.inputs[:2]
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    k = _extent(lhs, contract)
    b = _extent(lhs, batch)
    groups = _extent(rhs, numbers.rhs_group_dimensions)
    matrix = Matrix(b, _quotient(size_of(lhs), b * k), _quotient(size_of(rhs), b * k * groups), k)
    return _product(equation, matrix, equation.params["precision"], rhs)


@work_rule("scaled_matmul", "scaled_matmul_wrapper", "scaled_dot")
def _scaled_dot(equation: Apply) -> Work:
    """Block-scaled product; the first two operands are [b, m, k] and [b, n, k], or as `dimension_numbers` say."""
    lhs, rhs = equation.inputs[:2]
    numbers = equation.params.get("dimension_numbers")
    (contract, _), (batch, _) = numbers if numbers else (((len(lhs.shape) - 1,), ()), ((0,), ()))
    k = _extent(lhs, contract)
    b = _extent(lhs, batch)
    matrix = Matrix(b, _quotient(size_of(lhs), b * k), _quotient(size_of(rhs), b * k), k)
    return _product(equation, matrix, None, rhs)


def _quotient(size: int, divisor: int) -> int:
    return size // divisor if divisor else 0


@work_rule("conv_general_dilated")
def _conv(equation: Apply) -> Work:
    lhs, rhs = equation.inputs[:2]
    out = equation.outputs[0]
    params = equation.params
    spec = params["dimension_numbers"]
    pairs = 1
    taps = 1
    for i, (d_lhs, d_rhs, d_out) in enumerate(
        zip(spec.lhs_spec[2:], spec.rhs_spec[2:], spec.out_spec[2:], strict=True)
    ):
        pairs *= valid_pairs(
            lhs.shape[int(d_lhs)],
            rhs.shape[int(d_rhs)],
            out.shape[int(d_out)],
            params["window_strides"][i],
            params["padding"][i][0],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
        taps *= rhs.shape[int(d_rhs)]
    batch, features = _extent(out, spec.out_spec[:1]), _extent(out, spec.out_spec[1:2])
    inputs = _extent(rhs, spec.rhs_spec[1:2])  # input features of one group
    # Of a batch-grouped convolution (the kernel's gradient of a grouped one) each group sees its part of the batch;
    # the output's batch is that part already.
    groups = int(params["feature_group_count"]) * int(params["batch_group_count"])
    spatial = _quotient(size_of(out), batch * features)
    matrix = Matrix(groups, batch * spatial, features // groups, inputs * taps)
    form = "weights" if taps > spatial else "input" if math.prod(params["lhs_dilation"]) > 1 else ""
    return _product(equation, matrix, params["precision"], rhs, 2 * batch * features * inputs * pairs, form)


def valid_pairs(
    size: int, kernel: int, out: int, stride: int, padding_low: int, dilation: int, kernel_dilation: int
) -> int:
    """Pairs of (output position, kernel position) of one dimension that meet an element of the operand."""
    first = np.arange(out)[:, None] * stride - padding_low
    at = first + np.arange(kernel)[None, :] * kernel_dilation
    inside = (at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)
    return int(inside.sum())


@work_rule(
    "dot_product_attention_fwd",
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_fp8_fwd",
    "dot_product_attention_fp8_fwd_wrapper",
)
def _attention(equation: Apply) -> Work:
    """cuDNN's: query [b, t, n, h], key [b, s, k, h]; two products of 2 b n t s h. Masks are not credited."""
    query, key = equation.inputs[:2]
    return _attention_work(equation, query.shape, key.shape, 1.0)


@work_rule(
    "dot_product_attention_bwd",
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fp8_bwd",
    "dot_product_attention_fp8_bwd_wrapper",
)
def _attention_backward(equation: Apply) -> Work:
    query, key = equation.inputs[:2]
    return _attention_work(equation, query.shape, key.shape, ATTENTION_BACKWARD)


def _attention_work(equation: Apply, query: Sequence[int], key: Sequence[int], times: float) -> Work:
    batch, rows, heads, width = query
    columns = key[1]
    matrix = Matrix(batch * heads, rows, columns, width)
    work = _product(equation, matrix, None, equation.inputs[1], times * 4 * batch * heads * rows * columns * width)
    logs = times * batch * heads * rows * columns  # the softmax's exponentials
    return dataclasses.replace(work, transcendentals=logs)
