"""Compares the versions of what ranks run: other code on a host computes other things, or says them otherwise."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from whale.errors import ClusterError


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
