"""Turns the train, test and predict steps of a Keras model into ``wh.function`` steps, and layers into scopes.

When a step is traced, each layer runs in the Whale scope (``wh.stage``, ``wh.split``) in which the script created it,
or called it to build a functional model.

Decision: 0062.
"""

from __future__ import annotations

import contextvars
import inspect
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.data.ops.iterator_ops import IteratorSpec as _IteratorSpec
from tensorflow.python.framework import random_seed

from whale.capture.signature import list_named_leaves, make_distinct_names
from whale.errors import ProgramError
from whale.runtime.context import Context, find_running
from whale.runtime.function import Function
from whale.runtime.input.traces import Relaxed
from whale.runtime.scopes import enter_path, join_path
from whale.runtime.variables.deferred import capturing

# Whether the step that is traced would not know the rows of its batch in plain Keras. Losses of single outputs are then
# averaged over batches there, and not over rows.
rows_unknown: contextvars.ContextVar[bool] = contextvars.ContextVar("rows_unknown", default=False)
_SEEDS_OF_GRAPHS = random_seed._graph_to_seed_dict
_PARTS = ("x", "y", "sample_weight")
_PATH = "_whale_path"  # of a layer: the path of its scope


class BatchStep:
    """Runs a model's train, test or predict step on batches, as ``wh.function`` steps over all ranks.

    A ``wh.function`` is created for each structure of batches, and takes the batch's tensors as a flat list, since
    passing nested batches would cost more than calling the step.

    Args:
      name: name of the step in plans and messages.
      step: takes a batch, returns a structure of tensors.
      jit_compile: whether XLA compiles the step.
      autograph: whether AutoGraph converts the Python code of layers, as this version of Keras does. The code of Keras'
        own steps, and of overridden ones, is never converted.
    """

    def __init__(self, name: str, step: Callable[[Any], Any], jit_compile: bool, autograph: bool) -> None:
        self._name, self._step, self._jit, self._autograph = name, step, jit_compile, autograph
        self._made: list[tuple[Any, tuple[Any, ...], Function]] = []  # structure, (of the call, what is there), step
        self._traces = Relaxed()
        self._rows_vary: dict[Hashable, bool] = {}  # by trace
        self._seeds: dict[tuple[Hashable, int], int] = {}  # given to operations up to a slot's end
        self._latest: tuple[Any, Hashable] = (None, None)  # what iterators yield, and the trace for it

    def trace(self, batches: Any, slot: int = 0) -> tuple[Hashable, int]:
        """Finds out with which of its traces plain Keras would run these batches, so that random ops draw the same
        numbers as there.

        TensorFlow numbers the random ops without a seed within each trace, and derives their seeds from these numbers.
        With ``steps_per_execution`` above 1, one trace of plain Keras contains the step several times, with other
        numbers each time.

        Args:
          batches: the argument of Keras' function: an iterator with an ``element_spec``, or one or several batches.
          slot: index of the step within such a trace: 0 for its first batch, 1 for the second.

        Returns:
          (key of the trace, ``slot``), the argument ``trace`` of a call.
        """
        specs = getattr(batches, "element_spec", None)
        if specs is not None and specs is self._latest[0]:
            return self._latest[1], slot
        leaves = tf.nest.flatten(batches) if specs is None else [_IteratorSpec(specs)]
        tensors = [leaf for leaf in leaves if specs is not None or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))]
        self._latest = specs, self._traces.trace((specs is None, len(leaves)), tensors)
        return self._latest[1], slot

    def __call__(
        self, batch: Any, rows_vary: bool = False, trace: tuple[Hashable, int] | None = None, goes_on: bool = False
    ) -> Any:
        """Runs the step on a batch, and returns the step's result; collective.

        Args:
          batch: the batch, a structure of tensors or ShardedTensors.
          rows_vary: whether plain Keras would trace the step with an unknown batch size.
          trace: the result of the method ``trace``; None: random ops need not follow a trace of plain Keras.
          goes_on: whether, in plain Keras, the step with the slot before this one is in the same graph, so that the
            numbers of random ops continue from there.
        """
        leaves = [None if isinstance(leaf, tf.experimental.Optional) else leaf for leaf in tf.nest.flatten(batch)]
        present = tuple([leaf is not None for leaf in leaves])
        tensors = [leaf for leaf in leaves if leaf is not None]
        if trace is not None:  # it was made for the batches that came first
            rows_vary = self._rows_vary.setdefault(trace, rows_vary)
        kind = (rows_vary, present, trace)
        for structure, other, made in self._made:
            if other == kind and _has_same_structure(structure, batch):
                return made(*tensors)
        structure = tf.nest.pack_sequence_as(batch, present)
        self._made.append((structure, kind, self._make(structure, rows_vary, trace, goes_on)))
        return self._made[-1][2](*tensors)

    def _make(self, structure: Any, rows_vary: bool, trace: tuple[Hashable, int] | None, goes_on: bool) -> Function:
        step = self._step
        before = (trace[0], trace[1] - 1) if trace is not None and goes_on else None

        def run_on_tensors(*tensors: Any) -> Any:
            rest = iter(tensors)
            batch = tf.nest.map_structure(lambda present: next(rest) if present else None, structure)
            token, graph = rows_unknown.set(rows_vary), tf.compat.v1.get_default_graph()
            # TensorFlow counts the operations of a graph that have no seed, and gives each its number.
            if before is not None:
                _SEEDS_OF_GRAPHS[graph] = self._seeds[before]
            try:
                return step(batch)
            finally:
                rows_unknown.reset(token)
                if trace is not None:
                    self._seeds[trace] = _SEEDS_OF_GRAPHS.get(graph, 0)

        run_on_tensors.__name__ = self._name
        leave = autograph_artifact if self._autograph else tf.autograph.experimental.do_not_convert
        named = leave(run_on_tensors)
        kind = inspect.Parameter.POSITIONAL_ONLY
        names = make_distinct_names([name for name, present in list_named_parts(structure) if present])
        signed: Any = named
        signed.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        made = tf.function(named, jit_compile=True, autograph=self._autograph) if self._jit else named
        has_sizes = not rows_vary and (trace is None or trace[0] not in self._traces.without_sizes)
        return Function(made, one_trace=True, has_sizes=has_sizes)


