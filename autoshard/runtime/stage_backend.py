"""A pipeline's programs on devices: one `jax.jit` a program, on its rank's mesh.

Between ranks goes `jax.device_put` where one process has the devices of both, else a program of both sides
(`autoshard.runtime.transfer`). State stays on its stage. Other results of a step are made known to all processes at its
end, as `jax.jit` would.

Every value that goes from one program to another has one sharding, that of the program that makes it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autoshard import jax_compat
from autoshard.cluster import Cluster
from autoshard.errors import ArgumentError, explain
from autoshard.ir import Graph, Reshard, Spec, StepInfo, Value, evaluate, partition_spec, replicated
from autoshard.passes import Part, StageGraph, StagePrograms, stage_programs
from autoshard.plan import Memory, PipelinePlan, Plan, fingerprint
from autoshard.runtime.arguments import NewSignature
from autoshard.runtime.compile_report import CompiledReport
from autoshard.runtime.compiled import Compiled, Planned, reader, same_avals, writer
from autoshard.runtime.deviceless import CompileTarget, compile_deviceless, deviceless_mesh
from autoshard.runtime.exchange import exchange
from autoshard.runtime.pipeline import Pair, Pipeline
from autoshard.runtime.pjit import auto_mesh, constrained
from autoshard.runtime.processes import is_here, nothing_of, put, spans_processes
from autoshard.runtime.socket_transfer import SocketTransfer, arrived
from autoshard.runtime.stage_costs import program_memory
from autoshard.runtime.stage_planning import Staged, stage_info
from autoshard.runtime.transfer import Transfer, one_at_a_time
from autoshard.runtime.watch import Watch, watch
from autoshard.schedules import StageTimes

PHASE_NAMES = {Part.BEFORE: "before", Part.FORWARD: "forward", Part.BACKWARD: "backward", Part.AFTER: "after"}


def rank_meshes(mesh: jax.sharding.Mesh, pipeline: PipelinePlan) -> list[jax.sharding.Mesh]:
    """For each stage the mesh of its rank, with automatic axes."""
    rows = mesh.devices.reshape(mesh.devices.shape[0], -1)
    found: list[jax.sharding.Mesh] = []
    for stage, plan in enumerate(pipeline.stages):
        grid = rows[pipeline.placement[stage]].reshape([n for _, n in plan.mesh])
        kinds = (jax.sharding.AxisType.Auto,) * len(plan.mesh)
        found.append(jax.sharding.Mesh(grid, tuple(name for name, _ in plan.mesh), axis_types=kinds))
    return found


NO_PROGRAMS = StagePrograms((), {}, frozenset(), (), (), ())


@final
@dataclass(frozen=True, slots=True)
class StageReport:
    """What XLA says of one program of a stage.

    Attributes:
      stage: its number.
      program: "before 0", "forward 0", "backward 0", "after 0", ...
      report: memory, kernels, collectives.
      estimate: of its memory; state counts as inputs.
    """

    stage: int
    program: str
    report: CompiledReport
    estimate: Memory


@final
class StageBackend:
    """Programs and places of a planned pipeline.

    Attributes:
      programs: of each stage.
      meshes: of each stage.
      inputs: for each stage where it has the step's inputs, by position.
      jitted: the programs, by stage and number.
    """

    def __init__(
        self,
        staged: Staged,
        pipeline: PipelinePlan,
        meshes: Sequence[jax.sharding.Mesh],
        donated: Sequence[int],
        pairs: Sequence[tuple[int, int]],
        name: str,
        on_pass: Callable[[str, Any], None] | None = None,
        only: int | None = None,
        donate: bool = True,
    ) -> None:
        self._donates = donate
        self._stages, self._name, self._donated = staged.stages, name, set(donated)
        self._pairs = dict(pairs)
        self.meshes = list(meshes)
        self.programs: list[StagePrograms] = []
        self._places: list[dict[Value, NamedSharding]] = []
        self.inputs: list[dict[int, NamedSharding]] = []
        for stage, (graph, plan) in enumerate(zip(staged.graphs, pipeline.stages, strict=True)):
            parts = staged.stages.graphs[stage]
            if only not in (None, stage):
                self.programs.append(NO_PROGRAMS)
                self._places.append({})
                self.inputs.append({})
                continue
            program = constrained(graph, plan, on_pass, auto_mesh(self.meshes[stage]))
            programs = stage_programs(parts, program)
            specs = stage_specs(parts, graph, program, plan, programs)
            placed = {v: NamedSharding(self.meshes[stage], partition_spec(spec)) for v, spec in specs.items()}
            self.programs.append(programs)
            self._places.append(placed)
            self.inputs.append({i: placed[v] for i, v in zip(parts.inputs, graph.inputs, strict=False)})
        self._numbers: dict[tuple[int, int], Any] = {}
        self._stackers: dict[tuple[int, Value], Any] = {}
        self.jitted: dict[tuple[int, int], Any] = {}
        self._transfers: dict[Any, Transfer | SocketTransfer | None] = {}
        self._here = [is_here(each) for each in self.meshes]
        self._alone = [not spans_processes(each) for each in self.meshes]

    def place_of(self, stage: int, value: Value) -> NamedSharding:
        """Where a stage has a value."""
        value = self.programs[stage].outside.get(value, value)
        found = self._places[stage].get(value)
        if found is None:
            found = NamedSharding(self.meshes[stage], partition_spec(replicated(len(value.shape))))
            self._places[stage][value] = found
        return found

    def program(self, stage: int, number: int) -> Callable[..., Sequence[Any]]:
        """See `Backend`. It waits for its results where XLA's CPU client may mix up collectives of processes."""
        made = self.programs[stage].programs[number]
        graph, mesh = made.graph, self.meshes[stage]

        def constrain(value: Any, reshard: Reshard) -> Any:
            return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, partition_spec(reshard.spec)))

        def run(*args: Any) -> tuple[Any, ...]:
            return tuple(evaluate(graph, args, constrain))

        part, turn = made.phase
        rounds = turn or sum(p.phase[0] is part for p in self.programs[stage].programs) > 1
        run.__name__ = run.__qualname__ = f"{self._name}_stage{stage}_{PHASE_NAMES[part]}{turn if rounds else ''}"
        jitted = jax.jit(
            run,
            in_shardings=tuple(self.place_of(stage, v) for v in graph.inputs),
            out_shardings=tuple(self.place_of(stage, v) for v in made.results),
            donate_argnums=self._given(stage, number) if self._donates else (),
        )
        self.jitted[stage, number] = jitted
        cpu = self.meshes[stage].devices.flat[0].platform == "cpu"
        if not (one_at_a_time() or (cpu and not self._alone[stage])):
            return jitted

        def in_turn(*args: Any) -> Sequence[Any]:
            return jax.block_until_ready(jitted(*jax.block_until_ready(args)))

        return in_turn

    def lowerable(self, stage: int, number: int, _mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
        """A program, jitted over the stage's own mesh, and its arguments without values."""
        self.program(stage, number)
        values = self.programs[stage].programs[number].graph.inputs
        args = [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self.place_of(stage, v), weak_type=bool(v.aval.weak_type))
            for v in values
        ]
        return self.jitted[stage, number], tuple(args)

    def likeness(self, stage: int, number: int) -> Hashable:
        """Equal for programs that compile to the same."""
        made = self.programs[stage].programs[number]
        specs = tuple(self.place_of(stage, v).spec for v in (*made.graph.inputs, *made.results))
        return fingerprint(made.graph), specs, self._given(stage, number) if self._donates else ()

    def _given(self, stage: int, number: int) -> tuple[int, ...]:
        """Operands whose buffers a program may reuse: accumulators, and state where its new value is made."""
        programs, parts = self.programs[stage], self._stages.graphs[stage]
        made = programs.programs[number]
        results = {programs.outside.get(v, v) for v in made.results}
        later = {v for p in programs.programs if p.phase > made.phase for v in p.graph.inputs}
        state: dict[Value, Value] = {}
        values = self._stages.cut.step.inputs
        for i, o in self._pairs.items():
            if i in self._donated and self._stages.home.get(i) == stage and o in parts.outputs and not self._shared(i):
                new = programs.outputs[parts.outputs.index(o)]
                if isinstance(new, Value):
                    state[values[i]] = new
        found: list[int] = []
        for k, value in enumerate(made.graph.inputs):
            outer = programs.outside.get(value, value)
            loop = made.phase[0] in (Part.FORWARD, Part.BACKWARD)
            accumulates = loop and outer in programs.totals and outer in results
            updates = not loop and value in state and state[value] in results and value not in later
            if accumulates or updates:
                found.append(k)
        return tuple(found)

    def _shared(self, position: int) -> bool:
        """Whether stages on the same devices read an input, which then is one array for all of them."""
        readers = [s for s, parts in enumerate(self._stages.graphs) if position in parts.inputs]
        return len({self.meshes[s].devices.flat[0] for s in readers}) < len(readers)

    def is_here(self, stage: int) -> bool:
        """See `Backend`."""
        return self._here[stage]

    def send(self, source: int, target: int, pairs: Sequence[Pair], arrays: Sequence[Any]) -> Sequence[Any] | None:
        """See `Backend`."""
        places = [self.place_of(target, v) for v, _ in pairs]
        if self._alone[source] and self._alone[target]:
            return jax.device_put(list(arrays), places)
        key = source, target, tuple(pairs)
        if key not in self._transfers:
            if not (self._here[source] or self._here[target]):
                return None
            one_side = set(self.meshes[source].devices.flat) == set(self.meshes[target].devices.flat)
            sources = [self.place_of(source, v) for _, v in pairs]
            self._transfers[key] = None if one_side else make_transfer([v.aval for v, _ in pairs], sources, places)
        transfer = self._transfers[key]
        return jax.device_put(list(arrays), places) if transfer is None else transfer(arrays)

    def stack(self, stage: int, value: Value, rows: Sequence[Any]) -> Any:
        """See `Backend`."""
        if (stage, value) not in self._stackers:
            place = self.place_of(stage, value)
            self._stackers[stage, value] = jax.jit(lambda *parts: jnp.stack(parts), out_shardings=place)
        return self._stackers[stage, value](*rows)

    def number(self, stage: int, microbatch: int) -> Any:
        """See `Backend`."""
        if (stage, microbatch) not in self._numbers:
            place = self.place_of(stage, self._stages.graphs[stage].number)
            self._numbers[stage, microbatch] = put(np.int32(microbatch), place)
        return self._numbers[stage, microbatch]


