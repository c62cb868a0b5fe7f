"""Eight CPU devices and strict promotion, before any backend use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

# The CUDA plugin of the deviceless extra looks for cuDNN at JAX's first use: see DESIGN.md, section 7.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import pytest

import tools.typecheck as _typecheck  # the import hook of --jaxtyping-packages looks it up as an attribute of tools

assert _typecheck.checked is not None
jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files anew instead of comparing")
    parser.addoption("--full", action="store_true", help="run the whole matrix too (tests marked full)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips: dict[str, pytest.MarkDecorator] = {}
    if not config.getoption("--full"):
        skips["full"] = pytest.mark.skip(reason="part of the whole matrix: --full")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        skips["deviceless"] = pytest.mark.skip(reason="the deviceless extra is not installed: make deviceless")
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name) is not None:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Our own code promotes nothing silently; users' programs may (marker implicit_promotion)."""
    if request.node.get_closest_marker("implicit_promotion") is not None:
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are written anew (--update-golden)."""
    return bool(request.config.getoption("--update-golden"))
