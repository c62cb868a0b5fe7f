"""What stage planners read: costs of every stretch of layers, and servers of devices; what they return: a StagePlan.

A chain of layers (or of states of a profile, `read_profile`) is kept as sums from the beginning, so that a stage's
cost is a difference. A group of devices is a tuple: how many of each server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

from autoshard.cluster import Cluster
from autoshard.costmodel import State
from autoshard.errors import ArgumentError, explain

Group = tuple[int, ...]
"""Devices of each server."""


@final
@dataclass(frozen=True, slots=True)
class StageTable:
    """A chain of layers with costs for one microbatch on one device.

    Attributes:
      forward_s, backward_s: seconds of the first k layers, k = 0 to all of them.
      parameter_bytes: their weights.
      output_bytes: of each layer, what the layers after it need.
      before: for each layer those that may be a stage's last when this layer ends the next; empty: all earlier ones.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    before: tuple[tuple[int, ...], ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.output_bytes)

    @property
    def most_stages(self) -> int:
        """Number of stages in the longest pipeline of these layers."""
        if not self.before:
            return self.layers
        longest: list[int] = []
        for last in range(self.layers):
            longest.append(1 + max((longest[k] for k in self.before_of(last)), default=0))
        return longest[-1]

    def before_of(self, last: int) -> Sequence[int]:
        """Layers that may end the stage before the one that this layer ends."""
        return self.before[last] if self.before else range(last)

    def cost(self, first: int, last: int) -> tuple[float, float, float]:
        """Forward and backward seconds and parameter bytes of layers first to last."""
        end = last + 1
        return (
            self.forward_s[end] - self.forward_s[first],
            self.backward_s[end] - self.backward_s[first],
            self.parameter_bytes[end] - self.parameter_bytes[first],
        )


def layer_table(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    parameter_bytes: Sequence[float],
    output_bytes: Sequence[float],
) -> StageTable:
    """The table of a chain from each layer's own costs.

    Raises:
      ArgumentError: no layers, columns of unlike length, or a cost below 0 or not finite.
    """
    sizes = {len(forward_s), len(backward_s), len(parameter_bytes), len(output_bytes)}
    if len(sizes) > 1 or sizes == {0}:
        given = f"columns of {sorted(sizes)} layers"
        raise ArgumentError(explain(given, "as many of each, at least one", "correct the table"))
    for name, column in (
        ("forward_s", forward_s),
        ("backward_s", backward_s),
        ("parameter_bytes", parameter_bytes),
        ("output_bytes", output_bytes),
    ):
        for layer, value in enumerate(column):
            if not 0 <= value < math.inf:
                given = f"{name} of layer {layer} is {value}"
                raise ArgumentError(explain(given, "a finite number, at least 0", "correct the table"))
    sums = (tuple(accumulate(column, initial=0.0)) for column in (forward_s, backward_s, parameter_bytes))
    forward, backward, parameters = sums
    return StageTable(forward, backward, parameters, tuple(output_bytes))


def profile_table(states: Sequence[State]) -> StageTable:
    """The table of a profile's states, forward and backward half of the whole each, as DAPPLE's planner counts."""
    half = (0.0, *(s.compute_s / 2 for s in states))
    parameters = (0.0, *(s.parameter_bytes for s in states))
    before = tuple(s.smaller for s in states) if any(s.smaller for s in states) else ()
    return StageTable(half, half, parameters, tuple(s.output_bytes for s in states), before)


def chain_of(states: Sequence[State]) -> tuple[State, ...]:
    """A longest chain of states, each part of the next; of the longest, the one whose outputs are smallest in sum."""
    if not states:
        return ()
    best: list[tuple[int, float, int]] = []
    for state in states:
        length, sent, came = min(((best[j][0], best[j][1], j) for j in state.smaller), default=(0, 0.0, -1))
        best.append((length - 1, sent + state.output_bytes, came))
    k = min(range(len(states)), key=lambda j: best[j])
    chain: list[State] = []
    while k >= 0:
        chain.append(replace(states[k], smaller=()))
        k = best[k][2]
    return tuple(reversed(chain))


