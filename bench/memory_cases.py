"""What `bench.memory` measures: zoo and real-size steps, planned for CPUs or H100s, and XLA's count of their memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp

from autoshard import autoshard
from autoshard.cluster import Cluster, Node, resolve_cluster
from autoshard.errors import CompileError
from autoshard.plan import Plan
from bench.gpt import GPT2, make_step
from bench.pins import DATA_PARALLEL, fully_sharded
from bench.vision import resnet50, vit
from tests.helpers import eager_cluster
from tests.zoo import PROGRAMS, get

SEED = 0
DEVICES = 8
ZOO_MESH = "2x4"
BATCH = {"gpt2": 64, "vit": 256, "resnet50": 256}
PLANS = ("data parallel", "fully sharded", "chosen")

ENOUGH = "10TB"
"""Memory limit where the plan shall not depend on it."""

NO_TRITON = ("--xla_gpu_enable_triton_gemm=false",)
"""Flags of a second attempt: XLA of jax 0.10.1 finds no tiles for some of ViT's products (197 tokens) where nothing can
be tuned, and ends with an internal error."""

CACHE_VERSION = 1
"""Counted up when a plan is compiled to another program than before."""


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One plan of one program.

    Attributes:
      group: "zoo" or "real".
      program: name of a zoo program, or e.g. "vit-bf16".
      plan: of `PLANS`; the zoo has only "chosen".
      mesh: "2x4", "" for the one the planner takes.
    """

    group: str
    program: str
    plan: str = "chosen"
    mesh: str = ZOO_MESH

    @property
    def name(self) -> str:
        """To choose it by."""
        return f"{self.group}/{self.program}/{self.plan}".replace(" ", "-")


@final
@dataclass(frozen=True, slots=True)
class Row:
    """What was found of a case on one device.

    Attributes:
      case: which.
      device: "cpu" or "h100".
      mesh: of the plan.
      predicted_bytes, compiled_bytes: peak of one device.
      temporary_bytes: (predicted, compiled) of it.
      plan_s, compile_s: seconds; a compile that was found in the cache keeps the seconds it took.
      failure: what was raised instead, "" if nothing.
    """

    case: Case
    device: str
    mesh: str
    predicted_bytes: int = 0
    compiled_bytes: int = 0
    temporary_bytes: tuple[int, int] = (0, 0)
    plan_s: float = 0.0
    compile_s: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        """Relative error, positive where too much was predicted."""
        return self.predicted_bytes / self.compiled_bytes - 1.0


def cases(groups: tuple[str, ...], meshes: tuple[str, ...]) -> list[Case]:
    """All there are, the real ones last."""
    found: list[Case] = []
    if "zoo" in groups:
        found += [Case("zoo", program.name, mesh=mesh) for mesh in meshes for program in PROGRAMS]
    if "real" in groups:
        found += [Case("real", f"{m}-{t}", plan, "") for m in BATCH for t in ("bf16", "f32") for plan in PLANS]
    return found


def eager_gpus() -> Cluster:
    """H100s slow enough, on links quick enough, that splitting even small arrays pays."""
    device = resolve_cluster("h100x8").device(0)
    slow = dataclasses.replace(
        device,
        flops_per_s=dict.fromkeys(device.flops_per_s, 1e6),
        memory_bytes_per_s=1e6,
        kernel_launch_s=0.0,
        collective_launch_s=0.0,
    )
    return Cluster("eager h100", (Node(slow, DEVICES, eager_cluster().nodes[0].link),))


def measure(case: Case, device: str = "cpu", cache: Path | None = None) -> Row:
    """Plans and compiles one case.

    Args:
      case: which.
      device: "cpu" (eight devices of this process) or "h100" (XLA's GPU compiler, without a GPU).
      cache: JSON file of compiles, read and written.
    """
    step, args, kwargs = _step(case, device)
    begin = time.perf_counter()
    plan: Plan = step.plan(*args, **kwargs)
    plan_s = time.perf_counter() - begin
    known: dict[str, Any] = json.loads(cache.read_text()) if cache is not None and cache.exists() else {}
    key = _key(plan, device)
    if key not in known:
        begin = time.perf_counter()
        found = _on_h100(plan) if device == "h100" else _on_cpu(step, args, kwargs)
        known[key] = {"program": case.name, **found, "compile_s": time.perf_counter() - begin}
        if cache is not None:
            cache.write_text(json.dumps(known, indent=1))
    mesh = "x".join(str(n) for _, n in plan.mesh)
    compiled = known[key]
    temporary = (plan.memory.temporary_bytes, compiled["temporaries"])
    return Row(
        case, device, mesh, plan.memory.peak_bytes, compiled["peak"], temporary, plan_s, float(compiled["compile_s"])
    )


def _step(case: Case, device: str) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """The decorated step and its arguments."""
    options: dict[str, Any] = {"seed": SEED}
    options["devices"] = eager_gpus() if device == "h100" else eager_cluster()
    if case.mesh:
        sizes = tuple(int(n) for n in case.mesh.split("x"))
        options["mesh"] = _mesh(sizes, tuple("abc")[: len(sizes)], device)
    if case.group == "zoo":
        program = get(case.program).build(jnp.float32)
        args, kwargs = program.fresh()
        options |= {"static_argnums": program.static_argnums, "static_argnames": program.static_argnames}
        return autoshard(**options)(program.step), args, kwargs
    model, dtype = case.program.split("-")
    step, state, batch = _real(model, jnp.bfloat16 if dtype == "bf16" else jnp.float32)
    options["memory_limit"] = ENOUGH
    if device == "h100":
        options["devices"] = "h100x8"
    match case.plan:
        case "data parallel":
            options |= {"mesh": _mesh((DEVICES,), ("data",), device), "pins": DATA_PARALLEL}
        case "fully sharded":
            options |= {"mesh": _mesh((DEVICES,), ("data",), device), "pins": fully_sharded(state)}
        case _ if device == "cpu":
            options["mesh"] = _mesh((2, 4), ("a", "b"), device)
        case _:
            pass
    return autoshard(**options)(step), (state, batch), {}


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...], device: str) -> Any:
    if device != "cpu":
        return dict(zip(names, sizes, strict=True))
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def _real(model: str, dtype: Any) -> tuple[Callable[..., Any], Any, Any]:
    match model:
        case "gpt2":
            return make_step(GPT2, BATCH[model], dtype=dtype)
        case "vit":
            return vit(BATCH[model], dtype)
        case "resnet50":
            return resnet50(BATCH[model], dtype)
        case _:
            raise KeyError(f"no model {model!r}; there are {', '.join(BATCH)}")


def _key(plan: Plan, device: str) -> str:
    """Of what XLA compiles: program, mesh and every spec; no times, no estimates."""
    parts = (plan.fingerprint, plan.mesh, plan.donated, plan.specs, plan.values, plan.operands, plan.output_ids)
    text = repr((CACHE_VERSION, jax.__version__, device, *parts, plan.detours, plan.input_specs, plan.output_specs))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _on_cpu(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
    stats = step.lower(*args, **kwargs).compile().memory_analysis()
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {"peak": kept + stats.temp_size_in_bytes, "temporaries": stats.temp_size_in_bytes}


def _on_h100(plan: Plan) -> dict[str, int]:
    try:
        memory = plan.compile("h100x8").memory
    except CompileError:
        memory = plan.compile("h100x8", xla_flags=NO_TRITON).memory
    return {"peak": memory.peak, "temporaries": memory.temporaries}
