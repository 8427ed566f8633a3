"""Counts the FLOPs, bytes and kernels of one node, by one table per family of op types; each type is in one of them.

FLOPs: an addition, a multiplication, a comparison is one; a transcendental function counts as the polynomial that Eigen
evaluates for it. Bytes: every operand is read and every result written once, except where a kernel touches less (a
slice, a gather) or also its state (an update of a variable).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model.kernels.loop_counts import LoopTurns, find_turns
from whale.ir.ops import (
    ALIASES,
    ASKS_SHAPE,
    BATCH_NORM_GRADIENTS,
    BATCH_NORMS,
    CONTRACTIONS,
    CONTROL_FLOW,
    CONVOLUTIONS,
    CROSS_ENTROPIES,
    EINSUMS,
    FILTER_GRADIENTS,
    FUSED_LOOP,
    FUSED_UPDATE,
    LIST_PUTS,
    LIST_TAKES,
    LOOKUPS,
    LOOPS,
    MATMULS,
    RANDOM,
    READS,
    READS_ROWS,
    REDUCTIONS,
    SCATTER_ROWS,
    SOFTMAXES,
)
from whale.ir.program import Node, Program, iterate_function_refs
from whale.ir.values import TensorType, count_item_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Holds the work of a node.

    Attributes:
        flops: its FLOPs.
        read_bytes, written_bytes: bytes that it reads from and writes to memory.
        kernels: number of kernel launches; 0: nothing runs, or only on the host.
        scratch_bytes: memory that it needs besides its results, where an attribute of the node gives it; else 0.
    """

    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    kernels: int = 0
    scratch_bytes: int = 0

    @property
    def moved_bytes(self) -> float:
        """Returns the bytes read from memory and written to it."""
        return self.read_bytes + self.written_bytes


Inputs = Sequence[TensorType]
Formula = Callable[[Node, Inputs], Work]
NONE = Work()
# Operations of exp, log, tanh, erf and the like (Eigen, MathFunctionsImpl.h: degrees 5 to 13, and range reduction).
FUNCTION = 20

# Ops without work: constants, views, shapes, handles, control flow (its bodies are counted), ops on the host.
_FREE = (
    (ALIASES - {"CheckNumerics", "CheckNumericsV2"})  # these look at every element
    | (READS - READS_ROWS)  # rows are copied
    | ASKS_SHAPE
    | CONTROL_FLOW
    | frozenset(
        """Const NoOp Placeholder PlaceholderWithDefault VarHandleOp BroadcastGradientArgs ConcatOffset EmptyTensorList
        TensorListLength TensorListElementShape TensorListReserve OptionalNone OptionalFromValue OptionalGetValue
        OneShotIterator IteratorGetNext IteratorToStringHandle TensorDataset RepeatDataset StackV2 StackPushV2
        StackPopV2 TensorArrayV3 TensorArrayGradV3 Assert PrintV2 StringFormat MergeSummary ScalarSummary SaveV2
        RestoreV2 StatelessRandomGetKeyCounter""".split()
    )
)

# FLOPs per element of the result.
_POINTWISE: Mapping[str, float] = {
    **dict.fromkeys(
        """Mul AddV2 Add Sub Maximum Minimum Neg Abs Square Floor Ceil Round Sign Relu ReluGrad Relu6Grad Greater
        GreaterEqual Less LessEqual Equal NotEqual LogicalAnd LogicalOr LogicalNot Select SelectV2 IsFinite IsNan IsInf
        Cast ZerosLike OnesLike BiasAdd MatrixBandPart""".split(),
        1.0,
    ),
    **dict.fromkeys(
        "RealDiv Div DivNoNan Reciprocal FloorDiv FloorMod Mod Sqrt Rsqrt Relu6 SquaredDifference".split(), 2.0
    ),
    **dict.fromkeys("TanhGrad SigmoidGrad RsqrtGrad SqrtGrad ReciprocalGrad".split(), 4.0),
    **dict.fromkeys(
        "Exp Log Log1p Expm1 Tanh Sigmoid Erf Erfc Softplus Elu Selu Gelu Sin Cos".split(), float(FUNCTION)
    ),
    "Pow": 2.0 * FUNCTION,
}

