"""Patches classes of TensorFlow 1 for a run: Estimators, ``SyncReplicasOptimizer``, and classes that write files.

An Estimator (``tf.estimator``, TensorFlow up to 2.15) gets Whale's sessions, and exports on rank 0.
``SyncReplicasOptimizer`` is replaced by the optimizer that it wraps, since Whale's steps are synchronous anyway. Files
that Python code writes outside of session runs are written by rank 0 only.
"""

from __future__ import annotations

import contextvars
import os
import tempfile
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.framework import graph_io
from tensorflow.python.summary.writer import writer as summary_writer
from tensorflow.python.training import saver

from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import WRITE_TIMEOUT_S
from whale.errors import CheckpointError, ProgramError
from whale.frontends.tf1.activation import (
    find_following_run,
    find_spread_run,
    leave_alone,
    replace_function,
    replace_method,
)
from whale.log import log
from whale.runtime.context import Context

ESTIMATOR_MODULES = ("tensorflow_estimator.python.estimator.training",)
_CLUSTER = "TF_CONFIG"
_STRATEGIES = ("train_distribute", "eval_distribute", "experimental_distribute")

# True within Saver.save. Other code that writes or deletes checkpoints (tf.train.Checkpoint) is patched elsewhere.
_saving: contextvars.ContextVar[bool] = contextvars.ContextVar("saving", default=False)


def patch_estimators(training: ModuleType) -> None:
    """Patches the classes of ``tf.estimator``.

    Args:
      training: the module tensorflow_estimator.python.estimator.training, which is loaded last.
    """
    estimator, exporter = training.estimator_lib, training.exporter_lib
    if hasattr(estimator, "_whale_changed"):
        return
    estimator._whale_changed = True
    replace_method(training.run_config_lib.RunConfig, "__init__", _init_run_config)
    replace_method(estimator, "maybe_overwrite_model_dir_and_session_config", _complete_run_config)
    replace_method(estimator.Estimator, "_export_all_saved_models", _export_on_first_rank)
    for kind in (exporter.BestExporter, exporter.FinalExporter, exporter.LatestExporter):
        replace_method(kind, "export", _export_on_first_rank)


