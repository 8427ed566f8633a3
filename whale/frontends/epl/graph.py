"""Implements ``epl.Graph``: the task graphs of a TensorFlow graph, and the values to merge over replicas.

Values that a script marks to be merged over replicas are computed from those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.epl.batch_scaling import find_scaling
from whale.frontends.epl.known import require_env
from whale.frontends.epl.layout import AnnotatedGraph, Layout, make_layout, make_planned_layout
from whale.frontends.epl.strategies import Strategy, mark_graph
from whale.runtime.context import require_current

_SUMMARIES = {"ScalarSummary", "HistogramSummary", "TensorSummary", "TensorSummaryV2"}


class GraphKeys:
    """Names of the collections of values that are merged over replicas: all of them, or those of one worker."""

    GLOBAL_CONCAT_OBJECTS = "global_concat_objects"
    GLOBAL_MEAN_OBJECTS = "global_mean_objects"
    GLOBAL_SUM_OBJECTS = "global_sum_objects"
    LOCAL_CONCAT_OBJECTS = "local_concat_objects"
    LOCAL_MEAN_OBJECTS = "local_mean_objects"
    LOCAL_SUM_OBJECTS = "local_sum_objects"
    ALL_COLLECTION_KEYS: ClassVar[list[str]] = [
        GLOBAL_CONCAT_OBJECTS,
        GLOBAL_MEAN_OBJECTS,
        GLOBAL_SUM_OBJECTS,
        LOCAL_CONCAT_OBJECTS,
        LOCAL_MEAN_OBJECTS,
        LOCAL_SUM_OBJECTS,
    ]


@dataclass(frozen=True)
class PipelineConfig:
    """The pipeline settings of a graph."""

    num_micro_batch: int
    num_stages: int
    strategy: str


@dataclass
class TaskGraph:
    """A part of the model with a strategy of its own."""

    index: int
    strategy: Strategy
    inside: int | None
    graph: Graph = field(repr=False)

    @property
    def num_device_per_replica(self) -> int:
        """Returns the number of devices of one replica."""
        return self.strategy.device_count or 1

    @property
    def num_replicas(self) -> int:
        """Returns the number of its replicas."""
        return self.graph.layout.replicas

    @property
    def local_num_replicas(self) -> int:
        """Returns how many of its replicas are this worker's."""
        cluster = require_env("a task graph").cluster
        first = cluster.worker_index * cluster.gpu_num_per_worker
        here = range(first, first + cluster.gpu_num_per_worker)
        return sum(ranks[0] in here for ranks in self.graph.layout.ranks.get(self.index, ()))

    @property
    def virtual_device(self) -> Any:
        """Returns its devices."""
        return require_env("a task graph").cluster.device_of(self.graph.layout.ranks.get(self.index, ()), self.index)

    @property
    def pipeline_config(self) -> PipelineConfig:
        """Returns the pipeline configuration of its graph."""
        return self.graph.get_pipeline_config()


