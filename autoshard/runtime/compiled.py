"""A planned step as a program: one `jax.jit` per signature.

tree   all leaves are arrays: jax.jit takes the user's own trees, and its C++ dispatch does the flattening and the
       signature check; its Python body runs only when it traces anew, and then refuses another signature
flat   static leaves, NNX objects, or a partly donated argument: flattened here, jax.jit takes two lists of arrays,
       donated and kept
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.sharding import NamedSharding

from autoshard import jax_compat
from autoshard.ir import Graph, StepInfo, partition_spec
from autoshard.plan import Plan
from autoshard.runtime import nnx_objects
from autoshard.runtime.arguments import ArrayLeaf, NewSignature, ObjectLeaf, Static, Template
from autoshard.runtime.outputs import FlatFunction, Outputs
from autoshard.runtime.pjit import shardings
from autoshard.runtime.stage_planning import Staged
from autoshard.runtime.target import Target, is_explicit

RunFlat = Callable[[Sequence[Any], Any], Any]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A planned signature.

    Attributes:
      template, avals, paths: of the call (`autoshard.runtime.arguments`).
      outputs: of the step.
      info: names and roles.
      graph: the prepared graph.
      plan: made for it.
      target: where it was planned for.
      again: plans it for another memory limit, in bytes, and gives the graph too; None where the user gave the plan.
      staged: of a pipeline, its stages.
      program: gives the fingerprint of the traced step, whatever is planned of it.
    """

    template: Template
    avals: tuple[Any, ...]
    paths: tuple[str, ...]
    outputs: Outputs
    info: StepInfo
    graph: Graph
    plan: Plan
    target: Target
    again: Callable[[int], tuple[Plan, Graph]] | None = None
    staged: Staged | None = None
    program: Callable[[], str] | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A planned signature that can run here.

    Attributes:
      planned: what it was made from.
      mesh: devices.
      inputs, outputs: shardings of the flat arrays.
      run: takes the values of the call's slots; raises `NewSignature` where they are of another signature.
      run_flat: takes the flat arrays and the references of the NNX objects of a call that was bound.
      lower: the same for `jax.jit(...).lower`.
    """

    planned: Planned
    mesh: jax.sharding.Mesh
    inputs: tuple[NamedSharding, ...]
    outputs: tuple[NamedSharding, ...]
    run: Callable[..., Any]
    run_flat: RunFlat
    lower: RunFlat


def build(planned: Planned, mesh: jax.sharding.Mesh, emitted: Callable[..., Sequence[Any]], name: str) -> Compiled:
    """The program of a planned signature.

    Args:
      planned: the signature.
      mesh: with the plan's axes.
      emitted: the planned step over flat arrays (`autoshard.runtime.emit`).
      name: of the step.
    """
    inputs = shardings(planned.plan.input_specs, mesh)
    outputs = shardings(planned.plan.output_specs, mesh)
    body = _Body(planned, mesh, _within(emitted, planned.plan, mesh), name, inputs, outputs)
    whole = whole_slots(planned)
    if planned.template.plain and planned.outputs.plain and whole is not None:
        run, run_flat, lower = body.tree(whole)
        if whole and _must_not_share(mesh):
            run = unshared(run, planned.template, whole)
        return Compiled(planned, mesh, inputs, outputs, run, run_flat, lower)
    return Compiled(planned, mesh, inputs, outputs, *body.flat())


def structs_of(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes to trace with, weak types kept."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]


def lower_plain(fun: Callable[..., Any], planned: Planned) -> Any:
    """The user's step as plain `jax.jit` lowers it, over flat arrays, for comparison."""
    flat = FlatFunction(fun, planned.template, planned.info.input_paths)
    return jax.jit(flat).lower(*structs_of(planned.avals))


def whole_slots(planned: Planned) -> tuple[int, ...] | None:
    """The donated slots, None if one is donated in part."""
    owners = planned.info.input_arguments
    donated = set(planned.info.donated)
    partly = {owner for i, owner in enumerate(owners) if i in donated}
    kept = {owner for i, owner in enumerate(owners) if i not in donated}
    return None if partly & kept else tuple(sorted(partly))


def _must_not_share(mesh: jax.sharding.Mesh) -> bool:
    return jax_compat.DONATING_TWICE_IS_FATAL and mesh.devices.size > 1


