"""Implements ``epl.runtime.saver``, which initialises variables from a checkpoint with other names or larger
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import variables
from tensorflow.python.training.saver import BulkSaverBuilder

from whale.log import log
from whale.runtime.context import require_current


class MemoryEfficientBuilder(BulkSaverBuilder):  # type: ignore[misc]
    """Stands in for EPL's builder in ``tf.train.Saver(builder=...)``; Whale's sessions save shards in parallel
    anyway.
    """


class ShardingLoader:
    """Sets the initializers of variables to read their values from a checkpoint.

    Args:
      ckpt_file: prefix of the checkpoint's files; None: ``restore`` only logs a warning.
      var_list: the variables; None: all saveable variables of the graph.
      assign_map: name of a variable -> its name in the checkpoint, for variables whose names differ.
      sharding_info: name in the checkpoint -> ``{"begin": [...], "size": [...]}``: the slice that the variable gets.
    """

    def __init__(
        self,
        ckpt_file: str | None,
        var_list: Iterable[Any] | None = None,
        assign_map: Mapping[str, str] | None = None,
        sharding_info: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.ckpt_file = ckpt_file
        self.var_list = list(var_list) if var_list else variables._all_saveable_objects()
        self.assign_map = dict(assign_map or {})
        self.sharding_info = dict(sharding_info or {})

    def restore(self) -> None:
        """Replaces the variables' initializers; must be called before the script runs the initializers."""
        if self.ckpt_file is None:
            if require_current("ShardingLoader.restore()").rank == 0:
                log.warning("ShardingLoader(ckpt_file=None) restores nothing: variables keep their own initial values")
            return
        read: dict[str, tf.Tensor] = {}
        for variable in self.var_list:
            name = self.assign_map.get(variable.op.name, variable.op.name)
            if name not in read:
                read[name] = self._read_value(name, variable)
            value = tf.ensure_shape(read[name], variable.shape)
            with tf.control_dependencies(None):
                variable._initializer_op = tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    def _read_value(self, name: str, variable: Any) -> tf.Tensor:
        info = variable._save_slice_info.spec if getattr(variable, "_save_slice_info", None) else ""
        (value,) = tf.raw_ops.RestoreV2(
            prefix=self.ckpt_file, tensor_names=[name], shape_and_slices=[info], dtypes=[variable.dtype.base_dtype]
        )
        if name in self.sharding_info:
            part = self.sharding_info[name]
            value = tf.slice(value, part["begin"], part["size"])
        return value
