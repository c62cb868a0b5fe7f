"""What XLA's compiler says of a program: memory by part, kernels, collectives, warnings; as a table and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.errors import CompileError, explain
from autoshard.ir import MeshShape
from autoshard.runtime.hlo import Collective, Kernel

REPORT_VERSION = 1
"""Of the JSON form; counted up when fields change their meaning."""


@final
@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one device, as XLA's buffer assignment counts them.

    Attributes:
      arguments: inputs of the program.
      outputs: its results, aliased ones included.
      aliased: results that lie where a donated argument lay.
      temporaries: everything in between.
      generated_code: the program itself (0 where XLA does not say).
      peak: most bytes in use at once.
      capacity: memory of the device.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    generated_code: int
    peak: int
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak <= self.capacity


@final
@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """Collectives of one kind over groups of one size.

    Attributes:
      kind: see `Collective`.
      group_size: devices of a group.
      count: how many the program has.
      runs: how many run in one call, loops included.
      nbytes: bytes of all runs, each counted as in `Collective`.
      largest_bytes: of the largest.
      asynchronous: how many of `count` run beside other work.
      overlapping: how many of `count` have a kernel between start and done.
    """

    kind: str
    group_size: int
    count: int
    runs: int
    nbytes: int
    largest_bytes: int
    asynchronous: int
    overlapping: int


@final
@dataclass(frozen=True, slots=True)
class CompiledReport:
    """A compiled program.

    Attributes:
      device: name of the device it was compiled for.
      mesh: axes and sizes.
      memory: bytes on one device.
      kernels: by sort, most frequent first.
      collectives: by kind and group size, most bytes first.
      warnings: what XLA logged as a warning, each once.
      lower_s: seconds to trace and lower.
      compile_s: seconds XLA took.
      versions: of the packages that took part.
      ptx: the kernels' code, "" unless asked for.
      hlo: the compiled program, "" unless asked for.
    """

    device: str
    mesh: MeshShape
    memory: MemoryParts
    kernels: tuple[Kernel, ...]
    collectives: tuple[CollectiveGroup, ...]
    warnings: tuple[str, ...]
    lower_s: float
    compile_s: float
    versions: tuple[tuple[str, str], ...]
    ptx: str = field(default="", repr=False)
    hlo: str = field(default="", repr=False)

    def kernel_count(self, kind: str) -> int:
        """How many kernels of a kind (see `Kernel`) the program has."""
        return sum(k.count for k in self.kernels if k.kind == kind)

    def to_json(self) -> str:
        """Text that `from_json` reads back as an equal report."""
        return json.dumps({"version": REPORT_VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CompiledReport:
        """The report of a text.

        Raises:
          CompileError: the text is no report, or one of another version.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields.pop("version")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable("a text that is no compile report") from error
        if version != REPORT_VERSION:
            raise _unreadable(f"a compile report of version {version}")
        try:
            fields["mesh"] = tuple((str(name), int(size)) for name, size in fields["mesh"])
            fields["memory"] = MemoryParts(**fields["memory"])
            fields["kernels"] = tuple(Kernel(**k) for k in fields["kernels"])
            fields["collectives"] = tuple(CollectiveGroup(**c) for c in fields["collectives"])
            fields["warnings"] = tuple(fields["warnings"])
            fields["versions"] = tuple((str(name), str(value)) for name, value in fields["versions"])
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable("a compile report with other fields") from error

    def view(self) -> RenderableType:
        """The report as a rich renderable."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh)
        state = "fits" if self.memory.fits else "DOES NOT FIT"
        head = (
            f"compiled for {self.device}, mesh ({mesh}): peak {_size(self.memory.peak)} of "
            f"{_size(self.memory.capacity)} a device ({state}), {self.compile_s:.1f} s to compile"
        )
        parts: list[RenderableType] = [Text(head), _memory_table(self.memory)]
        if self.collectives:
            parts.append(_collective_table(self.collectives))
        parts.append(_kernel_table(self.kernels))
        parts += [Text(f"warning: {warning}") for warning in self.warnings]
        parts.append(Text(", ".join(f"{name} {version}" for name, version in self.versions)))
        return Group(*parts)

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=110, color_system=None, force_terminal=False).print(self.view())
        return out.getvalue().rstrip()


def group_collectives(found: Iterable[Collective]) -> tuple[CollectiveGroup, ...]:
    """Collectives by kind and group size, most bytes first."""
    groups: dict[tuple[str, int], list[Collective]] = {}
    for each in found:
        groups.setdefault((each.kind, each.group_size), []).append(each)
    rows = [
        CollectiveGroup(
            kind=kind,
            group_size=size,
            count=len(members),
            runs=sum(c.times for c in members),
            nbytes=sum(c.nbytes * c.times for c in members),
            largest_bytes=max(c.nbytes for c in members),
            asynchronous=sum(c.asynchronous for c in members),
            overlapping=sum(c.overlaps for c in members),
        )
        for (kind, size), members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda g: (-g.nbytes, g.kind, g.group_size)))


def memory_parts(stats: Mapping[str, int], capacity: int) -> MemoryParts:
    """From XLA's own names."""
    return MemoryParts(
        arguments=stats["argument_size_in_bytes"],
        outputs=stats["output_size_in_bytes"],
        aliased=stats["alias_size_in_bytes"],
        temporaries=stats["temp_size_in_bytes"],
        generated_code=stats["generated_code_size_in_bytes"],
        peak=stats["peak_memory_in_bytes"],
        capacity=capacity,
    )


def _unreadable(given: str) -> CompileError:
    return CompileError(
        explain(given, f"JSON of CompiledReport.to_json, version {REPORT_VERSION}", "compile the program again")
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _memory_table(memory: MemoryParts) -> Table:
    table = _table("memory of one device", "part", "size")
    for name in ("arguments", "outputs", "aliased", "temporaries", "generated_code"):
        table.add_row(name.replace("_", " "), _size(getattr(memory, name)))
    return table


def _collective_table(groups: tuple[CollectiveGroup, ...]) -> Table:
    table = _table("collectives", "kind", "devices", "count", "runs", "bytes", "largest", "async", "overlapping")
    for g in groups:
        cells = (g.group_size, g.count, g.runs, _size(g.nbytes), _size(g.largest_bytes), g.asynchronous, g.overlapping)
        table.add_row(g.kind.replace("_", "-"), *(str(cell) for cell in cells))
    return table


def _kernel_table(kernels: tuple[Kernel, ...]) -> Table:
    table = _table("kernels", "kind", "count", "runs")
    for k in kernels:
        table.add_row(f"{k.kind} ({k.detail})", str(k.count), str(k.runs))
    return table


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
