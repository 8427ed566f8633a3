"""Asks TensorFlow which operations XLA compiles for this process's device, and tells of it where there are none."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from whale.distributed.gpus import has_gpu
from whale.ir.program import Program
from whale.kernels.xla import XlaKernels
from whale.log import log
from whale.passes.settings import FuseSettings
from whale.runtime.context import Context

# Names under which XLA's kernels are registered beside those of devices.
_COMPILES_FOR = {False: "XLA_CPU_JIT", True: "XLA_GPU_JIT"}


def find_xla(programs: Iterable[Program], fuse: FuseSettings, context: Context) -> XlaKernels | None:
    """Returns XLA's kernels if it is to compile parts of ranks' programs; else None.

    Where TensorFlow has no XLA for the device, the first rank logs that once.
    """
    graphs = (graph for one in programs for graph in (one, *one.functions.values()))
    if not fuse.xla or not any(node.marks.compiled for graph in graphs for node in graph.nodes):
        return None
    on_gpu = has_gpu()
    if (found := read_xla_kernels(on_gpu)) is None and context.rank == 0 and not context.reports.without_xla:
        context.reports.without_xla = True
        device = "GPUs" if on_gpu else "processors"
        log.info(f"TensorFlow has no XLA for {device} here: what has jit_compile=True runs without")
    return found


@cache
def read_xla_kernels(on_gpu: bool) -> XlaKernels | None:
    """Returns XLA's kernels for a kind of device as TensorFlow registers them; None: it is built without XLA for it."""
    import tensorflow as tf
    from tensorflow.python.framework.kernels import get_all_registered_kernels

    with tf.init_scope():  # the passes over the first function have XLA register its kernels
        tf.function(lambda: tf.constant(0.0), autograph=False)()
    names: dict[int, str] = {}

    def name_type(number: int) -> str:
        if number not in names:
            names[number] = tf.as_dtype(number).name
        return names[number]

    kernels: dict[str, list[dict[str, frozenset[str]]]] = {}
    for kernel in get_all_registered_kernels().kernel:
        if kernel.device_type == _COMPILES_FOR[on_gpu]:
            allowed = {one.name: frozenset(map(name_type, one.allowed_values.list.type)) for one in kernel.constraint}
            kernels.setdefault(kernel.op, []).append(allowed)
    return XlaKernels(kernels, on_gpu) if kernels else None
