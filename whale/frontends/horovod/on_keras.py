"""Implements what Horovod's Keras modules have beside ``hvd``: exchanges of NumPy values, and loading of saved
models.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whale.frontends.horovod import moves, sums
from whale.frontends.horovod.callbacks import find_keras
from whale.frontends.horovod.optimizers import DistributedOptimizer as _Distributed
from whale.frontends.horovod.optimizers import make_distributed
from whale.frontends.horovod.reductions import Average, Compression, ReduceOp


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns an optimizer that applies the average of all ranks' gradients.

    Same as ``whale.horovod.tensorflow.DistributedOptimizer``, but with the order of arguments of Horovod's Keras
    modules.
    """
    return _Distributed(
        optimizer, name, False, device_dense, device_sparse, compression, sparse_as_dense, backward_passes_per_step,
        op, gradient_predivide_factor, average_aggregated_gradients, num_groups, groups, process_set,
        scale_local_gradients,
    )  # fmt: skip


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns the average of the ranks' values, or another reduction if ``op`` says so, as a NumPy array."""
    found = sums.allreduce(
        value, average, compression=compression, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, name=name,
    )  # fmt: skip
    return _to_numpy(found)


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns the ranks' values concatenated along dimension 0, as a NumPy array."""
    return _to_numpy(moves.allgather(value, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root rank's value on every rank, as a NumPy array."""
    return _to_numpy(moves.broadcast(value, root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Returns this rank's rows of the average (or sum) of the ranks' values, as a NumPy array."""
    return _to_numpy(sums.reducescatter(value, name=name, op=op))


def load_model_with(keras: str, filepath: Any, custom_optimizers: Any, custom_objects: Any, compression: Any) -> Any:
    """Loads a saved model with its optimizer's state, and makes the optimizer average gradients over the ranks.

    Args:
      keras: name of the Keras module that loads, see ``find_keras``.
      filepath: where the model was saved.
      custom_optimizers: optimizer classes that the model may contain; None: none.
      custom_objects: further classes by name, as for ``load_model``.
      compression: a class of ``hvd.Compression``.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = find_keras(keras).models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is not None:
        make_distributed(model.optimizer, compression)
    return model


def _to_numpy(tensor: Any) -> Any:
    return tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor)
