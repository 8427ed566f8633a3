"""Seconds of whole steps on one device, as many copies of them side by side as a plan has ranks.

Copies send nothing to each other, and yet they are slower than one: they share cores, caches and memory, as the ranks
of a plan will. Each is a process of its own.
"""

from __future__ import annotations

import contextlib
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whale.errors import ClusterError
from whale.ir.program import Program

ROUNDS, STEPS = 5, 5
WARM_STEPS = 3


def step_seconds(programs: Sequence[Program], copies: int) -> list[float]:
    """The median seconds of a step of each program while so many copies run at once, on random values.

    The programs take turns, so that what disturbs the machine for a while disturbs all of them.

    Raises:
      ClusterError: a copy ended early; says why.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "programs").write_bytes(pickle.dumps(list(programs)))
        command = [sys.executable, "-m", "whale.runtime.measure_steps", str(folder / "programs")]
        running = []
        for number in range(copies):
            errors = stack.enter_context((folder / f"errors{number}").open("w+"))
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
            )
            stack.callback(_end, process)
            running.append((process, errors))
        for process, errors in running:
            _answer(process, errors)  # it is ready
        times_s: list[list[float]] = [[] for _ in programs]
        for _ in range(ROUNDS):
            for number, found in enumerate(times_s):
                for process, _ in running:
                    assert process.stdin is not None
                    process.stdin.write(f"{number}\n")
                found += [float(one) for copy in running for one in _answer(*copy).split()]
        return [statistics.median(found) for found in times_s]


def _answer(process: subprocess.Popen[str], errors: Any) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait()
        errors.seek(0)
        raise ClusterError(
            "a step on one device could not be measured",
            given=errors.read()[-500:],
            action="leave the script out: `whale profile` without it measures the machine",
        )
    return line


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait()
    process.stdout.close()


def main() -> None:
    """One copy: told a program's number, it runs some steps of it and prints their seconds."""
    from whale.runtime.measure import whole_step

    calls = [whole_step(program) for program in pickle.loads(Path(sys.argv[1]).read_bytes())]
    for call in calls:
        for _ in range(WARM_STEPS):
            call()
    print("ready", flush=True)
    for line in sys.stdin:
        print(*_times_s(calls[int(line)]), flush=True)


def _times_s(call: Callable[[], Any]) -> list[float]:
    call()  # finds its variables where the last program's lay in the caches; the copies do not begin together
    found = []
    for _ in range(STEPS):
        start_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - start_s)
    return found


if __name__ == "__main__":
    main()
