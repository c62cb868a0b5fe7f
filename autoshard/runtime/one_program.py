"""The second runtime of pipelines: all stages as one `jax.jit` program over the whole mesh.

State lies as the other runtime has it, each array on its stage's devices only. For a call the stages' arrays are put
together without a copy (`slot_arrays`), and what the program gives is taken apart the same way.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.cluster import Cluster
from autoshard.errors import ArgumentError, explain
from autoshard.ir import Literal, StepInfo, Value, partition_spec
from autoshard.plan import Plan
from autoshard.runtime.compile_report import CompiledReport
from autoshard.runtime.compiled import Compiled, Planned, writer
from autoshard.runtime.deviceless import CompileTarget, compile_deviceless
from autoshard.runtime.hlo_module import Computation, Instruction, Module, parse_module, replica_groups
from autoshard.runtime.one_program_emit import emit_pipeline
from autoshard.runtime.one_program_layout import Item, Layout, pipeline_layout
from autoshard.runtime.options import ONE_PROGRAM
from autoshard.runtime.pjit import auto_mesh
from autoshard.runtime.slot_arrays import Held, SlotArrays
from autoshard.runtime.slots import Slot
from autoshard.runtime.stage_backend import build_pipeline, compile_stages, guarded_run, rank_meshes, there
from autoshard.runtime.stage_planning import Staged


def jit_pipeline(layout: Layout, mesh: jax.sharding.Mesh, name: str, donate: bool = True) -> Any:
    """The jitted program (state slots, input slots) -> (state slots, result slots).

    Args:
      layout: where everything lies.
      mesh: automatic axes, `stage` first.
      name: of the step.
      donate: whether it may reuse the buffers of state.
    """
    step = emit_pipeline(layout, mesh)

    def run(states: Any, inputs: Any) -> Any:
        return step(states, inputs)

    run.__name__ = run.__qualname__ = name

    def places(slots: Sequence[Slot]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, slot.whole_spec()) for slot in slots)

    states, inputs, results = layout.states.slots, layout.inputs.slots, layout.results.slots
    return jax.jit(
        run,
        in_shardings=(places(states), places(inputs)),
        out_shardings=(places(states), places(results)),
        donate_argnums=(0,) if donate else (),
    )


def build_one_program(
    planned: Planned,
    staged: Staged,
    mesh: jax.sharding.Mesh,
    name: str,
    on_pass: Callable[[str, Any], None] | None = None,
    donate: bool = True,
) -> Compiled:
    """A planned pipeline as one program, compiled.

    Args:
      planned: the signature.
      staged: its stages.
      mesh: all devices; its first axis goes over the ranks.
      name: of the step.
      on_pass: called with each stage's graph as it is emitted.
      donate: whether the program may reuse the buffers of state.

    Raises:
      ArgumentError: a branch of the program would wait for ranks that do not take it.
    """
    pipeline, info, stages = planned.plan.pipeline, planned.info, staged.stages
    assert pipeline is not None, "a pipeline has stages"
    layout = pipeline_layout(staged, pipeline, info, on_pass)
    meshes = rank_meshes(mesh, pipeline)
    automatic = auto_mesh(mesh)
    by_rank = [meshes[mine[0]] for mine in layout.stages_of]

    def place_of(stage: int, value: Value) -> NamedSharding:
        code = layout.codes[stage]
        spec = code.specs.get(code.top(value), ((),) * len(value.shape))
        return NamedSharding(meshes[stage], partition_spec(spec))

    def atom_of(k: int, stage: int) -> Any:
        code = layout.codes[stage]
        return code.programs.outputs[code.parts.outputs.index(k)]

    def taken(item: Item) -> Held:
        value = dict(layout.codes[item.stage].inputs)[item.position]
        return Held(item, value.aval, place_of(item.stage, value))

    def given(item: Item) -> Held:
        atom = atom_of(item.position, item.stage)
        return Held(item, atom.aval, place_of(item.stage, atom))

    states = SlotArrays(layout.states.slots, [taken(x) for x in layout.state_inputs], automatic, by_rank)
    inputs = SlotArrays(layout.inputs.slots, [taken(x) for x in layout.input_items], automatic, by_rank)
    results = SlotArrays(layout.results.slots, [given(x) for x in layout.result_items], automatic, by_rank)
    jitted = jit_pipeline(layout, automatic, name, donate)
    compiled = jitted.lower(states.structs(), inputs.structs()).compile()
    check_branches(parse_module(compiled.as_text()), automatic.devices.size // layout.ranks, name)

    whole = NamedSharding(mesh, partition_spec(()))
    homes = [stages.home.get(i) for i in range(len(planned.avals))]
    values = [dict(code.inputs) for code in layout.codes]
    ins = tuple(whole if s is None else place_of(s, values[s][i]) for i, s in enumerate(homes))
    outs: list[NamedSharding] = []
    literals: dict[int, Any] = {}
    for k, stage in enumerate(stages.output_home):
        atom = stages.cut.step.outputs[k] if stage is None else atom_of(k, stage)
        if isinstance(atom, Literal):
            literals[k] = atom.value
        outs.append(place_of(stage, atom) if stage is not None and isinstance(atom, Value) else whole)
    wanted = [(x, place_of(x.stage, values[x.stage][x.position])) for x in layout.state_inputs]
    others = [(x, place_of(x.stage, values[x.stage][x.position])) for x in layout.input_items]
    state_positions = [x.position for x in layout.state_outputs]
    result_positions = [x.position for x in layout.result_items]
    state_inputs = {x.position for x in layout.state_inputs}
    write = writer(planned.outputs)

    def run_flat(flat: Sequence[Any], references: Any) -> Any:
        first = [_moved(flat[x.position], place, False) for x, place in wanted]
        second = [_moved(flat[x.position], place, x.position in state_inputs) for x, place in others]
        new, made = compiled(states.together(first), inputs.together(second))
        found: dict[int, Any] = {k: there(value, outs[k]) for k, value in literals.items()}
        found.update(zip(state_positions, states.apart(new, again=True), strict=True))
        found.update(zip(result_positions, results.apart(made), strict=True))
        return write([found[k] for k in range(len(outs))], references)

    def lower(_flat: Sequence[Any], _references: Any) -> Any:
        return jitted.lower(states.structs(), inputs.structs())

    run = guarded_run(planned, ins, run_flat)
    return Compiled(planned, mesh, ins, tuple(outs), run, run_flat, lower)


def _moved(array: Any, target: NamedSharding, apart: bool) -> Any:
    """The array at its place; apart: in memory of its own, for the other copy is given away."""
    if isinstance(array, jax.Array) and array.committed and array.sharding == target and not apart:
        return array
    return jax.device_put(array, target, may_alias=False if apart else None)


def check_branches(module: Module, devices: int, name: str) -> None:
    """Refuses a program in which a branch waits for devices of ranks that may take another.

    Collectives are done by groups, which lie on one rank; a collective-permute is waited for by all devices (XLA:CPU of
    jax 0.10.1 ends the process after a while).

    Args:
      module: compiled.
      devices: of each rank.
      name: of the step.

    Raises:
      ArgumentError: there is one.
    """
    for computation in _branches(module):
        for instruction in computation.instructions:
            if _leaves_rank(instruction, module.devices, devices):
                raise ArgumentError(
                    explain(
                        f"XLA made {instruction.opcode} ({instruction.type}) of a reshard inside a stage of {name}, "
                        "which devices of all stages wait for, though they are at different work",
                        "stages in whose programs only devices of one stage talk to each other",
                        'use pipeline_runtime="mpmd", or another mesh for the stages',
                    )
                )


def _branches(module: Module) -> Iterator[Computation]:
    """Computations that run inside a branch."""
    todo = [
        called
        for computation, _ in module.walk()
        for instruction in computation.instructions
        if instruction.opcode == "conditional"
        for _, called in instruction.called()
    ]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        yield module.computations[name]
        todo += [called for x in module.computations[name].instructions for _, called in x.called()]


def _leaves_rank(instruction: Instruction, total: int, devices: int) -> bool:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in ("collective-permute", "collective-broadcast", "send", "recv"):
        return True
    if opcode not in ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "ragged-all-to-all"):
        return False
    groups = replica_groups(instruction.attributes, total)
    return any(len({d // devices for d in group}) > 1 for group in groups)


def build_stages(
    planned: Planned,
    staged: Staged,
    mesh: jax.sharding.Mesh,
    name: str,
    on_pass: Callable[[str, Any], None] | None = None,
) -> Compiled:
    """A planned pipeline, built for the runtime that its plan names."""
    pipeline = planned.plan.pipeline
    if pipeline is not None and pipeline.runtime == ONE_PROGRAM:
        return build_one_program(planned, staged, mesh, name, on_pass)
    return build_pipeline(planned, staged, mesh, name, on_pass)[0]


def pipeline_compiler(plan: Plan) -> Callable[..., Any]:
    """What compiles a pipeline for GPUs that need not be there, for the runtime that its plan names."""
    assert plan.pipeline is not None, "a pipeline has stages"
    return compile_one_program if plan.pipeline.runtime == ONE_PROGRAM else compile_stages


def compile_one_program(
    staged: Staged,
    info: StepInfo,
    cluster: Cluster,
    plan: Plan,
    target: CompileTarget | None,
    **options: Any,
) -> CompiledReport:
    """Compiles a pipeline as one program for GPUs that need not be there.

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
    layout = pipeline_layout(staged, pipeline, info)

    def build(mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
        args = [
            tuple(
                jax.ShapeDtypeStruct(s.whole_shape(layout.ranks), s.dtype, sharding=NamedSharding(mesh, s.whole_spec()))
                for s in table.slots
            )
            for table in (layout.states, layout.inputs)
        ]
        return jit_pipeline(layout, mesh, "step"), tuple(args)

    return compile_deviceless(build, cluster if target is None else target, plan.mesh, **options)
