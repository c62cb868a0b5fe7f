"""What the simulator runs: tasks on streams and links.

    graph  ::= TaskGraph(stream*, link*, task*, buffer*)
    task   ::= latency, then work; after: task*; holds: stream*; shares: link*; priority
    buffer ::= bytes on a device, from its maker's start to its last reader's end

A stream (a device's compute queue, its collective queue) does one task at a time; a task that holds several streams
starts when all are free. Of the tasks that could start, the one with the least priority number does, then the one that
was added first. A link is shared by all tasks that are past their latency: each gets an equal part of the bandwidth at
its most crowded link (DESIGN section 5; fluid model, no packets).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast, final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from autoshard.errors import ArgumentError, explain

TICK_S = 1e-12
"""A tick, in seconds. Times are whole ticks, so sums are exact; an int64 of them is 106 days."""

MOST_PRIORITY = 2**30

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Lists = tuple[Ints, Ints]
"""Lists of numbers: those of item i are `numbers[offsets[i]:offsets[i + 1]]`."""


@final
@dataclass(frozen=True, slots=True)
class Stream:
    """Something that does one task at a time.

    Attributes:
      name: "compute", "collectives".
      device: number of the device, -1 for none.
    """

    name: str
    device: int = -1


@final
@dataclass(frozen=True, slots=True)
class SharedLink:
    """A link in one direction.

    Attributes:
      name: for people.
      bytes_per_s: its bandwidth, shared by who uses it at a time.
    """

    name: str
    bytes_per_s: float


@final
@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that tasks use: reference-counted.

    Attributes:
      device: where.
      nbytes: how much.
      maker: the task at whose start it is allocated, -1 for the beginning.
      readers: it is freed when the last of these and the maker have ended.
      kept: it is never freed.
    """

    device: int
    nbytes: int
    maker: int = -1
    readers: tuple[int, ...] = ()
    kept: bool = False


@final
@dataclass(frozen=True, slots=True, eq=False)
class TaskGraph:
    """Tasks as flat arrays, made by `TaskGraphBuilder`.

    Attributes:
      names, kinds: of each task, for people.
      latency, work: ticks of each task's two phases; the second is at full rate.
      priority: least first.
      after, holds, shares: tasks before it, streams, links.
      streams, links, buffers: see there.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    latency: Ints
    work: Ints
    priority: Ints
    after: Lists
    holds: Lists
    shares: Lists
    streams: tuple[Stream, ...]
    links: tuple[SharedLink, ...]
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.latency)

    def row(self, lists: Lists, task: int) -> tuple[int, ...]:
        """One task's list."""
        offsets, numbers = lists
        return tuple(int(x) for x in numbers[offsets[task] : offsets[task + 1]])


