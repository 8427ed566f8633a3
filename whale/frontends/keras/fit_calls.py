"""Runs ``call_fit``, ``evaluate`` and ``predict`` over the ranks: only one shows progress and writes callbacks'
files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from whale.distributed.collective_call_check import call_together
from whale.frontends.keras import elastic_fit, first_rank_paths, input_pipeline
from whale.frontends.keras.callbacks import adapt_for_other_ranks
from whale.frontends.keras.fit_progress import describe_place, follow_fit
from whale.frontends.keras.saving import describe_call, wait_for_first_rank
from whale.runtime.context import Context, find_running

_DATA = ("x", "validation_data")
_CACHED = "_use_cached_eval_dataset"  # argument of evaluate where fit calls it


def call_method(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs ``call_fit``, ``evaluate`` or ``predict`` of a model in a run."""
    context = find_running()
    assert context is not None
    given = inspect.signature(original).bind(model, *args, **kwargs)
    finish = _begin_together(original, given, context)
    # A callback evaluates data beside those of fit; validation data have an order that fit keeps count of.
    if (around := elastic_fit.find_current()) is not None and _CACHED not in given.arguments.get("kwargs", {}):
        around.read_beside(input_pipeline.find_whole_dataset(given.arguments.get("x")), context)
    with elastic_fit.enter(None):
        found = _call_original(original, given, context)
    finish()
    return found


def call_fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs ``fit`` of a Keras for which processes may join the run."""
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
    """Begins a call on all ranks, whose callbacks may write to paths of each rank's own; collective.

    Returns:
      what ends the call.
    """
    # The evaluation inside of fit gets fit's callbacks, of which other ranks' write nowhere by now.
    callbacks = None if _CACHED in given.arguments.get("kwargs", {}) else given.arguments.get("callbacks")
    name = original.__name__
    paths = first_rank_paths.find_paths(callbacks)
    everyone = call_together(context, name, describe_call(name, given.args[0]) + describe_place(), own=paths)
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
            stack.enter_context(follow_fit(describe_call("fit", given.args[0]), context))
        if is_first(context) and context.planning.dry is None:
            return original(*given.args, **given.kwargs)
        given.arguments["verbose"] = 0
        callbacks = stack.enter_context(adapt_for_other_ranks(given.arguments.get("callbacks")))
        if callbacks is not None:
            given.arguments["callbacks"] = callbacks
        return original(*given.args, **given.kwargs)


def print_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Replaces ``print_msg`` and ``summary``: only the first rank prints Keras' messages."""
    context = find_running()
    if context is None or kwargs.get("print_fn") is not None or (is_first(context) and context.planning.dry is None):
        original(*args, **kwargs)


def is_first(context: Context) -> bool:
    """Tells whether this process shows progress and writes files."""
    return context.rank == 0
