"""Runs scripts written for Horovod with one line changed: ``import whale.horovod as hvd``.

``whale.horovod.tensorflow``, ``.tensorflow.keras`` and ``.keras`` exist under Horovod's names; their contents come from
``whale.frontends.horovod``. This module itself has what ``horovod.tensorflow`` has, and also ``callbacks`` and
``load_model`` for the Keras that ``tf.keras`` is.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from whale.imports import NamedModules, names_of

__path__: list[str] = []

_HOME = "whale.frontends.horovod"
# Module of whale.frontends.horovod -> names that Horovod's modules for TensorFlow and Keras export.
_RANKS = (
    "ProcessSet add_process_set ccl_built cross_rank cross_size cuda_built ddl_built elastic global_process_set "
    "gloo_built gloo_enabled init is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled "
    "mpi_threads_supported nccl_built rank remove_process_set rocm_built shutdown size start_timeline stop_timeline"
)
_REDUCTIONS = "Adasum Average Compression Sum"
_STATE = "allgather_object broadcast_global_variables broadcast_object broadcast_variables"
_TENSORFLOW = {
    "gradients": "DistributedGradientTape PartialDistributedGradientTape",
    "moves": "allgather alltoall broadcast grouped_allgather",
    "optimizers": "DistributedOptimizer",
    "ranks": f"{_RANKS} join",
    "reductions": f"{_REDUCTIONS} Max Min Product",
    "state": f"{_STATE} BroadcastGlobalVariablesHook broadcast_object_fn",
    "sums": "allreduce grouped_allreduce grouped_reducescatter reducescatter",
}
_KERAS = {
    "on_keras": "DistributedOptimizer allgather allreduce broadcast reducescatter",
    "ranks": _RANKS,
    "reductions": _REDUCTIONS,
    "state": _STATE,
}


def _names(held: dict[str, str]) -> Callable[[], dict[str, Any]]:
    return names_of({f"{_HOME}.{module}": names for module, names in held.items()})


def _keras(name: str, keras: str) -> dict[str, Any]:
    """Returns the contents of Horovod's module for a Keras.

    Args:
        name: name of the module.
        keras: which Keras it is for, "keras" or "tensorflow.keras".
    """
    load = importlib.import_module(f"{_HOME}.on_keras").load_model_with
    none = importlib.import_module(f"{_HOME}.reductions").Compression.none

    def load_model(
        filepath: Any,
        custom_optimizers: Any = None,
        custom_objects: Any = None,
        compression: Any = none,
        legacy_opts: bool = False,
    ) -> Any:
        """Loads a Keras model and wraps its optimizer, with its saved state, to average gradients over the ranks."""
        return load(keras, filepath, custom_optimizers, custom_objects, compression)

    callbacks = importlib.import_module(f"{name}.callbacks")
    return {**_names(_KERAS)(), "load_model": load_model, "callbacks": callbacks}


def _callbacks(keras: str) -> dict[str, Any]:
    """Returns the contents of Horovod's module of callbacks for a Keras ("keras" or "tensorflow.keras")."""
    classes: dict[str, Any] = importlib.import_module(f"{_HOME}.callbacks").callback_classes(keras)
    return classes


_contents: dict[str, Callable[[], dict[str, Any]]] = {f"{__name__}.tensorflow": _names(_TENSORFLOW)}
for _keras_name in ("keras", "tensorflow.keras"):
    _module = f"{__name__}.{_keras_name}"
    _contents[_module] = functools.partial(_keras, _module, _keras_name)
    _contents[f"{_module}.callbacks"] = functools.partial(_callbacks, _keras_name)
sys.meta_path.append(NamedModules(_contents))


def __getattr__(name: str) -> Any:
    """Returns the attribute that ``horovod.tensorflow`` has by that name, or callbacks and load_model for
    ``tf.keras``.
    """
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    held = importlib.import_module(f"{__name__}.tensorflow")
    if name == "__all__":
        return held.__all__
    if name in ("callbacks", "load_model"):
        held = importlib.import_module(f"{__name__}.tensorflow.keras")
    if not hasattr(held, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(held, name)
