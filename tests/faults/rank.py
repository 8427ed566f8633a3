"""The script of one rank in a run with a fault: works until something happens, and notes when, and what it was told.

    rank.py <work> <kind> <victim> <after s> <folder>

<work> is "steps" (train steps of TensorFlow), "exchange" (operations of the core, without TensorFlow), or the value of
communication.backend with which GPUs that are the host's carry out what steps exchange.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from whale.errors import CommError


class Steps:
    """A linear model that learns."""

    def __init__(self, backend: str = "whale") -> None:
        import tensorflow as tf

        import whale as wh
        from tests.host_gpu.on_host_gpus import take_host_gpus

        if backend != "whale":
            take_host_gpus()
        wh.init(wh.Config({"communication.backend": backend}))
        self.rank = wh.rank()
        self._x, self._y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
        w = tf.Variable(np.full((3, 1), 0.5, np.float32), name="w")

        @wh.function
        def descend(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.matmul(tf.cast(x, w.dtype), w) - y))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        @wh.function
        def other(x):
            return tf.reduce_sum(tf.matmul(x, w))

        self._descend, self._other = descend, other

    def work(self) -> None:
        float(self._descend(self._x, self._y))

    def differ(self, kind: str) -> None:
        if kind == "shape":
            self._descend(self._x[:6], self._y[:6])
        elif kind == "dtype":
            self._descend(self._x.astype(np.float64), self._y)
        else:
            self._other(self._x)


class Exchange:
    """All-reduces of a small and a large array, one after the other."""

    def __init__(self) -> None:
        import whale_ops
        from whale.config import Config
        from whale.distributed.watch import LauncherWatch

        config = Config()
        watch = LauncherWatch(config)
        self._comm = whale_ops.connect_mpi("faults", share_memory=config["communication.shared_memory"] != "none")
        watch.look_after(self._comm)
        self.rank = self._comm.rank

    def work(self) -> None:
        for key, size in (("small", 6), ("large", 300_000)):
            self._run("AllReduce", key, np.ones(size, np.float32))

    def differ(self, kind: str) -> None:
        if kind == "op":
            self._run("AllGather", "small", np.ones(6, np.float32))
        else:
            self._run("AllReduce", "small", np.ones(*((5, np.float32) if kind == "shape" else (6, np.float64))))

    def _run(self, kind: str, key: str, data: np.ndarray) -> None:
        from whale_ops import _native

        size = self._comm.size
        result = np.empty(len(data) * (size if kind == "AllGather" else 1), data.dtype)
        operation = _native.HostOperation(
            self._comm.handle,
            kind,
            key,
            dtype=data.dtype.name,
            element_bytes=data.itemsize,
            text=str(list(data.shape)),
            input_address=data.ctypes.data,
            output_address=result.ctypes.data,
            counts=[len(data)] * (size if kind == "AllGather" else 1),
            buffers=(data, result),
        )
        operation.wait(3600)


def main() -> None:
    work, kind, victim, after_s, folder = sys.argv[1:]
    worker = Exchange() if work == "exchange" else Steps() if work == "steps" else Steps(work)

    def note(what: str, **facts: object) -> None:
        part = Path(folder, f"{what}.{worker.rank}.part")
        part.write_text(json.dumps(facts | {"time_s": time.monotonic()}))
        part.rename(part.with_suffix(""))

    segments = os.environ["OMPI_MCA_btl_sm_backing_directory"]
    note("ready", pid=os.getpid(), segments=segments, used=len({*os.listdir(segments)} - {"python"}))

    def end(number: int, frame: object) -> None:
        # Python gets here only while no step of it is blocked: this rank was tracing or compiling.
        note("busy")
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    # The others end their processes from outside.
    acts = worker.rank == int(victim) and kind not in ("kill", "freeze")
    start_s = time.monotonic()
    try:
        while True:
            worker.work()
            if acts and time.monotonic() >= start_s + float(after_s):
                note("fault")
                if kind == "raise":
                    raise ValueError("this batch is bad")
                worker.differ(kind)
    except CommError as error:
        note("error", text=str(error))
        raise


main()