POINTWISE = frozenset(_POINTWISE)
# Ops that take longer to compute again than to read their result (xla/service/hlo_instruction.cc, IsExpensive).
EXPENSIVE = frozenset(op for op, flops in _POINTWISE.items() if flops > 1)

# FLOPs per element of the operand.
_REDUCTIONS: Mapping[str, float] = {
    **dict.fromkeys(REDUCTIONS | {"ArgMax", "ArgMin", "BiasAddGrad", "Cumsum"}, 1.0),
    **dict.fromkeys(("L2Loss", "EuclideanNorm"), 2.0),
}

# Copies: all operands are read, all results written.
_COPIES = """
ConcatV2 Pack Unpack Split SplitV Transpose Pad PadV2 ReverseV2 ReverseSequence InvertPermutation TensorListStack
TensorListFromTensor TensorArrayGatherV3 TensorArrayScatterV3
"""
COPIES = frozenset(_COPIES.split())
# Ops that read only the part of their operand that they return.
_PARTS = LOOKUPS | {"Slice", "StridedSlice", "TensorArrayReadV3"}
# Ops that write their result and read next to nothing.
_FILLS = "Fill Range OneHot Tile BroadcastTo"
FILLS = frozenset(_FILLS.split())
# Ops that write their last operand into a list.
_PUSHES = "TensorArrayWriteV3"
# Random ops that permute or cut out elements; they are not counted as drawing a number for each.
_SHUFFLES = frozenset(
    """RandomShuffle StatelessShuffle RandomIndexShuffle RandomCrop SampleDistortedBoundingBox
    SampleDistortedBoundingBoxV2 StatelessSampleDistortedBoundingBox""".split()
)

# Dense updates of a variable: FLOPs per element, states read and written besides the variable, gradients read.
_UPDATES: Mapping[str, tuple[float, int]] = {
    "AssignVariableOp": (0.0, -1),  # written, not read
    "AssignAddVariableOp": (1.0, 0),
    "AssignSubVariableOp": (1.0, 0),
    "ResourceApplyGradientDescent": (2.0, 0),
    "ResourceApplyMomentum": (4.0, 1),
    "ResourceApplyKerasMomentum": (4.0, 1),
    "ResourceApplyAdagrad": (6.0, 1),
    "ResourceApplyAdagradV2": (6.0, 1),
    "ResourceApplyRMSProp": (10.0, 2),
    "ResourceApplyAdam": (12.0, 2),
    "ResourceApplyFtrl": (20.0 + 2 * FUNCTION, 2),
    "ResourceScatterAdd": (1.0, 0),
    "ResourceSparseApplyAdagrad": (6.0, 1),
    "ResourceSparseApplyAdagradV2": (6.0, 1),
    "ResourceSparseApplyMomentum": (4.0, 1),
    "ResourceSparseApplyKerasMomentum": (4.0, 1),
    "ResourceSparseApplyRMSProp": (10.0, 2),
    "ResourceSparseApplyFtrl": (20.0 + 2 * FUNCTION, 2),
}


def _bytes(types: Sequence[TensorType]) -> float:
    return float(sum(one.bytes for one in types))


def _count_streaming(node: Node, inputs: Inputs, flops: float) -> Work:
    return Work(flops, _bytes(inputs), _bytes(node.outputs), 1)


def _pointwise(node: Node, inputs: Inputs) -> Work:
    return _count_streaming(node, inputs, _POINTWISE[node.op] * node.outputs[0].elements)


def _reduction(node: Node, inputs: Inputs) -> Work:
    return _count_streaming(node, inputs[:1], _REDUCTIONS[node.op] * inputs[0].elements)


def _copy(node: Node, inputs: Inputs) -> Work:
    return _count_streaming(node, inputs, 0.0)


def _part(node: Node, inputs: Inputs) -> Work:
    taken = _bytes(node.outputs)
    return Work(0.0, taken, taken, 1)


def _fill(node: Node, inputs: Inputs) -> Work:
    return Work(0.0, 0.0, _bytes(node.outputs), 1)


