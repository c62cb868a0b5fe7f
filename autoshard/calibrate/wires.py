"""The programs that say what links do: collectives over a group of devices, in a chain.

A chain's calls wait for each other, so what starting a program costs, and that not all processes start it at the same
time, is spread over them.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.costmodel import COLLECTIVE_KINDS, CollectiveKind

CHAINS = ((128 * 2**10, 8), (8 * 2**20, 4))
"""(most bytes, collectives in a chain); of larger ones two."""


@final
@dataclass(frozen=True, slots=True)
class Wire:
    """One collective to measure.

    Attributes:
      level: "node" for devices of one process, "network" for all devices of all processes.
      kind: of the collective.
      nbytes: as of `collective_time_s`.
    """

    level: str
    kind: CollectiveKind
    nbytes: int

    @property
    def key(self) -> str:
        """Name in the record."""
        return f"{self.level}.{self.kind}@{self.nbytes}"

    @property
    def chain(self) -> int:
        """How often it runs in one call."""
        return next((count for most, count in CHAINS if self.nbytes <= most), 2)


def wires(level: str, quick: bool) -> list[Wire]:
    """All that is measured of one level: 1 KiB to 16 MiB."""
    powers = (10, 16, 20) if quick else (10, 12, 14, 16, 18, 20, 22, 24)
    return [Wire(level, kind, 2**p) for p in powers for kind in COLLECTIVE_KINDS]


def collective_call(wire: Wire, devices: Sequence[Any]) -> Callable[[], object]:
    """Compiles a collective over devices; the call runs it and waits."""
    n = len(devices)
    mesh = Mesh(np.asarray(devices), ("d",))
    whole = wire.kind in ("all_reduce", "reduce_scatter")
    elements = wire.nbytes // 4 if whole else wire.nbytes // 4 // n
    elements = max(elements // n * n, n)
    sharding = NamedSharding(mesh, P("d"))

    def body(x: Any) -> Any:
        for i in range(wire.chain):
            x = _one(wire.kind, x, n, i + 1 < wire.chain)
        return x

    # Within a process each level's groups are its own, over several processes every process has its rows of the array.
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    value = jax.make_array_from_callback((n * elements,), sharding, lambda _: np.ones((elements,), np.float32))
    compiled = program.lower(value).compile()
    return lambda: jax.block_until_ready(compiled(value))


def _one(kind: CollectiveKind, x: Any, n: int, again: bool) -> Any:
    """One collective; with `again` its result is brought back to the operand's shape."""
    match kind:
        case "all_reduce":
            return jax.lax.psum(x, "d")
        case "all_gather":
            y = jax.lax.all_gather(x, "d", tiled=True)
            return y[: x.shape[0]] if again else y
        case "reduce_scatter":
            y = jax.lax.psum_scatter(x, "d", tiled=True)
            return jnp.concatenate([y] * n) if again else y
        case "all_to_all":
            return jax.lax.all_to_all(x, "d", 0, 0, tiled=True)
        case "permute":
            return jax.lax.ppermute(x, "d", [(i, (i + 1) % n) for i in range(n)])
        case _:
            assert_never(kind)
