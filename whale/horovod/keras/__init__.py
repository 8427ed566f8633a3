"""``import whale.horovod.keras as hvd``: what ``horovod.keras`` has, carried out by Whale."""

from typing import Any

from whale.frontends.horovod.on_keras import DistributedOptimizer as DistributedOptimizer
from whale.frontends.horovod.on_keras import allgather as allgather
from whale.frontends.horovod.on_keras import allreduce as allreduce
from whale.frontends.horovod.on_keras import broadcast as broadcast
from whale.frontends.horovod.on_keras import load_model_with
from whale.frontends.horovod.on_keras import reducescatter as reducescatter
from whale.frontends.horovod.ranks import ProcessSet as ProcessSet
from whale.frontends.horovod.ranks import add_process_set as add_process_set
from whale.frontends.horovod.ranks import ccl_built as ccl_built
from whale.frontends.horovod.ranks import cross_rank as cross_rank
from whale.frontends.horovod.ranks import cross_size as cross_size
from whale.frontends.horovod.ranks import cuda_built as cuda_built
from whale.frontends.horovod.ranks import ddl_built as ddl_built
from whale.frontends.horovod.ranks import elastic as elastic
from whale.frontends.horovod.ranks import global_process_set as global_process_set
from whale.frontends.horovod.ranks import gloo_built as gloo_built
from whale.frontends.horovod.ranks import gloo_enabled as gloo_enabled
from whale.frontends.horovod.ranks import init as init
from whale.frontends.horovod.ranks import is_homogeneous as is_homogeneous
from whale.frontends.horovod.ranks import is_initialized as is_initialized
from whale.frontends.horovod.ranks import local_rank as local_rank
from whale.frontends.horovod.ranks import local_size as local_size
from whale.frontends.horovod.ranks import mpi_built as mpi_built
from whale.frontends.horovod.ranks import mpi_enabled as mpi_enabled
from whale.frontends.horovod.ranks import mpi_threads_supported as mpi_threads_supported
from whale.frontends.horovod.ranks import nccl_built as nccl_built
from whale.frontends.horovod.ranks import rank as rank
from whale.frontends.horovod.ranks import remove_process_set as remove_process_set
from whale.frontends.horovod.ranks import rocm_built as rocm_built
from whale.frontends.horovod.ranks import shutdown as shutdown
from whale.frontends.horovod.ranks import size as size
from whale.frontends.horovod.ranks import start_timeline as start_timeline
from whale.frontends.horovod.ranks import stop_timeline as stop_timeline
from whale.frontends.horovod.reductions import Adasum as Adasum
from whale.frontends.horovod.reductions import Average as Average
from whale.frontends.horovod.reductions import Compression as Compression
from whale.frontends.horovod.reductions import Sum as Sum
from whale.frontends.horovod.state import allgather_object as allgather_object
from whale.frontends.horovod.state import broadcast_global_variables as broadcast_global_variables
from whale.frontends.horovod.state import broadcast_object as broadcast_object
from whale.frontends.horovod.state import broadcast_variables as broadcast_variables
from whale.horovod.keras import callbacks as callbacks


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model, whose optimizer averages gradients over the ranks and has the state that it was saved with."""
    return load_model_with("keras", filepath, custom_optimizers, custom_objects, compression)
