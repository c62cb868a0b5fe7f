"""Searches: make decisions, never rewrite the graph."""

from .meshes import candidate_meshes as candidate_meshes
from .meshes import named_mesh as named_mesh
from .planner import make_plan as make_plan
from .planner import prepare as prepare
from .problem import Problem as Problem
from .problem import Result as Result
from .problem import Solution as Solution
from .solve import solve as solve
