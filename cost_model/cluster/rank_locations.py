"""Tells on which devices of a cluster the ranks of a job lie.

Ranks are numbered over the cluster's hosts in the order of its file, and over a host's devices in the order of its
entry, as launchers do.
"""

from __future__ import annotations

from cost_model.cluster.pools import Machines
from whale.errors import ClusterError


def list_pool_runs(machines: Machines, ranks: int) -> list[tuple[int, int, int]]:
    """Returns (first rank, end, pool's number) of each run of equal devices on one host, until all ranks have a device.

    Raises:
        ClusterError: the cluster has fewer devices.
    """
    cluster = machines.cluster
    runs: list[tuple[int, int, int]] = []
    first = number = 0
    for host in cluster.hosts:
        for _ in range(host.count):
            for place, entry in enumerate(host.devices):
                runs.append((first, first + entry.count, number + place))
                first += entry.count
            if first >= ranks:
                return runs
        number += len(host.devices)
    raise ClusterError(
        f"the plan needs {ranks} devices and the cluster {cluster.name} has {first}",
        given=f"{ranks} ranks",
        expected=f"at most {first}",
        action="add hosts to the cluster file or spread the program over fewer ranks",
    )
