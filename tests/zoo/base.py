"""What a zoo program is: a real single-device train step and all that is needed to drive it.

A program is built for one float dtype; its case then makes fresh arguments, feeds the result of one step
into the next, and picks out what two runs must agree on. Nothing here knows about sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Tree = Any
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One program at one dtype.

    `fresh()` gives new arguments for the first step (never shared: callers donate them, NNX mutates them);
    `advance(args, kwargs, out, i)` turns the result of step i into the arguments of step i + 1;
    `observe(args, kwargs, out)` is the pytree of arrays to compare after a step: the whole state and the metrics.
    """

    step: Callable[..., Any]
    fresh: Callable[[], Arguments]
    advance: Callable[[tuple[Any, ...], dict[str, Any], Any, int], Arguments]
    observe: Callable[[tuple[Any, ...], dict[str, Any], Any], Tree]
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A named case for either dtype; `microbatch` says that splitting over examples keeps the mathematics."""

    name: str
    build: Callable[[Any], Case]
    microbatch: bool
    notes: str


def functional(step: Callable[..., Any], state: Callable[[], Tree], batch: Callable[[int], Tree]) -> Case:
    """The usual case: `step(state, batch) -> (state, metrics)`, with `batch(i)` for step i."""
    return Case(
        step=step,
        fresh=lambda: ((state(), batch(0)), {}),
        advance=lambda args, kwargs, out, i: ((out[0], batch(i + 1)), kwargs),
        observe=lambda args, kwargs, out: out,
    )


def run(case: Case, step: Callable[..., Any], steps: int = 3) -> list[Tree]:
    """Drives `step` (anything with the signature of `case.step`); returns what is observed after each step, as numpy."""
    args, kwargs = case.fresh()
    observed: list[Tree] = []
    for i in range(steps):
        out = step(*args, **kwargs)
        observed.append(to_numpy(case.observe(args, kwargs, out)))
        if i + 1 < steps:
            args, kwargs = case.advance(args, kwargs, out, i)
    return observed


def plain_jit(case: Case) -> Callable[..., Any]:
    """The single-device reference: `nnx.jit` or `eqx.filter_jit` where the arguments hold such objects, else `jax.jit`."""
    args, kwargs = case.fresh()
    leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, (nnx.Module, nnx.Optimizer, eqx.Module)))
    if any(isinstance(x, (nnx.Module, nnx.Optimizer)) for x in leaves):
        return nnx.jit(case.step, static_argnums=case.static_argnums, static_argnames=case.static_argnames)
    if any(isinstance(x, eqx.Module) for x in leaves):
        return eqx.filter_jit(case.step)
    return jax.jit(case.step, static_argnums=case.static_argnums, static_argnames=case.static_argnames)


def to_numpy(tree: Tree) -> Tree:
    """Copies every array leaf to numpy, typed keys as their raw bits."""

    def leaf(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.array(x)

    return jax.tree.map(leaf, tree)


def distances(left: Tree, right: Tree) -> Iterator[tuple[str, float]]:
    """For every leaf its path and ||left - right|| / ||right|| (0 when both are 0); the trees must match in structure."""
    paths = jax.tree_util.tree_leaves_with_path(right)
    others = jax.tree.leaves(left)
    for (path, r), l in zip(paths, others, strict=True):
        assert l.shape == r.shape, f"{jax.tree_util.keystr(path)}: shapes {l.shape} and {r.shape}"
        if r.dtype == jax.dtypes.float0:
            continue
        wide = np.complex128 if np.iscomplexobj(r) else np.float64
        gap = float(np.linalg.norm(np.ravel(l.astype(wide) - r.astype(wide))))
        size = float(np.linalg.norm(np.ravel(r.astype(wide))))
        yield jax.tree_util.keystr(path), gap / size if size else gap


def cast(tree: Tree, dtype: Any) -> Tree:
    """Every float leaf in `dtype` (complex leaves in its complex partner), all leaves as new jax arrays."""
    pair = jnp.complex128 if jnp.dtype(dtype) == jnp.float64 else jnp.complex64

    def leaf(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.array(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return jnp.array(x, dtype=pair)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.array(x, dtype=dtype)
        return jnp.array(x)

    return jax.tree.map(leaf, tree)
