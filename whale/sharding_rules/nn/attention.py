"""Rules of attention as one operation, and of its gradient: queries, keys and values are split along the sequence.

These nodes are made of a program's attention for one axis (``whale.passes.normalize.attention_as_one``), and what a
rank runs in their place exchanges blocks of keys and values (``whale.partition.ring_attention``): no rank's kernel is
one of theirs.
"""

from __future__ import annotations

from whale.ir.layout import Shard, Strategy
from whale.ir.program import Node, Program
from whale.ir.values import Dims, TensorType
from whale.sharding_rules.base import OpView, make_labels, write_term
from whale.sharding_rules.registry import rule

ATTENTION, ATTENTION_GRADIENT = "WhaleAttention", "WhaleAttentionGrad"
RINGS = frozenset({ATTENTION, ATTENTION_GRADIENT})
_BEFORE_SIDES = {ATTENTION: 3, ATTENTION_GRADIENT: 6}


def has_queries(shape: Dims | None, scores: tuple[int, ...]) -> bool:
    """Tells whether a tensor that broadcasts over scores [.., queries, keys] varies over queries."""
    return shape is not None and len(shape) >= 2 and shape[-2] == scores[-2]


def has_keys(shape: Dims | None, scores: tuple[int, ...]) -> bool:
    """Tells whether a tensor that broadcasts over scores varies over keys."""
    return shape is not None and len(shape) >= 1 and shape[-1] == scores[-1]


def count_leading_operands(node: Node) -> int:
    """Returns the number of operands before those that scale and mask scores."""
    return _BEFORE_SIDES[node.op]


def count_ring_bytes(program: Program, node: Node, strategy: Strategy) -> int:
    """Returns the bytes sent in total: keys and values to every other rank, and their gradients back."""
    if not isinstance(strategy.inputs[0], Shard):
        return 0
    times = 1 if node.op == ATTENTION else 2
    return times * (len(strategy.inputs[0].sizes) - 1) * sum(program.find_type(r).bytes for r in node.inputs[1:3])


def attention(op: OpView) -> str:
    """the sequence, in queries, keys, values and what belongs to each query"""
    query, key, value, result = op.attr("dims")
    inputs = [
        _write_sequence_term(op.inputs[0], query, "q"),
        _write_sequence_term(op.inputs[1], key, "k"),
        _write_sequence_term(op.inputs[2], value, "v"),
    ]
    before = count_leading_operands(op.node)
    of_result = op.inputs[3] if op.node.op == ATTENTION_GRADIENT else op.node.outputs[0]
    if op.node.op == ATTENTION_GRADIENT:
        each = op.inputs[5]
        inputs += [
            _write_sequence_term(of_result, result, "d"),
            _write_sequence_term(of_result, result, "o"),
            _write_sequence_term(each, -2, "e"),
        ]
        outputs = [
            _write_sequence_term(op.inputs[0], query, "x"),
            _write_sequence_term(op.inputs[1], key, "y"),
            _write_sequence_term(op.inputs[2], value, "z"),
        ]
    else:
        outputs = [_write_sequence_term(of_result, result, "o"), _write_sequence_term(op.node.outputs[1], -2, "e")]
    for i, (side, queried) in enumerate(zip(op.inputs[before:], op.attr("queried"))):
        inputs.append(_write_sequence_term(side, -2 if queried else None, f"s{i}n"))
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def _write_sequence_term(t: TensorType, at: int | None, stem: str) -> str:
    """Writes a term in which dimension ``at`` is the sequence and nothing else can be cut."""
    labels = [f"{x}^" for x in make_labels(stem, len(t.shape or ()))]
    if at is not None:
        labels[at] = "s"
    return write_term(labels)


RULES = (rule("WhaleAttention WhaleAttentionGrad", attention),)
