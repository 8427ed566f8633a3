"""What `whale doctor` reads from the machine, on made-up trees of proc and sys."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from whale import cgroup, cpu_load
from whale.doctor import machine

pytestmark = pytest.mark.core

_V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
)
_V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_version_1_with_groups_inside_each_other(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n2:cpu,cpuacct:/a/b\n0::/\n",
            "proc/self/mountinfo": _V1.format(root="/"),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "40000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "20000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1073741824\n",
            "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
        },
    )
    assert cgroup.count_memory_kills(root) == 3
    assert cgroup.cpu_quota(root) == 1.5
    assert cgroup.memory_limit_bytes(root) == 1 << 30
    assert cgroup.process_limit(root) is None


def test_version_2(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "proc/self/mountinfo": _V2.format(root="/"),
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/job/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/user.slice/memory.max": "2147483648\n",
            "sys/fs/cgroup/user.slice/job/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job/pids.max": "99\n",
            "sys/fs/cgroup/user.slice/job/memory.events": "low 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n",
        },
    )
    assert cgroup.count_memory_kills(root) == 1
    assert cgroup.cpu_quota(root) == 0.5
    assert cgroup.memory_limit_bytes(root) == 2 << 30
    assert cgroup.process_limit(root) == 99


@pytest.mark.parametrize(("mounts", "names"), [(_V1, "2:cpu,cpuacct:"), (_V2, "0::")])
def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path, mounts: str, names: str) -> None:
    files = {
        "proc/self/cgroup": f"{names}/docker/0123\n",
        "proc/self/mountinfo": mounts.format(root="/docker/0123"),
        "sys/fs/cgroup/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert cgroup.cpu_quota(tree(tmp_path, files)) == 3.0


def test_no_groups_at_all(tmp_path: Path) -> None:
    assert cgroup.cpu_quota(tmp_path) is None
    assert cgroup.memory_limit_bytes(tmp_path) is None


def test_a_quota_below_the_usable_cpus_is_a_warning_with_the_threads_to_give() -> None:
    found = machine.check_quota(1.5, 8)
    assert found.status == "warning" and "--threads" in (found.action or "")
    assert machine.check_quota(8.0, 8).status == machine.check_quota(None, 8).status == "ok"


def _cpuinfo(cores: list[tuple[int, int]], flags: str) -> str:
    blocks = (
        f"processor\t: {number}\nmodel name\t: Test CPU\nphysical id\t: {socket}\ncore id\t\t: {core}\n"
        f"flags\t\t: {flags}\n"
        for number, (socket, core) in enumerate(cores)
    )
    return "\n".join(blocks)


def test_sockets_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_usable_cpus", lambda: 6)
    both_threads = [(socket, core) for socket in (0, 1) for core in (0, 1, 2) for _ in range(2)]
    tree(tmp_path, {"proc/cpuinfo": _cpuinfo(both_threads, "fpu avx avx2")})
    found = machine.check_cpus(tmp_path)
    assert (found.status, found.text) == ("ok", "Test CPU: sockets 2, cores 6, threads 12, usable 6")
    monkeypatch.setattr(machine, "count_usable_cpus", lambda: 1)
    assert machine.check_cpus(tmp_path).status == "warning"


def test_a_cpu_that_tensorflow_cannot_use(tmp_path: Path) -> None:
    tree(tmp_path, {"proc/cpuinfo": _cpuinfo([(0, 0)], "fpu sse4_2")})
    assert machine.check_cpus(tmp_path).status == "problem"


def test_memory_counts_the_limit_of_the_group(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": _V2.format(root="/"),
    }
    assert machine.check_memory(tree(tmp_path, files)).status == "ok"
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{1 << 30}\n")
    found = machine.check_memory(tmp_path)
    assert (found.status, found.text) == ("warning", "16.0 GiB, available 8.0 GiB, limited to 1.0 GiB")


def test_shared_memory_that_is_missing(tmp_path: Path) -> None:
    assert machine.check_shared_memory(str(tmp_path / "shm")).status == "problem"
    assert machine.check_shared_memory(str(tmp_path)).status in ("ok", "warning")


def test_limits_that_are_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    low = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_NPROC: 100, resource.RLIMIT_AS: 1 << 32}
    monkeypatch.setattr(machine.resource, "getrlimit", lambda what: (low.get(what, -1), -1))
    monkeypatch.setattr(machine.cgroup, "process_limit", lambda: 64)
    found = {finding.name: finding for finding in machine.check_limits()}
    assert found["open files"].text == "256" and found["open files"].action == "ulimit -n 4096"
    assert found["processes and threads"].text == "64"  # the tighter of the two
    assert found["address space"].text == "limited to 4.0 GiB"
    assert all(finding.status == "warning" for finding in found.values())


def test_a_folder_too_deep_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(deep))
    assert "TMPDIR" in (machine.check_temporary_folder().action or "")


def test_what_others_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what others take of the CPUs: no waits for disks, and nothing of this process and its children."""
    monkeypatch.setattr(cpu_load.os, "sched_getaffinity", lambda process: {0, 2})
    monkeypatch.setattr(cpu_load.os, "sysconf", lambda name: 100)
    own, clock = iter([1.0, 3.0]), iter([50.0, 60.0])
    monkeypatch.setattr(cpu_load, "_read_own_s", lambda: next(own))
    monkeypatch.setattr(cpu_load.time, "monotonic", lambda: next(clock))
    text = "cpu 9 9 9 9\ncpu0 {} 0 0 800 10 0 0 0 77 0\ncpu1 0 0 0 0\ncpu2 0 0 100 900 0 0 0 {} 0 0\nintr 5\n"
    root = tree(tmp_path, {"proc/stat": text.format(200, 0)})
    meter = cpu_load.LoadMeter(root)
    (root / "proc/stat").write_text(text.format(900, 100).replace(" 10 ", " 500 ").replace("cpu1 0", "cpu1 9999"))
    assert meter.measure_others() == pytest.approx((7.0 + 1.0 - 2.0) / 20.0)


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for others, status in ((0.1, "ok"), (0.6, "warning")):
        monkeypatch.setattr(machine.LoadMeter, "measure_others", lambda meter, others=others: others)
        found = machine.check_load(0.0)
        assert found.status == status and f"other programs take {others:.0%} of the" in found.text
