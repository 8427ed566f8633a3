"""Reads the limits of the control groups that contain this process, in version 1, version 2, or both side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_UNLIMITED_BYTES = 1 << 60  # version 1 writes the largest number of pages


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the number of CPUs' worth of time that the tightest control group grants; None without a quota.

    Args:
        root: directory that contains proc and sys; tests set it.
    """
    quotas = []
    for folder in _folders("cpu", root):
        words = (_read(folder / "cpu.max") or "").split()  # version 2: "max 100000" or "50000 100000"
        if not words:
            words = [_read(folder / f"cpu.cfs_{what}_us") or "" for what in ("quota", "period")]
        if all(word.isdecimal() and int(word) for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Returns the tightest memory limit of the control groups in bytes; None without one."""
    return _smallest("memory", ("memory.max", "memory.limit_in_bytes"), _UNLIMITED_BYTES, root)


def count_memory_kills(root: Path = Path("/")) -> int:
    """Returns how many processes of this process's group the kernel has killed for lack of memory; 0 if that is not
    known.
    """
    for folder in _folders("memory", root):
        for name in ("memory.events", "memory.oom_control"):  # of version 2 and of version 1
            for line in (_read(folder / name) or "").splitlines():
                key, _, number = line.partition(" ")
                if key == "oom_kill" and number.isdecimal():
                    return int(number)
    return 0


def process_limit(root: Path = Path("/")) -> int | None:
    """Returns the tightest limit of the control groups on the number of processes and threads; None without one."""
    return _smallest("pids", ("pids.max",), _UNLIMITED_BYTES, root)


def _smallest(controller: str, names: tuple[str, ...], unlimited: int, root: Path) -> int | None:
    texts = (_read(folder / name) for folder in _folders(controller, root) for name in names)
    return min((int(text) for text in texts if text and text.isdecimal() and int(text) < unlimited), default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of this process's group and of all groups around it, in every hierarchy that has the
    controller.
    """
    own = {}  # controllers, "" for version 2 -> the group's path
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        mount, _, kind = line.partition(" - ")
        filesystem, *_, options = kind.split(" ")
        if filesystem == "cgroup2":
            path = own.get("", "/")
        elif filesystem == "cgroup" and controller in options.split(","):
            path = own.get(controller, "/")
        else:
            continue
        mounted, where = mount.split(" ")[3:5]
        group = PurePosixPath(path)
        # Without a namespace of its own, a container sees its group's path on the host, of which that group is mounted.
        inside = group.relative_to(mounted) if group.is_relative_to(mounted) else PurePosixPath()
        for part in (inside, *inside.parents):
            yield root / where.lstrip("/") / part


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
