"""Implements `whale profile`: measures this machine, or a script's operations on it, for later predictions."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from whale.cli.given import hide_startup_lines, parse_positive, require_readable, require_writable


def add_parser(verbs: Any) -> None:
    """Adds `whale profile` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "profile",
        help="measure this machine for predictions",
        description="Measures operations and exchanges between ranks on this machine (under a minute), or, with a "
        "script, the operations of its step, and stores the figures for `whale plan`. With "
        "WHALE_COMMUNICATION_BACKEND=nccl, cuda-ipc or pinned, exchanges between GPUs are measured as well.",
    )
    verb.add_argument("-np", dest="ranks", type=parse_positive, metavar="N", help="number of ranks (default 2)")
    verb.add_argument("--hosts", metavar="HOST,HOST", help="one rank on each of these hosts; the first is this host")
    verb.add_argument("--threads", type=parse_positive, metavar="K", help="threads per rank (default: cores / ranks)")
    verb.add_argument("-o", dest="out", type=Path, metavar="FILE", help="file for the figures (default: the user's)")
    verb.add_argument("script", nargs="?", help="a script whose step is measured, and added to the machine's figures")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    verb.set_defaults(call=run_command)


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale profile`; returns the exit code."""
    from cost_model.cluster import discover
    from cost_model.graph.machine_profile import check_writable, default_path
    from whale.cgroup import cpu_quota, memory_limit_bytes
    from whale.launcher.worker import make_thread_variables

    require_readable(given.script)
    require_writable(given.out)
    hosts = _parse_lone_ranks(given) if given.hosts is not None else ()
    ranks = len(hosts) or given.ranks or 2
    cores, memory_bytes = discover.find_host_resources(cpu_quota(), memory_limit_bytes())
    threads = given.threads or max(1, int(cores) // (1 if hosts else ranks))
    os.environ.update({name: str(value) for name, value in make_thread_variables(threads).items()})
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several processes measure on one GPU
    out = given.out or default_path()
    check_writable(out)
    with hide_startup_lines():
        from whale.tools.profile import profile

        if given.script:
            table = profile.measure_script(given.script, tuple(given.arguments), ranks, out, print)
        else:
            table = profile.measure_machine(out, cores, memory_bytes / 1e9, ranks, print, hosts)
        print(profile.format_summary(table) + f"written: {out}")
    return 0


def _parse_lone_ranks(given: argparse.Namespace) -> tuple[str, ...]:
    """Returns the host names of `--hosts`; exchanges between hosts are measured with one rank on each.

    Raises:
        ClusterError: a host has several ranks, the first one is not this host, or -np or a script is given as well.
    """
    from whale.errors import ClusterError
    from whale.launcher.mpirun import parse_hosts

    hosts = parse_hosts(given.hosts)
    names = tuple(host.name for host in hosts)
    if given.script or given.ranks not in (None, len(hosts)):
        given_too = "a script" if given.script else f"-np {given.ranks}"
        raise ClusterError(
            "exchanges between hosts are measured with one rank on each host, and without a script",
            given=f"--hosts {given.hosts} and {given_too}",
            action=f"leave {given_too} out",
        )
    if any(host.slots > 1 for host in hosts) or not hosts[0].is_local or len(hosts) < 2:
        raise ClusterError(
            "exchanges between hosts are measured with one rank on each of several hosts, this host being the first",
            given=f"--hosts {given.hosts}",
            expected="for example node1,node2, called on node1",
            action="correct --hosts, or call `whale profile` on the first host of the list",
        )
    return names
