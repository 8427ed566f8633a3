"""Implements ``wh.optimizers``: lazy optimizers, which update only the rows of a table that have a gradient.

A Keras optimizer with moments (Adam) updates every row of a table in every step: even without a gradient, moments
decay. ``lazy`` skips rows without a gradient. The result differs from the optimizer's own (except for SGD without
momentum and for Adagrad, for which such rows do not change), so a script has to ask for it. The result is the same on
one device and on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.layers.vocabulary import find_tensor, write
from whale.runtime.variables.in_files import find_folder, keep_in_files


class _Rows:
    """Stands for some rows of a variable where a Keras optimizer expects a variable: reads and assigns these rows only.

    Args:
      variable: a Keras or TensorFlow variable.
      ids: indices of the rows, [n].
    """

    def __init__(self, variable: Any, ids: tf.Tensor) -> None:
        self.variable = find_tensor(variable)
        self.ids = ids
        self.read = self.now = tf.gather(self.variable, ids)
        self.dtype = variable.dtype
        self.shape = self.now.shape

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self.now if dtype is None else tf.cast(self.now, dtype)

    def begin_anew(self, fresh: tf.Tensor, first: float) -> None:
        """Resets rows of an optimizer's state whose slots (of a dynamic table) have got new ids.

        Args:
          fresh: bool [n]: which of the rows to reset.
          first: the initial value of this state.
        """
        for _ in self.now.shape[1:]:
            fresh = tf.expand_dims(fresh, -1)
        self.now = tf.where(fresh, tf.constant(first, self.now.dtype), self.now)

    def write(self) -> None:
        """Writes the rows into the variable, if they were assigned to."""
        if self.now is not self.read:
            write(self.variable, self.ids, self.now)


class _RowOptimizer:
    """Stands for an optimizer in a call of its ``update_step``, with the variable and its state replaced by some rows.

    State that has the variable's shape, or its number of rows, is replaced; other state is the optimizer's own. For a
    dynamic table (``wh.layers.Embedding``), the state of slots with a new id is reset to its initial value.

    Args:
      optimizer: the Keras optimizer.
      index: index of the variable in the optimizer.
      variable: the table.
      ids: indices of the rows, [n].
      firsts: initial value of each kind of state, by the name of the optimizer's attribute that lists it.
    """

    def __init__(self, optimizer: Any, index: int, variable: Any, ids: tf.Tensor, firsts: Mapping[str, float]) -> None:
        self._firsts = firsts
        self._of, self._index, self._ids = optimizer, index, ids
        self._shape = tuple(variable.shape)
        self._seen: dict[int, _Rows] = {}
        self._fresh = _find_fresh(variable)
        if self._fresh is not None:
            self._is_fresh = tf.gather(find_tensor(self._fresh), ids) > 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        if isinstance(value, list) and len(value) > self._index and self._has_rows(value[self._index]):
            state = value[self._index]
            seen = id(state) in self._seen
            rows = self.find_rows(state)
            if self._fresh is not None and not seen:
                rows.begin_anew(self._is_fresh, self._firsts[name])
            return {self._index: rows}
        return value

    def find_rows(self, variable: Any) -> _Rows:
        """Returns the rows ``ids`` of a variable; they are read once per step."""
        if id(variable) not in self._seen:
            self._seen[id(variable)] = _Rows(variable, self._ids)
        return self._seen[id(variable)]

    def _has_rows(self, state: Any) -> bool:
        shape = tuple(getattr(state, "shape", None) or ())
        return shape in (self._shape, self._shape[:1]) and hasattr(state, "assign")

    def _get_variable_index(self, variable: Any) -> int:
        return self._index

    def assign(self, variable: Any, value: Any) -> None:
        """Assigns ``value`` to rows, or to a variable that was not replaced."""
        if isinstance(variable, _Rows):
            variable.now = tf.cast(value, variable.now.dtype)
        else:
            self._of.assign(variable, value)

    def assign_add(self, variable: Any, value: Any) -> None:
        """Adds ``value`` to rows, or to a variable that was not replaced."""
        if isinstance(variable, _Rows):
            variable.now += tf.cast(value, variable.now.dtype)
        else:
            self._of.assign_add(variable, value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Subtracts ``value`` from rows, or from a variable that was not replaced."""
        if isinstance(variable, _Rows):
            variable.now -= tf.cast(value, variable.now.dtype)
        else:
            self._of.assign_sub(variable, value)

    def write(self) -> None:
        """Writes all rows that were assigned to into their variables, and marks the slots as no longer new."""
        for rows in self._seen.values():
            rows.write()
        if self._fresh is not None:
            write(self._fresh, self._ids, tf.zeros_like(self._ids, tf.int32))


def _find_fresh(variable: Any) -> Any:
    """Returns the int32 variable [slots + 1] that is 1 for slots with a new id; None if the table is not dynamic."""
    return getattr(find_tensor(variable), "_whale_fresh", None)


