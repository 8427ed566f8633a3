"""Calls registered functions that hold a step's graph, on the thread of the caller where that is faster.

Decision: 0227.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import execute
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

import whale_ops
from whale.runtime.compile.offload import has_compute_device

EXECUTOR = "WhaleStep"  # whale_ops/tf_kernels/step_executor.cc


def make_function_call(name: str, outputs: int, ranks: int = 1) -> Callable[[Sequence[Any]], list[Any] | None]:
    """Returns a callable that runs a registered function on tensors and handles of variables, and returns its results;
    None if it has none.

    On processors, the operations of one rank run on the calling thread, and on further ones when they take long. Those
    of several ranks, which wait for each other, run on TensorFlow's threads, as do those for other devices.

    Args:
      name: of the function.
      outputs: number of its results.
      ranks: number of ranks whose programs it runs.

    Raises:
      CommError: the op library is not built.
    """
    context = tf_context.context()
    if ranks > 1 or has_compute_device():
        return lambda inputs: context.call_function(name.encode(), inputs, outputs)  # type: ignore[no-any-return]
    whale_ops.load_ops()
    options: Any = None
    attributes: tuple[Any, ...] = ()

    def call(inputs: Sequence[Any]) -> list[Any] | None:
        nonlocal options, attributes
        usual = context.function_call_options
        if usual is not options:
            options = usual
            attributes = ("executor_type", EXECUTOR, "config_proto", usual.config_proto_serialized)
        return execute.execute(name, outputs, inputs, attributes, context) or None

    return call


def bind_as_step(function: ConcreteFunction, inputs: Sequence[Any] = ()) -> Callable[[], list[Any] | None]:
    """Returns a callable that runs a function of TensorFlow on the same tensors each time, as a step is run."""
    signature = function.function_def.signature
    call = make_function_call(signature.name, len(signature.output_arg))
    passed = [*inputs, *function.captured_inputs]

    def run(function: ConcreteFunction = function) -> list[Any] | None:  # which keeps it registered
        return call(passed)

    return run
