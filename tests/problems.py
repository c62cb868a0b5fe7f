"""Shared by tests of planning: small steps, random steps, and sharding problems small enough for brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.cluster import Cluster
from autoshard.costmodel import find_lives, materialized
from autoshard.ir import Graph, MeshShape, StepInfo, trace
from autoshard.plan import Plan
from autoshard.search import Problem, Usage, make_plan, named_mesh, prepare
from autoshard.search.memory_rows import MemoryTable, memory_table
from autoshard.search.model import Model, build_model
from autoshard.search.ops import Ops, list_ops
from autoshard.search.pricing import Pricer
from tests.helpers import eager_cluster


@dataclass(frozen=True, slots=True)
class Step:
    """A step of flat arrays; its first `state` arguments come back updated as its first results."""

    fun: Callable[..., list[jax.Array]]
    args: tuple[jax.Array, ...]
    state: int

    def graph(self) -> Graph:
        return trace(self.fun, self.args)

    def info(self, donated: Sequence[int] = ()) -> StepInfo:
        inputs, outputs = len(self.args), len(jax.eval_shape(self.fun, *self.args))
        return StepInfo(
            input_paths=tuple(f"in/{i}" for i in range(inputs)),
            input_arguments=tuple(range(inputs)),
            argument_names=tuple(f"arg{i}" for i in range(inputs)),
            output_paths=tuple(f"out/{o}" for o in range(outputs)),
            output_parts=tuple(range(outputs)),
            pairs=tuple((i, i) for i in range(self.state)),
            donated=tuple(donated),
        )

    def plan(self, shape: tuple[int, ...] | None = (8,), cluster: Cluster | None = None, **options: Any) -> Plan:
        mesh = None if shape is None else named_mesh(shape)
        defaults: dict[str, Any] = {"pins": {}, "memory_limit": None, "budget_s": 20.0, "seed": 0}
        graph = prepare(self.graph(), options.get("on_event"))
        return make_plan(graph, self.info(), cluster or eager_cluster(), mesh, **(defaults | options))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp(width: int = 16, batch: int = 8, layers: int = 2) -> Step:
    """Dense layers, squared error, gradient descent."""

    def fun(*args: jax.Array) -> list[jax.Array]:
        *params, x, y = args

        def loss(params: list[jax.Array]) -> jax.Array:
            h = x
            for w, b in zip(params[::2], params[1::2], strict=True):
                h = jnp.tanh(h @ w + jnp.broadcast_to(b, (batch, width)))
            return jnp.mean((h - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return [*(p - 0.1 * g for p, g in zip(params, grads, strict=True)), value]

    params: list[jax.Array] = []
    for k in range(layers):
        params += [normal(k, width, width) * 0.3, normal(100 + k, width)]
    return Step(fun, (*params, normal(1000, batch, width), normal(1001, batch, width)), 2 * layers)


def looped() -> Step:
    """A scan over stacked weights, a condition, a while loop and a shared value."""

    def fun(stack: jax.Array, x: jax.Array) -> list[jax.Array]:
        def loss(stack: jax.Array) -> jax.Array:
            h, sums = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(axis=0)), x, stack)
            h = jax.lax.cond(h.sum() > 0, lambda h: h + x, lambda h: h * 2, h)
            return (h * x).mean() + sums.mean()

        value, grad = jax.value_and_grad(loss)(stack)
        _, power = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ stack[0]), (jnp.int32(0), x))
        return [stack - 0.1 * grad, value, power]

    return Step(fun, (normal(0, 4, 16, 16) * 0.3, normal(1, 8, 16)), 1)


MOVES = (
    *("matmul",) * 4,
    *("add", "tanh", "softmax", "centre", "gram", "transpose", "scan", "cond", "while"),
    *("gather", "scatter", "concatenate", "slice", "remat", "heads", "max"),
)


def random_step(seed: int, moves: int = 5) -> Step:
    """Gradient descent on a random small program; matrices of a few sizes, some of them odd."""
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([8, 16]))
    shapes = [(rows, int(rng.choice([8, 16, 6])))]
    program: list[tuple[str, int, int, int]] = []
    weights: list[tuple[int, ...]] = []
    for _ in range(moves):
        move = str(rng.choice(MOVES))
        a = len(shapes) - 1 if rng.random() < 0.7 else int(rng.integers(len(shapes)))
        m, n = shapes[a]
        same = [i for i, shape in enumerate(shapes) if shape == (m, n)]
        b, weight = int(rng.choice(same)), len(weights)
        if move == "heads" and n % 2:  # two heads need an even width
            move = "tanh"
        made = (m, n)
        match move:
            case "matmul":
                made = (m, int(rng.choice([4, 8, 16, 6])))
                weights.append((n, made[1]))
            case "gram":
                made = (n, n)
            case "transpose":
                made = (n, m)
            case "scan":
                weights.append((3, n, n))
            case "remat" | "while":
                weights.append((n, n))
            case "concatenate":
                made = (m, 2 * n)
            case "slice":
                made = (m, n // 2)
            case _:
                pass
        program.append((move, a, b, weight))
        shapes.append(made)

    def fun(*args: jax.Array) -> list[jax.Array]:
        *params, x = args

        def loss(params: list[jax.Array]) -> jax.Array:
            values = [x]
            for move, a, b, weight in program:
                w = params[weight] if weight < len(params) else x
                values.append(_move(move, values[a], values[b], w))
            return jnp.mean(values[-1] ** 2) + sum((jnp.mean(v) for v in values[1:]), jnp.float32(0))

        value, grads = jax.value_and_grad(loss)(params)
        return [*(p - 0.1 * g for p, g in zip(params, grads, strict=True)), value]

    params = tuple(normal(k, *shape) * 0.3 for k, shape in enumerate(weights))
    return Step(fun, (*params, normal(99, *shapes[0])), len(params))


def _move(move: str, v: jax.Array, other: jax.Array, w: jax.Array) -> jax.Array:
    order = jnp.asarray(np.random.default_rng(7).permutation(v.shape[0]), jnp.int32)
    match move:
        case "matmul":
            return v @ w
        case "add":
            return v + other
        case "tanh":
            return jnp.tanh(v)
        case "softmax":
            return jax.nn.softmax(v, axis=1)
        case "centre":
            return v - jnp.broadcast_to(v.mean(axis=0), v.shape)
        case "gram":
            return v.T @ v / v.shape[0]
        case "transpose":
            return v.T
        case "scan":
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), v, w)[0]
        case "cond":
            return jax.lax.cond(v.sum() > 0, lambda v: v * 2, lambda v: v + other, v)
        case "while":
            return jax.lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c @ w), v)
        case "gather":
            return v[order]
        case "scatter":
            return jnp.zeros_like(v).at[order].add(other)
        case "concatenate":
            return jnp.concatenate([v, other], axis=1)
        case "slice":
            return v[:, : v.shape[1] // 2]
        case "remat":
            return jax.checkpoint(lambda v: jnp.tanh(v @ w))(v)
        case "heads":
            split = v.reshape(v.shape[0], 2, v.shape[1] // 2)
            return jnp.einsum("ihd,jhd->ijh", split, split).sum(axis=1).repeat(v.shape[1] // 2, axis=1)
        case "max":
            return v / jnp.broadcast_to(jnp.abs(v).max(axis=1, keepdims=True) + 1, v.shape)
        case _:
            raise AssertionError(move)


@dataclass(frozen=True, slots=True)
class Ground:
    """A step modelled on one mesh."""

    graph: Graph
    ops: Ops
    model: Model
    pricer: Pricer
    memory: MemoryTable


def ground(step: Step, mesh: MeshShape, cluster: Cluster, tie: bool = True, donated: Sequence[int] = ()) -> Ground:
    graph = prepare(step.graph())
    info = step.info(donated)
    ops = list_ops(graph, info.pairs)
    written = materialized(graph)
    pricer = Pricer(cluster, mesh, written.__contains__)
    model = build_model(ops, mesh, {}, tie)
    lives = find_lives(graph, [(i, o) for i, o in info.pairs if i in set(donated)], cluster.device(0).kind)
    return Ground(graph, ops, model, pricer, memory_table(model, lives, pricer.sizes))


def random_answers(model: Model, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(int(rng.integers(len(model.choices[k]))) for k in model.leaders) for _ in range(count)]


def random_problem(seed: int, tight: bool, nodes: int = 6, choices: int = 4, times: int = 3) -> Problem:
    """Random costs, some of them infinite; with a memory limit that mostly matters if `tight`."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, choices + 1)) for _ in range(rng.integers(2, nodes + 1))]
    costs = tuple(np.where(rng.random(n) < 0.1, np.inf, rng.random(n)) if n > 1 else rng.random(n) for n in sizes)
    edges = {
        (i, j): rng.random((sizes[i], sizes[j])) * (rng.random((sizes[i], sizes[j])) < 0.7)
        for i, j in itertools.combinations(range(len(sizes)), 2)
        if rng.random() < 0.6
    }
    usages = tuple(
        Usage(i, t, t + 1, rng.integers(0, 10, n).astype(float)) for i, n in enumerate(sizes) for t in range(times)
    )
    limit = float(rng.integers(2 * len(sizes), 5 * len(sizes))) if tight else None
    return Problem(costs, edges, usages, np.ones(times), limit)


