"""Initial values that are made part by part, so that no rank ever holds a whole one.

What an initializer computes is recorded as a small program, without running it. Little values in it (shapes, seeds, a
generator's state) are computed at once, in the order in which the script would; what is large is computed later, for
the part that a rank holds. Random numbers come from counters (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011), so a part of a stream begins at its own counter: the elements are, bit by bit, those of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import execute
from tensorflow.python.framework import func_graph

from whale.ir.layout import Split

# What is computed at once when a variable is created; smaller variables are made as ever.
_LITTLE_BYTES = 4096
# Rows of random numbers that are drawn together where a part is some columns of them.
_BLOCK_BYTES = 16 << 20
# Elements that one step of the counter yields, by op and element size; TensorFlow's random_distributions.h.
_PHILOX_WORDS = 4  # 32-bit words of one step
_RESERVED = 256  # words that the generator sets aside for each element of a truncated normal distribution
_PHILOX, _ANY_ALGORITHM = 1, 3

_RANDOM = frozenset({"StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"})
_POINTWISE = frozenset(
    {"Identity", "StopGradient", "Cast", "Mul", "Add", "AddV2", "Sub", "RealDiv", "Div", "Neg", "Sqrt", "Square", "Exp",
     "Log", "Tanh", "Erfinv", "Sin", "Cos", "Abs", "Floor", "Maximum", "Minimum", "Pow", "Sign", "LogicalNot",
     "LogicalAnd", "LogicalOr", "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "SelectV2"}
)  # fmt: skip
# Stateful ops that read and advance little states when a variable is created (a generator of seeds).
_OF_STATES = frozenset({"ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})

Reader = Callable[[tuple[int, ...], tuple[int, ...]], Any]


@dataclass(frozen=True)
class _Op:
    """One recorded op: operands are numbers of values, results are numbered from ``first``."""

    kind: str
    attrs: tuple[Any, ...]
    operands: tuple[int, ...]
    first: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Initial:
    """An initial value that has not been computed.

    Attributes:
      little: number of a value -> the value, computed when the variable was created.
      ops: what remains to be computed, in order.
      result: number of the value that is the initial value.
      reader: gives a region of the value instead, where it comes from somewhere else (a checkpoint).
    """

    shape: tuple[int, ...]
    dtype: str
    little: dict[int, np.ndarray]
    ops: tuple[_Op, ...]
    result: int
    reader: Reader | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(tf.as_dtype(self.dtype).size)

    @property
    def is_divisible(self) -> bool:
        """Whether a part is computed without the whole."""
        return self.reader is not None or all(_is_divisible(op) for op in self.ops)

    def whole(self) -> tf.Tensor:
        """The value on this rank."""
        if self.reader is not None:
            return self._read((0,) * len(self.shape), self.shape)
        return _Part(self, None, 0, 0).value(self.result)

    def part(self, placement: Split, coordinate: int) -> tf.Tensor:
        """What ``coordinate`` holds of it; in bounded memory beside the part where the value is divisible."""
        pieces = []
        for run in range(placement.blocks):
            begin = run * sum(placement.sizes) + placement.offset(coordinate)
            pieces.append(self._run(placement.dim, begin, placement.sizes[coordinate]))
        return pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis=placement.dim)

    def _run(self, dim: int, begin: int, size: int) -> tf.Tensor:
        if self.reader is not None:
            rank = len(self.shape)
            first = tuple(begin if d == dim else 0 for d in range(rank))
            return self._read(first, tuple(size if d == dim else n for d, n in enumerate(self.shape)))
        if not self.is_divisible:
            return _cut(self.whole(), dim, begin, size)
        return _Part(self, dim, begin, size).value(self.result)

    def _read(self, begin: tuple[int, ...], size: tuple[int, ...]) -> tf.Tensor:
        assert self.reader is not None
        return tf.convert_to_tensor(self.reader(begin, size), tf.as_dtype(self.dtype))


def uniform_value(value: tf.Tensor) -> Initial | None:
    """An eager tensor whose elements are all alike (zeros of an optimizer's slot), to be made again; else None."""
    shape, dtype = tuple(value.shape.as_list()), value.dtype
    if (
        math.prod(shape) * dtype.size <= _LITTLE_BYTES
        or dtype.size not in (1, 2, 4, 8)
        or not dtype.is_numpy_compatible
    ):
        return None
    words = value.numpy().reshape(-1).view(f"uint{8 * dtype.size}")
    if any(np.any(words[i : i + _BLOCK_BYTES] != words[0]) for i in range(0, words.size, _BLOCK_BYTES)):
        return None
    attrs = ("T", dtype.as_datatype_enum, "index_type", tf.int32.as_datatype_enum)
    fill = _Op("Fill", attrs, (0, 1), 2, (shape,), (dtype.name,))
    little = {0: np.array(shape, np.int32), 1: value.numpy().reshape(-1)[0].copy()}
    return Initial(shape, dtype.name, little, (fill,), 2)


def record(make: Callable[[], Any], dtype: Any = None) -> Initial | tf.Tensor | None:
    """What ``make`` computes: not computed yet, or its value where that is little; None: it has to be run to know.

    Raises what ``make`` raises in a graph, and ValueError where only running it can tell what it does.
    """
    graph = func_graph.FuncGraph("whale_initial")
    with graph.as_default(), tf.variable_creator_scope(_refuse_variable):
        made = tf.convert_to_tensor(make(), dtype=tf.as_dtype(dtype) if dtype is not None else None)
    operations = graph.get_operations()
    outer = {id(inner): external for external, inner in graph.captures}
    if not all(_is_recordable(op, outer) for op in operations) or not made.shape.is_fully_defined():
        return None
    numbers: dict[int, int] = {}
    little: dict[int, Any] = {}
    later: list[_Op] = []
    for op in operations:
        first = len(numbers)
        for output in op.outputs:
            numbers[id(output)] = len(numbers)
        if op.type == "Placeholder":
            little[first] = outer[id(op.outputs[0])]
            continue
        operands = tuple(numbers[id(t)] for t in op.inputs)
        shapes = tuple(tuple(t.shape.as_list()) for t in op.outputs)
        recorded = _Op(op.type, _attrs(op), operands, first, shapes, tuple(t.dtype.name for t in op.outputs))
        if all(n in little for n in operands) and _is_little(op):
            values = _execute(recorded, [little[n] for n in operands])
            little.update((first + i, v) for i, v in enumerate(values))
        elif op.op_def.is_stateful:
            raise ValueError(f"{op.name} waits for what is not computed yet")
        else:
            later.append(recorded)
    result = numbers[id(made)]
    if result in little:
        return tf.convert_to_tensor(little[result])
    needed = _needed(later, result)
    kept = {n: little[n].numpy() for op in needed for n in op.operands if n in little}
    return Initial(tuple(made.shape.as_list()), made.dtype.name, kept, tuple(needed), result)


def _refuse_variable(next_creator: Any, **kwargs: Any) -> Any:
    raise ValueError("an initializer that creates variables is not recorded")


def _is_recordable(op: Any, outer: dict[int, Any]) -> bool:
    if op.type == "Placeholder":
        return id(op.outputs[0]) in outer
    if op.op_def.is_stateful and op.type not in _OF_STATES:
        return False
    if any(_carries_function(a.type) for a in op.op_def.attr):
        return False
    if not all(t.shape.is_fully_defined() for t in op.outputs):
        return False
    if op.type == "Const" or op.op_def.is_stateful:
        return _is_little(op)
    return True


def _carries_function(kind: str) -> bool:
    return kind in ("func", "list(func)")


def _is_little(op: Any) -> bool:
    return sum(t.shape.num_elements() * max(1, t.dtype.size) for t in op.outputs) <= _LITTLE_BYTES


def _needed(ops: Sequence[_Op], result: int) -> list[_Op]:
    wanted, found = {result}, []
    for op in reversed(ops):
        if any(op.first + i in wanted for i in range(len(op.shapes))):
            wanted.update(op.operands)
            found.append(op)
    return found[::-1]


def _attrs(op: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for attr in op.op_def.attr:
        value = op.get_attr(attr.name)
        if isinstance(value, tf.DType):
            value = value.as_datatype_enum
        elif isinstance(value, list):
            value = [v.as_datatype_enum if isinstance(v, tf.DType) else v for v in value]
        found += [attr.name, value]
    return tuple(found)


def _execute(op: _Op, operands: Sequence[Any]) -> list[tf.Tensor]:
    """Runs the op's own kernel, as an eager call would."""
    if op.kind == "Const":
        return [tf.constant(tf.make_ndarray(op.attrs[op.attrs.index("value") + 1]))]
    tensors = [tf.convert_to_tensor(t) for t in operands]
    return list(execute.execute(op.kind.encode(), len(op.shapes), tensors, op.attrs, tf_context.context()))


def _is_divisible(op: _Op) -> bool:
    return len(op.shapes) == 1 and (op.kind in _POINTWISE or op.kind in _RANDOM or op.kind == "Fill")


class _Part:
    """Computes indices ``begin`` to ``begin + size`` of dimension ``dim`` (None: everything) of a recorded value."""

    def __init__(self, initial: Initial, dim: int | None, begin: int, size: int):
        self.initial, self.dim, self.begin, self.size = initial, dim, begin, size
        self.maker = {op.first + i: op for op in initial.ops for i in range(len(op.shapes))}
        self.readers: dict[int, int] = {}
        for op in initial.ops:
            for n in op.operands:
                self.readers[n] = self.readers.get(n, 0) + 1
        self.done: dict[int, tf.Tensor] = {}

    def value(self, number: int) -> tf.Tensor:
        for op in self.initial.ops:
            shape = op.shapes[0]
            if self.dim is None:
                values = _execute(op, [self._operand(n) for n in op.operands])
            elif op.kind in _RANDOM:
                values = [self._random(op, shape)]
            elif op.kind == "Fill":
                dims = np.array(self._local(shape), np.int32)
                attrs = _with(op.attrs, "index_type", tf.int32.as_datatype_enum)
                values = _execute(_Op(op.kind, attrs, (), op.first, op.shapes, op.dtypes), [dims, self._little(op, 1)])
            else:
                values = _execute(op, [self._cut_operand(n, shape) for n in op.operands])
            self.done.update((op.first + i, v) for i, v in enumerate(values))
            for n in op.operands:  # a value goes as soon as nobody needs it
                self.readers[n] -= 1
                if not self.readers[n] and n != number:
                    self.done.pop(n, None)
        return self.done[number]

    def _little(self, op: _Op, operand: int) -> np.ndarray:
        return self.initial.little[op.operands[operand]]

    def _operand(self, number: int) -> Any:
        return self.done[number] if number in self.done else self.initial.little[number]

    def _axis(self, shape: tuple[int, ...]) -> int | None:
        """Which dimension of a tensor of ``shape`` is cut, given NumPy's broadcasting; None: it is whole."""
        assert self.dim is not None
        axis = self.dim - (len(self.initial.shape) - len(shape))
        return axis if axis >= 0 and shape[axis] != 1 else None

    def _local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = self._axis(shape)
        return tuple(self.size if d == axis else n for d, n in enumerate(shape))

    def _cut_operand(self, number: int, shape: tuple[int, ...]) -> Any:
        if number in self.maker:
            return self.done[number]
        value = self.initial.little[number]
        axis = self._axis(value.shape)
        return value if axis is None else _cut(value, axis, self.begin, self.size)

    def _random(self, op: _Op, shape: tuple[int, ...]) -> tf.Tensor:
        axis = self._axis(shape)
        if axis is None:
            return _draw(op, self.initial.little, 0, math.prod(shape), shape)
        inner = math.prod(shape[axis + 1 :])
        rows, row = math.prod(shape[:axis]), shape[axis] * inner
        local = self._local(shape)
        begin, size = self.begin * inner, self.size * inner
        if rows == 1:
            return _draw(op, self.initial.little, begin, size, local)
        itemsize = tf.as_dtype(op.dtypes[0]).size
        pieces = []
        if size * itemsize >= 1 << 18:  # long enough to draw each row's piece by itself
            pieces = [_draw(op, self.initial.little, r * row + begin, size, (1, size)) for r in range(rows)]
        else:
            at_once = max(1, _BLOCK_BYTES // (row * itemsize))
            for r in range(0, rows, at_once):
                count = min(at_once, rows - r)
                block = _draw(op, self.initial.little, r * row, count * row, (count, row))
                pieces.append(tf.slice(block, [0, begin], [count, size]))
        return tf.reshape(tf.concat(pieces, axis=0), local)


def _draw(op: _Op, little: dict[int, np.ndarray], begin: int, count: int, shape: tuple[int, ...]) -> tf.Tensor:
    """Elements ``begin`` to ``begin + count`` of the stream that the whole tensor takes its elements from."""
    _, key, counter, algorithm = (little[n] for n in op.operands)
    assert int(algorithm) in (_PHILOX, _ANY_ALGORITHM), algorithm
    # The kernel deals the stream out in groups, each of which begins at a counter of its own.
    group = 2 if op.dtypes[0] in ("float64", "int64", "uint64") else 4
    steps = group * _RESERVED // _PHILOX_WORDS if op.kind == "StatelessTruncatedNormalV2" else 1
    skipped = begin // group
    moved = int(counter[0]) + (int(counter[1]) << 64) + skipped * steps
    where = np.array([moved & (2**64 - 1), (moved >> 64) & (2**64 - 1)], np.uint64)
    before = begin - skipped * group
    dims = np.array([before + count], np.int64)
    attrs = _with(op.attrs, "Tshape", tf.int64.as_datatype_enum)
    flat = _Op(op.kind, attrs, (), 0, op.shapes, op.dtypes)
    (drawn,) = _execute(flat, [dims, key, where, algorithm])
    return tf.reshape(drawn[before:] if before else drawn, shape)


def _with(attrs: tuple[Any, ...], name: str, value: Any) -> tuple[Any, ...]:
    at = attrs.index(name) + 1
    return (*attrs[:at], value, *attrs[at + 1 :])


def _cut(whole: Any, dim: int, begin: int, size: int) -> tf.Tensor:
    rank = len(whole.shape)
    return tf.slice(
        whole, [begin if d == dim else 0 for d in range(rank)], [size if d == dim else -1 for d in range(rank)]
    )
