"""One plan for all processes: a search with a time limit may end differently in each, and programs must be the same.

The first process publishes its plan in `jax.distributed`'s key-value store, under a name made of the step, its program
and the options; the others read it there and use it instead of their own where the two differ. It stays: who plans the
same again gets the same.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Callable

import jax

from autoshard import jax_compat
from autoshard.cluster import mesh_size
from autoshard.errors import PlanError, explain
from autoshard.plan import Plan
from autoshard.runtime.compiled import Planned
from autoshard.runtime.options import Options

WAIT_S = 600.0
"""How long to wait for the first process's plan. Ours: planning takes minutes for the largest models."""


def agreed(planned: Planned, name: str, options: Options, again: Callable[[Plan], Planned]) -> Planned:
    """The same, or the signature with the first process's plan.

    Args:
      planned: what this process planned.
      name: of the step.
      options: of the step.
      again: gives the signature with another plan.

    Raises:
      PlanError: the first process did not plan this within `WAIT_S`.
    """
    client = jax_compat.coordination_client()
    plan = planned.plan
    kind = planned.target.cluster.device(0).kind
    here = jax.device_count() >= mesh_size(plan.mesh) and (planned.target.real or kind == jax.default_backend())
    if client is None or jax.process_count() == 1 or not here:
        return planned
    assert planned.program is not None, "a signature that was planned knows its program"
    text = f"{name} {planned.program()} {options!r}"
    key = f"autoshard/plan/{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if jax.process_index() == 0:
        client.key_value_set_bytes(key, zlib.compress(plan.to_json().encode()), allow_overwrite=True)
        return planned
    try:
        found = client.blocking_key_value_get_bytes(key, int(WAIT_S * 1e3))
    except jax.errors.JaxRuntimeError as error:
        raise PlanError(
            explain(
                f"process 0 has not planned {name} as process {jax.process_index()} did: {error}",
                f"the same calls with the same options in every process, at most {WAIT_S:.0f} s apart",
                "run the same program in all processes",
            )
        ) from error
    first = Plan.from_json(zlib.decompress(found).decode())
    return planned if first == plan else dataclasses.replace(again(first), again=planned.again)
