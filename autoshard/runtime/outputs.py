"""The step as a function of flat arrays, and what its flat results stand for.

    flat_function(step, template)(*arrays)  ==  [state of NNX arguments..., arrays of the result...]

Results that are not arrays are kept aside while tracing and handed back as they are.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from autoshard.runtime import nnx_objects
from autoshard.runtime.arguments import Leaf, ObjectLeaf, Sorted, Static, Template, sort_leaves
from autoshard.runtime.parameters import Slot

RESULT = Slot("out", "out")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What the flat results stand for.

    Attributes:
      hidden: definitions of the NNX arguments after the step; their arrays come first.
      tree: tree of the result.
      leaves: one for each leaf of `tree`; their arrays follow.
      avals: of all flat results.
      paths: of all flat results, slash form ("out/0/params/w"; of NNX arguments the argument's own).
      parts: of each flat result, the top-level part of the result, -1 for NNX arguments.
      hidden_sources: of each array of an NNX argument, the flat input that holds it before, -1 if new.
    """

    hidden: tuple[ObjectLeaf, ...]
    tree: Any
    leaves: tuple[Leaf, ...]
    avals: tuple[Any, ...]
    paths: tuple[str, ...]
    parts: tuple[int, ...]
    hidden_sources: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Whether the result is a tree of arrays only."""
        return not self.hidden and not any(isinstance(leaf, ObjectLeaf | Static) for leaf in self.leaves)

    def rebuild(self, flat: Sequence[Any], references: Any) -> Any:
        """The user's result; NNX arguments are updated in place.

        Args:
          flat: all flat results.
          references: Flax's references of the call's NNX objects, None without any.
        """
        if not self.hidden and not any(isinstance(leaf, ObjectLeaf) for leaf in self.leaves):
            rest = iter(flat)
            return self.tree.unflatten(leaf.value if isinstance(leaf, Static) else next(rest) for leaf in self.leaves)
        arrays = iter(flat)
        definitions = [*self.hidden, *(leaf for leaf in self.leaves if isinstance(leaf, ObjectLeaf))]
        parts = [[next(arrays) for _ in range(leaf.size)] for leaf in self.hidden]
        values: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, ObjectLeaf):
                parts.append([next(arrays) for _ in range(leaf.size)])
                values.append(leaf)
            else:
                values.append(leaf.value if isinstance(leaf, Static) else next(arrays))
        outer = nnx_objects.no_references() if references is None else references
        objects = iter(nnx_objects.update([leaf.definition for leaf in definitions], parts, outer)[len(self.hidden) :])
        return self.tree.unflatten(next(objects) if isinstance(v, ObjectLeaf) else v for v in values)


@final
class FlatFunction:
    """The step over flat arrays; `outputs` is there once it has been traced."""

    def __init__(self, fun: Callable[..., Any], template: Template, slashes: tuple[str, ...]) -> None:
        self.fun = fun
        self.template = template
        self.slashes = slashes
        self.outputs: Outputs | None = None

    def __call__(self, *flat: Any) -> list[Any]:
        rebuilt = self.template.rebuild(flat)
        before = nnx_objects.paths(rebuilt.objects) if rebuilt.objects else []
        result = self.fun(*rebuilt.args, **rebuilt.kwargs)
        found = sort_leaves([*rebuilt.objects, result], [*[RESULT] * len(rebuilt.objects), RESULT], rebuilt.references)
        count = len(rebuilt.objects)
        hidden = tuple(leaf for leaf in found.leaves[:count] if isinstance(leaf, ObjectLeaf))
        assert len(hidden) == count, "NNX arguments stay NNX objects"
        self.outputs = self._outputs(found, hidden, result, before, rebuilt.objects)
        return list(found.flat)

    def _outputs(
        self, found: Sorted, hidden: tuple[ObjectLeaf, ...], result: Any, before: list[Any], objects: Sequence[Any]
    ) -> Outputs:
        count = sum(leaf.size for leaf in hidden)
        sources = hidden_sources(self.template, before, nnx_objects.paths(objects) if objects else [])
        visible = jax.tree.structure(result, is_leaf=nnx_objects.object_test())
        own = [self.slashes[source] if source >= 0 else "new" for source in sources]
        return Outputs(
            hidden=hidden,
            tree=visible,
            leaves=found.leaves[len(hidden) :],
            avals=tuple(jax.typeof(x) for x in found.flat),
            paths=(*own, *found.slashes[count:]),
            parts=(*[-1] * count, *top_parts(result, found, len(hidden))[count:]),
            hidden_sources=sources,
        )


def hidden_sources(template: Template, before: Sequence[Any], after: Sequence[Any]) -> tuple[int, ...]:
    """Of each array of the NNX arguments after the step, the flat input with the same path before it, or -1."""
    inputs: dict[tuple[int, Any], int] = {}
    flat = 0
    number = 0
    for leaf in template.leaves:
        if isinstance(leaf, ObjectLeaf):
            for offset, path in enumerate(before[number]):
                inputs[number, path] = flat + offset
            number += 1
            flat += leaf.size
        elif not isinstance(leaf, Static):
            flat += 1
    return tuple(inputs.get((i, path), -1) for i, paths in enumerate(after) for path in paths)


def top_parts(result: Any, found: Sorted, objects: int) -> tuple[int, ...]:
    """Of each flat result (arrays of NNX arguments included, as -1) the child of `result` it belongs to."""
    is_object = nnx_objects.object_test() or _never
    children: list[Any] = jax.tree.leaves(result, is_leaf=lambda x: x is not result or is_object(x))
    sizes = [len(jax.tree.leaves(child, is_leaf=is_object)) for child in children]
    owners = [part for part, size in enumerate(sizes) for _ in range(size)]
    parts: list[int] = []
    for leaf, owner in zip(found.leaves, [*[-1] * objects, *owners], strict=True):
        parts.extend([owner] * (leaf.size if isinstance(leaf, ObjectLeaf) else 0 if isinstance(leaf, Static) else 1))
    return tuple(parts)


def _never(_: Any) -> bool:
    return False
