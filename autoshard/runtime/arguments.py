"""Binding a call: from the user's arguments to flat arrays and a template, and back.

    slot      one top-level argument as passed: a parameter, one of *args, one of **kwargs
    template  everything of a call that is not an array: which slots, their trees, static values, NNX definitions
    call      a template with the arrays

Leaves are sorted into arrays (jax and numpy arrays, Python numbers as weakly typed scalars, just as jax.jit
does; ShapeDtypeStruct for planning), NNX objects, and static values (everything else). Python numbers
inside an Equinox module are static, because Equinox modules branch on them (`inference`, rates).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from jax.core import Tracer

from autoshard import jax_compat
from autoshard.errors import ArgumentError, explain
from autoshard.runtime import nnx_objects
from autoshard.runtime.parameters import Parameters, Slot


@final
@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """A value that is not an array: equal only to an equal value of the same type (1 is not True)."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.same(other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def same(self, value: Any) -> bool:
        """Whether `value` may stand in its place."""
        return value is self.value or (type(value) is type(self.value) and bool(value == self.value))


@final
@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """The place of one array."""


@final
@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """The place of an NNX object.

    Attributes:
      definition: Flax's definition (structure, static attributes, shared references).
      size: number of its arrays.
    """

    definition: Any
    size: int


Leaf = ArrayLeaf | Static | ObjectLeaf
ARRAY = ArrayLeaf()


@final
@dataclass(frozen=True, slots=True)
class Template:
    """All of a call but its arrays; hashable.

    Attributes:
      slots: the top-level arguments.
      tree: tree of the list of values of the slots that are not static.
      leaves: one for each leaf of `tree`.
      statics: values of the static slots, in order.
    """

    slots: tuple[Slot, ...]
    tree: Any
    leaves: tuple[Leaf, ...]
    statics: tuple[Static, ...]

    @property
    def plain(self) -> bool:
        """Whether all leaves are arrays, so that jax.jit can take the user's trees as they are."""
        return all(isinstance(leaf, ArrayLeaf) for leaf in self.leaves)

    def rebuild(self, flat: Sequence[Any]) -> Rebuilt:
        """The arguments with `flat` in the place of the arrays, NNX objects as new copies."""
        values, objects, references = fill(self.leaves, flat)
        dynamic = iter(self.tree.unflatten(values))
        statics = iter(self.statics)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for slot in self.slots:
            value = next(statics).value if slot.static else next(dynamic)
            if slot.keyword is None:
                args.append(value)
            else:
                kwargs[slot.keyword] = value
        return Rebuilt(tuple(args), kwargs, tuple(objects), references)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Rebuilt:
    """Arguments ready for the user's function.

    Attributes:
      args: positional arguments.
      kwargs: keyword arguments.
      objects: the NNX objects among them.
      references: Flax's references of these objects, None without objects.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objects: tuple[Any, ...]
    references: Any


@final
@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call: template and arrays.

    Attributes:
      template: the rest of the call.
      values: values of all slots, as passed.
      flat: the arrays, in template order.
      avals: shape, dtype and weak type of each.
      paths: of each array, as Python would write it ("state.params['mlp']['kernel']").
      slashes: of each array, in slash form ("state/params/mlp/kernel").
      owners: of each array, the position of its slot.
      objects: the user's NNX objects.
      references: Flax's references of these objects, None without objects.
    """

    template: Template
    values: tuple[Any, ...]
    flat: tuple[Any, ...]
    avals: tuple[Any, ...]
    paths: tuple[str, ...]
    slashes: tuple[str, ...]
    owners: tuple[int, ...]
    objects: tuple[Any, ...]
    references: Any

    @property
    def abstract(self) -> str | None:
        """Path of the first argument without data, or None."""
        return next((p for p, x in zip(self.paths, self.flat, strict=True) if is_abstract(x)), None)

    @property
    def key(self) -> tuple[Template, tuple[Any, ...]]:
        """What a plan belongs to."""
        return self.template, self.avals


