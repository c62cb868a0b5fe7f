"""All programs of the zoo, by name."""

from __future__ import annotations

from .base import Program
from .mlp import MLP
from .optimizers import OPTIMIZERS
from .transformers import TRANSFORMERS

PROGRAMS: tuple[Program, ...] = (*MLP, *OPTIMIZERS, *TRANSFORMERS)


def get(name: str) -> Program:
    for program in PROGRAMS:
        if program.name == name:
            return program
    raise KeyError(f"no program {name!r}; there are {', '.join(p.name for p in PROGRAMS)}")
