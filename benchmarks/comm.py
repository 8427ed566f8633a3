"""Latency and bandwidth of all-reduce between processes, through a TensorFlow graph.

    whale run -np 2 benchmarks/comm.py [--mpi]      (or mpirun -np 2 python benchmarks/comm.py)

Prints, for 1 KB to 64 MB of float32, the median time of one all-reduce on rank 0, the tensor's bytes per second and the
bytes per second that rank 0 sent.
"""

from __future__ import annotations

import argparse
import statistics
import time

import tensorflow as tf

import whale_ops

SIZES_BYTES = [4**k * 1024 for k in range(9)]
SECONDS_PER_SIZE = 1.0


def main() -> None:
    """Measures every size and prints one row each on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpi", action="store_true", help="through MPI within a machine as well")
    communicator = whale_ops.mpi("benchmark", share_memory=not parser.parse_args().mpi)
    ops = whale_ops.ops()

    @tf.function(reduce_retracing=True)
    def step(key: str, x: tf.Tensor) -> tf.Tensor:
        handle = ops.whale_communicator(communicator=communicator.name)
        return ops.whale_all_reduce(handle, [x], key=key)[0]

    if communicator.rank == 0:
        print(f"{'bytes':>10} {'median_us':>10} {'tensor_MB/s':>12} {'wire_MB/s':>10} {'calls':>6}")
    for size_bytes in SIZES_BYTES:
        key, x = f"{size_bytes} bytes", tf.ones(size_bytes // 4)
        for _ in range(3):  # the first call traces the function
            started_s = time.perf_counter()
            step(key, x)
            first_s = time.perf_counter() - started_s
        # All ranks make the same number of calls: rank 0 decides.
        proposal = b"%d" % max(5, min(500, int(SECONDS_PER_SIZE / first_s)))
        calls = int(communicator.broadcast_bytes(key, proposal if communicator.rank == 0 else None))
        times_s = []
        for _ in range(calls):
            started_s = time.perf_counter()
            step(key, x)
            times_s.append(time.perf_counter() - started_s)
        median_s = statistics.median(times_s)
        counter = next(c for c in communicator.counters() if c.key == key and c.kind == "AllReduce")
        wire = counter.wire_bytes / counter.calls / median_s / 1e6
        if communicator.rank == 0:
            rate = size_bytes / median_s / 1e6
            print(f"{size_bytes:>10} {median_s * 1e6:>10.1f} {rate:>12.1f} {wire:>10.1f} {calls:>6}", flush=True)
    communicator.leave()


if __name__ == "__main__":
    main()
