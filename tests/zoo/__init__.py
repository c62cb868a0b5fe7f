"""The zoo: small but real single-device train steps that a sharded program must reproduce."""

from .base import Case as Case
from .base import Program as Program
from .base import distances as distances
from .base import plain_jit as plain_jit
from .base import run as run
from .base import to_numpy as to_numpy
from .registry import PROGRAMS as PROGRAMS
from .registry import get as get
