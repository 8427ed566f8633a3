"""Ops as rules see them, written as types: ``view("MatMul", ["float32[4,6]", "float32[6,8]"], ["float32[4,8]"])``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whale.ir.layout import Placement, parse_placement
from whale.ir.program import Node
from whale.ir.values import TensorType
from whale.sharding_rules import OpView, Strategy, find_rule


def tensor(text: str) -> TensorType:
    """``float32[4,?]``; ``float32[*]`` has an unknown rank."""
    dtype, _, dims = text.partition("[")
    dims = dims.rstrip("]")
    if dims == "*":
        return TensorType(dtype, None)
    return TensorType(dtype, tuple(None if d == "?" else int(d) for d in dims.split(",") if d))


def view(
    op: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    consts: Mapping[int, Any] | None = None,
    parts: int = 2,
    **attrs: Any,
) -> OpView:
    known = {i: np.asarray(v, np.int32) for i, v in (consts or {}).items()}
    node = Node("n", op, (), (), attrs, tuple(map(tensor, outputs)))
    return OpView(node, tuple(map(tensor, inputs)), parts, known.get)


def placements(text: str) -> list[Placement]:
    return [parse_placement(p) for p in text.split()]


def strategies(op: OpView, current: str, wanted: str = "") -> list[str]:
    """The strategies of the op's rule, as text; without the replicated one."""
    return [str(s) for s in found(op, current, wanted)[:-1]]


def found(op: OpView, current: str, wanted: str = "") -> list[Strategy]:
    rule = find_rule(op.node.op)
    assert rule is not None
    return rule.strategies(op, placements(current), placements(wanted))