def _init_run_config(original: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces RunConfig's constructor (``original``): ignores ``TF_CONFIG`` and strategies, so that the Estimator sees
    one machine.
    """
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
        log.info(f"RunConfig ignores {', '.join(left_out)}: the Estimator runs on the ranks of this run")


def _complete_run_config(original: Any, config: Any, model_dir: Any) -> Any:
    """Replaces the Estimator function that completes its RunConfig (``original``): refuses one with a TensorFlow
    cluster, and gives all ranks rank 0's temporary folder if there is no model_dir.

    Raises:
      ProgramError: the RunConfig describes a TensorFlow cluster.
    """
    context = find_spread_run()
    if context is not None:
        if getattr(config, "cluster_spec", None):
            raise ProgramError(
                "an Estimator's RunConfig describes a TensorFlow cluster, instead of this run's ranks",
                given=f"cluster {config.cluster_spec.as_dict()}",
                expected="a RunConfig that is created after wh.init()",
                action=f"call wh.init() before the RunConfig is created, or unset {_CLUSTER}",
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
    """Replaces an Estimator's export (``original``): rank 0 exports from a checkpoint in a session of its own, and
    sends the path to all ranks.
    """
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
            "an Estimator's model could not be exported on rank 0",
            ranks="0",
            reason=reason,
            expected="an export directory that rank 0 can write to, and a checkpoint of the model",
            action="remove the cause that the reason names, and export again; training itself is not affected",
        )
    return result


def patch_optimizers() -> None:
    """Patches ``SyncReplicasOptimizer`` so that during a run the optimizer that it wraps is used instead."""
    kind = tf.compat.v1.train.SyncReplicasOptimizer
    replace_method(kind, "__init__", _init_sync_replicas)
    replace_method(kind, "apply_gradients", _apply_gradients)
    replace_method(kind, "get_chief_queue_runner", _make_queue_runner)
    replace_method(kind, "get_init_tokens_op", _make_tokens_op)
    replace_method(kind, "make_session_run_hook", _make_hook)


def _init_sync_replicas(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    original(optimizer, *args, **kwargs)
    context = find_spread_run()
    if context is None:
        return
    waits, replicas = optimizer._replicas_to_aggregate, optimizer._total_num_replicas
    if waits != replicas:
        raise ProgramError(
            "SyncReplicasOptimizer must aggregate one batch of each replica: a step of Whale is one global batch",
            given=f"replicas_to_aggregate={waits}, total_num_replicas={replicas}",
            expected="replicas_to_aggregate equal to total_num_replicas",
            action="set both to the number of ranks; to accumulate gradients, set pipeline.micro_batches",
        )
    _report_replacement(context)
    if optimizer._variable_averages is not None:
        raise ProgramError(
            "SyncReplicasOptimizer with variable_averages is not supported: it averages in a thread beside the step",
            given="SyncReplicasOptimizer(variable_averages=...)",
            expected="averages that are computed in the training step",
            action="group the train_op with variable_averages.apply(variables), and leave variable_averages out",
        )


def _report_replacement(context: Context) -> None:
    """Logs on rank 0, once per run, that SyncReplicasOptimizer was replaced."""
    if context.rank == 0 and "SyncReplicasOptimizer" not in context.reports.whole:
        context.reports.whole.add("SyncReplicasOptimizer")
        log.info(
            "SyncReplicasOptimizer is replaced by the optimizer that it wraps: each step of Whale computes the global "
            "batch synchronously on all ranks"
        )


def _apply_gradients(
    original: Any, optimizer: Any, grads_and_vars: Any, global_step: Any = None, name: Any = None
) -> Any:
    if find_spread_run() is None:
        return original(optimizer, grads_and_vars, global_step, name)
    return optimizer._opt.apply_gradients(grads_and_vars, global_step, name)


class _NoQueueRunner(tf.compat.v1.train.QueueRunner):  # type: ignore[misc]
    def __init__(self) -> None:
        pass

    def create_threads(self, *_: Any, **__: Any) -> list[Any]:
        return []


def _make_queue_runner(original: Any, optimizer: Any) -> Any:
    return original(optimizer) if find_spread_run() is None else _NoQueueRunner()


def _make_tokens_op(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(optimizer, *args, **kwargs) if find_spread_run() is None else tf.no_op("no_sync_tokens")


def _make_hook(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(optimizer, *args, **kwargs) if find_spread_run() is None else tf.compat.v1.train.SessionRunHook()


def patch_writers() -> None:
    """Patches the functions that write checkpoints, graphs and summaries from Python to write on rank 0 only."""
    replace_method(saver.Saver, "save", _save)
    replace_method(saver.Saver, "export_meta_graph", _export_meta_graph)
    for name in ("update_checkpoint_state_internal", "_delete_file_if_exists"):
        replace_method(checkpoint_management, name, _run_on_first_rank)
    replace_function(graph_io.write_graph, _write_graph)
    replace_method(summary_writer.FileWriter, "__init__", _make_file_writer)


def _save(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Saver.save`` (``original``): all ranks wait until rank 0 has written all files of the checkpoint;
    collective.
    """
    context = find_spread_run()
    token = _saving.set(True)
    try:
        path = original(*args, **kwargs)
    finally:
        _saving.reset(token)
    if context is not None and context.has_other_processes and not tf.executing_eagerly():
        purpose = f"the checkpoint {path} (every rank has to save it)"
        context.comms[0].allgather_bytes("whale/saver/saved", b"", WRITE_TIMEOUT_S, purpose)
    return path


def _export_meta_graph(original: Any, of: Any, filename: Any = None, *args: Any, **kwargs: Any) -> Any:
    return original(of, filename if find_following_run() is None or not _saving.get() else None, *args, **kwargs)


def _run_on_first_rank(original: Any, *args: Any, **kwargs: Any) -> None:
    if find_following_run() is None or not _saving.get():
        original(*args, **kwargs)


def _write_graph(original: Any, graph: Any, logdir: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
    return (
        original(graph, logdir, name, *args, **kwargs) if find_following_run() is None else os.path.join(logdir, name)
    )


class _NullWriter:
    """Replaces a summary writer's event writer on ranks that write no files; discards all events."""

    def __init__(self, logdir: Any) -> None:
        self._logdir = str(logdir)

    def get_logdir(self) -> str:
        return self._logdir

    def add_event(self, event: Any) -> None:
        pass

    def reopen(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _make_file_writer(original: Any, writer: Any, logdir: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces FileWriter's constructor (``original``): only rank 0 writes, since sessions return equal values on all
    ranks.
    """
    context = find_following_run()
    if find_spread_run() is not None:
        kwargs.pop("session", None)  # its operations would write in runs that all ranks make
    if context is None:
        original(writer, logdir, *args, **kwargs)
        return
    names = ("graph", "max_queue", "flush_secs", "graph_def")
    given = {**dict(zip(names, args)), **kwargs}
    writer._closed = False
    base = summary_writer.SummaryToEventTransformer
    base.__init__(writer, _NullWriter(logdir), given.get("graph"), given.get("graph_def"))
