"""Parts of the simulator's event loop, compiled by numba: keys of sets, heaps, the lists of a link's users."""
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportArgumentType=false, reportReturnType=false
# (numbers out of arrays are integers here)

from __future__ import annotations

import numpy as np

from autoshard.loops import Bytes, Floats, Ints, kernel


@kernel
def mix(x: int) -> int:
    """A number that looks random for each task (splitmix64's finaliser): sums of them stand for sets of tasks."""
    z = np.uint64(x + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((z ^ (z >> np.uint64(31))) >> np.uint64(1))


@kernel
def heap_push(heap: Ints, base: int, count: int, key: int) -> None:
    """Adds a key to the binary heap of `count` keys that starts at `base`."""
    i = count
    while i > 0:
        up = (i - 1) >> 1
        if heap[base + up] <= key:
            break
        heap[base + i] = heap[base + up]
        i = up
    heap[base + i] = key


@kernel
def heap_pop(heap: Ints, base: int, count: int) -> int:
    """Takes the least key off a heap of `count` keys."""
    least = heap[base]
    last = heap[base + count - 1]
    n = count - 1
    i = 0
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        if down + 1 < n and heap[base + down + 1] < heap[base + down]:
            down += 1
        if heap[base + down] >= last:
            break
        heap[base + i] = heap[base + down]
        i = down
    if n > 0:
        heap[base + i] = last
    return least


@kernel
def event_push(at: Ints, what: Ints, version: Ints, count: int, t: int, task: int, v: int) -> None:
    """Adds an event to the heap ordered by time, then task."""
    i = count
    while i > 0:
        up = (i - 1) >> 1
        if at[up] < t or (at[up] == t and what[up] <= task):
            break
        at[i], what[i], version[i] = at[up], what[up], version[up]
        i = up
    at[i], what[i], version[i] = t, task, v


@kernel
def event_pop(at: Ints, what: Ints, version: Ints, count: int) -> None:
    """Takes the first event off the heap."""
    n = count - 1
    t, task, v = at[n], what[n], version[n]
    i = 0
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        if down + 1 < n and (at[down + 1] < at[down] or (at[down + 1] == at[down] and what[down + 1] < what[down])):
            down += 1
        if at[down] > t or (at[down] == t and what[down] >= task):
            break
        at[i], what[i], version[i] = at[down], what[down], version[down]
        i = down
    if n > 0:
        at[i], what[i], version[i] = t, task, v


@kernel
def roomier(at: Ints, what: Ints, version: Ints, count: int) -> tuple[Ints, Ints, Ints]:
    """The arrays of the event heap, twice as long if they are full."""
    if count < len(at):
        return at, what, version
    return (
        np.concatenate((at, np.empty_like(at))),
        np.concatenate((what, np.empty_like(what))),
        np.concatenate((version, np.empty_like(version))),
    )


@kernel
def queue(
    s: int, key: int, heap: Ints, base: Ints, size: Ints, dirty: Bytes, dirty_list: Ints, dirty_count: int
) -> int:
    """Lets a task wait at stream s, which is then looked at; returns the number of streams to look at."""
    heap_push(heap, base[s], size[s], key)
    size[s] += 1
    if dirty[s]:
        return dirty_count
    dirty[s] = True
    dirty_list[dirty_count] = s
    return dirty_count + 1


@kernel
def join(slot: int, link: int, head: Ints, users: Ints, after: Ints, before: Ints) -> None:
    """Puts a slot at the head of a link's list."""
    before[slot] = -1
    after[slot] = head[link]
    if head[link] >= 0:
        before[head[link]] = slot
    head[link] = slot
    users[link] += 1


@kernel
def leave(slot: int, link: int, head: Ints, users: Ints, after: Ints, before: Ints) -> None:
    """Takes a slot out of a link's list."""
    if before[slot] >= 0:
        after[before[slot]] = after[slot]
    else:
        head[link] = after[slot]
    if after[slot] >= 0:
        before[after[slot]] = before[slot]
    users[link] -= 1


@kernel
def speed_of(i: int, off: Ints, links: Ints, rate: Floats, users: Ints) -> float:
    """What part of the rate it would have alone a task gets: an equal part of its most crowded link."""
    share, full = np.inf, np.inf
    for e in range(off[i], off[i + 1]):
        share = min(share, rate[links[e]] / users[links[e]])
        full = min(full, rate[links[e]])
    return share / full if full < np.inf else 1.0