@final
@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of devices, and what joins them.

    Attributes:
      devices: number of them in each server; devices are numbered server by server.
      inside_bytes_per_s: between two devices of a server.
      collective_bytes_per_s: of each device between servers, in an all-reduce or to several servers.
      message_bytes_per_s: point to point between servers.

    Raises:
      ArgumentError: a number of devices below 0, or a rate not above 0.
    """

    devices: Group
    inside_bytes_per_s: float
    collective_bytes_per_s: float
    message_bytes_per_s: float

    def __post_init__(self) -> None:
        rates = (self.inside_bytes_per_s, self.collective_bytes_per_s, self.message_bytes_per_s)
        if any(n < 0 for n in self.devices) or not all(rate > 0 for rate in rates):
            given = f"servers of {self.devices} devices, rates {rates}"
            raise ArgumentError(explain(given, "devices not below 0, rates above 0", "correct them"))

    def all_reduce_s(self, group: Group, nbytes: float) -> float:
        """Ring all-reduce; in a server each pair of devices has a ring of its own, as DAPPLE's planner counts."""
        count = sum(group)
        if count == 1:
            return 0.0
        rate = self.inside_bytes_per_s * (count // 2) if one_server(group) else self.collective_bytes_per_s
        return 2 * (count - 1) / count * nbytes / rate

    def send_s(self, sources: Group, targets: Group, nbytes: float) -> float:
        """Split and concatenated between replicas: what comes from other servers is sent point to point."""
        if not one_server(targets):
            return nbytes / self.collective_bytes_per_s
        own = next(k for k, n in enumerate(targets) if n)
        crossing = sum(sources) - sources[own]
        if not crossing:
            return nbytes / self.inside_bytes_per_s
        return nbytes * crossing / sum(sources) / self.message_bytes_per_s


def servers_of(cluster: Cluster) -> Servers:
    """The servers of a cluster of nodes; its slowest link in a node counts for all.

    Raises:
      ArgumentError: a cluster described by wires; give `plan_spp` its bandwidths.
    """
    if cluster.wires:
        given = f"cluster {cluster.name!r} with wires"
        raise ArgumentError(explain(given, "nodes, links in them and a network", "plan it with plan_spp"))
    inside = min(node.link.bytes_per_s for node in cluster.nodes)
    network = inside if cluster.network is None else cluster.network.bytes_per_s
    return Servers(tuple(node.count for node in cluster.nodes), inside, network, network)


def one_server(group: Group) -> bool:
    """Whether all devices of a group are of one server."""
    return max(group) == sum(group)


@final
@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage.

    Attributes:
      first, last: its layers.
      devices: numbers of those that replicate it.
    """

    first: int
    last: int
    devices: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a stage planner found.

    Attributes:
      stages: in order.
      latency_s: seconds of a step (of a microbatch in the steady state for `plan_pipedream`).
      why: what decided, for people.
    """

    stages: tuple[PlannedStage, ...]
    latency_s: float
    why: str

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of devices of each stage."""
        return tuple(len(stage.devices) for stage in self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """First layers of all stages but the first."""
        return tuple(stage.first for stage in self.stages[1:])


def check_planned(table: StageTable, devices: int, microbatches: int, most_stages: int | None = None) -> None:
    """Raises ArgumentError where there is nothing to plan, or no stage may be made."""
    if most_stages is not None and most_stages < 1:
        raise ArgumentError(explain(f"most_stages {most_stages}", "at least 1, or None", "allow a stage"))
    if table.layers < 1 or devices < 1 or microbatches < 1:
        given = f"{table.layers} layers, {devices} devices, {microbatches} microbatches"
        raise ArgumentError(explain(given, "at least one of each", "add one"))
