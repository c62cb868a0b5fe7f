"""Compiles a program for GPUs nobody has, with XLA's own GPU compiler.

The program is traced and lowered here, over stand-in devices; its StableHLO goes to a child process that starts with
the settings the compiler needs (`autoshard.runtime.deviceless_worker`). The user's process never loads the CUDA plugin.

    report = compile_deviceless(build, "h100x1024", (("data", 128), ("model", 8)))
    print(report)
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard.cluster import Cluster, DeviceSpec, MeshShape, mesh_size, resolve_cluster
from autoshard.errors import CompileError, MeshError, explain
from autoshard.jax_compat import LoweredForGpu, lower_for_gpu
from autoshard.runtime.compile_report import CompiledReport, group_collectives, memory_parts
from autoshard.runtime.hlo import collectives, kernels

CompileTarget = Cluster | DeviceSpec | str
"""Whom to compile for: a cluster, a device, a preset such as "h100x8", or a target config as a text proto."""

BuildProgram = Callable[[Mesh], tuple[Any, Sequence[Any]]]
"""Given a mesh, a jitted function and its arguments (`jax.ShapeDtypeStruct` is enough)."""

PLUGIN = "jax_cuda13_plugin"
INSTALL = "pip install 'autoshard[deviceless]' (Linux only, about 1.1 GB)"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
TIMEOUT_S = 1800.0
LOG_LINES = 20
"""How much of a crashed worker's log goes into the error."""

OLDEST = (7, 5)
"""Compute capability that CUDA 13's ptxas begins with (CUDA 13.0 release notes: Maxwell, Pascal and Volta removed)."""

NOISE = ("compile with a GPU present",)
"""Warnings that say only that there is no GPU."""


@final
class _Client:
    """What JAX asks of a stand-in device's client."""

    platform = "cuda"
    platform_version = "none"
    runtime_type = "stand-in"

    def process_index(self) -> int:
        return 0


@final
class StandIn:
    """A device that only has a number. Programs are lowered for it, never run on it."""

    platform = "gpu"
    device_kind = "stand-in"
    process_index = 0
    local_hardware_id = None
    client = _Client()

    def __init__(self, number: int) -> None:
        self.id = number

    def __repr__(self) -> str:
        return f"StandIn({self.id})"


@final
@dataclass(frozen=True, slots=True)
class _Gpus:
    """A target resolved.

    Attributes:
      device: its name.
      text: the target config, a text proto.
      capacity: memory bytes of a device.
      topology: slices x hosts x devices a host.
    """

    device: str
    text: str
    capacity: int
    topology: str


def installed() -> bool:
    """Whether XLA's GPU compiler is there (the `deviceless` extra)."""
    return importlib.util.find_spec(PLUGIN) is not None and _cuda_folder() is not None