def _push(node: Node, inputs: Inputs) -> Work:
    return Work(0.0, inputs[-1].bytes, inputs[-1].bytes, 1)


def _update(node: Node, inputs: Inputs) -> Work:
    flops, states = _UPDATES[node.op]
    # The gradient (or the value) is the largest operand that is a tensor: rates are scalars, indices are integers.
    tensors = [one for one in inputs if one.dtype not in ("resource", "int32", "int64")] or list(inputs)
    value = max(tensors, key=lambda one: one.bytes)
    size = float(value.bytes)
    indices = sum(
        one.bytes for one in inputs if "Sparse" in node.op or "Scatter" in node.op if one.dtype.startswith("int")
    )
    return Work(flops * value.elements, size * (2 + states) + indices, size * (1 + max(0, states)), 1)


def _add_n(node: Node, inputs: Inputs) -> Work:
    return _count_streaming(node, inputs, float((len(inputs) - 1) * node.outputs[0].elements))


def _contraction(node: Node, inputs: Inputs) -> Work:
    operands = [one for one in inputs if one.dtype not in ("int32", "int64")]  # sizes of gradients are not operands
    return _count_streaming(node, operands, float(count_matmul_flops(node, inputs)))


def _softmax(node: Node, inputs: Inputs) -> Work:
    # Largest, difference, exponential, sum, quotient; LogSoftmax a logarithm per row instead of the quotient.
    return _count_streaming(node, inputs, (4.0 + FUNCTION) * inputs[0].elements)


def _cross_entropy(node: Node, inputs: Inputs) -> Work:
    # Softmax, and the gradient beside the loss.
    return _count_streaming(node, inputs, (6.0 + FUNCTION) * inputs[0].elements)


def _batch_norm(node: Node, inputs: Inputs) -> Work:
    # Mean and variance (3), scale and shift (4); training reads the rows twice.
    training = bool(node.attrs.get("is_training", True))
    rows = inputs[0]
    read = rows.bytes * (2 if training else 1) + _bytes(inputs[1:])
    return Work((7.0 if training else 4.0) * rows.elements, read, _bytes(node.outputs), 2 if training else 1)


def _batch_norm_gradient(node: Node, inputs: Inputs) -> Work:
    # Two sums over the gradient and the rows, then the rows' gradient from both.
    rows = inputs[0]
    return Work(12.0 * rows.elements, 4.0 * rows.bytes + _bytes(inputs[2:]), _bytes(node.outputs), 2)


def _window(node: Node) -> int:
    return math.prod(int(size) for size in node.attrs.get("ksize", (1,)))


def _pool(node: Node, inputs: Inputs) -> Work:
    return _count_streaming(node, inputs[:1], float(node.outputs[0].elements * _window(node)))


def _max_pool_gradient(node: Node, inputs: Inputs) -> Work:
    return _count_streaming(node, inputs, float(inputs[-1].elements * _window(node)))


def _average_pool_gradient(node: Node, inputs: Inputs) -> Work:
    return _count_streaming(node, inputs[1:], float(inputs[1].elements * _window(node)))


def _random(node: Node, inputs: Inputs) -> Work:
    # Philox4x32-10 makes four numbers with ten rounds of about ten operations (Salmon et al., SC 2011); a normal one
    # takes a logarithm and a cosine more.
    each = 25.0 + (2 * FUNCTION if "Normal" in node.op else 0)
    return Work(each * node.outputs[0].elements, 0.0, _bytes(node.outputs), 1)


def _segments(node: Node, inputs: Inputs) -> Work:
    # Results are zeroed, then read and written where rows are added.
    rows = inputs[0]
    return Work(float(rows.elements), 2.0 * rows.bytes + inputs[1].bytes, rows.bytes + _bytes(node.outputs), 2)


def _scatter(node: Node, inputs: Inputs) -> Work:
    updates = inputs[1]
    return Work(float(updates.elements), 2.0 * updates.bytes + inputs[0].bytes, updates.bytes + _bytes(node.outputs), 2)


def _slice_gradient(node: Node, inputs: Inputs) -> Work:
    part = inputs[-1].bytes
    return Work(0.0, part, part + _bytes(node.outputs), 2)


