"""One rank of a run whose step times and memory are measured; see benchmarks.groups for how it is asked."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.groups import Answer, serve

RECORDED_STEPS = 100  # some orders of a step, and with them its largest peak, are rare


def main() -> None:
    """Serves one plan of one workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("workload")
    options = parser.parse_args()
    serve(int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")), lambda: _start(options.kind, options.workload))


def _start(kind_name: str, workload_name: str) -> tuple[Answer, Callable[[], None]]:
    """Builds the program and runs it warm: (what runs steps and says what they took, an orderly end)."""
    import whale as wh
    from benchmarks.predictions import allocations
    from benchmarks.predictions.models import WORKLOADS, make_step
    from benchmarks.predictions.plans import KINDS
    from whale_ops.memory import read_memory, reset_peak

    workload, kind = WORKLOADS[workload_name], KINDS[kind_name]
    wh.init(kind.configuration(workload.batch))
    with allocations.recorded() as asked:
        step, batch = make_step(workload, wh.function, kind.scope())
        for _ in range(4):
            step(*batch)
        for _ in range(RECORDED_STEPS):
            allocations.step(lambda: float(step(*batch)))
    for _ in range(2):
        step(*batch)

    def answer(steps: int) -> dict[str, Any]:
        cpu_s = time.process_time()
        gc.collect()
        live_bytes = read_memory().live_bytes
        reset_peak()
        # The ranks have stood still, one longer than the other: their first step waits for the last to go on.
        loss = float(step(*batch))
        times_s = []
        for _ in range(steps):
            start_s = time.perf_counter()
            loss = float(step(*batch))
            times_s.append(time.perf_counter() - start_s)
        cpu_s = time.process_time() - cpu_s
        peak_bytes = read_memory().peak_bytes
        return {
            "times_s": times_s, "cpu_s": cpu_s, "loss": loss,
            "asked_bytes": max(one.most_bytes for one in asked), "live_bytes": live_bytes, "peak_bytes": peak_bytes,
        }  # fmt: skip

    return answer, wh.shutdown


if __name__ == "__main__":
    main()
