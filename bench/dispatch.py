"""What a call of a compiled step costs beside `jax.jit`'s own: paired, interleaved blocks of small steps.

    python bench/dispatch.py [--blocks 40] [--calls 50] [--json dispatch.json]

Each row compares a decorated step with the same function under what a user would take instead: `jax.jit` with the same
shardings and donation, `equinox.filter_jit`, `flax.nnx.jit`. Times are CPU seconds of the calling thread (what dispatch
costs, whatever else the machine does); the ratio is the median over blocks of the ratio of the two times in that block.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from autoshard.api import autoshard

LIMIT = 1.2
"""Most that a call may cost, as a multiple of the other's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
      name: of the program.
      devices: number of them.
      ours_us: median microseconds a call.
      theirs_us: the same for what it is compared with.
      ratio: median of the blocks' ratios.
    """

    name: str
    devices: int
    ours_us: float
    theirs_us: float
    ratio: float


Loop = Callable[[int], None]
"""Runs a number of calls and waits for the last."""


def compare(name: str, devices: int, ours: Loop, theirs: Loop, blocks: int, calls: int) -> Row:
    """Times both in turn; which goes first alternates."""
    times: tuple[list[float], list[float]] = ([], [])
    for loop in (ours, theirs):
        loop(3)
    gc.collect()
    for block in range(blocks):
        for which in (0, 1) if block % 2 else (1, 0):
            start = time.thread_time()
            (ours, theirs)[which](calls)
            times[which].append((time.thread_time() - start) / calls * 1e6)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return Row(name, devices, statistics.median(times[0]), statistics.median(times[1]), ratio)


def threaded(step: Any, state: Any, *rest: Any, **named: Any) -> Loop:
    """A loop that hands the state on from call to call."""
    held = [state]

    def loop(calls: int) -> None:
        state = held[0]
        for _ in range(calls):
            state, _ = step(state, *rest, **named)
        held[0] = jax.block_until_ready(state)

    return loop


def tree_rows(devices: int, blocks: int, calls: int) -> list[Row]:
    """Dicts of arrays, few and many, by position and by name."""
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    rows: list[Row] = []

    def step(state: Any, x: Any) -> Any:
        return {name: w + x for name, w in state.items()}, x

    for leaves in (2, 100):
        ours = autoshard(step, mesh=mesh)
        x = jnp.ones(())

        def state(leaves: int = leaves) -> Any:
            return {f"w{i}": jnp.full(8, i, jnp.float32) for i in range(leaves)}

        ours.plan(state(), x)
        inputs, outputs = ours.shardings(state(), x)
        theirs = jax.jit(step, in_shardings=inputs, out_shardings=outputs, donate_argnums=0)
        x = jax.device_put(x, inputs[1])
        pair = threaded(ours, state(), x), threaded(theirs, state(), x)
        rows.append(compare(f"jax.jit, {leaves} leaves", devices, *pair, blocks, calls))
        if leaves == 2:  # jax.jit takes in_shardings or keywords, not both
            placed = jax.device_put(state(), inputs[0])
            theirs = jax.jit(step, out_shardings=outputs, donate_argnums=0)
            pair = threaded(ours, state(), x=x), threaded(theirs, placed, x=x)
            rows.append(compare(f"jax.jit, {leaves} leaves, by name", devices, *pair, blocks, calls))
    return rows


def equinox_row(blocks: int, calls: int) -> Row:
    """An Equinox model: static leaves."""

    def step(model: Any, x: Any) -> Any:
        arrays, rest = eqx.partition(model, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda w: w + 1, arrays), rest), x

    def model() -> Any:
        return eqx.nn.MLP(4, 4, 8, 3, key=jax.random.key(0))

    x = jnp.ones(4)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    plain: Any = eqx.filter_jit(step)

    def waiting(step: Any) -> Loop:
        held = [model()]

        def loop(calls: int) -> None:
            for _ in range(calls):
                held[0], _ = step(held[0], x)
            jax.block_until_ready(eqx.filter(held[0], eqx.is_array))

        return loop

    return compare("equinox.filter_jit", 1, waiting(autoshard(step, mesh=mesh)), waiting(plain), blocks, calls)


def nnx_row(blocks: int, calls: int) -> Row:
    """Flax NNX objects, updated in place."""

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(6)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    x = jnp.ones((2, 4))
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))

    def waiting(step: Any) -> Loop:
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        def loop(calls: int) -> None:
            value: Any = None
            for _ in range(calls):
                value = step(model, optimizer, x)
            jax.block_until_ready(value)

        return loop

    return compare("flax.nnx.jit", 1, waiting(autoshard(step, mesh=mesh)), waiting(nnx.jit(step)), blocks, calls)


def measure(blocks: int, calls: int) -> list[Row]:
    """All comparisons."""
    rows = tree_rows(1, blocks, calls)
    if len(jax.devices()) > 1:
        rows += tree_rows(len(jax.devices()), blocks, calls)
    return [*rows, equinox_row(blocks, calls), nnx_row(blocks, calls)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, writes the JSON; 1 if a ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--json", default="")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = measure(options.blocks, options.calls)
    table = Table("against", "devices", "autoshard", "other", "ratio")
    for row in rows:
        table.add_row(
            row.name, str(row.devices), f"{row.ours_us:.1f} us", f"{row.theirs_us:.1f} us", f"{row.ratio:.3f}"
        )
    Console().print(table)
    if options.json:
        about = {
            "jax": jax.__version__,
            "python": platform.python_version(),
            "device": f"{len(jax.devices())} {jax.devices()[0].device_kind}",
            "seed": None,
            "blocks": options.blocks,
            "calls": options.calls,
        }
        report = {**about, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row.ratio > LIMIT for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