def _sort(node: Node, inputs: Inputs) -> Work:
    count = inputs[0].elements
    last = (inputs[0].shape or (count,))[-1] or 1
    return _count_streaming(node, inputs[:1], count * math.log2(max(2, last)))


def _cudnn_rnn(node: Node, inputs: Inputs) -> Work:
    # Every weight is multiplied with every row of every step; the two backward products make it twice as much.
    times, rows = ((inputs[0].shape or (1, 1, 1)) + (1, 1))[:2]
    weights = max(
        (one for one in inputs if len(one.shape or ()) == 1), key=lambda one: one.elements, default=inputs[-1]
    )
    flops = 2.0 * weights.elements * (times or 1) * (rows or 1)
    backward = "Backprop" in node.op
    return Work(flops * (2 if backward else 1), _bytes(inputs), _bytes(node.outputs), 4 * (times or 1))


def _program_flops(node: Node) -> float:
    """Counts the FLOPs per element of the program of a fused op (`WhaleElementwise` or a fused update)."""
    return float(sum(FUNCTION if line.startswith(("Sqrt", "Rsqrt")) else 1 for line in node.attrs["program"]))


def _count_fused_update(node: Node, inputs: Inputs) -> Work:
    """Counts the work of a fused update of many variables: its program once per element; variables are read and
    written.
    """
    elements = sum(math.prod(shape.dims or ()) for shape in node.attrs["shapes"])
    each = count_item_bytes(str(node.attrs["T"]))
    variables = node.attrs["H"] * elements / len(node.attrs["shapes"])
    taken = sum(float(one.bytes) for one in inputs if one.dtype != "resource")
    results = sum(float(one.bytes) for one in node.outputs)
    return Work(_program_flops(node) * elements, taken + variables * each, variables * each + results, 1)


def _count_scattered_rows(node: Node, inputs: Inputs) -> Work:
    """Counts the work of an op that adds rows to tables: only these rows of the tables are read and written."""
    count = int(node.attrs["N"])
    taken, rows = inputs[count:], inputs[2 * count :]
    return Work(float(sum(t.elements for t in rows)), _bytes(taken) + _bytes(rows), _bytes(rows), 1)


def _count_fused_elementwise(node: Node, inputs: Inputs) -> Work:
    """Counts the work of fused elementwise arithmetic: its program once per element."""
    elements = math.prod(node.attrs["shape"].dims or ())
    read, written = (sum(float(one.bytes) for one in some) for some in (inputs, node.outputs))
    return Work(_program_flops(node) * elements, read, written, 1)


def _fused_loop(node: Node, inputs: Inputs) -> Work:
    """Counts the work of all iterations of a fused loop; operands count once, as later iterations read them from a
    cache.
    """
    scratch_bytes = int(node.attrs["scratch_bytes"])
    return Work(float(node.attrs["flops"]), _bytes(inputs), _bytes(node.outputs), 1, scratch_bytes)


_TABLE: dict[str, Formula] = {
    **dict.fromkeys(_FREE, lambda node, inputs: NONE),
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_COPIES.split(), _copy),
    **dict.fromkeys(_PARTS, _part),
    **dict.fromkeys(_FILLS.split(), _fill),
    **dict.fromkeys(_PUSHES.split(), _push),
    **dict.fromkeys(LIST_PUTS | LIST_TAKES, lambda node, inputs: Work(kernels=1)),
    **dict.fromkeys(_UPDATES, _update),
    **dict.fromkeys(CONTRACTIONS, _contraction),
    **dict.fromkeys(SOFTMAXES, _softmax),
    **dict.fromkeys(CROSS_ENTROPIES, _cross_entropy),
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **dict.fromkeys(BATCH_NORM_GRADIENTS, _batch_norm_gradient),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"), _pool),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad"), _max_pool_gradient),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), _average_pool_gradient),
    **dict.fromkeys(RANDOM - _SHUFFLES, _random),
    **dict.fromkeys(("UnsortedSegmentSum", "SegmentSum", "SegmentSumV2"), _segments),
    **dict.fromkeys(("TopKV2", "Unique", "UniqueV2"), _sort),
    **dict.fromkeys(("CudnnRNN", "CudnnRNNV3", "CudnnRNNBackprop", "CudnnRNNBackpropV3"), _cudnn_rnn),
    "AddN": _add_n,
    "ScatterNd": _scatter,
    FUSED_UPDATE: _count_fused_update,
    SCATTER_ROWS: _count_scattered_rows,
    "WhaleElementwise": _count_fused_elementwise,
    FUSED_LOOP: _fused_loop,
    "StridedSliceGrad": _slice_gradient,
}


