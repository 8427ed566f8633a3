"""A step of ``wh.function`` from its arguments to what is called for each batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import record
from tensorflow.python.ops import gradients_util

from whale.capture.captured import Captured
from whale.capture.function import capture_function
from whale.capture.sharded import Drawing, ShardedTensor
from whale.capture.signature import Arguments
from whale.errors import ProgramError
from whale.ir.collector import no_garbage_collection
from whale.ir.program import Program
from whale.lowering.functions import load_ops, lower_to_function
from whale.lowering.micro import CALL
from whale.lowering.updates.last import written_early
from whale.passes.facts.stages import has_stages
from whale.runtime.compile.compile import Compiled, compile_program, micro_batches_of
from whale.runtime.compile.offload import compute_device
from whale.runtime.input.equal_inputs import compared
from whale.runtime.input.whole_batch import rows_of_run, whole_batch
from whale.runtime.ranks.faults import raise_comm_error
from whale.runtime.ranks.trace import span
from whale.runtime.run.annotate import in_default_scope, in_scopes_by_name
from whale.runtime.run.context import Context, unique
from whale.runtime.run.loss_scale import loss_scale_of
from whale.runtime.run.writes import refuse_lone_writes, with_equal_replicas
from whale.runtime.spread.micro_batches import keeps_own_rows
from whale.runtime.spread.stage_groups import uses_of
from whale.runtime.variables.deferred import capturing
from whale.runtime.variables.given_tiles import refuse_other_tiles
from whale.runtime.variables.stage_variables import Use
from whale_ops.memory import trim


@dataclass(frozen=True)
class Step:
    """One compiled specialisation: what to call and with what, and how long making it took after tracing.

    ``gathers``: of a batch of which each rank read its rows it takes the whole, which is gathered for each call.
    """

    call: Callable[[list[Any]], Any]
    captured: Captured
    compiled: Compiled
    seconds: Mapping[str, float]
    gathers: bool

    def own(self, tensors: Iterable[Any], context: Context) -> list[Any]:
        """What the lowered step takes of the tensors of a call."""
        if not self.gathers:
            return [rows_of_run(t, context) for t in tensors]
        return [
            whole_batch(t, name, context) if type(t) is ShardedTensor and rows_of_run(t, context) is not t else t
            for name, t in zip(self.captured.inputs, tensors)
        ]


@contextlib.contextmanager
def captures_steps() -> Iterator[None]:
    """Under it, a step that a graph's function calls becomes part of that graph."""
    token = capturing.set(True)
    try:
        yield
    finally:
        capturing.reset(token)


def tensors_of(arguments: Arguments, step: Step, context: Context, drawn: Sequence[Any] = ()) -> list[Any]:
    """What ``step.call`` takes of these arguments, and of the batches that were drawn for it."""
    specs = step.captured.function.structured_input_signature[0]
    own = step.own([*drawn, *arguments.tensors], context)
    return own[: len(drawn)] + [
        t if isinstance(t, tf.Tensor) else tf.convert_to_tensor(t, dtype=spec.dtype)
        for t, spec in zip(own[len(drawn) :], specs)
    ]


def compile_step(
    fn: Callable[..., Any],
    arguments: Arguments,
    args: Any,
    kwargs: Any,
    context: Context,
    drawing: Drawing | None = None,
) -> Step:
    """Traces, plans and lowers ``fn(*args, **kwargs)``, which ``arguments`` are. Collective between processes.

    Args:
      drawing: reads the batches that ``fn`` takes of iterators.
    """
    with span(context.trace, f"compile {getattr(fn, '__name__', 'function')}", "compile"), no_garbage_collection():
        return _compiled(fn, arguments, args, kwargs, context, drawing)


def _compiled(
    fn: Callable[..., Any], arguments: Arguments, args: Any, kwargs: Any, context: Context, drawing: Drawing | None
) -> Step:
    if context.dry is None:
        for tensor in arguments.tensors:
            rows_of_run(tensor, context)
    with captures_steps(), span(context.trace, "capture", "compile"):
        captured = capture_function(
            fn,
            args,
            kwargs,
            mark_gradients=bool(context.config["gradient_checkpoint.type"])
            or context.config["auto_parallel"]
            or context.auto is not None,
            loss_scale=loss_scale_of(context),
            drawing=drawing,
        )
    captured = in_scopes_by_name(_with_scopes(captured, context), context)
    tensors = [*(drawing.tensors if drawing is not None else ()), *arguments.tensors]
    local = {name: t.sizes for name, t in zip(captured.inputs, tensors) if isinstance(t, ShardedTensor)}
    parts = tuple(local)
    # A pipeline's stages cut micro-batches out of the whole batch, each what it computes. A saved plan of several axes
    # was made of whole batches, too, whose rows it may divide otherwise than by ranks. So may micro-batches.
    staged, saved = has_stages(captured.program), context.saved
    gathers = bool(local) and (
        staged
        or (saved is not None and saved.takes_whole_batches)
        or not keeps_own_rows(captured.program, local.values(), micro_batches_of(captured.program, context))
    )
    if gathers:
        local = {}
        context.stages_seen |= staged

    def marked() -> Program:
        with captures_steps():
            again = capture_function(
                fn,
                args,
                kwargs,
                mark_gradients=True,
                loss_scale=loss_scale_of(context),
                drawing=drawing and drawing.again(),
            )
            return in_scopes_by_name(_with_scopes(again, context), context).program

    if context.config["offload.level"] and context.dry is None:
        compute_device(context.config)  # refused before anything is sent
    layouts = context.variables.layouts(captured.variables)
    compiled = compile_program(captured.program, context, local, layouts, marked)
    uses = uses_of(compiled.program, compiled.plan)
    if context.elastic is not None:
        context.elastic.check(uses, {c.node: c.name for c in captured.variables})
    if context.dry is None and context.size > 1:
        planned = {node: use.tiles for node, use in uses.items() if use.tiles is not None}
        refuse_other_tiles(captured.variables, layouts, planned)
    with span(context.trace, "send variables", "compile"):
        context.variables.adopt(captured.variables, context, uses, compiled.plan.offloaded)
        context.variables.classify(captured.variables, compiled.kinds)
    start_s = time.perf_counter()
    with span(context.trace, "functions", "compile"):
        call = _callable(captured, compiled, context, uses)
    call = compared(call, context, compiled.program.name, captured.inputs, parts, dict(captured.captures))
    call = with_equal_replicas(call, context, compiled.program.name, {id(v.handle) for v in captured.variables})
    trim()
    seconds = {"read": captured.read_s, **compiled.seconds, "functions": time.perf_counter() - start_s}
    return Step(call, captured, compiled, seconds, gathers)