def _has_same_structure(one: Any, other: Any) -> bool:
    try:
        tf.nest.assert_same_structure(one, other)
    except (TypeError, ValueError):
        return False
    return True


def list_named_parts(structure: Any) -> list[tuple[str, Any]]:
    """Returns (name, leaf) for each leaf of a batch, in the order of tf.nest.flatten.

    The names begin with "x", "y" and "sample_weight"; dict keys and positions follow: "x_image", "y_0".
    """
    parts = structure if isinstance(structure, tuple) and len(structure) <= len(_PARTS) else (structure,)
    return [leaf for name, part in zip(_PARTS, parts) for leaf in list_named_leaves(name, part)]


def find_new_run(model: Any, name: str, made_now: Any, force: bool) -> Context | None:
    """Returns the run for which a model's function has to be created; None if the present function is valid.

    Args:
      model: the model.
      name: "train_function", "test_function" or "predict_function".
      made_now: the model's present function of that name; None if it has none.
      force: whether to create it in any case.

    Raises:
      ProgramError: the model runs eagerly, or was created for a tf.distribute strategy.
    """
    context = find_running()
    assert context is not None
    if made_now is not None and not force and not _is_made_by_keras(made_now):
        made_for = getattr(made_now, "_whale_run", None)  # one that the user made serves every run
        if made_for is None or made_for() is context:  # None: made by the user
            return None
    if model.run_eagerly:
        raise ProgramError(
            "a model that runs eagerly cannot be distributed",
            op=f"{type(model).__name__}.{name}",
            given="run_eagerly=True, or tf.config.run_functions_eagerly(True)",
            expected="a step that TensorFlow traces to a graph, since Whale distributes graphs",
            action="compile the model without run_eagerly; to debug a step eagerly, run the script without wh.init()",
        )
    strategy = model.distribute_strategy
    if not type(strategy).__name__.startswith("_DefaultDistribution"):
        raise ProgramError(
            "a model was created in the scope of a tf.distribute strategy, and cannot be distributed by Whale as well",
            op=f"{type(model).__name__}.{name}",
            given=f"a model created under {type(strategy).__name__}",
            expected="a model created without a strategy, or under wh.Strategy()",
            action="use wh.Strategy() instead, or remove the strategy's scope",
        )
    return context


def mark_for_run(function: Any, context: Context) -> Any:
    """Marks ``function`` as distributed over the ranks of this run, and returns it."""
    function._whale_run = weakref.ref(context)
    return function


def forget_ended(model: Any, name: str) -> None:
    """Removes a model's function ``name`` if it belongs to a run that has ended, so that Keras creates it again."""
    if hasattr(getattr(model, name, None), "_whale_run"):
        setattr(model, name, None)


def _is_made_by_keras(made: Any) -> bool:
    """Returns True if Keras itself created the function, e.g. before ``wh.init``."""
    python = getattr(made, "_python_function", getattr(made, "python_function", made))
    return str(getattr(python, "__module__", "")).startswith(("keras.", "tf_keras."))


def init_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``Layer.__init__`` (``original``): records the scope (``wh.stage``, ``wh.split``) in which the layer is
    created.
    """
    _remember(layer, _find_running())
    original(layer, *args, **kwargs)


def call_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Layer.__call__`` (``original``): in a traced step, the layer runs in the scope that was recorded for
    it.
    """
    context = _find_running()
    if not capturing.get():
        _remember(layer, context)
        return original(layer, *args, **kwargs)
    path = getattr(layer, _PATH, None)
    if path is None:
        return original(layer, *args, **kwargs)
    with enter_path(join_path(context, path)):
        return original(layer, *args, **kwargs)


def enter_name_scope(original: Callable[..., Any], scope: Any) -> Any:
    """Replaces ``name_scope.__enter__`` of Keras 3 (``original``), so that operations have the same name scopes as
    variables.

    Keras enters most name scopes twice, and TensorFlow appends a number the second time. ``wh.annotate`` could then not
    tell the second scope of a layer `dense` from a layer `dense_1`.
    """
    if capturing.get() and _find_running().scoping.annotations:
        from keras.src.backend.common.name_scope import current_path

        scope._tf_name_scope = tf.name_scope("/".join(filter(None, (current_path(), scope.name))) + "/")
    return original(scope)


def _remember(layer: Any, context: Context) -> None:
    if context.scoping.scopes and getattr(layer, _PATH, None) is None and not capturing.get():
        object.__setattr__(layer, _PATH, context.scoping.scopes[-1])


def _find_running() -> Context:
    context = find_running()
    assert context is not None
    return context
