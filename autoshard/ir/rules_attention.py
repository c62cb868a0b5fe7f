"""Factor rules of cuDNN's attention (`jax.nn.dot_product_attention(..., implementation="cudnn")`).

    forward, layout BTNH    ([b,t,n,h],[b,s,n,h],[b,s,n,h])->([b,t,n,h],[b,n,t]) need_replication={t,s,h}

JAX partitions these kernels over examples and heads only, queries, keys and values alike
(jax/_src/cudnn/fused_attention_stablehlo.py, `_check_qkv_bias_mask_spec`).
"""

from __future__ import annotations

from autoshard.ir.factors import FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.rule_builder import FactorBuilder, whole
from autoshard.ir.rule_registry import register_rule

_BIAS = 3
_LENGTHS = (4, 5)
_PACKED = (6, 7, 8, 9)
"""Operands: query, key, value, bias, two lengths, two offsets and two page tables; absent ones have no elements."""

_STATISTICS = 10
"""The first of the backward's further operands; the output and its gradient follow."""


@register_rule(
    "dot_product_attention_fwd",
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd",
    "dot_product_attention_bwd_wrapper",
)
def _attention(equation: Apply) -> FactorRule:
    """Examples and heads are parallel.

    Whole where it would change the result: dropout (each device would draw the same mask), packed sequences and page
    tables (examples share a row), a gradient of a bias that examples or heads share.
    """
    builder = FactorBuilder(equation)
    packed = any(builder.shapes[p] and 0 not in builder.shapes[p] for p in _PACKED)
    if packed or equation.params["dropout_rate"] > 0:
        return whole(equation)
    backward = "bwd" in equation.name
    heads = 1 if int(equation.params["layout"]) == 1 else 2
    first = [0, 1, 2]
    tensors = first + ([_STATISTICS + 1, _STATISTICS + 2] if backward else [])
    tensors += [p for p in builder.results if len(builder.shapes[p]) == 4][:3]
    statistics = [_STATISTICS] if backward else [p for p in builder.results if len(builder.shapes[p]) == 3]
    bias = [_BIAS, *([builder.results[3]] if len(builder.results) == 4 else [])]
    bias = [p for p in bias if len(builder.shapes[p]) == 4 and 0 not in builder.shapes[p]]
    examples = builder.shapes[0][0]
    shared = len(builder.results) == 4 and backward

    if not (shared and builder.shapes[_BIAS][0] != examples):
        at = dict.fromkeys((*tensors, *statistics, *bias, *_LENGTHS), 0)
        builder.factor({p: d for p, d in at.items() if builder.shapes[p][:1] == (examples,)})
    count = builder.shapes[1][heads]
    if not (shared and builder.shapes[_BIAS][1] != builder.shapes[0][heads]):
        at = dict.fromkeys(tensors, heads) | dict.fromkeys((*statistics, *bias), 1)
        builder.factor({p: d for p, d in at.items() if builder.shapes[p][d] % count == 0}, size=count)
    return builder.build()
