"""Builds the callable of a step, which passes a lowered function its variables and captured tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as tf_context

from whale.capture.captured import Traced
from whale.capture.packing import make_packer
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.kernels.updates import list_early_writes
from whale.runtime.compile.function_calls import make_function_call
from whale.runtime.compile.offload import compute_device
from whale.runtime.compile.step_cache import Ready
from whale.runtime.compile.tensorflow_functions import LoweredFunction
from whale.runtime.context import Context
from whale.runtime.failed_steps import go_on, raise_step_error
from whale.runtime.replica_writes import refuse_lone_writes


def callable_step(
    tied: Traced,
    ready: Ready,
    function: LoweredFunction,
    plan: Callable[[], Plan],
    number: int,
    context: Context,
    ranks: Sequence[Program] = (),
) -> Callable[[list[Any]], Any]:
    """Returns a callable that runs the lowered function: it takes the tensors of a call, and returns the user's
    structure of results.

    Args:
      tied: the trace, with its variables and captures.
      function: the lowered functions, registered here with TensorFlow.
      plan: returns the plan.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
      ranks: the programs of this process's ranks; needed in elastic runs only.
    """
    device = compute_device(context.config) if ready.offloaded else None
    tf_ctx = tf_context.context()
    tf_ctx.ensure_initialized()
    for definition in function.definitions:
        tf_ctx.add_function_def(definition)
    passed = dict(tied.captures)
    extra = [passed[n] for n in function.inputs[len(tied.inputs) :]]
    handles = [
        h
        for i, nodes in enumerate(function.handles)
        for h in context.variables.list_handles(tied.variables, nodes, i, context.ranks[i])
    ]
    fixed = extra + handles
    uses = context.variables.prepare_uses(tied.variables, ready.uses, context)
    call_function = make_function_call(function.name, function.outputs, len(context.ranks))
    pack = _packer(tied)
    what = ready.program
    several, outside, elastic = len(context.ranks) > 1, context.outside, context.elastic
    early, watched = [], None
    if elastic is not None:
        watched = elastic.watch_steps(plan(), ranks[0])
        by_node = {c.node: c for c in tied.variables}
        early = [(by_node[n].handle, by_node[n].variable.dtype) for n in list_early_writes(ranks[0])]

    def call(tensors: list[Any]) -> Any:
        go_on(context)
        context.calls += 1
        try:
            assigned = context.variables.settle()
            if outside is not None and outside.written:
                refuse_lone_writes(context, what)
            context.variables.prepare_step(uses, context)

            def run() -> Any:
                results = call_function(tensors + fixed)
                context.variables.note_step(uses)
                return results

            if elastic is not None:
                return elastic.take_step(run, pack, early, watched, assigned)
            if not several:
                return pack(run())
            context.variables.follow()
            results = call_function(tensors + fixed)
            context.variables.note_step(uses)
            context.variables.leave()
            return pack(results)
        except tf.errors.OpError as error:
            raise_step_error(error, context)
            raise

    # TensorFlow counts how often a function was added: functions that are not called any more are removed.
    weakref.finalize(call, _forget, tf_ctx, [one.signature.name for one in function.definitions]).atexit = False
    found = call if device is None else _on_device(call, device)
    if ready.rolled:
        found = _as_lowered(found)
    return context.watch_calls(found, what, number, plan)


def _forget(context: Any, names: Sequence[str]) -> None:
    for name in names:
        context.remove_function(name)


def _as_lowered(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wraps ``call`` so that TensorFlow's graph optimizer skips its main graph, which with micro-batches only adds
    gradients and updates variables.

    The functions that compute micro-batches are optimised separately (whale_ops/tf_kernels/call_kernel.cc).
    """
    context = tf_context.context()
    usual = context.function_call_options
    config = config_pb2.ConfigProto.FromString(usual.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    options = tf_context.FunctionCallOptions(usual.executor_type, config)

    def as_lowered(tensors: list[Any]) -> Any:
        before = context.function_call_options
        context.function_call_options = options
        try:
            return call(tensors)
        finally:
            context.function_call_options = before

    return as_lowered


def _on_device(call: Callable[[list[Any]], Any], device: str) -> Callable[[list[Any]], Any]:
    """Wraps ``call`` so that nodes without a device of their own are placed on ``device``."""

    def there(tensors: list[Any]) -> Any:
        with tf.device(device):
            return call(tensors)

    return there


def _packer(tied: Traced) -> Callable[[Any], Any]:
    if isinstance(tied.structured_outputs, tf.Tensor):
        return lambda results: results[0]
    pack = make_packer(tied.structured_outputs, tf.Tensor) or tied.pack_outputs
    return lambda results: pack(results or ())
