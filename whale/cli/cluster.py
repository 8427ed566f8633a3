"""Implements `whale cluster`: prints an example of a cluster file, the catalogue of devices, or what a given file
describes.
"""

from __future__ import annotations

import argparse
from typing import Any

from whale.cli.given import require_readable

EXAMPLE = """\
# A cluster: hosts, their devices, and the networks between them. `whale cluster FILE` reads it back.
name: lab
networks:
  fabric: {type: infiniband-hdr-200}   # what connects the hosts below that name it
hosts:
  - name: new
    count: 2                           # number of equal hosts
    devices: [{type: a100-sxm-80gb, count: 8}]
    networks: {fabric: {nics: 8}}
    memory_gb: 1024                    # memory of the host itself, for offloaded state
  - name: old
    count: 4
    devices: [{type: v100-sxm2-32gb, count: 4}]   # {type: t4, share: 0.5} is half of a T4
    networks: {fabric: {nics: 4}}
"""


def add_parser(verbs: Any) -> None:
    """Adds `whale cluster` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "cluster",
        help="print an example of a cluster file, or what a cluster file describes",
        description="Prints what a cluster file describes, an example of such a file, or the devices, links and "
        "networks that it may name.",
    )
    verb.add_argument("file", nargs="?", help="a cluster file (YAML), or local for this machine")
    verb.add_argument("--example", action="store_true", help="print a file to start from")
    verb.add_argument("--devices", action="store_true", help="print the devices, links and networks of the catalogue")
    verb.set_defaults(call=run_command, wrong=verb.error)


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale cluster`; returns the exit code."""
    if given.example:
        print(EXAMPLE, end="")
        return 0
    from cost_model.hardware import catalogue
    from whale.ir.plan_text import format_bytes

    if given.devices:
        print("devices")
        for name, device in catalogue.load_devices().items():
            if name == device.name:  # other names are aliases
                print(f"  {name:22} {format_bytes(device.memory_bytes):>9}  {_format_rate(device.peak_tflops)}")
        print("links")
        for name, link in catalogue.load_links().items():
            print(f"  {name:22} {link.gb_per_s:g} GB/s a device and direction, {link.topology}")
        print("networks")
        for name, network in catalogue.load_networks().items():
            print(f"  {name:22} {network.gb_per_s:g} GB/s")
        return 0
    if given.file is None:
        given.wrong("a cluster file, --example or --devices is needed")
    require_readable(given.file)
    from cost_model.cluster.allocation import read_named_cluster
    from cost_model.cluster.pools import Machines
    from whale.cgroup import cpu_quota
    from whale.ir.strategy import format_count

    found = read_named_cluster(given.file, None, cpu_quota())
    machines = Machines(found)
    print(f"{found.name}: {format_count(machines.devices, 'device')}")
    for pool in machines.pools:
        hosts = f"{format_count(pool.hosts, 'host')} of {pool.per_host}"
        print(f"  {pool.devices:4} {pool.name:28} {hosts:14} {format_bytes(pool.memory_bytes):>9} each")
    for line in found.list_overridden():
        print(f"  overridden  {line}")
    return 0


def _format_rate(peak_tflops: dict[str, float]) -> str:
    dtype = next((name for name in ("float16", "bfloat16", "float32") if name in peak_tflops), next(iter(peak_tflops)))
    return f"{peak_tflops[dtype]:g} TFLOP/s in {dtype}"
