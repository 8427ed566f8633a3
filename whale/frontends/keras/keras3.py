"""Patches Keras 3 so that models run their steps over the ranks, and read this rank's rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from whale.frontends.keras import distribution, elastic_fit, fit_calls, input_pipeline, saving, steps
from whale.frontends.keras.fit_calls import note_step
from whale.frontends.keras.input_pipeline import common_seed
from whale.frontends.keras.patches import replace_function, replace_method
from whale.frontends.keras.steps import BatchStep, find_new_run, forget_ended, mark_for_run, rows_unknown
from whale.runtime.context import find_running


def patch_keras3() -> None:
    """Replaces methods of Keras 3 by the functions of this module."""
    from keras.src.backend.tensorflow import core, trainer
    from keras.src.backend.tensorflow import distribution_lib as backend
    from keras.src.backend.tensorflow.core import Variable
    from keras.src.callbacks.backup_and_restore import BackupAndRestore
    from keras.src.distribution import distribution_lib as frontend
    from keras.src.layers.layer import Layer
    from keras.src.models.model import Model
    from keras.src.ops.operation import Operation
    from keras.src.saving import saving_api
    from keras.src.trainers.compile_utils import CompileLoss
    from keras.src.utils import io_utils

    distribution.patch_backend(frontend, backend, Variable)
    models = trainer.TensorFlowTrainer
    for what in ("train", "test", "predict"):
        name = f"{what}_function"
        make: Callable[..., Any] = functools.partial(_make_function, what)
        if what == "predict":
            make = functools.partial(_make_predict_function, trainer.concat)
        replace_method(models, f"make_{name}", make, functools.partial(forget_ended, name=name))
    replace_method(trainer.TFEpochIterator, "__init__", _begin_epochs)
    replace_method(trainer.TFEpochIterator, "_get_iterator", _get_iterator)
    replace_method(trainer.TFEpochIterator, "_enumerate_iterator", _iterate_steps)
    replace_method(models, "fit", fit_calls.call_fit)
    for name in ("evaluate", "predict"):
        replace_method(models, name, fit_calls.call_method)
    replace_method(Operation, "__init__", steps.init_layer)
    for kind in (Operation, Layer):
        replace_method(kind, "__call__", steps.call_layer)
    replace_method(core.name_scope, "__enter__", steps.enter_name_scope)
    replace_method(CompileLoss, "call", _compile_loss)
    replace_function(io_utils, "print_msg", fit_calls.print_once)
    replace_method(Model, "summary", fit_calls.print_once)
    replace_method(BackupAndRestore, "on_train_begin", fit_calls.restore_training)
    replace_method(Model, "export", saving.save)
    replace_function(saving_api, "save_model", saving.save)
    replace_function(saving_api, "save_weights", saving.save)
    replace_function(saving_api, "load_weights", saving.load)
    replace_function(saving_api, "load_model", saving.load_model)


def _make_function(what: str, original: Callable[..., Any], model: Any, force: bool = False) -> Any:
    """Replaces ``make_train_function`` and ``make_test_function``.

    Args:
      what: "train" or "test".
      original: Keras' own method, which is not called.
      model: the model.
      force: whether to create the function even if the model has a valid one.

    Returns:
      The function, which runs ``steps_per_execution`` batches of an iterator on all ranks. It also becomes the model's
      ``train_function`` (``test_function``).
    """
    name = f"{what}_function"
    context = find_new_run(model, name, getattr(model, name), force)
    if context is None:
        return getattr(model, name)
    step = BatchStep(f"{what}_step", getattr(model, f"{what}_step"), model.jit_compile, autograph=False)
    counts: dict[Hashable, tuple[int, int]] = {}  # trace of plain Keras -> steps of an execution, and unrolled ones

    def function(iterator: Iterator[Any]) -> Any:
        outputs, ended = None, True
        rows_vary = getattr(iterator, "rows_vary", False)
        count, slots = model.steps_per_execution, getattr(model, "unrolled_steps_per_execution", 1)
        # Plain Keras has them in its graph: what the script sets later holds for another trace.
        known = step.trace(iterator)[0] if hasattr(iterator, "element_spec") else None
        count, slots = counts.setdefault(known, (count, slots))
        if what == "train" and (fit := elastic_fit.find_current()) is not None:
            fit.commit(iterator)
        for i, batch in enumerate(itertools.islice(iterator, count)):
            if what == "train":
                note_step()
            trace = step.trace(iterator if hasattr(iterator, "element_spec") else batch, i % slots)
            outputs, ended = step(batch, rows_vary, trace), False
        if ended:
            raise StopIteration
        return outputs

    setattr(model, name, mark_for_run(function, context))
    return function


def _make_predict_function(concat: Callable[..., Any], original: Any, model: Any, force: bool = False) -> Any:
    context = find_new_run(model, "predict_function", model.predict_function, force)
    if context is None:
        return model.predict_function
    step = BatchStep("predict_step", model.predict_step, model.jit_compile, autograph=False)

    def function(batches: list[Any]) -> Any:
        outputs = step(batches[0], trace=step.trace(batches))
        for i, batch in enumerate(batches[1:], 1):
            more = step(batch, trace=step.trace(batches, i), goes_on=True)
            outputs = tf.nest.map_structure(lambda one, other: concat([one, other]), outputs, more)
        return outputs

    model.predict_function = mark_for_run(function, context)
    return function


def _compile_loss(
    original: Callable[..., Any], losses: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``CompileLoss.call`` (``original``), so that the metrics of single outputs' losses are averaged as in
    plain Keras.

    If plain Keras would not know the batch size when it traces, it averages these losses over batches, not over rows.
    """
    if not rows_unknown.get():
        return original(losses, y_true, y_pred, *args, **kwargs)

    def wrap_metrics() -> None:
        for metric in losses.metrics:
            metric.update_state = functools.partial(_update_without_rows, metric.update_state)

    def build(*given: Any) -> None:
        type(losses).build(losses, *given)
        wrap_metrics()

    if losses.built:
        wrap_metrics()
    else:  # Keras builds it once it has arranged the targets as the losses are
        losses.build = build
    try:
        return original(losses, y_true, y_pred, *args, **kwargs)
    finally:
        vars(losses).pop("build", None)
        for metric in losses.metrics:
            vars(metric).pop("update_state", None)


