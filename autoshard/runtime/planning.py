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
from autoshard.errors import ArgumentError, InfeasibleError, MicrobatchError, PlanError, explain
from autoshard.ir import Graph, MeshShape, Spec, StepInfo, trace
from autoshard.passes import microbatched
from autoshard.plan import Plan, fingerprint
from autoshard.runtime.arguments import Call
from autoshard.runtime.compiled import Planned
from autoshard.runtime.microbatches import split_batch
from autoshard.runtime.options import Options
from autoshard.runtime.outputs import FlatFunction
from autoshard.runtime.pairing import describe
from autoshard.runtime.pins import check_pin, matches, resolve_pins
from autoshard.runtime.pjit import auto_mesh
from autoshard.runtime.plan_compile import compile_plan
from autoshard.runtime.target import Target, is_explicit
from autoshard.search import collection_paused, make_plan, prepare
from autoshard.show import size_text

MOST_CHOSEN = 64
"""Microbatches that are tried where a step does not fit; more are for the user to ask for. Ours."""

WORTH = 0.95
"""More microbatches are tried while twice as many need no more than this part of the memory. Ours."""

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
        suggest: bool = True,
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
    programs = Programs(lambda: FlatFunction(fun, call.template, call.slashes), call, info, graph, on_event)

    def make(count: int, memory_limit: int | None, suggest: bool) -> Plan:
        prepared = programs.prepared(count)
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
            suggest=suggest,
        )
        compiler = functools.partial(compile_plan, prepared, target.cluster)
        return dataclasses.replace(plan, microbatches=count, compiler=compiler)

    def choose(memory_limit: int | None) -> tuple[Plan, Graph]:
        plan = choose_count(lambda count, suggest: make(count, memory_limit, suggest), options.microbatches)
        return plan, programs.prepared(plan.microbatches)

    plan = known_plan(programs.prepared, options.microbatches, info, target, library, name)
    plan, prepared = choose(options.memory_limit) if plan is None else (plan, programs.prepared(plan.microbatches))
    for i, spec in pins.items():
        pattern = next(p for p in options.pins or {} if matches(p, call.slashes[i]))
        check_pin(pattern, spec, call.slashes[i], shapes[i], dict(plan.mesh))
    plan = dataclasses.replace(plan, compiler=functools.partial(compile_plan, prepared, target.cluster))
    again = None if library.loaded else choose
    return Planned(call.template, call.avals, call.paths, outputs, info, prepared, plan, target, again)


@final
class Programs:
    """A step's prepared graphs, by the number of its microbatches."""

    def __init__(
        self, fun: Callable[[], Callable[..., Any]], call: Call, info: StepInfo, graph: Graph, on_event: OnEvent | None
    ) -> None:
        self._fun, self._call, self._info, self._graph, self._on_event = fun, call, info, graph, on_event
        self._prepared: dict[int, Graph] = {}

    def prepared(self, count: int) -> Graph:
        """The graph that plans with this many microbatches speak of.

        Raises:
          MicrobatchError: there is none.
        """
        if count not in self._prepared:
            graph = self._graph
            if count > 1:
                with _automatic_axes():
                    split = split_batch(self._fun(), self._call.avals, self._info, graph, count)
                    graph = microbatched(split)
                if self._on_event is not None:
                    self._on_event("microbatch", graph)
            self._prepared[count] = prepare(graph, self._on_event)
        return self._prepared[count]


def choose_count(make: Callable[[int, bool], Plan], asked: int | None) -> Plan:
    """The plan with the microbatches asked for, else with the fewest that fit: 1, 2, 4, ...

    Args:
      make: plans a number of microbatches; with True its error says which larger cluster would do.
      asked: None to choose.

    Raises:
      InfeasibleError: nothing fits; says what was tried.
      MicrobatchError: what was asked for is not possible.
    """
    if asked is not None:
        return make(asked, True)
    needs: dict[int, int] = {}
    refused, first, count = "", "", 1
    while count <= MOST_CHOSEN:
        try:
            plan = make(count, False)
        except InfeasibleError as error:
            first = first or str(error).splitlines()[0]
            half = needs.get(count // 2)
            needs[count] = -1 if error.need_bytes is None else error.need_bytes
            if needs[count] < 0 or (half is not None and needs[count] > WORTH * half):
                break
        except MicrobatchError as error:
            refused = f"; microbatches are no way out: {str(error).splitlines()[0]}"
            break
        else:
            line = (f"{count} microbatches: with fewer {first}",) if count > 1 else ()
            return dataclasses.replace(plan, why=(*plan.why, *line))
        count *= 2
    if len(needs) > 1:
        listed = ", ".join(f"{m}: {size_text(n)}" for m, n in needs.items() if m > 1 and n > 0)
        refused = f"; nor does it with microbatches ({listed}){refused}"
    try:
        return make(1, True)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{refused}", error.need_bytes) from error


def known_plan(
    prepared: Callable[[int], Graph],
    count: int | None,
    info: StepInfo,
    target: Target,
    library: Library,
    name: str,
) -> Plan | None:
    """A plan of the same program for the same devices, None if it has to be searched.

    Args:
      prepared: the program by its number of microbatches.
      count: microbatches asked for, None for any.
      info: names and roles.
      target: the devices.
      library: plans to use again.
      name: of the step.

    Raises:
      PlanError: the user loaded plans, and none belongs to this program here.
    """
    if not library.made and not library.loaded:
        return None

    def belongs(plan: Plan) -> bool:
        if count is not None and plan.microbatches != count:
            return False
        try:
            return plan.fingerprint == fingerprint(prepared(plan.microbatches))
        except MicrobatchError:
            return False

    for each in library.made:
        same = each.target.shape == target.shape and each.target.cluster == target.cluster and each.info == info
        if same and belongs(each.plan):
            return each.plan
    if not library.loaded:
        return None
    fitting = [plan for plan in library.loaded if belongs(plan)]
    if not fitting:
        last = library.loaded[-1]
        parts = f" in {last.microbatches} microbatches" if last.microbatches > 1 else ""
        raise PlanError(
            explain(
                f"the loaded plan is of program {last.fingerprint}{parts}, "
                f"{name} called this way is {fingerprint(prepared(count or 1))}",
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
