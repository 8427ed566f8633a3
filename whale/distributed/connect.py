"""Connects the processes that a launcher has started into one group of ranks that exchange messages.

Ranks that one mpirun has started connect by MPI. With `whale run --hosts-from`, where hosts may come and go, the ranks
of different hosts have no MPI in common, because an MPI ends all its ranks when it loses a host; these connect by
sockets, and so do ranks that join later.

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
_known: list[SocketBootstrap] = []  # at most one; kept for later runs, since `whale run` sends the addresses only once


def connect(name: str, place: ProcessPlace, config: Config, *, share_memory: bool = True) -> whale_ops.Communicator:
    """Returns this process's communicator with all other ranks, by MPI; collective.

    Args:
      name: name of the communicator, equal on all ranks.
      place: the place of this process among the ranks, as the launcher has told it.
      config: the configuration.
      share_memory: whether ranks on one host may exchange through shared memory, if the configuration allows it.

    Raises:
      ClusterError: MPI and the launcher disagree about the number of ranks.
      CommError: MPI cannot be loaded or started.
    """
    shares = share_memory and config["communication.shared_memory"] != "none"
    comm = whale_ops.connect_mpi(name, share_memory=shares, hosts=config.network.hosts)
    if comm.size != place.size:
        raise ClusterError(
            "MPI and the launcher disagree about the number of ranks",
            given=f"MPI says {comm.size}, {place.launcher} says {place.size}",
            expected="the same number of ranks from both",
            action="start the script with the mpirun of the MPI that Whale was built with, or with `whale run`",
        )
    return comm


def configure_communicator(comm: whale_ops.Communicator, config: Config) -> None:
    """Sets a communicator's all-reduce algorithm, and the link that it emulates (if any), from the configuration."""
    comm.set_algorithm(config["communication.algorithm"])
    if (link := config.network.link) is not None:
        comm.set_link(link.latency_s, link.bandwidth_bytes_per_s)


def share_tensors_if_possible(config: Config, place: ProcessPlace) -> None:
    """Makes TensorFlow allocate large tensors in memory that other ranks of this host can map, so that they need no
    copy.

    Logs a warning if that is not possible.
    """
    if place.local_size == 1 or config.network.link is not None:  # an emulated link carries all that ranks exchange
        return
    if (obstacle := share_tensors()) and place.local_rank == 0:
        log.warning(
            f"large tensors are not shared between the ranks of this machine ({obstacle}), so all-reduces of "
            "them are slower; call wh.init() before making tensors, or set communication.shared_memory to messages"
        )


@dataclass(frozen=True, slots=True)
class SocketBootstrap:
    """Holds what this process needs to connect to other ranks by sockets, at the start and again when ranks are lost or
    join.

    Attributes:
      door: the listener of this process, which stays open until the process ends.
      addresses: rank -> "host:port" at which it listens, for the ranks with which the run started.
    """

    door: RankListener
    addresses: Mapping[int, str]


def connect_ranks(
    name: str, place: ProcessPlace, config: Config, watch: LauncherWatch
) -> tuple[tuple[whale_ops.Communicator], SocketBootstrap | None]:
    """Connects this process with all ranks with which the run starts, by MPI, or by sockets where each host has an
    mpirun of its own; collective.

    Args:
      name: name of the communicator, equal on all ranks.
      place: the place of this process among the ranks.
      config: the configuration.
      watch: the connection to `whale run`, which collects the ranks' addresses.

    Returns:
      ((the communicator,), how to reach each rank by sockets). The second is None if ranks never have to connect again
      by sockets.

    Raises:
      ClusterError: MPI and the launcher disagree about the number of ranks.
      CommError: MPI cannot be loaded or started, or a rank is gone.
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
    """Connects this process with all ranks that one mpirun has started, by MPI or, if faster between hosts, by TCP.

    Returns:
      As `connect_ranks`.
    """
    asked = config["communication.between_hosts"]
    # Emulated hosts are on one machine, where the speed of TCP tells nothing about a network.
    if asked == "mpi" or (place.local_size == place.size and (asked == "auto" or not config.network.hosts)):
        return (connect(name, place, config),), None
    by_mpi = connect(f"{name}.mpi", place, config, share_memory=False)
    found = connect_between_hosts(name, place, config, by_mpi)
    by_mpi.leave()
    if found is None:
        return (connect(name, place, config),), None
    comm, door, addresses = found
    if not config["fault.elastic"]:  # the ranks never connect again
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
                given=f"`whale run` knows the addresses of {len(addresses)} ranks",
                expected=f"the addresses of all {size} ranks",
                action="read in the output of `whale run` which rank has failed, and why",
            )
        _known.append(SocketBootstrap(door, addresses))
    return _known[0]
