"""Computes initial values part by part, so that no rank ever holds a whole one.

The computation of an initializer is recorded as a small program, without running it. Small values in it (shapes, seeds,
a generator's state) are computed at once, in the order in which the script would; large ones are computed later, for
the part that a rank holds. Random numbers come from counters (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011), so a part of a stream begins at its own counter: the elements are, bit by bit, those of the whole tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import execute
from tensorflow.python.ops import resource_variable_ops

from whale.ir.mesh import Tiles
from whale.ir.ops import IDENTITIES, STREAM_DRAWS
from whale.runtime.variables.in_files import make_mapped_variable, write_block

# Values up to this size are computed at once when a variable is created; variables up to it are never deferred.
LITTLE_BYTES = 4096
# Bytes of a part that are computed at a time, or of whole rows that are drawn at a time if a part is a few columns.
_BLOCK_BYTES = 512 << 10
_LONG_BYTES = 256 << 10  # bytes of a row's part from which each row's part is drawn separately
# How far draws advance the counter; see TensorFlow's random_distributions.h.
_PHILOX_WORDS = 4  # 32-bit words that one step of the counter yields
RESERVED = 256  # words that the generator reserves for each element of a truncated normal distribution
PHILOX, _ANY_ALGORITHM = 1, 3

_POINTWISE = IDENTITIES | frozenset(
    {"Cast", "Mul", "Add", "AddV2", "Sub", "RealDiv", "Div", "Neg", "Sqrt", "Square", "Exp",
     "Log", "Tanh", "Erfinv", "Sin", "Cos", "Abs", "Floor", "Maximum", "Minimum", "Pow", "Sign", "LogicalNot",
     "LogicalAnd", "LogicalOr", "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "SelectV2"}
)  # fmt: skip
# A block: where it begins in a part, where in the whole value, and its size.
_Block = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Reader = Callable[[tuple[int, ...], tuple[int, ...]], Any]


@dataclass(frozen=True)
class RecordedOp:
    """Represents one recorded op. All values of the recorded computation are numbered; operands and results are given
    by these numbers.

    Attributes:
      kind: type of the op.
      attrs: names and values of its attributes in turn, as ``execute.execute`` takes them.
      operands: numbers of the values that it takes.
      first: number of its first result; further results have the numbers after it.
      shapes: of its results.
      dtypes: of its results.
    """

    kind: str
    attrs: tuple[Any, ...]
    operands: tuple[int, ...]
    first: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class DeferredInitial:
    """Represents an initial value that has not been computed, as a recorded computation or a place to read it from.

    Attributes:
      shape: of the whole value.
      dtype: its name.
      little: number of a value -> the value itself, for small ones that were computed when the variable was created.
      ops: the ops that are left to run, in order.
      result: number of the value that is the initial value.
      reader: returns a region of the value, if that comes from elsewhere (a checkpoint); None: ``ops`` compute it.
    """

    shape: tuple[int, ...]
    dtype: str
    little: dict[int, np.ndarray]
    ops: tuple[RecordedOp, ...]
    result: int
    reader: Reader | None = None

    @property
    def bytes(self) -> int:
        """Returns the bytes of the whole value."""
        return math.prod(self.shape) * int(tf.as_dtype(self.dtype).size)

    @property
    def is_divisible(self) -> bool:
        """Returns True if a part of the value can be computed without the whole."""
        return self.reader is not None or all(_is_divisible(op) for op in self.ops)

    def compute_whole(self) -> tf.Tensor:
        """Computes the whole value on this rank."""
        if self.reader is not None:
            return self._read((0,) * len(self.shape), self.shape)
        return _Region(self, (0,) * len(self.shape), self.shape).value()

    def make_part(self, tiles: Tiles, place: int, name: str = "part", folder: str = "") -> tf.Variable:
        """Creates a variable with one shard of the value; needs about one or two megabytes of memory beside the shard.

        A value that is not divisible is computed whole first.

        Args:
          tiles: how the value is cut into shards.
          place: number of the shard in ``tiles``.
          name: of the new variable.
          folder: the shard is stored in a file there; "": in memory.

        Raises:
          PlanError: there is no room in the folder.
        """
        blocks = self._cut_blocks(tiles, place)
        if len(blocks) == 1 and not folder:
            (_, begin, size), *_ = blocks
            return _make_variable(self._compute_region(begin, size), name)
        shape = tiles.find_local_shape(self.shape, place)
        found = (
            make_mapped_variable(folder, shape, self.dtype, name)
            if folder
            else _make_variable(tf.zeros(shape, self.dtype), name)
        )
        if not (folder and self._is_zero):  # a new file is
            for start, begin, size in blocks:
                write_block(found, start, self._compute_region(begin, size))
        return found

    @property
    def _is_zero(self) -> bool:
        fills = self.reader is None and [op.kind for op in self.ops] == ["Fill"]
        return fills and not self.little[self.ops[0].operands[1]].any()

    def _cut_blocks(self, tiles: Tiles, place: int) -> list[_Block]:
        """Cuts a shard into blocks of rows of about a megabyte, which are computed one after the other.

        Args:
          tiles: how the value is cut into shards.
          place: number of the shard in ``tiles``.

        Returns:
          for each block, where it begins in the shard, where it begins in the whole value, and its size, over all
          dimensions.
        """
        found: list[_Block] = []
        for region in tiles.iterate_regions(self.shape, place):
            rows, *rest = region.size
            row_bytes = max(1, math.prod(rest) * tf.as_dtype(self.dtype).size)
            at_once = max(1, _BLOCK_BYTES // row_bytes) if self.is_divisible else rows
            for first in range(0, rows, at_once):
                place_of, begin = ((i[0] + first, *i[1:]) for i in (region.start, region.begin))
                found.append((place_of, begin, (min(at_once, rows - first), *rest)))
        return found

    def _compute_region(self, begin: tuple[int, ...], size: tuple[int, ...]) -> tf.Tensor:
        if self.reader is not None:
            return self._read(begin, size)
        if not self.is_divisible:
            return copy_to_own_memory(tf.slice(self.compute_whole(), begin, size))
        return _Region(self, begin, size).value()

    def _read(self, begin: tuple[int, ...], size: tuple[int, ...]) -> tf.Tensor:
        assert self.reader is not None
        return tf.convert_to_tensor(self.reader(begin, size), tf.as_dtype(self.dtype))


def record_uniform_value(value: tf.Tensor) -> DeferredInitial | None:
    """Returns the deferred value of an eager tensor whose elements are all equal, such as a slot of zeros; None for
    other tensors and small ones.
    """
    shape, dtype = tuple(value.shape.as_list()), value.dtype
    if math.prod(shape) * dtype.size <= LITTLE_BYTES or dtype.size not in (1, 2, 4, 8) or not dtype.is_numpy_compatible:
        return None
    words = value.numpy().reshape(-1).view(f"uint{8 * dtype.size}")
    if any(np.any(words[i : i + _BLOCK_BYTES] != words[0]) for i in range(0, words.size, _BLOCK_BYTES)):
        return None
    attrs = ("T", dtype.as_datatype_enum, "index_type", tf.int64.as_datatype_enum)
    fill = RecordedOp("Fill", attrs, (0, 1), 2, (shape,), (dtype.name,))
    little = {0: np.array(shape, np.int64), 1: value.numpy().reshape(-1)[0].copy()}
    return DeferredInitial(shape, dtype.name, little, (fill,), 2)


def execute_op(op: RecordedOp, operands: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the results of a recorded op, computed by its own kernel as in an eager call."""
    if op.kind == "Const":
        return [tf.constant(tf.make_ndarray(op.attrs[op.attrs.index("value") + 1]))]
    tensors = [tf.convert_to_tensor(t) for t in operands]
    return list(execute.execute(op.kind.encode(), len(op.shapes), tensors, op.attrs, tf_context.context()))


