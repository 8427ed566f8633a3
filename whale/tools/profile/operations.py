"""Measures the seconds and the scratch memory of single operations, run by TensorFlow's executor as in a step.

For each operation a function is built that runs several copies one after the other on separate operands; the seconds of
an empty function are subtracted. Operands that are constants in the program stay constants. On a GPU the scratch memory
is the GPU's.

TensorFlow's layout optimizer lets GPUs compute on images with the channels first (NCHW) where that is faster: it
changes operations, and puts transposes around each sequence of them. An operation measured alone would keep the layout
of the program, or be measured with transposes that steps do not have. So operations are converted to NCHW here if the
optimizer would do so in steps on this machine's GPU (``_find_channels_first``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from cost_model.graph.executor_graph import find_copied_reads, make_copy_work
from cost_model.graph.machine_profile import Operation
from cost_model.graph.signature import dtype_of, signature
from cost_model.graph.unroll_loops import unroll
from cost_model.kernels.op_work import Work, estimate_work
from whale.distributed.gpus import await_gpus, has_gpu
from whale.errors import CommError
from whale.ir.ops import CONVOLUTIONS, EXCHANGES, FUSED_LOOP, LISTS, ROW_LOOKUPS
from whale.ir.program import Node, Program, Ref, Variable, make_const
from whale.ir.values import DType, TensorType, find_numpy_dtype, require_static_shape
from whale.kernels.einsums import EINSUM
from whale.kernels.nn import CROSS_ENTROPY, DEPTHWISE
from whale.kernels.updates import UPDATE
from whale.runtime.compile.measured_call import OF_CLASSES, compile_program_alone, draw_value, measure_call_s
from whale_ops.memory import COUNTED_FROM_BYTES, read_memory, reset_peak

COPIES_BYTES = 4 << 20  # bytes of all copies' operands and results; they stay in a cache, as most do in steps
MOST_COPIES = 8
_TAKES_INDICES = ROW_LOOKUPS | OF_CLASSES | {"UnsortedSegmentSum", "ResourceScatterAdd"}
_OURS = frozenset((UPDATE, CROSS_ENTROPY, DEPTHWISE, EINSUM, FUSED_LOOP))  # Whale's own ops that can be measured alone
_NOT_ALONE = EXCHANGES | LISTS  # ops that need other ranks, or objects that only a program has

# By op: (operands that are images, operands that are the shape of an image, results that are images).
TURNED: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = MappingProxyType(
    {
        "Conv2D": ((0,), (), (0,)),
        "Conv2DBackpropInput": ((2,), (0,), (0,)),
        "Conv2DBackpropFilter": ((0, 2), (), ()),
        "DepthwiseConv2dNative": ((0,), (), (0,)),
        "DepthwiseConv2dNativeBackpropInput": ((2,), (0,), (0,)),
        "DepthwiseConv2dNativeBackpropFilter": ((0, 2), (), ()),
        "MaxPool": ((0,), (), (0,)),
        "MaxPoolGrad": ((0, 1, 2), (), (0,)),
        "AvgPool": ((0,), (), (0,)),
        "AvgPoolGrad": ((1,), (0,), (0,)),
        "BiasAdd": ((0,), (), (0,)),
        "BiasAddGrad": ((0,), (), ()),
        "FusedBatchNormV3": ((0,), (), (0,)),
        "FusedBatchNormGradV3": ((0, 1), (), (0,)),
    }
)
_FIRST = (0, 3, 1, 2)  # NCHW dimension -> NHWC dimension
_BY_DIMENSION = ("strides", "ksize", "dilations")


def find_distinct(programs: Iterable[Program]) -> dict[str, tuple[Program, Node]]:
    """Returns {signature: (program, node)} of the operations that take time, one per signature."""
    found: dict[str, tuple[Program, Node]] = {}
    for program in map(unroll, programs):
        copied = find_copied_reads(program)
        for node in program.nodes:
            if node.op == "ReadVariableOp" and node.name not in copied:
                continue
            if node.op in _NOT_ALONE or (node.op.startswith("Whale") and node.op not in _OURS):
                continue
            if not _find_work(program, node).kernels:
                continue
            found.setdefault(signature(program, node), (program, node))
    return found


def measure(
    operations: Sequence[tuple[Program, Node]], budget_s: float = 60.0, said: Callable[[str], None] = lambda text: None
) -> tuple[list[Operation], list[str]]:
    """Measures operations one by one.

    Args:
        budget_s: seconds; larger operations come first, and those left when the time is over are not measured.
        said: called with lines of progress.

    Returns:
        (the measurements, a line with the reason for each operation that could not be measured).
    """
    end_s = time.monotonic() + budget_s
    order = sorted(operations, key=lambda one: -_estimate_size(*one))
    found, skipped = [], []
    place = _Place.find({dtype_of(signature(*one)) for one in operations if one[1].op in CONVOLUTIONS})
    if not place.counts:
        said("scratch memory is not measured: TensorFlow's allocator keeps no statistics for this device")
    empty_s = measure_call_s(compile_program_alone(Program("empty", ()), []))
    for number, (program, node) in enumerate(order):
        if time.monotonic() > end_s:
            skipped += [f"{n.op}: out of time" for _, n in order[number:]]
            break
        try:
            found.append(_measure_one(program, node, empty_s, place))
        except (tf.errors.OpError, _NotMeasurableError) as error:
            skipped.append(f"{node.op}: {str(error).splitlines()[0][:120]}")
        if number % 50 == 49:
            said(f"{number + 1} of {len(order)} operations")
    return found, skipped


class _NotMeasurableError(Exception):
    """Raised for an operation that cannot be run on its own."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Describes the device on which operations are measured.

    Attributes:
        gpu: TensorFlow's name of the GPU; "": the CPU.
        counts: True if TensorFlow counts the bytes that kernels allocate there.
        channels_first: element types of which images have the channels first in steps.
    """

    gpu: str
    counts: bool
    channels_first: frozenset[str]

    @classmethod
    def find(cls, dtypes: Iterable[str]) -> _Place:
        """Finds the device: the first GPU, or else the CPU.

        Args:
            dtypes: element types of the convolutions that are to be measured.
        """
        gpu = "GPU:0" if has_gpu() else ""
        try:
            read_memory(gpu)
        except (CommError, ValueError):  # an allocator without statistics
            return cls(gpu, False, frozenset())
        return cls(gpu, True, frozenset(one for one in dtypes if gpu and _find_channels_first(one)))

    def measure_scratch_bytes(self, call: Callable[[], Any], node: Node) -> int:
        """Returns the peak memory of a call in bytes, without what was allocated before and without the operation's
        results.
        """
        if not self.counts:
            return 0
        reset_peak(self.gpu)
        before = read_memory(self.gpu).live_bytes
        call()
        await_gpus()
        counted_from = 0 if self.gpu else COUNTED_FROM_BYTES
        made = sum(t.bytes for t in node.outputs if t.bytes >= counted_from)
        return max(0, read_memory(self.gpu).peak_bytes - before - made)


def _find_work(program: Program, node: Node) -> Work:
    """Returns the work of a node; a variable read counts as a copy."""
    return (
        make_copy_work(node)
        if node.op == "ReadVariableOp"
        else estimate_work(node, [program.find_type(r) for r in node.inputs])
    )


def _estimate_size(program: Program, node: Node) -> float:
    done = _find_work(program, node)
    return done.flops / 10 + done.moved_bytes


def _measure_one(program: Program, node: Node, empty_s: float, place: _Place) -> Operation:
    known_as = signature(program, node)
    if dtype_of(known_as) in place.channels_first:
        program, node = turn(program, node)
    types = [program.find_type(r) for r in node.inputs]
    if not all(t.is_static for t in (*types, *node.outputs) if t.dtype not in ("resource", "variant")):
        raise _NotMeasurableError("the operation has an operand or result of unknown size")
    done = _find_work(program, node)
    copies = int(max(1, min(MOST_COPIES, COPIES_BYTES // max(1.0, done.moved_bytes))))
    chain, values, keep = _make_chain(program, node, types, copies)
    call = compile_program_alone(chain, values)
    call()
    scratch_bytes = place.measure_scratch_bytes(call, node)
    seconds = max(1e-7, measure_call_s(call) - empty_s) / copies
    del keep
    return Operation(known_as, node.op, done.flops, done.moved_bytes, seconds, scratch_bytes)


def _make_chain(
    program: Program, node: Node, types: Sequence[TensorType], copies: int
) -> tuple[Program, list[Any], Any]:
    """Builds a program with ``copies`` copies of a node, one after the other, on random operands.

    Returns:
        (the program, its arguments, objects that have to stay alive while it runs).
    """
    nodes: list[Node] = []
    inputs: list[str] = []
    variables: list[Variable] = []
    values: list[Any] = []
    handles: list[Any] = []
    alive: list[Any] = []
    generator = np.random.default_rng(0)
    before: str | None = None
    for copy in range(copies):
        operands = []
        for i, (ref, t) in enumerate(zip(node.inputs, types)):
            name = f"operand_{copy}_{i}"
            if t.dtype == "resource":
                variable = program.variable_of.get(ref.node)
                if variable is None:
                    raise _NotMeasurableError("the operation reads a resource that is no variable")
                made = tf.Variable(draw_value(variable.type, generator))
                if node.op == "ReadVariableOp":  # after a gather of its rows, TensorFlow copies a variable on each read
                    tf.raw_ops.ResourceGather(resource=made.handle, indices=[0], dtype=made.dtype)
                alive.append(made)
                handles.append(made.handle)
                nodes.append(Node(name, "Placeholder", (), (), program.by_name[ref.node].attrs, (t,)))
                variables.append(Variable(name, name, variable.type))
            elif (constant := program.const(ref)) is not None:
                nodes.append(make_const(name, constant, t.dtype))
            elif t.dtype in ("variant", "string"):
                raise _NotMeasurableError(
                    f"the operation has an operand of dtype {t.dtype}, for which no random values can be made"
                )
            else:
                nodes.append(Node(name, "Placeholder", (), (), {"dtype": DType(t.dtype)}, (t,)))
                inputs.append(name)
                values.append(_draw_operand(node, i, types, t, generator))
            operands.append(Ref(name))
        name = f"copy_{copy}"
        nodes.append(replace(node, name=name, inputs=tuple(operands), controls=(before,) if before else ()))
        before = name
    assert before is not None
    chain = Program("chain", tuple(nodes), tuple(inputs), tuple(variables), (), (before,))
    return chain, [*values, *handles], alive


def _draw_operand(
    node: Node, i: int, types: Sequence[TensorType], t: TensorType, generator: np.random.Generator
) -> tf.Tensor:
    if not t.dtype.startswith(("int", "uint")):
        return draw_value(t, generator)
    if i and t.elements <= 8 and node.op not in _TAKES_INDICES and len(types) > 1 and types[0].dtype != t.dtype:
        raise _NotMeasurableError("the operation reads sizes or positions that are not constants of the program")
    bound = 2
    if node.op in ROW_LOOKUPS or node.op == "ResourceScatterAdd":
        bound = (types[0].shape or (2,))[0] or 2
    elif node.op in OF_CLASSES:
        bound = (types[0].shape or (2,))[-1] or 2
    elif node.op == "UnsortedSegmentSum":
        bound = (node.outputs[0].shape or (2,))[0] or 2
    return tf.constant(generator.integers(bound, size=require_static_shape(t)).astype(find_numpy_dtype(t.dtype)))


def measure_overheads() -> tuple[float, float]:
    """Measures (seconds of calling an empty step, seconds that the executor needs for a node that computes nothing)."""
    empty_s = measure_call_s(compile_program_alone(Program("empty", ()), []))
    count = 200
    t = TensorType("float32", ())
    nodes = [Node("x", "Placeholder", (), (), {"dtype": DType("float32")}, (t,))]
    for i in range(count):
        nodes.append(Node(f"n{i}", "Identity", (Ref(nodes[-1].name),), (), {"T": DType("float32")}, (t,)))
    chain = Program("chain", tuple(nodes), ("x",), (), (), (nodes[-1].name,))
    return empty_s, max(1e-8, (measure_call_s(compile_program_alone(chain, [tf.constant(0.0)])) - empty_s) / count)


def _find_channels_first(dtype: str) -> bool:
    """Returns True if TensorFlow's layout optimizer would compute convolutions of this type with the channels first."""
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.grappler import tf_optimizer

    if not tf.config.list_logical_devices("GPU") or tf.config.optimizer.get_experimental_options().get(
        "layout_optimizer", True
    ) in (False, "off"):
        return False
    with tf.Graph().as_default() as graph, tf.device("/GPU:0"):
        x = tf.compat.v1.placeholder(dtype, (8, 32, 32, 16))
        found = tf.identity(tf.nn.conv2d(x, tf.zeros((3, 3, 16, 16), dtype), 1, "SAME"), "found")
    graph.add_to_collection(tf.compat.v1.GraphKeys.TRAIN_OP, found)
    meta = tf.compat.v1.train.export_meta_graph(graph=graph)
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.optimizers.append("layout")
    options.layout_optimizer = rewriter_config_pb2.RewriterConfig.ON
    options.min_graph_nodes = -1
    made = tf_optimizer.OptimizeGraph(config, meta, verbose=False)
    return any(node.op == "Conv2D" and node.attr["data_format"].s == b"NCHW" for node in made.node)


