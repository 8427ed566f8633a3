"""Tracing a Python train step into a Program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import handle_data_util, resource_variable_ops

from whale.capture.captured import Captured, CapturedVariable
from whale.capture.gradients import gradient_scopes
from whale.capture.graph import program_from_graph
from whale.capture.names import Names, of_captures
from whale.capture.scaling import LossScale, scaled_losses
from whale.capture.sharded import Drawing
from whale.capture.signature import take_apart, tracing_options
from whale.errors import CaptureError
from whale.ir.program import Node, Program, const_node, renamed
from whale.ir.values import Tensor

# A GraphDef holds at most 2 GiB; captured constants above this size are passed at each call instead.
_LARGEST_CONSTANT_BYTES = 64 * 2**20


def capture_function(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    mark_gradients: bool = False,
    loss_scale: LossScale | None = None,
    drawing: Drawing | None = None,
) -> Captured:
    """Traces ``fn(*args, **kwargs)`` as tf.function would, for exactly the shapes of these arguments.

    Variables that ``fn`` creates are created, once, at this first trace. Unknown sizes in the ``input_signature`` of a
    tf.function take those of the arguments.

    Args:
      fn: a Python function, a method, or a tf.function.
      args: positional arguments; tensors, arrays and TensorSpecs become the program's inputs, other values are
        constants of the trace.
      name: name of the program; default the function's.
      mark_gradients: nodes that compute gradients carry a mark.
      loss_scale: what losses are multiplied by before they are differentiated, and how it adapts; None: nothing.
      drawing: takes the batches that ``fn`` reads of iterators: the program's first inputs. None: ``fn`` reads them.

    Raises:
      CaptureError: an argument's shape is unknown, or the trace fails to be static.
    """
    python_fn, options = getattr(fn, "python_function", fn), tracing_options(fn)
    program_name = name or str(getattr(python_fn, "__name__", "step"))
    arguments = take_apart(python_fn, args, kwargs or {}, options.pop("input_signature", None), drawing is not None)
    specs = [
        tf.TensorSpec(tensor.shape, tf.dtypes.as_dtype(tensor.dtype), name=label)
        for tensor, label in zip(arguments.tensors, arguments.names)
    ]
    # A function that asks for XLA stays a call that asks for it, as where it is called from another function.
    asks_for_xla = options.pop("jit_compile", None)
    called = tf.function(python_fn, jit_compile=True, **options) if asks_for_xla else python_fn

    def call(*tensors: tf.Tensor) -> Any:
        if drawing is not None:
            drawing.enter()
        positional, keywords = arguments.rebuild(tensors)
        results = called(*positional, **keywords)
        if loss_scale is not None:
            loss_scale.update()
        return results

    # Of what is called "<lambda>" AutoGraph looks for a lambda's source.
    call.__name__ = program_name if program_name.isidentifier() else "step"
    scaled = nullcontext() if loss_scale is None else scaled_losses(loss_scale)
    drawn = nullcontext() if drawing is None else drawing.installed()
    with gradient_scopes(mark_gradients), scaled, drawn:
        concrete = tf.function(call, **options).get_concrete_function(*specs)
    traced_s = time.perf_counter()
    captured = _captured(concrete, program_name, drawing.inputs if drawing is not None else ())
    return replace(captured, read_s=time.perf_counter() - traced_s)


def _captured(concrete: Any, name: str, drawn: Sequence[tf.Tensor]) -> Captured:
    graph = concrete.graph
    if getattr(graph, "deferred_external_captures", None):
        raise CaptureError(
            "the function captures a value that is only known when it is called",
            op=name,
            given=f"{len(graph.deferred_external_captures)} deferred captures",
            action="pass the value as an argument",
        )
    captures = list(graph.captures)
    flat_inputs = [*drawn, *list(graph.inputs)[: len(graph.inputs) - len(captures)]]
    known = {id(v.handle): v for v in graph.variables}
    variables: list[tuple[tf.Tensor, CapturedVariable]] = []
    constants: list[tuple[tf.Tensor, tf.Tensor]] = []
    passed: list[tuple[tf.Tensor, tf.Tensor]] = []
    lasting = of_captures([i.op.name for _, i in captures], [op.name for op in graph.get_operations()])
    names = Names()
    for external, internal in captures:
        node = lasting.get(internal.op.name, internal.op.name)
        variable = known.get(id(external))
        if variable is None:
            variable = _variable_of_handle(external)
        if variable is not None:
            unique = names.unused(_variable_name(variable, node))
            variables.append((internal, CapturedVariable(node, unique, variable, external)))
        elif _fits_a_graph(external):
            constants.append((internal, external))
        else:
            passed.append((internal, external))
    program = program_from_graph(
        graph,
        name=name,
        inputs=[*flat_inputs, *(i for i, _ in passed), *(i for i, _ in constants)],
        variables=[
            (internal, v.name, v.variable.dtype.base_dtype.name, _dims(v.variable.shape)) for internal, v in variables
        ],
        outputs=graph.outputs,
        effects=graph.control_outputs,
    )
    program = renamed(program, lasting)
    present = {v.node for v in program.variables}
    return Captured(
        program=_with_constants(program, {lasting.get(i.op.name, i.op.name): e for i, e in constants}),
        inputs=tuple(t.op.name for t in flat_inputs),
        captures=tuple((lasting.get(i.op.name, i.op.name), e) for i, e in passed),
        variables=tuple(v for _, v in variables if v.node in present),
        function=concrete,
        structured_outputs=graph.structured_outputs,
    )


def _dims(shape: tf.TensorShape) -> tuple[int | None, ...] | None:
    return None if shape.rank is None else tuple(shape.as_list())


def _fits_a_graph(tensor: tf.Tensor) -> bool:
    """Whether a captured tensor becomes a constant of the program."""
    if tensor.dtype in (tf.resource, tf.variant) or not isinstance(tensor, tf.__internal__.EagerTensor):
        return False
    return tensor.dtype == tf.string or tensor.shape.num_elements() * tensor.dtype.size <= _LARGEST_CONSTANT_BYTES


def _variable_of_handle(handle: tf.Tensor) -> tf.Variable | None:
    """A variable over ``handle`` when it is a variable's; None for tables, iterators and other resources."""
    if handle.dtype != tf.resource:
        return None
    data = handle_data_util.get_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    held = data.shape_and_type[0]
    parent = getattr(handle, "_parent_trackable", None)  # a weak reference to the variable that made it
    owner = parent() if parent is not None else None
    if isinstance(owner, resource_variable_ops.BaseResourceVariable):
        return owner
    return resource_variable_ops.BaseResourceVariable(
        trainable=False,
        shape=tf.TensorShape(held.shape),
        dtype=tf.dtypes.as_dtype(held.dtype),
        handle=handle,
        handle_name="captured",
        name="captured",
    )


def _variable_name(variable: tf.Variable, node: str) -> str:
    name = variable.name.partition(":")[0]
    return node if name in ("captured", "") else name


def _with_constants(program: Program, constants: Mapping[str, tf.Tensor]) -> Program:
    """``program`` with captured eager tensors as Const nodes instead of inputs."""
    if not constants:
        return program
    used = {r.node for n in program.nodes for r in n.inputs} | {r.node for r in program.outputs}
    nodes: list[Node] = []
    for node in program.nodes:
        if node.name not in constants:
            nodes.append(node)
        elif node.name in used:
            # A scalar string comes as bytes; NumPy's own type for them would drop zeros at their end.
            held = np.asarray(constants[node.name].numpy(), object if constants[node.name].dtype == tf.string else None)
            value = Tensor.of(held, constants[node.name].dtype.name)
            nodes.append(const_node(node.name, value, controls=node.controls, scope=node.scope))
    return program.with_nodes(tuple(nodes), inputs=tuple(i for i in program.inputs if i not in constants))