@final
@dataclass(slots=True)
class TaskGraphBuilder:
    """Collects tasks; `build` checks them and makes the graph."""

    _streams: list[Stream] = field(default_factory=list[Stream])
    _links: list[SharedLink] = field(default_factory=list[SharedLink])
    _buffers: list[Buffer] = field(default_factory=list[Buffer])
    _names: list[str] = field(default_factory=list[str])
    _kinds: list[str] = field(default_factory=list[str])
    _latency: list[int] = field(default_factory=list[int])
    _work: list[int] = field(default_factory=list[int])
    _priority: list[int] = field(default_factory=list[int])
    _after: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    _holds: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    _shares: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def stream(self, name: str, device: int = -1) -> int:
        """Adds a stream; returns its number."""
        self._streams.append(Stream(name, device))
        return len(self._streams) - 1

    def link(self, name: str, bytes_per_s: float) -> int:
        """Adds one direction of a link; returns its number.

        Raises:
          ArgumentError: a bandwidth that is not above 0.
        """
        if not bytes_per_s > 0:
            raise _wrong(f"link {name!r} with {bytes_per_s} bytes a second", "a bandwidth above 0", "correct it")
        self._links.append(SharedLink(name, bytes_per_s))
        return len(self._links) - 1

    def task(
        self,
        name: str,
        *,
        time_s: float = 0.0,
        nbytes: float = 0.0,
        latency_s: float = 0.0,
        streams: Sequence[int] = (),
        links: Sequence[int] = (),
        after: Sequence[int] = (),
        priority: int = 0,
        kind: str = "",
    ) -> int:
        """Adds a task.

        Args:
          name: for people; `kind`: class of work.
          time_s: seconds of work, for a task without links.
          nbytes: bytes it sends over its links, for one with links; alone it takes these over the slowest link's rate.
          latency_s: seconds before the work, in which links are not used.
          streams: numbers of the streams it holds from start to end; `links`: of those it shares.
          after: numbers of tasks that must end first.
          priority: the least number goes first.

        Returns:
          The task's number.

        Raises:
          ArgumentError: a time or size below 0 or not finite, a number nobody has, bytes without links.
        """
        number = len(self._names)
        where = f"task {number} ({name!r})"
        for what, value in (("time_s", time_s), ("nbytes", nbytes), ("latency_s", latency_s)):
            if not 0 <= value < float("inf"):
                raise _wrong(f"{where} with {what} = {value}", "a finite number, 0 or more", f"correct {what}")
        if (links and time_s) or (nbytes and not links):
            raise _wrong(
                f"{where} with time_s = {time_s}, nbytes = {nbytes} and {len(links)} links",
                "time_s where it uses no link, nbytes where it does",
                "give just one of them",
            )
        for what, given, known in (
            ("stream", streams, len(self._streams)),
            ("link", links, len(self._links)),
            ("task", after, number),
        ):
            for k in given:
                if not 0 <= k < known:
                    raise _wrong(f"{where} names {what} {k}", f"one of the {known} added before it", "correct it")
        if abs(priority) >= MOST_PRIORITY:
            raise _wrong(f"{where} with priority {priority}", f"a number within {MOST_PRIORITY}", "use smaller ones")
        work_s = nbytes / min(self._links[k].bytes_per_s for k in links) if links else time_s
        self._names.append(name)
        self._kinds.append(kind)
        self._latency.append(ticks(latency_s))
        self._work.append(ticks(work_s))
        self._priority.append(priority)
        self._after.append(tuple(dict.fromkeys(after)))
        self._holds.append(tuple(dict.fromkeys(streams)))
        self._shares.append(tuple(dict.fromkeys(links)))
        return number

    def buffer(
        self, device: int, nbytes: int, maker: int = -1, readers: Sequence[int] = (), *, kept: bool = False
    ) -> None:
        """Adds a buffer; see `Buffer`."""
        if nbytes < 0:
            raise _wrong(f"a buffer of {nbytes} bytes", "0 or more", "correct it")
        self._buffers.append(Buffer(device, nbytes, maker, tuple(readers), kept))

    def build(self) -> TaskGraph:
        """The graph.

        Raises:
          ArgumentError: a buffer names a task nobody added.
        """
        count = len(self._names)
        for b in self._buffers:
            for task in (*b.readers, b.maker):
                if not -1 <= task < count:
                    raise _wrong(f"a buffer used by task {task}", f"tasks 0 to {count - 1}", "correct it")
        return TaskGraph(
            tuple(self._names),
            tuple(self._kinds),
            np.array(self._latency, np.int64),
            np.array(self._work, np.int64),
            np.array(self._priority, np.int64),
            lists(self._after),
            lists(self._holds),
            lists(self._shares),
            tuple(self._streams),
            tuple(self._links),
            tuple(self._buffers),
        )


def ticks(seconds: float) -> int:
    """Seconds in whole ticks."""
    return round(seconds / TICK_S)


def lists(rows: Sequence[Sequence[int]]) -> Lists:
    """Rows as one array with offsets."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, np.fromiter((x for row in rows for x in row), np.int64, int(offsets[-1]))


def cycle_text(graph: TaskGraph) -> str:
    """The names along a cycle of `after`; there must be one."""
    edges: list[tuple[int, int]] = [(p, i) for i in range(graph.size) for p in graph.row(graph.after, i)]
    walk = cast("list[tuple[int, int]]", nx.find_cycle(nx.DiGraph(edges)))  # pyright: ignore[reportUnknownMemberType]
    return " -> ".join(f"{first} ({graph.names[first]})" for first, _ in walk)


def _wrong(given: str, expected: str, todo: str) -> ArgumentError:
    return ArgumentError(explain(given, expected, todo))
