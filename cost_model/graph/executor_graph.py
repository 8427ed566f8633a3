"""Converts a rank's program to the form that the simulation of TensorFlow's executor uses: numbers in place of names.

Which memory a node's results use (an operand's, new memory, or none) follows TensorFlow's kernels: a view shares its
operand's buffer; a pointwise kernel writes into an operand that has no other reader
(`forward_input_or_allocate_output`); a variable that is still being read is copied before it is changed; every other
result is new. Results are freed when their last reader has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cost_model.graph.traffic import Exchange, exchange
from cost_model.graph.unroll_loops import unroll
from cost_model.kernels.op_work import Work, estimate_work
from whale.ir.ops import ALIASES, APPLIES_ROWS, CROSS_ENTROPIES, EXCHANGES, LIST_PUTS, LIST_TAKES, READS_ROWS, SCATTERS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import TensorType

_FUSED_ACTIVATIONS = frozenset("Relu Relu6 Elu Tanh Sigmoid LeakyRelu".split())
BIAS = "BiasAdd"
MAY_BE_FUSED = _FUSED_ACTIVATIONS | {BIAS}  # ops that TensorFlow may fuse into the product before them

# Ops whose results share their operands' buffers without a copy: views, reads of variables, items of lists.
_SHARING = ALIASES | LIST_PUTS | LIST_TAKES | {"ReadVariableOp"}

# Rows are cut from dimension 0 without a copy.
_ROW_VIEWS = frozenset("Slice StridedSlice Split SplitV Unpack".split())

# Ops whose result may reuse the buffer of an operand of equal size and dtype, with the indices of these operands.
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

# Index of the result that may reuse a buffer, for ops where it is not the first.
_FORWARDED_RESULT = dict.fromkeys(CROSS_ENTROPIES, 1)

# Ops that read or change some rows of a variable. From the first one on, TensorFlow changes the variable in place
# whoever reads it, and every read is a copy (training_op_helpers.h: EnsureSparseVariableAccess, copy_on_read_mode).
_ROWS_OF_VARIABLES = READS_ROWS | SCATTERS | APPLIES_ROWS


@dataclass(slots=True)
class Steps:
    """Holds the nodes of one rank's step, by their position in the program, with what they take and depend on.

    Attributes:
        program: the rank's program, whose nodes are numbered.
        work: FLOPs and bytes of each node.
        exchanges: node -> its exchange, for communication ops.
        after: number of predecessors of each node (data and control).
        followers: successors of each node.
        fused: whether TensorFlow fuses the node into the product before it, so that it takes no time of its own.
    """

    program: Program
    work: list[Work]
    exchanges: dict[int, Exchange]
    after: list[int]
    followers: list[list[int]]
    fused: list[bool]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Returns the nodes; their index is their number."""
        return self.program.nodes


@dataclass(slots=True)
class Graph(Steps):
    """Holds the nodes of one rank's step with the memory of their results. A result is one output of a node; all
    results of the step have consecutive numbers.

    Attributes:
        operands: results that each node reads, one entry per operand.
        results: results that each node yields.
        sizes: bytes that the allocator takes for each result.
        shared: for each result, the result whose memory it shares; -1: none.
        taken: for each result, results of operands whose memory it may reuse (`forward_input_or_allocate_output`).
        held: results that exist before the step and after it: inputs, constants, variables.
        fetched: results that the step returns to its caller.
        variable_bytes: handle node -> bytes of the variable.
        resident_sizes: bytes of each input, and of each buffer that communication keeps from step to step.
        readers: for each result, the number of operands and fetches that read it.
    """

    operands: list[list[int]]
    results: list[list[int]]
    sizes: list[int]
    shared: list[int]
    taken: list[tuple[int, ...]]
    held: set[int]
    fetched: list[int]
    variable_bytes: dict[str, int]
    resident_sizes: list[int]
    readers: list[int]


