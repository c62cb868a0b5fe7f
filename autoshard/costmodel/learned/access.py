"""What a kernel reads of each operand, and how long ago that was last touched.

A cache holds what was touched last, so the bytes touched since (the reuse distance, Mattson et al., 1970) say where an
operand comes from. Steps run one after the other: what a step touched last is near for the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from autoshard.costmodel.learned.hlo_graph import Kernel, Module

PARTIAL = frozenset(("slice", "dynamic-slice", "gather"))


@final
@dataclass(frozen=True, slots=True)
class Access:
    """Of one kernel, one run.

    Attributes:
      read: bytes of each operand.
      written: bytes.
      distance: for each operand the bytes touched since it was.
    """

    read: tuple[int, ...]
    written: int
    distance: tuple[int, ...]


def read_bytes(kernel: Kernel) -> tuple[int, ...]:
    """Of each operand: its size, or that of its slices where nothing else is asked of it."""
    whole = [shape.nbytes for shape in kernel.inputs]
    if kernel.instruction.opcode in PARTIAL:
        return (min(whole[0], kernel.instruction.nbytes), *whole[1:]) if whole else ()
    if kernel.instruction.opcode == "while":
        return (0,) * len(whole)
    if kernel.instruction.opcode == "dynamic-update-slice":
        return (0, *whole[1:])
    if kernel.instruction.opcode != "fusion":
        return tuple(whole)
    parameters = {i.name: i.position for i in kernel.body.values() if i.opcode == "parameter"}
    sliced: dict[int, int] = {}
    full: set[int] = set()
    for instruction in kernel.body.values():
        for place, operand in enumerate(instruction.operands):
            position = parameters.get(operand)
            if position is None:
                continue
            if instruction.opcode in PARTIAL and place == 0:
                sliced[position] = sliced.get(position, 0) + instruction.nbytes
            elif instruction.opcode == "dynamic-update-slice" and place == 0:
                sliced[position] = sliced.get(position, 0)
            else:
                full.add(position)
    return tuple(
        min(n, sliced[position]) if position in sliced and position not in full else n
        for position, n in enumerate(whole)
    )


def written_bytes(kernel: Kernel) -> int:
    """Of the results; an update in place writes its slice alone."""
    if kernel.instruction.opcode == "while":
        return 0
    inner = kernel.body.values() if kernel.instruction.opcode == "fusion" else (kernel.instruction,)
    updates = 0
    for instruction in inner:
        if instruction.opcode == "dynamic-update-slice" and len(instruction.operands) > 1:
            update = kernel.body.get(instruction.operands[1])
            updates += update.nbytes if update is not None else 0
    return min(updates, kernel.instruction.nbytes) if updates else kernel.instruction.nbytes


def accesses(module: Module) -> list[Access]:
    """Of all kernels, in a step that follows another one."""
    reads = [read_bytes(kernel) for kernel in module.kernels]
    writes = [written_bytes(kernel) for kernel in module.kernels]
    touched: dict[int, int] = {}
    found: list[Access] = []
    now = 0
    for _ in range(2):
        found = []
        for index, kernel in enumerate(module.kernels):
            distance = tuple(now - max((touched.get(k, 0) for k in operand), default=0) for operand in kernel.sources)
            now += sum(reads[index]) + writes[index]
            for key in (*(k for operand in kernel.sources for k in operand), index):
                touched[key] = now
            found.append(Access(reads[index], writes[index], distance))
    return found


def near_share(access: Access, limit: int) -> float:
    """Part of the bytes read that was touched at most `limit` bytes ago."""
    total = sum(access.read)
    near = sum(n for n, d in zip(access.read, access.distance, strict=True) if d + n <= limit)
    return near / total if total else 1.0
