"""What is known about a step besides its graph: names, state in and out, what may be donated.

State is found in two moves. By structure: an argument and an output of the same tree, shapes and
dtypes (`autoshard.runtime.pairing`). By flow: a step that returns gradients looks the same by
structure, so a pair only counts as state if some leaf's new value is its old value plus something
(or the old value with parts overwritten), which gradients are not. Formally, for each value v the
least sets of inputs with

    carried(v)  inputs that reach v by identities, +, - (left operand), select, slice updates, casts
    mixed(v)    inputs that reach v by any elementwise operation

where only operands of v's own shape count. Moments (`b1*m + (1-b1)*g`) are only mixed; they count
as state once some other pair of the step is carried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from autoshard import jax_compat
from autoshard.ir.graph import Apply, Atom, Equation, Graph, Literal, Value

Inputs = frozenset[int]
Flow = tuple[Inputs, Inputs]
"""(carried, mixed): positions of graph inputs."""

NOTHING: Flow = (frozenset(), frozenset())

CARRY_ALL = frozenset(
    {"add", "add_any", "max", "min", "copy", "copy_p", "convert_element_type", "optimization_barrier"}
)
"""Operands whose value goes on into the result, whatever their place."""

CARRY_FIRST = frozenset(
    {
        "sub",
        "dynamic_update_slice",
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter-sub",
        "scatter_sub",
        "reduce_precision",
        "sharding_constraint",
        "reshard",
        "mesh_cast",
        "device_put",
        "stop_gradient",
    }
)
"""Only the first operand goes on."""

CARRY_LATER = frozenset({"select_n", "clamp"})
"""The first operand chooses or bounds, the others go on."""

MIX = frozenset(
    {
        "mul",
        "div",
        "neg",
        "sub",
        "pow",
        "integer_pow",
        "sqrt",
        "rsqrt",
        "square",
        "sign",
        "exp",
        "abs",
        "rem",
        "nextafter",
    }
    | {"and", "or", "xor", "not", "round", "floor", "ceil"}
)
"""Elementwise operations that keep a value's place but not the value."""


@final
@dataclass(frozen=True, slots=True)
class StepInfo:
    """Names and roles of a step's flat inputs and outputs.

    Attributes:
      input_paths: of each flat input, slash form ("state/params/mlp/kernel").
      input_arguments: of each flat input, the position of the argument it belongs to.
      argument_names: of each argument ("state", "batch", "args/0").
      output_paths: of each flat output, slash form ("out/0/params/mlp/kernel").
      output_parts: of each flat output, which top-level part of the result it belongs to; -1 for the
        updated state of objects passed as arguments (Flax NNX).
      pairs: (flat input, flat output) that are one piece of state before and after the step.
      donated: flat inputs whose buffers the step may reuse.
    """

    input_paths: tuple[str, ...]
    input_arguments: tuple[int, ...]
    argument_names: tuple[str, ...]
    output_paths: tuple[str, ...]
    output_parts: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.input_paths) == len(self.input_arguments), "one argument for each input path"
        assert len(self.output_paths) == len(self.output_parts), "one part for each output path"
        assert all(0 <= i < len(self.input_paths) for i in self.donated), "donated inputs exist"


def output_flow(graph: Graph) -> tuple[Flow, ...]:
    """Of each graph output, the inputs carried and mixed into it."""
    return _run(graph, [(frozenset({i}), frozenset({i})) for i in range(len(graph.inputs))])


def _run(graph: Graph, inputs: Sequence[Flow]) -> tuple[Flow, ...]:
    flow: dict[Value, Flow] = dict(zip(graph.inputs, inputs, strict=True))
    for equation in graph.equations:
        flows = _equation(equation, [_read(flow, atom) for atom in equation.inputs])
        for value, found in zip(equation.outputs, flows, strict=True):
            if found[1]:
                flow[value] = found
    return tuple(_read(flow, atom) for atom in graph.outputs)


def _read(flow: dict[Value, Flow], atom: Atom) -> Flow:
    return NOTHING if isinstance(atom, Literal) else flow.get(atom, NOTHING)


def _equation(equation: Equation, inputs: Sequence[Flow]) -> Sequence[Flow]:
    if not isinstance(equation, Apply):
        return [inputs[0]]
    if not equation.outputs:
        return []
    name = equation.name
    if name == "scan":
        constants, carries = jax_compat.scan_layout(equation.params)
        body = equation.graphs[0]
        start = [*inputs[: constants + carries], *([NOTHING] * (len(body.inputs) - constants - carries))]
        after = _run(body, start)
        return [*after[:carries], *([NOTHING] * (len(equation.outputs) - carries))]
    if name == "while":
        skip = int(equation.params["cond_nconsts"])
        return _run(equation.graphs[1], inputs[skip:])
    if name == "cond":
        branches = [_run(branch, inputs[1:]) for branch in equation.graphs]
        return [_union(flows) for flows in zip(*branches, strict=True)]
    if name == "optimization_barrier":
        return list(inputs)
    shaped = [
        found if atom.shape == equation.outputs[0].shape else NOTHING
        for atom, found in zip(equation.inputs, inputs, strict=True)
    ]
    single = _apply(name, shaped)
    return [single, *([NOTHING] * (len(equation.outputs) - 1))]


def _apply(name: str, inputs: Sequence[Flow]) -> Flow:
    if name in CARRY_ALL:
        return _union(inputs)
    if name in CARRY_LATER:
        return _union(inputs[1:])
    mixed = frozenset[int]().union(*(found[1] for found in inputs))
    if name in CARRY_FIRST:
        return inputs[0][0], mixed
    return (frozenset(), mixed) if name in MIX else NOTHING


def _union(flows: Iterable[Flow]) -> Flow:
    carried: Inputs = frozenset()
    mixed: Inputs = frozenset()
    for found in flows:
        carried, mixed = carried | found[0], mixed | found[1]
    return carried, mixed


def state_groups(graph: Graph, groups: Sequence[Sequence[tuple[int, int]]]) -> tuple[Sequence[tuple[int, int]], ...]:
    """Those groups of (flat input, flat output) pairs that are state rather than gradients.

    Args:
      graph: the traced step.
      groups: each the pairs of one argument matched by structure.
    """
    flow = output_flow(graph)

    def holds(group: Sequence[tuple[int, int]], kind: int) -> bool:
        return any(i in flow[o][kind] for i, o in group)

    if not any(holds(group, 0) for group in groups):
        return ()
    return tuple(group for group in groups if holds(group, 0) or holds(group, 1))


def check_info(info: StepInfo, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Asserts that the info speaks of exactly these flat inputs and outputs."""
    assert len(info.input_paths) == len(inputs), f"{len(info.input_paths)} paths for {len(inputs)} inputs"
    assert len(info.output_paths) == len(outputs), f"{len(info.output_paths)} paths for {len(outputs)} outputs"
