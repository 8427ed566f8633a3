"""Saves and loads Keras models in a run: all ranks take part, and rank 0 writes whole values, also of sharded
variables.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from whale.distributed.collective_call_check import call_together
from whale.distributed.ranks import WRITE_TIMEOUT_S
from whale.distributed.script_line import find_script_line
from whale.frontends.keras.first_rank_paths import find_first_path, link_written, pair_paths
from whale.runtime.checkpoint.export import is_exporting, take_first_random_state
from whale.runtime.checkpoint.gathering import describe_unreadable, gather_on_first_rank
from whale.runtime.compile.step import captures_steps
from whale.runtime.context import find_running
from whale.runtime.files import normalize_path

# The model that is being saved: the functions of one format call those of another.
_saving: contextvars.ContextVar[Any] = contextvars.ContextVar("saving", default=None)


def save(original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces Keras' functions that write a model or its weights; collective.

    On rank 0 calls ``original``, the function that it replaces, with whole values of all variables; other ranks return
    None.
    """
    context = find_running()
    assert context is not None
    if _saving.get() is model or is_exporting.get():
        return original(model, filepath, *args, **kwargs)
    variables = _list_variables(model)
    if why := describe_unreadable(variables):
        call_together(context, original.__name__, describe_call(original.__name__, model), why)
    token = _saving.set(model)
    try:
        with gather_on_first_rank(variables, context), captures_steps(nested=True):
            context.written[normalize_path(filepath)] = None
            try:
                return original(model, filepath, *args, **kwargs) if context.rank == 0 else None
            finally:
                take_first_random_state(context, f"{original.__name__} of the model {model.name!r} on rank 0")
    finally:
        _saving.reset(token)


def load(original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces Keras' functions that read weights into a model (``original``); waits until rank 0 has written them."""
    with reading(filepath) as found:
        return original(model, found, *args, **kwargs)


def load_model(original: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces Keras' functions that read a model (``original``); waits until rank 0 has written it."""
    with reading(filepath) as found:
        return original(found, *args, **kwargs)


@contextmanager
def reading(filepath: Any) -> Iterator[Any]:
    """Waits as ``find_written`` does, and gives the path to read. Where ranks have waited, none goes on before all have
    read: the script may remove the files next, as rank 0 does where it leaves a TemporaryDirectory.
    """
    context = find_running()
    key = normalize_path(filepath) if isinstance(filepath, (str, os.PathLike)) else None
    together = context is not None and (key in context.written or key in context.unread)
    found = find_written(filepath)
    try:
        yield found
    finally:
        if together:
            assert context is not None and key is not None
            context.unread.pop(key, None)
            if context.has_other_processes:
                what = f"the other ranks' reading of {key}, which rank 0 wrote"
                context.comms[0].allgather_bytes("whale/keras/read", b"", WRITE_TIMEOUT_S, what)


def find_written(filepath: Any) -> Any:
    """Waits until rank 0 has written ``filepath``, if this run has saved there and has not waited since.

    Returns:
      The path to read: rank 0's path if it differs from ``filepath``.

    Raises:
      CheckpointError: rank 0 wrote to a path that does not exist on this host.
    """
    context = find_running()
    if context is None or not isinstance(filepath, (str, os.PathLike)):
        return filepath
    key = normalize_path(filepath)
    if key in context.written:
        wait_for_first_rank(f"reading {key}, which rank 0 wrote")
    found = find_first_path(key, context)
    return filepath if found == key else found


def wait_for_first_rank(what: str) -> None:
    """Waits until rank 0 has finished writing; collective.

    Args:
      what: what the ranks wait for, for the error if another rank does not come.
    """
    context = find_running()
    assert context is not None
    mine = [("save", path) for path in context.written]
    context.written.clear()
    if context.has_other_processes:
        data = msgspec.json.encode(mine)
        said = context.comms[0].allgather_bytes("whale/keras/written", data, WRITE_TIMEOUT_S, what)
        everyone = [msgspec.json.decode(one, type=list[tuple[str, str]]) for one in said]
        link_written(pair_paths(everyone, context).items())


def describe_call(function: str, model: Any) -> str:
    """Returns text for messages: "`fit` of the model 'sequential' at train.py:12"."""
    line = find_script_line()
    return f"`{function}` of the model {model.name!r}" + (f" at {line}" if line else "")


def _list_variables(model: Any) -> list[Any]:
    """Returns the variables of a model and of its optimizer."""
    found = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        of_optimizer = optimizer.variables
        found += of_optimizer() if callable(of_optimizer) else of_optimizer
    return [getattr(v, "_variable", v) for v in found]  # tf_keras wraps those of mixed precision once more
