"""The graph, its verifier, evaluator and printer; tracing; factor rules; roles."""

from .evaluate import abstract_inputs as abstract_inputs
from .evaluate import evaluate as evaluate
from .factors import Dims as Dims
from .factors import FactorKind as FactorKind
from .factors import FactorRule as FactorRule
from .graph import Apply as Apply
from .graph import Atom as Atom
from .graph import Equation as Equation
from .graph import Graph as Graph
from .graph import Literal as Literal
from .graph import Place as Place
from .graph import Reshard as Reshard
from .graph import Spec as Spec
from .graph import Value as Value
from .graph import aval_bytes as aval_bytes
from .graph import trip_count as trip_count
from .printer import Names as Names
from .printer import print_equation as print_equation
from .printer import print_graph as print_graph
from .printer import print_spec as print_spec
from .printer import short_type as short_type
from .trace import from_jaxpr as from_jaxpr
from .trace import trace as trace
from .verify import verify as verify
