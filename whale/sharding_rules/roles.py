"""Replaces operands that carry shapes by local constants.

Roles: ``[outN]`` shape of output N; ``[inN]`` shape of operand N; ``[shape]`` shape of output 0, one size may be
unknown (-1); ``[elements]`` shape of a list's elements, any size may be unknown.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from whale.errors import RuleError
from whale.ir.layout import Placement, Split, local_shape
from whale.ir.values import Dims, TensorType, find_numpy_dtype
from whale.sharding_rules.base import OpView, Strategy
from whale.sharding_rules.notation import Line, Term

_NUMBERED = re.compile(r"(in|out)(\d+)$")


def _find_subject(role: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
    """Returns the item of ``inputs`` or ``outputs`` whose shape the role carries."""
    if role == "shape":
        return outputs[0]
    match = _NUMBERED.match(role)
    if match is None:
        raise RuleError("an unknown role", given=f"[{role}]", expected="[outN], [inN], [shape], [elements]",
                        action="correct the rule line")  # fmt: skip
    return (inputs if match[1] == "in" else outputs)[int(match[2])]


def list_operand_terms(line: Line, count: int) -> list[Term]:
    """Returns the term of each of ``count`` operands, variadic terms repeated."""
    at = next((i for i, t in enumerate(line.inputs) if t.variadic), None)
    if at is None:
        return list(line.inputs)
    extra = count - len(line.inputs) + 1
    return [*line.inputs[:at], *[line.inputs[at]] * extra, *line.inputs[at + 1 :]]


def can_localize(
    line: Line, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], strategy: Strategy
) -> bool:
    """Tells whether the shapes that roles carry are static enough for local constants under ``strategy``."""
    for term in list_operand_terms(line, len(inputs)):
        if term.kind != "role" or term.role == "elements":
            continue
        placement = _find_subject(term.role, strategy.inputs, strategy.outputs)
        if not isinstance(placement, Split):
            continue
        shape = _find_subject(term.role, inputs, outputs).shape
        unknown = 0 if shape is None else sum(s is None for i, s in enumerate(shape) if i != placement.dim)
        if shape is None or unknown > (1 if term.role == "shape" else 0):
            return False
    return True


def compute_constants(line: Line, op: OpView, strategy: Strategy, coordinate: int) -> dict[int, np.ndarray]:
    """Maps operand numbers to local constants, for each operand that has a role whose tensor is cut."""
    found: dict[int, np.ndarray] = {}
    for i, term in enumerate(list_operand_terms(line, len(op.inputs))):
        if term.kind != "role":
            continue
        dtype = find_numpy_dtype(op.inputs[i].dtype)
        if term.role == "elements":
            value = _compute_element_shape(op, strategy, coordinate, i)
            if value is not None:
                found[i] = value.astype(dtype)
            continue
        placement: Placement = _find_subject(term.role, strategy.inputs, strategy.outputs)
        if not isinstance(placement, Split):
            continue
        shape: Dims = local_shape(_find_subject(term.role, op.inputs, op.outputs).shape, placement, coordinate)
        if op.inputs[i].shape == (len(shape) - 2,):  # spatial sizes only: convolution gradients accept them
            shape = shape[2:] if str(op.attr("data_format", "")).startswith("NC") else shape[1:-1]
        found[i] = np.array([-1 if s is None else s for s in shape], dtype)
    return found


def _compute_element_shape(op: OpView, strategy: Strategy, coordinate: int, i: int) -> np.ndarray | None:
    """Returns the element shape that operand ``i`` gives, with the local size where elements are cut; None:
    leave it.
    """
    if op.attr("element_dtype") == "variant":
        return None  # a list of lists: its elements are handles, and what is cut are the elements of the lists inside
    pairs = list(zip(op.inputs, strategy.inputs)) + list(zip(op.outputs, strategy.outputs))
    placement = next((p for t, p in pairs if t.dtype == "variant" and isinstance(p, Split)), None)
    if placement is None:
        return None
    value = op.const(i)
    if value is None:
        rank = (op.inputs[i].shape or (None,))[0]
        return np.full((rank,), -1) if rank is not None else np.array(-1)
    if value.ndim == 0:
        return None
    value = value.copy()
    value[placement.dim] = placement.local_size(coordinate)
    return value
