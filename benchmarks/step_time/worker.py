"""One process of a benchmark: builds its program, then runs as many steps as it is asked for."""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.groups import Answer, serve

PEERS = ("torch", "torch-compiled", "jax")  # without TensorFlow and Whale: another Python runs them
CONFIGURATIONS = ("plain", "xla", "mirrored", "horovod", "whale", "whale-xla", "whale-split", "whale-horovod", *PEERS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("workload")
    parser.add_argument("--cores", default="", help="cores of each rank: 0,1 for two ranks of one core; empty = all")
    options = parser.parse_args()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    cores = [int(core) for core in options.cores.split(",") if core]
    if cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})

    def start() -> tuple[Answer, Callable[[], None]]:
        step, end, counters = _start(options.configuration, options.workload, rank)
        step()

        def answer(steps: int) -> dict[str, Any]:
            times_s, before = [], time.process_time()
            for _ in range(steps):
                start_s = time.perf_counter()
                loss = step()
                times_s.append(time.perf_counter() - start_s)
            cpu_s = (time.process_time() - before) / steps
            return {"times_s": times_s, "cpu_s": cpu_s, "loss": loss, "counters": counters()}

        return answer, end

    serve(rank, start)


def _start(
    configuration: str, name: str, rank: int
) -> tuple[Callable[[], float], Callable[[], None], Callable[[], Any]]:
    """(one step, orderly end, communication counters)."""
    from benchmarks.step_time.models import WORKLOADS

    workload = WORKLOADS[name]
    if configuration in PEERS:
        from benchmarks.step_time.peers import jax_step, torch_step

        ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        compiled = configuration == "torch-compiled"
        is_jax = configuration == "jax"
        step = jax_step(workload) if is_jax else torch_step(name, workload, rank, ranks, compiled)
        return step, lambda: None, dict
    ports = os.environ.get("BENCH_PORTS", "").split()
    if configuration == "mirrored":  # read when TensorFlow starts
        workers = [f"127.0.0.1:{port}" for port in ports]
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(task)
    import tensorflow as tf

    from benchmarks.step_time.training import make_mirrored_step, make_step

    if configuration in ("plain", "xla"):
        function = functools.partial(tf.function, jit_compile=True) if configuration == "xla" else tf.function
        return make_step(workload, function), lambda: None, dict
    if configuration == "mirrored":
        # Its threads wait for each other when a worker leaves in order.
        return make_mirrored_step(workload, rank, len(ports)), lambda: os._exit(0), dict
    if configuration == "horovod":
        import horovod.tensorflow as hvd

        hvd.init()
        rows = workload.batch // hvd.size()
        step = make_step(
            workload,
            tf.function,
            hvd.DistributedGradientTape,
            slice(hvd.rank() * rows, (hvd.rank() + 1) * rows),
            lambda variables: hvd.broadcast_variables(variables, root_rank=0),
        )
        return step, hvd.shutdown, dict

    import whale as wh
    from whale.runtime.context import require_current

    wh.init({"communication.backend": "horovod"} if configuration == "whale-horovod" else {})

    def counters() -> dict[str, Any]:
        """Sums over the run, by kind: calls, wire bytes, seconds from ready to done."""
        found: dict[str, Any] = {}
        for comm in require_current("the benchmark").comms:
            for counter in comm.counters():
                row = found.setdefault(counter.kind, [0, 0, 0.0])
                row[0] += counter.calls
                row[1] += counter.wire_bytes
                row[2] += counter.seconds
        return found

    function = functools.partial(wh.function, jit_compile=True) if configuration == "whale-xla" else wh.function
    step = make_step(workload, function, scope=wh.split if configuration == "whale-split" else wh.replica)
    return step, wh.shutdown, counters


if __name__ == "__main__":
    main()
