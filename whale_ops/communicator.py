"""Implements the communicator of one rank: exchanges of the host program, counters, traces, devices, waits."""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from typing import Any

from whale.errors import CommError

DEFAULT_TIMEOUT_S = 300.0
# Prefixes of keys that are no exchanges: copies between a device and the host's memory, ends of devices' exchanges.
NO_EXCHANGES = "device/copied ", "device/done "


@dataclass(frozen=True, slots=True)
class OpCounter:
    """Holds the counters of one operation key on this rank.

    Attributes:
        key, kind: key and kind (AllReduce, ...) of the operation.
        calls: number of finished calls; for copies to and from devices: number of pieces.
        logical_bytes: this rank's part of the bytes that the operation has to move; the sum over ranks is 2(p-1)T for
            an all-reduce of T bytes over p ranks, (p-1)T for all-gather, reduce-scatter and broadcast, T for a send.
            For copies: bytes copied.
        wire_bytes: payload bytes that this rank actually sent.
        seconds: time from start to end, summed over the calls.
        waiting_seconds: part of `seconds` before the first message arrived.
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
    """Describes an operation of this rank that waits for other ranks.

    Attributes:
        what: the operation, for example ``AllReduce 'gradient'``.
        seconds: time since it was started.
        missing: ranks that have not sent yet; empty if that is not known.
    """

    what: str
    seconds: float
    missing: tuple[int, ...]


class Communicator:
    """Represents one rank's connection with a group of ranks.

    Host exchanges (`allgather_bytes`, `broadcast_bytes`, `barrier`) are collective: all ranks call them with the same
    key, each rank from a thread of its own. They raise CommError if the communicator was aborted, if a rank has left,
    and after `timeout_s` seconds, in which case the communicator is aborted for all ranks.

    Attributes:
        name: name by which TensorFlow ops refer to the communicator.
        rank, size: number of this rank, and number of ranks.
    """

    def __init__(self, name: str, handle: int) -> None:
        """Wraps a handle of the core, as `connect_in_process`, `connect_mpi` and others create it; applies
        WHALE_EMULATE_LINK.
        """
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
        """Returns the core's handle of this communicator, for calls through `whale_ops._native`."""
        return self._handle

    def allgather_bytes(
        self, key: str, data: bytes, timeout_s: float = DEFAULT_TIMEOUT_S, purpose: str = ""
    ) -> list[bytes]:
        """Returns the data of all ranks, in rank order; lengths may differ.

        Args:
            key: the same on all ranks.
            purpose: what the exchange is for; error messages name it instead of the key.
        """
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
        """Returns the data of rank `root` on every rank.

        Args:
            key: the same on all ranks.
            data: bytes on the root, None on all others.
            purpose: what the broadcast is for; error messages name it instead of the key.
        """
        purpose = purpose or f"the broadcast {key!r}"
        if (self.rank == root) != (data is not None):
            raise CommError(
                "broadcast_bytes takes data from the root rank and from no other",
                op=key,
                given=f"rank {self.rank} with {type(data).__name__}",
                expected=f"bytes on rank {root}, None on all others",
                action="pass the bytes on the root, and data=None on all other ranks",
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
        """Waits until all ranks have called it with this key."""
        self.allgather_bytes(key, b"", timeout_s)

    def abort(self, message: str) -> None:
        """Fails all pending and future operations of all ranks with this message."""
        self._check(self._core.whale_abort(self._handle, message.encode()))

    def lose(self, rank: int, what: str) -> None:
        """Fails all operations of this rank because another rank is known to be gone; each error names its operation.

        Does nothing if that rank has left properly, or is this one.

        Args:
            rank: the rank that is gone.
            what: what happened to it, as the end of a sentence that begins with "rank 1".
        """
        self._check(self._core.whale_lose(self._handle, rank, what.encode()))

    def is_sharing_tensors(self, peer: int) -> bool:
        """Returns True if this rank and a peer on its machine can read each other's large tensors in place, by
        shared memory.
        """
        return not self._core.whale_read_lent(self._handle, peer, 0, None, 0)

    def read_lent(self, peer: int, place: int, into: Any) -> None:
        """Copies a tensor that a peer has lent by the op ``whale_lend``, and still holds, or held when its process
        ended.

        Args:
            place: position that ``whale_lend`` returned on the peer.
            into: contiguous NumPy array to fill.

        Raises:
            CommError: the two ranks share no tensors, or the position is outside of what the peer shares.
        """
        memory = (ctypes.c_char * into.nbytes).from_buffer(into)
        self._check(self._core.whale_read_lent(self._handle, peer, place, ctypes.addressof(memory), into.nbytes))

    def waits(self) -> list[Wait]:
        """Returns the operations of this rank that have been waiting for some time: tensors' first, then the longest
        first.
        """
        found = self._native.take_bytes(self._core.whale_waits(self._handle))
        parts = [part.decode(errors="replace") for part in found]
        return [
            Wait(what, float(seconds), tuple(int(rank) for rank in missing.split(",") if rank))
            for what, seconds, missing in zip(parts[::3], parts[1::3], parts[2::3])
        ]

    def leave(self, timeout_s: float = 30.0) -> bool:
        """Leaves the communicator: operations of other ranks that need this one fail from now on, with its number.

        In one process this returns at once. With MPI it waits up to `timeout_s` seconds for the other ranks to leave,
        unless one of them was lost. MPI keeps running until the process exits (`whale_ops.finish`), so that other
        communicators may follow.

        Returns:
            Whether all ranks have left.
        """
        all_left = ctypes.c_int()
        self._check(self._core.whale_leave(self._handle, timeout_s, ctypes.byref(all_left)))
        return bool(all_left.value)

    def counters(self) -> list[OpCounter]:
        """Returns the counters of all operations on this rank, one entry per key and kind, sorted by key."""
        return [OpCounter(**entry) for entry in self._read_json(self._core.whale_counters(self._handle))]

    def trace_start(self, descriptor: int) -> None:
        """Starts a trace: every operation of this rank is written to a file descriptor as it ends.

        Each event is a line in Chrome's trace format, followed by a comma: the rank is its process, its times are
        microseconds of the monotonic clock, its arguments are key, call, algorithm, bytes, and the time before and
        after the first message. If a non-blocking descriptor is full, events are dropped and counted: the next event
        that is written tells how many.
        """
        self._core.whale_trace_start(self._handle, descriptor)

    def trace_stop(self) -> None:
        """Ends the trace; the descriptor is no longer used when this returns."""
        self._core.whale_trace_stop(self._handle)

    def open_device(self, library: str | os.PathLike[str], transport: str, ordinal: int, buffer_bytes: int) -> None:
        """Opens a device for this rank, whose tensors the WhaleDevice... ops then exchange; collective.

        Args:
            library: the device's library, such as libwhale_cuda.so; "" for a rank without a device, whose tensors are
                in the host's memory (only with "pinned").
            transport: "nccl", "cuda-ipc", or "pinned" (through the host's memory, in pieces).
            ordinal: number of the device among those that this process sees.
            buffer_bytes: size of the device buffer for tensors that are exchanged together; with "pinned", for pieces
                in flight.

        Raises:
            CommError: the library does not load or was built from other sources, or the device cannot be opened. The
                communicator is then aborted, since the other ranks may have opened theirs.
        """
        place = str(library).encode(), self._native.build.compute_core_digest().encode()
        self._check(self._core.whale_device_open(self._handle, *place, transport.encode(), ordinal, buffer_bytes))

    def close_device(self) -> None:
        """Waits for exchanges in progress on the device and closes it; call it before `leave`. Does nothing if none
        is open.
        """
        self._core.whale_device_close(self._handle)

    def set_algorithm(self, name: str) -> None:
        """Sets the algorithm of all-reduces from now on; ranks with different settings are refused.

        Args:
            name: "auto" (the one with the least predicted time), "direct", "pairwise", "ring", "halving-doubling",
                "tree", "hierarchical" or "leader". For groups or dtypes that an algorithm does not support (halving
                needs a power of two of ranks, the last two need several hosts; sums of 16-bit floats are rounded once),
                "auto" is used. Traces name the algorithm that was used.

        Raises:
            CommError: there is no such algorithm.
        """
        self._check(self._core.whale_set_algorithm(self._handle, name.encode()))

    def set_network(self, step_s: float, bytes_per_s: float) -> None:
        """Sets the speed of the network, by which algorithms of collectives between hosts are chosen; equal on all
        ranks.

        Args:
            step_s: seconds until a small message arrives.
            bytes_per_s: bandwidth of one host in each direction.
        """
        self._core.whale_set_network(self._handle, step_s, bytes_per_s)

    def set_link(self, latency_s: float, bandwidth_bytes_per_s: float) -> None:
        """Emulates a slower network for this rank's outgoing messages.

        A message of n bytes occupies the link for n / bandwidth seconds after the one before, and arrives `latency_s`
        seconds later. If ranks are on several hosts, messages within a host are not delayed. Zero for both: no
        emulation.

        Raises:
            CommError: a value is negative.
        """
        if latency_s < 0 or bandwidth_bytes_per_s < 0:
            raise CommError(
                "the latency and bandwidth of an emulated link must not be negative",
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
    """Parses WHALE_EMULATE_LINK="latency_us=50,bandwidth_MBps=200"; returns (seconds, bytes per second), (0, 0) if
    unset.
    """
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
                expected="latency_us and bandwidth_MBps with numbers >= 0, e.g. latency_us=50,bandwidth_MBps=200",
                action="correct or unset the variable",
            )
    return values["latency_us"] * 1e-6, values["bandwidth_MBps"] * 1e6
