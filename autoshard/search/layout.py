"""From an answer to the sharding of every value, costed exactly.

Each op does what its kind does under the answer; a resharding of a value to a spec is paid once, and
so is the first step of several. `estimate` goes over
kinds (quick, for comparing answers), `lay_out` over ops (for the plan).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from autoshard.ir import Spec, Value
from autoshard.search.choices import Choice
from autoshard.search.model import Model
from autoshard.search.ops import Op, sized
from autoshard.search.pricing import Pricer
from autoshard.search.rates import Route, Traffic


@final
@dataclass(frozen=True, slots=True)
class Move:
    """A resharding point.

    Attributes:
      value: what moves.
      source: the spec it has.
      route: the way to the spec it is needed in.
      times: moves a step.
    """

    value: Value
    source: Spec
    route: Route
    times: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The sharding of everything.

    Attributes:
      choice: for each op what it does.
      spec: for each value its sharding.
      moves: all resharding points.
      sums: collectives that combine partial results, with how often they run.
      work_s: for each op seconds of compute a step on one device.
      compute_s: seconds of compute a step.
      traffic_s: seconds of collectives a step.
    """

    choice: tuple[Choice, ...]
    spec: Mapping[Value, Spec]
    moves: tuple[Move, ...]
    sums: tuple[tuple[Op, Traffic, int], ...]
    work_s: tuple[float, ...]
    compute_s: float
    traffic_s: float

    @property
    def time_s(self) -> float:
        """Estimated step time, compute and collectives one after the other."""
        return self.compute_s + self.traffic_s


def lay_out(model: Model, answer: Sequence[int], pricer: Pricer) -> Layout:
    """Carries an answer out op by op and costs it."""
    chosen = _chosen(model, answer)
    choices = tuple(chosen[k] for k in model.kinds.kind)
    spec = {v: s for op in model.ops.ops for v, s in zip(op.results, choices[op.index].results, strict=True)}
    traffic = 0.0
    work: list[float] = []
    sums: list[tuple[Op, Traffic, int]] = []
    moves: list[Move] = []
    priced = [
        (pricer.compute_s(group[0], choice), tuple(pricer.sums(group[0], choice)))
        for group, choice in zip(model.kinds.members, chosen, strict=True)
    ]
    for op, kind in zip(model.ops.ops, model.kinds.kind, strict=True):
        seconds, combined = priced[kind]
        work.append(op.times * seconds)
        for t in combined:
            sums.append((op, t, op.times))
            traffic += op.times * pricer.traffic_s(t)
        for value, targets in _moves(model, op, chosen):
            for route in pricer.reshards(value, spec[value], targets):
                moves.append(Move(value, spec[value], route, op.times))
                traffic += op.times * route.time_s
    return Layout(choices, spec, tuple(moves), tuple(sums), tuple(work), sum(work), traffic)


def estimate(model: Model, answer: Sequence[int], pricer: Pricer) -> float:
    """Step time in seconds under an answer; the same as `lay_out(...).time_s`, a kind at a time."""
    chosen = _chosen(model, answer)
    total = 0.0
    for kind, group in enumerate(model.kinds.members):
        op, choice = group[0], chosen[kind]
        seconds = pricer.compute_s(op, choice) + sum(pricer.traffic_s(t) for t in pricer.sums(op, choice))
        total += len(group) * op.times * seconds
    for op, count in model.kinds.makers:
        results = chosen[model.kinds.kind[op.index]].results
        for value, targets in _moves(model, op, chosen):
            routes = pricer.reshards(value, results[model.ops.maker[value][1]], targets)
            total += count * op.times * sum(route.time_s for route in routes)
    return total


def _chosen(model: Model, answer: Sequence[int]) -> list[Choice]:
    """What each kind does."""
    return [choices[answer[v]] for choices, v in zip(model.choices, model.variable, strict=True)]


def _moves(model: Model, op: Op, chosen: Sequence[Choice]) -> Iterator[tuple[Value, list[Spec]]]:
    """The specs other than its own that each result of an op is wanted in, each once."""
    kind = model.kinds.kind
    for r, value in enumerate(op.results):
        if not sized(value):
            continue
        wanted = [chosen[kind[reader.index]].operands[k] for reader, k in model.ops.readers.get(value, ())]
        for target in model.ops.tied.get(value, ()):
            maker, result = model.ops.maker[target]
            wanted.append(chosen[kind[maker.index]].results[result])
        own = chosen[kind[op.index]].results[r]
        yield value, [target for target in dict.fromkeys(wanted) if target != own]