def stage_specs(
    parts: StageGraph, graph: Graph, program: Graph, plan: Plan, programs: StagePrograms
) -> dict[Value, Spec]:
    """The spec of every value between a stage's programs."""
    decisions = plan.decisions(graph)
    found: dict[Value, Spec] = dict(decisions.values)
    loop = parts.loop_of(program)
    body = loop.graphs[0]
    for equation in (*program.equations, *body.equations):
        if isinstance(equation, Reshard):
            found[equation.output] = equation.spec
    found.update(zip(graph.inputs, plan.input_specs, strict=True))
    found.update({v: spec for v, spec in zip(program.outputs, plan.output_specs, strict=True) if isinstance(v, Value)})
    first, sums = len(parts.consts), len(parts.sums)
    for k in range(sums):
        inner = body.inputs[first + k]
        found[loop.outputs[k]] = decisions.values.get(inner, replicated(len(inner.shape)))
    for part, stack in programs.stacked:
        found[stack] = ((), *found.get(part, replicated(len(part.shape))))
    return found


def build_pipeline(
    planned: Planned,
    staged: Staged,
    mesh: jax.sharding.Mesh,
    name: str,
    on_pass: Callable[[str, Any], None] | None = None,
    donate: bool = True,
) -> tuple[Compiled, Pipeline]:
    """The programs of a planned pipeline.

    Args:
      planned: the signature.
      staged: its stages.
      mesh: all devices; its first axis goes over the ranks.
      name: of the step.
      on_pass: called with each stage's graph as it is emitted.
      donate: whether programs may reuse the buffers of accumulators and state.
    """
    pipeline, info = planned.plan.pipeline, planned.info
    assert pipeline is not None, "a pipeline has stages"
    backend = StageBackend(
        staged, pipeline, rank_meshes(mesh, pipeline), info.donated, info.pairs, name, on_pass, donate=donate
    )
    times = StageTimes(pipeline.forward_s, pipeline.backward_s, pipeline.weights_s)
    runner = Pipeline(staged.stages, backend.programs, staged.schedule, backend, times)
    stages = staged.stages
    whole = NamedSharding(mesh, partition_spec(()))
    inputs = tuple(
        whole if stages.home.get(i) is None else backend.inputs[stages.home[i]][i] for i in range(len(planned.avals))
    )
    state = {o for _, o in info.pairs}
    known = {k for k in range(len(stages.output_home)) if k not in state and spans_processes(mesh)}
    homes: list[NamedSharding] = []
    outputs: list[NamedSharding] = []
    for k, stage in enumerate(stages.output_home):
        atom = None if stage is None else backend.programs[stage].outputs[stages.graphs[stage].outputs.index(k)]
        made = backend.place_of(stage, atom) if stage is not None and isinstance(atom, Value) else whole
        homes.append(made)
        outputs.append(whole if k in known else made)
    finish = _Finish([a.aval for a in stages.cut.step.outputs], homes, outputs)
    write = writer(planned.outputs)
    guard = watch() if spans_processes(mesh) else None

    def run_flat(flat: Sequence[Any], references: Any) -> Any:
        def place_input(position: int, stage: int) -> Any:
            array, target = flat[position], backend.inputs[stage][position]
            lies = isinstance(array, jax.Array) and array.committed and array.sharding == target
            return array if lies else put(array, target)

        return write(_watched(lambda: finish(runner.run(place_input)), guard), references)

    def lower(_flat: Sequence[Any], _references: Any) -> Any:
        raise ArgumentError(
            explain(
                f"{name} runs as a pipeline of {len(pipeline.stages)} stages, which is many programs",
                "a step on one mesh to lower",
                "use dump_dir= to see every stage's programs, or decorate with stages=1",
            )
        )

    run = guarded_run(planned, inputs, run_flat)
    return Compiled(planned, mesh, inputs, tuple(outputs), run, run_flat, lower), runner


