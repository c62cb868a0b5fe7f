"""Flax NNX objects as arguments and results: split into arrays and merged back, references kept.

Modules, optimizers, random streams and single Variables are mutable objects. A call goes

    (1) the user's objects       --split-->  definitions, arrays      (outside, every call)
    (2) definitions, tracers     --merge-->  copies of the objects    (while tracing)
    (3) copies after the step    --split-->  definitions, arrays      (while tracing)
    (4) definitions, new arrays  --update->  the user's objects       (outside, every call)

One reference index goes over all objects of a call, so a parameter that both the model and the
optimizer hold stays one parameter. Flax is never imported here: objects exist only if the user did.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

References = Any
"""Flax's map from object to index, or from index to object."""


def object_test() -> Callable[[Any], bool] | None:
    """A test for NNX objects, or None where the process has not imported Flax NNX."""
    library = sys.modules.get("flax.nnx")
    return None if library is None else getattr(library.graphlib, "is_graph_node", None)


def _library() -> Any:
    return sys.modules["flax.nnx"]


def split(objects: Sequence[Any], inner: References = None) -> tuple[list[Any], list[list[Any]], References]:
    """Definitions and arrays of each object, and the reference index over all of them.

    Args:
      objects: in order; a part that an earlier object holds already is only referred to.
      inner: after `merge`, its references: definitions then name the outer object each part came from.
    """
    library = _library()
    outer_index = None if inner is None else library.graphlib.RefMap.from_indexmap(inner)
    references = library.graphlib.RefMap()
    definitions: list[Any] = []
    arrays: list[list[Any]] = []
    for each in objects:
        definition, leaves = library.graphlib.flatten(
            each, ref_index=references, ref_outer_index=outer_index, with_paths=False, graph=True
        )
        definitions.append(definition)
        arrays.append(list(leaves))
    return definitions, arrays, references


def paths(objects: Sequence[Any]) -> list[list[tuple[Any, ...]]]:
    """For each object the key path of each of its arrays, in the order of `split`."""
    library = _library()
    references = library.graphlib.RefMap()
    found: list[list[tuple[Any, ...]]] = []
    for each in objects:
        _, state = library.graphlib.flatten(each, ref_index=references, with_paths=True, graph=True)
        found.append([tuple(path) for path in state.paths])
    return found


def merge(definitions: Sequence[Any], arrays: Sequence[Sequence[Any]]) -> tuple[list[Any], References]:
    """New objects from definitions and arrays, and their references."""
    library = _library()
    references = library.graphlib.IndexMap()
    objects = [
        library.graphlib.unflatten(definition, list(leaves), index_ref=references)
        for definition, leaves in zip(definitions, arrays, strict=True)
    ]
    return objects, references


def update(definitions: Sequence[Any], arrays: Sequence[Sequence[Any]], outer: References) -> list[Any]:
    """Writes new arrays into the user's objects; returns the objects, new ones where the step made some.

    Args:
      definitions: from `split(..., inner=...)`.
      arrays: of each definition.
      outer: the references of the user's objects, from `split` before the call.
    """
    library = _library()
    originals = library.graphlib.IndexMap.from_refmap(outer)
    references = library.graphlib.IndexMap()
    return [
        library.graphlib.unflatten(definition, list(leaves), index_ref=references, outer_index_outer_ref=originals)
        for definition, leaves in zip(definitions, arrays, strict=True)
    ]


def no_references() -> References:
    """References of a call without NNX objects."""
    return _library().graphlib.RefMap()


def write(objects: Sequence[Any], arrays: Sequence[Sequence[Any]]) -> None:
    """Writes other arrays into the user's objects, in the order of `split`; their structure stays."""
    definitions, _, outer = split(objects)
    copies, references = merge(definitions, arrays)
    after, parts, _ = split(copies, references)
    update(after, parts, outer)


def state_of(definition: Any, values: Sequence[Any]) -> Any:
    """A `nnx.State` with these values in the place of an object's arrays."""
    library = _library()
    stand_in = library.graphlib.unflatten(definition, list(values), index_ref=library.graphlib.IndexMap())
    return library.graphlib.state(stand_in)
