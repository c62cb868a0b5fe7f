"""Plans how to spread an undecorated JAX train step over a cluster, and runs it."""

from . import errors as errors
from . import jax_compat as jax_compat
