"""Runs callbacks on ranks other than the first: they see the same values and act alike, but write no files.

Reading a split variable is collective, so a callback that writes is not skipped if its output can be redirected: all
ranks then compute the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from whale.frontends.keras import elastic_fit
from whale.frontends.keras.first_rank_paths import list_kinds
from whale.frontends.keras.saving import wait_for_first_rank
from whale.runtime.context import find_running


@contextmanager
def adapt_for_other_ranks(callbacks: Any) -> Iterator[Any]:
    """Yields the ``callbacks`` argument for a rank that is not the first; afterwards the callbacks are restored.

    Args:
      callbacks: None, a callback, several, or a list that Keras made of them earlier in the same call.
    """
    if callbacks is None or "CallbackList" in list_kinds(callbacks):
        yield callbacks
        return
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    with ExitStack() as stack:
        yield [c for c in given if _redirect(c, stack)]


def _redirect(callback: Any, stack: ExitStack) -> bool:
    """Redirects a callback's files while ``stack`` is open; returns whether it is called at all."""
    for kind, change in _CHANGES.items():
        if kind in list_kinds(callback):
            return change(callback, stack)
    return True


def _write_nowhere(attribute: str) -> Callable[[Any, ExitStack], bool]:
    def change(callback: Any, stack: ExitStack) -> bool:
        _set(callback, attribute, os.devnull, stack)
        return True

    return change


def _write_to_temporary_folder(attribute: str) -> Callable[[Any, ExitStack], bool]:
    def change(callback: Any, stack: ExitStack) -> bool:
        _set(callback, attribute, stack.enter_context(tempfile.TemporaryDirectory()), stack)
        return True

    return change


def _leave_out(callback: Any, stack: ExitStack) -> bool:
    return False


def _adapt_backup(callback: Any, stack: ExitStack) -> bool:
    """Makes a BackupAndRestore restore as on the first rank, and take part when the first rank saves."""
    path = getattr(callback, "_weights_path", None)
    if path is None:  # of tf_keras, which writes with a checkpoint manager of its own
        return True
    _set(callback, "_save_model", lambda: callback.model.save_weights(path), stack)
    _set(callback, "delete_checkpoint", False, stack)
    return True


_CHANGES: dict[str, Callable[[Any, ExitStack], bool]] = {
    "CSVLogger": _write_nowhere("filename"),
    "TensorBoard": _write_to_temporary_folder("log_dir"),
    "BackupAndRestore": _adapt_backup,
    "ProgbarLogger": _leave_out,
    "RemoteMonitor": _leave_out,
}


def restore_training(original: Callable[..., None], callback: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``on_train_begin`` of BackupAndRestore: all ranks restore the first rank's backup."""
    if (fit := elastic_fit.find_current()) is not None and fit.taken_up is not None:
        return  # it goes on where the others are
    wait_for_first_rank("the backup of an earlier training")
    original(callback, *args, **kwargs)


def init_training_state(original: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the constructor of the state that tf_keras backs up: other ranks write to an unused place."""
    original(state, *args, **kwargs)
    context = find_running()
    if context is not None and context.rank != 0:
        state._whale_folder = tempfile.TemporaryDirectory()
        manager = state.read_checkpoint_manager
        state.write_checkpoint_manager = tf.train.CheckpointManager(manager.checkpoint, state._whale_folder.name, 1)


def _set(callback: Any, attribute: str, value: Any, stack: ExitStack) -> None:
    """Sets an attribute of the callback until ``stack`` is closed."""
    own = vars(callback)
    if attribute in own:
        stack.callback(setattr, callback, attribute, own[attribute])
    else:
        stack.callback(delattr, callback, attribute)
    setattr(callback, attribute, value)
