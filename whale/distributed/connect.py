"""Connects the processes that a launcher started, so that they are ranks that exchange messages.

Within one mpirun they connect by MPI. An MPI ends all of its ranks when it loses a host; so the ranks of several hosts,
each of which may go, have none in common (`whale run --hosts-from`), and connect by sockets, as ranks that join later
do.

Decisions: 0116, 0120.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import whale_ops
from whale.config import Config
from whale.distributed.between_hosts import connect_between_hosts
from whale.distributed.listener import RankListener
from whale.distributed.watch import LauncherWatch
from whale.errors import ClusterError, CommError
from whale.log import log
from whale.started import APART_VARIABLE, PEERS_VARIABLE, ProcessPlace
from whale_ops.memory import share_tensors

_TOGETHER = 0  # the group of all ranks of the run's start; others have larger numbers
_known: list[SocketBootstrap] = []  # of this process: its runs have one door, and `whale run` tells the addresses once


def connect(name: str, place: ProcessPlace, config: Config, *, share_memory: bool = True) -> whale_ops.Communicator:
    """Returns this process's end of a communicator between all of them, by MPI.

    Args:
      share_memory: whether ranks of one host may speak through memory, where the configuration lets them.

    Raises:
      ClusterError: MPI knows another number of ranks than the launcher.
      CommError: MPI cannot be loaded or started.
    """
    shares = share_memory and config["communication.shared_memory"] != "none"
    comm = whale_ops.connect_mpi(name, share_memory=shares, hosts=config.network.hosts)
    if comm.size != place.size:
        raise ClusterError(
            "MPI and the launcher disagree about the number of ranks",
            given=f"MPI says {comm.size}, {place.launcher} says {place.size}",
            expected="the same number",
            action="start the script with the mpirun of the MPI that Whale was built with, or with `whale run`",
        )
    return comm


def configure_communicator(comm: whale_ops.Communicator, config: Config) -> None:
    """Sets a communicator's algorithm and emulated link from the configuration."""
    comm.set_algorithm(config["communication.algorithm"])
    if (link := config.network.link) is not None:
        comm.set_link(link.latency_s, link.bandwidth_bytes_per_s)


def share_tensors_if_possible(config: Config, place: ProcessPlace) -> None:
    """Has TensorFlow place large tensors where the machine's other ranks can map them; warns if it cannot."""
    if place.local_size == 1 or config.network.link is not None:  # an emulated link carries all that ranks exchange
        return
    if (obstacle := share_tensors()) and place.local_rank == 0:
        log.warning(
            f"large tensors are not shared between the ranks of this machine ({obstacle}), so all-reduces of "
            "them are slower; call wh.init() before making tensors, or set communication.shared_memory to messages"
        )


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
