"""Which pipelines are worth planning: stages x microbatches x mesh of a rank x recomputing, by a table of unit costs.

The forward pass falls into units (the blocks of a residual network) at the boundaries where least crosses. Units that
are alike are planned once for each number of devices, each with its backward pass and update, so the time this takes
grows with the kinds of units and not with depth. From f, b (seconds of a microbatch forward and backward), once (of a
step) and bytes of each unit:

    stage s   =  a run of units, by the dynamic programme of `stage_balance`;  f(s), b(s), once(s) their sums
    time      =  sum f + b  +  (M - 1) max (f + b)  +  max once    over stages, and sends between them as stages
    M others  =  f and b in proportion, save for what every microbatch does with weights: reading them, adding to
                 their gradients, gathering them (on GPUs beside the rest)
    recompute =  b + f,  kept(s) what arrives, working(s) + the largest unit's kept

One process dispatches every program of a node, which takes `DISPATCH_S` each: no pipeline is quicker than that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from autoshard.cluster import Cluster
from autoshard.costmodel import Block, equation_cost, time_s
from autoshard.errors import InfeasibleError, MicrobatchError
from autoshard.ir import Apply, Equation, Graph, MeshShape, StepInfo, Value, trip_count
from autoshard.passes import Microbatches, Part, StageGraph, Stages, cut_stages, equation_kinds, loop_step, stage_graphs
from autoshard.plan import Plan
from autoshard.runtime.stage_costs import PhaseCost, PhaseTimer, overlaps, stage_needs
from autoshard.runtime.stage_planning import Skeleton, arriving, stage_info
from autoshard.runtime.unit_costs import UnitCost, UnitTable
from autoshard.search import balance, candidate_meshes, crossing_bytes, prepare, too_few, unit_boundaries

DISPATCH_S = 150e-6
"""Seconds to dispatch one program and move its results. Measured: bench/pipeline_driver, 2.7 % of 5.8 ms a program."""

MOST_MICROBATCHES = 16
"""Microbatches for each stage at most; then stages are idle for 6 % of the time. Ours."""

UNIT_BUDGET_S = 1.0
"""Seconds that the search of a unit may take where message passing proves nothing. Ours, for plan time."""

REFINED = 3
"""Numbers of stages for which all kinds of units are looked at. Ours, for plan time."""

MOST_STAGES = 8
"""Numbers of stages that are tried, spread evenly by their logarithm. Ours, for plan time."""

LEAST_UNITS = 2
"""A forward pass of fewer equations has nothing to cut."""

NOTHING = PhaseCost()

ALL_AXES = 9
"""More axes than a mesh has."""

WORTH_APART = 0.9
"""Sums are kept apart where that is estimated to need no more than this part of the time. Ours: where accumulators
leave little memory the search has to split them in other ways, which no unit by itself shows (Llama-2-7B on one mesh of
64 H100: estimated 0.96 of the time, planned 1.3 times)."""

FIRST = (4, 2, 3)
"""Microbatches for which the table is made, the first of which divides the batch. Ours: few, so that most meshes can
split a microbatch's examples."""


@final
class Split(Enum):
    """Over which of a rank's devices the state is split."""

    FREE = "as is quickest"
    INNER = "weights over the inner axis (Megatron), what only the update reads over all (ZeRO-1)"
    ALL = "all of it over all (ZeRO-3)"


@final
@dataclass(frozen=True, slots=True)
class Outline:
    """A pipeline that is estimated but not planned.

    Attributes:
      skeleton: stages, mesh and cuts.
      microbatches: how many.
      remat: whether the forward pass is computed again.
      groups: of devices that sum their gradients after the last microbatch; 1: for every microbatch.
      time_s: of a step.
      peak_bytes: on the fullest device.
    """

    skeleton: Skeleton
    microbatches: int
    remat: bool
    groups: int
    time_s: float
    peak_bytes: int

    def __str__(self) -> str:
        again = f", gradients summed once in {self.groups} groups" if self.groups > 1 else ""
        again += " recomputing" if self.remat else ""
        mesh = "x".join(str(n) for _, n in self.skeleton.mesh or ())
        return f"{self.skeleton.stages} stages of {mesh}, {self.microbatches} microbatches{again}"


