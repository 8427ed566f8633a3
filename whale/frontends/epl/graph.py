"""Implements ``epl.Graph``: the task graphs of a TensorFlow graph, and collections of tensors to merge over replicas.

A script marks a loss with, say, GLOBAL_MEAN_OBJECTS to get its mean over replicas. Whale has one value for the rows of
all replicas, and derives the merged value from this one (see ``batch_scaling``).
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
    """Names the collections of tensors to merge over replicas.

    GLOBAL merges over all replicas, LOCAL over those of one worker. CONCAT concatenates rows; MEAN and SUM reduce.
    """

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
    """Holds the pipeline settings of one graph.

    Attributes:
      num_micro_batch: number of micro-batches per update.
      num_stages: number of task graphs that have ranks of their own.
      strategy: name of the schedule, such as "preferbackward".
    """

    num_micro_batch: int
    num_stages: int
    strategy: str


@dataclass
class TaskGraph:
    """Represents the operations that were built under one strategy, e.g. inside of one ``with epl.replicate(1):``.

    Attributes:
      index: number of the task graph in its graph.
      strategy: the strategy under which it was built.
      inside: index of the task graph around it; None if there is none.
      graph: the epl.Graph that it belongs to.
    """

    index: int
    strategy: Strategy
    inside: int | None
    graph: Graph = field(repr=False)

    @property
    def num_device_per_replica(self) -> int:
        """Returns the number of devices of one replica; 1 if the script does not say."""
        return self.strategy.device_count or 1

    @property
    def num_replicas(self) -> int:
        """Returns the number of replicas of this task graph."""
        return self.graph.layout.replicas

    @property
    def local_num_replicas(self) -> int:
        """Returns the number of replicas whose first rank belongs to this worker."""
        cluster = require_env("a task graph").cluster
        first = cluster.worker_index * cluster.gpu_num_per_worker
        here = range(first, first + cluster.gpu_num_per_worker)
        return sum(ranks[0] in here for ranks in self.graph.layout.ranks.get(self.index, ()))

    @property
    def virtual_device(self) -> Any:
        """Returns the devices of this task graph, as a VirtualDevice."""
        return require_env("a task graph").cluster.device_of(self.graph.layout.ranks.get(self.index, ()), self.index)

    @property
    def pipeline_config(self) -> PipelineConfig:
        """Returns the pipeline settings of the graph that this task graph belongs to."""
        return self.graph.get_pipeline_config()


class Graph:
    """Holds the task graphs and the collections of one TensorFlow graph.

    Attributes:
      taskgraphs: the task graphs, in the order in which they were opened.
      gradients: gradients that optimizers were given.
      differentiated: names of the operations that output gradients.
      collections: tensors to merge over replicas, by the names of GraphKeys.
      merged: name of a marked tensor -> the tensor with its merged value.
      summary_map: empty; only there because EPL has it.
      model_mode: what an Estimator builds the graph for: train, eval or predict.
      sliced: True once the files of the graph's datasets were divided over the replicas.
    """

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
        """Returns the epl.Graph of TensorFlow's default graph; it is created if there is none, whatever ``may_create``
        says.
        """
        return require_env("epl.Graph").find_graph(tf.compat.v1.get_default_graph())

    def add_task_graph(self, strategy: Strategy, outer: Strategy | None) -> TaskGraph:
        """Adds a task graph.

        Args:
          strategy: the strategy under which it is built.
          outer: the strategy around it; None if there is none.
        """
        inside = next((t.index for t in reversed(self.taskgraphs) if t.strategy is outer), None) if outer else None
        strategy.index = len(self.taskgraphs)
        found = TaskGraph(len(self.taskgraphs), strategy, inside, self)
        self.taskgraphs.append(found)
        return found

    @property
    def layout(self) -> Layout:
        """Returns on which ranks the task graphs that exist so far run, and how batches are divided."""
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
        """Returns the number of task graphs, which EPL calls stages."""
        return len(self.taskgraphs)

    @property
    def num_constructors(self) -> int:
        """Returns the number of ranks that read batches: one per replica."""
        return len(self.layout.batches.readers)

    @property
    def pipeline_enabled(self) -> bool:
        """Returns True if one run of the graph computes several micro-batches."""
        return self.layout.batches.turns > 1

    @property
    def need_parallel(self) -> bool:
        """Returns True: every graph is distributed, evaluation included."""
        return True

    def get_pipeline_config(self) -> PipelineConfig:
        """Returns the pipeline settings of this graph."""
        settings = require_env("epl.Graph").config.pipeline
        return PipelineConfig(settings.num_micro_batch, self.layout.stages, settings.strategy)

    def set_default_strategy(self, strategy: Any) -> None:
        """Sets the default strategy; see ``epl.set_default_strategy``."""
        require_env("epl.set_default_strategy()").strategy_context.set_default(strategy)

    def set_model_mode(self, mode: str) -> None:
        """Records for what an Estimator builds the graph: train, eval or predict."""
        self.model_mode = mode

    def add_to_collection(self, tensors: Any, graph_key: str) -> None:
        """Adds one tensor or a list of them to a collection; see ``epl.add_to_collection``."""
        _check_key(graph_key)
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            self.collections[graph_key].append(tf.convert_to_tensor(tensor))

    def get_collection(self, graph_key: str) -> list[tf.Tensor]:
        """Returns the tensors that were added to the collection ``graph_key``."""
        _check_key(graph_key)
        return list(self.collections[graph_key])

    def get_all_collections(self) -> list[tf.Tensor]:
        """Returns the tensors of all collections in one list."""
        return [tensor for key in GraphKeys.ALL_COLLECTION_KEYS for tensor in self.collections[key]]

    @property
    def merged_outputs_map(self) -> dict[str, tf.Tensor]:
        """Returns the merged tensors, by the names of the tensors in whose place they are fetched."""
        merge_outputs(self, tf.compat.v1.get_default_graph())
        return self.merged

    def clone(self, *_: Any, **__: Any) -> None:
        """Raises an error: EPL clones operations for replicas, but Whale plans one program for all devices.

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
            "there is no such collection of tensors to merge over replicas",
            given=repr(graph_key),
            expected=", ".join(GraphKeys.ALL_COLLECTION_KEYS),
            action="use a name of epl.GraphKeys",
        )


