"""Recognises elementwise arithmetic, and writes it as text for Whale's kernels
(whale_ops/core/compute/update_program.h).

The text consists of instructions on registers, and of results: ``Mul t0 v0 s0`` multiplies tensor 0 by scalar 0. An
operand may have the result's shape, or be broadcast as a scalar, a row or a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

from whale.ir.ops import CONVOLUTIONS, FILTER_GRADIENTS, IDENTITIES
from whale.ir.program import COMPILED, Node, Program, Ref
from whale.ir.values import TensorType, require_static_shape

MOST_OF_A_KIND = 64  # operands of each kind that the text can name
SUMS = ("Sum", "Mean")  # instructions that reduce an operand over all but its last dimensions

# TensorFlow op -> its name in the text. Results are rounded as TensorFlow's are.
UNARY = {"Neg": "Neg", "Abs": "Abs", "Sign": "Sign", "Square": "Square", "Sqrt": "Sqrt"}

# Of float64 only: in float32 TensorFlow approximates these, differently on each processor.
UNARY_OF_DOUBLES = {"Rsqrt": "Rsqrt", "Reciprocal": "Reciprocal", "Inv": "Reciprocal"}
BINARY = {
    "Add": "Add",
    "AddV2": "Add",
    "Sub": "Sub",
    "Mul": "Mul",
    "RealDiv": "Div",
    "Maximum": "Max",
    "Minimum": "Min",
}
ADDED_FROM_LEFT = 8  # AddN adds up to so many operands one after the other, from the left
DTYPES = ("float32", "float64")
_RECTIFIERS = {"Relu": "Relu", "Relu6": "Relu6"}
_RECTIFIERS_GRADIENTS = {"ReluGrad": "ReluGrad", "Relu6Grad": "Relu6Grad"}
REPEATS = frozenset(("Tile", "BroadcastTo"))
# Ops of which it matters what produces their operands, beside its types.
READS_PRODUCERS = frozenset((*_RECTIFIERS, "BiasAdd"))
_SUMS = {"Sum": "Sum", "Mean": "Mean", "BiasAddGrad": "Sum"}
_LEAST_SUM, _LEAST_SUMMED = 8, 16  # least number of elements of a sum, and of summands of each
_BIASED = (CONVOLUTIONS - FILTER_GRADIENTS) | {"MatMul"}  # ops with which TensorFlow fuses a bias
_LEAST_RUN = 16  # least number of elements over which one element of a column is repeated: a vector register's


class Value(NamedTuple):
    """Represents a value in the instructions.

    Attributes:
      kind: "=": the result of an instruction; else the kind of operand: v (tensor), s (scalar), r (row), c (column), o
        (old value of a variable).
      number: number of the instruction, or of the operand among those of its kind.
    """

    kind: str
    number: int


Step = tuple[str, tuple[Value, ...]]


@dataclass
class Instructions:
    """Collects instructions, as (operation, operands), whose results have no registers yet: a result is named by its
    instruction's number.
    """

    steps: list[Step] = field(default_factory=list)

    def add(self, op: str, *operands: Value) -> Value:
        """Adds an instruction and returns its result."""
        self.steps.append((op, operands))
        return Value("=", len(self.steps) - 1)

    def add_sum(self, operands: list[Value]) -> Value:
        """Adds instructions that sum the operands from left to right, as AddN does, and returns the total."""
        total = operands[0]
        for one in operands[1:]:
            total = self.add("Add", total, one)
        return total


@lru_cache(maxsize=256)
def place_instructions(
    steps: tuple[Step, ...], final: tuple[Value, ...], results: tuple[Value, ...]
) -> tuple[str, ...] | None:
    """Writes instructions as lines of text, and assigns registers to their results; returns None if there are too many
    temporary values.

    Registers are "n0", "n1", .. for new values of variables, "y0", .. for values that other nodes read, "z0", .. for
    results of ``SUMS``, in their order, and "t0", .. for temporary values.

    Args:
      steps: the instructions.
      final: the new value of each variable, in the order of "n0", "n1", ...
      results: the values that other nodes read, in the order of "y0", "y1", ...
    """
    last: dict[Value, int] = {}
    for i, (_, operands) in enumerate(steps):
        last.update(dict.fromkeys(operands, i))
    last.update({value: len(steps) for value in results})  # results may be copied after the last instruction
    places: dict[Value, str] = {}
    copies: list[str] = []
    # A result register can be read again; a variable can be written once its old value is no longer read.
    for i, value in enumerate(results):
        if value.kind == "=" and value not in places:
            places[value] = f"y{i}"
    for i, value in enumerate(final):
        free = value.kind == "=" and value not in places and last.get(Value("o", i), -1) <= value.number
        if free:
            places[value] = f"n{i}"
    ends = {value for value in (*final, *results) if value not in places}
    lines: list[str] = []
    unused: list[int] = []
    count = sums = 0
    for i, (op, operands) in enumerate(steps):
        read = [_format_value(o, places) for o in operands]
        for one in dict.fromkeys(operands):
            if last[one] == i and one not in ends and places.get(one, "").startswith("t"):
                unused.append(int(places[one][1:]))
        value = Value("=", i)
        if op in SUMS:
            lines.append(f"{op} z{sums} {read[0]}")
            sums += 1
            continue
        if value not in places:
            if not unused:
                unused.append(count)
                count += 1
            places[value] = f"t{unused.pop()}"
            if value not in last and value not in ends:  # nothing reads it
                unused.append(int(places[value][1:]))
        lines.append(" ".join((op, places[value], *read)))
    for letter, values in (("y", results), ("n", final)):
        for i, value in enumerate(values):
            if places.get(value) != f"{letter}{i}" and (letter, value) != ("n", Value("o", i)):
                copies.append(f"Copy {letter}{i} {_format_value(value, places)}")
    return None if count > MOST_OF_A_KIND else (*lines, *copies)


def _format_value(value: Value, places: Mapping[Value, str]) -> str:
    return places[value] if value.kind == "=" else f"{value.kind}{value.number}"


def find_broadcast_kind(given: TensorType, whole: TensorType) -> str:
    """Returns how an operand of type ``given`` is broadcast to ``whole``: "v" not at all, "s" as a scalar, "r" as a
    row, "c" as a column; "" if in no such way.
    """
    if given.shape == whole.shape:
        return "v"
    if given.elements == 1:
        return "s"
    sizes, own = require_static_shape(whole), require_static_shape(given)
    if len(own) > len(sizes):
        return ""
    first = next(i for i, n in enumerate(own) if n != 1)
    if own[first:] == sizes[len(sizes) - len(own) + first :]:
        return "r"
    end = len(own) - next(i for i, n in enumerate(reversed(own)) if n != 1)
    fits = len(own) == len(sizes) and own[:end] == sizes[:end] and prod(sizes[end:]) >= _LEAST_RUN
    return "c" if fits else ""


def find_elementwise_type(program: Program, node: Node) -> TensorType | None:
    """Returns the type of the node's result if it is elementwise arithmetic that the text can express; else None."""
    if len(node.outputs) != 1 or node.attrs.get(COMPILED) or node.marks.on_host:
        return None
    kind = node.outputs[0]
    if kind.dtype not in DTYPES or not kind.is_static or not kind.shape or not kind.elements:
        return None
    op = node.op
    read = node.inputs[:1] if op in REPEATS else node.inputs
    operands = [program.find_type(ref) for ref in read]
    if any(t.dtype != kind.dtype or not t.is_static for t in operands):
        return None
    if op in REPEATS:
        # Not a Tile that repeats a dimension of size 2 or more: that is no broadcast.
        given = require_static_shape(operands[0])
        repeats = op == "BroadcastTo" or all(a in (1, b) for a, b in zip(given, require_static_shape(kind)))
        return kind if repeats and find_broadcast_kind(operands[0], kind) in ("s", "r", "c") else None
    if op == "BiasAdd":
        return (
            kind
            if node.attrs.get("data_format", "NHWC") == "NHWC" and not is_contraction_result(program, node)
            else None
        )
    if op in BINARY or op == "SquaredDifference":
        return kind if all(find_broadcast_kind(t, kind) for t in operands) else None
    if any(t.shape != kind.shape for t in operands) or len(operands) > ADDED_FROM_LEFT:
        return None
    if op in _RECTIFIERS:
        return None if is_contraction_result(program, node) else kind
    known = op in UNARY or op in IDENTITIES or op == "AddN" or op in _RECTIFIERS_GRADIENTS
    return kind if known or (op in UNARY_OF_DOUBLES and kind.dtype == "float64") else None