@final
@dataclass(frozen=True, slots=True)
class Units:
    """A step cut into units.

    Attributes:
      split: in the table's microbatches.
      stages: the units as stages.
      starts: the forward equation that each unit begins with, without the first unit's.
      kind: of each unit, by its forward equations.
      sent: bytes that cross before each forward equation.
      batch: examples.
    """

    split: Microbatches
    stages: Stages
    starts: tuple[int, ...]
    kind: tuple[Hashable, ...]
    sent: tuple[int, ...]
    batch: int


def batch_size(split: Microbatches) -> int:
    """Examples of a step."""
    position, axis = next(iter(split.batch.items()))
    return split.graph.inputs[position].shape[axis.dim]


def find_units(split: Microbatches, info: StepInfo) -> Units:
    """The units of a step.

    Raises:
      MicrobatchError: its forward pass is one equation, or none.
    """
    step = loop_step(split)
    starts = unit_boundaries(step)
    forward = equation_kinds(step).forward
    if len(forward) < LEAST_UNITS:
        raise MicrobatchError(too_few(forward, LEAST_UNITS))
    kinds: list[Hashable] = []
    for begin, end in zip((0, *starts), (*starts, len(forward)), strict=True):
        kinds.append(tuple(_look(e) for e in forward[begin:end]))
    stages = stage_graphs(cut_stages(step, starts, info.pairs), info.pairs)
    return Units(split, stages, starts, tuple(kinds), tuple(crossing_bytes(step)), batch_size(split))


def _look(equation: Apply) -> Hashable:
    return (
        equation.name,
        tuple((a.shape, a.dtype) for a in equation.inputs),
        tuple((v.shape, v.dtype) for v in equation.outputs),
    )


