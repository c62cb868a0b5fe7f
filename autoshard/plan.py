"""The plan: what was decided, what it costs, why; frozen, printable, saved as JSON.

Specs are kept in one table and referred to by number: in `values` one number for each value in the order in which the
graph defines them (bodies included), in `operands` one for each operand of each equation, in `outputs` one for each
output of each graph; -1 where there is nothing to say. Together with the graph they make `Decisions`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, cast, final

from autoshard.errors import PlanError, explain
from autoshard.ir import Equation, Graph, MeshShape, Spec, Value, print_graph
from autoshard.timeline import NO_TIMELINE, Lane, MemoryCurve, OperatorCost, Span, Timeline

T = TypeVar("T")

FORMAT = 5
"""Version of the JSON form."""


Detour = tuple[tuple[int, ...], int, tuple[int, ...]]
"""(shape, source spec, specs to go through with the target last), specs by number."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """Specs attached to one graph.

    Attributes:
      values: the spec of each value.
      operands: for (equation, operand) the spec it must arrive in.
      outputs: for (graph, output) the spec it must leave in.
      detours: for (shape, source, target) the specs to go through, where there is one in between.
    """

    values: Mapping[Value, Spec]
    operands: Mapping[tuple[Equation, int], Spec]
    outputs: Mapping[tuple[Graph, int], Spec]
    detours: Mapping[tuple[tuple[int, ...], Spec, Spec], tuple[Spec, ...]]


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device at the peak of a step.

    Attributes:
      state_bytes: state (arguments that come back updated).
      inputs_bytes: other arguments.
      outputs_bytes: results that do not reuse an argument's buffer.
      temporary_bytes: activations, gradients and everything else alive at the peak.
    """

    state_bytes: int
    inputs_bytes: int
    outputs_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The sum of all parts."""
        return self.state_bytes + self.inputs_bytes + self.outputs_bytes + self.temporary_bytes


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind over the same axes.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
      axes: mesh axes.
      count: how many a step.
      nbytes: bytes a step, of whole buffers as the compiled program states them.
      time_s: seconds a step.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int
    time_s: float


@final
@dataclass(frozen=True, slots=True)
class Resharding:
    """A point at which a value moves from one spec to another.

    Attributes:
      what: type of the value, and its path if it is an argument.
      source_line: where the value is made.
      source, target: specs.
      kinds: collectives of one move.
      nbytes: bytes a step.
      times: moves a step.
      time_s: seconds a step.
    """

    what: str
    source_line: str
    source: Spec
    target: Spec
    kinds: tuple[str, ...]
    nbytes: int
    times: int
    time_s: float


@final
@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was considered.

    Attributes:
      name: "data parallel", "fully sharded (ZeRO-3)", "tensor parallel (Megatron)", "mesh (2, 4)", ...
      time_s: estimated step time, infinite if there is none.
      peak_bytes: estimated peak on one device.
      note: why it was not taken.
    """

    name: str
    time_s: float
    peak_bytes: int
    note: str


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """One flat argument or result.

    Attributes:
      path: slash form.
      type: dtype and shape.
      spec: its sharding.
      nbytes: whole size.
      state: whether it comes back updated.
    """

    path: str
    type: str
    spec: Spec
    nbytes: int
    state: bool


