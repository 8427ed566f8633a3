"""Connects ranks on several hosts by Whale's own TCP transport or by MPI, whichever is measured to be faster.

MPI connects all ranks first, and carries the addresses at which each rank listens. Then both are timed by exchanges
between the hosts, which takes half a second on 1 Gbit/s. MPI remains where it can use a faster network than TCP, such
as InfiniBand.

Decisions: 0160, 0186.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import whale_ops
from whale.config import Config
from whale.distributed.listener import RankListener
from whale.distributed.msgpack_values import pack, unpack
from whale.errors import CommError
from whale.log import log
from whale.started import PEERS_VARIABLE, ProcessPlace
from whale_ops import Communicator
from whale_ops._native import HostOperation

_CONNECT_S = 5.0  # seconds to connect by TCP; MPI has just connected the same ranks, so all of them are there
_EXCHANGE_S = 60.0
_SMALL_BYTES, _SMALL_CALLS = 1 << 10, 12
_LARGE_BYTES, _LARGE_CALLS = (64 << 10, 512 << 10, 4 << 20), 4
# An exchange that takes _ENOUGH_S longer than a smaller one, and _LATENCIES times as long as the smallest one, is large
# enough to measure the link's bandwidth: on a link with long delays TCP connections are slow at first.
_ENOUGH_S, _LATENCIES = 0.02, 8
_GROUP = 0  # number of the group of all ranks of the run's start
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Holds measured times of all-reduces between hosts, in which one rank of each host takes part.

    Attributes:
      small_s: seconds of an all-reduce of one kilobyte.
      large_s_per_byte: additional seconds per additional byte, from two large all-reduces of different sizes.
    """

    small_s: float
    large_s_per_byte: float

    def is_faster(self, other: LinkTimes) -> bool:
        """Returns True if the product of both times is smaller than the other's, so that small and large exchanges
        count alike.
        """
        return self.small_s * self.large_s_per_byte < other.small_s * other.large_s_per_byte

    def __str__(self) -> str:
        return f"1 KB in {1e3 * self.small_s:.2f} ms, {1e-6 / self.large_s_per_byte:.0f} MB/s"


def connect_between_hosts(
    name: str, place: ProcessPlace, config: Config, by_mpi: Communicator
) -> tuple[Communicator, RankListener, dict[int, str]] | None:
    """Connects all ranks by TCP if that is faster than MPI between these hosts; collective.

    Args:
      name: name of the communicator, equal on all ranks.
      place: the place of this process among the ranks.
      config: the configuration; `communication.between_hosts` "tcp" uses TCP even if it is slower.
      by_mpi: a communicator of all ranks by MPI, which shares no memory within a host, so that MPI's network is timed.

    Returns:
      (the communicator, this rank's listener, rank -> address at which it listens); None: MPI is to be used.
    """
    hosts, door, addresses = _tell_places(place, config, by_mpi)
    if door is None:
        return None
    comm, reason = None, ""
    try:
        comm = _connect(name, door, addresses, config, by_mpi)
    except (CommError, OSError) as error:
        reason = str(error)
    reasons = [one.decode() for one in by_mpi.allgather_bytes("whale/tcp", reason.encode(), _EXCHANGE_S)]
    if any(reasons):
        if place.rank == 0:
            host, why = next((hosts[rank], why) for rank, why in enumerate(reasons) if why)
            log.warning(f"messages between hosts go by MPI, since host number {host} could not connect by TCP: {why}")
    elif comm is not None:
        leaders = [hosts.index(host) for host in sorted(set(hosts))]
        try:
            times = _time_exchanges(comm, leaders)
            asked = config["communication.between_hosts"] == "tcp"
            is_taken = asked or _is_faster(times, leaders, by_mpi)
        except BaseException:  # a rank is gone: nobody else knows of the listener, which has a thread
            door.close()
            raise
        if is_taken:
            _choose_algorithms_by(times, len(leaders), comm)
            if place.rank == 0:
                log.debug(f"messages between hosts go by TCP, for which was measured: {times}")
            return comm, door, addresses
    door.close()
    if comm is not None:
        comm.leave(0.0 if any(reasons) else _EXCHANGE_S)
    return None


def _tell_places(
    place: ProcessPlace, config: Config, by_mpi: Communicator
) -> tuple[list[int], RankListener | None, dict[int, str]]:
    """Opens this rank's listener, and exchanges hosts and addresses with all ranks; collective.

    Returns:
      (index of each rank's host, by rank; this rank's listener; rank -> address at which it listens). The listener is
      None if a rank cannot listen, or all ranks are on one host.
    """
    own = socket.gethostname(), _BOOT.read_text() if _BOOT.exists() else "", secrets.token_hex(16)
    said = [unpack(one) for one in by_mpi.allgather_bytes("whale/hosts", pack(own), _EXCHANGE_S)]
    emulated = [host for host, count in enumerate(config.network.hosts) for _ in range(count)]
    numbers: dict[tuple[str, str], int] = {}
    hosts = emulated or [numbers.setdefault((name, boot), len(numbers)) for name, boot, _ in said]
    if not any(hosts):
        return hosts, None, {}
    told, _, _ = os.environ.get(PEERS_VARIABLE, "").partition(" ")
    address = told or _find_own_address([name for name, _, _ in said])
    door = None
    if address:
        try:
            door = RankListener(f"{address} {said[0][2]}", config["fault.freeze_s"])
        except OSError as error:
            log.debug(f"rank {place.rank} cannot listen at {address}: {error}")
    mine = door.address if door is not None else ""
    found = [one.decode() for one in by_mpi.allgather_bytes("whale/doors", mine.encode(), _EXCHANGE_S)]
    if door is not None and not all(found):
        door.close()
        door = None
    return hosts, door, dict(enumerate(found))


