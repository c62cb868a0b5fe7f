"""What a step of a pipeline takes: its programs before the loop, the simulated loop, its programs after it.

    before    each stage's programs, phase after phase, each after what it reads of other stages has come; when a stage
              is through with them its first action may start
    loop      `schedule_tasks`, with what is sent over each boundary
    after     from each rank's last action, phase after phase, each after what it reads of other stages has come:
              their sums over microbatches once their loop has ended, else what a program before made

A message takes its link's latency and bandwidth, on calibrated devices times what a `permute` of its size was measured
to take of that. It goes beside programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from autoshard.cluster import Cluster
from autoshard.costmodel import Simulation, schedule_tasks, simulate
from autoshard.ir import Value
from autoshard.passes import BACKWARD, FORWARD, WEIGHTS, Part, Phase, StageGraph, Stages
from autoshard.schedules import Schedule, Send, StageTimes


@final
@dataclass(frozen=True, slots=True)
class StepTime:
    """A simulated step.

    Attributes:
      times: of the stages, as simulated.
      simulation: of the loop, what comes before it included.
      end_s: of the whole step.
    """

    times: StageTimes
    simulation: Simulation
    end_s: float


def step_time(
    stages: Stages, schedule: Schedule, seconds: Sequence[Mapping[Phase, float]], cluster: Cluster, devices: int
) -> StepTime:
    """Simulates a step.

    Args:
      stages: what goes between them.
      schedule: of the loop.
      seconds: of each stage's programs.
      cluster: all devices, a rank's in a row.
      devices: of each rank.
    """
    clock = _Clock(stages, schedule, seconds, cluster, devices)
    clock.run(Part.BEFORE)
    before = tuple(clock.ready(stage, FORWARD) for stage in stages.graphs)
    forward, backward, weights = (
        tuple(times.get(phase, 0.0) for times in seconds) for phase in (FORWARD, BACKWARD, WEIGHTS)
    )
    sends = clock.boundaries() if len(seconds) > 1 else ()
    times = StageTimes(forward, backward, weights, sends, before_s=before)
    simulation = simulate(schedule_tasks(schedule, times))
    graph = simulation.graph
    for k in range(graph.size):
        for stream in graph.row(graph.holds, k):
            if stream < schedule.ranks:  # the ranks' compute streams come first
                clock.ends[stream] = max(clock.ends[stream], float(simulation.end_s(k)))
    clock.looped[:] = [clock.ends[rank] for rank in schedule.placement]
    clock.run(Part.AFTER)
    return StepTime(times, simulation, max(*clock.ends, float(simulation.makespan_s)))


@final
@dataclass(frozen=True, slots=True)
class _Clock:
    """When ranks are free, and when values are made.

    Attributes:
      ends: of each rank, what it has done so far; looped: of each stage, its part of the loop.
      made: for each stage and phase outside the loop.
    """

    stages: Stages
    schedule: Schedule
    seconds: Sequence[Mapping[Phase, float]]
    cluster: Cluster
    devices: int
    ends: list[float] = field(default_factory=list[float])
    looped: list[float] = field(default_factory=list[float])
    made: dict[tuple[int, Phase], float] = field(default_factory=dict[tuple[int, Phase], float])

    def __post_init__(self) -> None:
        self.ends.extend([0.0] * self.schedule.ranks)
        self.looped.extend([0.0] * len(self.seconds))

    def run(self, part: Part) -> None:
        """All programs before or after the loop."""
        for phase in sorted({p for times in self.seconds for p in times if p[0] is part}):
            for stage in self.stages.graphs:
                took = self.seconds[stage.stage].get(phase)
                if took is None:
                    continue
                rank = self.schedule.placement[stage.stage]
                self.ends[rank] = self.ready(stage, phase) + took
                self.made[stage.stage, phase] = self.ends[rank]

    def ready(self, stage: StageGraph, phase: Phase) -> float:
        """When a stage's rank is free and all has come that the phase may read."""
        come = self.ends[self.schedule.placement[stage.stage]]
        messages: dict[tuple[int, Phase | None], int] = {}
        for value, source, when in stage.arrivals:
            if when <= phase:
                key = source, self._phase(value, source)
                messages[key] = messages.get(key, 0) + value.nbytes
        for (source, made), nbytes in messages.items():
            start = self.looped[source] if made is None else self.made.get((source, made), 0.0)
            come = max(come, start + self.send_s(source, stage.stage, nbytes / self.devices))
        return come

    def _phase(self, value: Value, source: int) -> Phase | None:
        """Where a stage makes a value, None for what its loop does."""
        graph = self.stages.graphs[source]
        if value in graph.graph.inputs:
            return Part.BEFORE, 0
        found = graph.phase.get(value)
        return None if found is None or found[0] in (Part.FORWARD, Part.BACKWARD) else found

    def boundaries(self) -> tuple[Send, ...]:
        """Seconds of what crosses each boundary, forward and backward; each device sends its part."""
        count = len(self.seconds)
        down, up = [0.0] * (count - 1), [0.0] * (count - 1)
        for stage in self.stages.graphs:
            for value, source, _ in stage.loop_arrivals:
                low, high = sorted((source, stage.stage))
                for boundary in range(low, high):
                    (down if source < stage.stage else up)[boundary] += value.nbytes / self.devices
        return tuple(Send(self.send_s(k, k + 1, down[k]), self.send_s(k + 1, k, up[k])) for k in range(count - 1))

    def send_s(self, source: int, target: int, nbytes: float) -> float:
        """Seconds of a message of so many bytes on each device; 0 on one rank."""
        a, b = (self.schedule.placement[stage] * self.devices for stage in (source, target))
        if a == b or not nbytes:
            return 0.0
        link, device = self.cluster.link_between(a, b), self.cluster.device(a)
        # Measured curves go by the bytes of the array of which each device holds a part.
        share = device.share(("permute",), nbytes * self.cluster.size) if device.calibrated else None
        return (link.latency_s + nbytes / link.rate_bytes_per_s) / (share or 1.0)
