"""All-reduces between hosts, timed: what carries them is chosen by ``communication.between_hosts``.

    python -m tests.hosts.all_reduces [--mbit 1000] [--ranks 1] [--kb 1 256 16384] [--by mpi tcp]

Makes two hosts of namespaces with a link of so many 10^6 bits per second in each direction, and so many ranks on each.
Prints milliseconds of the slowest rank, median and least of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests import forkserver
from tests.hosts.hosts import HostLauncher, Hosts

_ROUNDS = ((4 << 10, 9), (128, 30), (0, 200))  # of what has so many KB at least
_LIMIT_S = 60.0


def measure(sizes_kb: list[int]) -> None:
    """Runs as a rank of `whale run`: rank 0 prints a line for each size."""
    import whale as wh
    from whale.runtime.context import require_current
    from whale_ops._native import HostOperation

    wh.init(solo=True)
    comm = require_current("a benchmark").comms[0]
    for kb in sizes_kb:
        given, total = np.ones(kb << 8, np.float32), np.zeros(kb << 8, np.float32)
        rounds, times_ms = next(count for least, count in _ROUNDS if kb >= least), []
        for _ in range(rounds + 2):  # the first ones connect, and fault memory in
            comm.barrier(f"start {kb}")
            started_s = time.perf_counter()
            HostOperation(
                comm.handle, "AllReduce", f"timed {kb}", dtype="float32", element_bytes=4, counts=[given.size],
                input_address=given.ctypes.data, output_address=total.ctypes.data, buffers=(given, total),
            ).wait(_LIMIT_S)  # fmt: skip
            mine_s = time.perf_counter() - started_s
            times_ms.append(1e3 * max(map(float, comm.allgather_bytes(f"took {kb}", repr(mine_s).encode()))))
        assert (total == comm.size).all()
        if comm.rank == 0:
            middle, least = statistics.median(times_ms[2:]), min(times_ms[2:])
            print(f"{kb:6d} KB  {middle:8.3f} ms  {least:8.3f} ms", flush=True)
    wh.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.all_reduces")
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--kb", type=int, nargs="+", default=[1, 16, 256, 1024, 16384])
    parser.add_argument("--by", nargs="+", default=["mpi", "tcp"])
    asked = parser.parse_args()
    forkserver.open_folder()
    try:
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder, Hosts(Path(folder), 2) as hosts:
            for name in hosts.names:
                hosts.shape(name, asked.mbit)
            launcher = HostLauncher(hosts, python=forkserver.warm_python())
            where = ["-np", str(2 * asked.ranks), "--hosts", f"h0:{asked.ranks},h1:{asked.ranks}"]
            for by in asked.by:
                launcher.environment["WHALE_COMMUNICATION_BETWEEN_HOSTS"] = by
                done = launcher.run(*where, __file__, *map(str, asked.kb), timeout_s=300.0)
                print(f"by {by}:", done.stdout if done.returncode == 0 else done.stdout + done.stderr, sep="\n")
    finally:
        forkserver.close_folder()


if __name__ == "__main__":
    main() if not sys.argv[1:] or sys.argv[1].startswith("--") else measure(list(map(int, sys.argv[1:])))
