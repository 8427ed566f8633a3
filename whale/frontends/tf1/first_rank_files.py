"""Lets only the first rank write the files that a TensorFlow 1 script writes in Python, outside of session runs."""

from __future__ import annotations

import contextvars
import os
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.framework import graph_io
from tensorflow.python.summary.writer import writer as summary_writer
from tensorflow.python.training import saver

from whale.distributed.ranks import WRITE_TIMEOUT_S
from whale.frontends.tf1.activation import find_following_run, find_spread_run, replace_function, replace_method

# Within Saver.save; what else writes or deletes checkpoints (those of tf.train) has ways of its own.
_saving: contextvars.ContextVar[bool] = contextvars.ContextVar("saving", default=False)


def patch_writers() -> None:
    """Patches the functions that write files to write on one rank."""
    replace_method(saver.Saver, "save", _save)
    replace_method(saver.Saver, "export_meta_graph", _export_meta_graph)
    for name in ("update_checkpoint_state_internal", "_delete_file_if_exists"):
        replace_method(checkpoint_management, name, _run_on_first_rank)
    replace_function(graph_io.write_graph, _write_graph)
    replace_method(summary_writer.FileWriter, "__init__", _make_file_writer)


def _save(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Saver.save``: all ranks wait until the first has written all files of the checkpoint."""
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
    """A writer that discards events."""

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
    """Replaces ``FileWriter(...)``: only the first rank writes, since what sessions return is equal on all ranks."""
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
