"""The network: graph attention over kernels, a correction for each, and their sum.

    h_k      = embedding of a kernel's figures, then L layers of attention along edges, both ways
    c_k      = dense(h_k)
    time_k   = base_k exp(c_k)
    time     = sum over kernels of time_k  x  exp(s),   s = linear in log sum, log of their number, classes' parts of it

What a whole step costs beyond its kernels (buffers, the profiler's own cost in the kernels' labels) is s, a small
number. A kernel's time is corrected by a factor, and factors are bounded, so that a program much longer than any seen
is still the sum of its kernels. Attention (Velickovic et al., 2018; DisCo, Yi et al., 2022, section 4): the weight of a
neighbour is a softmax, over the edges that end in a node, of a score of both ends and of the bytes between them.
"""

from __future__ import annotations

from typing import Any, cast, final

import flax.linen as nn

from autoshard.costmodel.learned.kernel_features import MAINS, OPCODES
from autoshard.costmodel.learned.untyped import jax, jnp

Array = Any

BOUND = 6.0
"""Largest absolute logarithm of a correction: a factor of 400."""

WHOLE_BOUND = 0.7
"""The same of a whole program's: a factor of 2."""


def _silu(h: Array) -> Array:
    return h * nn.sigmoid(h)


@final
class Attention(nn.Module):
    """One layer: every node attends to its neighbours along edges in one direction."""

    width: int
    heads: int = 4

    @nn.compact
    def __call__(self, h: Array, source: Array, target: Array, edge: Array, real: Array) -> Array:
        """Messages of all edges, summed in their targets: [K, width]."""
        each = self.width // self.heads
        value = nn.Dense(self.width)(h)
        score = nn.Dense(self.heads)(h)[source] + nn.Dense(self.heads)(h)[target] + nn.Dense(self.heads)(edge[:, None])
        score = nn.leaky_relu(score, 0.2)
        score = jnp.where(real[:, None] > 0, score, jnp.full_like(score, -1e9))
        top = jax.ops.segment_max(score, target, h.shape[0])
        top = jnp.maximum(top, jnp.full_like(top, -1e9))  # nodes without an edge have -inf
        weight = jnp.exp(score - jax.lax.stop_gradient(top)[target]) * real[:, None]
        total = jax.ops.segment_sum(weight, target, h.shape[0])[target]
        weight = weight / (total + 1e-9)
        message = value[source].reshape(-1, self.heads, each) * weight[:, :, None]
        return jax.ops.segment_sum(message.reshape(-1, self.width), target, h.shape[0])


@final
class Corrector(nn.Module):
    """Logs of the times of kernels and programs.

    Attributes:
      width: of the hidden states.
      layers: of attention.
      dropout: part of the hidden states left out in training.
    """

    width: int = 64
    layers: int = 2
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        nodes: Array,
        base_s: Array,
        edges: Array,
        edge_bytes: Array,
        real: Array,
        program: Array,
        slots: int,
        train: bool = False,
    ) -> tuple[Array, Array]:
        """[nodes], all runs of a kernel together, and [slots]; `nodes` are standardized."""
        waves = nn.Dense(self.width, kernel_init=nn.initializers.normal(0.3))(nodes)
        h = jnp.concatenate((_silu(nn.Dense(2 * self.width)(nodes)), jnp.sin(waves)), axis=-1)
        h = cast(Array, nn.Dropout(self.dropout, deterministic=not train)(h))
        h = _silu(nn.Dense(self.width)(h))
        for _ in range(self.layers):
            y = nn.LayerNorm()(h)
            down = Attention(self.width)(y, edges[:, 0], edges[:, 1], edge_bytes, real)
            up = Attention(self.width)(y, edges[:, 1], edges[:, 0], edge_bytes, real)
            y = _silu(nn.Dense(self.width)(jnp.concatenate((y, down, up), axis=-1)))
            h = h + nn.Dense(self.width)(y)
        h = jnp.concatenate((_silu(nn.LayerNorm()(h)), nodes), axis=-1)
        h = _silu(nn.Dense(self.width)(h))
        correction = nn.Dense(1, kernel_init=nn.initializers.normal(0.01))(h)[:, 0]
        correction = BOUND * jnp.tanh(correction / BOUND)
        times = base_s * jnp.exp(correction)
        total = jax.ops.segment_sum(times, program, slots)
        total = total * jnp.exp(self._whole(nodes, times, total, program, slots))
        kernels = jnp.log(jnp.maximum(base_s, jnp.full_like(base_s, 1e-12))) + correction
        return kernels, jnp.log(jnp.maximum(total, jnp.full_like(total, 1e-9)))

    def _whole(self, nodes: Array, times: Array, total: Array, program: Array, slots: int) -> Array:
        """The correction of each program: [slots]."""
        safe = jnp.maximum(total, jnp.full_like(total, 1e-9))
        count = jax.ops.segment_sum((times > 0).astype(jnp.float32), program, slots)
        classes = nodes[:, len(OPCODES) : len(OPCODES) + len(MAINS)]
        parts = jax.ops.segment_sum(classes * (times / safe[program])[:, None], program, slots)
        sizes = jnp.stack((jnp.log(safe) / 2 + 3, jnp.log1p(count) - 4), axis=-1)
        found = nn.Dense(1, kernel_init=nn.initializers.normal(0.01))(jnp.concatenate((sizes, 0.1 * parts), axis=-1))
        return WHOLE_BOUND * jnp.tanh(found[:, 0] / WHOLE_BOUND)
