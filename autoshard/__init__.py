"""Plans how to spread an undecorated JAX train step over a cluster, and runs it."""

from . import errors as errors
from . import jax_compat as jax_compat
from .api import Step as Step
from .api import autoshard as autoshard
from .cluster import Cluster as Cluster
from .cluster import DeviceSpec as DeviceSpec
from .cluster import Link as Link
from .cluster import Node as Node
from .ir import register_rule as register_rule
from .plan import Plan as Plan