def _update_without_rows(update_state: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
    return update_state(values, sample_weight=None if isinstance(sample_weight, int) else sample_weight)


def _begin_epochs(original: Callable[..., None], epochs: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the constructor of Keras' epoch iterator (``original``), so that shuffles without a seed are equal on
    all ranks.
    """
    fit = elastic_fit.find_current()
    epochs._whale_fit = fit, "" if fit is None else fit.next_kind()
    with _use_common_seeds(epochs, "begun"), common_seed():
        original(epochs, *args, **kwargs)


def _use_common_seeds(epochs: Any, what: str, again: bool = False) -> AbstractContextManager[tuple[bool, bool]]:
    """Returns a context in which data are created with the seeds of the other ranks; see ``FitCall.use_common_seeds``.

    Args:
      epochs: Keras' epoch iterator.
      what: "begun" for data that its constructor creates, "read" for those that it creates when it is iterated over.
      again: whether the data were created before.
    """
    fit, kind = epochs._whale_fit
    return nullcontext((False, again)) if fit is None else fit.use_common_seeds(f"{kind}/{what}", again)


def _iterate_steps(original: Callable[[Any], Iterator[Any]], epochs: Any) -> Iterator[Any]:
    """Replaces the method of Keras' epoch iterator that yields steps (``original``): leaves out those that the other
    ranks took before this process joined the run.
    """
    fit, kind = epochs._whale_fit
    return fit.iterate_steps(epochs, original(epochs)) if kind == elastic_fit.TRAINING else original(epochs)


def _get_iterator(original: Callable[[Any], Any], epochs: Any) -> Any:
    """Replaces ``_get_iterator`` of Keras' epoch iterator (``original``): returns this rank's batches of an epoch.

    A dataset of the script's is prepared once for all epochs, so that its shuffle goes on to another order in each
    epoch.
    """
    context = find_running()
    assert context is not None
    known = getattr(epochs, "_whale_fed", None)
    again = known is not None and context.seeds is not None and _is_repeating_order(epochs.data_adapter)
    if known is not None and not again:
        return known
    fit, kind = epochs._whale_fit
    with _use_common_seeds(epochs, "read", again) as (agreed, remade):
        if remade:
            with common_seed():  # another one
                epochs._distributed_dataset = epochs.data_adapter.get_tf_dataset()
        of_script = type(epochs.data_adapter).__name__ == "TFDatasetAdapter"
        found = input_pipeline.feed_dataset(original(epochs), context, of_script, again, agreed)
    if fit is not None:
        fit.note_made(kind, found.batches, agreed)
    if kind == elastic_fit.TRAINING:
        found = replace(found, place=fit.begin_iteration)
    epochs._whale_fed = found
    return found


def _is_repeating_order(adapter: Any) -> bool:
    """Returns True if Keras would shuffle arrays in the same order in each epoch, because Whale has set the global
    seed.
    """
    shuffles = type(adapter).__name__ == "ArrayDataAdapter" and adapter._shuffle
    return bool(shuffles) and tf_context.global_seed() is None
