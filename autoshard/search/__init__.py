"""Searches: make decisions, never rewrite the graph."""

from .benchmark import Run as Run
from .benchmark import run_instance as run_instance
from .benchmark import warm_up as warm_up
from .collection import collection_paused as collection_paused
from .contest import Instance as Instance
from .contest import Verdict as Verdict
from .contest import judge as judge
from .contest import read_instance as read_instance
from .contest import write_instance as write_instance
from .meshes import candidate_meshes as candidate_meshes
from .meshes import named_mesh as named_mesh
from .planner import make_plan as make_plan
from .planner import prepare as prepare
from .pricing import step_compute as step_compute
from .problem import Problem as Problem
from .problem import Progress as Progress
from .problem import Result as Result
from .problem import Shortage as Shortage
from .problem import Solution as Solution
from .problem import Usage as Usage
from .schedule import Schedule as Schedule
from .solve import solve as solve
from .stage_balance import choose_cuts as choose_cuts
from .stage_balance import describe_cuts as describe_cuts
