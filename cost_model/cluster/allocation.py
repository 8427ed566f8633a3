"""Finds the hosts that a scheduler allocated to this job: SLURM's node list, or TF_CONFIG of a Kubernetes operator.

Neither describes the hosts' hardware, so all are assumed to be like the local one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping

import msgspec

from cost_model.cluster import discover
from cost_model.cluster.cluster_file import Attachment, Cluster, NetworkEntry, read
from cost_model.hardware import catalogue
from whale.errors import ClusterError

_PART = re.compile(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")


def read_named_cluster(name: str, network: str | None = None, cpu_quota: float | None = None) -> Cluster:
    """Reads the cluster that a command's ``--cluster`` names: a cluster file, or ``local``.

    ``local`` is this machine, repeated for every host that a scheduler allocated to the job.

    Args:
        network: catalogue name of the network between the hosts; needed for ``local`` if there are several.
        cpu_quota: number of CPUs that control groups grant; None: no quota.

    Raises:
        ClusterError: the file cannot be read or is invalid, or the catalogue has no entry for this machine's devices.
    """
    if name != "local":
        return read(name)
    return repeat_cluster(discover.discover_local(cpu_quota), list_hosts(os.environ), network)


def list_hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the job's hosts, in its order; empty without a scheduler.

    Raises:
        ClusterError: the scheduler's variables cannot be parsed.
    """
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if variable in environment:
            return expand_node_list(environment[variable], variable)
    if "TF_CONFIG" in environment:
        return _list_workers(environment["TF_CONFIG"])
    return ()


def expand_node_list(text: str, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Expands SLURM's short form: ``gpu[01-03,07],login`` is gpu01, gpu02, gpu03, gpu07, login."""
    names: list[str] = []
    at = 0
    while at < len(text):
        found = _PART.match(text, at)
        if found is None or found.end() == at:
            raise _make_unreadable_error(variable, text)
        before, ranges, behind = found.groups()
        if ranges is None:
            names.append(before + behind)
        else:
            for part in ranges.split(","):
                first, _, last = part.partition("-")
                if not first.isdecimal() or (last and not last.isdecimal()) or int(last or first) < int(first):
                    raise _make_unreadable_error(variable, text)
                for number in range(int(first), int(last or first) + 1):
                    names.append(f"{before}{number:0{len(first)}d}{behind}")
        at = found.end()
    if not names or len(set(names)) != len(names):
        raise _make_unreadable_error(variable, text)
    return tuple(names)


def _list_workers(text: str) -> tuple[str, ...]:
    """Returns the hosts of chief and workers in TF_CONFIG, which Kubernetes' training operator sets."""
    try:
        cluster = json.loads(text)["cluster"]
        addresses = [address for role in ("chief", "master", "worker") for address in cluster.get(role, ())]
        return tuple(dict.fromkeys(address.rpartition(":")[0] or address for address in addresses))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _make_unreadable_error("TF_CONFIG", text) from None


def _make_unreadable_error(variable: str, text: str) -> ClusterError:
    return ClusterError(
        "the scheduler's list of hosts cannot be read",
        given=f"{variable}={text if len(text) <= 200 else f'{text[:200]}... ({len(text)} characters)'}",
        expected='names like gpu[01-03,07],login; for TF_CONFIG {"cluster": {"worker": ["host:port"]}}',
        action=f"correct {variable}, or name a cluster file with --cluster",
    )


def repeat_cluster(local: Cluster, names: tuple[str, ...], network: str | None) -> Cluster:
    """Returns a cluster in which ``local``'s only host is repeated once for each name, all on one network.

    With at most one name, ``local`` itself is returned.

    Args:
        network: catalogue name of the network.

    Raises:
        ClusterError: there are several names, but no network is given, or the catalogue does not have it.
    """
    if len(names) <= 1:
        return local
    if network is None:
        raise ClusterError(
            "the job has several hosts, and the network between them is not known",
            given=", ".join(itertools.islice(names, 4)) + (", ..." if len(names) > 4 else ""),
            expected="a type of network of the catalogue",
            action="name it, e.g. --network infiniband-hdr-200, or name a cluster file with --cluster",
        )
    catalogue.find_network(network)
    (one,) = local.hosts
    host = msgspec.structs.replace(one, name=names[0], count=len(names), networks={"between": Attachment()})
    return Cluster("allocated", [host], {"between": NetworkEntry(network)})
