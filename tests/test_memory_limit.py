"""Memory limits, checked by XLA's own count of the compiled program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import autoshard
from autoshard.runtime.fit import compiled_peak
from tests.helpers import distance, eager_cluster
from tests.zoo import get


@pytest.mark.implicit_promotion
@pytest.mark.parametrize("name", ["multi_steps", "scanned_remat", "lstm"])
def test_programs_stay_within_a_binding_limit(name: str) -> None:
    """A limit between what the step needs at least and what it takes without one; XLA's count decides."""
    case = get(name).build(jnp.float32)
    args, kwargs = case.fresh()

    def step_for(limit: int | None) -> Any:
        return autoshard(case.step, devices=eager_cluster(), mesh=(2, 4), memory_limit=limit)

    free = step_for(None).plan(*args, **kwargs).memory.peak_bytes
    limit = int(free * 0.95)
    step = step_for(limit)
    result = step(*args, **kwargs)
    (compiled,) = step._compiled.values()
    peak = compiled_peak(compiled)
    assert peak is not None
    assert peak <= limit
    args, kwargs = case.fresh()
    assert distance(result, jax.jit(case.step)(*args, **kwargs)) < 1e-4
