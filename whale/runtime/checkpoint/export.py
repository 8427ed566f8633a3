"""Exports a SavedModel for one device, which plain TensorFlow can serve, from a run under any plan: ``wh.export``."""

from __future__ import annotations

import contextlib
import contextvars
import os
import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint.graph_view import ObjectGraphView

from whale.distributed.common_seeds import read_random_state, take_random_state
from whale.distributed.ranks import WRITE_TIMEOUT_S
from whale.distributed.trace import open_span
from whale.errors import CheckpointError, ProgramError
from whale.runtime.checkpoint.gathering import gather_on_first_rank, refuse_different_copies
from whale.runtime.compile.step import captures_steps
from whale.runtime.context import Context, require_current
from whale.runtime.files import (
    is_on_disk,
    normalize_path,
    refuse_unknown_store,
    remove,
    remove_folder,
)
from whale.runtime.function import Function

_COMPLETE = "saved_model.pb"  # TensorFlow writes it last
# Whether the first rank is writing a model alone: methods of the model that are collective otherwise are not then.
is_exporting: contextvars.ContextVar[bool] = contextvars.ContextVar("is_exporting", default=False)


def export(what: Any, directory: str | os.PathLike[str], *specs: Any) -> None:
    """Writes a SavedModel for one device; every rank calls it at the same place, and the first rank writes.

    Plain TensorFlow serves the model: ``tf.saved_model.load(directory).signatures["serving_default"]``, TensorFlow
    Serving. Former content of the directory is replaced once the new model is complete. Sharded variables are gathered
    one after the other; until the model is written, the first rank holds the exported variables in full.

    Args:
      what: a Keras model; or a step of ``wh.function``, a tf.function or a function that predicts; or a tf.Module with
        such methods.
      directory: a path, or a URI of a store that TensorFlow knows (``gs://bucket/model/1``).
      specs: for a function, the tf.TensorSpec of each argument: ``tf.TensorSpec([None, 28, 28])``.

    Raises:
      ClusterError: called before ``wh.init``.
      ProgramError: a function without ``specs``, or ``specs`` for something else.
      CheckpointError: the model cannot be written (on every rank, with the reason), or TensorFlow does not know the
        store.
    """
    context = require_current("wh.export")
    directory = normalize_path(directory)
    refuse_unknown_store(directory)
    is_function = callable(what) and not isinstance(what, tf.Module) and not hasattr(what, "export")
    if is_function != bool(specs):
        raise ProgramError(
            "wh.export takes a tf.TensorSpec for each argument of a function, and none for a model",
            op=getattr(what, "__name__", type(what).__name__),
            given=f"{len(specs)} specs",
            expected="a tf.TensorSpec for each argument" if is_function else "none: a model has its own",
            action="wh.export(predict, directory, tf.TensorSpec([None, 10]))" if is_function else "leave them out",
        )
    with open_span(context.trace, "export", "checkpoint"):
        failure: Exception | None = None
        try:
            with captures_steps(nested=True):
                module = _make_module(what, specs) if is_function else what
            holders = ObjectGraphView(module).breadth_first_traversal()[0]
            refuse_different_copies(holders, context, f"an export to {directory}")
            with gather_on_first_rank(holders, context):
                if context.rank == 0:
                    token = is_exporting.set(True)
                    try:
                        with captures_steps(nested=True):
                            _write(module, directory)
                    finally:
                        is_exporting.reset(token)
        except (OSError, tf.errors.OpError) as error:
            failure = error
        _tell(failure, directory, context)
        take_first_random_state(context, f"an export to {directory}")


def take_first_random_state(context: Context, what: str) -> None:
    """Broadcasts the first rank's random states to all ranks, after a file was written whose format traces the model
    and draws seeds meanwhile.

    Args:
      what: describes what was written, for messages of ranks that make another call.
    """
    if context.has_other_processes:
        state = read_random_state() if context.rank == 0 else None
        said = context.comms[0].broadcast_bytes("whale/random/written", state, 0, WRITE_TIMEOUT_S, what)
        if context.rank:
            take_random_state(said)


def _make_module(function: Any, specs: Sequence[Any]) -> tf.Module:
    """Returns a tf.Module with the function as ``serve`` and its variables as ``used``, for tf.saved_model.save."""
    python_function = getattr(function, "python_function", function)
    if isinstance(function, Function):
        python_function = function._python_function
    module = tf.Module()
    module.serve = tf.function(python_function, input_signature=list(specs), autograph=True)
    graph = module.serve.get_concrete_function().graph
    # The variables are in the order of capture: the graph orders them by addresses, which differ between ranks.
    variables = {id(v.handle): v for v in graph.variables}
    module.used = [variables[id(handle)] for handle, _ in graph.captures if id(handle) in variables]
    return module


def _write(module: Any, directory: str) -> None:
    beside = f"{directory}.{uuid.uuid4().hex[:12]}"
    try:
        if hasattr(module, "export"):
            module.export(beside)
        else:
            serve = getattr(module, "serve", None)
            tf.saved_model.save(module, beside, signatures=serve if hasattr(module, "used") else None)
        _put_in_place(beside, directory)
    finally:
        with contextlib.suppress(tf.errors.OpError):
            remove_folder(beside)


def _put_in_place(beside: str, directory: str) -> None:
    """Replaces the content of ``directory`` by the complete model in the folder ``beside``.

    In a store, where folders cannot be renamed, ``saved_model.pb``, by which TensorFlow recognises a complete model, is
    removed first and written last.
    """
    if is_on_disk(directory):
        old = f"{beside}.old"
        if tf.io.gfile.exists(directory):
            tf.io.gfile.rename(directory, old)
        tf.io.gfile.rename(beside, directory)
        remove_folder(old)
        return
    remove(os.path.join(directory, _COMPLETE))
    remove_folder(directory)
    for folder, _, names in reversed(list(tf.io.gfile.walk(beside))):
        below = folder.rstrip("/").removeprefix(beside).lstrip("/")
        for name in sorted(names, key=lambda name: name == _COMPLETE):
            tf.io.gfile.rename(os.path.join(folder, name), os.path.join(directory, below, name), overwrite=True)


def _tell(failure: Exception | None, directory: str, context: Context) -> None:
    text = f"{type(failure).__name__}: {failure}"[:2000] if failure is not None else ""
    said = [text]
    if context.has_other_processes:
        purpose = f"the export to {directory}"
        everyone = context.comms[0].allgather_bytes("whale/export", text.encode(), WRITE_TIMEOUT_S, purpose)
        said = [other.decode() for other in everyone]
    for rank, reason in enumerate(said):
        if reason:
            raise CheckpointError(
                "a model cannot be exported",
                given=directory,
                rank=rank,
                reason=reason,
                expected="a directory with room that the first rank can write",
                action="remove what the reason says, or name another directory, and call wh.export again",
            ) from failure
