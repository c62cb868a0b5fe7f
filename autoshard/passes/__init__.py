"""One pass a file: graph in, graph out."""

from .constrain import Constrain as Constrain
from .duplicate_cheap import DuplicateCheap as DuplicateCheap
from .pipeline import Pass as Pass
from .pipeline import run_passes as run_passes