def is_covered(op: str) -> bool:
    """Returns True if an op type has a formula of its own; others get the default of `estimate_work`."""
    return op in _TABLE


def estimate_work(node: Node, inputs: Inputs) -> Work:
    """Returns the work of a node.

    An op without a formula is assumed to read its operands, to write its results, and to do one FLOP per element of
    them.
    """
    formula = _TABLE.get(node.op)
    if formula is not None:
        return formula(node, inputs)
    return _count_streaming(
        node, inputs, float(sum(one.elements for one in node.outputs if count_item_bytes(one.dtype)))
    )


def iterate_work(program: Program, trips: int = 1) -> Iterator[tuple[Node, Work]]:
    """Yields (node, work) for every node; nodes of called functions and loop bodies as often as they run.

    Args:
        trips: trip count to assume for loops for which the program does not determine it.
    """
    yield from _iterate_program_work(program, program.functions, trips, {})


def _iterate_program_work(
    program: Program, functions: Mapping[str, Program], trips: int, arguments: Mapping[int, int]
) -> Iterator[tuple[Node, Work]]:
    counted = find_turns(program, functions, arguments)
    for node in program.nodes:
        yield node, estimate_work(node, [program.find_type(ref) for ref in node.inputs])
        loop = counted.get(node.name, LoopTurns(trips, {})) if node.op in LOOPS else LoopTurns(1, {})
        for key, function in iterate_function_refs(node):
            body = functions.get(function.name)
            if body is None:
                continue
            # A loop's condition runs once more than its body.
            for _ in range(loop.count + (node.op in LOOPS and key == "cond")):
                yield from _iterate_program_work(body, functions, trips, loop.arguments)


def count_matmul_flops(node: Node, inputs: Sequence[TensorType]) -> int:
    """Counts the FLOPs of a matrix product, einsum or convolution (2 per multiply-add); 0 for any other op."""
    op = node.op
    if op in MATMULS:
        shape = inputs[0].shape
        if not shape or len(shape) < 2:
            return 0
        transposed = node.attrs.get("transpose_a" if op == "MatMul" else "adj_x", False)
        return 2 * node.outputs[0].elements * (shape[-2 if transposed else -1] or 1)
    if op in EINSUMS:
        return _count_einsum_flops(node, inputs)
    if op in CONVOLUTIONS:
        if op in FILTER_GRADIENTS:
            image, kernel = inputs[-1], node.outputs[0]
        elif "BackpropInput" in op:
            image, kernel = inputs[2], inputs[1]
        else:
            image, kernel = node.outputs[0], inputs[1]
        if not kernel.shape:
            return 0
        channels = 1
        for size in kernel.shape[-2:] if "Depthwise" in op else kernel.shape[-1:]:
            channels *= size or 1
        return 2 * image.elements * (kernel.elements // max(1, channels))
    return 0


def _count_einsum_flops(node: Node, inputs: Sequence[TensorType]) -> int:
    equation = str(node.attrs.get("equation", "")).split("->")[0].split(",")
    sizes: dict[str, int] = {}
    rest = 1
    for labels, tensor in zip(equation, inputs):
        if tensor.shape is None:
            return 0
        head, _, tail = labels.partition("...")
        named = list(zip(head, tensor.shape)) + (
            list(zip(reversed(tail), reversed(tensor.shape))) if "..." in labels else []
        )
        sizes.update((label, size or 1) for label, size in named)
        if "..." in labels:
            free = 1
            for size in tensor.shape[len(head) : len(tensor.shape) - len(tail)]:
                free *= size or 1
            rest = max(rest, free)
    for size in sizes.values():
        rest *= size
    return 2 * rest if len(inputs) > 1 else 0
