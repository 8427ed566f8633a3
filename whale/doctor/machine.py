"""Checks the machine: CPUs, memory, limits, folders."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from whale import cgroup
from whale.cpu_load import BUSY, LoadMeter, format_load
from whale.doctor.finding import Finding
from whale.ir.plan_text import format_bytes

GIB = 1 << 30
_SHARED_BYTES = 128 << 20  # Docker gives 64 MB unless asked
_FREE_BYTES = 100 << 20
_RANK_BYTES = 1 * GIB  # what TensorFlow takes before a model is built, and a small model
_OPEN_FILES = 1024
_PROCESSES = 1024  # TensorFlow starts tens of threads in every rank
_LOAD_S = 0.5  # seconds for which the load by other programs is measured
_SOCKET_PATH = 60  # PMIx adds up to some 45 characters to a folder; a socket's path holds 107


def look() -> Iterator[Finding]:
    """Yields the findings about the machine, in the order of the printed table."""
    yield check_system()
    yield check_cpus()
    yield check_quota(cgroup.cpu_quota(), count_usable_cpus())
    yield check_load(_LOAD_S)
    yield check_memory()
    yield check_shared_memory()
    yield from check_limits()
    yield check_temporary_folder()


def count_usable_cpus() -> int:
    """Returns the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def check_system() -> Finding:
    """Reports the operating system."""
    libc = " ".join(platform.libc_ver())
    return Finding("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}, {libc}")


def check_cpus(root: Path = Path("/")) -> Finding:
    """Reports sockets, cores and instruction sets, from /proc."""
    cores: set[tuple[str, str]] = set()
    model, flags, socket, threads = platform.machine(), "", "0", 0
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        threads += key == "processor"
        if key == "physical id":
            socket = value
        elif key == "core id":
            cores.add((socket, value))
        elif key == "model name":
            model = value
        elif key == "flags":
            flags = f" {value} "
    usable = count_usable_cpus()
    sockets = len({socket for socket, _ in cores}) or 1
    text = f"{model}: sockets {sockets}, cores {len(cores) or threads}, threads {threads}, usable {usable}"
    if flags and " avx " not in flags:
        action = "use another machine, or a TensorFlow compiled without AVX"
        return Finding("CPUs", "problem", f"{text}; no AVX, which TensorFlow's packages need", action)
    if usable < 2:
        return Finding("CPUs", "warning", text, "two ranks share one CPU: see `taskset -p $$`, or use a larger machine")
    return Finding("CPUs", "ok", text)


def check_quota(granted: float | None, usable: int) -> Finding:
    """Reports the CPU quota that control groups set."""
    if granted is None:
        return Finding("CPU quota", "ok", "none")
    text = f"{granted:.2g} CPUs' worth of time"
    if granted >= usable:
        return Finding("CPU quota", "ok", text)
    advice = f"`whale run` divides the {usable} usable CPUs: give --threads so that ranks x threads <= {granted:.2g}"
    return Finding("CPU quota", "warning", f"{text} on {usable} CPUs", advice + ", or raise the container's quota")


def check_load(seconds: float, root: Path = Path("/")) -> Finding:
    """Measures for some seconds, and reports, how much of the CPUs other programs use."""
    meter = LoadMeter(root)
    time.sleep(seconds)
    others = meter.measure_others()
    if others < BUSY:
        return Finding("load", "ok", format_load(others))
    action = "wait, or end other programs: runs take longer meanwhile, and `whale profile` would measure too much time"
    return Finding("load", "warning", f"the machine is busy: {format_load(others)}", action)


def check_memory(root: Path = Path("/")) -> Finding:
    """Reports the machine's memory and the limit that control groups set."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    known_bytes = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}
    limit_bytes = cgroup.memory_limit_bytes(root)
    text = f"{format_bytes(known_bytes['MemTotal'])}, available {format_bytes(known_bytes['MemAvailable'])}"
    available_bytes = known_bytes["MemAvailable"]
    if limit_bytes is not None and limit_bytes < known_bytes["MemTotal"]:
        text += f", limited to {format_bytes(limit_bytes)}"
        available_bytes = min(available_bytes, limit_bytes)
    if available_bytes < 2 * _RANK_BYTES:
        action = f"two ranks need some {format_bytes(2 * _RANK_BYTES)}: end other programs or raise the limit"
        return Finding("memory", "warning", text, action)
    return Finding("memory", "ok", text)


def check_shared_memory(folder: str = "/dev/shm") -> Finding:
    """Checks /dev/shm, through which ranks on one host exchange data."""
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        action = (
            f"mount a tmpfs at {folder} that you can write to; without it ranks exchange more slowly, or not at all"
        )
        return Finding(folder, "problem", "missing or not writable", action)
    space = shutil.disk_usage(folder)
    text = f"{format_bytes(space.total)}, free {format_bytes(space.free)}"
    if space.free < _SHARED_BYTES:
        action = f"remove files that ended programs left in {folder}, or enlarge it (docker run --shm-size=1g)"
        return Finding(folder, "warning", text, action)
    return Finding(folder, "ok", text)


def check_limits() -> Iterator[Finding]:
    """Yields findings about this shell's limits (ulimit) that a run may reach."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _check_limit("open files", files, _OPEN_FILES, "ulimit -n 4096")
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = cgroup.process_limit()
    if group is not None and (processes == resource.RLIM_INFINITY or group < processes):
        processes = group
    yield _check_limit(
        "processes and threads", processes, _PROCESSES, "ulimit -u 4096, or docker run --pids-limit=4096"
    )
    space_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space_bytes != resource.RLIM_INFINITY:
        text = f"limited to {format_bytes(space_bytes)}"
        yield Finding("address space", "warning", text, "ulimit -v unlimited; TensorFlow reserves more than it uses")
    if any(Path("/sys/class/infiniband").glob("*")):
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        yield _check_limit("locked memory (InfiniBand)", locked, GIB, "ulimit -l unlimited")


def _check_limit(name: str, value: int, least: int, action: str) -> Finding:
    if value == resource.RLIM_INFINITY:
        return Finding(name, "ok", "unlimited")
    return Finding(name, "ok", str(value)) if value >= least else Finding(name, "warning", str(value), action)


def check_temporary_folder() -> Finding:
    """Checks the temporary folder, in which mpirun creates sockets and files."""
    folder = tempfile.gettempdir()
    space = shutil.disk_usage(folder)
    text = f"{folder}, free {format_bytes(space.free)}"
    if len(folder) > _SOCKET_PATH:
        return Finding(
            "temporary folder", "warning", text, "its path is too long for MPI's sockets: export TMPDIR=/tmp"
        )
    if space.free < _FREE_BYTES:
        return Finding("temporary folder", "warning", text, "free some space there, or name another folder by TMPDIR")
    return Finding("temporary folder", "ok", text)
