"""Sharded initialisation: the user's `make_state` as one program whose results leave it sharded.

Nothing is ever whole on one device: the program's results have the planned shardings, and the partitioner carries
them back into the random bits and zeros that make them (google/flax#3701, google-deepmind/optax#548).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.runtime.arguments import Call, bind
from autoshard.runtime.compiled import Compiled, structs_of
from autoshard.runtime.outputs import FlatFunction
from autoshard.runtime.parameters import read_parameters
from autoshard.runtime.place import check_rest, match_parts


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
    made = program(*call.flat)
    outputs = program.__wrapped__.outputs
    assert outputs is not None, "tracing fills in the outputs"
    return outputs.rebuild(made, call.references)


def init_program(
    make_state: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], compiled: Sequence[Compiled]
) -> tuple[Any, Call]:
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
    return jax.jit(flat_function, out_shardings=[*[whole] * hidden, *shardings]), call