def brute_force(problem: Problem) -> float:
    """The least cost of all choices that fit, infinite if there is none: one axis a node."""
    nodes = len(problem.costs)

    def along(table: Any, *axes: int) -> Any:
        shape = [1] * nodes
        for axis, n in zip(axes, table.shape, strict=True):
            shape[axis] = n
        return table.reshape(shape)

    total = np.zeros(tuple(len(c) for c in problem.costs))
    for i, cost in enumerate(problem.costs):
        total = total + along(cost, i)
    for (i, j), edge in problem.edges.items():
        total = total + along(edge, i, j)
    if problem.limit is not None:
        for t, base in enumerate(problem.base):
            used = np.full((1,) * nodes, base)
            for u in problem.usages:
                if u.start <= t < u.end:
                    used = used + along(u.nbytes, u.node)
            total = np.where(used <= problem.limit * (1 + 1e-12), total, np.inf)
    return float(total.min())


def least_shortage(problem: Problem) -> float:
    """The least that the limit has to be raised by for some answer of finite cost; infinite if there is none."""
    assert problem.limit is not None
    best = np.inf
    for choice in itertools.product(*(range(len(c)) for c in problem.costs)):
        if np.isfinite(problem.cost(choice)):
            best = min(best, float(problem.usage(choice).max(initial=0.0)) - problem.limit)
    return best
