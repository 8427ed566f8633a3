"""Patches ``tf.estimator`` (TensorFlow up to 2.15), whose sessions are Whale's: its configuration and its exports."""

from __future__ import annotations

import os
import tempfile
from types import ModuleType
from typing import Any

from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import WRITE_TIMEOUT_S
from whale.errors import CheckpointError, ProgramError
from whale.frontends.tf1.activation import find_spread_run, leave_alone, replace_method
from whale.log import log
from whale.runtime.context import Context

MODULES = ("tensorflow_estimator.python.estimator.training",)
_CLUSTER = "TF_CONFIG"
_STRATEGIES = ("train_distribute", "eval_distribute", "experimental_distribute")


def patch_estimators(training: ModuleType) -> None:
    """Patches Estimators; ``training`` is the last of their modules to be loaded."""
    estimator, exporter = training.estimator_lib, training.exporter_lib
    if hasattr(estimator, "_whale_changed"):
        return
    estimator._whale_changed = True
    replace_method(training.run_config_lib.RunConfig, "__init__", _run_config)
    replace_method(estimator, "maybe_overwrite_model_dir_and_session_config", _configure)
    replace_method(estimator.Estimator, "_export_all_saved_models", _export_on_first_rank)
    for kind in (exporter.BestExporter, exporter.FinalExporter, exporter.LatestExporter):
        replace_method(kind, "export", _export_on_first_rank)


def _run_config(original: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces RunConfig's constructor: the ranks appear as one machine."""
    context = find_spread_run()
    if context is None:
        original(config, *args, **kwargs)
        return
    left_out = [name for name in _STRATEGIES if kwargs.pop(name, None) is not None]
    cluster = os.environ.pop(_CLUSTER, None)
    try:
        original(config, *args, **kwargs)
    finally:
        if cluster is not None:
            os.environ[_CLUSTER] = cluster
    left_out += [_CLUSTER] if cluster is not None else []
    if left_out and context.rank == 0 and "RunConfig" not in context.reports.whole:
        context.reports.whole.add("RunConfig")
        log.info(f"RunConfig does without {', '.join(left_out)}: the ranks are those of the run")


def _configure(original: Any, config: Any, model_dir: Any) -> Any:
    context = find_spread_run()
    if context is not None:
        if getattr(config, "cluster_spec", None):
            raise ProgramError(
                "an Estimator's RunConfig is of a worker of TensorFlow's own cluster",
                given=f"cluster {config.cluster_spec.as_dict()}",
                expected="a RunConfig that was made after wh.init()",
                action=f"call wh.init() first, or unset {_CLUSTER}",
            )
        if model_dir is None and getattr(config, "model_dir", None) is None and context.has_other_processes:
            mine = tempfile.mkdtemp().encode() if context.rank == 0 else None
            model_dir = _broadcast(mine, context).decode()
    return original(config, model_dir)


def _broadcast(data: bytes | None, context: Context) -> bytes:
    key = f"whale/element/{context.elements}"
    context.elements += 1
    said: bytes = context.comms[0].broadcast_bytes(key, data, 0, WRITE_TIMEOUT_S)
    return said


def _export_on_first_rank(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces exports: the first rank exports a checkpoint in a session of its own, and sends the others the path."""
    context = find_spread_run()
    if context is None:
        return original(*args, **kwargs)
    if not context.has_other_processes or context.rank == 0:
        try:
            with leave_alone():
                result = original(*args, **kwargs)
        except Exception as error:
            if context.has_other_processes:
                _broadcast(pack((None, f"{type(error).__name__}: {error}")), context)
            raise
        if context.has_other_processes:
            _broadcast(pack((result, "")), context)
        return result
    result, reason = unpack(_broadcast(None, context))
    if reason:
        raise CheckpointError(
            "an Estimator's model could not be exported",
            ranks="0",
            reason=reason,
            expected="a directory that rank 0 can use, and a checkpoint",
            action="see the reason",
        )
    return result
