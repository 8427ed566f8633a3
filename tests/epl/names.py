"""Every name of the library that its scripts use, with what it is on two ranks of one device each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tensorflow.compat.v1 as tf

from tests.epl.model import CLASSES, Rows, cross_entropy, dense

DEVICES = tuple(f"/job:worker/replica:0/task:{rank}/device:GPU:0" for rank in range(2))
TURNED = [[[DEVICES[1]]], [[DEVICES[0]]]]
KEYS = [f"{where}_{how}_OBJECTS" for where in ("GLOBAL", "LOCAL") for how in ("CONCAT", "MEAN", "SUM")]
# What a script asks for after `epl.init` and one `epl.replicate(1)`, and what that gives.
VALUES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "Cluster.worker_num": (lambda s: s.cluster.worker_num, 2),
    "Cluster.worker_index": (lambda s: s.cluster.worker_index == s.mine, True),
    "Cluster.gpu_num_per_worker": (lambda s: s.cluster.gpu_num_per_worker, 1),
    "Cluster.total_gpu_num": (lambda s: s.cluster.total_gpu_num, 2),
    "Cluster.available_devices": (lambda s: list(s.cluster.available_devices) == [DEVICES[s.mine]], True),
    "Cluster.hosts": (lambda s: len(s.cluster.hosts.split(",")), 2),
    "Cluster.cluster_spec": (lambda s: s.cluster.cluster_spec.jobs, ["worker"]),
    "VirtualDevice.all_devices": (lambda s: s.cluster.virtual_devices[0].all_devices, DEVICES),
    "VirtualDevice.local_devices": (lambda s: s.cluster.virtual_devices[0].local_devices == (DEVICES[s.mine],), True),
    "VirtualDevice.slice_devices": (lambda s: s.cluster.virtual_devices[0].slice_devices, [[d] for d in DEVICES]),
    "VirtualDevice.num_replicas": (lambda s: s.cluster.virtual_devices[0].num_replicas, 2),
    "layout all": (lambda s: _slices(s, "all"), [[[d] for d in DEVICES]]),
    "layout auto": (lambda s: _slices(s, "auto"), [[[d] for d in DEVICES]]),  # for the task graphs that there are
    "layout aware_row": (lambda s: _slices(s, {"aware_row": 1}), [[[d]] for d in DEVICES]),
    "layout specific": (lambda s: _slices(s, {"specific": TURNED}), TURNED),
    "Env.config": (lambda s: s.env.config.pipeline.num_micro_batch, 4),
    "StrategyContext.state": (lambda s: s.env.strategy_context.state, []),
    "StrategyContext.default_strategy": (lambda s: s.env.strategy_context.default_strategy, None),
    "Env.parallel_information": (lambda s: s.env.parallel_information, {}),
    "Graph.taskgraphs": (lambda s: [t.strategy.device_count for t in s.graph.taskgraphs], [1]),
    "Graph.num_stages": (lambda s: s.graph.num_stages, 1),
    "Graph.get_pipeline_config": (lambda s: s.graph.get_pipeline_config().num_micro_batch, 4),
    "Graph.get_collection": (lambda s: s.graph.get_collection(s.keys.GLOBAL_MEAN_OBJECTS) == [s.loss], True),
    "Graph.get_local_replicas": (lambda s: _error(s.graph.get_local_replicas, s.loss), "ProgramError"),
    "get_collection": (lambda s: s.epl.get_collection(s.keys.LOCAL_SUM_OBJECTS) == [s.loss], True),
    "get_all_collections": (lambda s: s.epl.get_all_collections() == [s.loss] * 2, True),
    "ALL_COLLECTION_KEYS": (lambda s: sorted(s.keys.ALL_COLLECTION_KEYS), [key.lower() for key in KEYS]),
    "VERSION": (lambda s: s.epl.VERSION.count("."), 2),
    "init of a dict": (lambda s: _error(s.epl.init, {}), "ConfigError"),
    "default split": (lambda s: _error(s.epl.set_default_strategy, s.epl.split()), "PlanError"),
    "epl.env": (lambda s: _module("env").Env is s.epl.Env, True),
    "epl.config": (lambda s: _module("config").Config is s.epl.Config, True),
    "epl.cluster": (lambda s: _module("cluster").Cluster is s.epl.Cluster, True),
    "epl.ir.graph": (lambda s: _module("ir.graph").Graph is s.epl.Graph, True),
    "ShardingLoader.restore": (lambda s: callable(_module("runtime.saver").ShardingLoader.restore), True),
    "MemoryEfficientBuilder": (lambda s: callable(_module("runtime.saver").MemoryEfficientBuilder), True),
    "FlopsProfilerHook": (lambda s: issubclass(_module("profiler").FlopsProfilerHook, tf.train.SessionRunHook), True),
    "MemoryProfilerHook": (lambda s: issubclass(_module("profiler").MemoryProfilerHook, tf.train.SessionRunHook), True),
    "strategies.replicate": (lambda s: _module("strategies.replicate").replicate is s.epl.replicate, True),
    "strategies.split": (lambda s: _module("strategies.split").split is s.epl.split, True),
}  # fmt: skip


def names(epl: Any, rows: Rows, runs: int) -> dict[str, list[float]]:
    """1.0 for each name that is what it is to be."""
    if rows.mine is None:  # one device has none of them
        return {name: [1.0] for name in VALUES}
    epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    x, labels = rows.next()
    with epl.replicate(1):
        loss = cross_entropy(labels, dense(x, CLASSES, "logits"))
        epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
        epl.add_to_collection([loss], epl.GraphKeys.LOCAL_SUM_OBJECTS)
    env, graph = epl.Env.get(), epl.Graph.get(may_create=True)
    script = SimpleNamespace(
        epl=epl, env=env, cluster=env.cluster, graph=graph, keys=epl.GraphKeys, loss=loss, mine=rows.mine
    )
    return {name: [float(ask(script) == expected)] for name, (ask, expected) in VALUES.items()}


def _slices(script: Any, layout: Any) -> list[Any]:
    return [device.slice_devices for device in script.epl.Cluster(layout=layout).virtual_devices]


def _module(path: str) -> Any:
    return importlib.import_module(f"whale.epl.{path}")


def _error(call: Callable[..., Any], *arguments: Any) -> str:
    from whale.errors import WhaleError

    try:
        call(*arguments)
    except WhaleError as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == WhaleError.__module__)
    return "none"
