"""Exchanges between hosts, timed: what carries them is chosen by ``communication.between_hosts``.

    python -m tests.hosts.exchanges [--mbit 1000] [--delay-ms 0] [--ranks 1] [--kb 1 256 16384]
                                    [--by mpi tcp openmpi sockets steps]
                                    [--kinds AllReduce AllGather ReduceScatter AllToAll]

``openmpi`` is Open MPI's own all-reduce, without Whale, and ``sockets`` what a TCP connection of two ranks takes for as
many bytes in both directions at once, as an all-reduce of two ranks sends: the wire, there and, of small ones, back.
``steps`` are training steps with one weight of so many bytes, with all that ranks tell each other in a step, by TCP:
the mean of pairs, since of ranks that are a message's way apart every other step takes two ways and the next one none.

Makes two hosts of namespaces with a link of so many 10^6 bits per second in each direction, and so many ranks on each.
Prints milliseconds of the slowest rank, median and least of the rounds, and how many times the tensor's bytes left the
first host. The tensor is the one that is summed, gathered, or scattered, or what a rank sends of an all-to-all.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests import forkserver
from tests.hosts.hosts import HostLauncher, Hosts

_ROUNDS = ((4 << 10, 9), (128, 30), (0, 200))  # of what has so many KB at least
_LIMIT_S = 60.0
_CARRIERS = ("mpi", "tcp")
_PORT, _SMALL_BYTES = 5499, 1 << 14
_KINDS = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")


def measure(kinds: list[str], sizes_kb: list[int]) -> None:
    """Runs as a rank of `whale run`: rank 0 prints a line for each kind and size."""
    import whale as wh
    from whale.runtime.context import require_current
    from whale_ops import Communicator
    from whale_ops._native import HostOperation

    wh.init(solo=True)
    comm: Communicator = require_current("a benchmark").comms[0]
    for kind, kb in itertools.product(kinds, sizes_kb):
        whole = (kb << 8) // comm.size * comm.size
        part = whole // comm.size
        given = np.ones(part if kind == "AllGather" else whole, np.float32)
        found = np.zeros(part if kind == "ReduceScatter" else whole, np.float32)
        counts = [whole] if kind == "AllReduce" else [part] * comm.size
        rounds, times_ms, left_bytes = next(count for least, count in _ROUNDS if kb >= least), [], list[int]()
        for _ in range(rounds + 2):  # the first ones connect, and fault memory in
            comm.barrier(f"count {kind} {kb}")
            before = _count_left()
            comm.barrier(f"start {kind} {kb}")  # nobody sends before all have counted
            started_s = time.perf_counter()
            HostOperation(
                comm.handle, kind, f"timed {kind} {kb}", dtype="float32", element_bytes=4, counts=counts,
                recv_counts=counts if kind == "AllToAll" else (), even=True,
                input_address=given.ctypes.data, output_address=found.ctypes.data, buffers=(given, found),
            ).wait(_LIMIT_S)  # fmt: skip
            mine_s = time.perf_counter() - started_s
            said = comm.allgather_bytes(f"took {kind} {kb}", repr(mine_s).encode())
            left_bytes.append(_count_left() - before)  # of all ranks of the host, and acknowledged
            times_ms.append(1e3 * max(map(float, said)))
        assert (found == (comm.size if kind in ("AllReduce", "ReduceScatter") else 1)).all()
        if comm.rank == 0:
            middle, least = statistics.median(times_ms[2:]), min(times_ms[2:])
            times = statistics.median(left_bytes) / (4 * whole)
            print(f"{kind:13} {kb:6d} KB  {middle:8.3f} ms  {least:8.3f} ms  {times:5.2f}", flush=True)
    wh.shutdown()


def measure_steps(sizes_kb: list[int]) -> None:
    """Runs as a rank of `whale run`: rank 0 prints a line for each size of the weight of a training step."""
    import tensorflow as tf

    import whale as wh

    wh.init()

    def make_step(weight: tf.Variable) -> Callable[[tf.Tensor], tf.Tensor]:
        @wh.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight) ** 2)
            weight.assign_sub(1e-3 * tape.gradient(loss, weight))
            return loss

        return step

    for kb in sizes_kb:
        step = make_step(tf.Variable(tf.ones((8, kb << 5))))
        times_ms, batch = list[float](), tf.ones((2 * wh.size(), 8))
        for _ in range(40):
            started_s = time.perf_counter()
            float(step(batch))
            times_ms.append(1e3 * (time.perf_counter() - started_s))
        if wh.rank() == 0:
            pairs = zip(times_ms[8::2], times_ms[9::2])
            _print_times("training step", kb, [(one + next_one) / 2 for one, next_one in pairs])
    wh.shutdown()


def measure_open_mpi(sizes_kb: list[int]) -> None:
    """Runs as a rank of `whale run` without Whale: rank 0 prints a line for each size of an all-reduce."""
    from whale_ops import _native

    _native.load_mpi()
    mpi = ctypes.CDLL("libmpi.so.40")
    world, doubles, floats, total, most = (
        ctypes.byref(ctypes.c_char.in_dll(mpi, f"ompi_{name}"))
        for name in ("mpi_comm_world", "mpi_double", "mpi_float", "mpi_op_sum", "mpi_op_max")
    )
    assert mpi.MPI_Init(None, None) == 0
    rank = ctypes.c_int()
    mpi.MPI_Comm_rank(world, ctypes.byref(rank))
    for kb in sizes_kb:
        given, found = np.ones(kb << 8, np.float32), np.zeros(kb << 8, np.float32)

        def exchange(given: np.ndarray = given, found: np.ndarray = found) -> None:
            operands = ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(found.ctypes.data)
            assert mpi.MPI_Allreduce(*operands, given.size, floats, total, world) == 0

        def find_slowest(seconds: float) -> float:
            mine, slowest = ctypes.c_double(seconds), ctypes.c_double()
            mpi.MPI_Allreduce(ctypes.byref(mine), ctypes.byref(slowest), 1, doubles, most, world)
            return slowest.value

        times_ms = _time_rounds(kb, lambda: mpi.MPI_Barrier(world), exchange, find_slowest)
        if rank.value == 0:
            _print_times("MPI_Allreduce", kb, times_ms)
    mpi.MPI_Finalize()


def measure_sockets(sizes_kb: list[int]) -> None:
    """Runs as one of two ranks of `whale run` without Whale: both send to each other at the same time."""
    first = os.environ["OMPI_COMM_WORLD_RANK"] == "0"
    if first:
        with socket.create_server(("", _PORT)) as door:
            connection, _ = door.accept()
    else:
        while True:
            try:
                connection = socket.create_connection(("h0", _PORT))
                break
            except OSError:
                time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        for kb in sizes_kb:
            given, found = bytes(kb << 10), bytearray(kb << 10)

            def receive(found: bytearray = found) -> None:
                view = memoryview(found)
                while len(view):
                    view = view[connection.recv_into(view) :]

            def exchange(given: bytes = given, receive: Callable[[], None] = receive) -> None:
                if len(given) <= _SMALL_BYTES and not first:  # there and back
                    receive()
                    return connection.sendall(given)
                reader = threading.Thread(target=receive)
                if len(given) > _SMALL_BYTES:
                    reader.start()
                connection.sendall(given)
                return reader.join() if len(given) > _SMALL_BYTES else receive()

            def meet() -> None:
                connection.sendall(b"+")
                connection.recv(1)

            def find_slowest(seconds: float) -> float:
                connection.sendall(struct.pack("d", seconds))
                other = b""
                while len(other) < 8:
                    other += connection.recv(8 - len(other))
                return max(seconds, *struct.unpack("d", other))

            there_and_back = kb << 10 <= _SMALL_BYTES
            times_ms = _time_rounds(kb, meet, exchange, (lambda seconds: seconds) if there_and_back else find_slowest)
            if first:
                _print_times("there and back" if there_and_back else "both ways", kb, times_ms)


def _time_rounds(
    kb: int, meet: Callable[[], object], exchange: Callable[[], None], find_slowest: Callable[[float], float]
) -> list[float]:
    """Returns the milliseconds of an exchange of so many KB in each of the rounds but the first ones."""
    rounds, times_ms = next(count for least, count in _ROUNDS if kb >= least), list[float]()
    for _ in range(rounds + 2):
        meet()
        started_s = time.perf_counter()
        exchange()
        times_ms.append(1e3 * find_slowest(time.perf_counter() - started_s))
    return times_ms[2:]


def _print_times(what: str, kb: int, times_ms: list[float]) -> None:
    print(f"{what:14} {kb:6d} KB  {statistics.median(times_ms):8.3f} ms  {min(times_ms):8.3f} ms", flush=True)


def _count_left() -> int:
    """Returns the bytes that have left this host over its link."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.exchanges")
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of one way between the hosts")
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--kb", type=int, nargs="+", default=[1, 16, 256, 1024, 16384])
    parser.add_argument("--kinds", nargs="+", default=["AllReduce"], choices=_KINDS)
    parser.add_argument("--by", nargs="+", default=["mpi", "tcp"], choices=[*_CARRIERS, *_WITHOUT])
    asked = parser.parse_args()
    forkserver.open_folder()
    try:
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder, Hosts(Path(folder), 2) as hosts:
            for name in hosts.names:
                hosts.shape(name, asked.mbit)
            hosts.delay(asked.delay_ms)
            launcher = HostLauncher(hosts, python=forkserver.warm_python())
            where = ["-np", str(2 * asked.ranks), "--hosts", f"h0:{asked.ranks},h1:{asked.ranks}"]
            for by in asked.by:
                carrier = by if by in _CARRIERS else "tcp" if by == "steps" else "auto"
                launcher.environment["WHALE_COMMUNICATION_BETWEEN_HOSTS"] = carrier
                what = ",".join(asked.kinds) if by in _CARRIERS else by
                done = launcher.run(*where, __file__, what, *map(str, asked.kb), timeout_s=300.0)
                print(f"by {by}:", done.stdout if done.returncode == 0 else done.stdout + done.stderr, sep="\n")
    finally:
        forkserver.close_folder()


_WITHOUT = {"openmpi": measure_open_mpi, "sockets": measure_sockets, "steps": measure_steps}

if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("--"):
        main()
    elif sys.argv[1] in _WITHOUT:
        _WITHOUT[sys.argv[1]](list(map(int, sys.argv[2:])))
    else:
        measure(sys.argv[1].split(","), list(map(int, sys.argv[2:])))
