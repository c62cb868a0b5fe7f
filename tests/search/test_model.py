"""The sharding problem of a graph: exact against brute force and against the layout, on small and random steps."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.costmodel import find_lives
from autoshard.errors import InfeasibleError
from autoshard.search import named_mesh, solve
from autoshard.search.layout import estimate, lay_out
from autoshard.search.memory_rows import copy_bytes, peak_times, priced
from autoshard.search.model import build_problem
from tests.helpers import eager_cluster, slow_links
from tests.problems import Step, brute_force, ground, looped, mlp, normal, random_answers, random_step

MESHES = {"8": (8,), "2x4": (2, 4)}


def repeated() -> Step:
    """Eight like layers that all read one value."""

    def fun(*args: jax.Array) -> list[jax.Array]:
        *params, x = args

        def loss(params: list[jax.Array]) -> jax.Array:
            h = x
            for w in params:
                h = jnp.tanh(h @ w) + x
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return [*(p - 0.1 * g for p, g in zip(params, grads, strict=True)), value]

    return Step(fun, (*(normal(k, 16, 16) * 0.3 for k in range(8)), normal(9, 8, 16)), 8)


STEPS = {"mlp": mlp, "looped": looped, "repeated": repeated, "deep": lambda: mlp(layers=6)}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("name", [*STEPS, *range(20)])
def test_the_estimate_is_the_layouts_time(name: str | int, tie: bool, mesh: str) -> None:
    step = random_step(name) if isinstance(name, int) else STEPS[name]()
    on = ground(step, named_mesh(MESHES[mesh]), eager_cluster(), tie)
    for answer in random_answers(on.model, 5):
        assert estimate(on.model, answer, on.pricer) == pytest.approx(
            lay_out(on.model, answer, on.pricer).time_s, rel=1e-9
        )


def chain(seed: int) -> Step:
    """A random matrix product chain, with a nonlinearity and a value read twice here and there."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.choice([2, 4, 6, 8], size=4)]
    nonlinear, again = rng.random(2) < 0.5

    def fun(a: jax.Array, b: jax.Array, c: jax.Array) -> list[jax.Array]:
        first = jnp.tanh(a @ b) if nonlinear else a @ b
        return [first @ c, first.sum(axis=0)] if again else [first @ c]

    return Step(fun, tuple(normal(k, *sizes[k : k + 2]) for k in range(3)), 0)


