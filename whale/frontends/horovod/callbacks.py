"""Implements Horovod's callbacks for ``fit``, for each installed Keras."""

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
    """Returns the callback classes by name, derived from ``Callback`` of the Keras module ``keras``."""
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
    """Returns the module of a name: ``keras``, or the one behind ``tf.keras``."""
    return tf.keras if name == "tensorflow.keras" else importlib.import_module(name)


class _BroadcastCallback:
    """Broadcasts the root's model and optimizer variables after the first batch, when all of them exist."""

    model: Any

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._done = False
        self._local: set[int] = set()

    def register_local_var(self, variable: Any) -> None:
        """Excludes a variable from the broadcast."""
        self._local.add(id(variable))

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts, once."""
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
    """Averages metrics over the ranks at the end of an epoch, for the callbacks behind it."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages the metrics in place."""
        logs = {} if logs is None else logs
        own = {name: float(np.asarray(value)) for name, value in logs.items()}
        said = allgather_object(own, name="MetricAverageCallback")
        for number, other in enumerate(said):
            if set(other) != set(said[0]):
                raise ProgramError(
                    "the ranks have different metrics, of which there is no average",
                    given=f"rank 0 has {sorted(said[0])}, rank {number} has {sorted(other)}",
                    expected="the same on every rank",
                    action="give every rank the same metrics and validation data, and put this callback before those "
                    "that only some ranks have",
                )
        for name in own:
            logs[name] = sum(other[name] for other in said) / len(said)


class _ScheduleCallback:
    """A callback that multiplies the first learning rate by a function of the epoch.

    Args:
      initial_lr: the rate that is multiplied.
      multiplier: a function of the epoch, or the base of an exponential decay.
      start_epoch, end_epoch: where this schedule holds; the end is not part of it.
      staircase: once an epoch, and not at each batch, with fractions of epochs.
      momentum_correction: scale momentum with the rate, for the batch at which it changes.
      steps_per_epoch: for fractions of epochs, where ``fit`` does not know it.
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
        """Determines the number of steps of an epoch, if needed."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ProgramError(
                    "how far an epoch has come is not known",
                    given=f"{type(self).__name__}() and data without a length",
                    expected="steps_per_epoch",
                    action=f"pass steps_per_epoch to {type(self).__name__} or to fit",
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._adjust(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(epoch)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restores the momentum that was changed for one batch."""
        if self._momentum is not None:
            self.model.optimizer.momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the logs."""
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
                    f"{type(optimizer).__name__} has its momentum as a constant of the compiled step, so it is not "
                    "corrected when the learning rate changes; momentum_correction=False says that this is meant",
                    stacklevel=2,
                )
            return
        self._momentum = float(np.asarray(momentum))
        optimizer.momentum = self._momentum * after / before


class _WarmupCallback(_ScheduleCallback):
    """A callback that grows the learning rate from ``initial_lr / size`` to ``initial_lr``, evenly over some epochs.

    Args:
      initial_lr: the rate at the end.
      warmup_epochs: how many epochs it takes.
      verbose: whether rank 0 says when it is done.
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
            # The last batch of an epoch has its whole number.
            done = (epoch + 1.0 / (self.steps_per_epoch or 1)) / warmup_epochs
            return (1.0 + done * (size() - 1)) / size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the logs, and announces the end of the warmup."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == (self.end_epoch or 0) - 1 and rank() == 0:
            rate = _read_rate(self.model.optimizer)
            sys.stdout.write(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.\n")


def _read_rate(optimizer: Any) -> float:
    rate = optimizer.learning_rate
    if callable(rate) and not hasattr(rate, "assign"):
        raise ProgramError(
            "the optimizer has a schedule of its own",
            given=f"learning_rate={type(rate).__name__}",
            expected="a number",
            action="use either the schedule or the callback",
        )
    return float(np.asarray(rate))