def guarded_run(
    planned: Planned, inputs: Sequence[NamedSharding], run_flat: Callable[[Sequence[Any], Any], Any]
) -> Callable[..., Any]:
    """What takes the values of a call's slots; raises `NewSignature` for a call that `run_flat` is not for.

    Args:
      planned: the signature.
      inputs: where each flat array is read.
      run_flat: takes flat arrays that lie there, or are not committed, and references.
    """
    read, ambient, donated = reader(planned.template), jax_compat.ambient_mesh(), bool(planned.info.donated)

    def run(*values: Any) -> Any:
        flat, references = read(values)
        if jax_compat.ambient_mesh() != ambient or not same_avals(flat, planned.avals):
            raise NewSignature
        twice = donated and len(set(map(id, flat))) < len(flat)
        if twice or not settled(flat, inputs):
            raise NewSignature
        return run_flat(flat, references)

    return run


def compile_stages(
    staged: Staged,
    info: StepInfo,
    cluster: Cluster,
    plan: Plan,
    target: CompileTarget | None,
    **options: Any,
) -> tuple[StageReport, ...]:
    """Compiles every program of a pipeline for GPUs that need not be there, those that are alike once.

    Args:
      staged: its stages.
      info: names and roles of the step.
      cluster: what it was planned for.
      plan: the plan.
      target: what to compile for, None for `cluster`.
      **options: of `compile_deviceless`.
    """
    pipeline = plan.pipeline
    assert pipeline is not None, "a pipeline has stages"
    found: list[StageReport] = []
    known: dict[Hashable, CompiledReport] = {}
    for stage, (graph, part) in enumerate(zip(staged.stages.graphs, pipeline.stages, strict=True)):
        first = pipeline.placement[stage] * pipeline.devices
        mine = cluster.part(first, pipeline.devices)
        where = mine if target is None else target
        meshes = [deviceless_mesh(where, part.mesh)] * len(pipeline.stages)
        backend = StageBackend(staged, pipeline, meshes, info.donated, info.pairs, "step", only=stage)
        names = stage_info(graph, staged.stages, info)
        estimates = program_memory(staged.graphs[stage], part, graph, names, mine.device(0).kind)
        for number, (made, estimate) in enumerate(zip(backend.programs[stage].programs, estimates, strict=True)):
            key = (backend.likeness(stage, number), part.mesh, (mine.nodes, mine.wires) if target is None else None)
            if key not in known:
                build = functools.partial(backend.lowerable, stage, number)
                known[key] = compile_deviceless(build, where, part.mesh, **options)
            name = f"{PHASE_NAMES[made.phase[0]]} {made.phase[1]}"
            found.append(StageReport(stage, name, known[key], estimate))
    return tuple(found)


