# Decision: 0142.
# The public names, and the module of each: what type checkers see, and what `whale/__init__.py` loads.
# ruff: isort: skip_file

__version__: str
__all__: list[str]

# Starting and ending a run
from whale.frontends.start import init as init
from whale.runtime.start import shutdown as shutdown
from whale.frontends.launch import launch as launch
from whale.config import Config as Config
from whale.config import Mesh as Mesh
from whale.runtime.context import rank as rank
from whale.runtime.context import size as size
from whale.runtime.context import local_rank as local_rank

# Programs
from whale.runtime.function import function as function
from whale.frontends.tf1.session import Session as Session
from whale.frontends.tf_distribute.strategy import Strategy as Strategy
from whale.frontends.layers import layers as layers
from whale.frontends.layers import losses as losses
from whale.frontends.layers import optimizers as optimizers

# Scopes and annotations
from whale.annotations import replica as replica
from whale.annotations import split as split
from whale.annotations import stage as stage
from whale.annotations import pipeline as pipeline
from whale.annotations import recompute as recompute
from whale.annotations import checkpoint as checkpoint
from whale.annotations import annotate as annotate

# Data
from whale.runtime.input.data import shard as shard
from whale.runtime.input.data import ShardedTensor as ShardedTensor

# Keeping what was trained, and going on
from whale.runtime.checkpoint.manager import CheckpointManager as CheckpointManager
from whale.runtime.checkpoint.export import export as export
from whale.runtime.input.state import State as State
from whale.runtime.context import preempted as preempted
from whale.started import restarts as restarts

# Looking at plans and runs
from whale.tools.dry_run import plan as plan
from whale.tools.memory_report import memory_report as memory_report
from whale.runtime.loss_scale import loss_scale as loss_scale
from whale.runtime.start import check_replicas as check_replicas

# Errors
from whale.errors import WhaleError as WhaleError
from whale.errors import CaptureError as CaptureError
from whale.errors import CheckpointError as CheckpointError
from whale.errors import ClusterError as ClusterError
from whale.errors import CommError as CommError
from whale.errors import ConfigError as ConfigError
from whale.errors import InstallError as InstallError
from whale.errors import LayoutError as LayoutError
from whale.errors import PlanError as PlanError
from whale.errors import ProgramError as ProgramError
from whale.errors import RuleError as RuleError

# Names of the first Whale, which its scripts find here; they are not in __all__
from whale.frontends.first_whale import auto_parallel as auto_parallel
from whale.frontends.first_whale import cluster as cluster
from whale.frontends.first_whale import replicate as replicate
from whale.frontends.first_whale import set_default_strategy as set_default_strategy

def _modules() -> dict[str, str]: ...
