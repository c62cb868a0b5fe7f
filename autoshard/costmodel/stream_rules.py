"""Work rules of memory-bound primitives: elementwise, reductions, movement, indexed access, random bits, calls."""

from __future__ import annotations

import math
from typing import Any

from autoshard.costmodel.primitives import (
    CALLBACKS,
    CALLS,
    COLLECTIVES,
    CONTROL_FLOW,
    CUMULATIVE,
    CUSTOM_CALLS,
    ELEMENTWISE,
    MOVES,
    NOTHING,
    RANDOM,
    REDUCTIONS,
    SCATTERS,
    TRANSCENDENTAL,
    VIEWS,
    WINDOWS,
)
from autoshard.costmodel.work import (
    Work,
    WorkKind,
    bytes_of,
    equation_work,
    make_work,
    size_of,
    vector_class,
    with_bytes,
    work_rule,
)
from autoshard.ir import Apply, from_jaxpr

RANDOM_FLOPS = 60
"""Integer operations for one 32-bit word: Threefry-2x32 has 20 rounds of an add, a rotation (two shifts, an or) and
a xor for two words, and key injections (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""

CUMULATIVE_FLOPS = 2
"""Operations an element: a work-efficient scan does 2 n (Blelloch, "Prefix sums and their applications", 1990)."""


@work_rule(*ELEMENTWISE)
def _elementwise(equation: Apply) -> Work:
    elements = size_of(equation.outputs[0])
    return make_work(equation, WorkKind.ELEMENTWISE, ELEMENTWISE[equation.name] * elements)


@work_rule(*TRANSCENDENTAL)
def _transcendental(equation: Apply) -> Work:
    elements = size_of(equation.outputs[0])
    return make_work(equation, WorkKind.ELEMENTWISE, 0, TRANSCENDENTAL[equation.name] * elements)


@work_rule("integer_pow")
def _integer_pow(equation: Apply) -> Work:
    """Repeated squaring: one product a bit and one more a set bit."""
    power = abs(int(equation.params["y"]))
    products = max(power.bit_length() - 1 + power.bit_count() - 1, 0) + (int(equation.params["y"]) < 0)
    return make_work(equation, WorkKind.ELEMENTWISE, products * size_of(equation.outputs[0]))


@work_rule(*REDUCTIONS)
def _reduction(equation: Apply) -> Work:
    """One operation an element that goes in."""
    operand = equation.inputs[0]
    last = len(operand.shape) - 1
    form = "" if last in equation.params.get("axes", (last,)) else "major"
    return make_work(equation, WorkKind.REDUCE, size_of(operand), form=form)


@work_rule(*CUMULATIVE)
def _cumulative(equation: Apply) -> Work:
    elements = size_of(equation.inputs[0])
    logs = 2 * elements if equation.name == "cumlogsumexp" else 0  # an exponential and a logarithm
    return make_work(equation, WorkKind.REDUCE, CUMULATIVE_FLOPS * elements, logs)


@work_rule(*WINDOWS)
def _window(equation: Apply) -> Work:
    window = math.prod(equation.params["window_dimensions"])
    return make_work(equation, WorkKind.REDUCE, window * size_of(equation.outputs[0]))


@work_rule("select_and_scatter", "select_and_scatter_add", "select_and_gather_add")
def _select_window(equation: Apply) -> Work:
    """The window is looked through once for each element of the smaller side."""
    window = math.prod(equation.params["window_dimensions"])
    return make_work(equation, WorkKind.REDUCE, window * min(size_of(equation.inputs[0]), size_of(equation.outputs[0])))


@work_rule(*VIEWS, *NOTHING, *CONTROL_FLOW)
def _free(equation: Apply) -> Work:
    """Nothing runs; the bodies of control flow are costed on their own."""
    return Work(WorkKind.FREE, 0.0, "f32", 0.0, (0.0,) * len(equation.inputs), (0.0,) * len(equation.outputs))


@work_rule(*MOVES)
def _move(equation: Apply) -> Work:
    last = len(equation.outputs[0].shape) - 1
    moved = equation.name == "transpose" and equation.params["permutation"][last] != last
    return make_work(equation, WorkKind.MOVE, form="minor" if moved else "")


@work_rule("slice", "dynamic_slice")
def _slice(equation: Apply) -> Work:
    """Only what is taken is read."""
    return with_bytes(make_work(equation, WorkKind.MOVE), {0: bytes_of(equation.outputs[0])})


@work_rule("dynamic_update_slice")
def _update_slice(equation: Apply) -> Work:
    """In place, as XLA does where it can: the update is read and written, the rest stays."""
    update = bytes_of(equation.inputs[1])
    return with_bytes(make_work(equation, WorkKind.MOVE), {0: 0.0}, {0: update})


@work_rule("gather")
def _gather(equation: Apply) -> Work:
    return with_bytes(make_work(equation, WorkKind.GATHER), {0: bytes_of(equation.outputs[0])})


@work_rule(*SCATTERS)
def _scatter(equation: Apply) -> Work:
    """In place: what the updates touch is read and written."""
    touched = bytes_of(equation.inputs[2])
    combined = size_of(equation.inputs[2]) if equation.name != "scatter" else 0
    read = touched if combined else 0.0
    return with_bytes(make_work(equation, WorkKind.SCATTER, combined), {0: read}, {0: touched})


@work_rule("sort", "approx_top_k", "top_k")
def _sort(equation: Apply) -> Work:
    """Comparisons of a sorting network, log2(d) (log2(d) + 1) / 2 an element (Batcher, 1968); of top_k log2(k)."""
    operand = equation.inputs[0]
    if equation.name == "sort":
        stages = math.log2(max(operand.shape[int(equation.params["dimension"])], 2))
        comparisons = stages * (stages + 1) / 2
    else:
        comparisons = math.log2(max(int(equation.params.get("k", 2)), 2))
    return make_work(equation, WorkKind.SORT, comparisons * size_of(operand))


@work_rule(*RANDOM)
def _random(equation: Apply) -> Work:
    words = sum(bytes_of(value) for value in equation.outputs) / 4
    return make_work(equation, WorkKind.RANDOM, RANDOM_FLOPS * words)


@work_rule(*COLLECTIVES)
def _collective(equation: Apply) -> Work:
    """Bytes in memory only: the wire is costed where the mesh is known."""
    return make_work(equation, WorkKind.COLLECTIVE)


@work_rule(*CALLBACKS, *CUSTOM_CALLS)
def _opaque(equation: Apply) -> Work:
    """Bytes of operands and results; operations of foreign code are not known and count as none."""
    return make_work(equation, WorkKind.OPAQUE)


@work_rule("pallas_call")
def _pallas(equation: Apply) -> Work:
    """The kernel's own `cost_estimate`, else bytes of operands and results only."""
    work = make_work(equation, WorkKind.OPAQUE)
    estimate = equation.params.get("cost_estimate")
    if estimate is None:
        return work
    share = estimate.bytes_accessed / work.nbytes if work.nbytes else 1.0
    return Work(
        WorkKind.OPAQUE,
        float(estimate.flops),
        _widest_class(equation),
        float(estimate.transcendentals),
        tuple(nbytes * share for nbytes in work.operand_bytes),
        tuple(nbytes * share for nbytes in work.result_bytes),
    )


