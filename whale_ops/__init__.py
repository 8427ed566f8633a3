"""Communication between ranks: collectives and point-to-point operations, as TensorFlow ops and for the host program.

    comm = whale_ops.mpi("run")              # this process is one rank
    comms = whale_ops.in_process("test", 4)  # this process holds four ranks

    comm.allgather_bytes("plan", data)       # host side, without TensorFlow
    ops = whale_ops.ops()                    # TensorFlow ops, see ops/registration.cc
    handle = ops.whale_communicator(communicator=comm.name, rank=comm.rank)
    total = ops.whale_all_reduce(handle, [gradient], key="gradient")

Keys name operations: ranks meet under equal keys, the n-th use of a key on one rank meets the n-th on the others.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from whale.errors import CommError

__all__ = ["Communicator", "OpCounter", "Wait", "in_process", "mpi", "ops"]

DEFAULT_TIMEOUT_S = 300.0
COMMUNICATING_OPS = (
    "WhaleAllReduce",
    "WhaleDeviceAllReduce",
    "WhaleAllGather",
    "WhaleReduceScatter",
    "WhaleAllToAll",
    "WhaleBroadcast",
    "WhaleSend",
    "WhaleRecv",
    "WhaleBarrier",
    "WhaleCheck",
)


@dataclass(frozen=True, slots=True)
class OpCounter:
    """What one operation key has done on this rank.

    Attributes:
        calls: finished invocations.
        logical_bytes: this rank's part of the bytes that the operation has to move; the sum over ranks is 2(p-1)T for
            an all-reduce of T bytes over p ranks, (p-1)T for all-gather, reduce-scatter and broadcast, T for a send.
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
        """For `in_process` and `mpi`; applies WHALE_EMULATE_LINK."""
        from whale_ops import _native

        self._native = _native
        self._handle = handle
        self.name = name
        self.rank: int = _native.core().whale_rank(handle)
        self.size: int = _native.core().whale_size(handle)
        self.set_link(*_link_from_environment())

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size})"

    @property
    def handle(self) -> int:
        """The core's handle, for `whale_ops._native`."""
        return self._handle

    def allgather_bytes(
        self, key: str, data: bytes, timeout_s: float = DEFAULT_TIMEOUT_S, purpose: str = ""
    ) -> list[bytes]:
        """The data of all ranks, in rank order; lengths may differ. ``purpose`` stands for the key in messages."""
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
        """The root's data on every rank; the other ranks pass None. ``purpose`` stands for the key in messages."""
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
        """Another rank is known to be gone: fails all operations of this rank, each with its own name.

        Nothing happens when that rank has said good-bye, or is this one.

        Args:
            what: what happened to it, as the end of a sentence that begins with "rank 1".
        """
        self._check(self._core.whale_lose(self._handle, rank, what.encode()))

    def waits(self) -> list[Wait]:
        """The operations of this rank that have waited for some time, tensors first, then by how long."""
        found = self._native.take_bytes(self._core.whale_waits(self._handle))
        parts = [part.decode(errors="replace") for part in found]
        return [
            Wait(what, float(seconds), tuple(int(rank) for rank in missing.split(",") if rank))
            for what, seconds, missing in zip(parts[::3], parts[1::3], parts[2::3])
        ]

    def leave(self, timeout_s: float = 30.0) -> bool:
        """Says good-bye: operations of other ranks that need this one fail from now on, by name.

        In one process this returns at once. With MPI it waits up to `timeout_s` seconds for the other ranks' good-byes,
        unless one of them was lost;
        when the last communicator of the process has them all, MPI is finalised (if it was started here).

        Returns:
            Whether all ranks have left.
        """
        all_left = ctypes.c_int()
        self._check(self._core.whale_leave(self._handle, timeout_s, ctypes.byref(all_left)))
        return bool(all_left.value)

    def counters(self) -> list[OpCounter]:
        """One entry per key and kind, sorted by key."""
        return [OpCounter(**entry) for entry in self._json(self._core.whale_counters(self._handle))]

    def trace_start(self, descriptor: int) -> None:
        """From now on every operation of this rank that ends is written to a file descriptor as it ends.

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
        """Opens a device for this rank, on which WhaleDeviceAllReduce then adds up what lies in its memory; collective.

        Args:
            library: that of the device: libwhale_cuda.so, from ``python -m whale_ops.build_cuda``.
            transport: "nccl" or "cuda-ipc".
            ordinal: number of the device among those that this process sees.
            buffer_bytes: of the device's memory, for tensors that travel together.

        Raises:
            CommError: the library does not load or was built from other sources, or the device cannot be opened; the
                communicator is aborted then, since the other ranks may have opened theirs.
        """
        place = str(library).encode(), self._native.build.core_digest().encode()
        self._check(self._core.whale_device_open(self._handle, *place, transport.encode(), ordinal, buffer_bytes))

    def close_device(self) -> None:
        """Waits for what is under way on the device and gives it back; before `leave`. Nothing where none is open."""
        self._core.whale_device_close(self._handle)

    def set_algorithm(self, name: str) -> None:
        """How all-reduces from now on are carried out; equal on all ranks, or they are refused as different.

        Args:
            name: "auto" (the one with the least predicted time), "direct", "pairwise", "ring", "halving-doubling",
                "tree", "hierarchical" or "leader". Where it cannot serve a group or dtype
                (halving needs a power of two of ranks, the last two need several hosts; sums of 16-bit floats are
                rounded once), it is as with "auto". Traces name the algorithm that was used.

        Raises:
            CommError: another name.
        """
        self._check(self._core.whale_set_algorithm(self._handle, name.encode()))

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
        return self._native.core()

    def _check(self, code: int) -> None:
        self._native.check(code)

    def _json(self, result: int) -> Any:
        return json.loads(self._native.take_bytes(result)[0])


def in_process(name: str, size: int, *, hosts: Sequence[int] = ()) -> list[Communicator]:
    """Communicators of `size` ranks that all live in this process.

    ``hosts`` as for `mpi`.

    Raises:
        CommError: the name is in use, `size` is not positive, the hosts hold another number of ranks, or the op library
            is not built.
    """
    from whale_ops import _native

    if size < 1:
        raise CommError(
            "a communicator has at least one rank", given=size, expected="a size >= 1", action="correct the size"
        )
    if hosts and sum(hosts) != size:
        raise CommError(
            "the emulated hosts hold another number of ranks than the run has",
            given=f"{' + '.join(map(str, hosts))} ranks on hosts",
            expected=size,
            action="give the number of ranks of each host",
        )
    handles = (ctypes.c_void_p * size)()
    _native.check(_native.core().whale_in_process_create(name.encode(), size, _hosts(hosts)[0], handles))
    return [Communicator(name, handle or 0) for handle in handles]


def count_devices(library: str | os.PathLike[str]) -> int:
    """How many devices a device's library finds.

    Raises:
        CommError: the library does not load, was built from other sources, or its driver has an error.
    """
    from whale_ops import _native

    found = ctypes.c_int()
    place = str(library).encode(), _native.build.core_digest().encode()
    _native.check(_native.core().whale_device_count(*place, ctypes.byref(found)))
    return found.value


def _hosts(ranks: Sequence[int]) -> tuple[Any, int]:
    """The host of each rank for the core, with their number, from the numbers of ranks of each host."""
    numbers = [host for host, count in enumerate(ranks) for _ in range(count)]
    return ((ctypes.c_int32 * len(numbers))(*numbers) if numbers else None), len(numbers)


def mpi(name: str, *, share_memory: bool = True, hosts: Sequence[int] = ()) -> Communicator:
    """The communicator of this process among all processes that mpirun or srun has started.

    Collective: all processes make their communicators in the same order. Starts MPI if nobody else has. With
    ``share_memory`` ranks of one machine speak through memory; where they cannot, a line on stderr says why, and MPI
    carries their messages. ``hosts`` emulates several machines on one: the number of ranks of each, in rank order;
    ranks of different ones do without shared memory.

    Raises:
        CommError: the MPI transport is not built or cannot start, the ranks give different names, or the hosts hold
            another number of ranks.
    """
    from whale_ops import _native

    plugin = _native.load_mpi()
    handle, notes = ctypes.c_void_p(), ctypes.c_void_p()
    _native.check(
        _native.core().whale_mpi_create(
            name.encode(), str(plugin).encode(), share_memory, *_hosts(hosts), ctypes.byref(handle), ctypes.byref(notes)
        )
    )
    for note in _native.take_bytes(notes.value or 0):
        sys.stderr.write(f"whale_ops: {note.decode()}\n")
    communicator = Communicator(name, handle.value or 0)
    names = [other.decode() for other in communicator.allgather_bytes("whale_ops.mpi", name.encode(), 60.0)]
    if len(set(names)) > 1:
        raise CommError(
            "the ranks make different communicators",
            given=dict(enumerate(names)),
            expected="the same name on all ranks",
            action="make communicators in the same order on every rank",
        )
    return communicator


@functools.cache
def ops() -> ModuleType:
    """The TensorFlow ops (whale_all_reduce, ...), loaded on first use.

    Automatic control dependencies treat them as reads of the communicator, so that they run side by side.

    Raises:
        CommError: the library was built for another TensorFlow, or is not built.
    """
    import tensorflow as tf
    from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils

    from whale_ops import _native, build

    name = build.ops_name(tf.__version__)
    info = _native.build_info()
    if name not in info:
        built = [entry["tensorflow"] for entry in info.values() if "tensorflow" in entry]
        raise CommError(
            "the op library was built for another TensorFlow",
            given=f"TensorFlow {tf.__version__}",
            expected=f"built for {', '.join(sorted(built)) or 'none'}",
            action="run python -m whale_ops.build in this environment, or install the package again",
        )
    _native.core()
    try:
        module = tf.load_op_library(str(_native.library_path(name)))
    except tf.errors.NotFoundError as error:
        raise CommError(
            "the op library does not fit this TensorFlow",
            given=error.message,
            expected=f"TensorFlow {tf.__version__}",
            action="run python -m whale_ops.build in this environment",
        ) from error
    # Reads, so that a function that communicates does not wait for another one that does. But TensorFlow drops a read
    # whose value nobody takes, and the other ranks would wait for it: hence also "must run, in any order".
    for op in COMMUNICATING_OPS:
        auto_control_deps_utils.register_read_only_resource_op(op)
    auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS |= frozenset(COMMUNICATING_OPS)
    return module


def _link_from_environment() -> tuple[float, float]:
    """WHALE_EMULATE_LINK="latency_us=50,bandwidth_MBps=200" as seconds and bytes per second."""
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
