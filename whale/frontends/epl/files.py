"""Implements ``io.slicing``: each replica's datasets read files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError

_MAPS = {"FlatMapDataset", "InterleaveDataset", "ParallelInterleaveDataset"} | {
    f"ParallelInterleaveDatasetV{n}" for n in (2, 3, 4)}  # fmt: skip
_READS = {"TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset", "FixedLengthRecordDataset"} | {
    "FixedLengthRecordDatasetV2"}  # fmt: skip


def slice_files(graph: tf.Graph, replica: int, replicas: int, drop_last: bool, unbalanced: bool) -> int:
    """Makes every dataset of ``graph`` that reads a list of files read every ``replicas``-th one, from ``replica`` on.

    Args:
      drop_last: files that cannot be divided evenly are left out.
      unbalanced: some replicas may have a file more.

    Returns:
      how many lists were divided.

    Raises:
      ProgramError: the files cannot be divided evenly, and neither is allowed.
    """
    found = [op for op in graph.get_operations() if op.type == "TensorSliceDataset" and _is_naming_files(op)]
    for op in found:
        uses = [(use, i) for use in op.outputs[0].consumers() for i, t in enumerate(use.inputs) if t is op.outputs[0]]
        count = op.inputs[0].shape.as_list()[0]
        if not unbalanced and (count is None or count % replicas) and not (drop_last and count is not None):
            raise ProgramError(
                "files cannot be divided evenly among the replicas",
                op=op.name,
                given=f"{'so far unknown' if count is None else count} files, {replicas} replicas",
                expected="a multiple of the replicas",
                action="set io.unbalanced_io_slicing, or io.drop_last_files where the files are listed in the script",
            )
        kept = {"output_types": [tf.string], "output_shapes": [tf.TensorShape([])]}
        files: Any = op.outputs[0]
        if drop_last and count is not None and count % replicas:
            even = tf.constant(count - count % replicas, tf.int64)
            files = tf.raw_ops.TakeDataset(input_dataset=files, count=even, **kept)
        mine = tf.raw_ops.ShardDataset(
            input_dataset=files,
            num_shards=tf.constant(replicas, tf.int64),
            index=tf.constant(replica, tf.int64),
            **kept,
        )
        for use, place in uses:
            use._update_input(place, mine)
    return len(found)


def _is_naming_files(op: tf.Operation) -> bool:
    """Tells whether the elements of a TensorSliceDataset are strings that some dataset behind it opens."""
    if len(op.inputs) != 1 or op.inputs[0].dtype != tf.string or op.inputs[0].shape.rank != 1:
        return False
    functions = {f.signature.name: f for f in op.graph.as_graph_def().library.function}
    pending = [op]
    while pending:
        one = pending.pop()
        if one.type in _MAPS:
            return _is_opening_files(one.get_attr("f").name, functions)
        pending += [use for t in one.outputs for use in t.consumers() if use.type.endswith("Dataset")]
    return False


def _is_opening_files(name: str, functions: Mapping[str, Any]) -> bool:
    """Tells whether a function, or one that it refers to, opens files."""
    nodes = functions[name].node_def
    inner = {a.func.name for n in nodes for a in n.attr.values() if a.func.name in functions}
    return any(n.op in _READS for n in nodes) or any(_is_opening_files(other, functions) for other in inner)
