"""Measures whole steps without exchanges, as many side by side as a plan has ranks.

Although they do not communicate, steps side by side are slower than one alone: they share cores, caches and memory, as
the ranks of a plan will. Each step runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whale import python
from whale.errors import ClusterError
from whale.ir.program import Program

ROUNDS, STEPS = 5, 5
WARM_STEPS = 3


def measure_step_seconds(runs: Sequence[Sequence[Program]]) -> list[float]:
    """Measures steps on random values; returns for each run the mean over its processes of their median seconds per
    step.

    Runs take turns, so that temporary disturbances of the machine affect all of them.

    Args:
      runs: the programs that run side by side, equally many in each run; a step begins when all processes have ended
          the step before.

    Raises:
      ClusterError: a process ended early; the error says why.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = []
        for number, programs in enumerate(zip(*runs, strict=True)):
            (folder / f"programs{number}").write_bytes(pickle.dumps(programs))
            command = python.module("whale.tools.profile.steps", str(folder / f"programs{number}"))
            errors = stack.enter_context((folder / f"errors{number}").open("w+"))
            process = subprocess.Popen(
                command,
                env=python.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
            stack.callback(_end, process)
            running.append((process, errors))
        for process, errors in running:
            _answer(process, errors)  # it is ready
        times_s: list[list[list[float]]] = [[] for _ in runs]
        for _ in range(ROUNDS):
            for number, found in enumerate(times_s):
                for step in range(1 + STEPS):
                    for process, _ in running:
                        assert process.stdin is not None
                        process.stdin.write(f"{number}\n")
                    took_s = [float(_answer(*one)) for one in running]
                    if step:  # the first step finds the caches filled by another program
                        found.append(took_s)
        return [statistics.mean(map(statistics.median, zip(*found))) for found in times_s]


def _answer(process: subprocess.Popen[str], errors: Any) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait()
        errors.seek(0)
        raise ClusterError(
            "a process that measures the script's step without exchanges ended early",
            given=python.last_lines(errors.read()),
            expected="a step that runs on random values",
            action="call `whale profile` without the script, which measures the machine alone",
        )
    return line


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait()
    process.stdout.close()


def main() -> None:
    """Runs one process of a measurement: for each program number on stdin, runs a step and prints its seconds."""
    from whale.distributed.gpus import await_gpus
    from whale.runtime.compile.measured_call import compile_whole_step

    calls = [compile_whole_step(program) for program in pickle.loads(Path(sys.argv[1]).read_bytes())]
    for call in calls:
        for _ in range(WARM_STEPS):
            call()
    print("ready", flush=True)
    for line in sys.stdin:
        start_s = time.perf_counter()
        calls[int(line)]()
        await_gpus()
        print(time.perf_counter() - start_s, flush=True)


if __name__ == "__main__":
    main()
