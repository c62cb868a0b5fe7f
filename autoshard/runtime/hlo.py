"""What a compiled program does: its collectives and its kernels, read from the HLO text of `compiled.as_text()`.

Bytes of a collective are those of the whole buffer of one group, as `autoshard.costmodel.collective_time_s` takes them
(n devices a group, operand and result of one device):

    all_reduce       operand = result
    all_gather       result = n * operand
    reduce_scatter   operand = n * result
    all_to_all       n * operand: the array whose n-th part each device holds before and after
    permute          n * operand: likewise

Combined collectives (several arrays in one) count the sum of their arrays; a start and its done count as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from autoshard.costmodel import CollectiveKind
from autoshard.runtime.hlo_module import (
    Computation,
    Groups,
    Instruction,
    Module,
    parse_module,
    replica_groups,
    type_bytes,
)

KINDS: Mapping[str, CollectiveKind] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}

_FREE = """
    parameter constant get-tuple-element tuple bitcast iota after-all partition-id replica-id opt-barrier domain
    add-dependency copy-start copy-done send-done recv-done async-done async-update while conditional call
"""
FREE = frozenset(_FREE.split())
"""Opcodes that are no kernel of their own (control flow is entered instead)."""


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: of the five kinds the cost model knows.
      nbytes: bytes of the whole buffer of one group, see the module's docstring.
      group_size: devices of one group; of a permute, the largest set of devices linked by its pairs.
      groups: all of them.
      op_name: the JAX operation it comes from.
      source: "file:line" of the user's code, "" where XLA kept none.
      asynchronous: whether it runs beside other work.
      times: how often it runs in one call of the program (loops whose trip count is not known count once).
      overlaps: whether a kernel lies between its start and its done.
      arrays: how many arrays it moves (more than one where XLA combined several).
    """

    kind: CollectiveKind
    nbytes: int
    group_size: int
    groups: Groups
    op_name: str
    source: str
    asynchronous: bool
    times: int
    overlaps: bool
    arrays: int


@final
@dataclass(frozen=True, slots=True)
class Kernel:
    """Kernels of one sort.

    Attributes:
      kind: fusion, gemm, convolution, triton, custom_call or other.
      detail: what sort exactly, e.g. "loop" of a fusion, "cublas_lt" of a gemm, the opcode of others.
      count: how many the program has.
      runs: how many of them run in one call, loops included.
    """

    kind: str
    detail: str
    count: int
    runs: int


