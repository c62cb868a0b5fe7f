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
    """Drives `step` (anything with the signature of `case.step`); returns what each step shows, as numpy."""
    args, kwargs = case.fresh()
    observed: list[Tree] = []
    for i in range(steps):
        out = step(*args, **kwargs)
        observed.append(to_numpy(case.observe(args, kwargs, out)))
        if i + 1 < steps:
            args, kwargs = case.advance(args, kwargs, out, i)
    return observed


def plain_jit(case: Case) -> Callable[..., Any]:
    """The single-device reference: `nnx.jit` or `eqx.filter_jit` where arguments are such objects, else `jax.jit`."""
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
    """For every leaf its path and ||left - right|| / ||right|| (||left|| if right is 0); the trees must match."""
    paths = jax.tree_util.tree_leaves_with_path(right)
    others = jax.tree.leaves(left)
    for (path, r), other in zip(paths, others, strict=True):
        assert other.shape == r.shape, f"{jax.tree_util.keystr(path)}: shapes {other.shape} and {r.shape}"
        if r.dtype == jax.dtypes.float0:
            continue
        wide = np.complex128 if np.iscomplexobj(r) else np.float64
        gap = float(np.linalg.norm(np.ravel(other.astype(wide) - r.astype(wide))))
        size = float(np.linalg.norm(np.ravel(r.astype(wide))))
        yield jax.tree_util.keystr(path), gap / size if size else gap


def check_runs(mine: list[Tree], plain: list[Tree], limit: float) -> None:
    """Asserts that two runs agree after each step, by norm, and in every dtype."""
    for after, (a, b) in enumerate(zip(mine, plain, strict=True)):
        for path, gap in distances(a, b):
            assert gap <= limit, f"{path} differs by {gap:.1e} after step {after + 1}"
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert np.asarray(x).dtype == np.asarray(y).dtype


def cast(tree: Tree, dtype: Any) -> Tree:
    """Every float leaf in `dtype` (complex leaves in its complex partner), all leaves as new jax arrays.

    By way of numpy: an eager copy of a jax array compiles once for every shape, and there are many.
    """
    pair = np.complex128 if jnp.dtype(dtype) == jnp.float64 else np.complex64

    def leaf(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.array(np.array(jax.random.key_data(x))), impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return jnp.array(np.asarray(x).astype(pair))
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.array(np.asarray(x).astype(dtype))
        return jnp.array(np.asarray(x))

    return jax.tree.map(leaf, tree)


def drawn_like(shapes: Tree, seed: int, dtype: Any) -> Tree:
    """Variables for the shapes that a flax model has under `eval_shape`, drawn by numpy: nothing to compile.

    Weights are normal with variance 1 / fan-in, scales and variances near 1, other vectors near 0; optimizer state and
    counters are 0, keys differ.
    """
    rng = np.random.default_rng(seed)

    def leaf(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(int(rng.integers(2**31)))
        names = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value").split("/")
        if "opt_state" in names or not jnp.issubdtype(x.dtype, jnp.floating):
            values = np.zeros(x.shape)
        elif len(x.shape) > 1:
            fan_in = x.shape[0] if {"query", "key", "value"} & set(names) else np.prod(x.shape[:-1])
            values = rng.standard_normal(x.shape) * fan_in**-0.5
        else:
            values = (names[-1] in ("scale", "var")) + 0.1 * rng.standard_normal(x.shape)
        return jnp.array(values.astype(dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype))

    return jax.tree_util.tree_map_with_path(leaf, shapes)