@final
@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The stages of a pipelined step and the order in which they work.

    Attributes:
      schedule: its name.
      placement: the rank that holds each stage.
      rows: for each rank its actions in order (`autoshard.schedules.read_schedule`).
      cuts: numbers of the forward equations that begin a stage; one less than stages.
      devices: on each rank.
      stages: the plan of each stage, for its own program (`autoshard.passes.stage_graphs`) on its rank's devices; their
        times and memory are those of a step without waiting.
      forward_s, backward_s: for each stage, seconds of one microbatch.
      weights_s: of the backward pass's second part, beyond `backward_s`; 0 where it is in one.
      held: for each stage, the most microbatches whose activations it holds.
      runtime: "mpmd": each stage's own programs; "one-program": all stages as one.
    """

    schedule: str
    placement: tuple[int, ...]
    rows: tuple[str, ...]
    cuts: tuple[int, ...]
    devices: int
    stages: tuple[Plan, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weights_s: tuple[float, ...]
    held: tuple[int, ...]
    runtime: str = "mpmd"


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How one step runs on one mesh, or on a mesh for each stage of a pipeline.

    Attributes:
      fingerprint: of the program the plan belongs to.
      cluster: name of the devices planned for.
      mesh: axes and sizes.
      inputs, outputs: flat arguments and results with their shardings.
      specs, values, operands, output_ids: see the module's text.
      detours: reshardings in more than one step.
      time_s: estimated step time; compute_s of it is compute and traffic_s collectives.
      memory: estimated peak on one device.
      memory_limit: most bytes a device may hold.
      collectives: what travels, by kind and axes.
      reshardings: resharding points, dearest first.
      alternatives: what else was considered, best first.
      why: what was chosen and what was refused, one line each.
      solver: engine, result and gap.
      donated: flat inputs whose buffers are reused.
      timeline: the simulated step.
      microbatches: into how many parts the batch is cut; the program the plan belongs to has the loop over them.
      remat: whether the program computes parts of its forward pass again.
      groups: of devices that keep sums over examples for themselves until the last microbatch; 1: they are summed for
        every microbatch.
      pipeline: stages and schedule, None for one mesh; the mesh then has the stages as its first axis, shardings of
        values stand in the stages' plans, and those of arguments and results speak of the mesh of their own stage.
      compiler: compiles the program the plan was made for; not saved, None for a plan read from a file.
    """

    fingerprint: str
    cluster: str
    mesh: MeshShape
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    specs: tuple[Spec, ...]
    values: tuple[int, ...]
    operands: tuple[int, ...]
    output_ids: tuple[int, ...]
    detours: tuple[Detour, ...]
    time_s: float
    compute_s: float
    traffic_s: float
    memory: Memory
    memory_limit: int
    collectives: tuple[Collective, ...]
    reshardings: tuple[Resharding, ...]
    alternatives: tuple[Alternative, ...]
    why: tuple[str, ...]
    solver: str
    donated: tuple[int, ...] = field(default=())
    timeline: Timeline = NO_TIMELINE
    microbatches: int = 1
    remat: bool = False
    groups: int = 1
    pipeline: PipelinePlan | None = None
    compiler: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def input_specs(self) -> tuple[Spec, ...]:
        """The sharding of each flat argument."""
        return tuple(a.spec for a in self.inputs)

    @property
    def output_specs(self) -> tuple[Spec, ...]:
        """The sharding of each flat result."""
        return tuple(a.spec for a in self.outputs)

    def decisions(self, graph: Graph) -> Decisions:
        """The plan's specs attached to a graph.

        Raises:
          PlanError: the graph is not the one the plan was made for.
        """
        check_fingerprint(self, graph)
        assert self.pipeline is None, "the decisions of a pipeline are those of its stages"
        values = dict(_known(self, graph_values(graph), self.values))
        operands = dict(_known(self, graph_operands(graph), self.operands))
        outputs = dict(_known(self, graph_outputs(graph), self.output_ids))
        detours = {
            (shape, self.specs[source], self.specs[way[-1]]): tuple(self.specs[n] for n in way)
            for shape, source, way in self.detours
        }
        return Decisions(values, operands, outputs, detours)

    def compile(self, target: Any = None, **options: Any) -> Any:
        """Compiles the planned program with XLA's GPU compiler, for devices that need not be here.

        Args:
          target: preset such as "h100x8", `Cluster` or `DeviceSpec` with as many devices as the plan's mesh; None: what
            was planned for.
          **options: ptx=True for the kernels' code, memory_bytes=... for a device with other memory, and the others of
            `autoshard.runtime.compile_deviceless`.

        Returns:
          A `CompiledReport`: peak memory by part, kernels, collectives with bytes and overlap. Of a pipeline a tuple of
          `StageReport`s, one for each program of each stage.

        Raises:
          PlanError: the plan was read from a file, which has no program.
          CompileError: the `deviceless` extra is not installed, or XLA refused the program.
        """
        if self.compiler is None:
            raise PlanError(
                explain(
                    "compile was called on a plan without its program",
                    "a plan made by step.plan(...) in this process",
                    "load the plan into the step (step.load(plan)) and call step.plan(...).compile(...)",
                )
            )
        return self.compiler(self, target, **options)

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        return json.dumps({"format": FORMAT, **_encode(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads what `to_json` wrote.

        Raises:
          PlanError: not JSON, not a plan, or of another format.
        """
        return _decode_plan(text)

    def __reduce__(self) -> tuple[Callable[[str], Plan], tuple[str]]:
        """A pickle is like a file: the plan that is read from it cannot `compile`."""
        return Plan.from_json, (self.to_json(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __str__(self) -> str:
        from autoshard.show import show_plan

        return show_plan(self)


def fingerprint(graph: Graph) -> str:
    """A hash of the program: equations, shapes, dtypes and literals, not names or source lines."""
    return hashlib.sha256(print_graph(graph).encode()).hexdigest()[:16]


def check_fingerprint(plan: Plan, graph: Graph) -> None:
    """Raises PlanError if the plan belongs to another program."""
    found = fingerprint(graph)
    if found != plan.fingerprint:
        raise PlanError(
            explain(
                f"the plan belongs to program {plan.fingerprint}, this step is {found}",
                "the program the plan was made for (same code, shapes, dtypes and JAX version)",
                "plan again with step.plan(...)",
            )
        )


def graph_values(graph: Graph) -> Iterator[Value]:
    """Every value in order of definition, bodies after the equation they belong to."""
    yield from graph.inputs
    yield from (value for value, _ in graph.constants)
    for equation in graph.equations:
        yield from equation.outputs
        for body in equation.graphs:
            yield from graph_values(body)


def graph_operands(graph: Graph) -> Iterator[tuple[Equation, int]]:
    """Every operand of every equation."""
    for equation in graph.equations:
        for k in range(len(equation.inputs)):
            yield equation, k
        for body in equation.graphs:
            yield from graph_operands(body)


def graph_outputs(graph: Graph) -> Iterator[tuple[Graph, int]]:
    """Every output of the graph and of its bodies."""
    for k in range(len(graph.outputs)):
        yield graph, k
    for equation in graph.equations:
        for body in equation.graphs:
            yield from graph_outputs(body)


def _known(plan: Plan, keys: Iterator[Any], numbers: tuple[int, ...]) -> Iterator[tuple[Any, Spec]]:
    for key, number in zip(keys, numbers, strict=True):
        if number >= 0:
            yield key, plan.specs[number]


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value) if f.name != "compiler"}
    if isinstance(value, tuple):
        return [_encode(v) for v in cast("tuple[Any, ...]", value)]
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in cast("list[Any]", value)) if isinstance(value, list) else value


def _rows(kind: Callable[..., T], rows: list[dict[str, Any]]) -> tuple[T, ...]:
    return tuple(kind(**{k: _tuples(v) for k, v in row.items()}) for row in rows)


def _decode_plan(text: str) -> Plan:
    todo = "save plans with plan.to_json(), or plan again"
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(explain(f"not JSON: {error}", "a plan written by Plan.to_json", todo)) from error
    if not isinstance(found, dict) or "format" not in found:
        given = f"a JSON {type(found).__name__} without a format"  # pyright: ignore[reportUnknownArgumentType]
        raise PlanError(explain(given, "a plan written by Plan.to_json", todo))
    raw = cast("dict[str, Any]", found)
    if raw.pop("format") != FORMAT:
        raise PlanError(explain("a plan of another format", f"format {FORMAT}", "plan again with this version"))
    return _plan_of(raw, todo)


def _plan_of(raw: dict[str, Any], todo: str) -> Plan:
    names = {f.name for f in fields(Plan)} - {"compiler"}
    wrong = sorted(set(raw) ^ names)
    if wrong:
        raise PlanError(explain(f"a plan with missing or unknown fields {wrong}", f"the fields {sorted(names)}", todo))
    try:
        made = {name: _tuples(value) for name, value in raw.items()}
        made["memory"] = Memory(**raw["memory"])
        for name, kind in (
            ("inputs", Argument),
            ("outputs", Argument),
            ("collectives", Collective),
            ("reshardings", Resharding),
            ("alternatives", Alternative),
        ):
            made[name] = _rows(kind, raw[name])
        pipeline = raw["pipeline"]
        if pipeline is not None:
            stages = tuple(_plan_of(stage, todo) for stage in pipeline["stages"])
            known = {k: _tuples(v) for k, v in pipeline.items() if k != "stages"}
            made["pipeline"] = PipelinePlan(stages=stages, **known)
        times = raw["timeline"]
        made["timeline"] = Timeline(
            _rows(Lane, times["lanes"]),
            _rows(Span, times["spans"]),
            _rows(MemoryCurve, times["memory"]),
            _rows(OperatorCost, times["costs"]),
        )
        return Plan(**made)
    except (TypeError, KeyError, AttributeError) as error:
        raise PlanError(explain(f"a damaged plan: {error}", "a plan written by Plan.to_json", todo)) from error
