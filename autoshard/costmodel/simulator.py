"""The simulator: when every task of a `TaskGraph` runs, and how much memory is in use; and again after a change.

    simulate(graph)              a Simulation: start and end of each task, makespan, busy times, memory over time
    simulation.change(changes)   the Simulation of the changed graph

A change is re-simulated from the last recorded state before it can matter, and until the run is in a state that the
earlier run was in too, perhaps at another time: from there on everything happens as before, shifted. With one compiled
engine for both, the result equals that of a full run exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from autoshard.costmodel.task_graph import (
    MOST_PRIORITY,
    TICK_S,
    Floats,
    Ints,
    Lists,
    TaskGraph,
    cycle_text,
    ticks,
)
from autoshard.errors import ArgumentError, explain

RECORDS = 256
"""States recorded in a run: each costs a little, and a change is re-simulated from one of them. Ours."""


@final
@dataclass(frozen=True, slots=True)
class Change:
    """A task as it shall be. What is None stays; a number that nobody has yet adds a task (the next one).

    Attributes:
      task: number.
      time_s, nbytes, latency_s, streams, links, after, priority: as in `TaskGraphBuilder.task`; `after` may name later
        tasks.
    """

    task: int
    time_s: float | None = None
    nbytes: float | None = None
    latency_s: float | None = None
    streams: tuple[int, ...] | None = None
    links: tuple[int, ...] | None = None
    after: tuple[int, ...] | None = None
    priority: int | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """States of a run between events.

    Attributes:
      state: a row each: tick, tasks started, tasks done, sums of keys of both.
      offsets: of the tasks running then in `running` (number, phase, ticks since `left` held, ticks to its next event)
        and `left` (work left).
    """

    state: NDArray[np.int64]
    offsets: Ints
    running: NDArray[np.int64]
    left: Floats


@final
@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A simulated task graph.

    Attributes:
      graph: what was run; `contention`: whether links were shared.
      ready: ticks at which each task's predecessors are done; `start`, `end`: of the task itself.
      resimulated: tasks that were run to find this; all of them unless it came from `change`.
    """

    graph: TaskGraph
    contention: bool
    ready: Ints
    start: Ints
    end: Ints
    resimulated: int
    _records: Callable[[], Records]
    _successors: Lists

    @property
    def makespan_s(self) -> float:
        """Seconds until all tasks are done."""
        return float(self.end.max(initial=0)) * TICK_S

    def start_s(self, task: int) -> float:
        """Start of a task, in seconds."""
        return float(self.start[task]) * TICK_S

    def end_s(self, task: int) -> float:
        """End of a task, in seconds."""
        return float(self.end[task]) * TICK_S

    def busy_s(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds in which each stream is held, and those each link would need alone for all that is sent over it."""
        return _busy_s(self.graph, self.end - self.start)

    def critical_path_s(self) -> float:
        """Length of the longest chain of tasks, if nothing ever waited for a stream or shared a link."""
        return _critical_path(self.graph, self._successors)[1]

    def lower_bound_s(self) -> float:
        """No order of the tasks is quicker than this: the critical path, the busiest stream, the busiest link."""
        streams, links = _busy_s(self.graph, self.graph.latency + self.graph.work)
        resources = (streams, links) if self.contention else (streams,)
        return max(self.critical_path_s(), *(float(busy.max(initial=0.0)) for busy in resources))

    def memory(self) -> dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """For each device with buffers: seconds, and bytes in use from then on."""
        return memory_over_time(self.graph, self.start, self.end)

    def peak_bytes(self) -> dict[int, int]:
        """Most bytes in use on each device with buffers."""
        return {device: int(nbytes.max()) for device, (_, nbytes) in self.memory().items()}

    def change(self, changes: Sequence[Change]) -> Simulation:
        """The simulation of the graph with some tasks changed or added; equal to simulating it anew.

        A task is taken out by giving it no time, streams and links: it ends as soon as its predecessors have.

        Raises:
          ArgumentError: a change is not possible, or makes a cycle.
        """
        graph = changed_graph(self.graph, changes)
        succs = _successors(graph) if any(c.after is not None for c in changes) else self._successors
        return _resimulate(self, graph, succs, sorted({c.task for c in changes}))


def simulate(graph: TaskGraph, *, contention: bool = True) -> Simulation:
    """Runs a task graph.

    Args:
      graph: the tasks.
      contention: whether tasks that use a link at the same time share it; else each has it for itself.

    Raises:
      ArgumentError: tasks wait for each other in a circle.
    """
    succs = _successors(graph)
    times, records, done, _, _, _ = _run(graph, contention, succs, _beginning(_NO_TIMES), _NO_RECORDS, _NO_CHANGES)
    if done < graph.size:
        raise _circle(graph)
    return Simulation(graph, contention, *times, graph.size, lambda: records, succs)


def memory_over_time(
    graph: TaskGraph, start: Ints, end: Ints
) -> dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """For each device with buffers: seconds at which the bytes in use change, and the bytes from then on.

    A buffer is allocated when its maker starts and freed when its maker and all its readers have ended; what is freed
    at a time is free for what is allocated at that time.
    """
    rows: dict[int, list[tuple[int, int]]] = {}
    for b in graph.buffers:
        row = rows.setdefault(b.device, [])
        row.append((int(start[b.maker]) if b.maker >= 0 else 0, b.nbytes))
        if not b.kept:
            users = (*b.readers, b.maker) if b.maker >= 0 else b.readers
            row.append((max((int(end[i]) for i in users), default=0), -b.nbytes))
    found: dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}
    for device, row in rows.items():
        at = np.array([t for t, _ in row], np.int64)
        change = np.array([n for _, n in row], np.int64)
        times, inverse = np.unique(at, return_inverse=True)
        total = np.zeros(len(times), np.int64)
        np.add.at(total, inverse, change)
        found[device] = (times * TICK_S).astype(np.float64), np.cumsum(total)
    return found


def changed_graph(graph: TaskGraph, changes: Sequence[Change]) -> TaskGraph:
    """The graph with some tasks changed or added; see `Simulation.change`."""
    changes = sorted(changes, key=lambda c: c.task)
    size = graph.size
    added = sum(c.task >= size for c in changes)
    if [c.task for c in changes if c.task >= size] != list(range(size, size + added)) or any(
        c.task < 0 or (k and changes[k - 1].task == c.task) for k, c in enumerate(changes)
    ):
        numbers = ", ".join(str(c.task) for c in changes)
        raise _wrong(f"changes of tasks {numbers}", f"each of tasks 0 to {size - 1} once, new ones from {size} on")
    total = size + added
    latency, work, priority = (_longer(a, added) for a in (graph.latency, graph.work, graph.priority))
    rows: dict[str, dict[int, tuple[int, ...]]] = {"after": {}, "holds": {}, "shares": {}}
    for c in changes:
        _check(c, graph, total)
        links = c.links if c.links is not None else (graph.row(graph.shares, c.task) if c.task < size else ())
        if (links and c.time_s is not None) or (not links and c.nbytes):
            raise _wrong(f"task {c.task} with {len(links)} links", "nbytes where it uses links, else time_s")
        if c.links is not None and c.links and c.nbytes is None:
            raise _wrong(f"other links for task {c.task} and no nbytes", "nbytes, whenever links change")
        if c.nbytes is not None and links:
            work[c.task] = ticks(c.nbytes / min(graph.links[k].bytes_per_s for k in links))
        elif c.time_s is not None:
            work[c.task] = ticks(c.time_s)
        elif c.links is not None:
            work[c.task] = 0
        if c.latency_s is not None:
            latency[c.task] = ticks(c.latency_s)
        if c.priority is not None:
            priority[c.task] = c.priority
        for field, row in (("after", c.after), ("holds", c.streams), ("shares", c.links)):
            if row is not None:
                rows[field][c.task] = tuple(dict.fromkeys(row))
    new = {name: _with_rows(getattr(graph, name), some, added) for name, some in rows.items()}
    names = ("",) * added
    return replace(
        graph,
        names=graph.names + names,
        kinds=graph.kinds + names,
        latency=latency,
        work=work,
        priority=priority,
        **new,
    )


def _longer(array: Ints, added: int) -> Ints:
    return np.concatenate((array, np.zeros(added, np.int64))) if added else array.copy()


def _check(c: Change, graph: TaskGraph, total: int) -> None:
    for what, value in (("time_s", c.time_s), ("nbytes", c.nbytes), ("latency_s", c.latency_s)):
        if value is not None and not 0 <= value < float("inf"):
            raise _wrong(f"task {c.task} with {what} = {value}", "a finite number, 0 or more")
    known = (
        ("streams", c.streams, len(graph.streams)),
        ("links", c.links, len(graph.links)),
        ("after", c.after, total),
    )
    for what, given, count in known:
        if any(not 0 <= k < count or (what == "after" and k == c.task) for k in given or ()):
            raise _wrong(f"task {c.task} with {what} = {given}", f"other numbers from 0 to {count - 1}")
    if c.priority is not None and abs(c.priority) >= MOST_PRIORITY:
        raise _wrong(f"task {c.task} with priority {c.priority}", f"a number within {MOST_PRIORITY}")


def _with_rows(old: Lists, rows: dict[int, tuple[int, ...]], added: int) -> Lists:
    """The lists with some rows replaced and `added` empty ones (or those in `rows`) at the end."""
    if not rows and not added:
        return old
    offsets, numbers = old
    if added:
        offsets = np.concatenate((offsets, np.full(added, offsets[-1])))
    size = np.diff(offsets)
    parts: list[Any] = []
    at = 0
    for i, row in sorted(rows.items()):
        parts += [numbers[at : offsets[i]], np.array(row, np.int64)]
        at = int(offsets[i + 1])
        size[i] = len(row)
    parts.append(numbers[at:])
    new = np.zeros(len(size) + 1, np.int64)
    np.cumsum(size, out=new[1:])
    return new, np.concatenate(parts)


def _resimulate(old: Simulation, graph: TaskGraph, succs: Lists, tasks: Sequence[int]) -> Simulation:
    """From the last record before a changed task could start, until a record's state comes back."""
    size = old.graph.size
    records = old._records()  # pyright: ignore[reportPrivateUsage]
    changed = np.zeros(size, np.int8)
    changed[[i for i in tasks if i < size]] = 1
    first = min((_could_start(old, graph, i) for i in tasks), default=None)
    if first is None:
        return old
    row = int(np.searchsorted(records.state[:, 0], first)) - 1  # strictly before
    before = (old.ready, old.start, old.end)
    begin = _beginning(before) if row < 0 else _from_record(records, row, before)
    times, window, done, ran, match, at = _run(graph, old.contention, succs, begin, records, changed)
    if match < 0 and done < graph.size:
        raise _circle(graph)
    joined = functools.cache(lambda: _joined(records, row, window, match, at, size, graph.size - size))
    return Simulation(graph, old.contention, *times, ran, joined, succs)


def _could_start(old: Simulation, graph: TaskGraph, task: int) -> int:
    """A time before which the change of a task makes no difference: when its predecessors have ended, old and new.

    A predecessor that changes too has a time of its own.
    """
    size = old.graph.size
    if task < size and graph.after is old.graph.after:
        return int(old.ready[task])
    offsets, numbers = graph.after
    before = numbers[offsets[task] : offsets[task + 1]]
    new = int(old.end[before[before < size]].max(initial=0))
    return min(new, int(old.ready[task])) if task < size else new


def _run(
    graph: TaskGraph, contention: bool, succs: Lists, begin: Any, records: Records, changed: NDArray[np.int8]
) -> tuple[tuple[Ints, Ints, Ints], Records, int, int, int, int]:
    from autoshard.costmodel.event_kernels import simulate as run  # numba is loaded when it is needed

    rate = np.array([link.bytes_per_s if contention else np.inf for link in graph.links], np.float64)
    old = (records.state, records.offsets, records.running, records.left)
    ready, start, end, state, offsets, running, left, done, ran, match, time = run(
        graph.latency,
        graph.work,
        graph.priority,
        graph.holds,
        graph.shares,
        graph.after,
        succs,
        len(graph.streams),
        rate,
        max(graph.size // RECORDS, 1),
        begin,
        old,
        changed,
    )
    return (ready, start, end), Records(state, offsets, running, left), done, ran, match, time


_NONE: Ints = np.zeros(0, np.int64)
_NO_TIMES = (_NONE, _NONE, _NONE)
_NO_CHANGES = np.zeros(0, np.int8)
_NO_RECORDS = Records(np.zeros((0, 5), np.int64), np.zeros(1, np.int64), np.zeros((0, 4), np.int64), np.zeros(0))


def _beginning(times: tuple[Ints, Ints, Ints]) -> Any:
    return _NONE, *times, _NO_RECORDS.running, _NO_RECORDS.left, 0


def _from_record(records: Records, row: int, times: tuple[Ints, Ints, Ints]) -> Any:
    a, b = records.offsets[row], records.offsets[row + 1]
    return records.state[row], *times, records.running[a:b], records.left[a:b], row + 1


def _joined(old: Records, r: int, window: Records, match: int, at: int, size: int, added: int) -> Records:
    """Records up to row r, those of the window, and the earlier ones from row `match` on, which now is at tick `at`."""
    from autoshard.costmodel.event_kernels import mix

    parts = [(old.state[: r + 1], old.offsets[: r + 2], old), (window.state, window.offsets, window)]
    if match >= 0:
        state = old.state[match:].copy()
        state[:, 0] += at - state[0, 0]
        keys = np.array([mix(i) for i in range(size, size + added)], np.int64).sum()  # wraps, as in the loop
        state[:, 1:] += np.array([added, added, keys, keys])
        parts.append((state, old.offsets[match:], old))
    parts = [part for part in parts if len(part[0])]
    offsets = [np.zeros(1, np.int64)]
    for _, o, _ in parts:
        offsets.append(o[1:] - o[0] + offsets[-1][-1])
    if not parts:
        return _NO_RECORDS
    return Records(
        np.concatenate([s for s, _, _ in parts]),
        np.concatenate(offsets),
        np.concatenate([o.running[x[0] : x[-1]] for _, x, o in parts]),
        np.concatenate([o.left[x[0] : x[-1]] for _, x, o in parts]),
    )


def _successors(graph: TaskGraph) -> Lists:
    from autoshard.costmodel.event_kernels import invert

    return invert(graph.size, *graph.after)


def _critical_path(graph: TaskGraph, succs: Lists) -> tuple[Ints, float]:
    from autoshard.costmodel.event_kernels import longest_path

    end, _ = longest_path(graph.latency, graph.work, *graph.after, *succs)
    return end, float(end.max(initial=0)) * TICK_S


def _busy_s(graph: TaskGraph, held: Ints) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    offsets, numbers = graph.holds
    streams = np.bincount(numbers, weights=np.repeat(held, np.diff(offsets)), minlength=len(graph.streams)) * TICK_S
    offsets, numbers = graph.shares
    rate = np.array([link.bytes_per_s for link in graph.links], np.float64)
    owner = np.repeat(np.arange(graph.size), np.diff(offsets))
    slowest = np.full(graph.size, np.inf)
    np.minimum.at(slowest, owner, rate[numbers])
    alone = graph.work[owner] * slowest[owner] / rate[numbers]
    links = np.bincount(numbers, weights=alone, minlength=len(graph.links)) * TICK_S
    return streams.astype(np.float64), links.astype(np.float64)


def _circle(graph: TaskGraph) -> ArgumentError:
    return _wrong(f"tasks wait for each other: {cycle_text(graph)}", "an order in which all can run")


def _wrong(given: str, expected: str) -> ArgumentError:
    return ArgumentError(explain(given, expected, "correct it"))
