"""Implements ``epl.Env``, which holds the state of an EPL script in this process."""

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
    """Holds the configuration, cluster, open strategies and graphs of an EPL script; ``Env.get()`` returns the only
    instance.

    Attributes:
      config: the epl.Config that ``epl.init`` was given.
      cluster: the ranks as workers; None before ``epl.init``.
      strategy_context: the strategies (``epl.replicate``, ``epl.split``) that are open now.
      epl_graphs: one epl.Graph per TensorFlow graph, in order of creation.
    """

    def __init__(self) -> None:
        self.strategy_context = StrategyContext()
        self.reset()

    @classmethod
    def get(cls) -> Env:
        """Returns the only Env of the process; the first call creates it."""
        if holder.env is None:
            holder.env = cls()
        found: Env = holder.env
        return found

    def reset(self) -> None:
        """Forgets configuration, cluster, strategies and graphs; ``epl.init`` calls this first."""
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
        """Returns the epl.Graph of a TensorFlow graph, and creates it if there is none.

        The graph of a function belongs to the epl.Graph of the graph around it.
        """
        while getattr(graph, "outer_graph", None) is not None:
            graph = graph.outer_graph
        if graph not in self._of_graph:
            self._of_graph[graph] = Graph()
            self.epl_graphs.append(self._of_graph[graph])
        return self._of_graph[graph]

    @property
    def slices(self) -> Any:
        """Returns, for each task graph, the ranks of each replica, if the script gave a layout to epl.Cluster; else
        ``()``.
        """
        return self.cluster.slices if self.cluster is not None else ()

    @property
    def default_graph(self) -> Graph:
        """Returns the epl.Graph of TensorFlow's default graph."""
        return self.find_graph(tf.compat.v1.get_default_graph())

    @property
    def parallel_information(self) -> dict[str, Any]:
        """Returns a dict for the script's own use; Whale stores nothing in it."""
        return self._information

    @property
    def server(self) -> None:
        """Returns None: EPL starts a tf.train.Server here, but Whale connects the ranks without one."""
        return None

    def get_config_proto(self, allow_growth: bool = True) -> Any:
        """Returns a tf.compat.v1.ConfigProto with ``allow_growth`` and the GPUs of ``cluster.run_visible_devices``."""
        config = tf.compat.v1.ConfigProto()
        config.gpu_options.allow_growth = allow_growth
        if self.config.cluster.run_visible_devices:
            config.gpu_options.visible_device_list = self.config.cluster.run_visible_devices
        return config
