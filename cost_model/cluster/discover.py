"""Describes the local machine as a cluster of one host: its GPUs, or else the processors that this process may use."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from cost_model.cluster.cluster_file import Cluster, DeviceEntry, HostEntry
from cost_model.hardware import Device, catalogue
from whale.errors import ClusterError
from whale.log import log

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def discover_local(cpu_quota: float | None = None, root: Path = Path("/")) -> Cluster:
    """Returns the machine that this process runs on as a cluster of one host.

    Args:
        cpu_quota: number of CPUs that control groups grant; None: no quota.
        root: directory that contains proc; tests set it.

    Raises:
        ClusterError: the catalogue has no entry for a GPU, or the GPU driver does not answer.
    """
    found = parse_gpus(_ask_driver()) if shutil.which(QUERY[0]) else []
    return Cluster("local", [HostEntry(platform.node() or "local", found or [discover_processors(cpu_quota, root)])])


def find_host_resources(
    cpu_quota: float | None = None, memory_limit_bytes: int | None = None, root: Path = Path("/")
) -> tuple[float, float]:
    """Returns (cores, bytes of memory) that this process may use: the least of machine, CPU affinity and control
    groups.

    Args:
        cpu_quota: number of CPUs that control groups grant; None: no quota.
        memory_limit_bytes: memory that control groups grant; None: no limit.
        root: directory that contains proc; tests set it.
    """
    logical = len(re.findall(r"^processor\s*:", (root / "proc/cpuinfo").read_text(), re.MULTILINE)) or 1
    cores = float(min(logical, len(os.sched_getaffinity(0))))
    if cpu_quota is not None:
        cores = min(cores, cpu_quota)
    return cores, find_host_memory_bytes(memory_limit_bytes, root)


def find_host_memory_bytes(memory_limit_bytes: int | None = None, root: Path = Path("/")) -> float:
    """Returns the bytes of memory that this process may use, as ``find_host_resources`` does."""
    kibibytes = re.search(r"^MemTotal:\s*(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    memory_bytes = int(kibibytes[1]) * 1024.0 if kibibytes else float("inf")
    return min(memory_bytes, memory_limit_bytes or memory_bytes)


def _ask_driver() -> str:
    try:
        return subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        answer = getattr(error, "stdout", None) or str(error)
        raise ClusterError(
            "the GPU driver does not answer",
            given=f"{' '.join(QUERY)}: {answer.strip()}",
            action="repair the driver until this command answers, or name a cluster file with --cluster",
        ) from error


def parse_gpus(listing: str) -> list[DeviceEntry]:
    """Parses the output of `nvidia-smi` (`QUERY`), one line per GPU with name and memory in MiB, into device entries.

    Raises:
        ClusterError: the catalogue has no such GPU.
    """
    counts = Counter(line.strip() for line in listing.splitlines() if line.strip())
    entries = []
    for line, count in counts.items():
        name, _, mebibytes = line.rpartition(",")
        device = find_gpu(name)
        memory_gb = min(device.memory_gb, float(mebibytes) * 2**20 / 1e9)
        entries.append(DeviceEntry(device.name, count, memory_gb=memory_gb))
    return entries


def find_gpu(name: str) -> Device:
    """Returns the catalogue's entry of a GPU by the name that the driver reports; raises ClusterError if there is
    none.
    """
    return catalogue.find_device(re.sub(r"^nvidia (?=geforce)", "", name.strip().lower()))


def discover_processors(cpu_quota: float | None, root: Path = Path("/")) -> DeviceEntry:
    """Returns this machine's processor sockets as a device entry, with the share that affinity and quota leave this
    process.

    A processor that the catalogue lacks is replaced by the most similar one, with a warning.
    """
    text = (root / "proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    logical = len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or 1
    sockets = len(set(re.findall(r"^physical id\s*: (\d+)$", text, re.MULTILINE))) or 1
    usable = float(min(logical, len(os.sched_getaffinity(0))))
    if cpu_quota is not None:
        usable = min(usable, cpu_quota)
    name = model[1].strip() if model else platform.machine()
    device, known = _find_processor(name)
    kibibytes = re.search(r"^MemTotal:\s*(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    memory_gb = int(kibibytes[1]) * 1024 / 1e9 / sockets if kibibytes else None
    if known:
        return DeviceEntry(device.name, sockets, share=usable / logical, memory_gb=memory_gb)
    share = min(1.0, usable / (sockets * device.units))
    log.warning(
        f"the hardware catalogue has no processor {name!r}: it is taken for {usable:g} of the {device.units} "
        f"cores of {device.name}, so predictions may be far off. Describe the machine in a cluster file "
        f"(`whale cluster --example` prints one)."
    )
    return DeviceEntry(device.name, sockets, share=share, memory_gb=memory_gb)


def _find_processor(model: str) -> tuple[Device, bool]:
    """Returns (catalogue entry of a processor, True), or (the most similar entry, False) if none has its model number.

    Virtual machines often hide the model number.
    """
    entries = {entry.name: entry for entry in catalogue.load_devices().values() if entry.kind == "cpu"}
    words = set(re.findall(r"\w+", model.lower()))
    for name, entry in entries.items():
        if name.rpartition("-")[2] in words:
            return entry, True
    # The newest of its family stands last in the catalogue.
    nearest = next(
        (e for n, e in reversed(entries.items()) if n.partition("-")[0] in words), list(entries.values())[-1]
    )
    return nearest, False
