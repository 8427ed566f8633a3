"""Implements Horovod's Keras callbacks, for Keras 2 (tf.keras) and Keras 3."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.horovod.ranks import rank, size
from whale.frontends.horovod.state import allgather_object, broadcast_global_variables, broadcast_variables

NAMES = (
    "BroadcastGlobalVariablesCallback",
    "MetricAverageCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
)


@functools.cache
def callback_classes(keras: str) -> dict[str, Any]:
    """Returns Horovod's callback classes by name, as subclasses of ``Callback`` of one Keras module.

    Args:
      keras: name of the module: "keras", "tf_keras" or "tensorflow.keras".
    """
    module = find_keras(keras)
    base = module.callbacks.Callback
    schedule = type("LearningRateScheduleCallback", (_ScheduleCallback, base), {})
    return {
        "BroadcastGlobalVariablesCallback": type("BroadcastGlobalVariablesCallback", (_BroadcastCallback, base), {}),
        "MetricAverageCallback": type("MetricAverageCallback", (_MetricAverageCallback, base), {}),
        "LearningRateScheduleCallback": schedule,
        "LearningRateWarmupCallback": type("LearningRateWarmupCallback", (_WarmupCallback, schedule), {}),
    }


def find_keras(name: str) -> Any:
    """Returns the Keras module of the name ``keras``, ``tf_keras`` or ``tensorflow.keras``."""
    return tf.keras if name == "tensorflow.keras" else importlib.import_module(name)


class _BroadcastCallback:
    """Broadcasts the model's and optimizer's variables from the root rank, after the first batch.

    Only then do all variables exist.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._done = False
        self._local: set[int] = set()

    def register_local_var(self, variable: Any) -> None:
        """Excludes a variable from the broadcast, so that each rank keeps its own value."""
        self._local.add(id(variable))

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts the variables after the first batch, and does nothing after later ones."""
        if self._done:
            return
        self._done = True
        if not tf.compat.v1.executing_eagerly_outside_functions():
            session = tf.compat.v1.keras.backend.get_session()
            session.run(broadcast_global_variables(self.root_rank))
            return
        slots = self.model.optimizer.variables
        found = [*self.model.variables, *(slots() if callable(slots) else slots)]
        broadcast_variables([v for v in found if id(v) not in self._local], self.root_rank)


class _MetricAverageCallback:
    """Averages the metrics of an epoch over the ranks, so that callbacks after this one in the list see the
    averages.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces the metrics in ``logs`` by their averages over the ranks; collective.

        Raises:
          ProgramError: the ranks have metrics of different names.
        """
        logs = {} if logs is None else logs
        own = {name: float(np.asarray(value)) for name, value in logs.items()}
        said = allgather_object(own, name="MetricAverageCallback")
        for number, other in enumerate(said):
            if set(other) != set(said[0]):
                raise ProgramError(
                    "MetricAverageCallback cannot average metrics that only some ranks have",
                    given=f"rank 0 has {sorted(said[0])}, rank {number} has {sorted(other)}",
                    expected="the same names of metrics on every rank",
                    action="use the same metrics on every rank, and validation data on all or on none; put "
                    "MetricAverageCallback before callbacks that only some ranks have",
                )
        for name in own:
            logs[name] = sum(other[name] for other in said) / len(said)


class _ScheduleCallback:
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
      initial_lr: the learning rate that is multiplied.
      multiplier: a function of the epoch; or a number b, which stands for ``b ** (epoch - start_epoch)``.
      start_epoch: first epoch in which the schedule applies.
      end_epoch: first epoch in which it no longer applies; None: it applies to the end.
      staircase: True to set the rate once per epoch. False to set it before each batch, with fractions of epochs.
      momentum_correction: whether to scale the momentum by new rate / old rate for the batch at which the rate changes.
      steps_per_epoch: number of batches per epoch, to compute fractions of epochs if ``fit`` does not know it.
    """

    model: Any
    params: Any

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.current_epoch = 0
        self._momentum: float | None = None
        self._warned = False
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            decay = multiplier
            self.multiplier = lambda epoch: decay ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds out the number of batches per epoch, if the rate is set before each batch.

        Raises:
          ProgramError: neither this callback nor ``fit`` knows the number.
        """
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ProgramError(
                    f"{type(self).__name__} does not know the number of batches of an epoch",
                    given=f"{type(self).__name__}() without steps_per_epoch, and data of unknown length",
                    expected="steps_per_epoch, or data of known length",
                    action=f"pass steps_per_epoch to {type(self).__name__} or to fit",
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records the number of the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate for the batch."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._adjust(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(epoch)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restores the momentum that was scaled for one batch."""
        if self._momentum is not None:
            self.model.optimizer.momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the logs, as "lr"."""
        if logs is not None:
            logs["lr"] = _read_rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = _read_rate(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", None)
        if not self.momentum_correction or momentum is None or not before or before == after:
            return
        if isinstance(momentum, int | float):
            if momentum and not self._warned:
                self._warned = True
                warnings.warn(
                    f"the momentum of {type(optimizer).__name__} is a constant of the compiled step, so it cannot be "
                    "corrected when the learning rate changes; pass momentum_correction=False to avoid this warning",
                    stacklevel=2,
                )
            return
        self._momentum = float(np.asarray(momentum))
        optimizer.momentum = self._momentum * after / before


class _WarmupCallback(_ScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``, linearly over some epochs.

    Args:
      initial_lr: the learning rate after the warmup.
      warmup_epochs: number of epochs of the warmup.
      momentum_correction: see ``_ScheduleCallback``.
      steps_per_epoch: number of batches per epoch, if ``fit`` does not know it.
      verbose: non-zero to print a line on rank 0 when the warmup ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # At the last batch of an epoch, the number of epochs done is a whole number.
            done = (epoch + 1.0 / (self.steps_per_epoch or 1)) / warmup_epochs
            return (1.0 + done * (size() - 1)) / size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the logs, and prints a line after the last epoch of the warmup."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == (self.end_epoch or 0) - 1 and rank() == 0:
            rate = _read_rate(self.model.optimizer)
            sys.stdout.write(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.\n")


def _read_rate(optimizer: Any) -> float:
    rate = optimizer.learning_rate
    if callable(rate) and not hasattr(rate, "assign"):
        raise ProgramError(
            "a learning rate callback cannot be used with an optimizer that has a learning rate schedule",
            given=f"learning_rate={type(rate).__name__}",
            expected="a number as learning_rate",
            action="pass a number to the optimizer, or remove the callback",
        )
    return float(np.asarray(rate))
