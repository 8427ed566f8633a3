"""Tells which ops this process's TensorFlow has GPU kernels for, and waits for its GPUs to finish."""

from __future__ import annotations

from collections.abc import Sequence

import whale_ops
from whale.ir.program import Node, Program
from whale.ir.values import DType
from whale.passes.resharding.on_devices import processor_lines


def await_gpus() -> None:
    """Waits until the GPUs have finished all work, since TensorFlow's calls return before that."""
    import tensorflow as tf

    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def has_gpu() -> bool:
    """Returns True if TensorFlow sees a GPU in this process."""
    import tensorflow as tf

    return bool(tf.config.get_visible_devices("GPU"))


def describe_processor_operations(programs: Sequence[Program]) -> list[str]:
    """Returns lines for a report that list the ops of the ranks' programs without a GPU kernel."""
    import tensorflow as tf

    if not tf.test.is_built_with_cuda():
        return ["Ops without GPU kernels can only be told by a TensorFlow for GPUs: pip install 'tensorflow[and-cuda]'"]
    whale_ops.load_ops()  # registers the kernels of Whale's own ops
    return processor_lines(programs, has_gpu_kernel)


def has_gpu_kernel(node: Node) -> bool:
    """Returns True if this TensorFlow has a GPU kernel for a node's op with the node's dtypes."""
    import tensorflow as tf
    from tensorflow.python.framework.kernels import get_registered_kernels_for_op

    def is_allowed(name: str, types: Sequence[int]) -> bool:
        given = node.attrs.get(name)
        asked = given if isinstance(given, tuple | list) else (given,)
        return all(isinstance(one, DType) and tf.as_dtype(str(one)).as_datatype_enum in types for one in asked)

    return any(
        kernel.device_type in ("GPU", "DEFAULT")
        and all(is_allowed(one.name, one.allowed_values.list.type) for one in kernel.constraint)
        for kernel in get_registered_kernels_for_op(node.op).kernel
    )