def unshared(run: Callable[..., Any], template: Template, donated: tuple[int, ...]) -> Callable[..., Any]:
    """`run`, but an array that is donated and passed twice is a `NewSignature`.

    On several devices jaxlib 0.10 does not raise an error for it: it ends the process (a plain
    `jax.jit(f, donate_argnums=0, in_shardings=...)` called with the same array twice does as well).
    """
    dynamic = [i for i, slot in enumerate(template.slots) if not slot.static]
    if len(dynamic) < len(template.slots):
        pick = picker(dynamic)
        flatten = _tuple_tree(template).flatten_up_to

        def leaves_of(values: tuple[Any, ...]) -> Any:
            return flatten(pick(values))
    else:
        leaves_of = _tuple_tree(template).flatten_up_to  # one call into C++; ValueError where the trees differ

    def guarded(*values: Any) -> Any:
        leaves = leaves_of(values)
        if len(set(map(id, leaves))) < len(leaves) and shares_donated(values, donated):
            raise NewSignature
        return run(*values)

    return guarded


def _tuple_tree(template: Template) -> Any:
    return jax.tree.structure(tuple(template.tree.unflatten(range(template.tree.num_leaves))))


def shares_donated(values: Sequence[Any], donated: Sequence[int]) -> bool:
    """Whether an array in a donated slot is there, or in another slot, a second time."""
    seen: set[int] = set()
    given = set(donated)
    for i in (*donated, *(i for i in range(len(values)) if i not in given)):
        for leaf in jax.tree.leaves(values[i]):
            if not isinstance(leaf, jax.Array):
                continue
            if id(leaf) in seen:
                return True
            if i in given:
                seen.add(id(leaf))
    return False


def _within(emitted: Callable[..., Sequence[Any]], plan: Plan, mesh: jax.sharding.Mesh) -> Callable[..., Sequence[Any]]:
    """The program with automatic axes inside, where the user's mesh has explicit ones."""
    if not is_explicit(mesh):
        return emitted
    specs = tuple(partition_spec(spec) for spec in plan.output_specs)
    if not specs:
        return emitted
    inside: Any = jax.sharding.auto_axes(_tupled(emitted), axes=tuple(mesh.axis_names), out_sharding=specs)

    def within(*flat: Any) -> tuple[Any, ...]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return inside(*flat)

    return within


