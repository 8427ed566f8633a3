"""Defines sharding rules of recurrent kernels: by batch, in which case the gradients of weights are partial sums.

A cuDNN reserve space is opaque, and belongs to the shard of the batch that made it. Its term says that it is sharded by
batch, so that only a gradient that is sharded in the same way can take it.
"""

from __future__ import annotations

from whale.sharding_rules.base import OpView
from whale.sharding_rules.notation import FIRST_RANK
from whale.sharding_rules.registry import rule


def _write_terms(op: OpView, flag: str) -> tuple[str, str, str]:
    """Writes the terms of the (input sequence, output sequence, state).

    Args:
      flag: flag of the batch: "+" in gradients, where weights' gradients become partial.
    """
    b = f"b{flag}"
    if op.attr("time_major", True):
        return f"t^ {b} i^", f"t^ {b} o^", f"l^ {b} u^"
    return f"{b} t^ i^", f"{b} t^ o^", f"{b} l^ u^"


def _draws_random_numbers(op: OpView) -> bool:
    return float(op.attr("dropout", 0.0)) > 0 and bool(op.attr("is_training", True))


def cudnn(op: OpView) -> str:
    """Writes the sharding rule of CudnnRNN, from ``time_major``.

    With dropout it draws random numbers, and runs on the first rank only.
    """
    if _draws_random_numbers(op):
        return FIRST_RANK
    x, y, h = _write_terms(op, "")
    c = h if op.attr("rnn_mode", "lstm") == "lstm" else "."
    lengths = ", b" if len(op.inputs) == 5 else ""
    reserved = ", b" + ", b" * (len(op.outputs) - 4)
    c_out = h if c != "." else "=."
    return f"{x}, {h}, {c}, .{lengths} -> {y}, {h}, {c_out}{reserved}"


def cudnn_gradient(op: OpView) -> str:
    """Writes the sharding rule of CudnnRNNBackprop, from ``time_major``.

    With dropout it repeats the random numbers of the forward op, and runs on the first rank only.
    """
    if _draws_random_numbers(op):
        return FIRST_RANK
    x, y, h = _write_terms(op, "+")
    c = h if op.attr("rnn_mode", "lstm") == "lstm" else "."
    lengths = ", b+" if op.node.op.endswith("V3") else ""
    reserved = ", b+" if op.node.op == "CudnnRNNBackprop" else ", b+, b+"
    dx, _, dh = _write_terms(op, "")
    dc = dh if c != "." else "=."
    return f"{x}, {h}, {c}, .{lengths}, {y}, {h}, {c}, {y}, {h}, {c}{reserved} -> {dx}, {dh}, {dc}, p^"


_CELL = "b u^, " * 6 + "b u^"
_SEQUENCE = "t^ b u^, " * 6 + "t^ b u^"
_WEIGHTS = "., ., ., ., ."

RULES = (
    rule("CudnnRNN CudnnRNNV2 CudnnRNNV3", cudnn),
    rule("CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3", cudnn_gradient),
    rule("LSTMBlockCell", f"b i^, b u^, b u^, {_WEIGHTS} -> {_CELL}"),
    rule("LSTMBlockCellGrad", f"b+ i^, b+ u^, b+ u^, {_WEIGHTS}, {', '.join(['b+ u^'] * 8)} -> b u^, b g^, ., ., ."),
    rule("BlockLSTM BlockLSTMV2", f"., t^ b i^, b u^, b u^, {_WEIGHTS} -> {_SEQUENCE}"),
    rule(
        "BlockLSTMGrad BlockLSTMGradV2",
        f"., t^ b+ i^, b+ u^, b+ u^, {_WEIGHTS}, {', '.join(['t^ b+ u^'] * 9)} -> "
        "t^ b i^, b u^, b u^, w0^ w1^, ., ., ., g^",
    ),
    rule("GRUBlockCell", "b i^, b u^, ., ., ., . -> b u^, b u^, b u^, b u^"),
    rule("GRUBlockCellGrad", "b i^, b u^, ., ., ., ., b u^, b u^, b u^, b u^ -> b i^, b u^, b u^, b g^"),
)
