"""Every use of JAX's private modules and every switch over JAX versions (0.10 to 0.12).

jax 0.10.2 computes wrong values on CPU (jax-ml/jax#39103) and is refused at import.
"""
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import io
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_HERE = str(Path(jax.__file__).parent)


def check_version(version: tuple[int, ...]) -> str | None:
    """Refuses a JAX that autoshard cannot keep its promises on.

    Args:
      version: `jax.__version_info__`.

    Returns:
      A warning for a version newer than any tested, else None.

    Raises:
      ImportError: the version is too old, or is 0.10.2.
    """
    given = f"jax {'.'.join(map(str, version))} is installed"
    todo = "pip install 'jax>=0.10,!=0.10.2,<0.13'"
    if version[:3] == (0, 10, 2):
        reason = "it computes wrong values on CPU, jax-ml/jax#39103"
        raise ImportError(f"{given}.\n  expected: another version of jax: {reason}.\n  to do: {todo}.")
    if version < (0, 10):
        reason = "autoshard reads private parts of jax that were others before"
        raise ImportError(f"{given}.\n  expected: jax 0.10 or newer: {reason}.\n  to do: {todo}.")
    if version >= (0, 13):
        return f"{given}; autoshard is tested on 0.10 to 0.12. To be safe: {todo}."
    return None


# Before the private imports: on a version that is refused they may fail with an error that says nothing.
_untested = check_version(jax.__version_info__)
if _untested is not None:
    warnings.warn(_untested, stacklevel=2)

from jax._src import core as _core  # noqa: E402
from jax._src import source_info_util as _source_info  # noqa: E402
from jax._src.interpreters import partial_eval as _partial_eval  # noqa: E402

Jaxpr = _core.Jaxpr
ShapedArray = jax.core.ShapedArray
UNSPECIFIED_NAME = "UnspecifiedValue"


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr atom is a literal."""
    return isinstance(atom, _core.Literal)


def is_drop(var: Any) -> bool:
    """Whether a jaxpr variable is a result nobody reads."""
    return isinstance(var, _core.DropVar)


def open_jaxpr(closed: Any) -> tuple[Any, list[Any]]:
    """(jaxpr, constants) of a closed jaxpr, an open one, or (jax 0.12) one that carries its constants."""
    consts = list(getattr(closed, "consts", ()))
    return getattr(closed, "jaxpr", closed), consts


def scan_layout(params: Any) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan; the rest of its operands are scanned over."""
    if "num_consts" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def name_stack_of(source: Any) -> str:
    """The name stack (transformations and scopes) as text."""
    return str(source.name_stack)


def join_name_stack(outer: Any, inner: Any) -> Any:
    """Source info of an equation inlined from a call: the call's name stack before its own, and the call's place where
    the equation has none in the user's code.
    """
    known = inner if next(_source_info.user_frames(inner.traceback), None) is not None else outer
    return known.replace(name_stack=outer.name_stack + inner.name_stack)


def call_scope(source: Any, name: str) -> Any:
    """Source info with one more named scope."""
    return source.replace(name_stack=source.name_stack.extend(name))


def only_shapes() -> bool:
    """Whether this call is traced for its shapes or its jaxpr alone, by `jax.eval_shape` or `jax.make_jaxpr`."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name in ("eval_shape", "make_jaxpr_f") and frame.f_code.co_filename.startswith(_HERE):
            return True
    return False


def source_line(source: Any) -> str:
    """`file:line (function)` of the user's frame, or "" where JAX kept none."""
    return _source_info.summarize(source)


@contextlib.contextmanager
def equation_context(source: Any, context: Any) -> Generator[None]:
    """Binds inside carry the equation's source and name stack, and run in its configuration.

    Inside a `shard_map` they stay in its mesh, which is not the one the equation was traced in.
    """
    stack = _source_info.current_name_stack() + source.name_stack
    manager = contextlib.nullcontext() if context is None else context.manager
    around = jax.sharding.get_abstract_mesh()
    inside = context is not None and jax.sharding.AxisType.Manual in around.axis_types
    mesh = jax.sharding.use_abstract_mesh(around) if inside else contextlib.nullcontext()
    with _source_info.user_context(source.traceback, name_stack=stack), manager, mesh:
        yield


