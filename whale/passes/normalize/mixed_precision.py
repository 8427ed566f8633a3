"""Implements mixed precision (``precision.compute_dtype``): products and convolutions in 16 bits; sums, losses and
updates in float32.

Follows Micikevicius et al., "Mixed precision training", ICLR 2018; the lists of ops are a part of those of TensorFlow's
``auto_mixed_precision``. An op that only passes numbers on or is cheap (``_BETWEEN``) is computed in 16 bits if it is
between two products. The result of the last product, such as a weight's gradient, is cast to float32 before it is
summed over ranks and micro-batches. Nodes marked ``full_precision`` stay in float32: routers of experts, whose choices
would change by rounding. Variables stay float32. bfloat16 has the range of float32, so losses need no scaling; for
float16 see ``whale.passes.normalize.loss_scaling``.

Decision: 0054.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from whale.ir.ops import CONTRACTIONS, VIEWS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, TensorType

_WIDE = "float32"
_PRODUCTS = CONTRACTIONS - {"BatchMatMulV3"}  # whose operands and result have a dtype attribute each, not one T
# Ops whose floating-point operands and results all have the dtype T.
_BETWEEN = VIEWS | frozenset(
    "Add AddV2 AddN Sub Mul Neg BiasAdd Relu ReluGrad Relu6 Relu6Grad LeakyRelu LeakyReluGrad Tanh TanhGrad Sigmoid "
    "SigmoidGrad Elu EluGrad Maximum Minimum Select SelectV2 Transpose ConcatV2 Slice StridedSlice StridedSliceGrad "
    "Pad PadV2 Pack Unpack Split SplitV Tile BroadcastTo MaxPool MaxPoolGrad".split()
)


def lower_precision(program: Program, low_dtype: str) -> Program:
    """Computes the float32 products of ``program`` and its functions, and the ops between two of them, in
    ``low_dtype``; adds casts around them.
    """
    bodies = {name: _lower_graph(body, low_dtype) for name, body in program.functions.items()}
    return replace(_lower_graph(program, low_dtype), functions=bodies)


def _lower_graph(program: Program, low_dtype: str) -> Program:
    low = _find_low(program)
    if not low:
        return program
    nodes: dict[str, Node] = {}
    casts: dict[tuple[Ref, str], Ref] = {}

    def as_type(ref: Ref, dtype: str, scope: str) -> Ref:
        """Returns ``ref``, which was float32 in the program, as ``dtype``; adds one cast per tensor and dtype if
        needed.
        """
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
    """Returns the names of the nodes to compute in 16 bits: products, and ops between two of them."""
    fitting = {n.name: n for n in program.nodes if n.attrs.get("T") == _WIDE and not n.marks.full_precision}
    products = {name for name, node in fitting.items() if node.op in _PRODUCTS}
    between = {name: node for name, node in fitting.items() if node.op in _BETWEEN}
    made: set[str] = set()  # nodes computed from a product's result through ops in ``between``
    for node in program.nodes:
        if node.name in between and any(r.node in products or r.node in made for r in node.inputs):
            made.add(node.name)
    read = _read_by(program, products, between)
    return products | {name for name in made if name in read}


def _read_by(program: Program, products: Collection[str], between: Mapping[str, Node]) -> set[str]:
    """Returns the nodes from which an operand of a product is computed through ops in ``between``."""
    found: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in products or (node.name in between and node.name in found):
            found.update(r.node for r in node.inputs)
    return found
