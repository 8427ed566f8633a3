"""Implements ``hvd.DistributedOptimizer``: an optimizer that applies the average of all ranks' gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.horovod.gradients import Accumulation, Averaging, find_variable_id, make_averaging
from whale.frontends.horovod.reductions import Average, Compression, ReduceOp

_MARK = "_whale_averaging"
_V1 = tf.compat.v1.train.Optimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns an optimizer like ``optimizer`` that applies the average of all ranks' gradients.

    Of Keras it is a new one with the same settings, of a class that derives from that of ``optimizer`` and has its
    name, so that what is saved can be loaded without Whale.

    Args:
      optimizer: of Keras 3, tf_keras, Keras 2, or of ``tf.compat.v1.train``.
      compression: in which type gradients travel.
      sparse_as_dense: whether tf.IndexedSlices are made tensors first.
      backward_passes_per_step: after how many calls with gradients one update is made of their sum.
      average_aggregated_gradients: of their mean instead.
      op: ``Average`` or ``Sum``.
      gradient_predivide_factor: with ``Average``, by what gradients are divided before they are summed.
      groups, num_groups: variables whose gradients travel together, as lists or as a number of groups.
      use_locking, device_dense, device_sparse: taken for Horovod's sake; they change nothing here.

    Raises:
      ProgramError: arguments that contradict each other or cannot be had, or an optimizer that is distributed already.
    """
    label = name or f"Distributed{type(optimizer).__name__}"
    average = make_averaging(
        label, op, compression, sparse_as_dense, gradient_predivide_factor, groups, num_groups, process_set,
        scale_local_gradients,
    )  # fmt: skip
    if backward_passes_per_step < 1:
        raise ProgramError(
            "an update needs a backward pass",
            given=f"backward_passes_per_step={backward_passes_per_step}",
            expected="1 or more",
            action="correct it",
        )
    if hasattr(optimizer, _MARK):
        raise ProgramError(
            "the optimizer averages its gradients already",
            given="an optimizer of hvd.DistributedOptimizer",
            expected="one that was not wrapped",
            action="wrap it once",
        )
    if isinstance(optimizer, _V1):
        if backward_passes_per_step > 1:
            raise ProgramError(
                "optimizers of TensorFlow 1 cannot accumulate the gradients of several backward passes",
                given=f"backward_passes_per_step={backward_passes_per_step}",
                expected="1",
                action="use a Keras optimizer, or a batch that many times as large",
            )
        return _GraphOptimizer(optimizer, average, use_locking)
    passes = Accumulation(backward_passes_per_step, average_aggregated_gradients)
    return _make_class(type(optimizer), average, passes).from_config(optimizer.get_config())


def make_distributed(optimizer: Any, compression: Any = Compression.none) -> None:
    """Makes an existing Keras optimizer, possibly with a state, average gradients from now on."""
    average = make_averaging(
        f"Distributed{type(optimizer).__name__}", None, compression, False, 1.0, None, 0, None, True
    )
    optimizer.__class__ = _make_class(type(optimizer), average, Accumulation(1, False))


class _GraphOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A wrapper of a TensorFlow 1 optimizer that averages gradients."""

    def __init__(self, optimizer: Any, average: Averaging, use_locking: bool) -> None:
        super().__init__(name=average.name, use_locking=use_locking)
        self._optimizer = optimizer
        setattr(self, _MARK, average)

    def register_local_var(self, variable: Any) -> None:
        """Excludes this variable's gradient from averaging."""
        getattr(self, _MARK).local.add(find_variable_id(variable))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Returns the averaged gradients of all ranks, with their variables."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        return list(zip(getattr(self, _MARK)([gradient for gradient, _ in pairs], variables), variables))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the same method of the wrapped optimizer."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the same method of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the same method of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the same method of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def _make_class(base: Any, average: Averaging, passes: Accumulation) -> Any:
    """Returns a subclass of a Keras optimizer's class, with its name, that averages gradients before applying them."""

    def update(self: Any, gradients: Sequence[Any], variables: Sequence[Any], apply: Callable[[list[Any]], Any]) -> Any:
        _refuse_scaled_by_each_rank()
        if passes.passes == 1:
            return apply(average(list(gradients), variables))
        if hasattr(self, "build") and not getattr(self, "built", False):
            with tf.init_scope():
                self.build(list(variables))

        def average_together(values: list[Any]) -> None:
            apply(average(values, variables))

        passes(gradients, average_together)
        return self.iterations

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:  # Keras 3
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        return update(self, list(grads), variables, lambda found: base.apply(self, found, trainable_variables))

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:  # Keras 2, tf_keras
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]

        def apply_with_variables(found: list[Any]) -> Any:
            return base.apply_gradients(self, list(zip(found, variables)), *args, **kwargs)

        return update(self, [gradient for gradient, _ in pairs], variables, apply_with_variables)

    def register_local_var(self: Any, variable: Any) -> None:
        average.local.add(find_variable_id(variable))

    names: dict[str, Any] = {"apply": apply} if hasattr(base, "apply") else {"apply_gradients": apply_gradients}
    names |= {_MARK: average, "register_local_var": register_local_var}
    names |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), names)


def _refuse_scaled_by_each_rank() -> None:
    """Refuses a loss scale outside of the exchange: a rank whose own gradients overflow would skip it, and others
    wait.
    """
    graph = tf.compat.v1.get_default_graph()
    if not type(graph).__name__.startswith("Cond"):
        return
    for frame in inspect.stack(0):
        around = frame.frame.f_locals.get("self")
        if any(kind.__name__.startswith("LossScaleOptimizer") for kind in type(around).__mro__):
            if hasattr(around, _MARK):
                continue
            raise ProgramError(
                "each rank would decide by its own gradients whether it takes part in the average: wrap the "
                "LossScaleOptimizer in hvd.DistributedOptimizer, not the other way round",
                given="a LossScaleOptimizer around hvd.DistributedOptimizer",
                expected="hvd.DistributedOptimizer around the LossScaleOptimizer",
                action="wrap as opt = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(opt))",
            )
