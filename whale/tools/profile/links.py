"""Measures exchanges between the ranks of this run: ``whale run -np N -m whale.tools.profile.links FILE [SECONDS]``.

All ranks make the same exchanges at the same time, one after the other, and do nothing else; only small exchanges are
measured once more while other threads compute on all cores. Rank 0 writes the medians as JSON (`Links`) after each
exchange. The order is chosen so that the most important figures exist if time runs out, as on a busy machine: first the
links between each two hosts, then all kinds of exchange with the smallest and the largest tensors.

These exchanges are of tensors in host memory. If ``communication.backend`` names a transport between GPUs, the same
exchanges are measured through it as well, between the GPUs that ``wh.init`` would assign to these ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

import whale_ops
from cost_model.graph.machine_profile import Curve, HostLink
from whale.config import Config
from whale.distributed import device_exchange
from whale.distributed.connect import connect_with_mpi
from whale.distributed.device_exchange import ExchangeOps
from whale.distributed.gpus import await_gpus
from whale.distributed.links import find_topology, measure_links
from whale.ir.plan_text import format_bytes
from whale.passes.resharding.on_devices import DEVICE_BACKENDS
from whale.runtime.compile.function_calls import bind_as_step
from whale.started import process_place

SIZES_BYTES = (1 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
SECONDS_PER_SIZE = 0.25
MOST_CALLS = 100
CHAIN = 4  # least number of exchanges in a call
MOST_CHAIN = 16
# Bytes of all operands and results of a call, more than caches hold, as a step's tensors are rarely in a cache either.
COLD_BYTES = 64 << 20
ROWS = 8  # rows of tensors whose shards are not contiguous
TOLD = "measured: "  # prefix of the lines that `whale profile` shows to the user
_LEAST_CALLS = 8  # least number of calls that measure one kind and size
_PROBE_BYTES, _PROBES = 64 << 10, 5
PAUSES = 2  # how often an exchange waits for a thread to wake up: on the last rank to come, then on the others


Exchange = Callable[[ExchangeOps, tf.Tensor, str], Any]  # exchanges a vector, under a key


class Links(msgspec.Struct):
    """Holds the measurements of a run.

    Attributes:
        curves: seconds by bytes, for each kind of exchange.
        wake_s: seconds that a communication thread waits for a core when all cores compute.
        left: number of exchanges that were not measured because time ran out.
        hosts: the links between each two hosts of the ranks; empty: all ranks are on one host.
    """

    curves: list[Curve]
    wake_s: float
    left: int = 0
    hosts: list[HostLink] = []


class Results:
    """Collects the measurements of a run; rank 0 writes them to a file after each exchange, with the number still
    missing.

    Args:
        path: path of the file.
        expected: number of exchanges that are to be measured.
        end_s: value of `time.monotonic()` after which no further exchange is measured.
    """

    def __init__(self, comm: whale_ops.Communicator, path: Path, expected: int, end_s: float) -> None:
        self._comm, self._path, self._expected, self._end_s = comm, path, expected, end_s
        self._samples: dict[tuple[str, str], list[tuple[float, float]]] = {}  # by (transport, kind of exchange)
        self.wake_s = 0.0
        self.hosts: list[HostLink] = []

    def is_time_over(self, key: str) -> bool:
        """Returns True on all ranks if rank 0's time is over. Collective, so that no rank goes on to measure alone.

        Args:
            key: a word, equal on all ranks, that no earlier call has used.
        """
        over = b"1" if time.monotonic() > self._end_s else b""
        return bool(self._comm.broadcast_bytes(f"over/{key}", over if self._comm.rank == 0 else None))

    def add(self, through: str, kind: str, size_bytes: int, seconds: float) -> None:
        """Adds the seconds of an exchange of one kind and size, and writes the file.

        Args:
            through: the transport; "": host memory.
        """
        self._samples.setdefault((through, kind), []).append((float(size_bytes), seconds))
        self.write()

    def find_seconds(self, through: str, kind: str) -> float:
        """Returns the seconds of the first measured exchange of a kind."""
        return self._samples[through, kind][0][1]

    def write(self) -> None:
        """Writes the file atomically; does nothing on ranks other than 0."""
        if self._comm.rank:
            return
        curves = [Curve(kind, self._comm.size, sorted(s), through) for (through, kind), s in self._samples.items()]
        left = self._expected - sum(len(samples) for samples in self._samples.values())
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(Links(curves, self.wake_s, left, self.hosts)))
        fresh.replace(self._path)


def main(budget_s: float = math.inf) -> None:
    """Measures exchanges of all kinds and sizes.

    Args:
        budget_s: seconds after which no further exchange is measured.

    Raises:
        ClusterError: ``communication.backend`` asks for GPUs, and a rank has none that it can use.
    """
    end_s = time.monotonic() + budget_s
    config, place = Config(), process_place()
    comm = connect_with_mpi("measure", place, config)[0][0]
    backend = config["communication.backend"]
    device_exchange.start_device_exchange(config, place, comm.size, [comm])
    ways = ["", backend] if backend in DEVICE_BACKENDS else [""]
    kinds = list(_make_exchanges(comm.rank, comm.size))
    results = Results(comm, Path(sys.argv[1]), len(ways) * len(kinds) * len(SIZES_BYTES), end_s)
    topology = find_topology(comm, place, config)
    if topology is not None:
        names, found = topology.names, measure_links(comm, topology).links
        results.hosts = [HostLink(names[i], names[j], *astuple(link)) for (i, j), link in found.items()]
    with tf.device("CPU:0"):
        _measure_sizes(comm, "", SIZES_BYTES[:1], results)
        results.wake_s = _measure_wake_s(comm, kinds[0], results)
        most_bytes = _find_most_bytes(comm, budget_s / len(kinds) / len(SIZES_BYTES))
        _measure_sizes(comm, "", [size for size in SIZES_BYTES[:0:-1] if size <= most_bytes], results)
    if backend in DEVICE_BACKENDS:
        _measure_sizes(comm, backend, [SIZES_BYTES[0], *SIZES_BYTES[:0:-1]], results)
    results.write()
    comm.close_device()
    comm.leave()


def _measure_sizes(comm: whale_ops.Communicator, through: str, sizes: Sequence[int], results: Results) -> None:
    """Measures exchanges of all kinds, size after size, until the time is over."""
    for size_bytes in sizes:
        for kind, call in _make_exchanges(comm.rank, comm.size).items():
            if results.is_time_over(f"{through}/{kind}/{size_bytes}"):
                return
            results.add(through, kind, size_bytes, _measure_seconds(comm, through, kind, call, size_bytes))
        if comm.rank == 0:
            print(
                f"{TOLD}exchanges of {format_bytes(size_bytes)}{f' through {through}' if through else ''}", flush=True
            )


def _find_most_bytes(comm: whale_ops.Communicator, budget_s: float) -> float:
    """Returns the largest tensor size in bytes whose exchanges should fit into the time budget; collective.

    The estimate comes from the bandwidth of small exchanges.
    """
    times_s = []
    for _ in range(_PROBES):
        started_s = time.perf_counter()
        comm.allgather_bytes("link", bytes(_PROBE_BYTES))
        times_s.append(time.perf_counter() - started_s)
    took_s = max(map(float, comm.allgather_bytes("link took", repr(min(times_s)).encode())))
    return 2 * _PROBE_BYTES * budget_s / took_s / (_LEAST_CALLS * CHAIN)


def _measure_wake_s(comm: whale_ops.Communicator, kind: str, results: Results) -> float:
    """Measures the seconds that a communication thread waits for a core when all cores compute; 0: the time is over."""
    if results.is_time_over("loaded"):
        return 0.0
    size_bytes, call = SIZES_BYTES[0], _make_exchanges(comm.rank, comm.size)[kind]
    idle_s = results.find_seconds("", kind)
    with _keep_computing(max(1, len(os.sched_getaffinity(0)) // comm.size)):
        loaded_s = _measure_seconds(comm, "", kind, call, size_bytes, "loaded")
    return max(0.0, loaded_s - idle_s) / PAUSES


@contextlib.contextmanager
def _keep_computing(threads: int) -> Iterator[None]:
    """Keeps ``threads`` threads of this process busy inside the context."""
    over = threading.Event()
    x = np.ones((384, 384), np.float32)

    def compute() -> None:
        while not over.is_set():
            x @ x

    running = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join()


def _make_exchanges(rank: int, size: int) -> dict[str, Exchange]:
    """Returns {kind: exchange}; an exchange takes a vector with the bytes of the whole tensor. All-reduces come
    first.
    """

    def cut_own(x: tf.Tensor) -> tf.Tensor:
        return x[: x.shape[0] // size]

    def list_sizes(x: tf.Tensor) -> list[int]:
        return [x.shape[0] // size] * size

    def make_matrix(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, (size, x.shape[0] // size))

    def make_rows(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, (ROWS, x.shape[0] // ROWS))

    def list_columns(x: tf.Tensor) -> list[int]:
        return [x.shape[0] // ROWS // size] * size

    def send_and_receive(do: ExchangeOps, x: tf.Tensor, key: str) -> Any:
        if rank == 0:
            return do("send", x, peer=1, key=key)
        return do("recv", peer=0, key=key, T=x.dtype, shape=x.shape) if rank == 1 else tf.no_op()

    return {
        "all_reduce": lambda do, x, key: do("all_reduce", [x], key=key)[0],
        "all_reduce packed": lambda do, x, key: do("all_reduce", tf.split(x, 2), key=key)[0],
        "all_gather packed": lambda do, x, key: do(
            "all_gather", tf.reshape(cut_own(x), (ROWS, -1)), key=key, axis=1, sizes=list_columns(x)
        ),
        "reduce_scatter packed": lambda do, x, key: do(
            "reduce_scatter", make_rows(x), key=key, axis=1, sizes=list_columns(x)
        ),
        "all_gather": lambda do, x, key: do("all_gather", cut_own(x), key=key, axis=0, sizes=list_sizes(x)),
        "reduce_scatter": lambda do, x, key: do("reduce_scatter", x, key=key, axis=0, sizes=list_sizes(x)),
        "all_to_all": lambda do, x, key: do(
            "all_to_all",
            make_matrix(x),
            key=key,
            split_axis=0,
            split_sizes=[1] * size,
            concat_axis=1,
            concat_sizes=list_sizes(x),
        ),
        "broadcast": lambda do, x, key: do("broadcast", [x], key=key, root=0, shapes=[x.shape])[0],
        "point_to_point": send_and_receive,
    }


def _measure_seconds(
    comm: whale_ops.Communicator, through: str, kind: str, call: Exchange, size_bytes: int, when: str = "idle"
) -> float:
    """Measures one exchange; returns its seconds on the slowest rank.

    Args:
        through: the transport; "": host memory.
        kind: name of the exchange.
        size_bytes: bytes of the whole tensor.
        when: "loaded" if other threads compute meanwhile; the mean then replaces the median.
    """
    chain = max(CHAIN, min(MOST_CHAIN, COLD_BYTES // (2 * size_bytes)))
    x = [tf.ones(size_bytes // 4) for _ in range(chain)]
    key = f"{through}/{kind}/{size_bytes}/{when}"

    def exchange(x: list[tf.Tensor]) -> list[Any]:
        do = ExchangeOps(comm, through)
        found: list[Any] = []  # returned, so that no result reuses another one's memory
        for number, operand in enumerate(x):
            with tf.control_dependencies(found[-1:]):
                found.append(call(do, tf.identity(operand), f"{key}/{number}"))
        with tf.control_dependencies(found[-1:]):
            return [tf.identity(one) for one in found if isinstance(one, tf.Tensor)] or [tf.constant(0.0)]

    def do_nothing(x: list[tf.Tensor]) -> tf.Tensor:
        return tf.constant(0.0)

    run_step, run_nothing = (
        bind_as_step(tf.function(one).get_concrete_function(x), x) for one in (exchange, do_nothing)
    )
    for _ in range(3):
        started_s = time.perf_counter()
        run_step()
        await_gpus()
        once_s = time.perf_counter() - started_s
    run_nothing()
    wanted = b"%d" % max(5, min(MOST_CALLS, int(SECONDS_PER_SIZE / once_s)))
    calls = int(comm.broadcast_bytes(f"calls/{key}", wanted if comm.rank == 0 else None))
    times_s, empty_s = [], []
    for _ in range(calls):
        started_s = time.perf_counter()
        run_nothing()
        await_gpus()
        empty_s.append(time.perf_counter() - started_s)
        comm.barrier(f"start/{key}")
        started_s = time.perf_counter()
        run_step()
        await_gpus()
        times_s.append(time.perf_counter() - started_s)
    # Under load a few exchanges take very long; a step has many of them, so that the mean is what counts.
    middle = statistics.mean if when == "loaded" else statistics.median
    mine = max(1e-6, middle(times_s) - middle(empty_s)) / chain
    return max(float(one) for one in comm.allgather_bytes(f"seconds/{key}", str(mine).encode()))


if __name__ == "__main__":
    main(float(sys.argv[2]) if len(sys.argv) > 2 else math.inf)