def bind(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Applies a primitive to values or tracers; always a sequence of results."""
    outputs = primitive.bind(*args, **primitive.get_bind_params(params))
    return outputs if primitive.multiple_results else [outputs]


def trace_avals(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Any:
    """A closed jaxpr of `fun` at these abstract values, weak types kept."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    return jax.make_jaxpr(fun)(*structs)


def body_params(params: dict[str, Any], name: str, bodies: Sequence[Any]) -> dict[str, Any]:
    """Control-flow parameters with the bodies put back."""
    if name == "scan":
        return {**params, "jaxpr": bodies[0]}
    if name == "while":
        return {**params, "cond_jaxpr": bodies[0], "body_jaxpr": bodies[1]}
    return {**params, "branches": tuple(bodies)}


def take_bodies(params: dict[str, Any], name: str) -> tuple[dict[str, Any], list[Any]]:
    """Control-flow parameters without the bodies, and the bodies."""
    rest = dict(params)
    if name == "scan":
        return rest, [rest.pop("jaxpr")]
    if name == "while":
        cond = rest.pop("cond_jaxpr")
        return rest, [cond, rest.pop("body_jaxpr")]
    return rest, list(rest.pop("branches"))


def dce(jaxpr: Any) -> Any:
    """The jaxpr without equations whose results nobody reads, inside bodies too (effects stay)."""
    keep = [True] * len(jaxpr.outvars)
    slim, _ = _partial_eval.dce_jaxpr(jaxpr, keep, instantiate=True)
    return slim


def trace_context() -> Any:
    """All settings that what is traced depends on, the ambient mesh among them; hashable."""
    from jax._src import config as _config

    return _config.trace_context()


def aval_of(shape: Sequence[int], dtype: Any, weak_type: bool = False) -> Any:
    """An abstract array."""
    return _core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def coordination_client() -> Any:
    """The client of `jax.distributed`'s coordination service, None where it was not initialised (or was shut down)."""
    from jax._src import distributed as _distributed

    return _distributed.global_state.client


def coordinator_address() -> str:
    """The host and port of `jax.distributed`'s coordination service."""
    from jax._src import distributed as _distributed

    return str(_distributed.global_state.coordinator_address)


def array_of_shards(aval: Any, sharding: Any, shards: Sequence[Any]) -> Any:
    """An array of several processes from this one's shards, of which there may be none.

    `jax.make_array_from_single_device_arrays` would lose the weak type, and processes without shards see another type.

    Args:
      aval: shape, dtype, weak type.
      sharding: of it.
      shards: one for each device of this process.
    """
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) or not aval.weak_type:
        return jax.make_array_from_single_device_arrays(aval.shape, sharding, list(shards), dtype=aval.dtype)
    from jax._src import array as _array

    plain = _core.ShapedArray(aval.shape, aval.dtype, weak_type=True)
    return _array.ArrayImpl(plain, sharding, list(shards), committed=True)


def key_impl(dtype: Any) -> Any:
    """The generator of typed PRNG keys of this dtype, as `jax.random.wrap_key_data` takes it."""
    return dtype._impl


def weakly_typed(array: Any) -> Any:
    """The array with a weak type, as Python scalars have."""
    from jax._src.lax import lax as _lax

    return _lax._convert_element_type(array, weak_type=True)  # pyright: ignore[reportPrivateUsage]


def optimization_barrier_p() -> Any:
    """The primitive that XLA may not optimise across."""
    from jax._src.lax import lax as _lax

    return _lax.optimization_barrier_p


def sharding_constraint_p() -> Any:
    """The primitive behind `jax.lax.with_sharding_constraint`."""
    from jax._src import pjit as _pjit

    return _pjit.sharding_constraint_p


def sharding_constraint_params(sharding: Any) -> dict[str, Any]:
    """Parameters of `sharding_constraint_p` for one fully specified sharding."""
    from jax._src import mesh as _mesh

    return {
        "sharding": sharding,
        "layout": None,
        "context_mesh": _mesh.get_abstract_mesh(),
        "unconstrained_dims": frozenset[int](),
    }


DONATING_TWICE_IS_FATAL = jax.__version_info__ < (0, 12)
"""Whether passing an array twice, once donated, to a program on several devices ends the process (0.10.1) or raises."""

outside_traces: Callable[[], bool] = _core.trace_state_clean
"""Whether no JAX transformation (jit, grad, vmap, eval_shape) is tracing in this thread."""


def ambient_mesh() -> tuple[Any, Any]:
    """(abstract mesh, concrete mesh or None) of the surrounding `jax.set_mesh(mesh)` or `with mesh:`."""
    from jax._src import mesh as _mesh

    abstract = _mesh.get_abstract_mesh()
    concrete: Any = _mesh.get_concrete_mesh()
    if concrete is None or concrete.empty:
        concrete = _mesh.thread_resources.env.physical_mesh
    return abstract, (None if concrete.empty else concrete)


@dataclass(frozen=True, slots=True)
class LoweredForGpu:
    """A program lowered for CUDA devices that need not be there.

    Attributes:
      code: StableHLO bytecode, shardings included.
      inputs, outputs: which of them have no sharding of their own, so that the partitioner may choose one.
      shardy: whether shardings are Shardy's (JAX's default) or GSPMD's.
    """

    code: bytes
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    shardy: bool