def deviceless_mesh(target: CompileTarget, mesh_shape: MeshShape) -> Mesh:
    """A mesh of stand-in devices, to lower programs for; axes are automatic, as in all programs autoshard emits.

    Raises:
      MeshError: the target has fewer devices.
      ClusterError: the target is not known, or nothing is known of it that a compiler needs.
    """
    _resolve(target, mesh_shape, None)
    names, sizes = tuple(name for name, _ in mesh_shape), tuple(size for _, size in mesh_shape)
    devices = np.empty(math.prod(sizes), dtype=object)
    devices[:] = [StandIn(number) for number in range(devices.size)]
    return Mesh(devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def compile_deviceless(
    build: BuildProgram,
    target: CompileTarget,
    mesh_shape: MeshShape,
    *,
    ptx: bool = False,
    hlo: bool = False,
    memory_bytes: int | None = None,
    xla_flags: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[str], None] | None = None,
) -> CompiledReport:
    """Compiles a program for GPUs that need not be there.

    Args:
      build: gets a mesh of stand-in devices; returns the jitted function and its arguments.
      target: whom to compile for.
      mesh_shape: axes and sizes, major first.
      ptx: whether the report shall hold the kernels' code.
      hlo: whether it shall hold the compiled program.
      memory_bytes: memory of a device, where it shall be another than the target's.
      xla_flags: further flags of XLA, e.g. "--xla_gpu_enable_latency_hiding_scheduler=true".
      timeout_s: after which the compiler is stopped.
      on_progress: called about once a second with what is going on.

    Raises:
      CompileError: the `deviceless` extra is not installed, or XLA refused the program, crashed, or took too long.
      MeshError: the target has fewer devices than the mesh.
      ClusterError: the target is not known, or nothing is known of it that a compiler needs.
    """
    if not installed():
        raise CompileError(
            explain("XLA's GPU compiler is not installed", "the packages of the deviceless extra", INSTALL)
        )
    gpus = _resolve(target, mesh_shape, memory_bytes)
    report_progress = on_progress if on_progress is not None else _silent
    report_progress(f"lowering for {gpus.device}")
    begin = time.perf_counter()
    jitted, args = build(deviceless_mesh(target, mesh_shape))
    lowered = _lower(jitted, args)
    lower_s = time.perf_counter() - begin
    request = {
        "topology": gpus.topology,
        "target": gpus.text,
        "devices": mesh_size(mesh_shape),
        "inputs": lowered.inputs,
        "outputs": lowered.outputs,
        "shardy": lowered.shardy,
    }
    with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.mlir").write_bytes(lowered.code)
        dump = folder / "dump" if ptx else None
        _run_worker(folder, _environment(dump, xla_flags), timeout_s, gpus.device, report_progress)
        result = _result(folder)
        text = (folder / "program.hlo").read_text()
        warnings = _warnings((folder / "log").read_text(errors="replace"))
        code_text = _ptx(dump) if dump is not None else ""
    report_progress("reading the compiled program")
    return CompiledReport(
        device=gpus.device,
        mesh=mesh_shape,
        memory=memory_parts(result["memory"], gpus.capacity),
        kernels=kernels(text),
        collectives=group_collectives(collectives(text)),
        warnings=warnings,
        lower_s=lower_s,
        compile_s=float(result["compile_s"]),
        versions=tuple((package, _version(package)) for package in PACKAGES),
        ptx=code_text,
        hlo=text if hlo else "",
    )


def _lower(jitted: Any, args: Sequence[Any]) -> LoweredForGpu:
    abstract = jax.tree.map(_abstract, tuple(args))
    traced = jitted.trace(*abstract)  # what is wrong with the user's own program is raised as it is
    try:
        return lower_for_gpu(traced)
    except Exception as error:
        raise CompileError(
            explain(
                f"the program cannot be lowered for CUDA: {error}",
                "a program with lowering rules for CUDA, and shardings on its arguments",
                "give the jitted function in_shardings; replace what only another platform has",
            )
        ) from error


def _abstract(leaf: Any) -> Any:
    """An array without its values and devices; anything else as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.aval.weak_type)


def _silent(_: str) -> None:
    """Where nobody wants to see progress."""


def _resolve(target: CompileTarget, mesh_shape: MeshShape, memory_bytes: int | None) -> _Gpus:
    """Raises MeshError or ClusterError where the target cannot be."""
    count = mesh_size(mesh_shape)
    if isinstance(target, str) and "gpu_device_info" in target:
        return _from_text(target, count, memory_bytes)
    cluster = target if isinstance(target, Cluster) else resolve_cluster(target, None if _counted(target) else count)
    if count > cluster.size:
        axes = ", ".join(f"{name}={size}" for name, size in mesh_shape)
        raise MeshError(
            explain(
                f"a mesh of {count} devices ({axes}) on cluster {cluster.name!r}",
                f"at most its {cluster.size} devices",
                "use a smaller mesh or a larger cluster",
            )
        )
    cluster = cluster.part(0, count)
    device = cluster.device(0)
    if memory_bytes is not None:
        device = dataclasses.replace(device, memory_bytes=memory_bytes)
    per_host = math.gcd(*(node.count for node in cluster.nodes))
    text = device.target_text()
    name = device.target.device_name if device.target is not None else device.name
    if device.target is not None and device.target.capability < OLDEST:
        have, first = (".".join(map(str, c)) for c in (device.target.capability, OLDEST))
        raise CompileError(
            explain(
                f"{name} has compute capability {have}",
                f"{first} or newer, the oldest that CUDA 13 compiles for",
                "compile for a newer device, e.g. a100; plan without compiling for this one",
            )
        )
    topology = f"1x{count // per_host}x{per_host}"
    return _Gpus(name, text, device.memory_bytes, topology)


def _counted(target: DeviceSpec | str) -> bool:
    """Whether a preset says how many devices it has."""
    return isinstance(target, str) and re.fullmatch(r".*x[0-9]+|.*\.toml|auto", target.strip().lower()) is not None


def _from_text(text: str, count: int, memory_bytes: int | None) -> _Gpus:
    """A text proto names neither hosts nor how many devices each has: eight, as in most machines that are rented."""
    if memory_bytes is not None:
        text = re.sub(r"\bdevice_memory_size:\s*\d+", f"device_memory_size: {memory_bytes}", text)
    size = re.search(r"\bdevice_memory_size:\s*(\d+)", text)
    name = re.search(r'\bdevice_description_str:\s*"([^"]*)"', text)
    per_host = math.gcd(count, 8) if count > 8 else count
    topology = f"1x{count // per_host}x{per_host}"
    return _Gpus(name[1] if name else "GPU", text, int(size[1]) if size else 0, topology)


def _cuda_folder() -> Path | None:
    """Where ptxas and libdevice are: the folder the nvidia packages install into."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((Path(p) / "cu13" for p in places if (Path(p) / "cu13" / "nvvm").is_dir()), None)


