"""One fault in one run: what is done to which rank, and what must follow."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.host_gpu.build import HostGpu, build_host_cuda, build_plugin
from tests.launcher.helpers import PATIENT, ROOT, Launcher

# Seconds from the fault to the error on every other rank, on a machine that does nothing else.
LIMITS_S = {"kill": 1.0, "freeze": 5.0, "raise": 1.0, "shape": 2.0, "dtype": 2.0, "op": 2.0}
TRANSPORTS = ("memory", "mpi")
DEVICES = ("cuda-ipc", "pinned", "nccl")  # between GPUs that are the host's
_END_S = 60.0  # from the fault to the end of `whale run`
_START_S = 240.0  # a loaded machine may take long to start ranks
# What an error must say beside the rank: the operation that waited, or what differs.
_OPERATION = r"(waited for it in|was in|can no longer run) \S+"
_FACTS = {
    ("steps", "kill"): r"was killed by SIGKILL.*" + _OPERATION,
    ("steps", "freeze"): r"is frozen.*" + _OPERATION,
    ("steps", "raise"): r"ValueError: this batch is bad",
    ("steps", "shape"): r" in .*descend.*\[6,3\]",
    ("steps", "dtype"): r" in .*descend.*float64\[8,3\]",
    ("steps", "op"): r" in .*`other`",
    ("exchange", "kill"): r"was killed by SIGKILL.*" + _OPERATION,
    ("exchange", "freeze"): r"is frozen.*" + _OPERATION,
    ("exchange", "raise"): r"ValueError: this batch is bad.*" + _OPERATION,
    ("exchange", "shape"): r"'small'.*\[[56]\].*\[[56]\]",
    ("exchange", "dtype"): r"'small'.*float(32|64).*float(32|64)",
    ("exchange", "op"): r"'small'.*All(Gather|Reduce).*All(Gather|Reduce)",
}


@dataclass(frozen=True)
class Trial:
    """A fault: its kind (of `LIMITS_S`), the rank that has it, and when, in seconds after the ranks are connected.

    ``work`` is of rank.py: "steps", "exchange", or one of ``DEVICES``: steps that exchange through devices so.
    ``transport`` is how the ranks exchange data: of ``TRANSPORTS``, or "hosts": two emulated hosts.
    """

    work: str
    kind: str
    size: int
    victim: int
    after_s: float
    transport: str = "memory"


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        seconds: from the fault to the last rank's error, if there was one.
        problems: everything that is not as it must be.
        busy: ranks that were ended while they traced or compiled, with no step blocked that could have an error.
    """

    seconds: float | None
    problems: tuple[str, ...]
    busy: int = 0


def run(trial: Trial, folder: Path, limits_s: Mapping[str, float] | None = LIMITS_S) -> Outcome:
    """Makes the run and the fault in an empty folder. Returns once all is over, or killed.

    Args:
        trial: what to do.
        folder: for what the ranks write.
        limits_s: how long the errors may take, by kind of fault; a later one is a problem. None: as long as they
            like, and so may the ranks then, which `whale run` does not end before they have had their errors.
    """
    launcher = Launcher(folder)
    launcher.settings = PATIENT if limits_s is None else {}
    launcher.environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    launcher.environment["WHALE_COMMUNICATION_SHARED_MEMORY"] = "none" if trial.transport == "mpi" else "tensors"
    if trial.transport == "hosts":
        launcher.environment["WHALE_DEBUG_EMULATE_NETWORK"] = f"hosts={trial.size // 2}+{trial.size // 2}"
        launcher.environment["WHALE_COMMUNICATION_ALGORITHM"] = "hierarchical"
    script = str(ROOT / "tests" / "faults" / "rank.py")
    facts = [trial.work, trial.kind, str(trial.victim), str(trial.after_s), str(folder)]
    if trial.work in DEVICES:
        build_plugin()
        del launcher.environment["CUDA_VISIBLE_DEVICES"]
        gpus = [HostGpu(name=f"GPU {rank}") for rank in range(trial.size)]
        launcher.environment |= build_host_cuda().variables(*gpus)
    problems: list[str] = []
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            launcher.command("-np", str(trial.size), script, *facts),
            env=launcher.environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            ready = _notes(folder, "ready", range(trial.size), process, _START_S)
            fault_s = _make_fault(trial, ready, folder, process)
            process.wait(max(0.1, fault_s + _END_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            problems.append(f"the run has not ended {_END_S:g} s after the fault")
        except TimeoutError as error:
            return Outcome(None, (str(error), *_left(launcher)))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    problems += _left(launcher)
    if not all(note["used"] for note in ready.values()):
        problems.append("no shared memory was used: that none is left says nothing")
    if any(os.path.exists(note["segments"]) for note in ready.values()):
        problems.append("a shared-memory segment is left")
    seconds, busy = 0.0, 0
    for rank in set(range(trial.size)) - {trial.victim}:
        path = folder / f"error.{rank}"
        if not path.exists():
            if (folder / f"busy.{rank}").exists():
                busy += 1
            else:
                problems.append(f"rank {rank} had no CommError")
            continue
        error = json.loads(path.read_text())
        seconds = max(seconds, error["time_s"] - fault_s)
        problems += _wrong(trial, rank, error["text"])
    if limits_s is not None and seconds > limits_s[trial.kind]:
        problems.append(f"{seconds:.2f} s until the last error, limit {limits_s[trial.kind]:g} s")
    last = (folder / "log").read_text().strip().rpartition("\n")[2]
    if trial.kind in ("kill", "freeze", "raise") and not last.startswith(f"whale run: rank {trial.victim} "):
        problems.append(f"whale run ends with {last!r}")
    return Outcome(seconds if busy < trial.size - 1 else None, tuple(problems), busy)


def _make_fault(trial: Trial, ready: dict[int, Any], folder: Path, process: subprocess.Popen[Any]) -> float:
    """Returns when the fault was made, on the monotonic clock of this host."""
    if trial.kind in ("kill", "freeze"):
        time.sleep(trial.after_s)
        fault_s = time.monotonic()
        os.kill(ready[trial.victim]["pid"], signal.SIGKILL if trial.kind == "kill" else signal.SIGSTOP)
        return fault_s
    note = _notes(folder, "fault", [trial.victim], process, _START_S)
    return note[trial.victim]["time_s"]


def _notes(folder: Path, what: str, of: Any, process: subprocess.Popen[Any], within_s: float) -> dict[int, Any]:
    deadline_s = time.monotonic() + within_s
    while not all((folder / f"{what}.{rank}").exists() for rank in of):
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise TimeoutError(f"the ranks did not get to {what!r}: {(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.02)
    return {rank: json.loads((folder / f"{what}.{rank}").read_text()) for rank in of}


def _wrong(trial: Trial, rank: int, text: str) -> list[str]:
    if not re.search(rf"\brank {trial.victim}\b", text):
        return [f"rank {rank} is not told of rank {trial.victim}: {text}"]
    work = "steps" if trial.work in DEVICES else trial.work
    if not re.search(_FACTS[work, trial.kind], text, re.DOTALL):
        return [f"rank {rank} is not told what happened: {text}"]
    return []


def _left(launcher: Launcher) -> list[str]:
    return [f"a process is left: {line}" for line in launcher.left_behind()]
