"""Merges values over replicas as a script marks them: computes the replicas' values from those of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.epl.batch_scaling import find_scaling
from whale.frontends.epl.known import require_env
from whale.frontends.epl.strategies import mark_graph

_SUMMARIES = {"ScalarSummary", "HistogramSummary", "TensorSummary", "TensorSummaryV2"}


def merge_outputs(graph: Any, tf_graph: tf.Graph) -> None:
    """Creates the merged values of marked tensors that have none yet; summaries use these from now on.

    Raises:
      ProgramError: the replicas' values cannot be derived from the value of the whole batch.
    """
    missing = [(key, t) for key, values in graph.collections.items() for t in values if t.name not in graph.merged]
    if not missing:
        return
    layout = graph.layout
    copies = layout.replicas * layout.batches.turns
    with unfreeze_graph(tf_graph):
        for key, tensor in missing:
            where, how, _ = key.split("_")
            if where == "local" and _count_workers(graph) > 1:
                raise _make_refusal(
                    key, tensor, "values of one worker's replicas are not computed apart",
                    "mark it with the GLOBAL collection of that kind, or start all replicas as one worker's "
                    "(epl-launch --num_workers 1)",
                )  # fmt: skip
            made = _merge_tensor(key, how, tensor, copies)
            graph.merged[tensor.name] = made
            for use in tensor.consumers() if made is not tensor else ():
                if use.type in _SUMMARIES:
                    use._update_input(next(i for i, t in enumerate(use.inputs) if t is tensor), made)


def _merge_tensor(key: str, how: str, tensor: tf.Tensor, copies: int) -> tf.Tensor:
    if copies == 1:
        return tensor
    grows = find_scaling(tensor)
    if how == "concat":
        if grows is None or not grows.rows:
            raise _make_refusal(
                key, tensor, "only rows of the batch can be put one after the other", "mark a tensor of [rows, ...]"
            )
        return tf.identity(tensor)  # of what an iterator gives, this rank has its own rows only
    if grows is None:
        raise _make_refusal(
            key, tensor, "what each replica would have does not follow from the value of the whole batch",
            "mark a mean or a sum over rows, or what is made of such by products and quotients",
        )  # fmt: skip
    if grows.rows:
        stacked = tf.reshape(tensor, tf.concat([[copies, -1], tf.shape(tensor)[1:]], 0))
        return tf.reduce_mean(stacked, 0) if how == "mean" else tf.reduce_sum(stacked, 0)
    power = (how == "sum") - grows.power
    return tensor if not power else tensor * tf.cast(float(copies) ** power, tensor.dtype)


def _count_workers(graph: Any) -> int:
    """Returns the number of workers with replicas that provide batches."""
    cluster = require_env("epl.GraphKeys").cluster
    each = cluster.gpu_num_per_worker if cluster is not None else 1
    return len({rank // each for rank in graph.layout.batches.readers})


@contextmanager
def unfreeze_graph(graph: tf.Graph) -> Iterator[None]:
    """Makes ``graph`` the default, and allows additions although a session has finalized it."""
    finished = graph.finalized
    if finished:
        graph._unsafe_unfinalize()
    try:
        with graph.as_default(), tf.control_dependencies(None), mark_graph(None), tf.name_scope("epl_merged"):
            yield
    finally:
        if finished:
            graph.finalize()


def _make_refusal(key: str, tensor: tf.Tensor, why: str, action: str) -> ProgramError:
    given = f"a mark by epl.GraphKeys.{key.upper()}"
    return ProgramError(why, op=tensor.name, given=given, expected="the values of replicas", action=action)