def _environment(dump: Path | None, xla_flags: Sequence[str]) -> dict[str, str]:
    """The worker's environment: the caller's, without anything that steers JAX, XLA or CUDA, and with our own.

    No GPU is visible to it, so that the result is the same on every machine.
    """
    theirs = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "TF_CPP_", "CUDA_", "NCCL_", "TPU_", "LIBTPU_"))
    }
    flags = [f"--xla_gpu_cuda_data_dir={_cuda_folder()}", *xla_flags]
    if dump is not None:
        flags.append(f"--xla_dump_to={dump}")
    root = str(Path(__file__).resolve().parents[2])
    path = [root, *(p for p in [theirs.get("PYTHONPATH", "")] if p)]
    return {
        **theirs,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join(path),
    }


def worker_command(folder: Path) -> list[str]:
    """How the worker is started: as a file, so that it imports `jax_compat` only and starts quickly (-P: without the
    file's own folder on the path).
    """
    return [sys.executable, "-P", str(Path(__file__).with_name("deviceless_worker.py")), str(folder)]


def _run_worker(
    folder: Path, environment: Mapping[str, str], timeout_s: float, device: str, report: Callable[[str], None]
) -> None:
    """Runs the worker to its end; its log is the folder's file `log`."""
    begin, told = time.perf_counter(), -1
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            worker_command(folder),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                passed = time.perf_counter() - begin
                if passed > timeout_s:
                    raise CompileError(
                        explain(
                            f"XLA's GPU compiler did not finish within {timeout_s:g} s",
                            "a compile within timeout_s",
                            "raise timeout_s, or compile a smaller program",
                        )
                    )
                if int(passed) > told:
                    told = int(passed)
                    doing = "compiling" if (folder / "started").exists() else "starting XLA's GPU compiler"
                    report(f"{doing} for {device} ({told} s)")
                _wait(process)
        finally:
            if process.poll() is None:  # with everything it started (ptxas)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        raise CompileError(
            explain(
                f"XLA's GPU compiler crashed (exit status {process.returncode})",
                "a compiled program",
                "see the end of its log below; report it if the program is a correct one",
            )
            + f"\nlog:\n{_tail((folder / 'log').read_text(errors='replace'))}"
        )


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=0.1)
    except subprocess.TimeoutExpired:
        return


def _result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    if "error" in result:
        raise CompileError(
            explain(
                "XLA's GPU compiler refused the program",
                "a program it can compile",
                "change what its message below names",
            )
            + f"\nmessage:\n{result['error']}"
        )
    return result


def _tail(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES:])


def _warnings(log: str) -> tuple[str, ...]:
    """What XLA logged as a warning or an error, without time and thread, each once."""
    pattern = re.compile(r"^[WE]\d{4} [\d:.]+\s+\d+ ([\w.\-]+):\d+\] (.*)$")
    found = (match[2].strip() for line in log.splitlines() if (match := pattern.match(line)) is not None)
    return tuple(dict.fromkeys(text for text in found if not any(noise in text for noise in NOISE)))


def _ptx(dump: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(dump.glob("*.ptx")))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
