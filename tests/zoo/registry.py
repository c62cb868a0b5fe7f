"""All programs of the zoo, by name."""

from __future__ import annotations

from .base import Program
from .control_flow import CONTROL_FLOW
from .experts import EXPERT_MIXTURES
from .frameworks import FRAMEWORKS
from .generative import GENERATIVE
from .graphs import GRAPH_PROGRAMS
from .mlp import MLP
from .numerics import NUMERICS
from .optimizers import OPTIMIZERS
from .recurrent import RECURRENT
from .transformers import TRANSFORMERS
from .vision import VISION

PROGRAMS: tuple[Program, ...] = (
    *MLP,
    *OPTIMIZERS,
    *TRANSFORMERS,
    *EXPERT_MIXTURES,
    *FRAMEWORKS,
    *VISION,
    *RECURRENT,
    *GRAPH_PROGRAMS,
    *GENERATIVE,
    *CONTROL_FLOW,
    *NUMERICS,
)


def get(name: str) -> Program:
    for program in PROGRAMS:
        if program.name == name:
            return program
    raise KeyError(f"no program {name!r}; there are {', '.join(p.name for p in PROGRAMS)}")
