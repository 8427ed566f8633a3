"""Makes hosts of namespaces, shapes and breaks the links between them, and runs commands on them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests import forkserver
from tests.hosts import packets
from tests.launcher.helpers import MARKER, Launcher

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
NETWORK = "10.77.0."  # within the namespaces only
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_PROGRAMS = ("ip", "tc", "unshare", "nsenter")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_GROUP = "whale-host-"
_GROUP_ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # of version 1 and of version 2
_START_S, _END_S = 20.0, 20.0
_T = TypeVar("_T")


class NoHostsError(Exception):
    """Hosts cannot be made here; says why."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Describes the resources of a host.

    Attributes:
        shm_bytes: size of /dev/shm; shm_read_only: whether nothing can be written there.
        memory_bytes: what its processes may take together; None: no limit.
        cores: the cores of this machine that are its own; none: it shares them all with the other hosts.
    """

    shm_bytes: int = 1 << 30
    shm_read_only: bool = False
    memory_bytes: int | None = None
    cores: tuple[int, ...] = ()

    def hold_cores(self) -> list[str]:
        """Returns what goes in front of a command that is to have the cores of this host alone."""
        return ["taskset", "--cpu-list", ",".join(map(str, self.cores))] if self.cores else []


@dataclass(slots=True)
class _Host:
    process: subprocess.Popen[str]
    number: int
    machine: Machine
    pid: int = 0  # of its first process, as this machine sees it
    group: Path | None = None
    rules: packets.Rules = field(default_factory=packets.Rules)
    links: list[int] = field(default_factory=list)


@functools.cache
def find_obstacle() -> str:
    """Returns why no hosts of namespaces can be made here, or ""; makes one to find out."""
    if sys.platform != "linux":
        return "hosts of namespaces need Linux"
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        return f"hosts of namespaces need {', '.join(missing)} (packages iproute2 and util-linux)"
    try:
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder, Hosts(Path(folder), 1):
            return ""
    except NoHostsError as error:
        return str(error)


class Hosts:
    """Hosts h0, h1, ..., from entering this context to leaving it.

    Args:
        folder: seen by all hosts, and where their own files are made.
        count: how many.
        machines: what some of them have, by name.
    """

    def __init__(self, folder: Path, count: int, machines: Mapping[str, Machine] | None = None) -> None:
        self.folder = folder
        self.names = tuple(f"h{number}" for number in range(count))
        self.mark = uuid.uuid4().hex
        self._groups = f"{os.getpid()}-{self.mark[:8]}"
        self._machines = dict(machines or {})
        self._hosts: dict[str, _Host] = {}
        self._switch: subprocess.Popen[str] | None = None
        self._delays: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosts:
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    # -- what is done on hosts

    def address(self, name: str) -> str:
        """Returns the address of a host."""
        return f"{NETWORK}{10 + self._hosts[name].number}"

    def command(self, name: str, *arguments: str, folder: Path | None = None) -> list[str]:
        """Returns the command that runs another one on a host, in the folder that all share unless said otherwise."""
        host = self._hosts[name]
        joins = [] if host.group is None else [f"echo $$ > {host.group}/cgroup.procs;"]
        text = " ".join([*joins, 'exec "$@"'])
        spaces = ["-t", str(host.pid), "-m", "-u", "-i", "-n", "-p", f"--wd={folder or self.folder}"]
        inside = [*host.machine.hold_cores(), "nsenter", *spaces]
        return ["sh", "-c", text, "sh", *inside, *arguments]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns the environment of a shell on a host."""
        path = f"{self.folder}/bin:{_SYSTEM_PATH}"
        own = {"PATH": path, "HOME": "/tmp/home", "LANG": "C.UTF-8", MARKER: self.mark}
        return {**own, **python_environment(), **(more or {})}

    def run(
        self, name: str, *arguments: str, timeout_s: float = 120.0, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host, to its end."""
        return subprocess.run(
            self.command(name, *arguments), env=self.environment(more), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def processes(self, name: str) -> dict[int, str]:
        """Returns what runs on a host, but for its first process and its remote shell: command lines by number."""
        inside = os.stat(f"/proc/{self._hosts[name].pid}/ns/pid").st_ino
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if os.stat(folder / "ns/pid").st_ino == inside and line and str(HERE / "init.py") not in line:
                        found[int(folder.name)] = line
        return found

    def find_left(self) -> list[str]:
        """Returns what is left on this machine of hosts that have ended, which is nothing."""
        found = [str(path) for root in _GROUP_ROOTS for path in root.glob(f"{_GROUP}{self._groups}-*")]
        mark = f"{MARKER}={self.mark}".encode()
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    def await_none(self, name: str, within_s: float) -> dict[int, str]:
        """Returns what still runs on a host after so many seconds; at once if nothing does."""
        until_s = time.monotonic() + within_s
        while (found := self.processes(name)) and time.monotonic() < until_s:
            time.sleep(0.1)
        return found

    # -- what befalls them

    def shape(self, name: str, mbit_per_s: float | None) -> None:
        """Makes a host's link so fast, in each direction; None: as fast as the machine is."""
        host = self._hosts[name]
        switch = self._switch
        assert switch is not None  # the hosts are there
        for pid, device in ((host.pid, "eth0"), (switch.pid, name)):
            inside = ["nsenter", "-t", str(pid), "-n", "tc", "qdisc"]
            if mbit_per_s is None:
                subprocess.run([*inside, "del", "dev", device, "root"], capture_output=True, check=False)
                continue
            burst = min(262144, max(20000, round(mbit_per_s * 1e6 / 8 / 500)))  # what comes in 2 ms
            rate = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", str(burst), "latency", "100ms"]
            _do([*inside, "replace", "dev", device, "root", *rate])

    def delay(self, way_ms: float) -> None:
        """Delays all that goes from one host to another; a way there and back takes twice as long."""
        assert self._switch is not None  # the hosts are there
        self._end_delays()
        inside = ["nsenter", "-t", str(self._switch.pid), "-n"]
        masters = [f"link set {name} " + ("nomaster" if way_ms else "master br0") for name in self.names]
        _do([*inside, "ip", "-batch", "-"], "\n".join(masters))
        if way_ms:
            self._delays = subprocess.Popen(
                [*inside, sys.executable, "-I", "-S", str(HERE / "delays.py"), str(way_ms), *self.names],
                env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert self._delays.stdout is not None and self._delays.stdout.readline() == "ready\n"

    def _end_delays(self) -> None:
        if self._delays is not None:
            self._delays.communicate(timeout=_END_S)  # which closes its input
            self._delays = None

    def cut(self, name: str) -> None:
        """Unplugs a host: nothing comes through, and nobody is told."""
        self._filter(name, replace(self._hosts[name].rules, cut=True))

    def mend(self, name: str) -> None:
        """Plugs a host in again, with a link that loses nothing and lets all ports through."""
        self._filter(name, packets.Rules())

    def lose(self, name: str, part: float) -> None:
        """Has a host's link lose this part of its packets, in each direction."""
        self._filter(name, replace(self._hosts[name].rules, loss=part))

    def let_through(self, name: str, *ports: int) -> None:
        """Has a firewall let nothing but TCP of these ports through a host's link."""
        self._filter(name, replace(self._hosts[name].rules, ports=ports))

    def kill(self, name: str) -> None:
        """Ends a host at once, with all that runs there."""
        os.kill(self._hosts[name].pid, signal.SIGKILL)

    def _filter(self, name: str, rules: packets.Rules) -> None:
        host = self._hosts[name]
        before, host.rules = host.links, rules
        if rules == packets.Rules():
            host.links = []
        else:
            host.links = self._within_switch(lambda: packets.attach(rules, name))
        for link in before:
            os.close(link)

    def _within_switch(self, act: Callable[[], _T]) -> _T:
        """Does something in the switch's network: a thread goes there, and ends."""
        import ctypes

        found: list[_T] = []
        wrong: list[BaseException] = []
        switch = self._switch
        assert switch is not None  # the hosts are there

        def go() -> None:
            try:
                with open(f"/proc/{switch.pid}/ns/net") as network:
                    library = ctypes.CDLL(None, use_errno=True)
                    if library.setns(network.fileno(), _NEW_NETWORK):
                        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                found.append(act())
            except BaseException as error:
                wrong.append(error)

        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        if wrong:
            raise wrong[0]
        return found[0]

    # -- their beginning and their end

    def _begin(self) -> None:
        self._write_files()
        self._switch = subprocess.Popen(
            ["unshare", "--net", "cat"], env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        for number, name in enumerate(self.names):
            self._hosts[name] = self._start_host(number, name, self._machines.get(name, Machine()))
        for host in self._hosts.values():
            assert host.process.stdout is not None  # a pipe was asked for
            if host.process.stdout.readline() != "ready\n":
                host.process.kill()
                raise NoHostsError(f"a host of namespaces does not start: {host.process.communicate()[1].strip()}")
            children = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text()
            host.pid = int(children.split()[0])
        self._connect()

    def _write_files(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir(exist_ok=True)
        ssh = programs / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {HERE / "ssh.py"} "$@"\n')
        ssh.chmod(0o755)
        names = [f"{NETWORK}{10 + number} {name}" for number, name in enumerate(self.names)]
        (self.folder / "etc_hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *names, ""]))

    def _start_host(self, number: int, name: str, machine: Machine) -> _Host:
        boot = self.folder / f"boot_id_{name}"
        boot.write_text(f"{uuid.uuid4()}\n")
        said = {
            "name": name,
            "hosts": str(self.folder / "etc_hosts"),
            "boot": str(boot),
            "shm_bytes": machine.shm_bytes,
            "shm_read_only": machine.shm_read_only,
            "visible": [str(path) for path in dict.fromkeys([self.folder, ROOT, sys.prefix, *_forkserver_folder()])],
            "environment": self.environment(),
        }
        group = None if machine.memory_bytes is None else _make_group(f"{self._groups}-{name}", machine.memory_bytes)
        line = [*machine.hold_cores(), "unshare", "--net", "--uts", "--ipc", "--pid", "--mount"]
        line += ["--fork", "--kill-child=SIGKILL"]
        line += [sys.executable, "-I", "-S", str(HERE / "init.py"), json.dumps(said)]
        if group is not None:
            line = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *line]
        process = subprocess.Popen(
            line, env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        return _Host(process, number, machine, group=group)

    def _connect(self) -> None:
        """Joins the hosts by pairs of devices, of which one end is in the host and the other in the switch."""
        assert self._switch is not None  # it has just been started
        lines = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        for name, host in self._hosts.items():
            lines += [f"link add {name} type veth peer name eth0 netns {host.pid}", f"link set {name} master br0 up"]
        _do(["nsenter", "-t", str(self._switch.pid), "-n", "ip", "-batch", "-"], "\n".join(lines))
        for name, host in self._hosts.items():
            own = ["link set lo up", f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up"]
            _do(["nsenter", "-t", str(host.pid), "-n", "ip", "-batch", "-"], "\n".join(own))

    def _end(self) -> None:
        for host in self._hosts.values():
            for link in host.links:
                os.close(link)
        self._end_delays()
        processes = [host.process for host in self._hosts.values()]
        for process in filter(None, [*processes, self._switch]):
            process.kill()  # and with `unshare` its child, which is the host's first process
            process.communicate(timeout=_END_S)
        for host in self._hosts.values():
            if host.group is not None:
                _remove_group(host.group)
        self._hosts.clear()
        self._switch = None


class HostLauncher(Launcher):
    """Runs scripts under `whale run` on a host, from which their ranks are started on others.

    Args:
        hosts: entered.
        name: of the host on which `whale run` is.
        python: what starts it, and so the ranks: a real Python, or `tests.forkserver.warm_python()`.
    """

    def __init__(self, hosts: Hosts, name: str = "h0", python: str = sys.executable) -> None:
        super().__init__(hosts.folder, python)
        self._hosts, self._name = hosts, name
        self.mark, self.environment = hosts.mark, hosts.environment()
        if python != sys.executable:  # a server that a host starts would end with it
            subprocess.run([python, "-c", ""], env=self.environment, check=True)

    def command(self, *arguments: str) -> list[str]:
        """Returns the command that is `whale run` on the host."""
        return self._hosts.command(self._name, *super().command(*arguments))


def python_environment() -> dict[str, str]:
    """Returns the environment of scripts on hosts, and of those with which they are compared."""
    forks = {name: text for name, text in os.environ.items() if name.startswith(("FORKSERVER_", "TF_ENABLE_ONEDNN"))}
    return {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **forks}


def _forkserver_folder() -> list[str]:
    return [os.environ[forkserver.FOLDER_VARIABLE]] if forkserver.FOLDER_VARIABLE in os.environ else []


def _do(line: Sequence[str], said: str = "") -> None:
    """Runs a command that makes a part of hosts.

    Raises:
        NoHostsError: it failed.
    """
    done = subprocess.run(line, input=said, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHostsError(f"{' '.join(line)}: {done.stderr.strip()}")


def _make_group(name: str, memory_bytes: int) -> Path:
    """Makes a control group whose processes may take so much memory.

    Raises:
        NoHostsError: there is no place for one here.
    """
    root, limits = _GROUP_ROOTS[0], {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes}
    if not root.is_dir():
        root, limits = _GROUP_ROOTS[1], {"memory.max": memory_bytes, "memory.swap.max": 0}
    for left in root.glob(f"{_GROUP}*"):
        if not Path(f"/proc/{left.name.removeprefix(_GROUP).partition('-')[0]}").exists():
            with contextlib.suppress(OSError):
                left.rmdir()  # of a test that was killed
    group = root / f"{_GROUP}{name}"
    try:
        group.mkdir()
        for file, limit in limits.items():
            if file == next(iter(limits)) or (group / file).exists():
                (group / file).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise NoHostsError(f"memory cannot be limited here: {error}") from error
    return group


def _remove_group(group: Path) -> None:
    until_s = time.monotonic() + _END_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)  # the kernel takes the last process apart