def _tupled(emitted: Callable[..., Sequence[Any]]) -> Callable[..., tuple[Any, ...]]:
    return lambda *flat: tuple(emitted(*flat))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    """What both kinds of programs are made of."""

    planned: Planned
    mesh: jax.sharding.Mesh
    emitted: Callable[..., Sequence[Any]]
    name: str
    inputs: tuple[NamedSharding, ...]
    outputs: tuple[NamedSharding, ...]

    def tree(self, donated: tuple[int, ...]) -> tuple[Any, RunFlat, RunFlat]:
        """The program over the user's own trees; the same over flat arrays; its lowering."""
        planned, emitted, ambient = self.planned, self.emitted, jax_compat.ambient_mesh()
        template, result = planned.template, planned.outputs.tree
        static = tuple(i for i, slot in enumerate(template.slots) if slot.static)
        dynamic = tuple(i for i, slot in enumerate(template.slots) if not slot.static)
        is_object = nnx_objects.object_test()

        def entry(*values: Any) -> Any:
            fits = len(values) == len(template.slots) and jax_compat.ambient_mesh() == ambient
            if not fits or tuple(Static(values[i]) for i in static) != template.statics:
                raise NewSignature
            leaves, tree = jax.tree.flatten([values[i] for i in dynamic], is_leaf=is_object)
            if tree != template.tree or not same_avals(leaves, planned.avals):
                raise NewSignature
            return result.unflatten(emitted(*leaves))

        entry.__name__ = entry.__qualname__ = self.name
        jitted = jax.jit(
            entry,
            in_shardings=tuple(template.tree.unflatten(self.inputs)),
            out_shardings=result.unflatten(self.outputs),
            static_argnums=static,
            donate_argnums=donated,
        )

        def slots(flat: Sequence[Any]) -> list[Any]:
            arrays, statics = iter(template.tree.unflatten(flat)), iter(template.statics)
            return [next(statics).value if slot.static else next(arrays) for slot in template.slots]

        def run_flat(flat: Sequence[Any], _: Any) -> Any:
            return jitted(*slots(flat))

        def lower(flat: Sequence[Any], _: Any) -> Any:
            return jitted.lower(*slots(flat))

        return jitted, run_flat, lower

    def flat(self) -> tuple[Callable[..., Any], RunFlat, RunFlat]:
        """The same three for a program over two lists of arrays."""
        planned, emitted, ambient = self.planned, self.emitted, jax_compat.ambient_mesh()
        given = set(planned.info.donated)
        donated = [i for i in range(len(planned.avals)) if i in given]
        kept = [i for i in range(len(planned.avals)) if i not in given]
        places = [0] * len(planned.avals)
        for place, i in enumerate((*donated, *kept)):
            places[i] = place
        pick_donated, pick_kept, restore = picker(donated), picker(kept), picker(places)

        def entry(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
            flat = restore((*first, *second))
            if jax_compat.ambient_mesh() != ambient or not same_avals(flat, planned.avals):
                raise NewSignature
            return tuple(emitted(*flat))

        entry.__name__ = entry.__qualname__ = self.name
        jitted = jax.jit(
            entry,
            in_shardings=(pick_donated(self.inputs), pick_kept(self.inputs)),
            out_shardings=self.outputs,
            donate_argnums=(0,),
        )
        read, write = reader(planned.template), writer(planned.outputs)
        guard = _must_not_share(self.mesh)

        def run_flat(flat: Sequence[Any], references: Any) -> Any:
            return write(jitted(pick_donated(flat), pick_kept(flat)), references)

        def lower(flat: Sequence[Any], _: Any) -> Any:
            return jitted.lower(pick_donated(flat), pick_kept(flat))

        def run(*values: Any) -> Any:
            flat, references = read(values)
            if guard and len(set(map(id, flat))) < len(flat) and shares_donated((pick_donated(flat), flat), (0,)):
                raise NewSignature
            return run_flat(flat, references)

        return run, run_flat, lower


Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


def picker(positions: Sequence[int]) -> Pick:
    """A quick function from a sequence to a tuple of its items at these positions."""
    if not positions:
        return lambda _: ()
    if len(positions) == 1:
        only = positions[0]
        return lambda items: (items[only],)
    return operator.itemgetter(*positions)


def writer(outputs: Outputs) -> Callable[[Sequence[Any], Any], Any]:
    """`outputs.rebuild`, quicker where there are no NNX objects."""
    if outputs.hidden or any(isinstance(leaf, ObjectLeaf) for leaf in outputs.leaves):
        return outputs.rebuild
    values = [leaf.value if isinstance(leaf, Static) else None for leaf in outputs.leaves]
    places = [i for i, leaf in enumerate(outputs.leaves) if not isinstance(leaf, Static)]
    unflatten = outputs.tree.unflatten

    def write(flat: Sequence[Any], _: Any) -> Any:
        filled = values.copy()
        for place, array in zip(places, flat, strict=True):
            filled[place] = array
        return unflatten(filled)

    return write


def same_avals(leaves: Sequence[Any], avals: Sequence[Any]) -> bool:
    """Whether traced leaves have these shapes, dtypes and weak types."""
    if len(leaves) != len(avals):
        return False
    for leaf, aval in zip(leaves, avals, strict=True):
        found = jax.typeof(leaf)
        if found.shape != aval.shape or found.dtype != aval.dtype or found.weak_type != aval.weak_type:
            return False
    return True


Read = Callable[[Sequence[Any]], tuple[Sequence[Any], Any]]


def reader(template: Template) -> Read:
    """A quick way from slot values to flat arrays and NNX references, without paths or avals.

    What it returns raises `NewSignature` where the values do not fit the template; avals are left to jax.jit.
    """
    fixed = [(i, leaf) for i, leaf in enumerate(template.leaves) if isinstance(leaf, Static)]
    pick_fixed, expected = picker([i for i, _ in fixed]), [leaf.value for _, leaf in fixed]
    pick_arrays = picker([i for i, leaf in enumerate(template.leaves) if isinstance(leaf, ArrayLeaf)])
    held = [(i, leaf.definition) for i, leaf in enumerate(template.leaves) if isinstance(leaf, ObjectLeaf)]
    kinds = [(i, isinstance(leaf, ArrayLeaf)) for i, leaf in enumerate(template.leaves) if not isinstance(leaf, Static)]
    # The test is asked at every node: only where there are objects. Without, one in a tree makes the trees differ.
    is_object = nnx_objects.object_test() if held else None
    dynamic = [i for i, slot in enumerate(template.slots) if not slot.static]
    statics = list(zip((i for i, slot in enumerate(template.slots) if slot.static), template.statics, strict=True))
    count = len(template.slots)

    def read(values: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        if len(values) != count or not all(static.same(values[i]) for i, static in statics):
            raise NewSignature
        leaves, tree = jax.tree.flatten([values[i] for i in dynamic], is_leaf=is_object)
        if tree != template.tree:
            raise NewSignature
        for value, before, (_, static) in zip(pick_fixed(leaves), expected, fixed, strict=True):
            if value is not before and not static.same(value):
                raise NewSignature
        if not held:
            return pick_arrays(leaves), None
        definitions, parts, references = nnx_objects.split([leaves[i] for i, _ in held])
        if any(found != known for found, (_, known) in zip(definitions, held, strict=True)):
            raise NewSignature
        flat: list[Any] = []
        rest = iter(parts)
        for i, single in kinds:
            if single:
                flat.append(leaves[i])
            else:
                flat.extend(next(rest))
        return flat, references

    return read
