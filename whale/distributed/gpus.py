"""Tells which kernels for GPUs this process's TensorFlow has, and waits until its GPUs are through."""

from __future__ import annotations

from collections.abc import Sequence

import whale_ops
from whale.ir.program import Node, Program
from whale.ir.values import DType
from whale.passes.resharding.on_devices import processor_lines


def await_gpus() -> None:
    """Waits until GPUs have computed what was started: calls of TensorFlow return before that."""
    import tensorflow as tf

    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def has_gpu() -> bool:
    """Tells whether this process computes on a GPU."""
    import tensorflow as tf

    return bool(tf.config.get_visible_devices("GPU"))


def describe_processor_operations(programs: Sequence[Program]) -> list[str]:
    """Returns lines for people that list which of the ranks' operations TensorFlow computes on processors."""
    import tensorflow as tf

    if not tf.test.is_built_with_cuda():
        return ["Which operations have no kernel for GPUs is told by a TensorFlow for GPUs: tensorflow[and-cuda]"]
    whale_ops.load_ops()  # their kernels, too
    return processor_lines(programs, has_gpu_kernel)


def has_gpu_kernel(node: Node) -> bool:
    """Tells whether this TensorFlow has a GPU kernel of an operation with these types."""
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
