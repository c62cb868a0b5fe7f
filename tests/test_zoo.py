"""Every program of the zoo, sharded, equals plain jit on one device.

The full matrix is programs x meshes x axis types x dtypes (`make test-all`); CI runs a slice in which every program
runs once in float32, the plain ones also in float64, and the other choices take turns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import autoshard

from .helpers import eager_cluster
from .zoo import PROGRAMS, Program
from .zoo.base import Case, check_runs, plain_jit, run

pytestmark = [pytest.mark.implicit_promotion, pytest.mark.timeout(900)]

MESHES = {"8": ("a",), "2x4": ("a", "b"), "2x2x2": ("a", "b", "c")}
AXES = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
LIMITS = {"float32": 1e-4, "float64": 1e-9}
QUICK = 16
"""The first programs (plain models and optimizers) run in float64 in the slice too; the others only in the matrix."""

MATRIX = [(mesh, axes) for mesh in MESHES for axes in AXES]


def parameters() -> list[Any]:
    found: list[Any] = []
    for number, program in enumerate(PROGRAMS):
        for dtype_number, dtype in enumerate(LIMITS):
            chosen = MATRIX[(2 * number + 3 * dtype_number) % len(MATRIX)]
            for mesh, axes in MATRIX:
                slice_ = (mesh, axes) == chosen and (dtype == "float32" or number < QUICK)
                marks: list[Any] = [] if slice_ else [pytest.mark.full]
                name = f"{program.name}-{mesh}-{axes}-{dtype}"
                found.append(pytest.param(program, mesh, axes, dtype, marks=marks, id=name))
    return found


def make_mesh(mesh: str, axes: str) -> jax.sharding.Mesh:
    names = MESHES[mesh]
    shape = tuple(int(n) for n in mesh.split("x"))
    return jax.make_mesh(shape, names, axis_types=(AXES[axes],) * len(names))


def split_leaves(case: Case, step: Any) -> tuple[int, int]:
    """(leaves of the state after a step that lie split over devices, leaves that could)."""
    args, kwargs = case.fresh()
    out = step(*args, **kwargs)
    split = could = 0
    for leaf in jax.tree.leaves(case.observe(args, kwargs, out)):
        if isinstance(leaf, jax.Array) and leaf.size >= 64 and leaf.dtype != jax.dtypes.float0:
            could += any(n % 8 == 0 for n in leaf.shape)
            split += leaf.addressable_shards[0].data.size < leaf.size
    return split, could


@pytest.mark.parametrize(("program", "mesh", "axes", "dtype"), parameters())
def test_equals_plain_jit(program: Program, mesh: str, axes: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        case = program.build(jnp.dtype(dtype).type)
        options = {"static_argnums": case.static_argnums, "static_argnames": case.static_argnames}
        step = autoshard(mesh=make_mesh(mesh, axes), devices=eager_cluster(), **options)(case.step)
        mine = run(case, step)
        plain = run(case, plain_jit(case))
        check_runs(mine, plain, LIMITS[dtype])
        split, could = split_leaves(case, step)
        assert split > 0 or could == 0, "no state is split"


def test_the_zoo_is_large() -> None:
    assert len(PROGRAMS) >= 32