def lower_for_gpu(traced: Any) -> LoweredForGpu:
    """Lowers a traced function (`jitted.trace(...)`) for CUDA; its mesh may be one of stand-in devices."""
    lowered = traced.lower(lowering_platforms=("cuda",))
    with io.BytesIO() as file:
        lowered.compiler_ir("stablehlo").operation.write_bytecode(file)
        code = file.getvalue()
    compile_args = lowered._lowering.compile_args
    free = ("UnspecifiedValue", "AUTO")
    inputs = tuple(type(s).__name__ in free for s in compile_args["in_shardings"])
    outputs = tuple(type(s).__name__ in free for s in compile_args["out_shardings"])
    config: Any = jax.config
    return LoweredForGpu(code, inputs, outputs, bool(config.jax_use_shardy_partitioner))


def compile_for_gpus(lowered: LoweredForGpu, topology: str, target: str, devices: int) -> Any:
    """Compiles with XLA's GPU compiler for a topology ("slices x hosts x devices a host").

    Args:
      lowered: from `lower_for_gpu`, of this process or another.
      topology: at least as many devices as the program runs on.
      target: text proto of the device.
      devices: how many the program runs on.

    Returns:
      An executable that cannot run: `hlo_modules()`, `get_compiled_memory_stats()`.
    """
    import numpy as np
    from jax._src import compiler as _compiler
    from jax._src.interpreters import mlir as _mlir
    from jax._src.lib import xla_client as _xla_client
    from jax._src.lib.mlir import ir as _ir
    from jax.experimental import topologies

    described = topologies.get_topology_desc(topology, platform="cuda", target_config=target, topology=topology)
    used = tuple(described.devices[:devices])
    client: Any = used[0].client
    options = _compiler.get_compile_options(1, devices, np.array(used, dtype=object).reshape(1, -1), backend=client)
    build: Any = options.executable_build_options
    build.use_shardy_partitioner = lowered.shardy
    build.allow_spmd_sharding_propagation_to_parameters = list(lowered.inputs)
    build.allow_spmd_sharding_propagation_to_output = list(lowered.outputs)
    with _mlir.make_ir_context():
        module = _ir.Module.parse(lowered.code)
        return _compiler.backend_compile_and_load(client, module, _xla_client.DeviceList(used), options, [])


def threefry_partitionable() -> bool:
    """Whether Threefry's bits are hashes of their positions (JAX's default since 0.5)."""
    config: Any = jax.config
    return bool(config.jax_threefry_partitionable)


def lower_with_sharding_rules(fun: Callable[..., Sequence[Any]], avals: Sequence[Any], platform: str) -> Any:
    """The MLIR module of `fun` at these abstract values, with Shardy's rule on every StableHLO operator it knows."""
    from jaxlib.mlir.passmanager import PassManager

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    traced = jax.jit(fun, keep_unused=True).trace(*structs)
    module: Any = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    with module.context:
        PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(module.operation)
    return module


def sharding_rule_of(op: Any) -> Any:
    """Shardy's rule on an MLIR operation (`sdy.OpShardingRuleAttr`), or None."""
    from jaxlib.mlir.dialects import sdy

    attributes = op.attributes
    if "sdy.sharding_rule" not in attributes:
        return None
    return sdy.OpShardingRuleAttr(attributes["sdy.sharding_rule"])


def custom_partitioning_rule(params: Any) -> Any:
    """The rule a user gave to `jax.experimental.custom_partitioning`, as `sdy.OpShardingRuleAttr`.

    None where there is none, or where it is a function of the mesh, which is not known yet.
    """
    from jax._src import custom_partitioning_sharding_rule as _custom
    from jax._src.interpreters import mlir as _mlir
    from jaxlib.mlir import ir

    rule, call = params.get("sharding_rule"), params["call"]
    if rule is None or callable(rule):
        return None
    with _mlir.make_ir_context(), ir.Location.unknown():
        operands, results = (
            list[ir.Type](ir.RankedTensorType.get(a.shape, _mlir.dtype_to_ir_type(a.dtype)) for a in avals)
            for avals in (call.in_avals, call.out_avals)
        )
        return _custom.sdy_sharding_rule_to_mlir(rule, operands, results)


def tensor_dims(mapping: Any) -> Sequence[Any]:
    """The dimensions of one value in a Shardy rule."""
    from jaxlib.mlir.dialects import sdy

    return sdy.TensorMappingAttr(mapping).dim_mappings


def dim_factors(dim: Any) -> Sequence[int]:
    """The factors of one dimension in a Shardy rule."""
    from jaxlib.mlir.dialects import sdy

    return sdy.DimMappingAttr(dim).factor_indices


def mlir_shape(value: Any) -> tuple[int, ...]:
    """The shape of an MLIR value; () of tokens."""
    return tuple(getattr(value.type, "shape", ()))
