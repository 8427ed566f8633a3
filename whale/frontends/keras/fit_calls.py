"""Runs ``fit``, ``evaluate`` and ``predict`` on all ranks, while only rank 0 shows progress and writes callbacks'
files.

Callbacks run on all ranks, so that they decide alike (EarlyStopping). To read a sharded variable is collective, so a
callback that writes must not be skipped: on other ranks its files are redirected to a temporary place.

While ``fit`` runs, each rank records how far it is. If a rank leaves ``fit`` early, the error on the other ranks says
where they are, and a likely cause.
"""

from __future__ import annotations

import contextvars
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale.distributed.collective_call_check import call_together, tells_of_other_places
from whale.errors import CommError
from whale.frontends.keras import elastic_fit, first_rank_paths, input_pipeline
from whale.frontends.keras.first_rank_paths import list_kinds
from whale.frontends.keras.saving import describe_call, wait_for_first_rank
from whale.runtime.context import Context, find_running

_DATA = ("x", "validation_data")
_CACHED = "_use_cached_eval_dataset"  # argument of evaluate where fit calls it
_CAUSE = (
    "a callback that only one rank has, or that decides differently there (EarlyStopping, or stop_training set by "
    "the time or a file)"
)
_ACTION = "give every rank the same callbacks; put what only one rank is to do inside of a callback: if wh.rank() == 0"
_current: contextvars.ContextVar[FitProgress | None] = contextvars.ContextVar("_current", default=None)