def _is_divisible(op: RecordedOp) -> bool:
    return len(op.shapes) == 1 and (op.kind in _POINTWISE or op.kind in STREAM_DRAWS or op.kind == "Fill")


class _Region:
    """Computes a region of a recorded value: consecutive rows, and the same columns of each.

    Args:
      initial: the recorded value.
      begin, size: of the region, over all dimensions.
    """

    def __init__(self, initial: DeferredInitial, begin: tuple[int, ...], size: tuple[int, ...]):
        self.initial, self.begin, self.size = initial, begin, size
        self.is_whole = size == initial.shape
        self.made = {op.first + i for op in initial.ops for i in range(len(op.shapes))}
        self.readers = Counter(n for op in initial.ops for n in op.operands)
        self.done: dict[int, tf.Tensor] = {}

    def value(self) -> tf.Tensor:
        result = self.initial.result
        for op in self.initial.ops:
            self.done.update((op.first + i, v) for i, v in enumerate(self._compute_results(op)))
            for n in op.operands:  # a value goes as soon as nobody needs it
                self.readers[n] -= 1
                if not self.readers[n] and n != result:
                    self.done.pop(n, None)
        return self.done[result]

    def _compute_results(self, op: RecordedOp) -> list[tf.Tensor]:
        if self.is_whole:
            return execute_op(op, [self.done[n] if n in self.made else self.initial.little[n] for n in op.operands])
        if op.kind in STREAM_DRAWS:
            return [self._compute_random(op, op.shapes[0])]
        if op.kind == "Fill":
            attrs = _replace_attr(op.attrs, "index_type", tf.int64.as_datatype_enum)
            dims = np.array(self._find_bounds(op.shapes[0])[1], np.int64)
            return execute_op(replace(op, attrs=attrs), [dims, self.initial.little[op.operands[1]]])
        return execute_op(op, [self._compute_operand(n) for n in op.operands])

    def _find_bounds(self, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Returns (begin, size) of the region in a tensor of ``shape`` that is broadcast to the value, as in NumPy."""
        missing = len(self.initial.shape) - len(shape)
        pairs = [(0, 1) if n == 1 else (self.begin[missing + d], self.size[missing + d]) for d, n in enumerate(shape)]
        return [b for b, _ in pairs], [n for _, n in pairs]

    def _compute_operand(self, number: int) -> Any:
        if number in self.made:
            return self.done[number]
        value = self.initial.little[number]
        return tf.slice(value, *self._find_bounds(value.shape)) if value.shape else value

    def _compute_random(self, op: RecordedOp, shape: tuple[int, ...]) -> tf.Tensor:
        begin, size = self._find_bounds(shape)
        cut = max((d for d, n in enumerate(shape) if size[d] != n), default=0)
        inner = math.prod(shape[cut + 1 :])
        first, count = begin[cut] * inner, size[cut] * inner
        little = self.initial.little
        if cut == 0:
            return _draw(op, little, first, count, tuple(size))
        row, rows_each = shape[cut] * inner, math.prod(shape[1:cut])
        rows = range(begin[0] * rows_each, (begin[0] + size[0]) * rows_each)
        itemsize = tf.as_dtype(op.dtypes[0]).size
        if count * itemsize >= _LONG_BYTES:
            pieces = [_draw(op, little, r * row + first, count, (1, count)) for r in rows]
        else:
            at_once = max(1, _BLOCK_BYTES // (row * itemsize))
            pieces = []
            for r in rows[::at_once]:
                several = min(at_once, rows.stop - r)
                block = _draw(op, little, r * row, several * row, (several, row))
                pieces.append(tf.slice(block, [0, first], [several, count]))
        return tf.reshape(tf.concat(pieces, axis=0), size)


def _draw(op: RecordedOp, little: dict[int, np.ndarray], begin: int, count: int, shape: tuple[int, ...]) -> tf.Tensor:
    """Returns ``count`` elements of the random stream from which the whole tensor is drawn, from element ``begin`` on.

    Args:
      op: the recorded stateless random op.
      little: number of a value -> small value; it has the op's key, counter and algorithm.
      shape: of the result.
    """
    _, key, counter, algorithm = (little[n] for n in op.operands)
    assert int(algorithm) in (PHILOX, _ANY_ALGORITHM), algorithm
    # The kernel draws elements in groups, each of which begins at a counter of its own.
    group = 2 if op.dtypes[0] in ("float64", "int64", "uint64") else 4
    steps = group * RESERVED // _PHILOX_WORDS if op.kind == "StatelessTruncatedNormalV2" else 1
    skipped = begin // group
    moved = int(counter[0]) + (int(counter[1]) << 64) + skipped * steps
    where = np.array([moved & (2**64 - 1), (moved >> 64) & (2**64 - 1)], np.uint64)
    before = begin - skipped * group
    dims = np.array([before + count], np.int64)
    attrs = _replace_attr(op.attrs, "Tshape", tf.int64.as_datatype_enum)
    flat = RecordedOp(op.kind, attrs, (), 0, op.shapes, op.dtypes)
    (drawn,) = execute_op(flat, [dims, key, where, algorithm])
    return tf.reshape(drawn[before:] if before else drawn, shape)


def _replace_attr(attrs: tuple[Any, ...], name: str, value: Any) -> tuple[Any, ...]:
    at = attrs.index(name) + 1
    return (*attrs[:at], value, *attrs[at + 1 :])


def copy_to_own_memory(value: tf.Tensor) -> tf.Tensor:
    """Returns a copy of a tensor that shares no memory with it. A slice of rows shares the whole tensor's memory, so
    that a variable with this slice would keep all of it alive.
    """
    return tf.raw_ops.DeepCopy(x=value)


def _make_variable(value: tf.Tensor, name: str) -> tf.Variable:
    """Creates a variable without calling tf.Variable, whose creators would defer it."""
    return resource_variable_ops.ResourceVariable(value, trainable=False, name=name)
