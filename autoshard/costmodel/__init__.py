"""Roofline, collectives, fusion estimate; memory, simulator, calibration, learned model."""

from . import linalg_rules as _linalg_rules  # registers rules
from . import matrix_rules as _matrix_rules  # registers rules
from . import stream_rules as _stream_rules  # registers rules
from .collectives import COLLECTIVE_KINDS as COLLECTIVE_KINDS
from .collectives import CollectiveKind as CollectiveKind
from .collectives import collective_time_s as collective_time_s
from .collectives import wire_bytes as wire_bytes
from .cost import NO_COST as NO_COST
from .cost import Cost as Cost
from .roofline import equation_cost as equation_cost
from .roofline import local_bytes as local_bytes
from .roofline import local_work as local_work
from .roofline import matrix_occupancy as matrix_occupancy
from .roofline import time_s as time_s
from .roofline import work_time_s as work_time_s
from .work import Matrix as Matrix
from .work import Work as Work
from .work import WorkKind as WorkKind
from .work import WorkRule as WorkRule
from .work import equation_work as equation_work
from .work import known_primitives as known_primitives
from .work import work_rule as work_rule
