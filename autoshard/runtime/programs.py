"""A step's graphs, by the way a program is made of it: microbatches, recomputing."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax

from autoshard import jax_compat
from autoshard.errors import ArgumentError, explain
from autoshard.ir import Graph, StepInfo
from autoshard.passes import Microbatches, Remat, forward_cuts, in_groups, microbatched, run_passes
from autoshard.plan import Plan, fingerprint
from autoshard.runtime.arguments import Call
from autoshard.runtime.microbatches import split_batch
from autoshard.runtime.pjit import auto_mesh
from autoshard.runtime.target import is_explicit
from autoshard.search import prepare

OnEvent = Callable[[str, Any], None]


@final
@dataclass(frozen=True, slots=True)
class Way:
    """How a program comes from the step.

    Attributes:
      microbatches: into how many parts the batch is cut.
      remat: whether parts of the forward pass are computed again.
      groups: of devices that keep sums over examples for themselves until the last microbatch (`passes.groups`).
    """

    microbatches: int = 1
    remat: bool = False
    groups: int = 1

    def __str__(self) -> str:
        cut = f"{self.microbatches} microbatches" if self.microbatches > 1 else ""
        apart = f"gradients summed once in {self.groups} groups" if self.groups > 1 else ""
        again = "recomputing" if self.remat else ""
        return " and ".join(part for part in (cut, apart, again) if part) or "as written"


def way_of(plan: Plan) -> Way:
    """How the plan's program comes from the step."""
    return Way(plan.microbatches, plan.remat, plan.groups)


@final
class Programs:
    """A step's prepared graphs, by the way they are made."""

    def __init__(
        self, fun: Callable[[], Callable[..., Any]], call: Call, info: StepInfo, graph: Graph, on_event: OnEvent | None
    ) -> None:
        self._fun, self._call, self._info, self._graph, self._on_event = fun, call, info, graph, on_event
        self._prepared: dict[Way, Graph] = {}
        self._splits: dict[Way, Microbatches] = {}
        self._fingerprints: dict[Way | None, str] = {}

    @property
    def traced(self) -> Graph:
        """The step as it was traced."""
        return self._graph

    def fingerprint(self, way: Way | None) -> str:
        """By which plans of the program are known again; None: a pipeline's, which is that of the traced step."""
        if way not in self._fingerprints:
            self._fingerprints[way] = fingerprint(self._graph if way is None else self.prepared(way))
        return self._fingerprints[way]

    def prepared(self, way: Way) -> Graph:
        """The graph that plans of this kind speak of.

        Raises:
          MicrobatchError: it cannot be cut like this.
          ArgumentError: there is nothing to compute again.
        """
        if way not in self._prepared:
            self._prepared[way] = prepare(self._make(way), self._on_event)
        return self._prepared[way]

    def split(self, way: Way) -> Microbatches:
        """The step cut into the way's microbatches.

        Raises:
          MicrobatchError, ArgumentError: it cannot be.
        """
        if way.groups > 1:
            return in_groups(self.split(dataclasses.replace(way, groups=1)), way.groups)
        if way not in self._splits:
            graph, remat = self._written(way)
            with automatic_axes():
                self._splits[way] = split_batch(
                    self._fun(), self._call.avals, self._info, graph, way.microbatches, remat.apply
                )
        return self._splits[way]

    def _written(self, way: Way) -> tuple[Graph, Remat]:
        """The step before its batch is cut, and what was done to it."""
        graph = self._graph
        remat = Remat(forward_cuts(graph) if way.remat else ())
        if way.remat and not remat.cuts:
            raise ArgumentError(
                explain(
                    "remat=True for a step without a backward pass that keeps more than it would take to compute again",
                    "a step with a gradient in it",
                    "leave remat out",
                )
            )
        if remat.cuts:
            graph = run_passes(graph, [remat], self._on_event)
        return graph, remat

    def _make(self, way: Way) -> Graph:
        if way.microbatches == 1:
            return self._written(way)[0]
        split = self.split(way)
        with automatic_axes():
            graph = microbatched(split)
        if self._on_event is not None:
            self._on_event("microbatch", graph)
        return graph


@contextlib.contextmanager
def automatic_axes() -> Any:
    """A step is traced with automatic axes: types then carry no shardings, which are the plan's to choose."""
    around = jax_compat.ambient_mesh()[1]
    if around is None or not is_explicit(around):
        yield
        return
    with jax.sharding.use_abstract_mesh(auto_mesh(around).abstract_mesh):
        yield
