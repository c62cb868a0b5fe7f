"""marin-community/marin#7024 (shared/CASES.md): mixtures of experts in a pipeline, attention as a custom call.

The call is LAPACK's triangular solver by XLA's foreign function interface, the core of delta-rule attention
(Yang et al., NeurIPS 2024): each position's value less what earlier keys predict of it. It has no batching rule.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from autoshard import autoshard
from autoshard.errors import MicrobatchError
from tests.helpers import eager_cluster
from tests.zoo.base import distances

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(600)]

WIDTH, TIME, EXPERTS = 16, 8, 4


@pytest.fixture(autouse=True, scope="module")
def lapack() -> None:
    """Jaxlib looks LAPACK up at its first use."""
    jax.block_until_ready(jnp.linalg.qr(jnp.eye(2)))


def foreign_solve(matrices: Any, right: Any, turned: bool) -> Any:
    """matrices: (n, t, t), ones on the diagonal, what is above is not read; right: (n, t, d)."""
    by_columns = (0, 2, 1)
    call: Any = jax.ffi.ffi_call(
        "lapack_strsm_ffi",
        jax.ShapeDtypeStruct(right.shape, right.dtype),
        input_layouts=[by_columns, by_columns],
        output_layouts=by_columns,
        input_output_aliases={1: 0},
    )
    flags = {"side": "L", "uplo": "L", "trans_x": "T" if turned else "N", "diag": "U"}
    return call(matrices, right, **{name: np.uint8(ord(letter)) for name, letter in flags.items()})


def in_parts(turned: bool) -> Any:
    """The call, with word that its matrices are independent: on each device of its own."""

    @custom_partitioning
    def solve(matrices: Any, right: Any) -> Any:
        return foreign_solve(matrices, right, turned)

    def partition(mesh: Any, _operands: Any, result: Any) -> Any:
        del mesh
        place = result.sharding
        rows = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec(*place.spec[:1]))
        return place.mesh, lambda a, b: foreign_solve(a, b, turned), rows, (rows, rows)

    solve.def_partition(
        partition=partition, sharding_rule="n t s, n s d -> n t d", need_replication_factors=("t", "s", "d")
    )
    return solve


def attention_by(forward: Any, backward: Any) -> Any:
    """(keys, values) to what values are beyond what earlier keys predict, by two solvers."""

    @jax.custom_vjp
    def solved(lower: Any, values: Any) -> Any:
        return forward(lower, values)

    def ahead(lower: Any, values: Any) -> Any:
        found = forward(lower, values)
        return found, (lower, found)

    def back(kept: Any, cotangent: Any) -> Any:
        lower, found = kept
        right = backward(lower, cotangent)
        return -jnp.tril(jnp.einsum("ntd,nsd->nts", right, found), -1), right

    solved.defvjp(ahead, back)

    def attention(keys: Any, values: Any) -> Any:
        likeness = jnp.tril(jnp.einsum("ntd,nsd->nts", keys, keys) / WIDTH, -1)
        return solved(likeness + jnp.eye(TIME), values)

    return attention


def make_state() -> Any:
    draw = np.random.default_rng(0)

    def matrix(*shape: int) -> Any:
        return (draw.normal(size=shape) / np.sqrt(WIDTH)).astype("f4")

    return [
        {
            "keys": matrix(WIDTH, WIDTH),
            "values": matrix(WIDTH, WIDTH),
            "router": matrix(WIDTH, EXPERTS),
            "up": matrix(EXPERTS, WIDTH, 2 * WIDTH),
            "down": matrix(EXPERTS, 2 * WIDTH, WIDTH),
        }
        for _ in range(2)
    ]


def examples(size: int = 32) -> Any:
    return np.random.default_rng(1).normal(size=(size, TIME, WIDTH)).astype("f4")


def experts(layer: Any, x: Any, capacity: int) -> Any:
    """x: (groups, tokens, width). Each token goes to one expert; those beyond an expert's capacity go past it."""
    gates = jax.nn.softmax(x @ layer["router"], axis=-1)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = jnp.sum((jnp.cumsum(chosen, 1) - 1) * chosen, -1).astype(jnp.int32)
    dispatch = jnp.einsum("gte,gtc->gtec", chosen, jax.nn.one_hot(place, capacity))
    slots = jnp.einsum("gtec,gtw->gecw", dispatch, x)
    made = jnp.einsum("gech,ehw->gecw", jnp.tanh(jnp.einsum("gecw,ewh->gech", slots, layer["up"])), layer["down"])
    return jnp.einsum("gtec,gecw->gtw", dispatch * (gates * chosen)[..., None], made)


