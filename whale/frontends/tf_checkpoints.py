"""Makes rank 0 alone write what all ranks save with ``tf.train.Checkpoint`` or ``tf.saved_model.save``.

If all ranks wrote into one folder, they would rename and remove each other's files. Other ranks wait for rank 0 before
they read what it wrote, as with Keras' models. Scripts written for ``tf.distribute`` (``wh.Strategy``) give each rank
another path; then one rank writes at each path.

Decisions: 0147, 0213.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as checkpoint_lib
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.checkpoint.graph_view import ObjectGraphView
from tensorflow.python.saved_model import loader_impl
from tensorflow.python.saved_model import save as save_lib
from tensorflow.python.training import checkpoint_utils, py_checkpoint_reader

from whale.distributed.collective_call_check import call_together
from whale.distributed.ranks import WRITE_TIMEOUT_S
from whale.distributed.script_line import find_script_line
from whale.errors import CheckpointError
from whale.frontends.keras.saving import find_written, reading, wait_for_first_rank
from whale.runtime.checkpoint.gathering import describe_unreadable, gather_on_first_rank
from whale.runtime.compile.step import captures_steps
from whale.runtime.context import Context, find_running
from whale.runtime.files import normalize_path


def install() -> None:
    """Patches TensorFlow's functions that save and load; without a run of several processes they behave as before."""
    kind = tf.train.Checkpoint
    if hasattr(kind._write, "_whale_original"):
        return
    kind._write = _during_run(kind._write, _write)
    kind.read = _during_run(kind.read, _read)
    for name, new in (
        ("_delete_file_if_exists", _delete),
        ("update_checkpoint_state_internal", _update_state),
        ("get_checkpoint_state", _get_state),
    ):
        setattr(checkpoint_management, name, _during_run(getattr(checkpoint_management, name), new))
    tf.train.get_checkpoint_state = checkpoint_management.get_checkpoint_state
    # What opens the files without an object to restore: tf.train.load_checkpoint, list_variables, CheckpointView,
    # readers that a script makes; tf.lite's converter, which parses a model before it loads it.
    for owner, name, new in (
        (checkpoint_utils, "_get_checkpoint_filename", _find_checkpoint),
        (py_checkpoint_reader, "NewCheckpointReader", _read_path),
        (loader_impl, "contains_saved_model", _read_path),
        (loader_impl, "parse_saved_model", _read_path),
    ):
        setattr(owner, name, _during_run(getattr(owner, name), new))
    tf.compat.v1.train.NewCheckpointReader = py_checkpoint_reader.NewCheckpointReader
    save = _capturing(_during_run(tf.saved_model.save, _save_model))
    load = _during_run(tf.saved_model.load, _load_model)
    # The first import of tensorflow.saved_model, e.g. by Keras' export, creates a second module object, to which
    # tf.saved_model refers from then on: import it now, and patch both.
    for module in (tf.saved_model, importlib.import_module("tensorflow.saved_model")):
        vars(module).update(save=save, load=load, contains_saved_model=loader_impl.contains_saved_model)


