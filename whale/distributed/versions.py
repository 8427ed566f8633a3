"""Compares the software versions and processors of ranks: other code may compute other results, and another processor
may round them differently.

Decision: 0178.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from whale.distributed.gpus import has_gpu
from whale.errors import ClusterError
from whale_ops.processor import count_threads, describe_processor


@dataclass(frozen=True, slots=True)
class RankVersions:
    """Names the software that a rank runs, and its host.

    Attributes:
      versions: by name, such as TensorFlow.
    """

    host: str
    versions: Mapping[str, str]


def read_versions() -> dict[str, str]:
    """Returns the versions of this process that have to be those of the others."""
    python = ".".join(platform.python_version_tuple()[:2])
    package = sys.modules["whale"]  # of which this is a part: it is there
    return {"Whale": package.__version__, "TensorFlow": tf.__version__, "Python": python}


def describe_rounding() -> str:
    """Describes by what the last bits of this process's results follow; equal texts: other processes compute the same.

    These are its processor, how many threads divide a sum, and variables that cap instructions. With a GPU it is "":
    several of its kernels add in an order that is never the same.
    """
    if has_gpu():
        return ""
    return repr((*describe_processor(), count_threads()))


def refuse_other_versions(said: Sequence[RankVersions]) -> None:
    """Refuses ranks of which one runs other versions than the first.

    Args:
      said: by each rank, in order of ranks.

    Raises:
      ClusterError: names what differs, the versions, and their hosts.
    """
    for name, version in said[0].versions.items():
        hosts: dict[str, dict[str, None]] = {}  # version -> hosts, in order of ranks
        for one in said:
            hosts.setdefault(one.versions.get(name, "none"), {})[one.host] = None
        if len(hosts) > 1:
            others = [host for other, names in hosts.items() if other != version for host in names]
            raise ClusterError(
                f"the hosts of this run have {name} in different versions",
                given="; ".join(f"{name} {other} on {', '.join(names)}" for other, names in hosts.items()),
                expected="the same versions of Whale, TensorFlow and Python (but for its last number) on every host",
                action=f"install {name} {version} on {', '.join(others)}, or the other one on {said[0].host}",
            )