def _find_own_address(names: Sequence[str]) -> str:
    """Returns this host's address towards the first other host in `names` that resolves; "" if none does."""
    for name in names:
        if name == socket.gethostname():
            continue
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(name, 22, socket.AF_INET, socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing: asks the routing table
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError):
            continue
    return ""


def _connect(
    name: str, door: RankListener, addresses: dict[int, str], config: Config, by_mpi: Communicator
) -> Communicator:
    """Connects all ranks by TCP and returns the communicator.

    Args:
      name: name of the communicator, equal on all ranks.
      door: this rank's listener.
      addresses: rank -> address at which it listens.
      config: the configuration.
      by_mpi: the communicator by MPI, for the numbers of the ranks.

    Raises:
      CommError: a rank cannot be reached within `_CONNECT_S` seconds.
    """
    me, until_s = by_mpi.rank, time.monotonic() + _CONNECT_S
    sockets = door.connect_group(_GROUP, me, range(by_mpi.size), addresses, lambda: time.monotonic() > until_s)
    shares = config["communication.shared_memory"] != "none"
    return whale_ops.connect_over_sockets(name, me, sockets, share_memory=shares, hosts=config.network.hosts)


def _is_faster(by_tcp: LinkTimes, leaders: Sequence[int], by_mpi: Communicator) -> bool:
    """Returns True if exchanges between hosts take less time by TCP than by MPI; collective, rank 0's measurement
    counts.

    Args:
      by_tcp: the times by TCP.
      leaders: the first rank of each host; they make the exchanges that are timed.
      by_mpi: the communicator by MPI, which is timed here.
    """
    mpi = _time_exchanges(by_mpi, leaders)
    if by_mpi.rank == 0:
        log.debug(f"exchanges between hosts were measured: by TCP {by_tcp}; by MPI {mpi}")
    said = (b"1" if by_tcp.is_faster(mpi) else b"") if by_mpi.rank == 0 else None
    return bool(by_mpi.broadcast_bytes("whale/faster", said, 0, _EXCHANGE_S))


def _choose_algorithms_by(times: LinkTimes, hosts: int, comm: Communicator) -> None:
    """Tells the communicator the measured latency and bandwidth between hosts, by which it chooses algorithms for
    collectives; collective.

    The values of rank 0 are used on all ranks. In a large all-reduce of m hosts each host sends 2 (m-1) / m bytes per
    byte of the tensor.

    Args:
      times: the measured times; only those of rank 0 count.
      hosts: number of hosts.
      comm: the communicator.
    """
    sent = 2 * (hosts - 1) / hosts
    said = pack((times.small_s, sent / times.large_s_per_byte)) if comm.rank == 0 else None
    comm.set_network(*unpack(comm.broadcast_bytes("whale/network", said, 0, _EXCHANGE_S)))


def _time_exchanges(comm: Communicator, leaders: Sequence[int]) -> LinkTimes:
    """Times all-reduces between hosts; collective over all ranks. Only rank 0's result is meaningful.

    Args:
      comm: a communicator of all ranks.
      leaders: the first rank of each host; they take part in the all-reduces.
    """
    small_s = statistics.median(time_all_reduces(comm, leaders, "choice", _SMALL_BYTES, _SMALL_CALLS))
    before, large_s_per_byte = (_SMALL_BYTES, small_s), 0.0
    for size_bytes in _LARGE_BYTES:
        large_s = min(time_all_reduces(comm, leaders, "choice", size_bytes, _LARGE_CALLS))
        longer_s = max(large_s - before[1], large_s / 10)
        large_s_per_byte, before = longer_s / (size_bytes - before[0]), (size_bytes, large_s)
        enough = longer_s > _ENOUGH_S and large_s > _LATENCIES * small_s
        said = (b"1" if enough else b"") if comm.rank == 0 else None
        if comm.broadcast_bytes(f"whale/enough/{size_bytes}", said, 0, _EXCHANGE_S):
            break
    return LinkTimes(small_s, large_s_per_byte)


def time_all_reduces(comm: Communicator, ranks: Sequence[int], name: str, size_bytes: int, calls: int) -> list[float]:
    """Times all-reduces of some ranks, and returns the seconds of each call except the first, which sets up
    connections.

    Args:
      comm: a communicator of all ranks.
      ranks: the ranks that take part; the function returns [0.0] on others.
      name: name of the measurement, part of the exchange's key, equal on all ranks that take part.
      size_bytes: size of the tensor.
      calls: number of calls, at least 2.
    """
    if comm.rank not in ranks:
        return [0.0]
    values, times_s = np.zeros(size_bytes // 4, np.float32), []
    for _ in range(calls):
        started_s = time.perf_counter()
        HostOperation(
            comm.handle, "AllReduce", f"whale/time/{name}/{size_bytes}", dtype="float32", element_bytes=4, ranks=ranks,
            input_address=values.ctypes.data, output_address=values.ctypes.data, counts=[values.size], buffers=values,
        ).wait(_EXCHANGE_S)  # fmt: skip
        times_s.append(time.perf_counter() - started_s)
    return times_s[1:]
