"""The simulator's event loop, compiled by numba, on the flat arrays of a `TaskGraph`.

Times are whole ticks. Everything that decides what happens next is a difference of times, so a state that recurs a
thousand ticks later goes on exactly as before, a thousand ticks later: that is what re-simulation rests on.
"""
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportArgumentType=false, reportReturnType=false
# (numbers out of arrays are integers here; all in one file, for numba's cache does not see changes in another)

from __future__ import annotations

import numpy as np

from autoshard.loops import Bytes, Floats, Ints, kernel

WAITING, LATENCY, WORKING, DONE = 0, 1, 2, 3
"""Phases of a task."""

KEY_BITS = 32
"""A waiting task's key is its priority above its number in so many bits."""


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
def mark(s: int, dirty: Bytes, dirty_list: Ints, dirty_count: int) -> int:
    """Has stream s looked at; returns the number of streams to look at."""
    if dirty[s]:
        return dirty_count
    dirty[s] = True
    dirty_list[dirty_count] = s
    return dirty_count + 1


@kernel
def queue(
    s: int, key: int, heap: Ints, base: Ints, size: Ints, dirty: Bytes, dirty_list: Ints, dirty_count: int
) -> int:
    """Lets a task wait at stream s, which is then looked at; returns the number of streams to look at."""
    heap_push(heap, base[s], size[s], key)
    size[s] += 1
    return mark(s, dirty, dirty_list, dirty_count)


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


@kernel
def invert(count: int, off: Ints, idx: Ints) -> tuple[Ints, Ints]:
    """For lists of predecessors those of successors."""
    out_off = np.zeros(count + 1, np.int64)
    for k in idx:
        out_off[k + 1] += 1
    for i in range(count):
        out_off[i + 1] += out_off[i]
    fill = out_off.copy()
    out = np.empty(len(idx), np.int64)
    for i in range(count):
        for e in range(off[i], off[i + 1]):
            out[fill[idx[e]]] = i
            fill[idx[e]] += 1
    return out_off, out


@kernel
def longest_path(latency: Ints, work: Ints, pred_off: Ints, pred: Ints, succ_off: Ints, succ: Ints) -> tuple[Ints, int]:
    """The end of each task if nothing ever waited for a resource, and how many tasks could be ordered at all."""
    n = len(latency)
    waiting = np.empty(n, np.int64)
    end = np.zeros(n, np.int64)
    stack = np.empty(n, np.int64)
    count = 0
    for i in range(n):
        waiting[i] = pred_off[i + 1] - pred_off[i]
        if waiting[i] == 0:
            stack[count] = i
            count += 1
    done = 0
    while count:
        count -= 1
        i = stack[count]
        done += 1
        end[i] += latency[i] + work[i]
        for e in range(succ_off[i], succ_off[i + 1]):
            j = succ[e]
            end[j] = max(end[j], end[i])
            waiting[j] -= 1
            if waiting[j] == 0:
                stack[count] = j
                count += 1
    return end, done


