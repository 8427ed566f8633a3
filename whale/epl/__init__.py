"""``import whale.epl as epl``: a script written for the Easy Parallel Library runs with this line changed.

The modules below are laid out as the library's.
"""

from whale.epl import cluster, config, env
from whale.frontends.epl.cluster import Cluster
from whale.frontends.epl.config import Config
from whale.frontends.epl.env import Env
from whale.frontends.epl.graph import (
    Graph,
    GraphKeys,
    add_to_collection,
    get_all_collections,
    get_collection,
)
from whale.frontends.epl.start import VERSION, init, set_default_strategy, switch
from whale.frontends.epl.strategies import replicate, split

switch()

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