def fill(leaves: Sequence[Leaf], flat: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """(leaf values, NNX objects, their references) with `flat` in the place of the arrays."""
    arrays = iter(flat)
    nested = [leaf for leaf in leaves if isinstance(leaf, ObjectLeaf)]
    parts: list[list[Any]] = []
    values: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, ObjectLeaf):
            parts.append([next(arrays) for _ in range(leaf.size)])
            values.append(leaf)
        else:
            values.append(leaf.value if isinstance(leaf, Static) else next(arrays))
    if not nested:
        return values, [], None
    objects, references = nnx_objects.merge([leaf.definition for leaf in nested], parts)
    merged = iter(objects)
    return [next(merged) if isinstance(value, ObjectLeaf) else value for value in values], objects, references


def bind(parameters: Parameters, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Binds the arguments of one call.

    Raises:
      TypeError: the arguments do not fit the function's parameters (Python's own message).
      ArgumentError: a static value cannot be hashed.
    """
    form = parameters.form(args, kwargs)
    values = (*args, *(kwargs[name] for name in form.order))
    statics: list[Static] = []
    dynamic: list[tuple[int, Any]] = []
    for position, (slot, value) in enumerate(zip(form.slots, values, strict=True)):
        if slot.static:
            statics.append(_static(value, slot.path))
        else:
            dynamic.append((position, value))
    found = sort_leaves([value for _, value in dynamic], [form.slots[position] for position, _ in dynamic])
    slots = [position for position, _ in dynamic]
    return Call(
        template=Template(form.slots, found.tree, found.leaves, tuple(statics)),
        values=values,
        flat=tuple(x if is_abstract(x) else _native(x) for x in found.flat),
        avals=tuple(aval_of(x, path) for x, path in zip(found.flat, found.paths, strict=True)),
        paths=found.paths,
        slashes=found.slashes,
        owners=tuple(slots[owner] for owner in found.owners),
        objects=found.objects,
        references=found.references,
    )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sorted:
    """The leaves of a list of trees, sorted; fields as in `Call` and `Template`, owners are list positions."""

    tree: Any
    leaves: tuple[Leaf, ...]
    flat: tuple[Any, ...]
    paths: tuple[str, ...]
    slashes: tuple[str, ...]
    owners: tuple[int, ...]
    objects: tuple[Any, ...]
    references: Any


def sort_leaves(values: list[Any], roots: Sequence[Slot], inner: Any = None) -> Sorted:
    """Sorts the leaves of `values` into arrays, NNX objects and static values.

    Args:
      values: trees.
      roots: the names of the trees.
      inner: where the objects were merged while tracing: their references.
    """
    keyed, tree = jax.tree_util.tree_flatten_with_path(values, is_leaf=nnx_objects.object_test())
    is_object = nnx_objects.object_test()
    frozen = equinox_leaves(values)
    objects = [value for _, value in keyed if is_object is not None and is_object(value)]
    references, keys, split = None, iter(()), iter(())
    if objects:
        definitions, parts, references = nnx_objects.split(objects, inner)
        keys = iter(nnx_objects.paths(objects))
        split = iter(zip(definitions, parts, strict=True))
    leaves: list[Leaf] = []
    flat: list[Any] = []
    names: list[tuple[int, tuple[Any, ...]]] = []
    for index, (path, value) in enumerate(keyed):
        owner = int(path[0].idx)
        if is_object is not None and is_object(value):
            definition, arrays = next(split)
            leaves.append(ObjectLeaf(definition, len(arrays)))
            flat.extend(arrays)
            names.extend((owner, (*path[1:], *map(_Key, key))) for key in next(keys))
        elif is_array(value) and not (index in frozen and isinstance(value, bool | int | float | complex)):
            leaves.append(ARRAY)
            flat.append(value)
            names.append((owner, path[1:]))
        else:
            leaves.append(_static(value, roots[owner].path + jax.tree_util.keystr(path[1:])))
    return Sorted(
        tree,
        tuple(leaves),
        tuple(flat),
        tuple(roots[owner].path + "".join(_python_key(key) for key in path) for owner, path in names),
        tuple("/".join((roots[owner].slash, *(_slash_key(key) for key in path))) for owner, path in names),
        tuple(owner for owner, _ in names),
        tuple(objects),
        references,
    )


@final
@dataclass(frozen=True, slots=True)
class _Key:
    """A step of a path inside an NNX object: attribute or index."""

    name: Any


def _python_key(key: Any) -> str:
    if isinstance(key, _Key):
        return f".{key.name}" if isinstance(key.name, str) and key.name.isidentifier() else f"[{key.name!r}]"
    return str(jax.tree_util.keystr((key,)))


def _slash_key(key: Any) -> str:
    if isinstance(key, _Key):
        return str(key.name)
    return str(jax.tree_util.keystr((key,), simple=True))


def equinox_leaves(values: Any) -> frozenset[int]:
    """Positions of the leaves that lie inside an Equinox module."""
    library = sys.modules.get("equinox")
    module = getattr(library, "Module", None)
    if module is None:
        return frozenset()
    is_object = nnx_objects.object_test() or _never
    found: set[int] = set()
    position = 0
    for part in jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, module) or is_object(x)):
        size = 1
        if isinstance(part, module):
            size = len(jax.tree.leaves(part, is_leaf=is_object))
            found.update(range(position, position + size))
        position += size
    return frozenset(found)


def _never(_: Any) -> bool:
    return False


def is_abstract(value: Any) -> bool:
    """Whether the value is only a shape and dtype."""
    return isinstance(value, jax.ShapeDtypeStruct)


def is_array(value: Any) -> bool:
    """Whether jax.jit would take the value as an array (or it is a stand-in for one)."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct | bool | int | float | complex):
        return True
    if isinstance(value, np.ndarray | np.generic):
        return _is_numeric(value.dtype)
    return hasattr(value, "__jax_array__") and not isinstance(value, type)


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or dtype == jax.dtypes.float0 or jax.numpy.issubdtype(dtype, np.number)


