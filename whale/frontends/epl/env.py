"""Implements ``epl.Env``: the library's state in this process."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from whale.frontends.epl.cluster import Cluster
from whale.frontends.epl.config import Config
from whale.frontends.epl.graph import Graph
from whale.frontends.epl.known import holder
from whale.frontends.epl.strategies import StrategyContext


class Env:
    """The configuration, cluster, open strategies and graphs of the process: ``Env.get()``.

    Attributes:
      config: what ``epl.init`` was given.
      cluster: the ranks as workers; None before ``epl.init``.
      strategy_context: the strategies that are open.
      epl_graphs: what is known of graphs, in the order in which they came.
    """

    def __init__(self) -> None:
        self.strategy_context = StrategyContext()
        self.reset()

    @classmethod
    def get(cls) -> Env:
        """Returns the process's Env, and creates it if there is none."""
        if holder.env is None:
            holder.env = cls()
        found: Env = holder.env
        return found

    def reset(self) -> None:
        """Clears all state."""
        self.strategy_context.end_default()
        self.config: Config = Config()
        self.cluster: Cluster | None = None
        self.strategy_context = StrategyContext()
        self.epl_graphs: list[Graph] = []
        self.applying = False  # whether an optimizer's update is being built
        self.is_ready = False
        self.told = False  # whether a loss was said to be taken for a mean
        self._of_graph: weakref.WeakKeyDictionary[tf.Graph, Graph] = weakref.WeakKeyDictionary()
        self._information: dict[str, Any] = {}

    def find_graph(self, graph: tf.Graph) -> Graph:
        """Returns the record of a TensorFlow graph; for a function's graph, that of the enclosing one."""
        while getattr(graph, "outer_graph", None) is not None:
            graph = graph.outer_graph
        if graph not in self._of_graph:
            self._of_graph[graph] = Graph()
            self.epl_graphs.append(self._of_graph[graph])
        return self._of_graph[graph]

    @property
    def slices(self) -> Any:
        """Returns, for each task graph, the ranks of its replicas if the script specifies them."""
        return self.cluster.slices if self.cluster is not None else ()

    @property
    def default_graph(self) -> Graph:
        """Returns the record of the default graph."""
        return self.find_graph(tf.compat.v1.get_default_graph())

    @property
    def parallel_information(self) -> dict[str, Any]:
        """Returns a dict in which scripts may store values; it is empty otherwise."""
        return self._information

    @property
    def server(self) -> None:
        """Returns None: Whale connects the ranks, without a TensorFlow server."""
        return None

    def get_config_proto(self, allow_growth: bool = True) -> Any:
        """Returns a tf.compat.v1.ConfigProto."""
        config = tf.compat.v1.ConfigProto()
        config.gpu_options.allow_growth = allow_growth
        if self.config.cluster.run_visible_devices:
            config.gpu_options.visible_device_list = self.config.cluster.run_visible_devices
        return config
