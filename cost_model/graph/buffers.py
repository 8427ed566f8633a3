"""Tells which memory a node's results use: an operand's, new memory, or none.

This follows TensorFlow's kernels: a view shares its operand's buffer; a pointwise kernel writes into an operand that
has no other reader (`forward_input_or_allocate_output`); a variable that is still being read is copied before it is
changed; every other result is new. Results are freed when their last reader has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.ops import ALIASES, APPLIES_ROWS, CROSS_ENTROPIES, LIST_PUTS, LIST_TAKES, READS_ROWS, SCATTERS
from whale.ir.program import Node, Program, Ref

# Results that share their operand's buffer: operand -> result, one by one. A variable is read, and items of lists come
# and go, without a copy.
SHARING = ALIASES | LIST_PUTS | LIST_TAKES | {"ReadVariableOp"}
# Rows are cut from dimension 0 without a copy.
ROW_VIEWS = frozenset("Slice StridedSlice Split SplitV Unpack".split())
# The result may take the place of an operand of equal size and dtype; by op the operands that it may take.
_ANY = (0, 1)
_FORWARDING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        """Mul AddV2 Add Sub RealDiv Div DivNoNan FloorDiv FloorMod Maximum Minimum Pow SquaredDifference ReluGrad
        Relu6Grad TanhGrad SigmoidGrad RsqrtGrad SqrtGrad ReciprocalGrad EluGrad SeluGrad LeakyReluGrad SoftplusGrad
        LogicalAnd LogicalOr""".split(),
        _ANY,
    ),
    **dict.fromkeys(
        """Neg Abs Square Floor Ceil Round Sign Relu Relu6 Elu Selu LeakyRelu Sqrt Rsqrt Reciprocal Exp Log Log1p Expm1
        Tanh Sigmoid Erf Erfc Softplus Sin Cos LogicalNot BiasAdd Softmax LogSoftmax MatrixBandPart ZerosLike OnesLike
        Cast FusedBatchNormV3""".split(),
        (0,),
    ),
    **dict.fromkeys(CROSS_ENTROPIES, (0,)),
    "SoftmaxCrossEntropyWithLogits": _ANY,
    "Select": (1, 2),
    "SelectV2": (1, 2),
}
# Result numbers that take an operand's place where it is not the first.
_FORWARDED_RESULT = dict.fromkeys(CROSS_ENTROPIES, 1)
# Ops that read or change some rows of a variable. From the first one on, TensorFlow changes the variable in place
# whoever reads it, and every read is a copy (training_op_helpers.h: EnsureSparseVariableAccess, copy_on_read_mode).
_ROWS_OF_VARIABLES = READS_ROWS | SCATTERS | APPLIES_ROWS


def find_copied_reads(program: Program) -> frozenset[str]:
    """Returns the reads of variables that copy the value; unused reads, which optimised graphs do not have, are
    excluded.
    """
    handles = {n.inputs[0].node for n in program.nodes if n.op in _ROWS_OF_VARIABLES}
    fetched = {r.node for r in program.outputs}
    return frozenset(
        n.name
        for n in program.nodes
        if n.op == "ReadVariableOp"
        and n.inputs[0].node in handles
        and (n.name in fetched or program.consumers.get(Ref(n.name)))
    )


def find_forwarded(node: Node, result: int) -> tuple[int, ...]:
    """Returns the operands whose buffer a result may reuse."""
    if node.op == "WhaleAllReduce":
        return (result + 1,)  # the communicator comes first
    if node.op == "AddN":
        return tuple(range(len(node.inputs)))
    if node.op == "WhaleElementwise":
        return _unread(node.attrs["program"], result)
    return _FORWARDING.get(node.op, ()) if _FORWARDED_RESULT.get(node.op, 0) == result else ()


def _unread(lines: Sequence[str], result: int) -> tuple[int, ...]:
    """Returns the operands that elementwise code has finished reading once it writes a result's first element."""
    read: dict[str, int] = {}
    written = -1
    for i, line in enumerate(lines):
        _, to, *operands = line.split()
        read.update((one, i) for one in operands if one.startswith("v"))
        if to == f"y{result}":
            written = i if written < 0 else written
    return tuple(sorted(int(one[1:]) for one, last in read.items() if last <= written)) if written >= 0 else ()


def is_row_view(program: Program, node: Node) -> bool:
    """Tells whether a slice takes whole rows of dimension 0, which are contiguous in memory."""
    if node.op not in ROW_VIEWS:
        return False
    whole = program.find_type(node.inputs[1 if node.op == "Split" else 0]).shape
    part = node.outputs[0].shape
    if whole is None or part is None:
        return False
    if node.op == "Unpack":
        return int(node.attrs.get("axis", 0)) == 0
    return len(whole) == len(part) and whole[1:] == part[1:] and len(whole) > 0
