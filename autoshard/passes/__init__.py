"""One pass a file: graph in, graph out."""

from .batch_roles import Axis as Axis
from .constrain import Constrain as Constrain
from .duplicate_cheap import DuplicateCheap as DuplicateCheap
from .microbatch import Microbatches as Microbatches
from .microbatch import accumulate as accumulate
from .microbatch import microbatched as microbatched
from .microbatch import split_step as split_step
from .pipeline import Pass as Pass
from .pipeline import run_passes as run_passes
from .remat import Remat as Remat
from .remat import forward_cuts as forward_cuts
