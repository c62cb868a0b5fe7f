"""Operations random clusters draw from, each a function of arrays of one type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoshard.costmodel.learned.untyped import jax, jnp, lax

Op = Callable[..., Any]

LIGHT: tuple[Callable[[Any], Any], ...] = (
    lax.neg,
    lax.abs,
    lax.floor,
    lax.sign,
    lambda v: v * 1.7,
    lambda v: v + 0.3,
    lambda v: v * v,
    lambda v: lax.integer_pow(v, 3),
    lambda v: 1.0 / (lax.abs(v) + 1.0),
    lambda v: jnp.clip(v, -1.0, 1.0),
    lambda v: lax.max(v, jnp.zeros_like(v)),
    lambda v: jnp.where(v > 0, v, v * 0.1),
    lambda v: lax.sqrt(lax.abs(v)),
    lambda v: lax.rsqrt(lax.abs(v) + 1.0),
    jax.nn.hard_swish,
)
"""A few instructions an element."""

HEAVY: tuple[Callable[[Any], Any], ...] = (
    lax.exp,
    lax.tanh,
    lax.logistic,
    lax.sin,
    lax.cos,
    lax.erf,
    lax.expm1,
    lax.log1p,
    lambda v: lax.log(lax.abs(v) + 1.0),
    lambda v: lax.pow(lax.abs(v), jnp.full_like(v, 1.3)),
    lambda v: lax.exp2(-lax.abs(v)),
    lambda v: lax.cbrt(v),
    jax.nn.gelu,
    lambda v: jax.nn.gelu(v, approximate=False),
    jax.nn.silu,
    jax.nn.softplus,
    jax.nn.elu,
)
"""A series or a library function an element."""

BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    lax.add,
    lax.sub,
    lax.mul,
    lax.max,
    lax.min,
    lambda v, w: v / (lax.abs(w) + 1.0),
    lambda v, w: v * 0.9 + w * 0.1,
    lambda v, w: v * lax.logistic(w),
    lambda v, w: lax.atan2(v, w),
    lambda v, w: lax.pow(lax.abs(v) + 0.1, w),
    lambda v, w: (v - w) * (v - w),
)


def _sum_of_squares(v: Any, **options: Any) -> Any:
    return jnp.sum(v * v, **options)


def _sum_of_sizes(v: Any, **options: Any) -> Any:
    return jnp.sum(lax.abs(v), **options)


def _root_mean_square(v: Any, **options: Any) -> Any:
    return jnp.sqrt(jnp.mean(v * v, **options))


REDUCERS: tuple[Op, ...] = (
    jnp.sum,
    jnp.sum,
    jnp.max,
    jnp.max,
    jnp.min,
    jnp.mean,
    jnp.prod,
    _sum_of_squares,
    _sum_of_sizes,
    _root_mean_square,
    jax.nn.logsumexp,
)
"""Take `axis` and `keepdims`."""
