"""Measures exchanges between the ranks of this run: ``whale run -np N -m whale.tools.profile.links FILE``.

Every rank runs the same exchanges at the same time, one after the other, and does nothing else, but for small ones that
it runs once more while other threads compute on all cores. Rank 0 writes the medians as JSON (`Links`), anew after each
exchange. All kinds of the smallest and the largest tensors come first, and before them the links between each two
hosts where ranks are on several, so that something of each is there where the
time is over before all is measured, as on a busy machine.

The host's exchanges are of tensors in its memory. Where ``communication.backend`` names what carries tensors from GPU
to GPU, the same are measured through that as well, between the GPUs that ``wh.init`` would give these ranks.
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
from whale.started import process_place

SIZES_BYTES = (1 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
SECONDS_PER_SIZE = 0.25
MOST_CALLS = 100
CHAIN = 4  # least number of exchanges in a call
MOST_CHAIN = 16
# Operands and results of a call's exchanges together: in a step they have rarely been in a cache since they were made.
COLD_BYTES = 64 << 20
ROWS = 8  # rows of tensors whose parts do not lie in one piece
TOLD = "measured: "  # begins the lines that `whale profile` passes on
_LEAST_CALLS = 8  # that measure one kind and size
_PROBE_BYTES, _PROBES = 64 << 10, 5
PAUSES = 2  # times that an exchange waits for an engine to wake up: the last rank's to come, then the others'


Exchange = Callable[[ExchangeOps, tf.Tensor, str], Any]  # exchanges a vector, under a key


class Links(msgspec.Struct):
    """The measurements; ``wake_s``: what an engine waits for a core where all compute.

    ``left``: how many of the exchanges are not measured, because the time was over.
    ``hosts``: the links between each two hosts of the ranks, where they are on several.
    """

    curves: list[Curve]
    wake_s: float
    left: int = 0
    hosts: list[HostLink] = []


class Results:
    """The measurements of a run so far, which rank 0 writes to a file after each, and says how far it is.

    Args:
      path: of the file.
      expected: how many exchanges will be measured.
      end_s: monotonic time after which no further one is.
    """

    def __init__(self, comm: whale_ops.Communicator, path: Path, expected: int, end_s: float) -> None:
        self._comm, self._path, self._expected, self._end_s = comm, path, expected, end_s
        self._samples: dict[tuple[str, str], list[tuple[float, float]]] = {}  # by what carried them, and kind
        self.wake_s = 0.0
        self.hosts: list[HostLink] = []

    def is_time_over(self, key: str) -> bool:
        """Tells, on all ranks alike, whether rank 0's clock says that nothing more is to be measured; collective."""
        over = b"1" if time.monotonic() > self._end_s else b""
        return bool(self._comm.broadcast_bytes(f"over/{key}", over if self._comm.rank == 0 else None))

    def add(self, through: str, kind: str, size_bytes: int, seconds: float) -> None:
        """Adds a measurement."""
        self._samples.setdefault((through, kind), []).append((float(size_bytes), seconds))
        self.write()

    def find_seconds(self, through: str, kind: str) -> float:
        """Returns the seconds of the first exchange of a kind that was measured."""
        return self._samples[through, kind][0][1]

    def write(self) -> None:
        """Writes the file, whole or not at all, on rank 0."""
        if self._comm.rank:
            return
        curves = [Curve(kind, self._comm.size, sorted(s), through) for (through, kind), s in self._samples.items()]
        left = self._expected - sum(len(samples) for samples in self._samples.values())
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(Links(curves, self.wake_s, left, self.hosts)))
        fresh.replace(self._path)


def main(budget_s: float = math.inf) -> None:
    """Measures all kinds and sizes.

    Args:
      budget_s: what is not begun after that time is left out.

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
    """Measures exchanges of all kinds, of one size after the other, as long as there is time."""
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
    """Returns the bytes of tensors whose exchanges take so long in all, by the time of small ones; collective."""
    times_s = []
    for _ in range(_PROBES):
        started_s = time.perf_counter()
        comm.allgather_bytes("link", bytes(_PROBE_BYTES))
        times_s.append(time.perf_counter() - started_s)
    took_s = max(map(float, comm.allgather_bytes("link took", repr(min(times_s)).encode())))
    return 2 * _PROBE_BYTES * budget_s / took_s / (_LEAST_CALLS * CHAIN)


def _measure_wake_s(comm: whale_ops.Communicator, kind: str, results: Results) -> float:
    """Measures seconds that an engine waits for a core where all compute; 0 where the time is over."""
    if results.is_time_over("loaded"):
        return 0.0
    size_bytes, call = SIZES_BYTES[0], _make_exchanges(comm.rank, comm.size)[kind]
    idle_s = results.find_seconds("", kind)
    with _keep_computing(max(1, len(os.sched_getaffinity(0)) // comm.size)):
        loaded_s = _measure_seconds(comm, "", kind, call, size_bytes, "loaded")
    return max(0.0, loaded_s - idle_s) / PAUSES


@contextlib.contextmanager
def _keep_computing(threads: int) -> Iterator[None]:
    """Keeps ``threads`` threads of this process computing inside the context."""
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
    """Maps each kind to the op on a vector of the whole tensor's bytes; all-reduces first."""

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
    """Returns the seconds of one exchange on the slowest rank."""
    chain = max(CHAIN, min(MOST_CHAIN, COLD_BYTES // (2 * size_bytes)))
    x = [tf.ones(size_bytes // 4) for _ in range(chain)]

    @tf.function
    def run_step(x: list[tf.Tensor]) -> list[Any]:
        do = ExchangeOps(comm, through)
        found: list[Any] = []  # handed on, so that none lies in another one's memory
        for number, operand in enumerate(x):
            with tf.control_dependencies(found[-1:]):
                found.append(call(do, tf.identity(operand), f"{key}/{number}"))
        with tf.control_dependencies(found[-1:]):
            return [tf.identity(one) for one in found if isinstance(one, tf.Tensor)] or [tf.constant(0.0)]

    @tf.function
    def run_nothing(x: list[tf.Tensor]) -> tf.Tensor:
        return tf.constant(0.0)

    key = f"{through}/{kind}/{size_bytes}/{when}"
    for _ in range(3):  # the first call traces
        started_s = time.perf_counter()
        run_step(x)
        await_gpus()
        once_s = time.perf_counter() - started_s
    run_nothing(x)
    wanted = b"%d" % max(5, min(MOST_CALLS, int(SECONDS_PER_SIZE / once_s)))
    calls = int(comm.broadcast_bytes(f"calls/{key}", wanted if comm.rank == 0 else None))
    times_s, empty_s = [], []
    for _ in range(calls):
        started_s = time.perf_counter()
        run_nothing(x)
        await_gpus()
        empty_s.append(time.perf_counter() - started_s)
        comm.barrier(f"start/{key}")
        started_s = time.perf_counter()
        run_step(x)
        await_gpus()
        times_s.append(time.perf_counter() - started_s)
    # Under load few take very long, and a step adds up many: there their mean counts.
    middle = statistics.mean if when == "loaded" else statistics.median
    mine = max(1e-6, middle(times_s) - middle(empty_s)) / chain
    return max(float(one) for one in comm.allgather_bytes(f"seconds/{key}", str(mine).encode()))


if __name__ == "__main__":
    main(float(sys.argv[2]) if len(sys.argv) > 2 else math.inf)
