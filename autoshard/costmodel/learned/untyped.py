"""JAX's and Flax's functions as `Any`: their stubs are partly unknown, which strict checking refuses at every use."""

from __future__ import annotations

from typing import Any

import jax as _jax
import jax.numpy as _jnp
from jax import lax as _lax

jax: Any = _jax
jnp: Any = _jnp
lax: Any = _lax
nn: Any = jax.nn
eval_shape: Any = jax.eval_shape
value_and_grad: Any = jax.value_and_grad