def by_example(layer: Any, x: Any) -> Any:
    return experts(layer, x, TIME // EXPERTS + 1)


def by_batch(layer: Any, x: Any) -> Any:
    """The whole batch is one routing group."""
    return experts(layer, x.reshape(1, -1, WIDTH), x.shape[0] * TIME // EXPERTS).reshape(x.shape)


def by_part(layer: Any, x: Any) -> Any:
    """Routing groups of four examples: of 32, g, g + 8, g + 16 and g + 24, which one microbatch of four has."""
    tokens = x.reshape(4, -1, TIME, WIDTH).swapaxes(0, 1)
    made = experts(layer, tokens.reshape(-1, 4 * TIME, WIDTH), 4 * TIME // EXPERTS)
    return made.reshape(tokens.shape).swapaxes(0, 1).reshape(x.shape)


def by_fours(layer: Any, x: Any) -> Any:
    """Four routing groups, whatever the number of examples."""
    tokens = x.reshape(-1, 4, TIME, WIDTH).swapaxes(0, 1)
    made = experts(layer, tokens.reshape(4, -1, WIDTH), 4 * TIME // EXPERTS)
    return made.reshape(tokens.shape).swapaxes(0, 1).reshape(x.shape)


def normalized(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3)


def make_step(attention: Any, mixture: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            x = batch
            for layer in state:
                h = normalized(x)
                x = x + attention(h @ layer["keys"], h @ layer["values"])
                x = x + mixture(layer, normalized(x))
            return jnp.mean(x**2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

    return step


KNOWN = attention_by(in_parts(False), in_parts(True))


def agrees(step: Any, **options: Any) -> None:
    mine: Any = autoshard(step, devices=eager_cluster(), donate_argnums=(), **options)
    jitted: Any = jax.jit(step)
    state, batch = make_state(), examples()
    found, plain = jax.device_get(mine(state, batch)), jax.device_get(jitted(state, batch))
    assert max(gap for _, gap in distances(found, plain)) < 1e-5


def test_the_call_cannot_be_batched() -> None:
    matrices, right = jnp.ones((2, 3, TIME, TIME)), jnp.ones((2, 3, TIME, WIDTH))
    with pytest.raises(NotImplementedError):
        jax.vmap(in_parts(False))(matrices, right)
    with pytest.raises(NotImplementedError):
        jax.vmap(lambda a, b: foreign_solve(a, b, False))(matrices, right)


@pytest.mark.parametrize("mixture", [by_example, by_part])
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_it_passes_through_stages(stages: int, mixture: Any) -> None:
    agrees(make_step(KNOWN, mixture), stages=stages, microbatches=4, mesh=(8 // stages,))


@pytest.mark.parametrize("mixture", [by_batch, by_fours])
def test_groups_over_microbatches_are_refused_by_line(mixture: Any) -> None:
    step = autoshard(make_step(KNOWN, mixture), stages=2, microbatches=4, devices=eager_cluster())
    with pytest.raises(MicrobatchError, match=r"test_pipeline_custom_calls.py:\d+.* couples the examples"):
        step.plan(make_state(), examples())


def test_one_capacity_for_the_batch_runs_as_one_microbatch() -> None:
    agrees(make_step(KNOWN, by_batch), stages=2, microbatches=1, mesh=(4,))


def test_a_call_that_says_nothing_of_its_examples_is_refused_by_line() -> None:
    def plainly(turned: bool) -> Any:
        return lambda a, b: foreign_solve(a, b, turned)

    unknown = attention_by(plainly(False), plainly(True))
    step = autoshard(make_step(unknown, by_example), stages=2, microbatches=4, devices=eager_cluster())
    with pytest.raises(MicrobatchError, match=r"ffi_call at .*test_pipeline_custom_calls.py:\d+") as caught:
        step.plan(make_state(), examples())
    assert "needs all examples at once" in str(caught.value)
    assert "docs/factor-rules.md" in str(caught.value)
    agrees(make_step(unknown, by_example), stages=2, microbatches=1, mesh=(4,))