def stage_counts(cluster: Cluster, units: int) -> tuple[int, ...]:
    """Numbers of stages to try: each rank is part of a node, or whole nodes."""
    size, node = cluster.size, min(n.count for n in cluster.nodes)
    found = [
        s
        for s in range(2, min(size, units) + 1)
        if size % s == 0 and ((size // s) % node == 0 or node % (size // s) == 0)
    ]
    if len(found) <= MOST_STAGES:
        return tuple(found)
    wanted = [found[0] * (found[-1] / found[0]) ** (k / (MOST_STAGES - 1)) for k in range(MOST_STAGES)]
    return tuple(dict.fromkeys(min(found, key=lambda s, w=w: abs(s / w - w / s)) for w in wanted))


def ideal_s(graph: Graph, cluster: Cluster) -> float:
    """Roofline time of a step's matrix products and convolutions, were they shared evenly: no plan is quicker."""

    def seconds(equations: Sequence[Equation]) -> float:
        total = 0.0
        for equation in equations:
            if not isinstance(equation, Apply):
                continue
            if equation.graphs:
                total += trip_count(equation) * max(seconds(body.equations) for body in equation.graphs)
            elif equation.name in ("dot_general", "conv_general_dilated"):
                shapes = [a.shape for a in equation.inputs], [v.shape for v in equation.outputs]
                total += time_s(equation_cost(equation, *shapes), cluster.device(0))
        return total

    return seconds(graph.equations) / cluster.size


@final
class PipelineSearch:
    """Estimates pipelines of a step."""

    def __init__(
        self,
        units: Units,
        info: StepInfo,
        cluster: Cluster,
        memory_limit: int,
        search: Callable[..., Plan],
        seed: int,
    ) -> None:
        self._units, self._info, self._cluster = units, info, cluster
        self._limit, self._search, self._seed = memory_limit, search, seed
        self._graphs: dict[int, Graph] = {}
        self._costs: dict[Hashable, UnitCost | None] = {}
        self._known: dict[Any, Any] = {}  # problems, for `make_plan`
        self._cuts: dict[tuple[int, UnitTable, bool], tuple[int, ...]] = {}
        count: dict[Hashable, int] = {}
        for kind in units.kind:
            count[kind] = count.get(kind, 0) + 1
        numbers: dict[Hashable, list[int]] = {}
        for number, kind in enumerate(units.kind):
            numbers.setdefault(kind, []).append(number)
        self._model = {kind: members[len(members) // 2] for kind, members in numbers.items()}
        made = {kind: self._made(number) for kind, number in self._model.items()}
        self._order = sorted(self._model, key=lambda kind: -count[kind] * made[kind])
        self._bulk = {kind: made[kind] / (made[self._order[0]] or 1.0) for kind in made}

    def _made(self, number: int) -> float:
        """How much of the step a unit is, roughly: bytes that its equations make."""
        graph = self._units.stages.graphs[number]
        body = graph.loop_of(graph.graph).graphs[0]
        return float(sum(v.nbytes for e in body.equations for v in e.outputs))

    def outlines(self, counts: Sequence[int], remat: bool | None, microbatches: int | None) -> list[Outline]:
        """Pipelines by estimated time, those that fit first.

        First all units are taken to be like the weightiest kind; meshes are tried from the inner size that was best for
        the last number of stages, up and down until it gets worse. For the `REFINED` best numbers of stages, on the
        mesh that is best for each, the other kinds are looked at.

        Args:
          counts: of stages.
          remat: whether to recompute, None for where it is needed.
          microbatches: how many, None to choose.
        """
        rough: list[tuple[Outline, Cluster, Split]] = []
        best = 1  # devices of the inner axis
        for stages in counts:
            part = self._cluster.part(0, self._cluster.size // stages)
            meshes = {inner_size(mesh): mesh for mesh in candidate_meshes(part)}

            def of_mesh(inner: int, n: int = stages, part: Cluster = part, meshes: Any = meshes) -> float:
                found: list[Outline] = []
                for split in Split if part.size > 1 else (Split.FREE,):
                    cost = self._cost(self._order[0], part, meshes[inner], split)
                    if cost is not None:
                        tables = self._tables({kind: cost.times(self._bulk[kind]) for kind in self._order})
                        mine = list(self._with_microbatches(n, part, meshes[inner], tables, remat, microbatches))
                        rough.extend((outline, part, split) for outline in mine)
                        found += mine
                return min((self._penalty(o) for o in found), default=float("inf"))

            best = climb(sorted(meshes), best, of_mesh)
        rough.sort(key=lambda each: self._rank(each[0]))
        found: list[Outline] = []
        done: dict[int, set[Hashable]] = {}
        for outline, part, split in rough:
            stages, mesh = outline.skeleton.stages, outline.skeleton.mesh
            assert mesh is not None, "an outline has a mesh"
            if stages not in done and stages > 1 and len(done.keys() - {1}) == REFINED:
                continue
            seen = done.setdefault(stages, set())
            if (mesh, split) in seen or len(seen) == 2:
                continue
            seen.add((mesh, split))
            of = {kind: self._cost(kind, part, mesh, split) for kind in self._order}
            known = {kind: cost for kind, cost in of.items() if cost is not None}
            if len(known) == len(of):
                found += self._with_microbatches(stages, part, mesh, self._tables(known), remat, microbatches)
        return sorted(found, key=self._rank)

    def _tables(self, costs: Mapping[Hashable, UnitCost]) -> tuple[UnitTable, UnitTable]:
        """With gradients summed for every microbatch, and once a step."""
        device = self._cluster.device(0)
        apart = {kind: cost.sums_apart() for kind, cost in costs.items()}

        def table(of: Mapping[Hashable, UnitCost]) -> UnitTable:
            return UnitTable([of[kind] for kind in self._units.kind], device.memory_bytes_per_s, overlaps(device.kind))

        return table(costs), table(apart)

    def _penalty(self, outline: Outline) -> float:
        """Seconds, with the excess of memory as if it were time: for the way to what fits."""
        return outline.time_s * max(1.0, (outline.peak_bytes / self._limit) ** 2)

    def _rank(self, outline: Outline) -> tuple[bool, float]:
        return outline.peak_bytes > self._limit, outline.time_s

    def _cost(self, kind: Hashable, part: Cluster, mesh: MeshShape, split: Split) -> UnitCost | None:
        number = self._model[kind]
        key = (number, part.size, mesh, split)
        if key not in self._costs:
            self._costs[key] = self._plan_unit(number, part, mesh, split)
        return self._costs[key]

    def _plan_unit(self, number: int, part: Cluster, mesh: MeshShape, split: Split) -> UnitCost | None:
        unit = self._units.stages.graphs[number]
        if number not in self._graphs:
            self._graphs[number] = prepare(unit.graph)
        graph = self._graphs[number]
        device = part.device(0).kind
        step = self._units.stages.cut.step
        timer = PhaseTimer(unit, graph, step.partial, step.count, overlaps(device), {})
        try:
            names = stage_info(unit, self._units.stages, self._info)
            plan = self._search(
                graph,
                names,
                part,
                mesh,
                pins={},
                memory_limit=2**60,
                budget_s=UNIT_BUDGET_S,
                seed=self._seed,
                suggest=False,
                on_schedule=timer,
                compare=False,
                hoist=False,
                split=self._split(unit, graph, split),
                arriving=arriving(unit, self._byte_s(part)),
                known=self._known,
            )
        except InfeasibleError:
            return None
        costs: dict[Part, PhaseCost] = {}
        for (phase, _), cost in timer.costs.items():
            costs[phase] = costs.get(phase, NOTHING) + cost
        once = sum(took for (phase, _), took in timer.times.items() if phase in (Part.BEFORE, Part.AFTER))
        forward, backward = costs.get(Part.FORWARD, NOTHING), costs.get(Part.BACKWARD, NOTHING)
        return UnitCost(forward, backward, once, stage_needs(graph, plan, unit, names, device))

    def _byte_s(self, part: Cluster) -> float:
        """Seconds for which a device receives a byte of what the unit before has made, here or on other devices."""
        return 1 / self._cluster.link_between(0, part.size if part.size < self._cluster.size else 1).bytes_per_s

    def _split(self, unit: StageGraph, graph: Graph, split: Split) -> dict[int, int]:
        """For the unit's state the number of inner axes that it is to be split over."""
        if split is Split.FREE:
            return {}
        loop = unit.loop_of(graph)
        needed = {a for a in loop.inputs if isinstance(a, Value)}
        for equation in reversed(graph.equations[: graph.equations.index(loop)]):
            if any(v in needed for v in equation.outputs):
                needed.update(a for a in equation.inputs if isinstance(a, Value))
        paired = {i for i, _ in self._info.pairs}
        mine = [k for k, i in enumerate(unit.inputs) if i in paired]
        return {k: 1 if split is Split.INNER and graph.inputs[k] in needed else ALL_AXES for k in mine}

    def _with_microbatches(
        self,
        stages: int,
        part: Cluster,
        mesh: MeshShape,
        tables: tuple[UnitTable, UnitTable],
        remat: bool | None,
        microbatches: int | None,
    ) -> Iterable[Outline]:
        batch, devices = self._units.batch, mesh[0][1]
        most = MOST_MICROBATCHES * stages
        tried = _spread([m for m in range(min(stages, batch), most + 1) if batch % m == 0])
        for count in tried if microbatches is None else [microbatches]:
            apart = devices > 1 and count > 1 and (batch // count) % devices == 0
            for recompute in (False, True) if remat is None else (remat,):
                plain = self._outline(stages, part, mesh, tables[0], count, recompute, 1)
                if plain is None:
                    continue
                yield plain
                other = self._outline(stages, part, mesh, tables[1], count, recompute, devices) if apart else None
                if other is not None and other.time_s < WORTH_APART * plain.time_s:
                    yield other
                if plain.peak_bytes <= self._limit:
                    break

    def _outline(
        self, stages: int, part: Cluster, mesh: MeshShape, table: UnitTable, count: int, remat: bool, groups: int
    ) -> Outline | None:
        units, share = self._units, self._units.split.count / count
        if share < 1 and dict(mesh).get("data", 1) > max(units.batch // count, 1):
            return None  # the table's plans split examples that such microbatches do not have
        begins = (0, *units.starts)
        rate, latency = float("inf"), 0.0
        if stages > 1:
            link = self._cluster.link_between(0, part.size)
            rate, latency = link.bytes_per_s, link.latency_s
        cuts: tuple[int, ...] = ()
        if stages > 1:
            key = stages, table, remat
            if key not in self._cuts:
                seconds = [0.0] * len(units.sent)
                for k, begin in enumerate(begins):
                    seconds[begin] = sum(table.seconds(k, k + 1, 1.0, remat))
                sends = [2 * (latency + nbytes / part.size / rate) if nbytes else 0.0 for nbytes in units.sent]
                self._cuts[key] = balance(units.starts, seconds, sends, stages)
            cuts = self._cuts[key]
        numbers = [begins.index(cut) for cut in cuts]
        travel = [2 * (latency + share * units.sent[cut] / part.size / rate) for cut in cuts]
        blocks: list[Block] = []
        peak = 0
        for s, (i, j) in enumerate(zip((0, *numbers), (*numbers, table.size), strict=True)):
            blocks.append(Block(*table.seconds(i, j, share, remat), table.once_s(i, j)))
            if s < len(cuts):
                blocks.append(Block(travel[s] / 2, travel[s] / 2))
            peak = max(peak, table.peak(i, j, min(stages - s, count), share, remat))
        both = [block.forward_s + block.backward_s for block in blocks]
        total = sum(both) + (count - 1) * max(both) + max(block.all_reduce_s for block in blocks)
        dispatched = 2 * stages * count * DISPATCH_S / len(self._cluster.nodes) if stages > 1 else 0.0
        skeleton = Skeleton(stages, None, mesh, cuts if stages > 1 else None, len(units.sent))
        return Outline(skeleton, count, remat, groups, max(total, dispatched), peak)


def inner_size(mesh: MeshShape) -> int:
    """Devices of the second axis, 1 where there is one axis."""
    return mesh[1][1] if len(mesh) > 1 else 1


def climb(options: Sequence[int], start: int, cost: Callable[[int], float]) -> int:
    """The best option of those tried: from the one nearest to the start up and down, each until it gets worse."""
    begin = min(range(len(options)), key=lambda k: abs(options[k] - start))
    best, least = begin, cost(options[begin])
    for step in (1, -1):
        at = begin + step
        while 0 <= at < len(options):
            found = cost(options[at])
            if found >= least:
                break
            best, least, at = at, found, at + step
    return options[best]


def _spread(counts: Sequence[int]) -> list[int]:
    """Some of these counts, each at least about 1.5 times the one before."""
    found: list[int] = []
    for count in counts:
        if not found or count >= 1.5 * found[-1]:
            found.append(count)
    return found


def likely(one_mesh_s: float, graph: Graph, cluster: Cluster) -> bool:
    """Whether some pipeline could be quicker than a plan for one mesh: two stages, no communication, perfect shares."""
    dispatched = 2 * 2 * 2 * DISPATCH_S / len(cluster.nodes)
    return max(ideal_s(graph, cluster) * (1 + 1 / (2 * MOST_MICROBATCHES)), dispatched) < one_mesh_s
