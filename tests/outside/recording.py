"""Hooks in Keras and TensorFlow that note what a program computes: losses, metrics, results of steps, weights, seconds.

Installed before the program is imported, plain or under Whale: what is noted has the same names in both.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function as TracedFunction

_LARGEST = 1 << 16  # elements of a result that are kept; of larger ones, their sums in so many blocks
_MOST_CALLS = 60  # of a step that are noted
_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class Recording:
    """The values that a program has computed so far.

    Attributes:
      values: by name, in the order in which they came.
      first_s: seconds of processor time of the first call of each step; first_wall_s: by the clock.
    """

    def __init__(self, units: float = 0.0) -> None:
        """
        Args:
          units: in the last place by which each weight is moved before the first step that finds it: what that changes
            is rounding.
        """
        self._units = units
        self._moved: set[int] = set()  # the variables that have been moved by them
        self.values: dict[str, np.ndarray[Any, Any]] = {}
        self.first_s, self.first_wall_s = 0.0, 0.0
        self._calls: Counter[str] = Counter()
        self._owners: list[Any] = []
        self._bases: tuple[type, ...] = ()  # of Keras, which makes such objects to see what attributes all have
        self._seen: dict[int, Any] = {}  # steps that have been called
        self._inside = 0  # of calls that are noted themselves
        self._timed = False

    def watch_steps(self, of_whale: type | None) -> None:
        """Notes what steps return that Python calls: of tf.function, and of wh.function."""
        _wrap(TracedFunction, "__call__", self._step)
        if of_whale is not None:
            _wrap(of_whale, "_take", self._step)

    def watch_keras(self, keras: ModuleType) -> None:
        """Notes what methods of models return, and which layers and optimizers there are."""
        for name in _METHODS:
            _wrap(keras.Model, name, functools.partial(self._method, name))
        self._bases = (keras.layers.Layer, keras.optimizers.Optimizer)
        for owner in self._bases:
            _wrap(owner, "__init__", self._owner)

    def watch_modules(self) -> None:
        """Notes which modules of TensorFlow there are."""
        _wrap(tf.Module, "__init__", self._owner)

    def note_weights(self, variables: Mapping[str, Any]) -> None:
        """Notes the weights of all layers, optimizers and modules, and the variables among a program's globals."""
        known: set[int] = set()
        found = [(type(owner).__name__, self._list_variables(owner)) for owner in self._owners]
        found += [(name, [value]) for name, value in variables.items() if isinstance(value, tf.Variable)]
        for name, owned in found:
            for variable in owned:
                if id(variable) not in known:
                    known.add(id(variable))
                    self._note(f"weight {len(known)} ({name})", np.asarray(variable))

    def _list_variables(self, owner: Any) -> list[Any]:
        for name in ("weights", "variables"):
            try:
                listed = getattr(owner, name, None)
            except ValueError:  # a model of Keras 2 that was never called
                return []
            if listed is not None:
                return list(listed() if callable(listed) else listed)
        return []

    def _owner(self, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> None:
        # Saving makes such objects, and only the first rank saves.
        is_base = type(owner) in self._bases
        if tf.executing_eagerly() and not is_base and not any(owner is one for one in self._owners[-8:]):
            self._owners.append(owner)
        original(owner, *args, **kwargs)

    def _method(self, name: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        with self._enter() as outermost:
            result = original(model, *args, **kwargs)
        if outermost:
            self._note_call(name, getattr(result, "history", result))
        return result

    def _step(self, original: Callable[..., Any], step: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return original(step, *args, **kwargs)
        first = id(step) not in self._seen and not self._timed
        self._seen.setdefault(id(step), step)
        if first:
            self._timed, begin_s, begin_wall_s = True, time.process_time(), time.perf_counter()
        try:
            with self._enter() as outermost:
                result = original(step, *args, **kwargs)
        finally:
            if first:
                self._timed = False
                self.first_s += time.process_time() - begin_s
                self.first_wall_s += time.perf_counter() - begin_wall_s
        if outermost and not is_of_whale(step):
            self._note_call(_name_step(step), result)
        return result

    @contextmanager
    def _enter(self) -> Iterator[bool]:
        if self._units and not self._inside:
            self._perturb()
        self._inside += 1
        try:
            yield self._inside == 1
        finally:
            self._inside -= 1

    def _perturb(self) -> None:
        """Moves the weights that there are by some units in the last place, each once."""
        draw = np.random.default_rng(len(self._moved))
        for variable in [one for owner in self._owners for one in self._list_variables(owner)]:
            value = np.asarray(variable)
            if value.dtype.kind == "f" and id(variable) not in self._moved:
                self._moved.add(id(variable))
                unit = self._units * np.finfo(value.dtype).eps
                variable.assign((value * (1 + unit * draw.choice([-1, 1], value.shape))).astype(value.dtype))

    def _note_call(self, name: str, result: Any) -> None:
        self._calls[name] += 1
        if self._calls[name] > _MOST_CALLS:
            return
        for i, leaf in enumerate(tf.nest.flatten(result, expand_composites=True)):
            try:
                self._note(f"{name} {self._calls[name]} [{i}]", np.asarray(leaf))
            except (TypeError, ValueError, NotImplementedError, tf.errors.OpError):
                continue  # a resource, an object

    def _note(self, name: str, value: np.ndarray[Any, Any]) -> None:
        if value.dtype.kind not in "biufc" and str(value.dtype) != "bfloat16":
            return
        value = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
        if value.size > _LARGEST:
            value = np.array([part.sum() for part in np.array_split(value.reshape(-1), _LARGEST)])
        self.values[name] = value


def is_of_whale(step: Any) -> bool:
    """Tells whether a step is none of the program's: Whale makes gradients of steps, and what it measures, as steps."""
    return str(getattr(getattr(step, "_python_function", None), "__module__", "")).startswith("whale.")


def _name_step(step: Any) -> str:
    """Returns the name of the Python function of a step, which is a method's own where it is bound."""
    function = getattr(step, "_python_function", step)
    return str(getattr(getattr(function, "func", function), "__name__", "step"))


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Puts ``around(original, self, ...)`` in a method's place; what is inherited is looked up at each call."""
    own = owner.__dict__.get(name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = own if own is not None else getattr(super(owner, type(self)), name)
        return around(original, self, *args, **kwargs)

    found = own if own is not None else getattr(owner, name)
    replaced: Any = functools.wraps(found)(wrapped)
    replaced.__signature__ = inspect.signature(found)  # Keras 3 asks what a layer is made of
    setattr(owner, name, replaced)
