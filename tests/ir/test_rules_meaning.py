"""What a rule calls parallel is parallel: other parts of the operands make no difference to a part of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.ir import Apply, FactorKind, FactorRule, evaluate, factor_rule
from autoshard.ir.graph import Graph, Value
from autoshard.ir.rule_builder import shape_of
from autoshard.ir.rules_other import OPAQUE

from .rule_examples import EXAMPLES, equations_of, graph_of, signature

pytestmark = pytest.mark.implicit_promotion

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CHECKED: set[str] = set()
"""Signatures of equations that a test of this process has seen already."""


def arrays(equation: Apply, seed: int) -> list[Any]:
    generator = np.random.default_rng(seed)
    made: list[Any] = []
    for atom in equation.inputs:
        shape, dtype = shape_of(atom.aval), atom.aval.dtype
        if not isinstance(atom, Value):
            made.append(atom.value)
        elif jnp.issubdtype(dtype, jax.dtypes.prng_key):
            keys = jax.random.split(jax.random.key(seed), max(1, int(np.prod(shape))))
            made.append(keys.reshape(shape))
        elif dtype == np.bool_:
            made.append(generator.random(shape) < 0.5)
        elif np.issubdtype(dtype, np.integer):
            made.append(generator.integers(0, 3, shape).astype(dtype))
        else:
            made.append(generator.uniform(0.1, 0.9, shape).astype(dtype))
    return made


def at_zero(dims: Any, rule: FactorRule, factor: int, shape: tuple[int, ...]) -> np.ndarray | None:
    """Where in an array a factor's index is 0; None where the factor is not in it."""
    for dim, factors in enumerate(dims):
        if factor in factors:
            sizes = [rule.sizes[f] for f in factors]
            index = np.unravel_index(np.arange(shape[dim]), sizes)[factors.index(factor)]
            return (index == 0).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return None


def mixed(old: Any, new: Any, where: np.ndarray | None) -> Any:
    """The old array, with the new one where the factor's index is 0."""
    if where is None:
        return old
    if isinstance(old, jax.Array) and jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        return jnp.where(where, new, old)
    return np.where(where, new, old).astype(old.dtype)


def runner(equation: Apply) -> Callable[[list[Any]], list[np.ndarray]]:
    """The equation as a compiled function of its operands."""
    inputs = tuple(Value(atom.aval) for atom in equation.inputs)
    alone = Apply(
        equation.primitive,
        inputs,
        equation.outputs,
        equation.params,
        equation.graphs,
        equation.effects,
        equation.context,
        equation.place,
    )
    graph = Graph(inputs, (), (alone,), equation.outputs, frozenset())
    compiled = jax.jit(lambda args: evaluate(graph, args), compiler_options=QUICK)

    def raw(x: jax.Array) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return lambda args: [raw(x) for x in compiled(args)]


@pytest.mark.parametrize(("function", "avals"), [pytest.param(*row[1:], id=row[0]) for row in EXAMPLES])
def test_parallel_factors_do_not_mix(function: Callable[..., Any], avals: tuple[Any, ...]) -> None:
    for equation in equations_of(graph_of(function, avals)):
        rule = factor_rule(equation)
        if equation.name in OPAQUE or not rule.of_kind(FactorKind.PARALLEL) or signature(equation) in CHECKED:
            continue
        CHECKED.add(signature(equation))
        run = runner(equation)
        first, second = arrays(equation, 1), arrays(equation, 2)
        plain = run(first)
        for factor in rule.of_kind(FactorKind.PARALLEL):
            where = [
                at_zero(dims, rule, factor, shape_of(atom.aval))
                for dims, atom in zip(rule.operands, equation.inputs, strict=True)
            ]
            if all(w is None for w in where):
                continue
            changed = run([mixed(a, b, w) for a, b, w in zip(first, second, where, strict=True)])
            for dims, value, old, new in zip(rule.results, equation.outputs, plain, changed, strict=True):
                here = at_zero(dims, rule, factor, shape_of(value.aval))
                # A result without the factor depends on nothing that has it.
                away = np.ones((1,) * len(dims), bool) if here is None else ~here
                away = np.broadcast_to(away.reshape(away.shape + (1,) * (old.ndim - away.ndim)), old.shape)
                np.testing.assert_allclose(
                    old[away].astype(np.complex128),
                    new[away].astype(np.complex128),
                    rtol=1e-6,
                    err_msg=f"{equation.name}: {rule}, factor {factor}",
                )
