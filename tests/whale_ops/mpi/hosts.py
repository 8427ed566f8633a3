"""Collectives over several hosts, which are network namespaces of this machine. Needs root, ip and tc.

    python -m tests.whale_ops.mpi.hosts [--hosts 2] [--ranks 2] [--mbit 1000] [--rounds 7]

Every host has a link of --mbit (10^6 bits per second) in each direction to a bridge, and --ranks ranks. Open MPI speaks
TCP between the hosts; shared memory is used within them only. First every collective is compared with numpy and orders
of operations differ between the ranks, for all-reduces by "hierarchical", by "leader" and by what is chosen. Then
all-reduces are timed (the slowest rank, median of the rounds), with the bytes that the kernel saw leave the first host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import whale_ops
from tests.whale_ops import harness
from tests.whale_ops.core import orders
from tests.whale_ops.mpi import mpi_worker
from whale.launcher.mpirun import find_mpirun

_ROOT = Path(__file__).resolve().parents[3]
_ALGORITHMS = ("auto", "direct", "pairwise", "ring", "halving-doubling", "leader", "hierarchical")
_SIZES_BYTES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
_NETWORK = "10.213.0"
# What mpirun starts instead of ssh: the command that is to run on the host with that address, as that host.
_AGENT = """#!/bin/sh
while :; do case "$1" in {network}.*) break;; esac; shift; done
host={prefix}${{1##*.}}; shift
exec ip netns exec $host unshare --uts sh -c 'hostname '$host'; exec sh -c "$0"' "$*"
"""


def _do(line: str) -> None:
    subprocess.run(line.split(), check=True)


@contextmanager
def namespaces(count: int, mbit: int) -> Iterator[str]:
    """Makes the hosts 10.213.0.1, .2, ... and a bridge .254 on this side; yields their names' common prefix."""
    prefix = f"wh{os.getpid() % 100_000}-"
    bridge = f"{prefix}br"
    try:
        _do(f"ip link add {bridge} type bridge")
        _do(f"ip addr add {_NETWORK}.254/24 dev {bridge}")
        _do(f"ip link set {bridge} up")
        for number in range(1, count + 1):
            host, port = f"{prefix}{number}", f"{prefix}v{number}"
            shape = f"root tbf rate {mbit}mbit burst 256kb latency 100ms"
            _do(f"ip netns add {host}")
            _do(f"ip link add {port} type veth peer name eth0 netns {host}")
            _do(f"ip link set {port} master {bridge} up")
            _do(f"ip -n {host} addr add {_NETWORK}.{number}/24 dev eth0")
            _do(f"ip -n {host} link set eth0 up")
            _do(f"ip -n {host} link set lo up")
            _do(f"ip netns exec {host} tc qdisc add dev eth0 {shape}")
            _do(f"tc qdisc add dev {port} {shape}")
        yield prefix
    finally:
        for number in range(1, count + 1):
            subprocess.run(["ip", "netns", "del", f"{prefix}{number}"], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", bridge], stderr=subprocess.DEVNULL, check=False)


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def _measure(communicator: whale_ops.Communicator, algorithm: str, size_bytes: int, rounds: int) -> str:
    communicator.set_algorithm(algorithm)
    count = size_bytes // 4
    data = np.ones(count, np.float32)
    case = harness.all_reduce("timed", [data] * communicator.size)
    seconds = []
    for number in range(rounds + 1):
        communicator.barrier()
        before, started = _sent_bytes(), time.monotonic()
        case.start(communicator).wait(harness.TIMEOUT_S)
        took = time.monotonic() - started
        slowest = max(map(float, communicator.allgather_bytes("took", repr(took).encode())))
        if number > 0:  # the first one connects and faults in
            seconds.append(slowest)
    sent = _sent_bytes() - before
    assert (case.outputs[communicator.rank] == communicator.size).all()
    return f"{statistics.median(seconds) * 1e3:9.2f} ms {sent / 1e6:8.2f} MB"


def rank(options: argparse.Namespace) -> None:
    communicator = whale_ops.connect_mpi("hosts", hosts=[options.ranks] * options.hosts)
    names = communicator.allgather_bytes("hosts", os.uname().nodename.encode())
    assert len(set(names)) == options.hosts, names
    for algorithm in ("hierarchical", "leader", "auto"):
        communicator.set_algorithm(algorithm)
        assert mpi_worker.values(communicator) == "values agree"
        orders.run(communicator, 5, seed=4)
    if communicator.rank == 0:
        ranks = ", ".join(name.decode() for name in names)
        print(f"collectives agree with numpy on all ranks; hosts of the ranks: {ranks}", flush=True)
    for size_bytes in _SIZES_BYTES:
        for algorithm in _ALGORITHMS:
            line = _measure(communicator, algorithm, size_bytes, options.rounds)
            if communicator.rank == 0:
                print(f"{size_bytes >> 10:6d} KB  {algorithm:17} {line}", flush=True)
    assert communicator.leave(30)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.whale_ops.mpi.hosts", description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--mbit", type=int, default=1000, help="of each host's link, 10^6 bits per second")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", action="store_true", help="be one of the ranks; mpirun says this")
    options = parser.parse_args()
    if options.rank:
        return rank(options)
    with namespaces(options.hosts, options.mbit) as prefix, tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "ssh"
        agent.write_text(_AGENT.format(network=_NETWORK, prefix=prefix))
        agent.chmod(0o755)
        environment = os.environ | {
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "PRTE_MCA_prte_if_include": f"{_NETWORK}.0/24",
            "OMPI_MCA_btl_tcp_if_include": f"{_NETWORK}.0/24",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PYTHONPATH": str(_ROOT),
        }
        hosts = ",".join(f"{_NETWORK}.{number}:{options.ranks}" for number in range(1, options.hosts + 1))
        command = [find_mpirun(), "--allow-run-as-root", "--host", hosts, "--map-by", "slot", "--oversubscribe"]
        command += ["--bind-to", "none", "-np", str(options.hosts * options.ranks), "-x", "PYTHONPATH"]
        command += ["-x", "OMPI_MCA_btl_tcp_if_include", sys.executable, "-m", "tests.whale_ops.mpi.hosts", "--rank"]
        print(f"{options.hosts} hosts of {options.ranks} ranks, links of {options.mbit} Mbit/s", flush=True)
        subprocess.run([*command, *sys.argv[1:]], env=environment, cwd=_ROOT, check=True)


if __name__ == "__main__":
    main()
