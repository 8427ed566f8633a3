"""Whale: a training program written for one device, run over unequal devices.

The names below are loaded when first used, so that ``import whale`` costs nothing and needs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from whale.annotations import checkpoint as checkpoint
    from whale.annotations import pipeline as pipeline
    from whale.annotations import recompute as recompute
    from whale.annotations import replica as replica
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
    from whale.runtime.checkpoint import CheckpointManager as CheckpointManager
    from whale.runtime.cluster import cluster as cluster
    from whale.runtime.context import check_replicas as check_replicas
    from whale.runtime.context import init as init
    from whale.runtime.context import local_rank as local_rank
    from whale.runtime.context import rank as rank
    from whale.runtime.context import shutdown as shutdown
    from whale.runtime.context import size as size
    from whale.runtime.data import ShardedTensor as ShardedTensor
    from whale.runtime.data import shard as shard
    from whale.runtime.dry_run import plan as plan
    from whale.runtime.export import export as export
    from whale.runtime.function import function as function
    from whale.runtime.loss_scale import loss_scale as loss_scale
    from whale.runtime.memory import memory_report as memory_report
    from whale.runtime.monitored import MonitoredTrainingSession as MonitoredTrainingSession
    from whale.runtime.session import Session as Session
    from whale.started import restarts as restarts

_PUBLIC = {
    "init": "whale.runtime.context",
    "rank": "whale.runtime.context",
    "size": "whale.runtime.context",
    "local_rank": "whale.runtime.context",
    "shutdown": "whale.runtime.context",
    "check_replicas": "whale.runtime.context",
    "restarts": "whale.started",
    "cluster": "whale.runtime.cluster",
    "checkpoint": "whale.annotations",
    "set_default_strategy": "whale.annotations",
    "CheckpointManager": "whale.runtime.checkpoint",
    "export": "whale.runtime.export",
    "function": "whale.runtime.function",
    "Session": "whale.runtime.session",
    "MonitoredTrainingSession": "whale.runtime.monitored",
    "loss_scale": "whale.runtime.loss_scale",
    "memory_report": "whale.runtime.memory",
    "plan": "whale.runtime.dry_run",
    "shard": "whale.runtime.data",
    "ShardedTensor": "whale.runtime.data",
    "recompute": "whale.annotations",
    "replica": "whale.annotations",
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
    try:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        from whale.errors import no_tensorflow

        raise no_tensorflow(f"whale.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
