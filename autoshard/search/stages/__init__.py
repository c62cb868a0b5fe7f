"""Stage planners: which layers form a pipeline's stages, on which devices."""

from .dapple import DappleOptions as DappleOptions
from .dapple import data_parallel_s as data_parallel_s
from .dapple import plan_dapple as plan_dapple
from .dapple import recursion_s as recursion_s
from .dapple import stage_blocks as stage_blocks
from .load_balance import LoadNode as LoadNode
from .load_balance import LoadProblem as LoadProblem
from .load_balance import Split as Split
from .load_balance import loads_s as loads_s
from .load_balance import split_contiguous as split_contiguous
from .load_balance import split_local as split_local
from .pipedream import plan_pipedream as plan_pipedream
from .spp import bandwidths_of as bandwidths_of
from .spp import device_order as device_order
from .spp import plan_spp as plan_spp
from .spp import stages_s as stages_s
from .table import PlannedStage as PlannedStage
from .table import Servers as Servers
from .table import StagePlan as StagePlan
from .table import StageTable as StageTable
from .table import chain_of as chain_of
from .table import layer_table as layer_table
from .table import profile_table as profile_table
from .table import servers_of as servers_of