def collectives(hlo_text: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program, in the order they stand in it."""
    module = parse_module(hlo_text)
    found: list[Collective] = []
    for computation, times in module.walk():
        types = {x.name: x.type for x in computation.instructions}
        for index, instruction in enumerate(computation.instructions):
            if instruction.opcode.removesuffix("-start") not in KINDS:
                continue
            found.append(_read(module, computation, index, types, times))
    return tuple(found)


def _read(module: Module, computation: Computation, index: int, types: Mapping[str, str], times: int) -> Collective:
    instruction = computation.instructions[index]
    kind = KINDS[instruction.opcode.removesuffix("-start")]
    operand_types = [types.get(name, "") for name in instruction.operands]
    if any(not t for t in operand_types):  # printed with types
        operand_types = [instruction.operand_text]
    operand = sum(type_bytes(t) for t in operand_types)
    groups = replica_groups(instruction.attributes, module.devices)
    size = max((len(g) for g in groups), default=1)
    scale = 1 if kind in ("all_reduce", "reduce_scatter") else size
    carrier, place = _carrier(module, computation, index)
    started = carrier.instructions[place].opcode.endswith("-start")
    asynchronous = started and '"is_sync":true' not in instruction.attributes
    return Collective(
        kind=kind,
        nbytes=operand * scale,
        group_size=size,
        groups=groups,
        op_name=_op_name(instruction),
        source=_source(module, instruction),
        asynchronous=asynchronous,
        times=times,
        overlaps=asynchronous and _overlaps(carrier, place),
        arrays=1 if kind == "all_to_all" else len(instruction.operands),
    )


def _carrier(module: Module, computation: Computation, index: int) -> tuple[Computation, int]:
    """Where a collective is started: itself, or the async-start that wraps its computation."""
    for other in module.computations.values():
        for place, instruction in enumerate(other.instructions):
            if instruction.opcode == "async-start" and any(c == computation.name for _, c in instruction.called()):
                return other, place
    return computation, index


def _overlaps(computation: Computation, start: int) -> bool:
    """Whether a kernel lies between a start and its done."""
    name = computation.instructions[start].name
    for instruction in computation.instructions[start + 1 :]:
        if instruction.opcode.endswith(("-done", "-update")) and name in instruction.operands:
            if instruction.opcode.endswith("-done"):
                return False
            name = instruction.name
        elif instruction.opcode in ("while", "conditional", "call") or _kernel(instruction) is not None:
            return True
    return False


def _op_name(instruction: Instruction) -> str:
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return match[1] if match is not None else ""


def _source(module: Module, instruction: Instruction) -> str:
    frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
    if frame is not None:
        return module.sources.get(int(frame[1]), "")
    match = re.search(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?', instruction.attributes)
    return f"{match[1]}:{match[2] or 0}" if match is not None else ""


def kernels(hlo_text: str) -> tuple[Kernel, ...]:
    """The kernels of a compiled program by sort, most frequent first; collectives are not among them."""
    count: Counter[tuple[str, str]] = Counter()
    runs: Counter[tuple[str, str]] = Counter()
    seen: set[str] = set()
    for computation, times in parse_module(hlo_text).walk():
        for instruction in computation.instructions:
            sort = _kernel(instruction)
            if sort is None:
                continue
            runs[sort] += times
            count[sort] += computation.name not in seen
        seen.add(computation.name)
    rows = [Kernel(kind, detail, count[kind, detail], runs[kind, detail]) for kind, detail in runs]
    return tuple(sorted(rows, key=lambda k: (-k.runs, k.kind, k.detail)))


def _kernel(instruction: Instruction) -> tuple[str, str] | None:
    """(kind, detail) of a kernel, None for what is none."""
    opcode = instruction.opcode
    base = opcode.removesuffix("-start").removesuffix("-done")
    if opcode in FREE or base in KINDS or opcode == "async-start":
        return None
    match opcode:
        case "fusion":
            return _fusion(instruction.attributes)
        case "custom-call":
            return _custom_call(instruction.attributes)
        case "dot":
            return "gemm", "dot"
        case "convolution":
            return "convolution", "convolution"
        case _:
            return "other", opcode


def _fusion(attributes: str) -> tuple[str, str]:
    kind = re.search(r"\bkind=k(\w+)", attributes)
    inner = re.search(r'"fusion_backend_config":\{.*?"kind":"([^"]+)"', attributes)
    name = inner[1].strip("_") if inner is not None else ""
    if "gemm" in name:
        return "gemm", name
    if name:
        return ("triton" if "triton" in name else "fusion"), name
    return "fusion", kind[1].lower() if kind is not None else "loop"


def _custom_call(attributes: str) -> tuple[str, str] | None:
    match = re.search(r'custom_call_target="([^"]*)"', attributes)
    target = match[1] if match is not None else "unknown"
    if target in ("AllocateBuffer", "PinToDevice", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"):
        return None
    if target.startswith("__cublas$lt$"):
        return "gemm", "cublas_lt"
    if target.startswith(("__cublas$", "__onednn$matmul", "__cudnn$gemm")):
        return "gemm", target.strip("_").replace("$", "_")
    if "conv" in target and target.startswith("__"):
        return "convolution", target.strip("_").replace("$", "_")
    if "triton" in target:
        return "triton", target.strip("_").replace("$", "_")
    return "custom_call", target
