"""Horovod's names in one process that knows nothing of ranks or Whale: what the examples are compared with."""

from types import SimpleNamespace

import tensorflow as tf


def _first(value, *args, **kwargs):
    return value


def init() -> None: ...


def rank() -> int:
    return 0


def size() -> int:
    return 1


local_rank = rank
DistributedOptimizer = DistributedGradientTape = allreduce = _first
Compression = SimpleNamespace(none=None, fp16=None)


def broadcast_variables(variables, root_rank: int) -> None: ...


def BroadcastGlobalVariablesHook(root_rank: int):
    return tf.compat.v1.train.SessionRunHook()


def _callback(*args, **kwargs):
    return tf.keras.callbacks.Callback()


callbacks = SimpleNamespace(
    BroadcastGlobalVariablesCallback=_callback,
    MetricAverageCallback=_callback,
    LearningRateWarmupCallback=_callback,
)
