"""Inner loops compiled by numba: once on a machine, then kept in numba's cache.

Imported only where such loops are: numba takes a third of a second to load.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bytes = NDArray[np.int8]


def kernel(fun: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function when it is first called; what a type checker wrapped around it is taken off.

    Compiled functions hold no lock, so two of them run on two cores.
    """
    compiled: Any = numba.njit(cache=True, nogil=True)(inspect.unwrap(fun))
    return compiled
