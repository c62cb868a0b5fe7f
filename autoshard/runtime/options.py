"""The decorator's options, checked when the step is decorated."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import jax

from autoshard.costmodel import LearnedModel, load_model
from autoshard.errors import ArgumentError, MeshError, explain
from autoshard.ir import MeshShape
from autoshard.runtime.pins import Pins, check_pins
from autoshard.schedules import Schedule
from autoshard.search import named_mesh

UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("iB", 1024))
}
"""Units of memory, SI and binary."""

ONE_MESH: Mapping[str, tuple[Any, ...]] = {
    "sync": (True, "step"),
    "period": (1,),
    "delay": (0,),
    "merge": (False,),
    "warmup_steps": (0,),
}
"""Options of delayed averaging, with the values (beside None) that say "on one mesh, as written"."""


MPMD, ONE_PROGRAM = "mpmd", "one-program"
"""Runtimes of pipelines."""


@final
@dataclass(frozen=True, slots=True)
class Options:
    """Checked options.

    Attributes:
      mesh: a JAX mesh, named sizes, or None to choose.
      devices: as `autoshard.cluster.resolve_cluster` takes it.
      pins: path patterns to partition specs.
      stages: of a pipeline, None or 1 for one mesh.
      schedule: of a pipeline: a name, a table or a `Schedule`; None to choose.
      microbatches: into how many parts the batch is cut, None to choose.
      remat: whether parts of the forward pass are computed again, None to choose.
      memory_limit: bytes a device may hold.
      budget_s: seconds for the search.
      seed: of the search.
      dump_dir: where the IR is written after each pass.
      learned_model: predicts the step time of plans where it may (`autoshard.runtime.learned_time`).
      pipeline_runtime: `MPMD` or `ONE_PROGRAM`, None to choose.
    """

    mesh: jax.sharding.Mesh | MeshShape | None
    devices: Any
    pins: Pins | None
    stages: int | None
    schedule: Any
    microbatches: int | None
    remat: bool | None
    memory_limit: int | None
    budget_s: float | None
    seed: int
    dump_dir: Path | None
    learned_model: LearnedModel | None
    pipeline_runtime: str | None = None

    @property
    def ranks(self) -> int:
        """Parts that the devices are shared out to: one a stage, unless the schedule has several stages a rank."""
        return self.schedule.ranks if isinstance(self.schedule, Schedule) else self.stages or 1


def check_options(
    *,
    mesh: Any,
    devices: Any,
    pins: Any,
    stages: Any,
    schedule: Any,
    microbatches: Any,
    remat: Any,
    memory_limit: Any,
    budget: Any,
    seed: Any,
    dump_dir: Any,
    learned_model: Any,
    later: Mapping[str, Any],
    pipeline_runtime: Any = None,
) -> Options:
    """The options, or an error that says which one is wrong.

    Raises:
      ArgumentError: a wrong type or value, or an option that is not available yet.
      MeshError: a mesh that cannot exist.
    """
    for name, value in later.items():
        _check_later(name, value)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ArgumentError(explain(f"seed={seed!r}", "an int of at least 0", "give one, or leave it out"))
    return Options(
        mesh=check_mesh_option(mesh),
        devices=devices,
        pins=check_pins(pins),
        stages=_check_count("stages", stages),
        schedule=_check_schedule(schedule, stages),
        microbatches=_check_count("microbatches", microbatches),
        remat=_check_remat(remat),
        memory_limit=parse_memory(memory_limit),
        budget_s=_check_budget(budget),
        seed=seed,
        dump_dir=_check_folder(dump_dir),
        learned_model=_check_model(learned_model),
        pipeline_runtime=_check_runtime(pipeline_runtime),
    )


def check_mesh_option(mesh: Any) -> jax.sharding.Mesh | MeshShape | None:
    """The option `mesh`: a shape, named sizes, a JAX mesh or None.

    Raises:
      ArgumentError: none of these.
      MeshError: sizes below 1, or a name used twice.
    """
    if mesh is None or isinstance(mesh, jax.sharding.Mesh):
        return mesh
    if isinstance(mesh, jax.sharding.AbstractMesh):
        mesh = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    if _is_size(mesh):
        mesh = (mesh,)
    if isinstance(mesh, list | tuple) and mesh and all(_is_size(size) for size in mesh):
        return named_mesh(tuple(int(size) for size in mesh))
    pairs: Any = tuple(mesh.items()) if isinstance(mesh, Mapping) else mesh
    if not isinstance(pairs, list | tuple) or not pairs or not all(_is_axis(pair) for pair in pairs):
        raise ArgumentError(
            explain(
                f"mesh={mesh!r}",
                'None (chosen), a shape such as (2, 4), named sizes such as {"data": 2, "model": 4}, '
                "or a jax.sharding.Mesh",
                "give one of these",
            )
        )
    named = tuple((str(name), int(size)) for name, size in pairs)
    if any(size < 1 for _, size in named):
        raise MeshError(explain(f"mesh={dict(named)}", "sizes of at least 1", "correct the sizes"))
    twice = sorted({name for name, _ in named if sum(name == other for other, _ in named) > 1})
    if twice:
        raise MeshError(
            explain(f"mesh={named} names {twice[0]!r} twice", "a name for each axis", "rename one of the axes")
        )
    return named


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_axis(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str) and _is_size(value[1])


def parse_memory(limit: Any) -> int | None:
    """Bytes of the option `memory_limit`: a number, or text such as "24GiB".

    Raises:
      ArgumentError: something else, or nothing left.
    """
    if limit is None:
        return None
    found: float | None = None
    if isinstance(limit, int | float) and not isinstance(limit, bool):
        found = float(limit)
    elif isinstance(limit, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B?)\s*", limit)
        if match is not None and match[2] in UNITS:
            found = float(match[1]) * UNITS[match[2]]
    if found is None or not math.isfinite(found) or found < 1:
        raise ArgumentError(
            explain(
                f"memory_limit={limit!r}",
                'bytes on one device, positive: an int, or text such as "24GiB" or "80GB"',
                "correct it, or leave it out to use what the device has",
            )
        )
    return int(found)


def _check_count(name: str, count: Any) -> int | None:
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(
            explain(f"{name}={count!r}", "an int of at least 1, or None to choose", "give one, or leave it out")
        )
    return count


def _check_schedule(schedule: Any, stages: Any) -> Any:
    if schedule is not None and stages in (None, 1):
        raise ArgumentError(
            explain(f"schedule={schedule!r} without stages", "a number of stages above 1 beside it", "give stages=")
        )
    return schedule


def _check_runtime(runtime: Any) -> str | None:
    if runtime is None or (isinstance(runtime, str) and runtime in (MPMD, ONE_PROGRAM)):
        return runtime
    raise ArgumentError(
        explain(
            f"pipeline_runtime={runtime!r}",
            f"{MPMD!r} (a program for each stage), {ONE_PROGRAM!r}, or None to choose",
            "give one of these",
        )
    )


def _check_remat(remat: Any) -> bool | None:
    if remat is None or isinstance(remat, bool):
        return remat
    raise ArgumentError(explain(f"remat={remat!r}", "True, False, or None to choose", "give one of these"))


def _check_budget(budget: Any) -> float | None:
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise ArgumentError(explain(f"budget={budget!r}", "seconds for the search, above 0", "give e.g. budget=60"))
    return float(budget)


def _check_folder(dump_dir: Any) -> Path | None:
    if dump_dir is None or dump_dir == "":
        return None
    if not isinstance(dump_dir, str | Path):
        raise ArgumentError(
            explain(f"dump_dir={dump_dir!r}", "the path of a folder", "give a string or a pathlib.Path")
        )
    return Path(dump_dir)


def _check_model(model: Any) -> LearnedModel | None:
    if model is None or isinstance(model, LearnedModel):
        return model
    if not isinstance(model, str | Path):
        raise ArgumentError(
            explain(f"learned_model={model!r}", "a folder that `autoshard learn` wrote", "give its path")
        )
    return load_model(Path(model))


def _check_later(name: str, value: Any) -> None:
    if name not in ONE_MESH:
        known = [f.name.removesuffix("_s") for f in fields(Options)]
        near = difflib.get_close_matches(name, known, 1)
        todo = f"did you mean {near[0]}? See help(autoshard)" if near else "correct the name, or see help(autoshard)"
        raise ArgumentError(explain(f"the option {name}={value!r}", f"one of {', '.join(known)}", todo))
    allowed = ONE_MESH[name]
    if value is None or any(type(value) is type(each) and value == each for each in allowed):
        return
    also = f" or {' or '.join(map(repr, allowed))}" if allowed else ""
    raise ArgumentError(
        explain(
            f"{name}={value!r}, which is not available yet: this version plans one mesh, without pipeline stages",
            f"None{also}",
            "leave it out",
        )
    )
