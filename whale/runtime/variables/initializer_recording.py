"""Records the computation of an initializer without running it, for a Python function or a part of a session's graph.

Decision: 0039.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.framework import func_graph, random_seed

from whale.ir.ops import ASSIGNS
from whale.runtime.variables.partial_initializers import (
    LITTLE_BYTES,
    PHILOX,
    RESERVED,
    DeferredInitial,
    RecordedOp,
    execute_op,
)

# Stateful ops of graphs -> the op that draws the same numbers from the same place of the stream.
_STREAMS = {
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
}
# Stateful ops that read and advance small states when a variable is created, such as a generator's.
_OF_STATES = ASSIGNS | {"ReadVariableOp"}


def record(make: Callable[[], Any], dtype: Any = None) -> DeferredInitial | tf.Tensor | None:
    """Records the computation of ``make`` by tracing it.

    Raises what ``make`` raises in a graph, and ValueError if only running it can tell what it does.

    Args:
      make: an initializer without arguments.
      dtype: of the value; None: that of the result.

    Returns:
      a deferred value; or a tensor, if the value is small and was computed; or None: ``make`` has to be run instead.
    """
    graph = func_graph.FuncGraph("whale_initial")
    graph.seed = None  # so that only ops with a seed of their own have one
    with graph.as_default(), tf.variable_creator_scope(_refuse_variable):
        made = tf.convert_to_tensor(make(), dtype=tf.as_dtype(dtype) if dtype is not None else None)
    outer = {id(inner): external for external, inner in graph.captures}
    found = _record_operations(graph.get_operations(), made, outer)
    if not isinstance(found, RecordedInitializer):
        return found
    if any(any(stream.seeds) for stream in found.streams):
        return None  # eager ops with equal seeds share a stream, whose position cannot be read
    return found.run(Counter(), _find_eager_seeds)


def _find_eager_seeds(number: int) -> tuple[int, int]:
    """Returns the seeds that the next random op would get that runs eagerly without a seed of its own."""
    first, second = random_seed.get_seed(None)
    if first is None:
        first, second = np.random.SeedSequence().generate_state(2, np.uint64).tolist()
    return first, second


@dataclass(frozen=True)
class _Stream:
    """Represents a draw of a stateful random op, recorded as a stateless one.

    Attributes:
      op: name of the op.
      key: index, among the recorded values, of the generator's key.
      counter: index, among the recorded values, of the generator's counter.
      seeds: the op's two seeds; (0, 0): none.
      steps: by how much a run advances the counter.
    """

    op: str
    key: int
    counter: int
    seeds: tuple[int, int]
    steps: int


@dataclass(frozen=True)
class RecordedInitializer:
    """Represents a graph's computation of an initial value, complete except for the present state of its random ops.

    Attributes:
      initial: the computation.
      streams: its draws of random ops, whose keys and counters ``run`` fills in.
    """

    initial: DeferredInitial
    streams: tuple[_Stream, ...] = ()

    @property
    def is_seeded(self) -> bool:
        """Returns True if every random op has a seed, so that all ranks draw the same numbers."""
        return all(any(stream.seeds) for stream in self.streams)

    @property
    def digest(self) -> str:
        """Returns a digest that is equal for graphs with the same computation."""
        little = sorted((n, v.dtype.str, v.shape, v.tobytes()) for n, v in self.initial.little.items())
        what = (self.initial.shape, self.initial.dtype, little, self.initial.ops, self.initial.result, self.streams)
        return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()

    def run(self, runs: Counter[str], seeds: Callable[[int], tuple[int, int]]) -> DeferredInitial:
        """Returns the deferred initial value that the next run of the graph would compute.

        Args:
          runs: name of a random op -> number of its runs so far; incremented.
          seeds: returns the seeds for a random op that has none, given its number.
        """
        little = dict(self.initial.little)
        for number, stream in enumerate(self.streams):
            first, second = stream.seeds if any(stream.seeds) else seeds(number)
            little[stream.key] = np.array([first % 2**64], np.uint64)
            little[stream.counter] = np.array([runs[stream.op] * stream.steps, second % 2**64], np.uint64)
            runs[stream.op] += 1
        return replace(self.initial, little=little)


def record_tensor(made: tf.Tensor, fed: Collection[str] = ()) -> RecordedInitializer | None:
    """Records how a session's graph computes ``made``; None if the value depends on more than constants and seeds.

    Args:
      fed: names of tensors that the run feeds.
    """
    wanted, waiting = {made.op}, [made.op]
    if made.name in fed:
        return None
    while waiting:
        for t in waiting.pop().inputs:
            if t.name in fed:
                return None
            if t.op not in wanted:
                wanted.add(t.op)
                waiting.append(t.op)
    if any(op.type == "Placeholder" for op in wanted):
        return None
    try:
        with tf_context.eager_mode():
            found = _record_operations(sorted(wanted, key=lambda op: op._id), made, {})
    except ValueError:
        return None
    return found if isinstance(found, RecordedInitializer) else None


def _record_operations(
    operations: Sequence[Any], made: tf.Tensor, outer: dict[int, Any]
) -> RecordedInitializer | tf.Tensor | None:
    """Records the operations from which ``made`` is computed; small values are computed at once.

    Args:
      operations: in an order in which they can run.
      outer: ``id`` of each placeholder for a captured tensor -> that tensor.

    Returns:
      the recorded computation; or the value, if it is small; or None: an operation cannot be recorded.
    """
    if not all(op.type in _STREAMS or _is_recordable(op, outer) for op in operations):
        return None
    if not all(t.shape.is_fully_defined() for op in operations for t in (made, *op.outputs)):
        return None
    numbers: dict[int, int] = {}
    little: dict[int, Any] = {}
    later: list[RecordedOp] = []
    found: list[_Stream] = []
    for op in operations:
        first = len(numbers)
        for output in op.outputs:
            numbers[id(output)] = len(numbers)
        if op.type == "Placeholder":
            little[first] = outer[id(op.outputs[0])]
            continue
        operands = tuple(numbers[id(t)] for t in op.inputs)
        shapes = tuple(tuple(t.shape.as_list()) for t in op.outputs)
        dtypes = tuple(t.dtype.name for t in op.outputs)
        if op.type in _STREAMS:
            key = -3 * len(found) - 1  # below zero: no tensor of the graph
            little[key] = little[key - 1] = tf.constant(0)
            little[key - 2] = tf.constant(PHILOX)
            steps = math.prod(shapes[0]) * RESERVED
            found.append(_Stream(op.name, key, key - 1, (op.get_attr("seed"), op.get_attr("seed2")), steps))
            attrs = ("dtype", op.get_attr("dtype").as_datatype_enum, "Tshape", op.get_attr("T").as_datatype_enum)
            later.append(
                RecordedOp(_STREAMS[op.type], attrs, (operands[0], key, key - 1, key - 2), first, shapes, dtypes)
            )
            continue
        if op.type == "Const" and not _is_small(op):
            dims, value = len(numbers), len(numbers) + 1
            numbers.update({-dims: dims, -value: value})  # these numbers belong to no tensor
            little[dims], little[value] = tf.constant(shapes[0], tf.int64), tf.constant(_find_repeated_element(op))
            attrs = ("T", op.get_attr("dtype").as_datatype_enum, "index_type", tf.int64.as_datatype_enum)
            later.append(RecordedOp("Fill", attrs, (dims, value), first, shapes, dtypes))
            continue
        recorded = RecordedOp(op.type, _list_attrs(op), operands, first, shapes, dtypes)
        if all(n in little for n in operands) and _is_small(op):
            values = execute_op(recorded, [little[n] for n in operands])
            little.update((first + i, v) for i, v in enumerate(values))
        elif op.op_def.is_stateful:
            raise ValueError(
                f"{op.name}, a stateful operation of an initializer, reads a value that recording does not compute"
            )
        else:
            later.append(recorded)
    result = numbers[id(made)]
    if result in little:
        return tf.convert_to_tensor(little[result])
    needed = _find_needed(later, result)
    kept = {n: little[n].numpy() for op in needed for n in op.operands if n in little}
    initial = DeferredInitial(tuple(made.shape.as_list()), made.dtype.name, kept, tuple(needed), result)
    return RecordedInitializer(initial, tuple(found))


def _refuse_variable(next_creator: Any, **kwargs: Any) -> Any:
    raise ValueError("the initializer creates variables, so its operations cannot be recorded")


def _is_recordable(op: Any, outer: dict[int, Any]) -> bool:
    if op.type == "Placeholder":
        return id(op.outputs[0]) in outer
    if op.op_def.is_stateful and op.type not in _OF_STATES:
        return False
    if any(_is_function_attr(a.type) for a in op.op_def.attr):
        return False
    if not all(t.shape.is_fully_defined() for t in op.outputs):
        return False
    if op.type == "Const":
        return _is_small(op) or _find_repeated_element(op) is not None
    return _is_small(op) if op.op_def.is_stateful else True


def _find_repeated_element(op: Any) -> np.ndarray | None:
    """Returns the element of a constant whose elements are all equal, if the graph stores it as a single element; else
    None.
    """
    proto = op.get_attr("value")
    values = [value for field, value in proto.ListFields() if field.name.endswith("_val")]
    if proto.tensor_content or proto.string_val or sum(map(len, values)) != 1:
        return None
    one = type(proto)()
    one.CopyFrom(proto)
    one.tensor_shape.Clear()
    found: np.ndarray = tf.make_ndarray(one)
    return found


def _is_function_attr(kind: str) -> bool:
    return kind in ("func", "list(func)")


def _is_small(op: Any) -> bool:
    return sum(t.shape.num_elements() * max(1, t.dtype.size) for t in op.outputs) <= LITTLE_BYTES


def _find_needed(ops: Sequence[RecordedOp], result: int) -> list[RecordedOp]:
    wanted, found = {result}, []
    for op in reversed(ops):
        if any(op.first + i in wanted for i in range(len(op.shapes))):
            wanted.update(op.operands)
            found.append(op)
    return found[::-1]


def _list_attrs(op: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for attr in op.op_def.attr:
        value = op.get_attr(attr.name)
        if isinstance(value, tf.DType):
            value = value.as_datatype_enum
        elif isinstance(value, list):
            value = [v.as_datatype_enum if isinstance(v, tf.DType) else v for v in value]
        found += [attr.name, value]
    return tuple(found)
