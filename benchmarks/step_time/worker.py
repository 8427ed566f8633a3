"""One process of a benchmark: builds its program, then runs as many steps as it is asked for."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.groups import Answer, serve

CONFIGURATIONS = ("plain", "horovod", "whale", "whale-split", "whale-horovod")


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
        step, end, counters = _start(options.configuration, options.workload)
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


def _start(configuration: str, name: str) -> tuple[Callable[[], float], Callable[[], None], Callable[[], Any]]:
    """(one step, orderly end, communication counters)."""
    import tensorflow as tf

    from benchmarks.step_time.models import WORKLOADS, make_step

    workload = WORKLOADS[name]
    if configuration == "plain":
        return make_step(workload, tf.function), lambda: None, dict
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
    from whale.runtime.run.context import current

    wh.init({"communication.backend": "horovod"} if configuration == "whale-horovod" else {})

    def counters() -> dict[str, Any]:
        """Sums over the run, by kind: calls, wire bytes, seconds from ready to done."""
        found: dict[str, Any] = {}
        for comm in current("the benchmark").comms:
            for counter in comm.counters():
                row = found.setdefault(counter.kind, [0, 0, 0.0])
                row[0] += counter.calls
                row[1] += counter.wire_bytes
                row[2] += counter.seconds
        return found

    step = make_step(workload, wh.function, scope=wh.split if configuration == "whale-split" else wh.replica)
    return step, wh.shutdown, counters


if __name__ == "__main__":
    main()
