"""Exchanges data between ranks: collectives and sends, as TensorFlow ops and as calls of the host program.

    comm = whale_ops.connect_mpi("run")              # this process is one rank
    comms = whale_ops.connect_in_process("test", 4)  # this process holds four ranks

    comm.allgather_bytes("plan", data)       # host side, without TensorFlow
    ops = whale_ops.load_ops()               # TensorFlow ops, see tf_kernels/communication/registration.cc
    handle = ops.whale_communicator(communicator=comm.name, rank=comm.rank)
    total = ops.whale_all_reduce(handle, [gradient], key="gradient")

Operations are matched by key, not by order: the n-th use of a key on one rank meets its n-th use on the other ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from whale.errors import CommError
from whale_ops.communicator import Communicator, OpCounter, Wait

__all__ = [
    "Communicator",
    "OpCounter",
    "Wait",
    "connect_in_process",
    "connect_mpi",
    "connect_over_sockets",
    "connect_survivors",
    "load_ops",
]

FINISH_S = 60.0  # seconds that MPI may take to finalise

# Payload key in the status of a failed exchange; kExchange of tf_kernels/communication/communication_op.cc.
EXCHANGE_PAYLOAD = b"whale_ops.exchange"

COMMUNICATING_OPS = (
    "WhaleAllReduce",
    "WhaleAllGather",
    "WhaleReduceScatter",
    "WhaleAllToAll",
    "WhaleRouteIds",
    "WhaleReturnRows",
    "WhaleSendRows",
    "WhaleBroadcast",
    "WhaleSend",
    "WhaleRecv",
    "WhaleBarrier",
    "WhaleCheck",
    # The same in a device's memory.
    "WhaleDeviceAllReduce",
    "WhaleDeviceAllGather",
    "WhaleDeviceReduceScatter",
    "WhaleDeviceAllToAll",
    "WhaleDeviceBroadcast",
    "WhaleDeviceSend",
    "WhaleDeviceRecv",
)


def connect_in_process(name: str, size: int, *, hosts: Sequence[int] = ()) -> list[Communicator]:
    """Creates a communicator for each of `size` ranks that are all in this process, as threads; for tests.

    Args:
        name: name of the communicator, by which TensorFlow ops refer to it; unique in this process.
        size: number of ranks.
        hosts: as in `connect_mpi`.

    Raises:
        CommError: the name is in use, `size` is not positive, the hosts hold another number of ranks, or the op library
            is not built.
    """
    from whale_ops import _native

    if size < 1:
        raise CommError(
            "a communicator has at least one rank",
            given=size,
            expected="a size >= 1",
            action="pass a number of ranks of at least 1 as `size`",
        )
    if hosts and sum(hosts) != size:
        raise CommError(
            "the emulated hosts hold another number of ranks than the run has",
            given=f"{' + '.join(map(str, hosts))} ranks on hosts",
            expected=f"{size} ranks",
            action="let the numbers of `hosts` (hosts=2+2 in debug.emulate_network) add up to the number of ranks",
        )
    handles = (ctypes.c_void_p * size)()
    _native.check(_native.load_core().whale_in_process_create(name.encode(), size, _encode_hosts(hosts)[0], handles))
    return [Communicator(name, handle or 0) for handle in handles]


def count_devices(library: str | os.PathLike[str]) -> int:
    """Returns how many devices (GPUs) a device library such as libwhale_cuda.so finds on this machine.

    Raises:
        CommError: the library does not load, was built from other sources, or its driver reports an error.
    """
    from whale_ops import _native

    found = ctypes.c_int()
    place = str(library).encode(), _native.build.compute_core_digest().encode()
    _native.check(_native.load_core().whale_device_count(*place, ctypes.byref(found)))
    return found.value


def _encode_hosts(ranks: Sequence[int]) -> tuple[Any, int]:
    """Converts numbers of ranks per host to (host of each rank as a C array, number of ranks); (None, 0) if empty."""
    numbers = [host for host, count in enumerate(ranks) for _ in range(count)]
    return ((ctypes.c_int32 * len(numbers))(*numbers) if numbers else None), len(numbers)


def connect_mpi(name: str, *, share_memory: bool = True, hosts: Sequence[int] = ()) -> Communicator:
    """Creates the communicator of this process with all processes that mpirun or srun has started.

    Collective: all processes create their communicators in the same order. Initialises MPI if nobody else has.

    Args:
        name: name of the communicator; the same on all ranks.
        share_memory: whether ranks of one machine exchange messages through shared memory. If they cannot, the logger
            ``whale`` gives the reason, and MPI carries their messages.
        hosts: emulates several machines on one: the number of ranks of each, in rank order. Ranks of different emulated
            machines do not use shared memory.

    Raises:
        CommError: the MPI transport is not built or cannot start, the ranks give different names, or the hosts hold
            another number of ranks.
    """
    communicator = _connect_processes(name, share_memory, hosts)
    names = [other.decode() for other in communicator.allgather_bytes("whale_ops.connect_mpi", name.encode(), 60.0)]
    if len(set(names)) > 1:
        raise CommError(
            "the ranks create communicators of different names",
            given=", ".join(f"{other!r} on rank {rank}" for rank, other in enumerate(names)),
            expected="the same name on all ranks",
            action="create communicators in the same order on every rank",
        )
    return communicator


def connect_survivors(
    name: str, members: Sequence[int], number: int, *, share_memory: bool = True, hosts: Sequence[int] = ()
) -> Communicator:
    """Creates a communicator of ``members`` alone, once other processes of `connect_mpi` are gone; called by each
    member.

    New ranks are numbered in the order of the old ones.

    Args:
        members: the survivors' ranks among all processes that were started, ascending.
        number: distinguishes this group of survivors from earlier ones: positive, larger than in every call before, and
            the same on all members.
        share_memory, hosts: as in `connect_mpi`; hosts are those of the members. With ``share_memory`` all members have
            to be alive; without, the call does not wait for them.

    Raises:
        CommError: one of the members does not take part, or MPI cannot tell so many communicators apart.
    """
    return _connect_processes(name, share_memory, hosts, members, number)


def _connect_processes(
    name: str, share_memory: bool, hosts: Sequence[int], members: Sequence[int] = (), number: int = 0
) -> Communicator:
    from whale_ops import _native

    plugin = _native.load_mpi()
    handle, notes = ctypes.c_void_p(), ctypes.c_void_p()
    several = (ctypes.c_int32 * len(members))(*members) if members else None
    _native.check(
        _native.load_core().whale_mpi_create(
            name.encode(),
            str(plugin).encode(),
            share_memory,
            *_encode_hosts(hosts),
            several,
            len(members),
            number,
            ctypes.byref(handle),
            ctypes.byref(notes),
        )
    )
    _warn(notes)
    _finish_at_exit()
    return Communicator(name, handle.value or 0)


def connect_over_sockets(
    name: str, rank: int, sockets: Sequence[int], *, share_memory: bool = True, hosts: Sequence[int] = ()
) -> Communicator:
    """Creates a communicator of this process with processes that were not started together with it, without MPI.

    Args:
        rank: rank of this process.
        sockets: for each rank, the descriptor of a stream socket that is connected with it; -1 for this process. The
            communicator closes them, also if it cannot be created.
        share_memory, hosts: as in `connect_mpi`. With ``share_memory`` the call is collective; without, it does not
            wait for other ranks.

    Raises:
        CommError: one of the other processes is gone, the name is in use, or the hosts hold another number of ranks.
    """
    from whale_ops import _native

    handle, notes = ctypes.c_void_p(), ctypes.c_void_p()
    given = (ctypes.c_int32 * len(sockets))(*sockets)
    _native.check(
        _native.load_core().whale_sockets_create(
            name.encode(),
            rank,
            given,
            len(sockets),
            share_memory,
            *_encode_hosts(hosts),
            ctypes.byref(handle),
            ctypes.byref(notes),
        )
    )
    _warn(notes)
    _finish_at_exit()
    return Communicator(name, handle.value or 0)


def _warn(notes: ctypes.c_void_p) -> None:
    from whale_ops import _native

    for note in _native.take_bytes(notes.value or 0):
        logging.getLogger("whale").warning(note.decode())


@functools.cache
def _finish_at_exit() -> None:
    atexit.register(finish)


def finish() -> None:
    """Finalises MPI, if Whale has initialised it and all ranks have left their communicators; called when the process
    exits.

    MPI cannot be initialised again afterwards. If it does not end within `FINISH_S` seconds, the process exits with
    code 1 and prints its stack.

    Raises:
        CommError: MPI reports an error.
    """
    from whale_ops import _native

    try:
        faulthandler.dump_traceback_later(FINISH_S, exit=True)
    except (RuntimeError, ValueError, OSError):
        pass  # stderr is closed: there is nowhere to print the stack
    try:
        _native.check(_native.load_core().whale_finalize())
    finally:
        faulthandler.cancel_dump_traceback_later()


def forget_streams() -> None:
    """Restarts the shared random streams of eagerly called functions from their seeds; those of sessions are left
    alone.

    A shared stream is the state of a random op that occurs in several compiled programs of one step function (as for
    other batch shapes): the op goes on with the same sequence of random numbers whichever program runs.
    """
    if load_ops.cache_info().currsize:  # else there are none
        load_ops().whale_forget_streams()


def read_streams() -> tuple[dict[str, int], dict[str, int]]:
    """Returns how far each shared random stream of eagerly called functions has got (see `forget_streams`).

    Returns:
        (stream -> position of its counter, for streams with a counter; stream -> number of draws, for those without).
    """
    if not load_ops.cache_info().currsize:
        return {}, {}
    counted, positions, drawn, draws = load_ops().whale_read_streams()

    def pair(names: Any, values: Any) -> dict[str, int]:
        return {name.decode(): int(value) for name, value in zip(names.numpy(), values.numpy())}

    return pair(counted, positions), pair(drawn, draws)


def set_streams(positions: Mapping[str, int]) -> None:
    """Sets the positions of shared random streams of eagerly called functions (see `forget_streams`), to replay a step.

    Args:
        positions: stream -> position, as in the first result of `read_streams`.
    """
    if positions:
        load_ops().whale_set_streams(counted=list(positions), positions=list(positions.values()))


@functools.cache
def load_ops() -> ModuleType:
    """Returns the module of Whale's TensorFlow ops (whale_all_reduce, ...), which is loaded on first use.

    TensorFlow's automatic control dependencies are told that these ops only read the communicator, so that operations
    of one step run side by side.

    Raises:
        CommError: the library was built for another TensorFlow, or is not built.
    """
    import tensorflow as tf
    from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils

    from whale_ops import _native, build

    name = build.make_ops_name(tf.__version__)
    info = _native.build_info()
    if name not in info:
        built = [entry["tensorflow"] for entry in info.values() if "tensorflow" in entry]
        raise CommError(
            "the op library was built for another TensorFlow",
            given=f"TensorFlow {tf.__version__}",
            expected=f"built for {', '.join(sorted(built)) or 'none'}",
            action="run python -m whale_ops.build in this environment, or install the package again",
        )
    _native.load_core()
    try:
        module = tf.load_op_library(str(_native.find_library(name)))
    except tf.errors.NotFoundError as error:
        raise CommError(
            "the op library does not fit this TensorFlow",
            given=error.message,
            expected=f"TensorFlow {tf.__version__}",
            action="run python -m whale_ops.build in this environment",
        ) from error
    # Declared as reads, so that functions that communicate do not wait for each other. But TensorFlow drops reads whose
    # value is not used, for which other ranks would wait: hence also "must run, in any order".
    for op in COMMUNICATING_OPS:
        auto_control_deps_utils.register_read_only_resource_op(op)
    auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS |= frozenset(COMMUNICATING_OPS)
    return module
