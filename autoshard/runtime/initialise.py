"""Sharded initialisation: the user's `make_state` as one program whose results leave it sharded.

Nothing is ever whole on one device: the program's results have the planned shardings, and the partitioner carries
them back into the random bits and zeros that make them (google/flax#3701, google-deepmind/optax#548).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.runtime.arguments import Call, bind
from autoshard.runtime.compiled import Compiled, structs_of
from autoshard.runtime.outputs import FlatFunction, Outputs
from autoshard.runtime.parameters import read_parameters
from autoshard.runtime.place import check_rest, match_parts
from autoshard.runtime.processes import is_here, nothing_of


def initialise(
    make_state: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], compiled: Sequence[Compiled]
) -> Any:
    """What `make_state(*args, **kwargs)` returns, made sharded.

    Args:
      make_state: returns state that planned steps take: whole arguments, or parts of them.
      args, kwargs: its arguments.
      compiled: planned steps, latest first; the one that knows most of the state is taken.

    Raises:
      ArgumentError: arrays of some size that no planned step takes.
    """
    program, call = init_program(make_state, args, kwargs, compiled)
    return program.outputs.rebuild(program(*call.flat), call.references)


@final
@dataclass(frozen=True, slots=True, eq=False)
class InitProgram:
    """What makes the state: a program for each mesh that holds part of it, run by the processes that are part of it.

    Attributes:
      outputs: what the flat results stand for.
      places: of the flat results.
      parts: (positions of the results, program that makes them).
    """

    outputs: Outputs
    places: tuple[NamedSharding, ...]
    parts: tuple[tuple[tuple[int, ...], Any], ...]

    def __call__(self, *flat: Any) -> list[Any]:
        """All flat results."""
        found: dict[int, Any] = {}
        for positions, program in self.parts:
            if is_here(self.places[positions[0]]):
                found.update(zip(positions, program(*flat), strict=True))
            else:
                found.update((i, nothing_of(self.outputs.avals[i], self.places[i])) for i in positions)
        return [found[i] for i in range(len(found))]

    def lower(self, *flat: Any) -> Any:
        """The program of one mesh, lowered."""
        ((_, program),) = self.parts
        return program.lower(*flat)


def init_program(
    make_state: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], compiled: Sequence[Compiled]
) -> tuple[InitProgram, Call]:
    """(program over flat arrays whose results leave it sharded, its call); arguments as of `initialise`."""
    call = bind(read_parameters(make_state, None, None, None), args, kwargs)
    flat_function = FlatFunction(make_state, call.template, call.slashes)
    jax.eval_shape(flat_function, *structs_of(call.avals))
    outputs = flat_function.outputs
    assert outputs is not None, "tracing fills in the outputs"
    hidden = sum(leaf.size for leaf in outputs.hidden)
    paths, avals = outputs.paths[hidden:], outputs.avals[hidden:]
    found = [match_parts(paths, avals, each) for each in compiled]
    best = max(range(len(compiled)), key=lambda i: (len(found[i]), -i))
    check_rest(paths, avals, found[best], compiled[best])
    whole = NamedSharding(compiled[best].mesh, PartitionSpec())
    inputs, matched = compiled[best].inputs, found[best]
    shardings = [inputs[matched[i]] if i in matched else whole for i in range(len(paths))]
    places = [*[whole] * hidden, *shardings]
    parts: dict[Any, list[int]] = {}
    for i, place in enumerate(places):
        parts.setdefault(place.mesh, []).append(i)
    programs = tuple((tuple(mine), _part(flat_function, mine, places)) for mine in parts.values())
    return InitProgram(outputs, tuple(places), programs), call


def _part(fun: Callable[..., Sequence[Any]], positions: Sequence[int], places: Sequence[NamedSharding]) -> Any:
    """A program for some of a function's results."""
    if len(positions) == len(places):
        return jax.jit(fun, out_shardings=list(places))

    def some(*flat: Any) -> list[Any]:
        every = fun(*flat)
        return [every[i] for i in positions]

    return jax.jit(some, out_shardings=[places[i] for i in positions])
