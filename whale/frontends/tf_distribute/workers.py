"""Implements ``strategy.cluster_resolver``: what a strategy tells of its workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


class Resolver:
    """The resolver of a strategy, which tells of the workers.

    Attributes:
      task_type: "worker", or "chief" where ``TF_CONFIG`` has one and this rank is it.
      task_id: its number among those of its type.
    """

    rpc_layer = "mpi"
    environment = ""

    def __init__(self, said: Mapping[str, Any], rank: int, size: int) -> None:
        cluster = dict(said.get("cluster") or {}) or {"worker": [f"rank{number}:0" for number in range(size)]}
        chiefs = len(cluster.get("chief", ()))
        self._cluster = cluster
        self.task_type = "chief" if rank < chiefs else "worker"
        self.task_id = rank if rank < chiefs else rank - chiefs

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Returns the workers."""
        return tf.train.ClusterSpec(self._cluster)

    def master(self, *_: Any, **__: Any) -> str:
        """Returns "": no server listens."""
        return ""
