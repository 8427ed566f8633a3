"""Exchanges between hosts, timed: what carries them is chosen by ``communication.between_hosts``.

    python -m tests.hosts.exchanges [--mbit 1000] [--delay-ms 0] [--ranks 1] [--kb 1 256 16384] [--by mpi tcp]
                                    [--kinds AllReduce AllGather ReduceScatter AllToAll]

Makes two hosts of namespaces with a link of so many 10^6 bits per second in each direction, and so many ranks on each.
Prints milliseconds of the slowest rank, median and least of the rounds, and how many times the tensor's bytes left the
first host. The tensor is the one that is summed, gathered, or scattered, or what a rank sends of an all-to-all.
"""

from __future__ import annotations

import argparse
import itertools
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
_KINDS = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")


def measure(kinds: list[str], sizes_kb: list[int]) -> None:
    """Runs as a rank of `whale run`: rank 0 prints a line for each kind and size."""
    import whale as wh
    from whale.runtime.context import require_current
    from whale_ops import Communicator
    from whale_ops._native import HostOperation

    wh.init(solo=True)
    comm: Communicator = require_current("a benchmark").comms[0]
    for kind, kb in itertools.product(kinds, sizes_kb):
        whole = (kb << 8) // comm.size * comm.size
        part = whole // comm.size
        given = np.ones(part if kind == "AllGather" else whole, np.float32)
        found = np.zeros(part if kind == "ReduceScatter" else whole, np.float32)
        counts = [whole] if kind == "AllReduce" else [part] * comm.size
        rounds, times_ms, left_bytes = next(count for least, count in _ROUNDS if kb >= least), [], list[int]()
        for _ in range(rounds + 2):  # the first ones connect, and fault memory in
            comm.barrier(f"start {kind} {kb}")
            before, started_s = _count_left(), time.perf_counter()
            HostOperation(
                comm.handle, kind, f"timed {kind} {kb}", dtype="float32", element_bytes=4, counts=counts,
                recv_counts=counts if kind == "AllToAll" else (), even=True,
                input_address=given.ctypes.data, output_address=found.ctypes.data, buffers=(given, found),
            ).wait(_LIMIT_S)  # fmt: skip
            mine_s = time.perf_counter() - started_s
            said = comm.allgather_bytes(f"took {kind} {kb}", repr(mine_s).encode())
            left_bytes.append(_count_left() - before)  # of all ranks of the host, and acknowledged
            times_ms.append(1e3 * max(map(float, said)))
        assert (found == (comm.size if kind in ("AllReduce", "ReduceScatter") else 1)).all()
        if comm.rank == 0:
            middle, least = statistics.median(times_ms[2:]), min(times_ms[2:])
            times = statistics.median(left_bytes) / (4 * whole)
            print(f"{kind:13} {kb:6d} KB  {middle:8.3f} ms  {least:8.3f} ms  {times:5.2f}", flush=True)
    wh.shutdown()


def _count_left() -> int:
    """Returns the bytes that have left this host over its link."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.exchanges")
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of one way between the hosts")
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--kb", type=int, nargs="+", default=[1, 16, 256, 1024, 16384])
    parser.add_argument("--kinds", nargs="+", default=["AllReduce"], choices=_KINDS)
    parser.add_argument("--by", nargs="+", default=["mpi", "tcp"])
    asked = parser.parse_args()
    forkserver.open_folder()
    try:
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder, Hosts(Path(folder), 2) as hosts:
            for name in hosts.names:
                hosts.shape(name, asked.mbit)
            hosts.delay(asked.delay_ms)
            launcher = HostLauncher(hosts, python=forkserver.warm_python())
            where = ["-np", str(2 * asked.ranks), "--hosts", f"h0:{asked.ranks},h1:{asked.ranks}"]
            for by in asked.by:
                launcher.environment["WHALE_COMMUNICATION_BETWEEN_HOSTS"] = by
                done = launcher.run(*where, __file__, ",".join(asked.kinds), *map(str, asked.kb), timeout_s=300.0)
                print(f"by {by}:", done.stdout if done.returncode == 0 else done.stdout + done.stderr, sep="\n")
    finally:
        forkserver.close_folder()


if __name__ == "__main__":
    main() if not sys.argv[1:] or sys.argv[1].startswith("--") else measure(
        sys.argv[1].split(","), list(map(int, sys.argv[2:]))
    )
