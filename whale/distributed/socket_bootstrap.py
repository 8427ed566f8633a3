"""Connects the ranks of a run by sockets where each host has an MPI of its own, as ranks that join later are.

An MPI ends all of its ranks when it loses a host; so the ranks of several hosts, each of which may go, have none in
common (`whale run --hosts-from`).

Decision: 0116.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import whale_ops
from whale.config import Config
from whale.distributed.between_hosts import connect_between_hosts
from whale.distributed.connect import connect, share_tensors_if_possible
from whale.distributed.listener import RankListener
from whale.distributed.watch import LauncherWatch
from whale.errors import CommError
from whale.started import APART_VARIABLE, PEERS_VARIABLE, ProcessPlace

_TOGETHER = 0  # the group of all ranks of the run's start; others have larger numbers


@dataclass(frozen=True, slots=True)
class SocketBootstrap:
    """The listener of this process, and the addresses by which it reaches those of other hosts.

    Attributes:
      door: where it listens, to its end.
      addresses: where each rank of the run's start does.
    """

    door: RankListener
    addresses: Mapping[int, str]


def connect_ranks(
    name: str, place: ProcessPlace, config: Config, watch: LauncherWatch
) -> tuple[tuple[whale_ops.Communicator], SocketBootstrap | None]:
    """Connects this process with all ranks of the run's start, by MPI, or by sockets where hosts have an mpirun of
    their own.

    Returns its end of the communicator; and with sockets how to reach each rank, else None.

    Raises:
      ClusterError: MPI knows another number of ranks than the launcher.
      CommError: MPI cannot be loaded or started, or one of the ranks is gone.
    """
    if config["communication.shared_memory"] == "tensors":
        share_tensors_if_possible(config, place)
    if APART_VARIABLE not in os.environ:
        return connect_with_mpi(name, place, config)
    known = _collect_addresses(watch, place.size, config["fault.freeze_s"])
    sockets = known.door.connect_group(
        _TOGETHER,
        place.rank,
        range(place.size),
        known.addresses,
        lambda: watch.is_over or bool(watch.list_changes(0, 0.0)),
    )
    comm = whale_ops.connect_over_sockets(
        name,
        place.rank,
        sockets,
        share_memory=config["communication.shared_memory"] != "none",
        hosts=config.network.hosts,
    )
    return (comm,), known


def connect_with_mpi(
    name: str, place: ProcessPlace, config: Config
) -> tuple[tuple[whale_ops.Communicator], SocketBootstrap | None]:
    """Connects this process with all that MPI connects: by that, or between hosts by TCP where it is faster."""
    asked = config["communication.between_hosts"]
    # Emulated hosts are those of one machine, whose TCP says nothing of a network.
    if asked == "mpi" or (place.local_size == place.size and (asked == "auto" or not config.network.hosts)):
        return (connect(name, place, config),), None
    by_mpi = connect(f"{name}.mpi", place, config, share_memory=False)
    found = connect_between_hosts(name, place, config, by_mpi)
    by_mpi.leave()
    if found is None:
        return (connect(name, place, config),), None
    comm, door, addresses = found
    if not config["fault.elastic"]:  # nobody connects anew
        door.close()
        return (comm,), None
    return (comm,), SocketBootstrap(door, addresses)


_known: list[SocketBootstrap] = []  # of this process: its runs have one door, and `whale run` tells the addresses once


def _collect_addresses(watch: LauncherWatch, size: int, freeze_s: float) -> SocketBootstrap:
    if not _known:
        door = RankListener(os.environ[PEERS_VARIABLE], freeze_s)
        watch.tell({"address": door.address})
        addresses = watch.read_addresses()
        if len(addresses) != size:
            door.close()
            raise CommError(
                "a rank is gone before all ranks were connected",
                given=f"addresses of {len(addresses)} ranks",
                expected=f"those of {size}",
                action="look at the launcher's output",
            )
        _known.append(SocketBootstrap(door, addresses))
    return _known[0]
