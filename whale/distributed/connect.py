"""Connects the processes that a launcher started, so that they are ranks that exchange messages.

Decision: 0120.
"""

from __future__ import annotations

import whale_ops
from whale.config import Config
from whale.errors import ClusterError
from whale.log import log
from whale.started import ProcessPlace
from whale_ops.memory import share_tensors


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
