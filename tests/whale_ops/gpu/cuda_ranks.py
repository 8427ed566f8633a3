"""Processes of cuda_rank.py, which meet through this one. Needs no TensorFlow, MPI or pytest."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Ranks:
    """Processes of cuda_rank.py: with what, and where."""

    library: Path
    image: Path
    transport: str
    size: int
    gpus: int = 1
    variables: Sequence[Mapping[str, str]] = ()  # of each rank
    under: Sequence[str] = ()  # what runs it: compute-sanitizer

    @contextlib.contextmanager
    def started(self, mode: str = "", most_s: float = 30.0) -> Iterator[list[subprocess.Popen[str]]]:
        """The processes, which do not outlive the scope."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(self.size)]
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank, (_, theirs) in enumerate(pairs):
                worker = [sys.executable, "-m", "tests.whale_ops.gpu.cuda_rank"]
                numbers = [str(n) for n in (rank, self.size, rank % self.gpus, theirs.fileno())]
                process = subprocess.Popen(
                    [*self.under, *worker, str(self.library), str(self.image), self.transport, *numbers, mode],
                    cwd=ROOT,
                    env={**os.environ, **(self.variables[rank] if self.variables else {})},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    pass_fds=[theirs.fileno()],
                )
                processes.append(process)
                theirs.close()
            threading.Thread(target=relay, args=([ours for ours, _ in pairs], most_s), daemon=True).start()
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def run(self, mode: str = "", limit_s: float = 300.0) -> list[str]:
        """Returns what the ranks print."""
        with self.started(mode) as processes:
            return [process.communicate(timeout=limit_s)[0] for process in processes]

    def check(self) -> None:
        """Every kind of exchange is right on all of them."""
        assert self.run() == [f"rank {rank}: all right\n" for rank in range(self.size)]


def relay(ends: list[socket.socket], most_s: float) -> None:
    """Sends every rank what all ranks have sent, in rank order, until one of them is gone, or silent while others wait.

    Whale's own exchange takes this place in a run: it ends waiting as soon as it misses a rank.
    """
    with contextlib.suppress(OSError):
        while True:
            parts = []
            for end in ends:
                end.settimeout(most_s if parts else None)
                part = end.recv(1 << 16)  # ranks send small things, and wait for the answer
                if not part:
                    break
                parts.append(part)
            if len(parts) < len(ends):
                break
            for end in ends:
                end.sendall(b"".join(parts))
    for end in ends:
        end.close()