@pytest.mark.parametrize("limited", [False, True], ids=["free", "limited"])
@pytest.mark.parametrize("seed", range(30))
def test_the_answer_equals_brute_force(seed: int, limited: bool) -> None:
    on = ground(chain(seed), named_mesh((2,)), eager_cluster(2))
    problem = build_problem(on.model, on.pricer)
    if limited:
        answers = random_answers(on.model, 40, seed)
        curves = [on.memory.curve(answer) for answer in answers]
        times = peak_times(curves[0], 8)
        peaks = sorted(float(curve[times].max()) for curve in curves)
        problem = on.memory.constrain(problem, times, peaks[len(peaks) // 4])
    assert np.prod([len(c) for c in problem.costs]) < 1_000_000
    solution = solve(problem, budget_s=20.0, seed=0)
    assert problem.fits(solution.choice)
    assert solution.cost == pytest.approx(problem.cost(solution.choice), rel=1e-9)
    assert solution.cost == pytest.approx(brute_force(problem), rel=1e-9)


@pytest.mark.parametrize("name", STEPS)
def test_the_problem_is_never_below_the_estimate(name: str) -> None:
    on = ground(STEPS[name](), named_mesh((2, 4)), eager_cluster())
    problem = build_problem(on.model, on.pricer)
    for answer in random_answers(on.model, 10):
        assert problem.cost(answer) >= estimate(on.model, answer, on.pricer) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_memory_rows_are_the_curve(seed: int) -> None:
    on = ground(random_step(seed), named_mesh((2, 4)), eager_cluster())
    problem = build_problem(on.model, on.pricer)
    for answer in random_answers(on.model, 5, seed):
        curve = on.memory.curve(answer)
        times = peak_times(curve, 8)
        np.testing.assert_allclose(on.memory.constrain(problem, times, 1.0).usage(answer), curve[sorted(times)])


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_never_above_a_plain_plan(name: str, shape: tuple[int, ...]) -> None:
    plan = STEPS[name]().plan(shape)
    names = {a.name.split(",")[0] for a in plan.alternatives}
    assert {"data parallel", "fully sharded (ZeRO-3)", "tensor parallel (Megatron)"} <= names
    for alternative in plan.alternatives:
        if "does not fit" not in alternative.note:
            assert plan.time_s <= alternative.time_s * (1 + 1e-9), alternative.name


@pytest.mark.parametrize(("name", "part"), [("deep", 0.9), ("looped", 0.7), ("looped", 0.3)])
def test_the_limit_holds(name: str, part: float) -> None:
    step = STEPS[name]()
    free = step.plan((2, 4), slow_links())
    limit = int(part * free.memory.peak_bytes)
    tight = step.plan((2, 4), slow_links(), memory_limit=limit)
    assert tight.memory.peak_bytes <= limit
    assert tight.memory_limit == limit
    assert tight.time_s >= free.time_s * (1 - 1e-9)


def test_only_copies_are_priced() -> None:
    on = ground(mlp(), named_mesh((2, 4)), eager_cluster())
    problem = build_problem(on.model, on.pricer)
    lives = find_lives(on.graph, (), "cpu")
    dear = priced(problem, copy_bytes(on.model, lives, range(lives.steps), on.pricer), 1.0)
    paid: list[bool] = []
    for answer in random_answers(on.model, 20):
        grown = dear.cost(answer) - problem.cost(answer)
        assert grown >= 0
        if not lay_out(on.model, answer, on.pricer).moves:
            assert grown == 0
        paid.append(grown > 0)
    whole = [next(i for i, c in enumerate(on.model.choices[k]) if not c.split_axes) for k in on.model.leaders]
    assert dear.cost(whole) == problem.cost(whole)
    assert any(paid)


def test_what_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(InfeasibleError) as error:
        mlp(width=256, batch=64).plan((8,), memory_limit=100_000)
    text = str(error.value)
    need = re.search(r"the step needs at least about (\S+) KiB on each device of eager \(", text)
    assert need is not None, text
    assert 100_000 < float(need[1]) * 1024 < 1_000_000
    assert "the limit is 97.66 KiB" in text
    assert "to do: use devices with more memory" in text


@pytest.mark.parametrize("name", ["mlp", "looped"])
def test_the_same_plan_twice(name: str) -> None:
    step = STEPS[name]()
    assert step.plan((2, 4)).to_json() == step.plan((2, 4)).to_json()
    limit = int(step.plan((8,), slow_links()).memory.peak_bytes * 0.9)
    tight = [step.plan((8,), slow_links(), memory_limit=limit).to_json() for _ in range(2)]
    assert tight[0] == tight[1]


def test_layers_are_counted_once_each() -> None:
    """A kind's cost times its members is what the members cost apart."""
    step = mlp(layers=6)
    tied = ground(step, named_mesh((8,)), eager_cluster())
    apart = ground(step, named_mesh((8,)), eager_cluster(), tie=False)
    assert len(tied.model.leaders) < len(apart.model.leaders)
    (answer,) = random_answers(tied.model, 1)
    chosen = lay_out(tied.model, answer, tied.pricer)
    leader_of = {k: v for v, k in enumerate(apart.model.leaders)}
    spread = [0] * len(apart.model.leaders)
    for op, choice in zip(tied.ops.ops, chosen.choice, strict=True):
        if op.index in leader_of:
            spread[leader_of[op.index]] = apart.model.choices[op.index].index(choice)
    assert estimate(apart.model, spread, apart.pricer) == pytest.approx(chosen.time_s, rel=1e-9)


def test_layouts_are_frozen() -> None:
    on = ground(mlp(), named_mesh((8,)), eager_cluster())
    layout = lay_out(on.model, random_answers(on.model, 1)[0], on.pricer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.compute_s = 0.0  # pyright: ignore[reportAttributeAccessIssue]
