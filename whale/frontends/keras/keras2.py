"""Patches Keras 2 and tf_keras so that models run their steps over the ranks, and read this rank's rows."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from whale.frontends.keras import fit_calls, input_pipeline, saving
from whale.frontends.keras.fit_calls import note_step
from whale.frontends.keras.input_pipeline import common_seed
from whale.frontends.keras.patches import replace_function, replace_method
from whale.frontends.keras.steps import (
    BatchStep,
    call_layer,
    find_new_run,
    forget_ended,
    init_layer,
    mark_for_run,
)
from whale.runtime.context import find_running
from whale.runtime.input.traces import once_in_a_trace


def patch_keras2(package: str) -> None:
    """Replaces methods of the package ``keras`` (version 2) or ``tf_keras`` by the functions of this module."""
    training = importlib.import_module(f"{package}.src.engine.training")
    layer = importlib.import_module(f"{package}.src.engine.base_layer").Layer
    data_adapter = importlib.import_module(f"{package}.src.engine.data_adapter")
    saving_api = importlib.import_module(f"{package}.src.saving.saving_api")
    backup = importlib.import_module(f"{package}.src.callbacks").BackupAndRestore
    state = importlib.import_module(f"{package}.src.distribute.worker_training_state").WorkerTrainingState
    io_utils = importlib.import_module(f"{package}.src.utils.io_utils")
    generator = importlib.import_module(f"{package}.src.backend").RandomGenerator
    model = training.Model
    for what in ("train", "test", "predict"):
        name = f"{what}_function"
        make = functools.partial(_make_function, what, training.concat)
        replace_method(model, f"make_{name}", make, functools.partial(forget_ended, name=name))
    replace_method(data_adapter.DataHandler, "__init__", _begin_epochs)
    replace_method(data_adapter.DataHandler, "_configure_dataset_and_inferred_steps", _configure_dataset)
    replace_method(layer, "__init__", init_layer)
    replace_method(layer, "__call__", call_layer)
    replace_method(generator, "make_legacy_seed", _make_legacy_seed)
    for name in ("fit", "evaluate", "predict"):
        replace_method(model, name, fit_calls.call_method)
    replace_function(io_utils, "print_msg", fit_calls.print_once)
    replace_method(model, "summary", fit_calls.print_once)
    replace_method(backup, "on_train_begin", fit_calls.restore_training)
    replace_method(state, "__init__", fit_calls.init_training_state)
    for name in ("save", "save_weights", "export"):
        replace_method(model, name, saving.save)
    replace_function(saving_api, "save_model", saving.save)
    replace_method(model, "load_weights", saving.load)
    replace_function(saving_api, "load_model", saving.load_model)


def _make_function(
    what: str, concat: Callable[..., Any], original: Callable[..., Any], model: Any, force: bool = False
) -> Any:
    """Replaces ``make_train_function``, ``make_test_function`` and ``make_predict_function``.

    Args:
      what: "train", "test" or "predict".
      concat: Keras' function that concatenates the predictions of several batches.
      original: Keras' own method, which is not called.
      model: the model.
      force: whether to create the function even if the model has a valid one.

    Returns:
      The function, which runs one batch (or ``steps_per_execution`` batches) of an iterator on all ranks. It also
      becomes the model's ``train_function`` (``test_function``, ``predict_function``).
    """
    name = f"{what}_function"
    context = find_new_run(model, name, getattr(model, name), force)
    if context is None:
        return getattr(model, name)
    counter = getattr(model, f"_{what}_counter")
    one_step = getattr(model, f"{what}_step")

    def run_counted(batch: Any) -> Any:
        outputs = one_step(batch)
        counter.assign_add(1)
        return outputs

    step = BatchStep(f"{what}_step", run_counted, bool(model.jit_compile), autograph=True)

    def join_outputs(one: Any, other: Any) -> Any:
        return tf.nest.map_structure(lambda a, b: concat([a, b]), one, other)

    def function(iterator: Iterator[Any]) -> Any:
        """Runs the next batch, or ``steps_per_execution`` batches; returns all predictions, or the last batch's
        metrics.
        """
        steps = model._steps_per_execution
        found: list[Any] = []
        for i, batch in enumerate(itertools.islice(iterator, 1 if steps is None else int(steps.numpy().item()))):
            if what == "train":
                note_step()
            trace = step.trace(
                iterator if hasattr(iterator, "element_spec") else batch, int(what == "predict" and i > 0)
            )
            outputs = step(batch, trace=trace)
            found = [*found, outputs] if what == "predict" else [outputs]
        if not found:
            raise StopIteration
        return functools.reduce(join_outputs, found)

    if what == "train":
        model.train_tf_function = function
    setattr(model, name, mark_for_run(function, context))
    return function


def _make_legacy_seed(original: Callable[[Any], Any], generator: Any) -> Any:
    """Replaces ``RandomGenerator.make_legacy_seed`` (``original``), so that a step that Whale traces again gets the
    seeds of its first trace.
    """
    return once_in_a_trace(functools.partial(original, generator))


def _begin_epochs(original: Callable[..., None], handler: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces DataHandler's constructor (``original``), so that shuffles without a seed are equal on all ranks."""
    with common_seed():
        original(handler, *args, **kwargs)


def _configure_dataset(original: Callable[..., Any], handler: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the DataHandler method that prepares the dataset (``original``): the dataset then yields only this
    rank's rows.

    If Keras passes ``distribute=False``, the dataset stays whole: a preprocessing layer adapts to all rows on every
    rank.
    """
    original(handler, *args, **kwargs)
    context = find_running()
    assert context is not None
    if kwargs.get("distribute", args[4] if len(args) > 4 else True):
        of_script = type(handler._adapter).__name__ == "DatasetAdapter"
        handler._dataset = input_pipeline.feed_dataset(handler._dataset, context, of_script)
