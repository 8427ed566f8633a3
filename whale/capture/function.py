"""Traces a Python train step with tf.function, and converts the trace to a Program.

A ``for`` loop over a tf.data dataset or iterator inside a step needs care. TensorFlow turns a loop over a dataset into
one op (``ReduceDataset``) that runs the loop body as its own function, so each rank would train alone. Here such a loop
is traced as a tf.while_loop that reads an iterator. The element is the result of a tf.cond on "is there a next
element?", computed before the body, so the plan can share what one rank has read with all ranks.

Decision: 0197.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.impl.api import StagingError, autograph_artifact
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager import lift_to_graph
from tensorflow.python.eager.polymorphic_function.autograph_util import py_func_from_autograph
from tensorflow.python.ops import gen_dataset_ops, handle_data_util, resource_variable_ops

from whale.capture.attrs import SCOPE_ATTR
from whale.capture.captured import Captured, CapturedVariable, Traced
from whale.capture.created import CreatedVariables, make_creation_error
from whale.capture.gradients import order_custom_gradients, scope_gradients
from whale.capture.graph import Names, name_captures, read_graph
from whale.capture.loss_scaling import LossScale, scale_losses
from whale.capture.open_sizes import note_open_shapes
from whale.capture.repeated_updates import trace_updates_once
from whale.capture.sharded import IteratorReads
from whale.capture.signature import flatten_arguments, read_tracing_options
from whale.errors import CaptureError, WhaleError
from whale.ir.program import Node, Program, make_const
from whale.ir.values import Dims, Tensor, TensorType

# A GraphDef holds at most 2 GiB; captured constants above this size are passed at each call instead.
_LARGEST_CONSTANT_BYTES = 64 * 2**20
_OURS = str(Path(__file__).parents[1]) + os.sep
_KINDS = (tf.data.Dataset, iterator_ops.OwnedIterator)


def capture_function(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    mark_gradients: bool = False,
    loss_scale: LossScale | None = None,
    drawing: IteratorReads | None = None,
) -> Captured:
    """Traces ``fn(*args, **kwargs)`` and returns its program; for the arguments see ``trace_function``."""
    return trace_function(fn, args, kwargs, name, mark_gradients, loss_scale, drawing).read()


def trace_function(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    mark_gradients: bool = False,
    loss_scale: LossScale | None = None,
    drawing: IteratorReads | None = None,
    creator: Callable[..., Any] | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    shapes: Sequence[Dims | None] | None = None,
    open_shapes: Sequence[Dims] = (),
) -> Trace:
    """Traces ``fn(*args, **kwargs)`` as tf.function would, for exactly the shapes of these arguments.

    If ``fn`` creates variables, this call creates them, once (see ``CreatedVariables``). Unknown sizes in the
    ``input_signature`` of a tf.function are replaced by the sizes of the arguments.

    Args:
      fn: a Python function, a method, or a tf.function.
      args: positional arguments; tensors, arrays and TensorSpecs become the program's inputs, other values become
        constants of the trace.
      kwargs: keyword arguments, treated like ``args``.
      name: name of the program; None: the function's name.
      mark_gradients: whether nodes that compute gradients carry the mark "backward".
      loss_scale: scales losses before they are differentiated; None: losses are not scaled.
      drawing: reads the batches when ``fn`` calls ``next(iterator)``, and makes them the program's first inputs. None:
        the trace itself reads the iterators.
      creator: variable creator for the variables that ``fn`` creates; None: TensorFlow's own.
      around: context manager that is entered around the trace, and again around each run of ``fn`` within the trace. If
        ``fn`` creates variables, it runs several times.
      shapes: shapes of the tensors among the arguments, in flat order, with None for sizes that the trace must not
        know. None: the shapes of the arguments.
      open_shapes: the shapes that these tensors would have in the trace of one process, if it knows fewer sizes.

    Raises:
      CaptureError: the shape of an argument is not fully known, a created variable has no initial value that Whale can
        compute, or ``fn`` captures a value that is known only at the call.
    """
    python_fn, options = getattr(fn, "python_function", fn), read_tracing_options(fn)
    program_name = name or str(getattr(python_fn, "__name__", "step"))
    arguments = flatten_arguments(
        python_fn, args, kwargs or {}, options.pop("input_signature", None), drawing is not None
    )
    specs = [
        tf.TensorSpec(shape, tf.dtypes.as_dtype(tensor.dtype), name=label)
        for tensor, label, shape in zip(
            arguments.tensors, arguments.names, shapes or [tensor.shape for tensor in arguments.tensors]
        )
    ]
    # A function that asks for XLA stays a call that asks for it, as where it is called from another function.
    asks_for_xla = options.pop("jit_compile", None)
    called = tf.function(python_fn, jit_compile=True, **options) if asks_for_xla else _rewrite(python_fn, **options)
    created = CreatedVariables(creator)

    def call(*tensors: tf.Tensor) -> Any:
        created.begin()
        if drawing is not None:
            drawing.enter()
        note_open_shapes(tensors, open_shapes)
        positional, keywords = arguments.rebuild(tensors)
        # TensorFlow calls creators by descending priority: the user's own (100), this one, tf.function's (50).
        with around(), tf.compat.v1.get_default_graph()._variable_creator_scope(created.create, priority=60):
            results = called(*positional, **keywords)
        if loss_scale is not None:
            loss_scale.update()
        return results

    call.__name__ = program_name if program_name.isidentifier() else "step"
    autograph_artifact(call)
    scaled = nullcontext() if loss_scale is None else scale_losses(loss_scale)
    drawn = nullcontext() if drawing is None else drawing.install()
    ordered, repeated = order_custom_gradients(), trace_updates_once()
    with (
        _raise_own_errors(), scope_gradients(mark_gradients), ordered, repeated, scaled, drawn, _trace_element_loops(),
        around(),
    ):  # fmt: skip
        try:
            concrete = tf.function(call, **options).get_concrete_function(*specs)
        except lift_to_graph.UnliftableError as error:
            raise make_creation_error(program_name, str(error).partition(" via at least")[0]) from error
        created.keep_restored(program_name)
        created.refuse_without_value(program_name)
        created.initialise()
        # Creating variables changes the names of nodes. Another trace has the names of a rank on which the variables
        # existed before.
        if created.latest and not created.assigned:
            concrete = tf.function(call, **options).get_concrete_function(*specs)
    return Trace(concrete, program_name, drawing.inputs if drawing is not None else (), bool(created.assigned))


def _rewrite(
    fn: Callable[..., Any], autograph: bool = True, experimental_autograph_options: Any = None
) -> Callable[..., Any]:
    """Returns ``fn`` converted by AutoGraph, or ``fn`` itself if ``autograph`` is False.

    Only the user's function is converted. To have tf.function also convert the wrapper that ``trace_function`` puts
    around it would take longer than the trace of a small step.
    """
    return py_func_from_autograph(fn, experimental_autograph_options) if autograph else fn


@contextmanager
def _raise_own_errors() -> Iterator[None]:
    """Raises a WhaleError that occurs in traced code as itself, with the script's file and line as the fact "at".

    Without this, AutoGraph would wrap the error into a StagingError, and a caller could not catch it by its class.
    """
    try:
        yield
    except StagingError as error:
        own: BaseException | None = error
        while isinstance(own, StagingError):  # each function that AutoGraph has rewritten may make one of another's
            own = own.__context__
        if not isinstance(own, WhaleError):
            raise
        metadata = getattr(own, "ag_error_metadata", None)
        frames = [frame for frame in metadata.translated_stack if frame.is_converted] if metadata is not None else []
        script = [frame for frame in frames if not frame.filename.startswith(_OURS)]
        if script:
            own.facts = {"at": f"{os.path.basename(script[0].filename)}:{script[0].lineno}", **own.facts}
        raise own from None


class Trace:
    """Holds a function traced by TensorFlow, before its conversion to a program.

    Attributes:
      name: name that the program will have.
      inputs: placeholders of the caller's tensors, in flat order; batches that were drawn for the trace come first.
      captures: other tensors that have to be passed at each call, as (name of the placeholder, tensor).
      variables: the variables that the trace captures.
      is_first: True if the trace assigns the initial values of variables that the function created. Then it serves one
        call only; the next call needs a new trace.
    """

    def __init__(self, concrete: Any, name: str, drawn: Sequence[tf.Tensor], is_first: bool = False):
        """Sorts the captured tensors of a ConcreteFunction into variables, constants and tensors to pass at each call.

        Args:
          concrete: the ConcreteFunction.
          name: name that the program will have.
          drawn: placeholders of the batches that the step reads from iterators.
          is_first: see the attribute.

        Raises:
          CaptureError: the function captures a value that is known only when it is called.
        """
        self.name, self._concrete, self._graph, self.is_first = name, concrete, concrete.graph, is_first
        graph = self._graph
        if getattr(graph, "deferred_external_captures", None):
            raise CaptureError(
                "the function captures a value that is only known when it is called",
                op=name,
                given=f"{len(graph.deferred_external_captures)} deferred captures (capture_call_time_value)",
                expected="captured tensors and variables that exist when the function is traced",
                action="pass the value as an argument of the function",
            )
        captures = list(graph.captures)
        self.inputs = [*drawn, *list(graph.inputs)[: len(graph.inputs) - len(captures)]]
        known = {id(v.handle): v for v in graph.variables}
        variables: list[tuple[tf.Tensor, CapturedVariable]] = []
        self._constants: list[tuple[tf.Tensor, tf.Tensor]] = []
        self._passed: list[tuple[tf.Tensor, tf.Tensor]] = []
        self._lasting = name_captures([i.op.name for _, i in captures], [op.name for op in graph.get_operations()])
        names = Names()
        for external, internal in captures:
            node = self._lasting.get(internal.op.name, internal.op.name)
            variable = known.get(id(external))
            if variable is None:
                variable = _find_variable_of_handle(external)
            if variable is not None:
                unique = names.make_unused(_name_variable(variable, node))
                variables.append((internal, CapturedVariable(node, unique, variable, external)))
            elif _can_be_constant(external):
                self._constants.append((internal, external))
            else:
                self._passed.append((internal, external))
        self.captures = tuple((self._find_node_name(i), e) for i, e in self._passed)
        self._variables = variables
        self.variables = [v for _, v in variables]

    @property
    def inputs_description(self) -> str:
        """Returns the names, dtypes and shapes of the inputs as text, for logs and for comparison between ranks."""
        ends = [*self.inputs, *(i for i, _ in self._passed)]
        return ", ".join(f"{self._find_node_name(t)}: {TensorType(t.dtype.name, _list_dims(t.shape))}" for t in ends)

    def _find_node_name(self, internal: tf.Tensor) -> str:
        return self._lasting.get(internal.op.name, internal.op.name)

    def collect_ties(self, present: Collection[str]) -> Traced:
        """Returns the links between the program's nodes and the user's objects, without the program itself.

        Called instead of ``read`` if a compiled program was found in a cache.

        Args:
          present: names of the nodes of those variables that the program still has; other variables are left out.
        """
        return Traced(
            inputs=tuple(t.op.name for t in self.inputs),
            captures=self.captures,
            variables=tuple(v for v in self.variables if v.node in present),
            function=self._concrete,
            structured_outputs=self._graph.structured_outputs,
        )

    def read(self) -> Captured:
        """Converts the trace to a program; nodes that neither outputs nor side effects need are dropped.

        Raises:
          CaptureError: a placeholder has no value, an op type is not registered, or the graph has a cycle.
        """
        start_s = time.perf_counter()
        graph = self._graph
        program = read_graph(
            graph,
            name=self.name,
            inputs=[*self.inputs, *(i for i, _ in self._passed), *(i for i, _ in self._constants)],
            variables=[
                (internal, v.name, v.variable.dtype.base_dtype.name, _list_dims(v.variable.shape))
                for internal, v in self._variables
            ],
            outputs=graph.outputs,
            effects=graph.control_outputs,
            names=self._lasting,
        )
        program = _add_constants(program, {self._find_node_name(i): e for i, e in self._constants})
        tied = self.collect_ties({v.node for v in program.variables})
        found = {f.name: getattr(tied, f.name) for f in fields(tied)}
        return Captured(**found, program=program, read_s=time.perf_counter() - start_s)

    def compute_digest(self) -> bytes:
        """Returns a 16-byte digest that is equal for traces that give equal programs, in this process and in others.

        Finds a compiled program again without reading the trace.
        """
        graph = self._graph
        graph_def = graph.as_graph_def()
        if self._lasting:
            for node in graph_def.node:
                node.name = self._lasting.get(node.name, node.name)
                for i, operand in enumerate(node.input):
                    if operand in self._lasting:
                        node.input[i] = self._lasting[operand]
        data = graph_def.SerializeToString(deterministic=True)
        if b"_gradient_op_type" in data:  # its value holds a counter of the process, which differs between ranks
            for nodes in (graph_def.node, *(f.node_def for f in graph_def.library.function)):
                for node in nodes:
                    node.attr.pop("_gradient_op_type", None)
            data = graph_def.SerializeToString(deterministic=True)
        found = blake2b(data, digest_size=16)
        variables = [
            (v.node, v.name, v.variable.dtype.name, v.variable.shape, getattr(v.variable, SCOPE_ATTR, ""))
            for v in self.variables
        ]
        passed = [(name, tensor.dtype.name, tensor.shape) for name, tensor in self.captures]
        ends = [t.name for t in self.inputs], [t.name for t in graph.outputs]
        effects = sorted(op.name for op in graph.control_outputs)
        constants = [(self._find_node_name(i), e.dtype.name, e.shape) for i, e in self._constants]
        found.update(repr((self.name, variables, passed, ends, effects, constants)).encode())
        for _, external in self._constants:
            value = external.numpy()
            found.update(value.tobytes() if external.dtype != tf.string else repr(value).encode())
        # What a script says of shapes that TensorFlow cannot know (``set_shape``) is in no GraphDef.
        shapes = [t._shape for op in graph.get_operations() for t in op.outputs]  # sizes; `t.shape` makes an object
        found.update(repr(shapes).encode())
        return found.digest()


def _list_dims(shape: tf.TensorShape) -> tuple[int | None, ...] | None:
    return None if shape.rank is None else tuple(shape.as_list())


def _can_be_constant(tensor: tf.Tensor) -> bool:
    """Returns True if a captured tensor is stored as a constant in the program: an eager value of at most 64 MiB."""
    if tensor.dtype in (tf.resource, tf.variant) or not isinstance(tensor, tf.__internal__.EagerTensor):
        return False
    return tensor.dtype == tf.string or tensor.shape.num_elements() * tensor.dtype.size <= _LARGEST_CONSTANT_BYTES


def _find_variable_of_handle(handle: tf.Tensor) -> tf.Variable | None:
    """Returns a variable object for a resource handle; None if the handle is that of a table, iterator or other
    resource.

    If the tf.Variable that owns the handle is gone, a new one called "captured" is made for the handle.
    """
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


def _name_variable(variable: tf.Variable, node: str) -> str:
    name = variable.name.partition(":")[0]
    return node if name in ("captured", "") else name


def _add_constants(program: Program, constants: Mapping[str, tf.Tensor]) -> Program:
    """Replaces the inputs of ``program`` that stand for captured eager tensors by Const nodes.

    Args:
      constants: captured tensors by the name of their input node.
    """
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
            value = Tensor.from_numpy(held, constants[node.name].dtype.name)
            nodes.append(make_const(node.name, value, controls=node.controls, scope=node.scope))
    return program.replace_nodes(tuple(nodes), inputs=tuple(i for i in program.inputs if i not in constants))


@contextmanager
def _trace_element_loops() -> Iterator[None]:
    """Makes AutoGraph trace ``for`` loops over datasets and iterators, inside of the context, as this module's
    ``_loop`` does (see the head of the module).
    """
    known = control_flow.for_loop_registry._registry
    usual = {kind: known[kind] for kind in _KINDS}
    known |= {kind: _make_loop(loop) for kind, loop in usual.items()}
    try:
        yield
    finally:
        known |= usual


def _make_loop(usual: Callable[..., None]) -> Callable[..., None]:
    def loop(elements: Any, *parts: Any) -> None:
        if tf.executing_eagerly() or not all(map(_may_stand_in, _list_parts(elements.element_spec))):
            usual(elements, *parts)
        else:
            _loop(_begin(elements) if isinstance(elements, tf.data.Dataset) else elements, *parts)

    return loop


def _begin(dataset: tf.data.Dataset) -> Any:
    """Creates an iterator over ``dataset`` that starts from the beginning each time the program reaches the loop."""
    spec = dataset.element_spec
    flat = {"output_types": dataset._flat_types, "output_shapes": dataset._flat_shapes}
    with tf.init_scope():
        resource = gen_dataset_ops.anonymous_iterator_v3(**flat)
    gen_dataset_ops.make_iterator(dataset._variant_tensor, resource)
    return iterator_ops.OwnedIterator(components=[resource], element_spec=spec)


def _loop(
    iterator: Any,
    more: Callable[[], Any] | None,
    body: Callable[[Any], None],
    get_state: Callable[[], Any],
    set_state: Callable[[Any], None],
    names: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    """Traces ``for element in iterator: body(element)`` as a tf.while_loop; replaces AutoGraph's own implementation.

    Args:
      more: returns whether the loop continues, if the script has a ``break``; None: it runs until the iterator ends.
      body: runs one iteration with an element.
      get_state: returns the values of the Python variables that the loop changes.
      set_state: sets these variables.
      names: names of these variables.
      options: keyword arguments of tf.while_loop that the script has set.
    """
    has_next: Any = tf.constant(True)

    def get_all() -> Any:
        return has_next, *get_state()

    def set_all(values: Any) -> None:
        nonlocal has_next
        has_next, *rest = values
        set_state(tuple(rest))

    def goes_on() -> Any:
        return has_next if more is None else tf.cond(has_next, more, lambda: False)

    def turn() -> None:
        nonlocal has_next
        found = iterator.get_next_as_optional()
        has_next = found.has_value()
        element = tf.cond(has_next, found.get_value, lambda: _make_some(iterator.element_spec))
        control_flow.if_stmt(has_next, lambda: body(element), lambda: None, get_state, set_state, names, len(names))

    control_flow._tf_while_stmt(goes_on, turn, get_all, set_all, ("has_next", *names), options)


def _make_some(spec: Any) -> Any:
    """Returns a dummy element of zeros, which stands in after the iterator's last element.

    Unknown sizes become 1, because row splits of a RaggedTensor must not be empty.
    """
    parts = [
        tf.zeros([1 if size is None else size for size in part.shape] if part.shape.rank else [], part.dtype)
        for part in _list_parts(spec)
    ]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def _list_parts(spec: Any) -> list[Any]:
    found: list[Any] = tf.nest.flatten(spec, expand_composites=True)
    return found


def _may_stand_in(part: Any) -> bool:
    """Returns True if a part of an element is a plain tensor, so that a dummy of zeros can replace it."""
    return isinstance(part, tf.TensorSpec) and part.dtype not in (tf.variant, tf.resource)
