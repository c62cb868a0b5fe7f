"""The zoo on one device under plain jit: every program runs, stays finite, moves, and keeps its dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from . import PROGRAMS, Program, get, plain_jit, run

pytestmark = pytest.mark.implicit_promotion


def inexact(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves if np.issubdtype(x.dtype, np.inexact)}


def buffers(tree: Any) -> list[jax.Array]:
    """Every jax array of the tree, typed keys as their raw bits, which are the same buffer."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]


def test_names_are_unique_and_enough() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(names) >= 36
    assert len(set(names)) == len(names)
    assert all(get(name).name == name for name in names)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_runs(program: Program) -> None:
    case = program.build(jnp.float32)
    observed = run(case, plain_jit(case))
    assert len(observed) == 3
    assert len({jax.tree.structure(step) for step in observed}) == 1

    first, last = inexact(observed[0]), inexact(observed[-1])
    for values in map(inexact, observed):
        for path, x in values.items():
            assert x.dtype in (np.float32, np.complex64), f"{path} is {x.dtype}"
            assert np.all(np.isfinite(x)), f"{path} is not finite"
    # A leaf worth sharding, and training that goes on: most of the numbers move between the first and the last step.
    assert max(x.size for x in jax.tree.leaves(observed[-1])) >= 512
    moved = sum(x.size for path, x in last.items() if np.any(x != first[path]))
    assert 2 * moved > sum(x.size for x in last.values())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_arguments_are_fresh(program: Program) -> None:
    """Two calls of `fresh` agree in every bit and share no buffer, nor do two leaves of one call."""
    case = program.build(jnp.float32)
    left, right = buffers(case.fresh()), buffers(case.fresh())
    for a, b in zip(left, right, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    places = [x.unsafe_buffer_pointer() for x in (*left, *right)]
    assert len(set(places)) == len(places) > 0
