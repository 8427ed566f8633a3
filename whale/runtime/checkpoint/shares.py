"""Decides which rank writes which part of a checkpoint: sharded variables by holder, other variables evenly by bytes.

Random states outside of variables (of Python, NumPy, and TensorFlow's global generator) are written as a JSON text.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint.save_util import serialize_graph_view
from tensorflow.python.ops import stateful_random_ops
from tensorflow.python.trackable.base import OBJECT_GRAPH_PROTO_KEY
from tensorflow.python.training.saving.saveable_object import SaveSpec
from tensorflow.python.training.saving.saveable_object_util import SaveableCompatibilityConverter

from whale.errors import CheckpointError
from whale.runtime.context import Context
from whale.runtime.variables.checkpoint_regions import (
    find_holders,
    find_variable,
    format_spec,
    is_split,
    list_variable_regions,
    read_region_value,
)
from whale.runtime.variables.deferred import find_deferred
from whale.runtime.variables.partial_initializers import DeferredInitial

STATE_KEY = "whale/random_state"  # belongs to no object: TensorFlow's restoring ignores it


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """Represents a tensor, or a rectangle of a tensor, in a checkpoint.

    Attributes:
      key: name of the tensor in the checkpoint.
      spec: shape and slice in TensorFlow's notation (``"4 6 0,4:3,3"``); "" for a whole tensor.
      holders: the ranks that hold its value, each of which could write it.
      size_bytes: its size; 0 where it is too small to matter.
      read: takes one of the holders' ranks, and returns the current value there; None: there is nothing to write.
    """

    key: str
    spec: str
    holders: tuple[int, ...]
    size_bytes: int
    read: Callable[[int], tf.Tensor | None]


def list_entries(checkpoint: tf.train.Checkpoint, context: Context) -> list[CheckpointEntry]:
    """Lists all entries of a checkpoint, under the keys that ``tf.train.Checkpoint`` uses; equal on all ranks except
    for their values.

    Raises:
      CheckpointError: an object of the checkpoint needs a saver of its own.
    """
    tensors, _, savers, graph = serialize_graph_view(checkpoint._saver._graph_view)
    if savers:
        raise CheckpointError(
            "an object of the checkpoint has a saver of its own, which does not support slices",
            given=", ".join(sorted(savers)),
            expected="variables, iterators and Python state",
            action="leave it out of the tf.train.Checkpoint that wh.CheckpointManager saves",
        )
    found: list[CheckpointEntry] = []
    for trackable, by_key in tensors.items():
        variable = find_variable(trackable.obj if isinstance(trackable, SaveableCompatibilityConverter) else trackable)
        for key, value in by_key.items():
            initial = find_deferred(variable)
            if initial is not None:  # saved before the first step: computed for the file, and not kept in memory
                found.append(CheckpointEntry(key, "", (0,), 0, partial(_read_whole, initial)))
            elif is_split(variable):
                found += _list_piece_entries(key, variable, context)
            elif isinstance(value, dict):
                found += [CheckpointEntry(key, spec, (0,), 0, partial(_read, v)) for spec, v in value.items()]
            elif variable is not None and context.variables.is_owner_of(variable):
                who = context.variables.find_holders(variable, context)
                # TensorFlow's own read of a stage's variable would be collective.
                read = value if len(who) == context.size else partial(context.variables.read_own_value, variable)
                found.append(
                    CheckpointEntry(key, "", who, _count_bytes(variable.shape, variable.dtype), partial(_read, read))
                )
            else:  # a variable that no step has used may differ between ranks: the first one's value is saved
                found.append(CheckpointEntry(key, "", (0,), 0, partial(_read, value)))
    text = graph.SerializeToString()
    found.append(CheckpointEntry(OBJECT_GRAPH_PROTO_KEY, "", (0,), 0, lambda rank: tf.constant(text)))
    found.append(CheckpointEntry(STATE_KEY, "", (0,), 0, lambda rank: tf.constant(_read_random_state())))
    return found


def choose_writers(entries: Sequence[CheckpointEntry], size: int) -> list[int]:
    """Returns the rank that writes each entry, so that all ranks write about as many bytes.

    Entries that only one rank holds are assigned first; the others follow, largest first, each to the holder with the
    fewest bytes so far.

    Args:
      size: number of ranks.
    """
    loads, writers = [0] * size, [0] * len(entries)
    order = sorted(range(len(entries)), key=lambda i: (len(entries[i].holders) > 1, -entries[i].size_bytes))
    for i in order:
        writers[i] = min(entries[i].holders, key=lambda rank: (loads[rank], rank))
        loads[writers[i]] += entries[i].size_bytes
    return writers


def compute_digest(entries: Sequence[CheckpointEntry], writers: Sequence[int]) -> bytes:
    """Returns a digest that is equal on all ranks if they have the same entries and writers."""
    text = "\n".join(f"{e.key}\t{e.spec}\t{rank}" for e, rank in zip(entries, writers))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_snapshot(
    entries: Sequence[CheckpointEntry], writers: Sequence[int], rank: int
) -> list[tuple[str, str, tf.Tensor]]:
    """Returns (key, spec, current value) of the entries that ``rank`` writes.

    Later steps do not change these values: while they are referenced, TensorFlow copies a variable before it updates
    it.
    """
    values = ((e, e.read(rank)) for e, writer in zip(entries, writers) if writer == rank)
    return [(e.key, e.spec, value) for e, value in values if value is not None]


def _list_piece_entries(key: str, variable: Any, context: Context) -> list[CheckpointEntry]:
    return [
        CheckpointEntry(
            key,
            format_spec(region, variable.shape),
            find_holders(variable, region, context),
            _count_bytes(region.size, variable.dtype),
            partial(read_region_value, variable, region, context),
        )
        for region in list_variable_regions(variable)
    ]


def _count_bytes(shape: Sequence[int], dtype: tf.DType) -> int:
    return int(tf.TensorShape(shape).num_elements() or 0) * (dtype.size or 0)


def _read_whole(initial: DeferredInitial, rank: int) -> tf.Tensor:
    return initial.compute_whole()


def _read(value: Any, rank: int) -> tf.Tensor | None:
    """Returns the tensor for a value that TensorFlow serialises as a tensor, a SaveSpec or a function; None for
    variables without value.
    """
    with tf.device("/device:CPU:0"):
        if isinstance(value, SaveSpec):
            value = value.tensor
        elif callable(value):
            value = value()
        return None if value is None else tf.identity(value)


def _read_random_state() -> str:
    """Returns the random states of Python, NumPy and TensorFlow's global generator in this process, as JSON."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }
    generator = stateful_random_ops.global_generator
    if generator is not None:
        state["tensorflow"] = [int(generator.algorithm), generator.state.numpy().tolist()]
    return json.dumps(state)


def set_random_state(text: str) -> None:
    """Sets the random states of this process from the text that ``_read_random_state`` returned, so that their streams
    continue from there.
    """
    state = json.loads(text)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = state["numpy"]
    np.random.set_state((kind, np.array(numbers, np.uint32), *rest))
    if "tensorflow" in state:
        algorithm, values = state["tensorflow"]
        generator = tf.random.get_global_generator()
        if int(generator.algorithm) != algorithm:
            tf.random.set_global_generator(tf.random.Generator.from_state(values, algorithm))
        else:
            generator.reset(np.array(values, generator.state.dtype.as_numpy_dtype))