def _with_scopes(captured: Captured, context: Context) -> Captured:
    """Variables created under a scope carry it (the node that reads one joins it), and the run may have one too."""
    program = captured.program
    scopes = {c.node: getattr(c.variable, "_whale_scope", "") for c in captured.variables}
    if any(scopes.values()):
        variables = tuple(replace(v, scope=v.scope or scopes.get(v.node, "")) for v in program.variables)
        program = replace(program, variables=variables)
    program = in_default_scope(program, context)
    return captured if program is captured.program else replace(captured, program=program)


def _callable(
    captured: Captured, compiled: Compiled, context: Context, used: Mapping[str, Use]
) -> Callable[[list[Any]], Any]:
    """A closure that calls the lowered function: tensors in, the user's return structure out."""
    device = compute_device(context.config) if compiled.plan.offloaded else None
    load_ops(compiled.ranks)
    lowered = lower_to_function(compiled.ranks, unique(f"whale_{compiled.number}_{_identifier(compiled.program.name)}"))
    tf_ctx = tf_context.context()
    tf_ctx.ensure_initialized()
    for definition in lowered.definitions:
        tf_ctx.add_function_def(definition)
    passed = dict(captured.captures)
    extra = [passed[n] for n in lowered.inputs[len(captured.inputs) :]]
    handles = [
        h
        for i, nodes in enumerate(lowered.handles)
        for h in context.variables.handles(captured.variables, nodes, i, context.ranks[i])
    ]
    fixed = extra + handles
    uses = context.variables.uses(captured.variables, used, context)
    name, outputs = lowered.name.encode(), lowered.outputs
    pack = _packer(captured)
    what = compiled.program.name
    several, outside, elastic = len(context.ranks) > 1, context.outside, context.elastic
    early, watched = [], None
    if elastic is not None:
        watched = elastic.watched(compiled.plan, compiled.ranks[0])
        by_node = {c.node: c for c in captured.variables}
        early = [(by_node[n].handle, by_node[n].variable.dtype) for n in written_early(compiled.ranks[0])]

    def call(tensors: list[Any]) -> Any:
        if record.could_possibly_record() and gradients_util.PossibleTapeGradientTypes(tensors):
            raise ProgramError(
                "a gradient tape outside a step cannot see into it",
                op=what,
                given="a call under a GradientTape that watches an argument",
                expected="the tape inside the step",
                action="compute the gradient inside the function that wh.function decorates",
            )
        try:
            context.variables.settle()
            if outside is not None and outside.written:
                refuse_lone_writes(context, what)
            context.variables.before(uses, context)
            if elastic is not None:
                return elastic.step(lambda: tf_ctx.call_function(name, tensors + fixed, outputs), pack, early, watched)
            if not several:
                results = tf_ctx.call_function(name, tensors + fixed, outputs)
                context.variables.after(uses)
                return pack(results)
            context.variables.follow()
            results = tf_ctx.call_function(name, tensors + fixed, outputs)
            context.variables.after(uses)
            context.variables.leave()
            return pack(results)
        except tf.errors.OpError as error:
            raise_comm_error(error, context)
            raise

    found = call if device is None else _on_device(call, device)
    if any(node.op == CALL for program in compiled.ranks for node in program.nodes):
        found = _as_lowered(found)
    return context.watched(found, what, compiled.number, compiled.plan)


def _as_lowered(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """``call`` of a graph that TensorFlow's optimizer leaves as it is: with micro-batches it holds sums and updates.

    What the micro-batches compute is optimised in functions of their own (whale_ops/ops/call_kernel.cc).
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
    """``call``, of which ``device`` computes what nothing else says."""

    def there(tensors: list[Any]) -> Any:
        with tf.device(device):
            return call(tensors)

    return there


def _packer(captured: Captured) -> Callable[[Any], Any]:
    structure = captured.structured_outputs
    if isinstance(structure, tf.Tensor):
        return lambda results: results[0]
    if isinstance(structure, tuple) and type(structure) is tuple and all(isinstance(s, tf.Tensor) for s in structure):
        return lambda results: tuple(results or ())
    return lambda results: captured.pack_outputs(results or ())


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