def turn(program: Program, node: Node) -> tuple[Program, Node]:
    """Converts an operation on images from NHWC to NCHW.

    Args:
        program: the program that ``node`` is in.

    Returns:
        (a program with the converted operation's operands, the operation); both unchanged if it has no image operands.
    """
    places = TURNED.get(node.op)
    types = [program.find_type(ref) for ref in node.inputs]
    if places is None or node.attrs.get("data_format", "NHWC") != "NHWC":
        return program, node
    images, sizes, results = places
    if any(len(types[i].shape or ()) != 4 for i in images) or any(t.dtype == "resource" for t in types):
        return program, node
    operands: list[Node] = []
    for i, (ref, t) in enumerate(zip(node.inputs, types)):
        name, value = f"operand_{i}", program.const(ref)
        if value is not None and i in sizes:
            operands.append(make_const(name, np.asarray(value)[list(_FIRST)], t.dtype))
        elif value is not None and i not in images:
            operands.append(replace(program.by_name[ref.node], name=name, controls=(), outputs=(t,)))
        else:
            operands.append(Node(name, "Placeholder", outputs=(_turn_type(t) if i in images else t,)))
    outputs = tuple(_turn_type(t) if i in results else t for i, t in enumerate(node.outputs))
    inputs = tuple(Ref(one.name) for one in operands)
    turned = replace(node, inputs=inputs, controls=(), attrs=_turn_attrs(node.attrs), outputs=outputs)
    return Program(program.name, (*operands, turned)), turned


def _turn_type(t: TensorType) -> TensorType:
    shape = t.shape
    return t if shape is None or len(shape) != 4 else TensorType(t.dtype, tuple(shape[i] for i in _FIRST))


def _turn_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    turned = {**attrs, "data_format": "NCHW"}
    for name in _BY_DIMENSION:
        if name in attrs:
            turned[name] = tuple(attrs[name][i] for i in _FIRST)
    if pads := attrs.get("explicit_paddings"):
        turned["explicit_paddings"] = tuple(pads[2 * i + side] for i in _FIRST for side in (0, 1))
    return turned