def _find_first_state(optimizer: Any) -> dict[str, float]:
    """Returns the initial value of each kind of state, by attribute name, read from a new optimizer with the same
    settings.
    """
    with tf.init_scope():
        like = type(optimizer).from_config(optimizer.get_config())
        type(optimizer).build(like, [tf.Variable([[0.0]])])
        made = {name: state for name, state in vars(like).items() if isinstance(state, list) and len(state) == 1}
        return {
            name: float(tf.reduce_sum(find_tensor(state)))
            for name, (state,) in made.items()
            if hasattr(state, "assign")
        }


def _require_keras_3(kind: type) -> None:
    if not (hasattr(kind, "update_step") and hasattr(kind, "_get_variable_index") and hasattr(kind, "assign_sub")):
        raise ProgramError(
            "only optimizers of Keras 3 can be made lazy",
            given=f"{kind.__module__}.{kind.__name__}",
            expected="an optimizer of Keras 3, such as keras.optimizers.Adam()",
            action="use Keras 3 (TensorFlow 2.16 or newer), or remove wh.optimizers.lazy or RowWiseAdagrad",
        )


def lazy(optimizer: Any) -> Any:
    """Makes a Keras 3 optimizer update only the rows that have a gradient, and returns it.

    This applies to variables whose gradient is a ``tf.IndexedSlices``, such as embeddings. The gradient's rows with the
    same id are summed, and the optimizer's own update is done with these rows of the variable and of its state. Other
    variables are updated as usual. An optimizer that was loaded from a file has to be made lazy again.

    Raises:
      ProgramError: the optimizer is not one of Keras 3, or has weight decay, EMA or gradient accumulation, which change
        every row in each step.
    """
    _require_keras_3(type(optimizer))
    for name in ("weight_decay", "use_ema", "gradient_accumulation_steps"):
        if getattr(optimizer, name, None):
            raise ProgramError(
                "an optimizer that changes every row in each step cannot be lazy",
                given=f"{name}={getattr(optimizer, name)}",
                expected=f"an optimizer without {name}",
                action=f"leave {name} out, or remove wh.optimizers.lazy",
            )

    whole, build = optimizer.update_step, optimizer.build
    firsts: dict[str, float] = {}

    def build_rows(variables: Sequence[Any]) -> None:
        build(variables)
        for i, variable in enumerate(variables):
            folder = find_folder(find_tensor(variable))
            for states in vars(optimizer).values() if folder else ():
                if isinstance(states, list) and len(states) > i and states is not optimizer._trainable_variables:
                    if getattr(states[i], "shape", None) == variable.shape and hasattr(states[i], "assign"):
                        keep_in_files(find_tensor(states[i]), folder)
        if not firsts and any(_find_fresh(v) is not None for v in variables):
            firsts.update(_find_first_state(optimizer))

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            whole(gradient, variable, learning_rate)
            return
        ids, back = tf.unique(tf.reshape(gradient.indices, [-1]))
        values = tf.reshape(gradient.values, [-1, *variable.shape[1:]])
        sums = tf.math.unsorted_segment_sum(values, back, tf.size(ids))
        on_rows = _RowOptimizer(optimizer, optimizer._get_variable_index(variable), variable, ids, firsts)
        type(optimizer).update_step(on_rows, sums, on_rows.find_rows(variable), learning_rate)
        on_rows.write()

    optimizer.update_step, optimizer.build = update_step, build_rows
    if optimizer.built:
        build_rows(optimizer._trainable_variables)
    return optimizer


class RowWiseAdagrad(tf.keras.optimizers.Optimizer):  # type: ignore[misc]
    """Implements Adagrad with one sum of squares per row, lazily: rows without a gradient do not change.

    The sum is that of the mean square of the row's gradient, so the state of a table is one column. Source: Gupta et
    al., "Training recommender models with row-wise AdaGrad", as in FBGEMM and TorchRec.

    Args:
      learning_rate: a number or a schedule.
      initial: initial value of the sums.
      epsilon: added to the square root of a sum.

    Raises:
      ProgramError: Keras is not Keras 3.
    """

    def __init__(self, learning_rate: Any = 0.01, initial: float = 0.0, epsilon: float = 1e-8, **more: Any) -> None:
        _require_keras_3(type(self))
        super().__init__(learning_rate=learning_rate, **more)
        self.initial, self.epsilon = initial, epsilon
        lazy(self)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the sums of squares, [rows], for each variable."""
        if self.built:
            return
        super().build(variables)
        self._sums = []
        for variable in variables:
            self._sums.append(
                self.add_variable(
                    shape=variable.shape[:1], initializer=tf.keras.initializers.Constant(self.initial),
                    dtype=variable.dtype, name="sum_of_squares",
                )
            )  # fmt: skip

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable, or the rows of one for which ``lazy`` calls this method."""
        gradient = tf.convert_to_tensor(gradient)
        sums = self._sums[self._get_variable_index(variable)]
        others = list(range(1, len(gradient.shape)))
        self.assign_add(sums, tf.reduce_mean(tf.square(gradient), others))
        roots = tf.sqrt(tf.convert_to_tensor(sums))
        for _ in others:
            roots = tf.expand_dims(roots, -1)
        rate = tf.cast(learning_rate, gradient.dtype)
        self.assign_sub(variable, rate * gradient / (roots + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for Keras' serialization."""
        return {**super().get_config(), "initial": self.initial, "epsilon": self.epsilon}
