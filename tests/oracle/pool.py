"""Worker processes, forked where there is a fork server: starting TensorFlow takes longer than most cases."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.forkserver import plain_python, warm_python

ROOT = Path(__file__).resolve().parents[2]
REFERENCE, SPREAD = "tests.oracle.reference", "tests.oracle.spread"


class WorkerFailure(AssertionError):
    """A worker raised, died, or took too long; the text is what it said."""


def flavours() -> tuple[str, ...]:
    """The Keras versions that worker processes can have: that of TensorFlow first."""
    if _native_keras() == "keras2":
        return ("keras2",)
    return ("keras3", "keras2") if importlib.util.find_spec("tf_keras") else ("keras3",)


def _native_keras() -> str:
    return "keras" + importlib.metadata.version("keras").partition(".")[0]


class Worker:
    """One worker process: the reference's is forked from one that has not imported Whale."""

    def __init__(self, module: str, flavour: str, log: Path) -> None:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("WHALE_")}
        # The kernels that TensorFlow chooses by itself. With oneDNN on a processor without AVX-512, strided
        # convolutions' float32 filter gradients are wrong now and then, in TensorFlow alone, too.
        environment.pop("TF_ENABLE_ONEDNN_OPTS", None)
        environment |= {
            "TF_USE_LEGACY_KERAS": str(int(flavour != _native_keras())),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [plain_python() if module == REFERENCE else warm_python(), "-m", module],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    def ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a job and waits for the answer.

        Raises:
            WorkerFailure: the job raised, the process ended, or the time is over (the process is then killed).
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            ready = select.select([process.stdout], [], [], timeout_s)[0]
        except BrokenPipeError:
            ready = [process.stdout]
        line = process.stdout.readline() if ready else b""
        if not line:
            if not ready:
                # The worker writes its stack to the log; a second is plenty.
                process.send_signal(signal.SIGUSR1)
                time.sleep(1.0)
            self.close()
            said = self._log.read_text(errors="replace")[-4000:]
            why = f"ended with code {process.returncode}" if ready else f"did not answer within {timeout_s:g} s"
            raise WorkerFailure(f"the worker {why}, asked for {job}; its last output:\n{said}")
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise WorkerFailure(f"asked for {job}:\n{answer['failure']}")
        return answer

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


class Pool:
    """The workers of one test session, and the reference results so far.

    At most one reference and one distributed worker run at a time, both with the same Keras: memory.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="whale-oracle-")
        self._workers: dict[tuple[str, str], Worker] = {}
        self._references: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        self._timeout_s = timeout_s

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers.values():
            worker.close()
        self._folder.cleanup()

    def reference(self, flavour: str, case: str, dtype: str, optimizer: str) -> dict[str, Any]:
        """What one device computes (`path` of the values beside what the worker returned); computed once."""
        key = (flavour, case, dtype, optimizer)
        if key not in self._references:
            path = str(Path(self._folder.name, "-".join(key) + ".npz"))
            job = {"case": case, "dtype": dtype, "optimizer": optimizer, "path": path}
            self._references[key] = self._ask(REFERENCE, flavour, job) | {"path": path}
        return self._references[key]

    def spread(self, flavour: str, job: dict[str, Any]) -> dict[str, Any]:
        """A distributed run (`path` of the values beside what the worker returned)."""
        path = str(Path(self._folder.name, "spread.npz"))
        return self._ask(SPREAD, flavour, job | {"path": path}) | {"path": path}

    def _ask(self, module: str, flavour: str, job: dict[str, Any]) -> dict[str, Any]:
        for key in [key for key, worker in self._workers.items() if key[1] != flavour or not worker.alive]:
            self._workers.pop(key).close()
        if (module, flavour) not in self._workers:
            log = Path(self._folder.name, f"{module}-{flavour}.log")
            self._workers[module, flavour] = Worker(module, flavour, log)
        return self._workers[module, flavour].ask(job, self._timeout_s)
