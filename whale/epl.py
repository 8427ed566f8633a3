"""Runs scripts written for the Easy Parallel Library with one line changed: ``import whale.epl as epl``.

Modules such as ``epl.ir.graph`` exist under the library's names; their contents come from ``whale.frontends.epl``.
"""

from __future__ import annotations

import importlib
import sys

from whale.frontends.epl.cluster import Cluster
from whale.frontends.epl.config import Config
from whale.frontends.epl.env import Env
from whale.frontends.epl.graph import Graph, GraphKeys, add_to_collection, get_all_collections, get_collection
from whale.frontends.epl.start import VERSION, init, set_default_strategy, switch_to_resources
from whale.frontends.epl.strategies import replicate, split
from whale.imports import NamedModules, names_of

__all__ = [
    "VERSION",
    "Cluster",
    "Config",
    "Env",
    "Graph",
    "GraphKeys",
    "add_to_collection",
    "cluster",
    "config",
    "env",
    "get_all_collections",
    "get_collection",
    "init",
    "replicate",
    "set_default_strategy",
    "split",
]
__path__: list[str] = []

_HOME = "whale.frontends.epl"
_MODULES = {
    "cluster": {"cluster": "Cluster VirtualDevice"},
    "config": {"config": "Config"},
    "env": {"env": "Env"},
    "ir": {},
    "ir.graph": {"graph": "Graph GraphKeys add_to_collection get_all_collections get_collection"},
    "profiler": {"profiler": "FlopsProfilerHook MemoryProfilerHook"},
    "profiler.flops": {"profiler": "FlopsProfilerHook"},
    "profiler.memory_profiler_hook": {"profiler": "MemoryProfilerHook profile_memory"},
    "runtime": {},
    "runtime.saver": {"saver": "MemoryEfficientBuilder ShardingLoader"},
    "strategies": {},
    "strategies.replicate": {"strategies": "Replicate replicate"},
    "strategies.split": {"strategies": "Split split"},
}
sys.meta_path.append(
    NamedModules(
        {
            f"{__name__}.{module}": names_of({f"{_HOME}.{own}": names for own, names in held.items()})
            for module, held in _MODULES.items()
        }
    )
)

cluster, config, env = (importlib.import_module(f"{__name__}.{name}") for name in ("cluster", "config", "env"))

switch_to_resources()