def add_to_collection(tensor: Any, graph_key: str) -> None:
    """Marks a tensor to be merged over replicas when the script fetches, logs or summarises it.

    Args:
      tensor: a tensor, or a list of them.
      graph_key: a name of ``epl.GraphKeys``. GLOBAL merges over all replicas, LOCAL over those of one worker.

    Raises:
      ProgramError: there is no collection of this name.
    """
    Graph.get(may_create=True).add_to_collection(tensor, graph_key)


def get_collection(graph_key: str) -> Sequence[tf.Tensor]:
    """Returns the tensors of the default graph that were added to the collection ``graph_key``."""
    return Graph.get().get_collection(graph_key)


def get_all_collections() -> Sequence[tf.Tensor]:
    """Returns the tensors of the default graph that were added to any collection."""
    return Graph.get().get_all_collections()


def merge_outputs(graph: Any, tf_graph: tf.Graph) -> None:
    """Creates the merged tensors for marked tensors that have none yet, and makes summaries read the merged tensors.

    Args:
      graph: the epl.Graph.
      tf_graph: its TensorFlow graph, which may be finalized.

    Raises:
      ProgramError: the merged value cannot be derived from the value for the whole batch.
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
                    key, tensor, "a tensor cannot be merged over the replicas of one worker alone",
                    "add the tensor to the GLOBAL collection, or start all replicas in one worker "
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
                key, tensor, "only tensors with the batch as dimension 0 can be concatenated over replicas",
                "add a tensor of shape [rows, ...] to this collection",
            )  # fmt: skip
        return tf.identity(tensor)  # an iterator's own output has this rank's rows only; its identity has all rows
    if grows is None:
        raise _make_refusal(
            key, tensor, "the replicas' values of a tensor cannot be derived from its value for the whole batch",
            "add a mean or a sum over rows to the collection, or products and quotients of such",
        )  # fmt: skip
    if grows.rows:
        stacked = tf.reshape(tensor, tf.concat([[copies, -1], tf.shape(tensor)[1:]], 0))
        return tf.reduce_mean(stacked, 0) if how == "mean" else tf.reduce_sum(stacked, 0)
    power = (how == "sum") - grows.power
    return tensor if not power else tensor * tf.cast(float(copies) ** power, tensor.dtype)


def _count_workers(graph: Any) -> int:
    """Returns the number of workers that have a rank which reads batches."""
    cluster = require_env("epl.GraphKeys").cluster
    each = cluster.gpu_num_per_worker if cluster is not None else 1
    return len({rank // each for rank in graph.layout.batches.readers})


@contextmanager
def unfreeze_graph(graph: tf.Graph) -> Iterator[None]:
    """Makes ``graph`` the default graph and allows new operations inside of the context, even if it is finalized."""
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
    return ProgramError(
        why,
        op=tensor.name,
        given=f"a tensor in the collection epl.GraphKeys.{key.upper()}",
        expected="a tensor that can be merged over replicas",
        action=action,
    )