def _during_run(original: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_original_or_new(*args: Any, **kwargs: Any) -> Any:
        context = find_running()
        alone = (
            context is None
            or not context.has_other_processes
            or context.solo
            or context.planning.own_programs is not None
        )
        return original(*args, **kwargs) if alone else new(context, original, *args, **kwargs)

    call_original_or_new._whale_original = original  # type: ignore[attr-defined]
    return call_original_or_new


def _capturing(saves: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that saves a model (``saves``), so that ``wh.function`` steps called in the model's tf.functions
    become part of their traces.
    """

    @functools.wraps(saves)
    def save(*args: Any, **kwargs: Any) -> Any:
        with captures_steps(nested=True):
            return saves(*args, **kwargs)

    return save


def _write(
    context: Context, original: Callable[..., Any], checkpoint: Any, file_prefix: Any, options: Any = None
) -> Any:
    holders, prefix = ObjectGraphView(checkpoint).breadth_first_traversal()[0], os.fspath(file_prefix)
    found: list[Any] = []

    def write() -> None:
        found.append(original(checkpoint, prefix, options))

    if context.saves_apart:
        with gather_on_first_rank(holders, context), captures_steps(nested=True):
            _write_at_each_path(write, prefix, context)
    else:
        _write_on_first_rank(write, holders, prefix, context)
    if not found:  # a CheckpointManager counts checkpoints by these callbacks, on ranks that do not write, too
        checkpoint_lib._execute_callbacks(getattr(options, "experimental_write_callbacks", None) or (), prefix)
    return found[0] if found else prefix


def _read(
    context: Context, original: Callable[..., Any], checkpoint: Any, save_path: Any, *args: Any, **kw: Any
) -> Any:
    with reading(save_path) as found:
        return original(checkpoint, found, *args, **kw)


def _delete(context: Context, original: Callable[..., Any], filespec: str) -> None:
    if context.rank != 0 and not context.saves_apart:
        return  # the first rank removes what it wrote
    try:
        original(filespec)
    except tf.errors.NotFoundError:  # another rank was the first to delete the same old checkpoint
        if not context.saves_apart:
            raise


def _update_state(context: Context, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    if context.rank == 0 or context.saves_apart:
        original(*args, **kwargs)


def _get_state(context: Context, original: Callable[..., Any], checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
    _wait_for_folder(context, checkpoint_dir)
    return original(checkpoint_dir, *args, **kwargs)


def _find_checkpoint(context: Context, original: Callable[..., Any], ckpt_dir_or_file: Any) -> Any:
    if isinstance(ckpt_dir_or_file, (str, os.PathLike)):
        _wait_for_folder(context, ckpt_dir_or_file)  # TensorFlow asks next whether it is a folder
    return original(find_written(ckpt_dir_or_file))


def _read_path(context: Context, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    return original(find_written(path), *args, **kwargs)


def _wait_for_folder(context: Context, path: Any) -> None:
    folder = normalize_path(path)
    if written := [path for path in context.written if os.path.dirname(path) == folder]:
        wait_for_first_rank(f"reading the folder {folder}, to which rank 0 wrote checkpoints")
        context.unread |= dict.fromkeys(written)


def _save_model(
    context: Context,
    original: Callable[..., Any],
    obj: Any,
    export_dir: Any,
    signatures: Any = None,
    options: Any = None,
) -> None:
    def write() -> None:
        original(obj, export_dir, signatures, options)

    def trace() -> None:
        # Saving traces functions, which may draw seeds and create variables: do the same on ranks that do not write.
        save_lib._build_meta_graph(obj, signatures, options or tf.saved_model.SaveOptions())

    holders = ObjectGraphView(obj).breadth_first_traversal()[0]
    _write_on_first_rank(write, holders, os.fspath(export_dir), context, trace)


def _load_model(context: Context, original: Callable[..., Any], export_dir: Any, *args: Any, **kwargs: Any) -> Any:
    with reading(export_dir) as found:
        return original(found, *args, **kwargs)


def _write_on_first_rank(
    write: Callable[[], None],
    holders: Iterable[Any],
    path: str,
    context: Context,
    elsewhere: Callable[[], None] = lambda: None,
) -> None:
    """Calls ``write`` on rank 0, with sharded variables gathered there; collective if any variable has to be gathered.

    Args:
      write: writes the files.
      holders: all objects of the checkpoint, variables among them.
      path: where ``write`` writes.
      elsewhere: called on the other ranks instead of ``write``.
    """
    holders = list(holders)
    if why := describe_unreadable(holders):
        line = find_script_line()
        call_together(context, "save", f"the saving of {path}" + (f" at {line}" if line else ""), why)
    with gather_on_first_rank(holders, context), captures_steps(nested=True):
        context.written[normalize_path(path)] = None
        write() if context.rank == 0 else elsewhere()


def _write_at_each_path(write: Callable[[], None], prefix: str, context: Context) -> None:
    """Calls ``write`` on one rank for each different path: on the lowest of the ranks that pass the same ``prefix``;
    collective.

    Args:
      write: writes the files.
      prefix: the path at which this rank's script saves.
      context: the run.

    Raises:
      CheckpointError: a rank could not write; raised on every rank.
    """
    comm = context.comms[0]
    purpose = f"the saving of the checkpoint {prefix} (every rank has to save it)"
    places = [data.decode() for data in comm.allgather_bytes("whale/strategy/save", prefix.encode(), purpose=purpose)]
    failure = ""
    if places.index(prefix) == context.rank:
        try:
            write()
        except (OSError, tf.errors.OpError) as error:
            failure = f"{type(error).__name__}: {error}"
    said = comm.allgather_bytes("whale/strategy/saved", failure.encode(), WRITE_TIMEOUT_S, purpose)
    for rank, data in enumerate(said):
        if data:
            raise CheckpointError(
                "a checkpoint cannot be written",
                given=f"{places[rank]} on rank {rank}",
                reason=data.decode(),
                expected=f"a directory with free space that rank {rank} can write to",
                action="free space or correct the path; earlier checkpoints are intact",
            )
