"""Measures how long the host is busy with an exchange of GPUs, not waiting: ``python -m tests.host_gpu.host_time``.

Two ranks, threads of this process with a GPU of the host's each, add up 16 numbers through NCCL, in stream: 10,000
times, 100 in a call. Of each it is traced what this rank took from the kernel's call until it was told to be done, but
for waiting for its turn, which is the other rank's time too. The driver and NCCL are stand-ins, of which each call
takes a mutex and may wake a thread: how long the calls take is counted, too, in the mean.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.host_gpu.build import HostGpu, build_host_cuda

IN_A_CALL = 100


def measure(count: int, transport: str, driver: ctypes.CDLL) -> tuple[list[float], list[float], float]:
    """Returns microseconds of the rank's own, and those until it was its turn, of ``count`` exchanges of rank 0; and
    those in calls of the driver and of NCCL, in the mean of both ranks.
    """
    import tensorflow as tf

    from tests.whale_ops.gpu.opened import device_of, opened_ranks
    from whale_ops import device_library

    def open_device(comm: Any) -> None:
        device_of(device_library.PATH, transport, comm.rank, 1 << 20)(comm)

    with opened_ranks(2, open_device) as opened, tempfile.TemporaryDirectory() as folder:

        def body(rank: int) -> tf.Tensor:
            with tf.device(f"/GPU:{rank}"):
                x = tf.fill((16,), tf.constant(1.0 + rank))
                for turn in range(IN_A_CALL):
                    (x,) = opened.reduce(rank, [x * 0.5], f"x{turn}", in_stream=True)
                return x

        # Traced once, so that nothing but exchanges is under way between them.
        steps = [tf.function(functools.partial(body, rank)) for rank in range(2)]
        path = Path(folder, "trace")
        with path.open("wb") as file, ThreadPoolExecutor(2) as pool:

            def run() -> list[Any]:
                return [x.numpy() for x in pool.map(lambda step: step(), steps)]

            run()  # connects them
            opened.comms[0].trace_start(file.fileno())
            before_ns = driver.host_gpu_in_calls_ns()
            calls = [run() for _ in range(count // IN_A_CALL)]
            in_calls_ns = driver.host_gpu_in_calls_ns() - before_ns
            opened.comms[0].trace_stop()
        assert all(abs(float(x[0]) - 1.5) < 1e-6 for one in calls for x in one), "1 and 2 add up to 3, halved"
        events = [json.loads(line.rstrip(",\n")) for line in path.read_text().splitlines() if '"args":{"key"' in line]
        done = [one["args"] for one in events if one["args"]["key"] == "device/done in stream"]
        in_calls_us = in_calls_ns / 1e3 / (2 * len(calls) * IN_A_CALL)
        return [one["moving_us"] for one in done], [one["waiting_us"] for one in done], in_calls_us


def main() -> None:
    """Prints medians and the slowest of a hundred."""
    parser = argparse.ArgumentParser(prog="python -m tests.host_gpu.host_time")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--transport", default="nccl", choices=("nccl", "cuda-ipc"))
    asked = parser.parse_args()
    cuda = build_host_cuda()
    os.environ |= cuda.variables(*[HostGpu(late_us=0, name=f"GPU {rank}") for rank in range(2)])
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    from tests.host_gpu.on_host_gpus import take_host_gpus
    from whale_ops import device_library

    take_host_gpus()
    device_library.load_nccl()
    for rank in range(2):
        device_library.load_kernels(device_library.PATH, rank, cuda.image.read_bytes())
    driver = ctypes.CDLL(str(cuda.driver))
    driver.host_gpu_in_calls_ns.restype = ctypes.c_int64
    own_us, turn_us, in_calls_us = measure(asked.count, asked.transport, driver)
    hundredth = statistics.quantiles(own_us, n=100)[-1]
    print(
        f"{len(own_us)} exchanges through {asked.transport}: own time {statistics.median(own_us):.1f} us in the "
        f"median ({statistics.mean(own_us):.1f} in the mean, of which {in_calls_us:.1f} in calls of the stand-ins), "
        f"{hundredth:.1f} us the slowest of a hundred; until their turn {statistics.median(turn_us):.0f} us"
    )


if __name__ == "__main__":
    main()