@kernel
def simulate(
    latency: Ints,
    work: Ints,
    priority: Ints,
    streams: tuple[Ints, Ints],
    links: tuple[Ints, Ints],
    preds: tuple[Ints, Ints],
    succs: tuple[Ints, Ints],
    stream_count: int,
    rate: Floats,
    every: int,
    begin: tuple[Ints, Ints, Ints, Ints, Ints, Floats, int],
    old: tuple[Ints, Ints, Ints, Floats],
    changed: Bytes,
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Floats, int, int, int, int]:
    """Runs tasks until all are done, or until the state is one that an earlier run was in.

    Args:
      latency, work: ticks of each task's two phases, the second at full rate; priority: least first.
      streams, links, preds, succs: for each task offsets and numbers of the streams it holds, the links it shares, the
        tasks before and after it.
      stream_count: number of streams; rate: bytes a second of each link, infinite where it is not shared.
      every: tasks started between two records of the state.
      begin: a record's state (see below) to begin at; ready, start and end times of the run it is from; its running
        tasks: a row (number, phase, ticks since the work left was that, at most 0, ticks to the next event), and their
        work left; the row of the first record that comes later. Empty arrays to begin at the beginning.
      old: the records of an earlier run, see below; empty for none. A state that equals one of them ends the run.
      changed: which tasks differ from the earlier run (later ones are new).

    Returns:
      ready, start and end of each task; records: per record (time, tasks started, tasks done, sum of keys of both),
      offsets, running tasks (number, phase, since, next), work left; tasks done; tasks started in this run; the row of
      the record that stopped the run, -1 if none; its time in this run.
    """
    n = len(latency)
    soff, sidx = streams
    loff, lidx = links
    poff, pidx = preds
    uoff, uidx = succs
    state, was_ready, was_start, was_end, begin_run, begin_left, later = begin
    old_state, old_off, old_run, old_left = old
    n_old = len(changed)
    ready = np.empty(n, np.int64)
    start = np.empty(n, np.int64)
    end = np.empty(n, np.int64)
    phase = np.zeros(n, np.int8)
    wait = np.full(n, -1, np.int64)  # predecessors that are not done; counted when the first of them is done
    # Of tasks that have started:
    left = np.empty(n, np.float64)
    since = np.empty(n, np.int64)
    speed = np.empty(n, np.float64)
    version = np.zeros(n, np.int64)
    next_at = np.empty(n, np.int64)
    stamp = np.zeros(n, np.int64)
    # Waiting tasks: a heap for each stream, in one array. Each waits at one of its streams that is not free.
    base = np.zeros(stream_count + 1, np.int64)
    for e in sidx:
        base[e + 1] += 1
    for s in range(stream_count):
        base[s + 1] += base[s]
    heap = np.empty(max(len(sidx), 1), np.int64)
    size = np.zeros(stream_count, np.int64)
    free = np.ones(stream_count, np.bool_)
    dirty = np.zeros(stream_count, np.bool_)
    dirty_list = np.empty(stream_count + 1, np.int64)
    dirty_count = 0
    # Members of each link: a list through its slots.
    links_n = len(rate)
    head = np.full(links_n + 1, -1, np.int64)
    users = np.zeros(links_n + 1, np.int64)
    after = np.empty(len(lidx) + 1, np.int64)
    before = np.empty(len(lidx) + 1, np.int64)
    owner = np.empty(len(lidx) + 1, np.int64)
    round_number = 0
    # Events.
    room = max(2 * stream_count + 64, 256)
    ev_at = np.empty(room, np.int64)
    ev_task = np.empty(room, np.int64)
    ev_version = np.empty(room, np.int64)
    ev = 0
    running = np.empty(n + 1, np.int64)
    place = np.empty(n + 1, np.int64)
    running_n = 0
    fresh = np.empty(n + 1, np.int64)  # tasks without a stream that have become ready
    fresh_n = 0
    front = np.empty(stream_count + 1, np.int64)
    touched = np.empty(n + 1, np.int64)
    mask = (np.int64(1) << KEY_BITS) - 1
    started, done, key_started, key_done = 0, 0, 0, 0
    new_started, new_done, new_key_started, new_key_done = 0, 0, 0, 0  # of these, tasks no earlier run had
    to_settle = 0  # changed tasks that are not done
    for i in range(n_old):
        to_settle += changed[i]
    to_settle += n - n_old
    records = np.empty((64, 5), np.int64)
    record_off = np.zeros(65, np.int64)
    record_run = np.empty((256, 4), np.int64)
    record_left = np.empty(256, np.float64)
    record_n = 0
    at_record = 0
    next_record = every
    matched, matched_time = -1, 0

    now = 0
    if len(state) > 0:
        now = state[0]
        started, done, key_started, key_done = state[1], state[2], state[3], state[4]
        at_record = later
        for i in range(n_old):
            ready[i], start[i], end[i] = was_ready[i], was_start[i], was_end[i]
            if end[i] <= now:
                phase[i] = DONE
            elif ready[i] <= now and start[i] > now:
                fresh[fresh_n] = i
                fresh_n += 1
    else:
        for i in range(n):
            if poff[i] == poff[i + 1]:
                fresh[fresh_n] = i
                fresh_n += 1
                ready[i] = 0
    next_record = started + every
    begun = started
    for r in range(len(begin_run)):
        i = begin_run[r, 0]
        phase[i] = begin_run[r, 1]
        since[i] = now + begin_run[r, 2]
        next_at[i] = now + begin_run[r, 3]
        left[i] = begin_left[r]
        place[i] = running_n
        running[running_n] = i
        running_n += 1
        for e in range(soff[i], soff[i + 1]):
            free[sidx[e]] = False
        if phase[i] == WORKING:
            for e in range(loff[i], loff[i + 1]):
                owner[e] = i
                join(e, lidx[e], head, users, after, before)
    for r in range(len(begin_run)):
        i = begin_run[r, 0]
        if phase[i] == WORKING and loff[i + 1] > loff[i]:
            speed[i] = speed_of(i, loff, lidx, rate, users)
        ev_at, ev_task, ev_version = roomier(ev_at, ev_task, ev_version, ev)
        event_push(ev_at, ev_task, ev_version, ev, next_at[i], i, 0)
        ev += 1
    waiting_n = fresh_n
    fresh_n = 0
    for k in range(waiting_n):
        i = fresh[k]
        if soff[i] == soff[i + 1]:
            fresh[fresh_n] = i
            fresh_n += 1
        else:
            key = (priority[i] << KEY_BITS) | i
            dirty_count = queue(sidx[soff[i]], key, heap, base, size, dirty, dirty_list, dirty_count)

    while True:
        # Start what can start, least key first.
        fronts = 0
        for k in range(dirty_count):
            s = dirty_list[k]
            dirty[s] = False
            if free[s] and size[s] > 0:
                front[fronts] = s
                fronts += 1
        dirty_count = 0
        while True:
            # The least key at the front of a free stream, or a task that needs none.
            best, best_at = -1, -1
            for k in range(fronts):
                s = front[k]
                if not free[s] or size[s] == 0:
                    continue
                if best < 0 or heap[base[s]] < best:
                    best, best_at = heap[base[s]], k
            if fresh_n > 0:
                fresh_n -= 1
                i = fresh[fresh_n]
            elif best < 0:
                break
            else:
                s = front[best_at]
                heap_pop(heap, base[s], size[s])
                size[s] -= 1
                i = best & mask
                blocked = -1
                for e in range(soff[i], soff[i + 1]):
                    if not free[sidx[e]]:
                        blocked = sidx[e]
                if blocked >= 0:  # it waits there
                    heap_push(heap, base[blocked], size[blocked], best)
                    size[blocked] += 1
                    continue
            # Task i starts.
            for e in range(soff[i], soff[i + 1]):
                free[sidx[e]] = False
            start[i] = now
            started += 1
            key_started += mix(i)
            if i >= n_old:
                new_started += 1
                new_key_started += mix(i)
            phase[i] = LATENCY
            left[i] = work[i]
            place[i] = running_n
            running[running_n] = i
            running_n += 1
            since[i] = now
            next_at[i] = now + latency[i]
            if loff[i] == loff[i + 1]:
                phase[i] = WORKING
                next_at[i] = now + latency[i] + work[i]
            ev_at, ev_task, ev_version = roomier(ev_at, ev_task, ev_version, ev)
            event_push(ev_at, ev_task, ev_version, ev, next_at[i], i, 0)
            ev += 1
        while ev > 0 and ev_version[0] != version[ev_task[0]]:
            event_pop(ev_at, ev_task, ev_version, ev)
            ev -= 1
        quiet = ev == 0 or ev_at[0] > now
        # Compare with the earlier run.
        if quiet and to_settle == 0:
            while at_record < len(old_state) and old_state[at_record, 1] < started - new_started:
                at_record += 1
            if (
                at_record < len(old_state)
                and old_state[at_record, 1] == started - new_started
                and old_state[at_record, 2] == done - new_done
                and old_state[at_record, 3] == key_started - new_key_started
                and old_state[at_record, 4] == key_done - new_key_done
                and old_off[at_record + 1] - old_off[at_record] == running_n
            ):
                same = True
                for r in range(old_off[at_record], old_off[at_record + 1]):
                    i = old_run[r, 0]
                    if (
                        phase[i] != old_run[r, 1]
                        or left[i] != old_left[r]
                        or since[i] - now != old_run[r, 2]
                        or next_at[i] - now != old_run[r, 3]
                    ):
                        same = False
                        break
                if same:
                    matched, matched_time = at_record, now
                    break
        if ev == 0:
            break
        # Record the state.
        if quiet and started >= next_record:
            next_record = started + every
            if record_n == len(records):
                records = np.concatenate((records, np.empty_like(records)))
                record_off = np.concatenate((record_off, np.empty(record_n, np.int64)))
            at = record_off[record_n]
            while at + running_n > len(record_left):
                record_run = np.concatenate((record_run, np.empty_like(record_run)))
                record_left = np.concatenate((record_left, np.empty_like(record_left)))
            records[record_n, 0] = now
            records[record_n, 1] = started
            records[record_n, 2] = done
            records[record_n, 3] = key_started
            records[record_n, 4] = key_done
            for r in range(running_n):
                i = running[r]
                record_run[at + r, 0] = i
                record_run[at + r, 1] = phase[i]
                record_run[at + r, 2] = since[i] - now
                record_run[at + r, 3] = next_at[i] - now
                record_left[at + r] = left[i]
            record_n += 1
            record_off[record_n] = at + running_n

        # What happens next, all of one time.
        now = ev_at[0]
        touched_n = 0
        round_number += 1
        while ev > 0 and ev_at[0] == now:
            i = ev_task[0]
            v = ev_version[0]
            event_pop(ev_at, ev_task, ev_version, ev)
            ev -= 1
            if v != version[i]:
                continue
            version[i] += 1
            joins = phase[i] == LATENCY
            if joins:
                phase[i] = WORKING
                since[i] = now
            for e in range(loff[i], loff[i + 1]):
                link = lidx[e]
                if joins:
                    owner[e] = i
                    join(e, link, head, users, after, before)
                else:
                    leave(e, link, head, users, after, before)
                if rate[link] == np.inf:
                    continue
                slot = head[link]
                while slot >= 0:
                    j = owner[slot]
                    if stamp[j] != round_number:
                        stamp[j] = round_number
                        touched[touched_n] = j
                        touched_n += 1
                    slot = after[slot]
            if joins:
                if stamp[i] != round_number:
                    stamp[i] = round_number
                    touched[touched_n] = i
                    touched_n += 1
                continue
            phase[i] = DONE
            end[i] = now
            done += 1
            key_done += mix(i)
            if i >= n_old:
                new_done += 1
                new_key_done += mix(i)
                to_settle -= 1
            elif changed[i] != 0:
                to_settle -= 1
            running_n -= 1
            last = running[running_n]
            running[place[i]] = last
            place[last] = place[i]
            for e in range(soff[i], soff[i + 1]):
                s = sidx[e]
                free[s] = True
                dirty_count = mark(s, dirty, dirty_list, dirty_count)
            for e in range(uoff[i], uoff[i + 1]):
                j = uidx[e]
                if wait[j] < 0:
                    wait[j] = 0
                    for k in range(poff[j], poff[j + 1]):
                        if phase[pidx[k]] != DONE:
                            wait[j] += 1
                else:
                    wait[j] -= 1
                if wait[j] == 0:
                    ready[j] = now
                    if soff[j] == soff[j + 1]:
                        fresh[fresh_n] = j
                        fresh_n += 1
                    else:
                        key = (priority[j] << KEY_BITS) | j
                        dirty_count = queue(sidx[soff[j]], key, heap, base, size, dirty, dirty_list, dirty_count)
        # Shares of links that somebody has joined or left.
        for k in range(touched_n):
            i = touched[k]
            if phase[i] != WORKING:
                continue
            new_speed = speed_of(i, loff, lidx, rate, users)
            if since[i] != now:
                if new_speed == speed[i]:
                    continue
                left[i] = max(left[i] - (now - since[i]) * speed[i], 0.0)
                since[i] = now
            speed[i] = new_speed
            next_at[i] = now + np.int64(np.ceil(left[i] / new_speed - 1e-6))
            version[i] += 1
            ev_at, ev_task, ev_version = roomier(ev_at, ev_task, ev_version, ev)
            event_push(ev_at, ev_task, ev_version, ev, next_at[i], i, version[i])
            ev += 1

    if matched >= 0:
        shift = matched_time - old_state[matched, 0]
        for i in range(n_old):
            if phase[i] == DONE:
                continue
            end[i] = was_end[i] + shift
            if phase[i] == WAITING:
                start[i] = was_start[i] + shift
                # Those that are ready have been since some time that this run knows, if it differs at all.
                if was_ready[i] > old_state[matched, 0]:
                    ready[i] = was_ready[i] + shift
    return (
        ready,
        start,
        end,
        records[:record_n].copy(),
        record_off[: record_n + 1].copy(),
        record_run[: record_off[record_n]].copy(),
        record_left[: record_off[record_n]].copy(),
        done,
        started - begun,
        matched,
        matched_time,
    )
