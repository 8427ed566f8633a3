"""Saves and loads models in a run: all ranks take part, and the first writes whole values, also of sharded
variables.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
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
    """Replaces the methods that write a model or its weights to ``filepath``."""
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
    """Replaces what reads weights into a model: it runs after the first rank has written them."""
    return original(model, find_written(filepath), *args, **kwargs)


def load_model(original: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces what reads a model: it runs after the first rank has written it."""
    return original(find_written(filepath), *args, **kwargs)


def find_written(filepath: Any) -> Any:
    """Waits for the first rank, if this run has saved to ``filepath`` and no rank has waited since.

    Returns:
      the path to read: the first rank's, where that is another one.

    Raises:
      CheckpointError: the first rank wrote to a path that this host does not see.
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
    """Waits until the first rank has finished writing; collective.

    Args:
      what: what the ranks wait for, for the message if a rank does not arrive.
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
    """Describes a call of a model's function in words."""
    line = find_script_line()
    return f"`{function}` of the model {model.name!r}" + (f" at {line}" if line else "")


def _list_variables(model: Any) -> list[Any]:
    """Returns the variables of a model and its optimizer, or wrappers of them."""
    found = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        of_optimizer = optimizer.variables
        found += of_optimizer() if callable(of_optimizer) else of_optimizer
    return [getattr(v, "_variable", v) for v in found]  # tf_keras wraps those of mixed precision once more