def _native(value: Any) -> Any:
    """The value as jax.jit takes it."""
    convert = getattr(value, "__jax_array__", None)
    return value if convert is None or isinstance(value, jax.Array) else convert()


def aval_of(value: Any, path: str) -> Any:
    """Shape, dtype and weak type, without any sharding.

    Raises:
      ArgumentError: JAX has no type for the value.
    """
    if is_abstract(value):
        return jax_compat.aval_of(value.shape, value.dtype, bool(value.weak_type))
    try:
        aval = jax.typeof(_native(value))
    except (TypeError, OverflowError) as error:
        raise ArgumentError(
            explain(
                f"{path} is {value!r}: {error}", "arrays or numbers that JAX can hold", "convert it before the call"
            )
        ) from error
    return jax_compat.aval_of(aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False)))


def has_tracer(values: Iterable[Any]) -> bool:
    """Whether any leaf is a tracer of a surrounding transformation."""
    is_object = nnx_objects.object_test()
    for leaf in jax.tree.leaves(list(values), is_leaf=is_object):
        if is_object is not None and is_object(leaf):
            if any(isinstance(x, Tracer) for part in nnx_objects.split([leaf])[1] for x in part):
                return True
        elif isinstance(leaf, Tracer):
            return True
    return False


def _static(value: Any, path: str) -> Static:
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            explain(
                f"{path} is a {type(value).__name__}, which is neither an array nor hashable",
                "arrays, or static values that can be hashed and compared",
                "make it an array (jnp.asarray) or a hashable value such as a tuple or a frozen dataclass",
            )
        ) from None
    return Static(value)


@final
class NewSignature(Exception):
    """Inside autoshard only: a call that the compiled program at hand does not fit."""