def steps_of(program: Program, rank: int, size: int, strict: bool = True) -> Steps:
    """Converts the program of ``rank`` (of ``size`` ranks) to numbered nodes, with loops unrolled.

    Args:
        strict: whether branches, and loops with an unknown trip count, raise; if not, each is treated as a single node.

    Raises:
        PlanError: a trip count or branch is known only at run time, and `strict` is set.
    """
    program = unroll(program, strict)
    return _steps(program, rank, size, find_copied_reads(program))


def _steps(program: Program, rank: int, size: int, copied: Collection[str]) -> Steps:
    place: dict[str, int] = {}
    outputs: dict[str, tuple[TensorType, ...]] = {}
    after: list[int] = []
    followers: list[list[int]] = []
    does: list[Work] = []
    exchanges: dict[int, Exchange] = {}
    for i, node in enumerate(program.nodes):
        place[node.name], outputs[node.name] = i, node.outputs
        followers.append([])
        before = {place[r.node] for r in node.inputs}
        before.update([place[c] for c in node.controls])
        for j in before:
            followers[j].append(i)
        after.append(len(before))
        inputs = [outputs[r.node][r.index] for r in node.inputs]
        does.append(make_copy_work(node) if node.name in copied else estimate_work(node, inputs))
        if node.op in EXCHANGES:
            exchanges[i] = exchange(node, inputs, rank, size)
    return Steps(program, does, exchanges, after, followers, _mark_fused(program))


def graph_of(
    program: Program, rank: int, size: int, allocated: Callable[[int], int] = int, strict: bool = True
) -> Graph:
    """Converts the program of ``rank`` (of ``size`` ranks) to numbered nodes and results, with loops unrolled.

    Args:
        allocated: maps the bytes of a tensor to the bytes that the device's allocator takes for it (rounding).
        strict: see `steps_of`.

    Raises:
        PlanError: a trip count or branch is known only at run time, and `strict` is set.
    """
    program = unroll(program, strict)
    copied = find_copied_reads(program)
    steps = _steps(program, rank, size, copied)
    first: dict[str, int] = {}
    sizes: list[int] = []
    types: list[TensorType] = []
    on_host = [node for node in program.nodes if node.marks.on_host]
    kept_there = {node.name for node in on_host if not _leaves_host(node)}
    known: dict[TensorType, int] = {}
    for node in program.nodes:
        first[node.name] = len(sizes)
        for t in node.outputs:
            if (size_bytes := known.get(t)) is None:
                size_bytes = known[t] = allocated(t.bytes)
            sizes.append(0 if kept_there and node.name in kept_there else size_bytes)
            types.append(t)
    shared = [-1] * len(sizes)
    taken: list[tuple[int, ...]] = [()] * len(sizes)
    held: set[int] = set()
    operands: list[list[int]] = []
    results: list[list[int]] = []
    for node in program.nodes:
        own = list(range(first[node.name], first[node.name] + len(node.outputs)))
        reads = [first[r.node] + r.index for r in node.inputs]
        operands.append(reads)
        results.append(own)
        if node.op in ("Placeholder", "Const"):
            held.update(own)
        elif node.name in copied:
            pass  # new memory
        elif node.op in _SHARING or _is_row_view(program, node):
            for k, mine in enumerate(own):
                shared[mine] = reads[k if node.op == "IdentityN" else 1 if node.op == "Split" else 0]
        else:
            for k, mine in enumerate(own):
                t = node.outputs[k]
                candidates = [reads[o] for o in _find_forwarded(node, k) if o < len(reads)]
                taken[mine] = tuple(
                    r for r in candidates if types[r].dtype == t.dtype and types[r].elements == t.elements
                )
    elsewhere = _find_on_hosts(program)
    variables = {v.node: 0 if v.node in elsewhere else allocated(v.type.bytes) for v in program.variables}
    resident = [sizes[first[name]] for name in program.inputs if program.by_name[name].outputs]
    resident += [allocated(e.staging_bytes) for e in steps.exchanges.values()]
    fetched = [first[r.node] + r.index for r in program.outputs]
    readers = [0] * len(sizes)
    for r in itertools.chain(fetched, *operands):
        readers[r] += 1
    return Graph(
        program, steps.work, steps.exchanges, steps.after, steps.followers, steps.fused, operands, results, sizes,
        shared, taken, held, fetched, variables, resident, readers,
    )  # fmt: skip


