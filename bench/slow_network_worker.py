"""One process of `bench.slow_network`: NUMBER COORDINATOR FOLDER BUDGET [--small]."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from autoshard import autoshard
from autoshard.calibrate import calibrate
from autoshard.cluster import Cluster
from bench.slow_programs import Case, cases

TIMED_S = 4.0
FEWEST, MOST = 7, 40


def pins_of(case: Case, plan: str) -> dict[str, P] | None:
    """The hand-made plans as pins; None for the planner's own."""
    state = jax.eval_shape(case.make_state, jax.random.key(0))
    inputs = "batch" if isinstance(case.batch, np.ndarray) else "batch/**"
    batch = {inputs: P("data")}
    match plan:
        case "data parallel":
            return {"state/**": P(), **batch}
        case "fully sharded":
            pins: dict[str, P] = {}
            for path, leaf in jax.tree_util.tree_leaves_with_path(state):
                name = "state/" + jax.tree_util.keystr(path, simple=True, separator="/")
                split = next((d for d, n in enumerate(leaf.shape) if n % 2 == 0), None)
                pins[name] = P() if split is None else P(*([None] * split), "data")
            return {**pins, **batch}
        case "tensor parallel":
            return {inputs: P()}
        case _:
            return None


def main() -> None:
    """Calibrates, then times each program under each plan; the first process writes the rows."""
    number, coordinator, folder, budget = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, number)
    file = folder / "cluster.toml"
    made = calibrate(budget_s=budget, quick="--small" in sys.argv, cache=folder / "measurements.jsonl")
    if number == 0:
        file.write_text(made.to_toml())
    multihost_utils.sync_global_devices("calibrated")
    cluster = Cluster.from_toml(file)
    rows: list[dict[str, Any]] = []
    for case in cases("--small" in sys.argv):
        seen: set[tuple[Any, ...]] = set()
        for plan in ("data parallel", "fully sharded", "tensor parallel", "chosen"):
            print(f"{case.name}, {plan}", flush=True)
            try:
                row = measure(case, plan, cluster, seen)
            except Exception as error:  # a hand-made plan that cannot be is no plan to time
                if plan == "chosen":
                    raise
                print(f"  {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            if row is not None:
                rows.append({"program": case.name, "plan": plan, **row})
                print(f"  {row}", flush=True)
    if number == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    multihost_utils.sync_global_devices("done")


def measure(case: Case, plan: str, cluster: Cluster, seen: set[tuple[Any, ...]]) -> dict[str, Any] | None:
    """Predicted and measured seconds of a step; None if a like plan was timed before."""
    pins = pins_of(case, plan)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step: Any = autoshard(case.step, mesh=mesh, devices=cluster, **({"pins": pins} if pins else {}))
    state = jax.tree.map(np.asarray, case.make_state(jax.random.key(0)))
    made = step.plan(state, case.batch)
    key = (made.values, made.specs, made.operands)
    if key in seen:
        return None
    seen.add(key)
    state, batch = step.place(state), step.place(case.batch)
    for _ in range(3):
        state, loss = step(state, batch)
        jax.block_until_ready(loss)
    # The same number in both processes: each step is a meeting.
    count = int(min(max(TIMED_S / made.time_s, FEWEST), MOST))
    count = int(multihost_utils.broadcast_one_to_all(np.int32(count)))
    times: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        times.append(time.perf_counter() - begin)
    quarters = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    return {
        "predicted_s": made.time_s,
        "measured_s": median,
        "spread": (quarters[2] - quarters[0]) / median,
        "compute_s": made.compute_s,
        "traffic_s": made.traffic_s,
        "steps": count,
    }


if __name__ == "__main__":
    main()