class Graph:
    """The task graphs and marked values of one TensorFlow graph."""

    def __init__(self) -> None:
        self.taskgraphs: list[TaskGraph] = []
        self.gradients: list[Any] = []
        self.differentiated: set[str] = set()  # names of operations that made gradients
        self.collections: dict[str, list[tf.Tensor]] = {key: [] for key in GraphKeys.ALL_COLLECTION_KEYS}
        self.merged: dict[str, tf.Tensor] = {}
        self.summary_map: dict[str, Any] = {}
        self.model_mode: str | None = None
        self.sliced = False  # whether files of its datasets were divided

    @classmethod
    def get(cls, may_create: bool = False) -> Graph:
        """Returns the Graph of TensorFlow's default graph, and makes it if there is none."""
        return require_env("epl.Graph").find_graph(tf.compat.v1.get_default_graph())

    def add_task_graph(self, strategy: Strategy, outer: Strategy | None) -> TaskGraph:
        """Adds a task graph, which becomes the last one."""
        inside = next((t.index for t in reversed(self.taskgraphs) if t.strategy is outer), None) if outer else None
        strategy.index = len(self.taskgraphs)
        found = TaskGraph(len(self.taskgraphs), strategy, inside, self)
        self.taskgraphs.append(found)
        return found

    @property
    def layout(self) -> Layout:
        """Returns the joint layout of the task graphs so far."""
        known = require_env("epl.Graph")
        context = require_current("epl.Graph")
        settings = known.config.pipeline
        if known.config.auto.auto_parallel:
            return make_planned_layout(context.planned_size, settings.num_stages, settings.num_micro_batch)
        annotated = [AnnotatedGraph(t.strategy.kind, t.strategy.device_count, t.inside) for t in self.taskgraphs]
        if not annotated and known.strategy_context.default_strategy is not None:
            annotated = [AnnotatedGraph("replicate", known.strategy_context.default_strategy.device_count)]
        if not annotated:
            annotated = [AnnotatedGraph("replicate", None)]
        return make_layout(
            annotated,
            context.planned_size,
            known.config.cluster.colocate_split_and_replicate,
            settings.num_micro_batch,
            known.slices,
        )

    @property
    def num_stages(self) -> int:
        """Returns the number of stages."""
        return len(self.taskgraphs)

    @property
    def num_constructors(self) -> int:
        """Returns the number of replicas that provide batches."""
        return len(self.layout.batches.readers)

    @property
    def pipeline_enabled(self) -> bool:
        """Tells whether one run computes several micro-batches."""
        return self.layout.batches.turns > 1

    @property
    def need_parallel(self) -> bool:
        """Returns True: every graph is distributed, evaluation included."""
        return True

    def get_pipeline_config(self) -> PipelineConfig:
        """Returns the pipeline configuration of this graph."""
        settings = require_env("epl.Graph").config.pipeline
        return PipelineConfig(settings.num_micro_batch, self.layout.stages, settings.strategy)

    def set_default_strategy(self, strategy: Any) -> None:
        """Sets the default strategy; see ``epl.set_default_strategy``."""
        require_env("epl.set_default_strategy()").strategy_context.set_default(strategy)

    def set_model_mode(self, mode: str) -> None:
        """Sets the mode (train, eval, predict) for which an Estimator builds the graph."""
        self.model_mode = mode

    def add_to_collection(self, tensors: Any, graph_key: str) -> None:
        """Adds to a collection; see ``epl.add_to_collection``."""
        _check_key(graph_key)
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            self.collections[graph_key].append(tf.convert_to_tensor(tensor))

    def get_collection(self, graph_key: str) -> list[tf.Tensor]:
        """Returns the values of one collection."""
        _check_key(graph_key)
        return list(self.collections[graph_key])

    def get_all_collections(self) -> list[tf.Tensor]:
        """Returns the values of all collections."""
        return [tensor for key in GraphKeys.ALL_COLLECTION_KEYS for tensor in self.collections[key]]

    @property
    def merged_outputs_map(self) -> dict[str, tf.Tensor]:
        """Returns a map from the name of a marked tensor to the tensor that is fetched in its place."""
        merge_outputs(self, tf.compat.v1.get_default_graph())
        return self.merged

    def clone(self, *_: Any, **__: Any) -> None:
        """Refuses to clone: there are no clones, since one program is planned for all devices.

        Raises:
          ProgramError: always.
        """
        raise ProgramError(
            "operations are not cloned: one program is planned for all devices, and each runs its part",
            given="a clone of an operation",
            expected="the operation itself",
            action="leave the call out; `whale plan` shows what each device runs",
        )

    get_local_replicas = get_local_micro_batches = clone


def _check_key(graph_key: str) -> None:
    if graph_key not in GraphKeys.ALL_COLLECTION_KEYS:
        raise ProgramError(
            "there is no such collection",
            given=repr(graph_key),
            expected=", ".join(GraphKeys.ALL_COLLECTION_KEYS),
            action="use a name of epl.GraphKeys",
        )


def add_to_collection(tensor: Any, graph_key: str) -> None:
    """Marks values to be merged over replicas where they are fetched, logged or summarised.

    Args:
      tensor: a tensor, or a list of them.
      graph_key: one of ``epl.GraphKeys``: GLOBAL merges over all replicas, LOCAL over those of a worker.

    Raises:
      ProgramError: no such collection.
    """
    Graph.get(may_create=True).add_to_collection(tensor, graph_key)


def get_collection(graph_key: str) -> Sequence[tf.Tensor]:
    """Returns the values of one collection."""
    return Graph.get().get_collection(graph_key)


def get_all_collections() -> Sequence[tf.Tensor]:
    """Returns the values of all collections."""
    return Graph.get().get_all_collections()


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
