"""What a script that imports the library gets on one device without it: every name there is, and nothing is done."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf


class GraphKeys:
    GLOBAL_CONCAT_OBJECTS = GLOBAL_MEAN_OBJECTS = GLOBAL_SUM_OBJECTS = ""


class _Cluster:
    worker_num = total_gpu_num = 1
    worker_index = 0


class Env:
    cluster = _Cluster()

    @classmethod
    def get(cls) -> Any:
        return cls


class _Group:
    def __setattr__(self, name: str, value: Any) -> None: ...


class Config:
    def __init__(self, settings: Any = None) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _Group()


class ShardingLoader:
    """By a Saver, which does as much where names are equal."""

    def __init__(self, file: Any, var_list: Any = None, assign_map: Any = None) -> None:
        self.file, self.names = file, assign_map or {}

    def restore(self) -> None:
        for v in tf.compat.v1.trainable_variables():
            value = tf.train.load_variable(self.file, self.names.get(v.op.name, v.op.name))
            v._initializer_op = v.assign(value).op


def nothing(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


Cluster = replicate = split = init = set_default_strategy = add_to_collection = nothing
