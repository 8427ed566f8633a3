"""Whale: a training program written for one device, run over unequal devices.

The names below are loaded when first used, so that ``import whale`` costs nothing and needs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from whale.annotations import annotate as annotate
    from whale.annotations import auto_parallel as auto_parallel
    from whale.annotations import checkpoint as checkpoint
    from whale.annotations import pipeline as pipeline
    from whale.annotations import recompute as recompute
    from whale.annotations import replica as replica
    from whale.annotations import replicate as replicate
    from whale.annotations import set_default_strategy as set_default_strategy
    from whale.annotations import split as split
    from whale.annotations import stage as stage
    from whale.config import Config as Config
    from whale.errors import CaptureError as CaptureError
    from whale.errors import CheckpointError as CheckpointError
    from whale.errors import ClusterError as ClusterError
    from whale.errors import CommError as CommError
    from whale.errors import ConfigError as ConfigError
    from whale.errors import InstallError as InstallError
    from whale.errors import LayoutError as LayoutError
    from whale.errors import PlanError as PlanError
    from whale.errors import ProgramError as ProgramError
    from whale.errors import RuleError as RuleError
    from whale.errors import WhaleError as WhaleError
    from whale.frontends.keras.install import distribute as distribute
    from whale.frontends.launch import launch as launch
    from whale.frontends.layers import layers as layers
    from whale.frontends.layers import losses as losses
    from whale.frontends.layers import optimizers as optimizers
    from whale.frontends.start import init as init
    from whale.frontends.tf1.monitored import MonitoredTrainingSession as MonitoredTrainingSession
    from whale.frontends.tf_distribute.strategy import Strategy as Strategy
    from whale.runtime.checkpoint.export import export as export
    from whale.runtime.checkpoint.manager import CheckpointManager as CheckpointManager
    from whale.runtime.function import function as function
    from whale.runtime.input.data import ShardedTensor as ShardedTensor
    from whale.runtime.input.data import shard as shard
    from whale.runtime.input.state import State as State
    from whale.runtime.run.cluster import cluster as cluster
    from whale.runtime.run.context import local_rank as local_rank
    from whale.runtime.run.context import preempted as preempted
    from whale.runtime.run.context import rank as rank
    from whale.runtime.run.context import size as size
    from whale.runtime.run.loss_scale import loss_scale as loss_scale
    from whale.runtime.run.start import check_replicas as check_replicas
    from whale.runtime.run.start import shutdown as shutdown
    from whale.runtime.session.session import InteractiveSession as InteractiveSession
    from whale.runtime.session.session import Session as Session
    from whale.runtime.tools.dry_run import plan as plan
    from whale.runtime.tools.memory_report import memory_report as memory_report
    from whale.started import restarts as restarts

_PUBLIC = {
    "annotate": "whale.annotations",
    "init": "whale.frontends.start",
    "launch": "whale.frontends.launch",
    "rank": "whale.runtime.run.context",
    "size": "whale.runtime.run.context",
    "local_rank": "whale.runtime.run.context",
    "Strategy": "whale.frontends.tf_distribute.strategy",
    "distribute": "whale.frontends.keras.install",
    "shutdown": "whale.runtime.run.start",
    "check_replicas": "whale.runtime.run.start",
    "restarts": "whale.started",
    "preempted": "whale.runtime.run.context",
    "cluster": "whale.runtime.run.cluster",
    "checkpoint": "whale.annotations",
    "set_default_strategy": "whale.annotations",
    "CheckpointManager": "whale.runtime.checkpoint.manager",
    "export": "whale.runtime.checkpoint.export",
    "function": "whale.runtime.function",
    "layers": "whale.frontends.layers.layers",
    "losses": "whale.frontends.layers.losses",
    "optimizers": "whale.frontends.layers.optimizers",
    "Session": "whale.runtime.session.session",
    "InteractiveSession": "whale.runtime.session.session",
    "MonitoredTrainingSession": "whale.frontends.tf1.monitored",
    "loss_scale": "whale.runtime.run.loss_scale",
    "memory_report": "whale.runtime.tools.memory_report",
    "plan": "whale.runtime.tools.dry_run",
    "shard": "whale.runtime.input.data",
    "State": "whale.runtime.input.state",
    "ShardedTensor": "whale.runtime.input.data",
    "recompute": "whale.annotations",
    "replica": "whale.annotations",
    "replicate": "whale.annotations",
    "auto_parallel": "whale.annotations",
    "split": "whale.annotations",
    "stage": "whale.annotations",
    "pipeline": "whale.annotations",
    "Config": "whale.config",
    "WhaleError": "whale.errors",
    "ConfigError": "whale.errors",
    "ClusterError": "whale.errors",
    "CommError": "whale.errors",
    "CheckpointError": "whale.errors",
    "ProgramError": "whale.errors",
    "CaptureError": "whale.errors",
    "InstallError": "whale.errors",
    "RuleError": "whale.errors",
    "LayoutError": "whale.errors",
    "PlanError": "whale.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'whale' has no attribute {name!r}")
    from whale.ir.collector import suspend_garbage_collection

    try:
        with suspend_garbage_collection():
            module = importlib.import_module(_PUBLIC[name])
        value = module if _PUBLIC[name].endswith(f".{name}") and not hasattr(module, name) else getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        from whale.errors import no_tensorflow

        raise no_tensorflow(f"whale.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
