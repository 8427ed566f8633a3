"""Implements one rank's communicator: exchanges of the host program, counters, and who is waited for."""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from typing import Any

from whale.errors import CommError

DEFAULT_TIMEOUT_S = 300.0
# How keys begin of what is no exchange of its own: copies between a device and the host's memory; ends of devices'
# exchanges.
NO_EXCHANGES = "device/copied ", "device/done "


@dataclass(frozen=True, slots=True)
class OpCounter:
    """The counters of one operation key on this rank.

    Attributes:
        calls: finished invocations; of copies to and from devices: pieces.
        logical_bytes: this rank's part of the bytes that the operation has to move; the sum over ranks is 2(p-1)T for
            an all-reduce of T bytes over p ranks, (p-1)T for all-gather, reduce-scatter and broadcast, T for a send.
            Of copies what was copied.
        wire_bytes: payload bytes that this rank really sent.
        seconds: from start to end, summed over the calls.
        waiting_seconds: of these, until the first message had come.
    """

    key: str
    kind: str
    calls: int
    logical_bytes: int
    wire_bytes: int
    seconds: float
    waiting_seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation of this rank that waits for others.

    Attributes:
        what: for example ``AllReduce 'gradient'``.
        seconds: since it was started.
        missing: the ranks that have yet to send; empty when none can be told.
    """

    what: str
    seconds: float
    missing: tuple[int, ...]


class Communicator:
    """One rank of a group of ranks.

    Host exchanges (`allgather_bytes`, `broadcast_bytes`, `barrier`) are collective: all ranks call them with the same
    key, each rank from a thread of its own. They raise CommError when the communicator was aborted, when a rank has
    left, and after `timeout_s` seconds, in which case the communicator is aborted for all ranks.
    """

    def __init__(self, name: str, handle: int) -> None:
        """Wraps a handle of the core, as `in_process`, `mpi` and the like make it; applies WHALE_EMULATE_LINK."""
        from whale_ops import _native

        self._native = _native
        self._handle = handle
        self.name = name
        self.rank: int = _native.load_core().whale_rank(handle)
        self.size: int = _native.load_core().whale_size(handle)
        self.set_link(*_read_link_from_environment())

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size})"

    @property
    def handle(self) -> int:
        """Returns the core's handle, for `whale_ops._native`."""
        return self._handle

    def allgather_bytes(
        self, key: str, data: bytes, timeout_s: float = DEFAULT_TIMEOUT_S, purpose: str = ""
    ) -> list[bytes]:
        """Returns all ranks' data, in rank order; lengths may differ. Messages say ``purpose`` instead of the key."""
        purpose = purpose or f"the exchange {key!r}"
        result = ctypes.c_void_p()
        self._check(
            self._core.whale_all_gather_bytes(
                self._handle, key.encode(), purpose.encode(), data, len(data), timeout_s, ctypes.byref(result)
            )
        )
        return self._native.take_bytes(result.value or 0)

    def broadcast_bytes(
        self,
        key: str,
        data: bytes | None,
        root: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        purpose: str = "",
    ) -> bytes:
        """Returns the root's data on every rank; the others pass None. Messages say ``purpose`` instead of the key."""
        purpose = purpose or f"the broadcast {key!r}"
        if (self.rank == root) != (data is not None):
            raise CommError(
                "only the root of a broadcast gives data",
                op=key,
                given=f"rank {self.rank} with {type(data).__name__}",
                expected=f"bytes on rank {root}, None on all others",
                action="pass None on ranks other than the root",
            )
        content = data if data is not None else b""
        result = ctypes.c_void_p()
        self._check(
            self._core.whale_broadcast_bytes(
                self._handle,
                key.encode(),
                purpose.encode(),
                content,
                len(content),
                root,
                timeout_s,
                ctypes.byref(result),
            )
        )
        return self._native.take_bytes(result.value or 0)[0]

    def barrier(self, key: str = "barrier", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Returns when all ranks have called it."""
        self.allgather_bytes(key, b"", timeout_s)

    def abort(self, message: str) -> None:
        """Fails all pending and future operations of all ranks with this message."""
        self._check(self._core.whale_abort(self._handle, message.encode()))

    def lose(self, rank: int, what: str) -> None:
        """Fails all operations of this rank, each with its own name, because another rank is known to be gone.

        Nothing happens when that rank has said good-bye, or is this one.

        Args:
            what: what happened to it, as the end of a sentence that begins with "rank 1".
        """
        self._check(self._core.whale_lose(self._handle, rank, what.encode()))

    def is_sharing_tensors(self, peer: int) -> bool:
        """Tells whether this rank and a peer of its machine read each other's large tensors where they lie."""
        return not self._core.whale_read_lent(self._handle, peer, 0, None, 0)

    def read_lent(self, peer: int, place: int, into: Any) -> None:
        """Copies what a peer has lent (``whale_lend``) and still holds, or held when its process ended.

        Args:
            place: as ``whale_lend`` said there.
            into: a contiguous array of what is wanted.

        Raises:
            CommError: the two share no tensors, or that is outside of what the peer shares.
        """
        memory = (ctypes.c_char * into.nbytes).from_buffer(into)
        self._check(self._core.whale_read_lent(self._handle, peer, place, ctypes.addressof(memory), into.nbytes))

    def waits(self) -> list[Wait]:
        """Returns the operations of this rank that have waited for some time, tensors first, then by how long."""
        found = self._native.take_bytes(self._core.whale_waits(self._handle))
        parts = [part.decode(errors="replace") for part in found]
        return [
            Wait(what, float(seconds), tuple(int(rank) for rank in missing.split(",") if rank))
            for what, seconds, missing in zip(parts[::3], parts[1::3], parts[2::3])
        ]

    def leave(self, timeout_s: float = 30.0) -> bool:
        """Says good-bye: operations of other ranks that need this one fail from now on, by name.

        In one process this returns at once. With MPI it waits up to `timeout_s` seconds for the other ranks' good-byes,
        unless one of them was lost. MPI goes on until the process ends (`whale_ops.finish`), so that other
        communicators may follow.

        Returns:
            Whether all ranks have left.
        """
        all_left = ctypes.c_int()
        self._check(self._core.whale_leave(self._handle, timeout_s, ctypes.byref(all_left)))
        return bool(all_left.value)

    def counters(self) -> list[OpCounter]:
        """Returns one entry per key and kind, sorted by key."""
        return [OpCounter(**entry) for entry in self._read_json(self._core.whale_counters(self._handle))]

    def trace_start(self, descriptor: int) -> None:
        """Starts a trace: every operation of this rank is written to a file descriptor as it ends.

        Each event is a line in Chrome's trace format, followed by a comma: the rank is its process, its times are
        microseconds of the monotonic clock, its arguments say key, call, algorithm, bytes, and the time that went by
        before and after the first message. Where a non-blocking descriptor takes no more, events are left out and
        counted: the next one that is written says how many.
        """
        self._core.whale_trace_start(self._handle, descriptor)

    def trace_stop(self) -> None:
        """Ends the trace; when this returns the descriptor is no longer used."""
        self._core.whale_trace_stop(self._handle)

    def open_device(self, library: str | os.PathLike[str], transport: str, ordinal: int, buffer_bytes: int) -> None:
        """Opens a device for this rank, whose memory the ops WhaleDevice... then exchange; collective.

        Args:
            library: that of the device, such as libwhale_cuda.so; "" for a rank that
                has none, whose memory is the host's, with "pinned" only.
            transport: "nccl", "cuda-ipc", or "pinned": through the host's memory, in pieces.
            ordinal: number of the device among those that this process sees.
            buffer_bytes: of the device's memory, for tensors that travel together; of pieces under way, with "pinned".

        Raises:
            CommError: the library does not load or was built from other sources, or the device cannot be opened; the
                communicator is aborted then, since the other ranks may have opened theirs.
        """
        place = str(library).encode(), self._native.build.compute_core_digest().encode()
        self._check(self._core.whale_device_open(self._handle, *place, transport.encode(), ordinal, buffer_bytes))

    def close_device(self) -> None:
        """Waits for what is under way on the device and gives it back; before `leave`. Nothing where none is open."""
        self._core.whale_device_close(self._handle)

    def set_algorithm(self, name: str) -> None:
        """Sets how all-reduces are carried out from now on; equal on all ranks, or they are refused as different.

        Args:
            name: "auto" (the one with the least predicted time), "direct", "pairwise", "ring", "halving-doubling",
                "tree", "hierarchical" or "leader". Where it cannot serve a group or dtype
                (halving needs a power of two of ranks, the last two need several hosts; sums of 16-bit floats are
                rounded once), it is as with "auto". Traces name the algorithm that was used.

        Raises:
            CommError: another name.
        """
        self._check(self._core.whale_set_algorithm(self._handle, name.encode()))

    def set_network(self, step_s: float, bytes_per_s: float) -> None:
        """Sets by what figures algorithms of collectives between hosts are chosen from now on; equal on all ranks.

        Args:
            step_s: seconds until a small message is there; bytes_per_s: of one host, in each direction.
        """
        self._core.whale_set_network(self._handle, step_s, bytes_per_s)

    def set_link(self, latency_s: float, bandwidth_bytes_per_s: float) -> None:
        """Emulates a slower network for this rank's outgoing messages.

        A message of n bytes occupies the link for n / bandwidth after the one before, and arrives `latency_s` later.
        Where the ranks are on several hosts, messages within a host are not delayed.
        Zero for both: as fast as the transport.

        Raises:
            CommError: a negative value.
        """
        if latency_s < 0 or bandwidth_bytes_per_s < 0:
            raise CommError(
                "a link has no negative latency or bandwidth",
                given=f"{latency_s} s, {bandwidth_bytes_per_s} bytes/s",
                expected="values >= 0; 0 is unlimited",
                action="correct the values",
            )
        self._core.whale_set_link(self._handle, latency_s, bandwidth_bytes_per_s)

    @property
    def _core(self) -> ctypes.CDLL:
        return self._native.load_core()

    def _check(self, code: int) -> None:
        self._native.check(code)

    def _read_json(self, result: int) -> Any:
        return json.loads(self._native.take_bytes(result)[0])


def _read_link_from_environment() -> tuple[float, float]:
    """Parses WHALE_EMULATE_LINK="latency_us=50,bandwidth_MBps=200" to seconds and bytes per second."""
    values = {"latency_us": 0.0, "bandwidth_MBps": 0.0}
    text = os.environ.get("WHALE_EMULATE_LINK", "")
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value) if name.strip() in values else float("nan")
        except ValueError:
            values[name.strip()] = float("nan")
        if not values[name.strip()] >= 0:
            raise CommError(
                "WHALE_EMULATE_LINK is not understood",
                given=part,
                expected="latency_us=50,bandwidth_MBps=200",
                action="correct or unset the variable",
            )
    return values["latency_us"] * 1e-6, values["bandwidth_MBps"] * 1e6