def _find_on_hosts(program: Program) -> set[str]:
    """Returns the names of nodes whose results are in the host's memory: operands of nodes marked `on_host`, variables
    too.
    """
    return {r.node for node in program.nodes if node.marks.on_host for r in node.inputs}


def count_host_bytes(program: Program) -> int:
    """Counts the bytes of a rank's variables that are offloaded to the host's memory."""
    elsewhere = _find_on_hosts(program)
    return sum(v.type.bytes for v in program.variables if v.node in elsewhere)


def make_copy_work(read: Node) -> Work:
    """Returns the work of a `ReadVariableOp` that copies its variable's value (see `find_copied_reads`)."""
    size = float(sum(t.bytes for t in read.outputs))
    return Work(0.0, size, size, 1)


def _leaves_host(node: Node) -> bool:
    """Returns True if the node copies from the host's memory to the device's."""
    return node.op == "WhaleOffload" and not node.attrs["to_host"]


def _mark_fused(program: Program) -> list[bool]:
    """Returns, for each node, whether TensorFlow fuses it into the product before it: biases, and activations after
    these.
    """
    fused: dict[str, bool] = {}
    fetched = {r.node for r in program.outputs}

    def read_once(node: Node) -> bool:
        return len(program.consumers.get(Ref(node.name), ())) == 1 and node.name not in fetched

    for node in program.nodes:
        fused[node.name] = False
        if node.op == BIAS:
            product = program.by_name[node.inputs[0].node]
            fused[node.name] = product.op in ("MatMul", "Conv2D") and read_once(product)
        elif node.op in _FUSED_ACTIVATIONS:
            bias = program.by_name[node.inputs[0].node]
            fused[node.name] = bias.op == BIAS and fused[bias.name] and read_once(bias)
    return list(fused.values())


def find_copied_reads(program: Program) -> frozenset[str]:
    """Returns the names of `ReadVariableOp` nodes that copy the variable's value.

    These are reads of variables of which the program also reads or changes single rows. Reads that nothing uses are
    left out, as optimised graphs do not have them.
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


def _find_forwarded(node: Node, result: int) -> tuple[int, ...]:
    """Returns the indices of the operands whose buffer result number `result` of a node may reuse."""
    if node.op == "WhaleAllReduce":
        return (result + 1,)  # the communicator comes first
    if node.op == "AddN":
        return tuple(range(len(node.inputs)))
    if node.op == "WhaleElementwise":
        return _unread(node.attrs["program"], result)
    return _FORWARDING.get(node.op, ()) if _FORWARDED_RESULT.get(node.op, 0) == result else ()


def _unread(lines: Sequence[str], result: int) -> tuple[int, ...]:
    """Returns the operands whose buffer a result of a `WhaleElementwise` program may reuse.

    These are the operands `v0`, `v1`, ... that no line reads after the first line that writes the result, `y{result}`.
    """
    read: dict[str, int] = {}
    written = -1
    for i, line in enumerate(lines):
        _, to, *operands = line.split()
        read.update((one, i) for one in operands if one.startswith("v"))
        if to == f"y{result}":
            written = i if written < 0 else written
    return tuple(sorted(int(one[1:]) for one, last in read.items() if last <= written)) if written >= 0 else ()


def _is_row_view(program: Program, node: Node) -> bool:
    """Returns True if a slicing op takes whole rows of dimension 0, which TensorFlow returns as a view without a
    copy.
    """
    if node.op not in _ROW_VIEWS:
        return False
    whole = program.find_type(node.inputs[1 if node.op == "Split" else 0]).shape
    part = node.outputs[0].shape
    if whole is None or part is None:
        return False
    if node.op == "Unpack":
        return int(node.attrs.get("axis", 0)) == 0
    return len(whole) == len(part) and whole[1:] == part[1:] and len(whole) > 0
