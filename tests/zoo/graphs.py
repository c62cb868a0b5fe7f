"""Programs of indices: graph networks, gathers and scatters over several dimensions, a large vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .base import Case, Program, functional
from .layers import (
    Params,
    cross_entropy,
    dense,
    dense_init,
    generator,
    integers,
    mlp,
    mlp_init,
    normal,
    sgd,
    weight,
)

NODES, EDGES, GRAPHS, WIDTH = 64, 256, 16, 64


def graph_network(dtype: Any) -> Case:
    """Message passing on 16 graphs in one array: segment_sum of messages, segment softmax of scores, mean per graph."""

    def layer(params: Params, nodes: jax.Array, edges: jax.Array, batch: Params) -> tuple[jax.Array, jax.Array]:
        senders, receivers = batch["senders"], batch["receivers"]
        edges = edges + mlp(params["edge"], jnp.concatenate([nodes[senders], nodes[receivers], edges], axis=-1))
        scores = jnp.sum(nodes[receivers] * (edges @ params["score"]), axis=-1) * WIDTH**-0.5
        top = jax.ops.segment_max(jax.lax.stop_gradient(scores), receivers, num_segments=NODES)
        exponentials = jnp.exp(scores - top[receivers])
        total = jax.ops.segment_sum(exponentials, receivers, num_segments=NODES)
        shares = (exponentials / total[receivers])[:, None]
        messages = jax.ops.segment_sum(shares * edges, receivers, num_segments=NODES)
        return nodes + mlp(params["node"], jnp.concatenate([nodes, messages], axis=-1)), edges

    def step(params: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> tuple[jax.Array, jax.Array]:
            nodes, edges = dense(params["in"], batch["nodes"]), batch["edges"]
            for entries in params["layers"]:
                nodes, edges = layer(entries, nodes, edges, batch)
            pooled = jax.ops.segment_sum(nodes, batch["graph"], num_segments=GRAPHS, indices_are_sorted=True)
            sizes = jnp.bincount(batch["graph"], length=GRAPHS).astype(nodes.dtype)
            out = dense(params["out"], pooled / jnp.maximum(sizes, 1)[:, None])
            return jnp.mean(jnp.square(out - batch["target"])), out

        (loss, out), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return sgd(params, grads, 0.05), {"loss": loss, "out": out}

    def state() -> Params:
        rng = generator(80)

        def entries() -> Params:
            return {
                "edge": mlp_init(rng, (2 * WIDTH + 32, WIDTH, 32), dtype),
                "score": weight(rng, (32, WIDTH), dtype),
                "node": mlp_init(rng, (WIDTH + 32, WIDTH, WIDTH), dtype),
            }

        ends = {"in": dense_init(rng, 32, WIDTH, dtype), "out": dense_init(rng, WIDTH, 8, dtype)}
        return {**ends, "layers": [entries() for _ in range(2)]}

    def batch(i: int) -> Params:
        rng = generator(80, i)
        # Every graph has a node at least; some nodes receive no edge.
        graph = np.sort(np.concatenate([np.arange(GRAPHS), rng.integers(0, GRAPHS, NODES - GRAPHS)]))
        receivers = rng.integers(0, NODES, EDGES)
        candidates = [np.flatnonzero(graph == graph[r]) for r in receivers]
        senders = np.array([rng.choice(nodes) for nodes in candidates])
        return {
            "nodes": normal(rng, (NODES, 32), dtype),
            "edges": normal(rng, (EDGES, 32), dtype),
            "senders": jnp.array(senders, dtype=jnp.int32),
            "receivers": jnp.array(receivers, dtype=jnp.int32),
            "graph": jnp.array(graph, dtype=jnp.int32),
            "target": normal(rng, (GRAPHS, 8), dtype),
        }

    return functional(step, state, batch)


def gathers_and_scatters(dtype: Any) -> Case:
    """Indexing of every kind, differentiated: several index arrays, slices at data-dependent places, updates."""

    def features(params: Params, batch: Params) -> jax.Array:
        i, j, rows = batch["i"], batch["j"], batch["row"]
        table = params["table"]
        points = table[i, j]
        between = table[i[:, 0], :, batch["channel"][:, 0]]
        picked = jnp.take_along_axis(batch["x"], batch["channel"], axis=1)
        grid = jnp.zeros((16, 32), table.dtype).at[rows[:, None], j].add(picked)
        grid = grid.at[0:3].set(params["w"][0:3, :32]).at[-1, 1::2].multiply(0.5)
        window = jax.lax.dynamic_slice(params["w"], (batch["start"], jnp.int32(8)), (16, 32))
        grid = jax.lax.dynamic_update_slice(grid, 0.5 * window[:4, :8], (batch["start"] // 8, batch["start"] // 4))
        own = jax.vmap(lambda row, s: jax.lax.dynamic_slice(row, (s,), (16,)))(batch["x"], i[:, 1])
        far = params["w"].at[i[:, 2] * 4, :16].get(mode="fill", fill_value=0)
        highest = jnp.full((16, 32), -1.0, table.dtype).at[rows, j[:, 3]].max(batch["x"][:, 0])
        parts = [jnp.sum(points, axis=1), between, grid + window, own, far, highest]
        return jnp.concatenate([p.reshape(p.shape[0], -1) for p in parts], axis=1)

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        def loss_of(params: Params) -> jax.Array:
            return jnp.mean(jnp.square(dense(params["head"], features(params, batch)) - batch["y"]))

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        visits = state["visits"].at[batch["i"], batch["j"]].add(1)
        return {"params": sgd(state["params"], grads, 0.05), "visits": visits}, {"loss": loss, "grads": grads["table"]}

    def state() -> Params:
        rng = generator(81)
        params = {
            "table": normal(rng, (24, 32, 8), dtype),
            "w": weight(rng, (64, 64), dtype),
            "head": dense_init(rng, 8 + 32 + 32 + 16 + 16 + 32, 16, dtype),
        }
        return {"params": params, "visits": jnp.zeros((24, 32), jnp.int32)}

    def batch(i: int) -> Params:
        rng = generator(81, i)
        return {
            "x": normal(rng, (16, 32), dtype),
            "y": normal(rng, (16, 16), dtype),
            "i": integers(rng, (16, 8), 24),
            "j": integers(rng, (16, 8), 32),
            "channel": integers(rng, (16, 8), 8),
            "row": jnp.array(rng.permutation(16), dtype=jnp.int32),
            # Beyond 48 the slice of 16 rows out of 64 is clamped.
            "start": jnp.array((5, 30, 55)[i % 3], dtype=jnp.int32),
        }

    return functional(step, state, batch)


def large_vocabulary(dtype: Any) -> Case:
    """Bags of 8 embeddings out of 4096, a softmax over the target and 64 sampled words, Adagrad on both tables."""
    vocabulary = 4096

    def step(state: Params, batch: Params) -> tuple[Params, dict[str, jax.Array]]:
        sampled = jax.random.randint(jax.random.fold_in(state["key"], state["count"]), (64,), 0, vocabulary, jnp.int32)

        def loss_of(params: Params) -> jax.Array:
            vectors = jnp.take(params["in"], batch["words"], axis=0)
            bag = jnp.tanh(jnp.mean(vectors, axis=1) @ params["mix"])
            positive = jnp.sum(bag * params["out"][batch["target"]], axis=-1, keepdims=True)
            negative = bag @ params["out"][sampled].T
            logits = jnp.concatenate([positive, negative], axis=-1)
            return jnp.mean(cross_entropy(logits, jnp.zeros_like(batch["target"])))

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        squares = jax.tree.map(lambda s, g: s + g * g, state["squares"], grads)
        update = jax.tree.map(lambda p, g, s: p - 0.1 * g * jax.lax.rsqrt(s + 1e-3), state["params"], grads, squares)
        return {**state, "params": update, "squares": squares, "count": state["count"] + 1}, {"loss": loss}

    def state() -> Params:
        rng = generator(82)
        params = {
            "in": normal(rng, (vocabulary, WIDTH), dtype),
            "mix": normal(rng, (WIDTH, WIDTH), dtype, 0.3),
            "out": normal(rng, (vocabulary, WIDTH), dtype, 0.3),
        }
        squares = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), params)
        return {"params": params, "squares": squares, "key": jax.random.key(82), "count": jnp.zeros((), jnp.int32)}

    def batch(i: int) -> Params:
        rng = generator(82, i)
        return {"words": integers(rng, (16, 8), vocabulary), "target": integers(rng, (16,), vocabulary)}

    return functional(step, state, batch)


GRAPH_PROGRAMS = (
    Program(
        "graph_network", graph_network, False, "segment_sum, segment_max, gathers along edges; graphs share one array"
    ),
    Program("gathers_and_scatters", gathers_and_scatters, False, "advanced indexing, at[].add/set/max, dynamic slices"),
    Program(
        "large_vocabulary", large_vocabulary, True, "scatter-add gradient into 4096 rows, sampled gather in the step"
    ),
)
