"""Defines sharding rules of attention as one op, and of its gradient: queries, keys and values are sharded by sequence.

A pass turns a program's attention into these nodes, for one mesh axis (``whale.passes.normalize.attention_as_one``).
They have no kernel: on a rank they become nodes that exchange blocks of keys and values
(``whale.partition.ring_attention``).
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
    """Returns True if a tensor that broadcasts over ``scores`` [.., queries, keys] differs between queries.

    Args:
      shape: shape of the tensor; None if its rank is unknown.
      scores: shape of the scores.
    """
    return shape is not None and len(shape) >= 2 and shape[-2] == scores[-2]


def has_keys(shape: Dims | None, scores: tuple[int, ...]) -> bool:
    """Returns True if a tensor that broadcasts over ``scores`` [.., queries, keys] differs between keys."""
    return shape is not None and len(shape) >= 1 and shape[-1] == scores[-1]


def count_leading_operands(node: Node) -> int:
    """Returns the number of operands before the side operands, which scale and mask scores."""
    return _BEFORE_SIDES[node.op]


def count_ring_bytes(program: Program, node: Node, strategy: Strategy) -> int:
    """Returns the bytes that all ranks send for an attention op: keys and values to every other rank.

    A gradient sends as many bytes again, for the gradients of keys and values; an op that is not sharded sends none.
    """
    if not isinstance(strategy.inputs[0], Shard):
        return 0
    times = 1 if node.op == ATTENTION else 2
    return times * (len(strategy.inputs[0].sizes) - 1) * sum(program.find_type(r).bytes for r in node.inputs[1:3])


def attention(op: OpView) -> str:
    """Writes the sharding rule of attention, from the sequence dimension of queries, keys, values and side operands."""
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
    """Writes a term in which only dimension ``at``, the sequence, can be sharded; None: no dimension can."""
    labels = [f"{x}^" for x in make_labels(stem, len(t.shape or ()))]
    if at is not None:
        labels[at] = "s"
    return write_term(labels)


RULES = (rule("WhaleAttention WhaleAttentionGrad", attention),)