def is_contraction_result(program: Program, node: Node) -> bool:
    """Returns True if ``node`` reads the result of a product or convolution, directly or after its bias was added.

    TensorFlow's own kernels fuse bias and activation into the product.
    """
    made = program.by_name[node.inputs[0].node]
    return made.op in _BIASED or (made.op == "BiasAdd" and is_contraction_result(program, made))


def find_sum_type(program: Program, node: Node) -> TensorType | None:
    """Returns the type of the tensor that a node sums over its first dimensions; None if the node is no such sum, or
    too small to gain.
    """
    if node.op not in _SUMS or len(node.outputs) != 1 or node.attrs.get(COMPILED) or node.marks.on_host:
        return None
    whole, sum_type = program.find_type(node.inputs[0]), node.outputs[0]
    if whole.dtype not in DTYPES or not whole.is_static or not sum_type.is_static or not whole.elements:
        return None
    sizes = require_static_shape(whole)
    if node.op == "BiasAddGrad":
        if node.attrs.get("data_format", "NHWC") != "NHWC":
            return None
        first = len(sizes) - 1
    else:
        axes = program.const(node.inputs[1])
        if axes is None:
            return None
        over = sorted({int(axis) % len(sizes) for axis in axes.reshape(-1)}) if sizes else []
        first = len(over)
        if over != list(range(first)):
            return None
    own = prod(sizes[first:])
    return whole if 0 < first < len(sizes) and own >= _LEAST_SUM and whole.elements >= _LEAST_SUMMED * own else None


def emit_instructions(node: Node, code: Instructions, operand: Callable[[Ref], Value]) -> Value:
    """Adds the instructions that compute ``node`` to ``code``, and returns its value.

    Args:
      operand: returns the value of an operand of the node.
    """
    if node.op in IDENTITIES or node.op in REPEATS:
        return operand(node.inputs[0])
    if node.op in _SUMS:
        return code.add(_SUMS[node.op], operand(node.inputs[0]))
    operands = [operand(ref) for ref in node.inputs]
    if node.op == "AddN":
        return code.add_sum(operands)
    if node.op == "SquaredDifference":
        return code.add("Square", code.add("Sub", *operands))
    if node.op == "BiasAdd":
        return code.add("Add", *operands)
    for table in (BINARY, UNARY, _RECTIFIERS, _RECTIFIERS_GRADIENTS):
        if node.op in table:
            return code.add(table[node.op], *operands)
    return code.add(UNARY_OF_DOUBLES[node.op], *operands)
