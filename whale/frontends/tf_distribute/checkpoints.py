"""Makes ``tf.train.Checkpoint`` in scripts for strategies write once: all ranks save, and one writes the file."""

from __future__ import annotations

import functools
import os
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.checkpoint.graph_view import ObjectGraphView

from whale.errors import CheckpointError
from whale.runtime.checkpoint.gathering import gather_on_first_rank
from whale.runtime.compile.step import captures_steps
from whale.runtime.ranks.ranks import WRITE_TIMEOUT_S
from whale.runtime.run.context import Context, find_running


def install() -> None:
    """Patches checkpoints to be written once; while no run goes on they are written as TensorFlow does."""
    kind = tf.train.Checkpoint
    if hasattr(kind._write, "_whale_original"):
        return
    original = kind._write

    @functools.wraps(original)
    def _write(self: Any, file_prefix: Any, options: Any = None) -> Any:
        context = find_running()
        if context is None or not context.has_other_processes or context.own_programs is not None:
            return original(self, file_prefix, options)
        with gather_on_first_rank(ObjectGraphView(self).breadth_first_traversal()[0], context), captures_steps():
            return _write_once(lambda: original(self, file_prefix, options), os.fspath(file_prefix), context)

    _write._whale_original = original  # type: ignore[attr-defined]
    kind._write = _write
    delete = checkpoint_management._delete_file_if_exists

    def _delete_file_if_exists(filespec: str) -> None:
        try:
            delete(filespec)
        except tf.errors.NotFoundError:  # another rank was the first to delete the same old checkpoint
            if find_running() is None:
                raise

    checkpoint_management._delete_file_if_exists = _delete_file_if_exists


def _write_once(write: Any, prefix: str, context: Context) -> str:
    comm = context.comms[0]
    purpose = f"the saving of the checkpoint {prefix} (every rank has to save it)"
    places = [data.decode() for data in comm.allgather_bytes("whale/strategy/save", prefix.encode(), purpose=purpose)]
    failure = ""
    if places.index(prefix) == context.rank:  # the first rank that writes there
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
                action="make room or correct the path; checkpoints of before are as they were",
            )
    return prefix
