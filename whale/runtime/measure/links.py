"""Seconds of exchanges between the ranks of this run: ``whale run -np N -m whale.runtime.measure.links FILE``.

Every rank runs the same exchanges at the same time, one after the other, and does nothing else; at the end it runs
small ones once more while other threads compute on all cores. Rank 0 writes the medians as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import whale_ops

SIZES_BYTES = (1 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
SECONDS_PER_SIZE = 0.25
MOST_CALLS = 100
CHAIN = 4  # exchanges of a call, at least
MOST_CHAIN = 16
# Operands and results of a call's exchanges together: in a step they have rarely been in a cache since they were made.
COLD_BYTES = 64 << 20
ROWS = 8  # of tensors whose parts do not lie in one piece
PAUSES = 2  # times that an exchange waits for an engine to wake up: the last rank's to come, then the others'


def main() -> None:
    """Measures all kinds and sizes."""
    comm = whale_ops.mpi("measure")
    ops = whale_ops.ops()
    rank, size = comm.rank, comm.size
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, call in _exchanges(ops, rank, size).items():
        for size_bytes in SIZES_BYTES:
            found.setdefault(kind, []).append((float(size_bytes), _seconds(comm, kind, call, size_bytes)))
    small_bytes, idle_s = found["all_reduce"][0]
    with _computing(max(1, len(os.sched_getaffinity(0)) // size)):
        loaded_s = _seconds(comm, "all_reduce", _exchanges(ops, rank, size)["all_reduce"], int(small_bytes), "loaded")
    wake_s = max(0.0, loaded_s - idle_s) / PAUSES
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({"ranks": size, "curves": found, "wake_s": wake_s}))
    comm.leave()


@contextlib.contextmanager
def _computing(threads: int) -> Iterator[None]:
    """So many threads of this process compute meanwhile."""
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


def _exchanges(ops: Any, rank: int, size: int) -> dict[str, Callable[[Any, tf.Tensor, str], Any]]:
    """Kind -> the op on a vector of the whole tensor's bytes."""

    def own(x: tf.Tensor) -> tf.Tensor:
        return x[: x.shape[0] // size]

    def sizes(x: tf.Tensor) -> list[int]:
        return [x.shape[0] // size] * size

    def matrix(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, (size, x.shape[0] // size))

    def rows(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, (ROWS, x.shape[0] // ROWS))

    def columns(x: tf.Tensor) -> list[int]:
        return [x.shape[0] // ROWS // size] * size

    def point_to_point(handle: Any, x: tf.Tensor, key: str) -> Any:
        if rank == 0:
            return ops.whale_send(handle, x, peer=1, key=key)
        return ops.whale_recv(handle, peer=0, key=key, T=x.dtype, shape=x.shape) if rank == 1 else tf.no_op()

    return {
        "all_reduce": lambda h, x, key: ops.whale_all_reduce(h, [x], key=key)[0],
        "all_reduce packed": lambda h, x, key: ops.whale_all_reduce(h, tf.split(x, 2), key=key)[0],
        "all_gather packed": lambda h, x, key: ops.whale_all_gather(
            h, tf.reshape(own(x), (ROWS, -1)), key=key, axis=1, sizes=columns(x)
        ),
        "reduce_scatter packed": lambda h, x, key: ops.whale_reduce_scatter(
            h, rows(x), key=key, axis=1, sizes=columns(x)
        ),
        "all_gather": lambda h, x, key: ops.whale_all_gather(h, own(x), key=key, axis=0, sizes=sizes(x)),
        "reduce_scatter": lambda h, x, key: ops.whale_reduce_scatter(h, x, key=key, axis=0, sizes=sizes(x)),
        "all_to_all": lambda h, x, key: ops.whale_all_to_all(
            h, matrix(x), key=key, split_axis=0, split_sizes=[1] * size, concat_axis=1, concat_sizes=sizes(x)
        ),
        "broadcast": lambda h, x, key: ops.whale_broadcast(h, [x], key=key, root=0, shapes=[x.shape])[0],
        "point_to_point": point_to_point,
    }


def _seconds(comm: Any, kind: str, call: Callable[..., Any], size_bytes: int, when: str = "idle") -> float:
    ops = whale_ops.ops()
    chain = max(CHAIN, min(MOST_CHAIN, COLD_BYTES // (2 * size_bytes)))
    x = [tf.ones(size_bytes // 4) for _ in range(chain)]

    @tf.function
    def step(x: list[tf.Tensor]) -> list[Any]:
        handle = ops.whale_communicator(communicator=comm.name, rank=comm.rank)
        found: list[Any] = []  # handed on, so that none lies in another one's memory
        for number, operand in enumerate(x):
            with tf.control_dependencies(found[-1:]):
                found.append(call(handle, tf.identity(operand), f"{key}/{number}"))
        with tf.control_dependencies(found[-1:]):
            return [tf.identity(one) for one in found if isinstance(one, tf.Tensor)] or [tf.constant(0.0)]

    @tf.function
    def nothing(x: list[tf.Tensor]) -> tf.Tensor:
        return tf.constant(0.0)

    key = f"{kind}/{size_bytes}/{when}"
    for _ in range(3):  # the first call traces
        started_s = time.perf_counter()
        step(x)
        once_s = time.perf_counter() - started_s
    nothing(x)
    wanted = b"%d" % max(5, min(MOST_CALLS, int(SECONDS_PER_SIZE / once_s)))
    calls = int(comm.broadcast_bytes(f"calls/{key}", wanted if comm.rank == 0 else None))
    times_s, empty_s = [], []
    for _ in range(calls):
        started_s = time.perf_counter()
        nothing(x)
        empty_s.append(time.perf_counter() - started_s)
        comm.barrier(f"start/{key}")
        started_s = time.perf_counter()
        step(x)
        times_s.append(time.perf_counter() - started_s)
    # Under load few take very long, and a step adds up many: there their mean counts.
    middle = statistics.mean if when == "loaded" else statistics.median
    mine = max(1e-6, middle(times_s) - middle(empty_s)) / chain
    return max(float(one) for one in comm.allgather_bytes(f"seconds/{key}", str(mine).encode()))


if __name__ == "__main__":
    main()