def call_method(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``evaluate``, ``predict`` and ``fit`` of Keras models in a run: makes the call on all ranks.

    Args:
      original: Keras' own method.
      model: the model; the method's other arguments follow.
    """
    context = find_running()
    assert context is not None
    given = inspect.signature(original).bind(model, *args, **kwargs)
    finish = _begin_together(original, given, context)
    # A callback evaluates other data than fit's. (Of validation data, fit itself counts the iterations.)
    if (around := elastic_fit.find_current()) is not None and _CACHED not in given.arguments.get("kwargs", {}):
        around.read_beside(input_pipeline.find_whole_dataset(given.arguments.get("x")), context)
    with elastic_fit.enter(None):
        found = _call_original(original, given, context)
    finish()
    return found


def call_fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``fit`` of Keras 3 models in a run: makes the call on all ranks, and lets other processes join it if the
    run is elastic.

    Args:
      original: Keras' own method.
      model: the model; the method's other arguments follow.
    """
    context = find_running()
    assert context is not None
    given = inspect.signature(original).bind(model, *args, **kwargs)
    going_on = elastic_fit.begin(context, model, given.arguments)
    if going_on is None:
        return call_method(original, model, *args, **kwargs)
    if (history := going_on.find_past()) is not None:
        return history
    finish = _begin_together(original, given, context) if going_on.taken_up is None else None
    with elastic_fit.enter(going_on):
        history = _call_original(original, given, context)
    going_on.end()
    if finish is not None:
        finish()
    return history


def _begin_together(
    original: Callable[..., Any], given: inspect.BoundArguments, context: Context
) -> Callable[[], None]:
    """Checks that all ranks make the same call, and exchanges the paths to which their callbacks write; collective.

    Args:
      original: the Keras method that is called.
      given: its arguments.
      context: the run.

    Returns:
      A function to call at the end, which links rank 0's files into this rank's folders.
    """
    # The evaluation inside of fit gets fit's callbacks, which are redirected on other ranks already.
    callbacks = None if _CACHED in given.arguments.get("kwargs", {}) else given.arguments.get("callbacks")
    name = original.__name__
    paths = first_rank_paths.find_paths(callbacks)
    everyone = call_together(context, name, describe_call(name, given.args[0]) + _describe_place(), own=paths)
    pairs = first_rank_paths.pair_paths(everyone, context)
    first_rank_paths.move_backups(callbacks, pairs)

    def finish() -> None:
        if first_rank_paths.have_differed(everyone):
            wait_for_first_rank("what rank 0's callbacks wrote")
            first_rank_paths.link_written((path, pairs[path]) for _, path in paths if path in pairs)

    return finish


def _call_original(original: Callable[..., Any], given: inspect.BoundArguments, context: Context) -> Any:
    for name in _DATA:
        if name in given.arguments:
            given.arguments[name] = input_pipeline.find_whole_dataset(given.arguments[name])
    with ExitStack() as stack:
        if original.__name__ == "fit":
            stack.enter_context(_follow_fit(describe_call("fit", given.args[0]), context))
        if is_first(context) and context.planning.dry is None:
            return original(*given.args, **given.kwargs)
        given.arguments["verbose"] = 0
        callbacks = stack.enter_context(_adapt_for_other_ranks(given.arguments.get("callbacks")))
        if callbacks is not None:
            given.arguments["callbacks"] = callbacks
        return original(*given.args, **given.kwargs)


def print_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Replaces Keras' ``print_msg`` and ``Model.summary`` (``original``), so that only rank 0 prints."""
    context = find_running()
    if context is None or kwargs.get("print_fn") is not None or (is_first(context) and context.planning.dry is None):
        original(*args, **kwargs)


def is_first(context: Context) -> bool:
    """Returns True on rank 0, which shows progress and writes files."""
    return context.rank == 0


@dataclass
class FitProgress:
    """Records how far this rank is in a call of ``fit``.

    Attributes:
      call: text for messages, e.g. "`fit` of the model 'm' at train.py:12".
      steps: number of training steps that have begun.
    """

    call: str
    steps: int = 0


def note_step() -> None:
    """Counts a training step of the ``fit`` that this rank is in; called before each step."""
    progress = _current.get()
    if progress is not None:
        progress.steps += 1


def _describe_place() -> str:
    """Returns text such as ", inside of `fit` after 3 steps" for messages; "" outside of ``fit``."""
    progress = _current.get()
    return "" if progress is None else f", inside of `fit` after {_steps(progress.steps)}"


@contextmanager
def _follow_fit(call: str, context: Context) -> Iterator[None]:
    """Counts the steps of a call of ``fit``, and waits at its end until all ranks have left ``fit``; collective.

    Args:
      call: text for messages, see ``FitProgress.call``.

    Raises:
      CommError: another rank is still in ``fit``, or this rank is and another one is elsewhere.
    """
    if not context.has_other_processes or context.elastic is not None:
        yield  # in an elastic run ranks may leave and join at any step, so there is nothing to compare
        return
    progress = FitProgress(call)
    token = _current.set(progress)
    try:
        yield
    except CommError as error:
        if not tells_of_other_places(error):
            raise
        raise _make_apart_error(
            error, f"rank {context.rank} is still in {call}, at step {max(progress.steps, 1)}"
        ) from None
    finally:
        _current.reset(token)
    ended = f"the end of {call}, after {_steps(progress.steps)}"
    try:
        call_together(context, "the end of fit", ended, verb="come to")
    except CommError as error:
        if not tells_of_other_places(error):
            raise
        other = f"rank {1 - context.rank}" if context.size == 2 else "another rank"
        place = f"{other} is still in {call}, at step {progress.steps + 1}"
        raise _make_apart_error(error, place) from None


def _make_apart_error(error: CommError, place: str) -> CommError:
    """Returns the error for ranks that do not take the same steps of ``fit``.

    Args:
      error: the error that the exchange raised.
      place: text that says which rank is where.
    """
    return CommError(
        f"{place}, while another rank is elsewhere: maybe only one rank has a callback",
        given=error.message,
        **{"likely cause": _CAUSE},
        expected="all ranks take the same steps, and leave `fit` together",
        action=_ACTION,
    )


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


@contextmanager
def _adapt_for_other_ranks(callbacks: Any) -> Iterator[Any]:
    """Yields the callbacks for a rank other than 0, without those that only show progress, and restores them at the
    end.

    Args:
      callbacks: the argument of ``fit``: None, a callback, a list, or a CallbackList, which is not changed.
    """
    if callbacks is None or "CallbackList" in list_kinds(callbacks):
        yield callbacks
        return
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    with ExitStack() as stack:
        yield [c for c in given if _redirect(c, stack)]


def _redirect(callback: Any, stack: ExitStack) -> bool:
    """Makes a callback write its files to a temporary place until ``stack`` is closed, on ranks other than 0.

    Returns:
      False if this rank must not call the callback at all.
    """
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
    """Makes a BackupAndRestore restore rank 0's backup, and take part in the collective save without writing, until
    ``stack`` is closed.

    Returns:
      True: the callback is called on this rank.
    """
    path = getattr(callback, "_weights_path", None)
    if path is None:  # tf_keras writes with a checkpoint manager, which init_training_state has replaced
        return True
    _set(callback, "_save_model", lambda: callback.model.save_weights(path), stack)
    _set(callback, "delete_checkpoint", False, stack)
    return True


def restore_training(original: Callable[..., None], callback: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``BackupAndRestore.on_train_begin`` (``original``), so that all ranks wait for rank 0's backup and
    restore it.
    """
    if (fit := elastic_fit.find_current()) is not None and fit.taken_up is not None:
        return  # this process has joined the run, and continues where the other ranks are
    wait_for_first_rank("the backup of an earlier training")
    original(callback, *args, **kwargs)


def init_training_state(original: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the constructor of tf_keras' WorkerTrainingState (``original``), so that ranks other than 0 write their
    backups to a temporary folder.
    """
    original(state, *args, **kwargs)
    context = find_running()
    if context is not None and context.rank != 0:
        state._whale_folder = tempfile.TemporaryDirectory()
        manager = state.read_checkpoint_manager
        state.write_checkpoint_manager = tf.train.CheckpointManager(manager.checkpoint, state._whale_folder.name, 1)


def _set(callback: Any, attribute: str, value: Any, stack: ExitStack) -> None:
    """Sets an attribute of the callback, and restores it when ``stack`` is closed."""
    own = vars(callback)
    if attribute in own:
        stack.callback(setattr, callback, attribute, own[attribute])
    else:
        stack.callback(delattr, callback, attribute)
    setattr(callback, attribute, value)


_CHANGES: dict[str, Callable[[Any, ExitStack], bool]] = {
    "CSVLogger": _write_nowhere("filename"),
    "TensorBoard": _write_to_temporary_folder("log_dir"),
    "BackupAndRestore": _adapt_backup,
    "ProgbarLogger": _leave_out,
    "RemoteMonitor": _leave_out,
}
