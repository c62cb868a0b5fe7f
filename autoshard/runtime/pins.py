"""Pins: shardings the user fixes by path pattern, kept as hard constraints.

    pattern  ::= segment ("/" segment)*     matched against the whole slash path of an argument's leaf
    segment  ::= "**"                       any number of segments, none included
               | glob                       one segment, with * ? [abc] inside it

for example {"**/mlp/**/kernel": PartitionSpec(None, "model")}.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import ArgumentError, PinError, explain
from autoshard.ir import Spec

Pins = Mapping[str, PartitionSpec]


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern fits the whole path."""
    return _matches(tuple(pattern.split("/")), tuple(path.split("/")))


def _matches(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(pattern[1:], path[1:])


def check_pins(pins: Any) -> Pins | None:
    """The option `pins`, checked as far as it can be without a step.

    Raises:
      ArgumentError: not a mapping from patterns to partition specs.
    """
    if pins is None:
        return None
    if not isinstance(pins, Mapping):
        raise ArgumentError(
            explain(
                f"pins is a {type(pins).__name__}",
                'a mapping from path patterns to PartitionSpecs, such as {"**/kernel": P(None, "model")}',
                "give a dict",
            )
        )
    checked: dict[str, PartitionSpec] = {}
    for pattern, spec in pins.items():
        if not isinstance(pattern, str) or not pattern.strip("/"):
            raise ArgumentError(
                explain(f"pins has the key {pattern!r}", 'a path pattern such as "state/**/kernel"', "give a string")
            )
        if isinstance(spec, NamedSharding):
            spec = spec.spec
        if not isinstance(spec, PartitionSpec):
            raise ArgumentError(
                explain(
                    f"pins[{pattern!r}] is {spec!r}",
                    "a jax.sharding.PartitionSpec",
                    'write it as P(None, "model"); P() keeps the array whole on every device',
                )
            )
        checked[pattern] = spec
    return checked


def resolve_pins(
    pins: Pins | None, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int] | None
) -> dict[int, Spec]:
    """The spec of each pinned flat input.

    Args:
      pins: patterns and specs.
      paths: slash paths of the flat inputs.
      shapes: their shapes.
      mesh: axis sizes where the mesh is given, None where it is chosen later (axes are checked then).

    Raises:
      PinError: a pattern fits nothing, two patterns contradict each other, or a spec cannot hold.
    """
    found: dict[int, tuple[str, Spec]] = {}
    for pattern, partition in (pins or {}).items():
        pinned = [i for i, path in enumerate(paths) if matches(pattern, path)]
        if not pinned:
            raise PinError(
                explain(
                    f"the pin {pattern!r} fits no array",
                    f"a pattern that fits a path of the step's arguments; the nearest are {_nearest(pattern, paths)}",
                    "correct the pattern (* is one segment, ** any number)",
                )
            )
        for i in pinned:
            spec = _spec(pattern, partition, paths[i], shapes[i], mesh)
            if i in found and found[i][1] != spec:
                raise PinError(
                    explain(
                        f"{paths[i]} is pinned by {found[i][0]!r} to {found[i][1]} and by {pattern!r} to {spec}",
                        "one sharding for each array",
                        "make one of the two patterns narrower",
                    )
                )
            found[i] = (pattern, spec)
    return {i: spec for i, (_, spec) in found.items()}


def check_pin(pattern: str, spec: Spec, path: str, shape: tuple[int, ...], mesh: Mapping[str, int]) -> None:
    """Checks a spec against a mesh.

    Raises:
      PinError: an axis the mesh does not have, one used twice, or a dimension that its axes do not divide.
    """
    seen: set[str] = set()
    for dim, (size, axes) in enumerate(zip(shape, spec, strict=True)):
        parts = 1
        for axis in axes:
            if axis not in mesh:
                raise PinError(
                    explain(
                        f"the pin {pattern!r} splits dimension {dim} of {path} over the mesh axis {axis!r}",
                        f"axes of the mesh: {', '.join(f'{name}={n}' for name, n in mesh.items())}",
                        "correct the axis, or give a mesh that has it",
                    )
                )
            if axis in seen:
                raise PinError(
                    explain(
                        f"the pin {pattern!r} uses the mesh axis {axis!r} twice for {path}",
                        "each axis at most once in a spec",
                        "leave it out of one dimension",
                    )
                )
            seen.add(axis)
            parts *= mesh[axis]
        if size % parts:
            raise PinError(
                explain(
                    f"the pin {pattern!r} splits dimension {dim} of {path} (size {size}) over "
                    f"{' x '.join(f'{axis}={mesh[axis]}' for axis in axes)} = {parts} parts",
                    f"a dimension that is a multiple of {parts}",
                    "pad the dimension, pin another one, or choose another mesh shape",
                )
            )


def _spec(
    pattern: str, partition: PartitionSpec, path: str, shape: tuple[int, ...], mesh: Mapping[str, int] | None
) -> Spec:
    entries: list[Any] = list(partition)
    if len(entries) > len(shape):
        raise PinError(
            explain(
                f"the pin {pattern!r} gives {len(entries)} dimensions ({partition}), but {path} has shape {shape}",
                f"at most {len(shape)} entries",
                "shorten the spec, or make the pattern fit only arrays of that rank",
            )
        )
    spec = tuple(_entry(entry, pattern) for entry in entries) + ((),) * (len(shape) - len(entries))
    if mesh is not None:
        check_pin(pattern, spec, path, shape, mesh)
    return spec


def _entry(entry: Any, pattern: str) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry):
        return tuple(str(axis) for axis in entry)
    raise PinError(
        explain(
            f"the pin {pattern!r} has the entry {entry!r}",
            "None, an axis name or a tuple of axis names: a pin fixes every dimension",
            "leave the array without a pin where autoshard shall choose",
        )
    )


def _nearest(pattern: str, paths: Sequence[str]) -> str:
    words = [segment for segment in pattern.split("/") if segment != "**"]
    ranked = sorted(
        paths,
        key=lambda path: (
            -sum(any(fnmatch.fnmatchcase(part, word) for part in path.split("/")) for word in words),
            -difflib.SequenceMatcher(None, pattern.replace("*", ""), path).ratio(),
            path,
        ),
    )
    return ", ".join(repr(path) for path in ranked[:5]) or "none (the step has no array arguments)"
