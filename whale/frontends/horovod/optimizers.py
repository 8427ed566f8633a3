"""Implements ``hvd.DistributedOptimizer``, an optimizer that applies the average of all ranks' gradients."""

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

    For a Keras optimizer this is a new optimizer with the same settings. Its class derives from that of ``optimizer``
    and has the same name, so that a saved model can be loaded without Whale.

    Args:
      optimizer: an optimizer of Keras 3, tf_keras, Keras 2 or ``tf.compat.v1.train``.
      name: prefix of the keys by which ranks match their exchanges; None: made of the class's name.
      compression: a class of ``hvd.Compression``: the dtype in which gradients are sent.
      sparse_as_dense: whether to convert tf.IndexedSlices to tensors first.
      backward_passes_per_step: number of backward passes whose gradients are accumulated for one update.
      average_aggregated_gradients: True to apply the mean of accumulated gradients, False for their sum.
      op: ``Average`` or ``Sum``.
      gradient_predivide_factor: with ``Average``, by what gradients are divided before they are summed.
      groups, num_groups: variables whose gradients are sent together: lists of variables, or a number of groups.
      process_set: only the set of all ranks is supported.
      scale_local_gradients: whether gradients of local variables (``register_local_var``), which are not averaged, are
        divided by the number of ranks.
      use_locking, device_dense, device_sparse: ignored, only accepted because Horovod has them.

    Raises:
      ProgramError: arguments contradict each other or are not supported, or the optimizer is distributed already.
    """
    label = name or f"Distributed{type(optimizer).__name__}"
    average = make_averaging(
        label, op, compression, sparse_as_dense, gradient_predivide_factor, groups, num_groups, process_set,
        scale_local_gradients,
    )  # fmt: skip
    if backward_passes_per_step < 1:
        raise ProgramError(
            "backward_passes_per_step has to be positive",
            given=f"backward_passes_per_step={backward_passes_per_step}",
            expected="1 or more",
            action="pass 1 or more as backward_passes_per_step, or leave it out",
        )
    if hasattr(optimizer, _MARK):
        raise ProgramError(
            "the optimizer averages its gradients already",
            given="an optimizer that hvd.DistributedOptimizer has returned",
            expected="an optimizer that was not wrapped before",
            action="call hvd.DistributedOptimizer once for an optimizer",
        )
    if isinstance(optimizer, _V1):
        if backward_passes_per_step > 1:
            raise ProgramError(
                "optimizers of TensorFlow 1 cannot accumulate the gradients of several backward passes",
                given=f"backward_passes_per_step={backward_passes_per_step}",
                expected="1",
                action=f"use a Keras optimizer, or a batch {backward_passes_per_step} times as large",
            )
        return _GraphOptimizer(optimizer, average, use_locking)
    passes = Accumulation(backward_passes_per_step, average_aggregated_gradients)
    return _make_class(type(optimizer), average, passes).from_config(optimizer.get_config())


def make_distributed(optimizer: Any, compression: Any = Compression.none) -> None:
    """Changes the class of a Keras optimizer, in place, so that it averages gradients over the ranks; its state is
    kept.

    Args:
      optimizer: an optimizer that was loaded from a file.
      compression: a class of ``hvd.Compression``: the dtype in which gradients are sent.
    """
    average = make_averaging(
        f"Distributed{type(optimizer).__name__}", None, compression, False, 1.0, None, 0, None, True
    )
    optimizer.__class__ = _make_class(type(optimizer), average, Accumulation(1, False))


class _GraphOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Wraps a TensorFlow 1 optimizer, and averages over the ranks what ``compute_gradients`` returns."""

    def __init__(self, optimizer: Any, average: Averaging, use_locking: bool) -> None:
        super().__init__(name=average.name, use_locking=use_locking)
        self._optimizer = optimizer
        setattr(self, _MARK, average)

    def register_local_var(self, variable: Any) -> None:
        """Excludes the gradient of ``variable`` from the average."""
        getattr(self, _MARK).local.add(find_variable_id(variable))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Returns (gradient averaged over all ranks, variable) pairs."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        return list(zip(getattr(self, _MARK)([gradient for gradient, _ in pairs], variables), variables))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``apply_gradients`` of the wrapped optimizer."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``get_slot`` of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``get_slot_names`` of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``variables`` of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def _make_class(base: Any, average: Averaging, passes: Accumulation) -> Any:
    """Returns a subclass of a Keras optimizer's class, of the same name, that averages gradients before it applies
    them.

    Args:
      base: the optimizer's class.
      average: averages gradients over the ranks.
      passes: accumulates the gradients of several backward passes before that.
    """

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
    """Raises a ProgramError if a LossScaleOptimizer wraps the distributed optimizer.

    A rank whose own gradients overflow would skip the update and its exchange, and the other ranks would wait forever.
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
                "a LossScaleOptimizer around hvd.DistributedOptimizer would let each rank decide by its own gradients "
                "whether it takes part in the average",
                given="a LossScaleOptimizer around hvd.DistributedOptimizer",
                expected="hvd.DistributedOptimizer around the LossScaleOptimizer",
                action="write opt = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(opt))",
            )
