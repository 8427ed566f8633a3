"""Compares software versions and processors between ranks: other versions are refused, other processors may round
differently.

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
    """Holds a rank's host and the versions of its software.

    Attributes:
      host: name of the rank's host.
      versions: name, such as "TensorFlow" -> version.
    """

    host: str
    versions: Mapping[str, str]


def read_versions() -> dict[str, str]:
    """Returns the versions, by name, of this process's software that has to be the same on all ranks."""
    python = ".".join(platform.python_version_tuple()[:2])
    package = sys.modules["whale"]  # is loaded, since this module is a part of it
    return {"Whale": package.__version__, "TensorFlow": tf.__version__, "Python": python}


def describe_rounding() -> str:
    """Returns a text that is equal for processes whose results are equal to the last bit.

    It contains the processor, the number of threads that share a sum, and variables that limit instruction sets. It is
    "" with a GPU, several of whose kernels add in a changing order.
    """
    if has_gpu():
        return ""
    return repr((*describe_processor(), count_threads()))


def refuse_other_versions(said: Sequence[RankVersions]) -> None:
    """Checks that all ranks run the same versions as the first one.

    Args:
      said: versions of each rank, by rank.

    Raises:
      ClusterError: the message names what differs, the versions, and their hosts.
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
