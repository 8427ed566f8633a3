"""Mixed precision (``precision``): products and convolutions in 16 bits, sums, losses and updates in float32.

Micikevicius et al., "Mixed precision training", ICLR 2018; the lists are a part of those of TensorFlow's
``auto_mixed_precision``. An op that only passes numbers on (``_BETWEEN``) is computed in 16 bits where it lies
between two products; what comes of the last product, a weight's gradient above all, is float32 again, and is summed as
that over ranks and micro-batches. So are nodes marked ``full_precision``: routers of experts, whose choices rounding
would change. Variables stay float32. bfloat16 has the range of float32, so losses need no scaling;
for float16 see whale.passes.normalize.loss_scaling.

Decision: 0054.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from whale.ir.ops import CONTRACTIONS, VIEWS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, TensorType

_WIDE = "float32"
_PRODUCTS = CONTRACTIONS - {"BatchMatMulV3"}  # there both operands and the result have types of their own
# All their float operands and results are of the type T.
_BETWEEN = VIEWS | frozenset(
    "Add AddV2 AddN Sub Mul Neg BiasAdd Relu ReluGrad Relu6 Relu6Grad LeakyRelu LeakyReluGrad Tanh TanhGrad Sigmoid "
    "SigmoidGrad Elu EluGrad Maximum Minimum Select SelectV2 Transpose ConcatV2 Slice StridedSlice StridedSliceGrad "
    "Pad PadV2 Pack Unpack Split SplitV Tile BroadcastTo MaxPool MaxPoolGrad".split()
)


def lower_precision(program: Program, low_dtype: str) -> Program:
    """Computes the float32 products of ``program``, and the ops between two of them, in ``low_dtype``."""
    bodies = {name: _lower_graph(body, low_dtype) for name, body in program.functions.items()}
    return replace(_lower_graph(program, low_dtype), functions=bodies)


def _lower_graph(program: Program, low_dtype: str) -> Program:
    low = _find_low(program)
    if not low:
        return program
    nodes: dict[str, Node] = {}
    casts: dict[tuple[Ref, str], Ref] = {}

    def as_type(ref: Ref, dtype: str, scope: str) -> Ref:
        """Casts ``ref``, which is float32 in the program, to ``dtype`` where needed."""
        made = low_dtype if ref.node in low else _WIDE
        if made == dtype:
            return ref
        if (ref, dtype) not in casts:
            t = program.find_type(ref)
            name = f"{ref.node}/whale_{dtype}_{ref.index}"
            attrs = {"SrcT": DType(made), "DstT": DType(dtype), "Truncate": False}
            nodes[name] = Node(name, "Cast", (ref,), (), attrs, (TensorType(dtype, t.shape),), scope)
            casts[ref, dtype] = Ref(name)
        return casts[ref, dtype]

    for node in program.nodes:
        wanted = low_dtype if node.name in low else _WIDE
        inputs = tuple(
            as_type(r, wanted, node.scope) if program.find_type(r).dtype == _WIDE else r for r in node.inputs
        )
        node = replace(node, inputs=inputs) if inputs != node.inputs else node
        if wanted == low_dtype:
            outputs = tuple(replace(t, dtype=low_dtype) if t.dtype == _WIDE else t for t in node.outputs)
            node = replace(node, attrs={**node.attrs, "T": DType(low_dtype)}, outputs=outputs)
        nodes[node.name] = node
    fetched = tuple(as_type(r, _WIDE, "") if program.find_type(r).dtype == _WIDE else r for r in program.outputs)
    return replace(program, nodes=tuple(nodes.values()), outputs=fetched)


def _find_low(program: Program) -> set[str]:
    """Returns the nodes that are computed in 16 bits."""
    fitting = {n.name: n for n in program.nodes if n.attrs.get("T") == _WIDE and not n.marks.full_precision}
    products = {name for name, node in fitting.items() if node.op in _PRODUCTS}
    between = {name: node for name, node in fitting.items() if node.op in _BETWEEN}
    made: set[str] = set()  # from a product's result, by ops in between
    for node in program.nodes:
        if node.name in between and any(r.node in products or r.node in made for r in node.inputs):
            made.add(node.name)
    read = _read_by(program, products, between)
    return products | {name for name in made if name in read}


def _read_by(program: Program, products: Collection[str], between: Mapping[str, Node]) -> set[str]:
    """Returns the nodes from which an operand of a product is computed by ops in ``between``."""
    found: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in products or (node.name in between and node.name in found):
            found.update(r.node for r in node.inputs)
    return found
