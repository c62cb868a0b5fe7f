"""One signature planned: trace, names and roles, pins, search; known plans of the same program are used again."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax

from autoshard import jax_compat
from autoshard.cluster import Cluster, mesh_size
from autoshard.errors import ArgumentError, PlanError, explain
from autoshard.ir import Graph, MeshShape, Spec, StepInfo, trace
from autoshard.plan import Plan, fingerprint
from autoshard.runtime.arguments import Call
from autoshard.runtime.compiled import Planned
from autoshard.runtime.options import Options
from autoshard.runtime.outputs import FlatFunction
from autoshard.runtime.pairing import describe
from autoshard.runtime.pins import check_pin, matches, resolve_pins
from autoshard.runtime.pjit import auto_mesh
from autoshard.runtime.plan_compile import compile_plan
from autoshard.runtime.target import Target, is_explicit
from autoshard.search import collection_paused, make_plan, prepare

OnEvent = Callable[[str, Any], None]


@runtime_checkable
class MakePlan(Protocol):
    """The search, as `autoshard.search.make_plan`."""

    def __call__(
        self,
        graph: Graph,
        info: StepInfo,
        cluster: Cluster,
        mesh: MeshShape | None,
        *,
        pins: dict[int, Spec],
        memory_limit: int | None,
        budget_s: float | None,
        seed: int,
        on_event: OnEvent | None = None,
    ) -> Plan: ...


SEARCH: MakePlan = make_plan


@final
@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Plans to use again.

    Attributes:
      made: by this step, with what they were made for.
      loaded: by the user; where there are any, nothing is searched.
    """

    made: Sequence[Planned] = ()
    loaded: Sequence[Plan] = ()


@collection_paused()
def plan_call(
    fun: Callable[..., Any],
    name: str,
    call: Call,
    options: Options,
    target: Target,
    library: Library,
    search: MakePlan,
    on_event: OnEvent | None,
) -> Planned:
    """Plans one signature of a step.

    Args:
      fun: the user's step.
      name: of it.
      call: arguments, with or without data.
      options: the decorator's.
      target: where it shall run.
      library: plans to use again.
      search: makes a plan.
      on_event: called with each part of the planning.
    """
    if not call.flat:
        raise ArgumentError(
            explain(
                f"{name} was called without a single array", "arrays among the arguments", "pass the state or a batch"
            )
        )
    flat_function = FlatFunction(fun, call.template, call.slashes)
    with _automatic_axes():
        graph = trace(flat_function, call.avals)
    outputs = flat_function.outputs
    assert outputs is not None, "tracing fills in the outputs"
    info = describe(call, outputs, graph)
    if on_event is not None:
        on_event("trace", graph)
    shapes = [tuple(aval.shape) for aval in call.avals]
    sizes = None if target.shape is None else dict(target.shape)
    pins = resolve_pins(options.pins, call.slashes, shapes, sizes)
    prepared = prepare(graph, on_event)
    compiler = functools.partial(compile_plan, prepared, target.cluster)

    def make(memory_limit: int | None) -> Plan:
        plan = search(
            prepared,
            info,
            target.cluster,
            target.shape,
            pins=pins,
            memory_limit=memory_limit,
            budget_s=options.budget_s,
            seed=options.seed,
            on_event=on_event,
        )
        return dataclasses.replace(plan, compiler=compiler)

    plan = known_plan(prepared, info, target, library, name) or make(options.memory_limit)
    for i, spec in pins.items():
        pattern = next(p for p in options.pins or {} if matches(p, call.slashes[i]))
        check_pin(pattern, spec, call.slashes[i], shapes[i], dict(plan.mesh))
    plan = dataclasses.replace(plan, compiler=compiler)
    again = None if library.loaded else make
    return Planned(call.template, call.avals, call.paths, outputs, info, prepared, plan, target, again)


def known_plan(prepared: Graph, info: StepInfo, target: Target, library: Library, name: str) -> Plan | None:
    """A plan of the same program for the same devices, None if it has to be searched.

    Raises:
      PlanError: the user loaded plans, and none belongs to this program here.
    """
    if not library.made and not library.loaded:
        return None
    program = fingerprint(prepared)
    for each in library.made:
        same = each.target.shape == target.shape and each.target.cluster == target.cluster and each.info == info
        if each.plan.fingerprint == program and same:
            return each.plan
    if not library.loaded:
        return None
    fitting = [plan for plan in library.loaded if plan.fingerprint == program]
    if not fitting:
        raise PlanError(
            explain(
                f"the loaded plan is of program {library.loaded[-1].fingerprint}, {name} called this way is {program}",
                "a plan of this step with these shapes, dtypes and static arguments, made with this JAX version",
                "plan again with .plan(...), or .clear_cache() to forget the loaded plan",
            )
        )
    for plan in fitting:
        if (target.shape is None or plan.mesh == target.shape) and mesh_size(plan.mesh) <= target.cluster.size:
            return plan
    raise PlanError(
        explain(
            f"the loaded plan is for the mesh {dict(fitting[-1].mesh)}",
            f"the mesh {dict(target.shape)}" if target.shape else f"a mesh of at most {target.cluster.size} devices",
            "plan again, or use the plan's mesh",
        )
    )


@contextlib.contextmanager
def _automatic_axes() -> Any:
    """A step is traced with automatic axes: types then carry no shardings, which are the plan's to choose."""
    around = jax_compat.ambient_mesh()[1]
    if around is None or not is_explicit(around):
        yield
        return
    with jax.sharding.use_abstract_mesh(auto_mesh(around).abstract_mesh):
        yield
