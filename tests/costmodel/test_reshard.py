"""The resharding law against programs that XLA compiled, and the paths it leads to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from autoshard.costmodel.reshard import (
    path_collectives,
    rematerializes,
    reshard_collectives,
    reshard_path,
)
from autoshard.ir import MeshShape, Spec, axes_size, partition_spec
from autoshard.runtime.hlo import collectives


def _specs(axes: tuple[str, ...], rank: int) -> Iterator[Spec]:
    """Every spec that uses some of the axes, in any order."""
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), rank - 1):
                ends = (0, *cuts, count)
                yield tuple(order[a:b] for a, b in itertools.pairwise(ends))


XY: MeshShape = (("x", 2), ("y", 4))
YX: MeshShape = (("x", 4), ("y", 2))
XYZ: MeshShape = (("x", 2), ("y", 2), ("z", 2))


def _mesh(mesh: MeshShape) -> Mesh:
    names, sizes = zip(*mesh, strict=True)
    return Mesh(np.array(jax.devices()).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def _compiled(shape: tuple[int, ...], specs: tuple[Spec, ...], mesh: MeshShape) -> list[tuple[str, int]]:
    """The collectives XLA makes of constraints one after the other: kind, and bytes of one device."""
    shardings = [NamedSharding(_mesh(mesh), partition_spec(spec)) for spec in specs]

    def program(x: Any) -> Any:
        x = x * 2
        for sharding in shardings:
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x + 1

    function = jax.jit(program, in_shardings=shardings[0], out_shardings=shardings[-1])
    text = function.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text() or ""
    return [(c.kind, c.nbytes // c.group_size if c.kind != "all_gather" else c.nbytes) for c in collectives(text)]


def _predicted(shape: tuple[int, ...], specs: tuple[Spec, ...], mesh: MeshShape) -> list[tuple[str, int]]:
    """The same by the law."""
    moves = path_collectives(shape, specs[0], specs[1:], mesh)
    sizes = dict(mesh)
    return [
        (kind, 4 * elements // (1 if kind == "all_gather" else axes_size(axes, sizes)))
        for kind, elements, axes in moves
    ]


def _pairs(mesh: MeshShape, rank: int, count: int) -> list[tuple[Spec, Spec]]:
    """A sample of all pairs of specs, the same every time."""
    pairs = list(itertools.permutations(_specs(tuple(name for name, _ in mesh), rank), 2))
    return pairs if count >= len(pairs) else random.Random(0).sample(pairs, count)


@pytest.mark.parametrize(
    ("mesh", "shape", "count"),
    [(XY, (64, 128), 30), (YX, (64, 128), 15), (XY, (32, 64, 128), 20), (XYZ, (64, 128), 20), (XYZ, (16, 32, 64), 15)],
    ids=["2x4", "4x2", "2x4-3d", "2x2x2", "2x2x2-3d"],
)
def test_law_is_what_xla_does(mesh: MeshShape, shape: tuple[int, ...], count: int) -> None:
    for source, target in _pairs(mesh, len(shape), count):
        specs = (source, target)
        assert _predicted(shape, specs, mesh) == _compiled(shape, specs, mesh), f"{source} -> {target}"


@pytest.mark.full
@pytest.mark.timeout(900)  # 2x2x2 has 2,352 pairs
@pytest.mark.parametrize(("mesh", "shape"), [(XY, (64, 128)), (YX, (64, 128)), (XY, (32, 64, 128)), (XYZ, (64, 128))])
def test_law_for_every_pair(mesh: MeshShape, shape: tuple[int, ...]) -> None:
    for source, target in _pairs(mesh, len(shape), 10**9):
        specs = (source, target)
        assert _predicted(shape, specs, mesh) == _compiled(shape, specs, mesh), f"{source} -> {target}"


@pytest.mark.parametrize(
    ("source", "target", "moves"),
    [
        ("-,-", "x,y", []),
        ("x,-", "-,-", [("all_gather", 8192, ("x",))]),
        ("x,y", "-,-", [("all_gather", 4096, ("y",)), ("all_gather", 8192, ("x",))]),
        ("xy,-", "-,-", [("all_gather", 8192, ("x", "y"))]),
        ("x,-", "-,x", [("all_to_all", 8192, ("x",))]),
        ("xy,-", "x,y", [("all_to_all", 4096, ("y",))]),
        ("xy,-", "yx,-", [("permute", 8192, ("x", "y"))]),
        ("-,x", "-,y", [("permute", 16384, ("x", "y"))]),
        ("-,x", "y,-", [("all_gather", 8192, ("x",))]),
        ("x,y", "y,-", [("all_gather", 2048, ("x",)), ("all_to_all", 8192, ("y",))]),
    ],
)
def test_examples(source: str, target: str, moves: list[Any]) -> None:
    assert list(reshard_collectives((64, 128), _spec(source), _spec(target), XY)) == moves


def _spec(text: str) -> Spec:
    return tuple(tuple(part.replace("-", "")) for part in text.split(","))


def test_rematerialization_is_seen_and_avoided() -> None:
    source, target = _spec("-,x"), _spec("y,-")
    assert rematerializes(source, target, XY)
    assert not rematerializes(_spec("x,-"), _spec("-,-"), XY)
    path = reshard_path((64, 128), source, target, XY)
    assert path == (_spec("y,x"), target)
    assert path_collectives((64, 128), source, path, XY) == (("all_gather", 2048, ("x",)),)


@pytest.mark.parametrize(("mesh", "shape"), [(XY, (64, 128)), (XYZ, (64, 128)), (XY, (32, 64, 128))])
def test_no_path_gathers_everything(mesh: MeshShape, shape: tuple[int, ...]) -> None:
    for source, target in _pairs(mesh, len(shape), 200):
        stops = (source, *reshard_path(shape, source, target, mesh))
        assert stops[-1] == target
        assert len(stops) <= 3
        assert not any(rematerializes(a, b, mesh) for a, b in itertools.pairwise(stops))


def test_paths_are_compiled_as_stated() -> None:
    shape, seen = (64, 128), 0
    for source, target in _pairs(XY, 2, 40):
        specs = (source, *reshard_path(shape, source, target, XY))
        if len(specs) > 2:
            seen += 1
            assert _predicted(shape, specs, XY) == _compiled(shape, specs, XY), f"{specs}"
    assert seen > 5


def test_cost_chooses_the_path() -> None:
    source, target = _spec("-,y"), _spec("yx,-")
    assert reshard_path((64, 128), source, target, XY) == (_spec("-,yx"), target)
    free_permutes = reshard_path((64, 128), source, target, XY, lambda kind, elements, axes: float(kind != "permute"))
    assert free_permutes == (target,)


def test_step_in_between_must_divide() -> None:
    path = reshard_path((64, 4), _spec("-,y"), _spec("x,-"), XY)
    assert path == (_spec("x,y"), _spec("x,-"))
    assert reshard_path((3, 4), _spec("-,y"), _spec("x,-"), XY) == (_spec("x,-"),)


def test_same_spec_costs_nothing() -> None:
    assert reshard_collectives((8, 8), _spec("x,y"), _spec("x,y"), XY) == ()
    assert reshard_path((8, 8), _spec("x,y"), _spec("x,y"), XY) == ()


def test_a_thousand_devices() -> None:
    mesh: MeshShape = (("data", 16), ("model", 8), ("pipe", 8))
    moves = reshard_collectives((1024, 1024), (("data",), ()), ((), ("data",)), mesh)
    assert moves == (("all_to_all", 1024 * 1024, ("data",)),)
