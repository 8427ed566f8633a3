"""Defines sharding rules of losses over classes: by examples. To shard the classes, the op is decomposed elsewhere."""

from __future__ import annotations

from whale.sharding_rules.base import OpView
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def softmax_loss(op: OpView) -> str:
    """Writes the sharding rule of SoftmaxCrossEntropyWithLogits, from whether logits and labels broadcast."""
    a, b = op.inputs[0].shape, op.inputs[1].shape
    if a is None or b is None:
        return REPLICATED if 1 in (a or b or ()) else "b c^, b c^ -> b, b c^"  # a single row may be every row's
    if a == b:
        return "b c^, b c^ -> b, b c^"
    words = [("1" if s[0] == 1 and t[0] != 1 else "b") + (" 1" if s[1] == 1 else " c^") for s, t in ((a, b), (b, a))]
    return f"{words[0]}, {words[1]} -> b, b c^"


RULES = (
    rule("Softmax LogSoftmax", "* c^ -> * c^"),
    rule("SoftmaxCrossEntropyWithLogits", softmax_loss),
    rule("SparseSoftmaxCrossEntropyWithLogits", "b c^, b -> b, b c^"),
    rule("InTopK", "b c^, b -> b"),
    rule("InTopKV2", "b c^, b, . -> b"),
)