def _widest_class(equation: Apply) -> str:
    """The matrix unit's class of the kernel's arrays: a kernel that gives an estimate mostly multiplies matrices."""
    dtypes = {str(atom.dtype) for atom in (*equation.inputs, *equation.outputs)}
    if "bfloat16" in dtypes:
        return "bf16"
    return "f16" if "float16" in dtypes else vector_class(equation)


@work_rule(*CALLS)
def _call(equation: Apply) -> Work:
    """Operations of the body, bytes of operands and results. A shard_map's body runs on each device of its mesh."""
    times = _manual_devices(equation.params) if equation.name == "shard_map" else 1
    body = next(equation.params[name] for name in CALLS[equation.name] if name in equation.params)
    return _body_work(equation, body, times)


@work_rule("custom_linear_solve")
def _linear_solve(equation: Apply) -> Work:
    return _body_work(equation, equation.params["jaxprs"].solve, 1)


def _body_work(equation: Apply, body: Any, times: int) -> Work:
    flops: dict[str, float] = {}
    transcendentals = 0.0
    for inner, repeats in from_jaxpr(body).walk():
        work = equation_work(inner)
        flops[work.flops_class] = flops.get(work.flops_class, 0.0) + work.flops * repeats * times
        transcendentals += work.transcendentals * repeats * times
    flops_class = max(flops, key=lambda name: flops[name], default="f32")
    return make_work(equation, WorkKind.OPAQUE, sum(flops.values()), transcendentals, flops_class)


def _manual_devices(params: Any) -> int:
    mesh = params["mesh"]
    manual = params.get("manual_axes") or mesh.axis_names
    return math.prod(size for name, size in mesh.shape.items() if name in manual)