def settled(flat: Sequence[Any], inputs: Sequence[NamedSharding]) -> bool:
    """Whether arrays that are committed lie where they are read; the others are moved by the call."""
    return all(
        not (isinstance(array, jax.Array) and array.committed) or array.sharding == place
        for array, place in zip(flat, inputs, strict=True)
    )


def _watched(call: Callable[[], list[Any]], guard: Watch | None) -> list[Any]:
    """The call's results.

    Raises:
      ProcessLostError: another process died before or during the call.
    """
    if guard is None:
        return call()
    guard.check()
    try:
        return call()
    # jax 0.10 raises the first two for a collective that failed, sockets the third
    except (jax.errors.JaxRuntimeError, ValueError, OSError) as error:
        guard.check(error)
        raise


def make_transfer(
    avals: Sequence[Any], sources: Sequence[NamedSharding], targets: Sequence[NamedSharding]
) -> Transfer | SocketTransfer:
    """What moves values between devices of several processes: on CPUs beside programs, else as one."""
    (platform,) = {device.platform for device in sources[0].device_set}
    return (SocketTransfer if platform == "cpu" else Transfer)(avals, sources, targets)


@final
class _Finish:
    """A step's results as the user gets them: state on its stage, the rest known to all processes."""

    def __init__(self, avals: Sequence[Any], homes: Sequence[NamedSharding], places: Sequence[NamedSharding]) -> None:
        self._avals, self._places = avals, places
        afar = any(d.process_index != jax.process_index() for place in places for d in place.device_set)
        self._sockets = jax.default_backend() == "cpu" and afar
        moves: dict[Any, list[int]] = {}
        for k, (home, place) in enumerate(zip(homes, places, strict=True)):
            if home.mesh != place.mesh:
                moves.setdefault(home.mesh, []).append(k)
        self._moves = [
            (ks, make_transfer([avals[k] for k in ks], [homes[k] for k in ks], [places[k] for k in ks]))
            for ks in moves.values()
        ]

    def __call__(self, results: Sequence[Any]) -> list[Any]:
        found = list(results)
        for ks, transfer in self._moves:
            known = transfer([found[k] for k in ks])
            assert known is not None, "results are known to every process"
            for k, x in zip(ks, known, strict=True):
                found[k] = arrived(x)
        if self._sockets:
            exchange().flush()  # others can end the step without this process, whatever it does next
        every = zip(found, self._avals, self._places, strict=True)
        return [nothing_of(aval, place) if x is None else there(x, place) for x, aval, place in every]


def there(result: Any, place: NamedSharding) -> Any:
    """The result as an array; a literal is put at its place."""
    return result if isinstance(result, jax.Array) else put(jnp.asarray(result), place)
