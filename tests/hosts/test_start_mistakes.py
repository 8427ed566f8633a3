"""Asserts that a start that fails on a host names the host, the cause and what to do within seconds."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import whale
from tests.hosts.hosts import ROOT, HostLauncher, Hosts, Machine
from tests.launcher.helpers import PATIENCE_S

LIMIT_S = 15.0  # of every message, and of processes that are left
PACKAGES = Path(pytest.__file__).parent.parent
PYTHON = Path(sys.executable)
WHALES = [path for path in {ROOT / "whale", PYTHON.parents[2] / "whale"} if path.is_dir()]  # also in place
_UP = "print('up')"
_INIT = "import whale as wh\nwh.init(solo=True)\nprint('up')\nwh.shutdown()"
_STEP = """
import tensorflow as tf, whale as wh
wh.init()
weight = tf.Variable(1.0, name="weight")
@wh.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((weight * x) ** 2)
    weight.assign_sub(RATE * tape.gradient(loss, weight))
    return loss
step(tf.ones(4))
print("up")
"""
_OWN = "/tmp/script.py"  # each host has its own


@dataclass(frozen=True)
class Mistake:
    """Something that is wrong when a run starts on two hosts.

    Attributes:
        says: patterns that are all found in what is printed; (): the run ends well.
        prepare: makes it wrong.
        hosts: the argument of --hosts; options: others before the script.
        script: what the ranks run.
        machines: by name, where they are not the usual ones.
        goes_on: whether the run waits on, and is ended by the test.
    """

    says: tuple[str, ...] = ()
    prepare: Callable[[Hosts, HostLauncher], object] = lambda hosts, launcher: None
    hosts: str = "h0:1,h1:1"
    options: tuple[str, ...] = ("-np", "2")
    script: str = _UP
    path: str = ""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    goes_on: bool = False


def ssh(*lines: str) -> Callable[[Hosts, HostLauncher], object]:
    """Makes ssh to h1 run these lines of a shell instead; `real` is what it ran before."""

    def prepare(hosts: Hosts, launcher: HostLauncher) -> None:
        program = hosts.folder / "bin" / "ssh"
        real = hosts.folder / "bin" / "real_ssh"
        program.rename(real)
        text = "\n".join(line.replace("real", f'{real} "$@"') for line in lines)
        program.write_text(f'#!/bin/sh\ncase " $* " in *" h1 "*)\n{text}\n;; esac\nexec {real} "$@"\n')
        program.chmod(0o755)

    return prepare


def refuse(text: str, code: int = 255) -> Callable[[Hosts, HostLauncher], object]:
    """Makes ssh to h1 say this and fail."""
    return ssh(f"echo '{text}' >&2", f"exit {code}")


def on_h1(*lines: str) -> Callable[[Hosts, HostLauncher], object]:
    """Runs these lines of a shell on h1."""

    def prepare(hosts: Hosts, launcher: HostLauncher) -> None:
        done = hosts.run("h1", "sh", "-ec", "\n".join(lines))
        assert done.returncode == 0, done.stderr

    return prepare


def hide(path: Path | str) -> Callable[[Hosts, HostLauncher], object]:
    """Leaves h1 an empty folder where this one is, or a file that nothing can run."""
    return on_h1(f"mount -t tmpfs none {path}" if Path(path).is_dir() else f"mount --bind /dev/null {path}")


def replace_on_h1(path: Path, old: str, new: str) -> Callable[[Hosts, HostLauncher], object]:
    """Gives h1 another text of a file."""

    def prepare(hosts: Hosts, launcher: HostLauncher) -> None:
        text = path.read_text()
        assert old in text
        other = hosts.folder / f"other_{path.name}"
        other.write_text(text.replace(old, new))
        on_h1(f"mount --bind {other} {path}")(hosts, launcher)

    return prepare


def from_file(text: str | None, executable: bool = False) -> Callable[[Hosts, HostLauncher], object]:
    """Writes the file of --hosts-from."""

    def prepare(hosts: Hosts, launcher: HostLauncher) -> None:
        if text is not None:
            path = hosts.folder / "hosts.txt"
            path.write_text(text)
            path.chmod(0o755 if executable else 0o644)

    return prepare


def write_own(name: str, text: str) -> Callable[[Hosts, HostLauncher], object]:
    """Writes a host's own script."""
    return lambda hosts, launcher: hosts.run(name, "sh", "-c", f'printf "%s\\n" "$1" > {_OWN}', "sh", text)


def both(*steps: Callable[[Hosts, HostLauncher], object]) -> Callable[[Hosts, HostLauncher], object]:
    """Does one after the other."""
    return lambda hosts, launcher: [step(hosts, launcher) for step in steps]


def no_ssh(hosts: Hosts, launcher: HostLauncher) -> None:
    """Leaves h0 without ssh."""
    (hosts.folder / "bin" / "ssh").unlink()
    for path in filter(None, map(shutil.which, ("ssh", "rsh"))):
        hosts.run("h0", "mount", "--bind", "/dev/null", path)


FILE = ("--hosts-from", "hosts.txt")
MISTAKES: dict[str, Mistake] = {
    # The command line, and the file of hosts.
    "a name that nobody knows": Mistake(("'?h9'?", "next: "), hosts="h0:1,h9:1"),
    "a second name that nobody knows": Mistake(("'?h9'?", "next: "), hosts="h0:1,h1:1,h9:1", options=("-np", "3")),
    "a host that stands twice": Mistake(("'h1' is listed twice", "next: "), hosts="h1:1,h1:1"),
    "a host that stands twice by another name": Mistake(
        ("h1 and 10.77.0.11 are the same host", "next: "), hosts="h1:1,10.77.0.11:1"
    ),
    "no slots": Mistake(("'h1:0'", "next: "), hosts="h0:1,h1:0"),
    "slots in words": Mistake(("'h1:two'", "next: "), hosts="h0:1,h1:two"),
    "too few slots": Mistake(("at most 2: h0:1 \\+ h1:1", "next: "), options=("-np", "4")),
    "a space between hosts": Mistake(("h0:1 h1:1", "next: "), hosts="h0:1 h1:1"),
    "a user's name": Mistake(("root@h1", "~/.ssh/config", "next: "), hosts="h0:1,root@h1:1"),
    "a file of hosts that is not there": Mistake(("hosts.txt", "next: "), from_file(None), "", FILE),
    "a file without a host": Mistake(("hosts.txt", "next: "), from_file("# none\n"), "", FILE),
    "a line that cannot be read": Mistake(
        ("hosts.txt", "line 2", "h1", "next: "), from_file("h0 slots=1\nh1 slots=two\n"), "", FILE
    ),
    "a program of hosts that fails": Mistake(
        ("hosts.txt", "code 3: no quota", "next: "), from_file("#!/bin/sh\necho no quota >&2\nexit 3\n", True), "", FILE
    ),
    "a script that is not there": Mistake(("/tmp/none.py", "next: "), path="/tmp/none.py"),
    "this host by its address": Mistake(hosts="10.77.0.10:1,10.77.0.11:1"),
    "this host as localhost": Mistake(hosts="localhost:1,h1:1"),
    # ssh.
    "a key that is refused": Mistake(
        ("h1", "Permission denied", "ssh h1 true", "next: "), refuse("root@h1: Permission denied (publickey,password).")
    ),
    "a host's key that has changed": Mistake(
        ("h1", "Host key verification failed", "next: "), refuse("Host key verification failed.")
    ),
    "a port of ssh that is closed": Mistake(
        ("h1", "Connection refused", "next: "), refuse("ssh: connect to host h1 port 22: Connection refused")
    ),
    "a user who may not log in": Mistake(
        ("h1", "This account is currently not available", "next: "),
        ssh("echo 'This account is currently not available.'", "exit 1"),
    ),
    "a host that is off": Mistake(("h1", "ssh", "next: "), lambda hosts, launcher: hosts.cut("h1")),
    "an ssh that hangs": Mistake(("h1 does not answer",), ssh("exec sleep 600"), goes_on=True),
    "no ssh": Mistake(("ssh", "next: "), no_ssh),
    "a shell that prints": Mistake((), ssh("echo Welcome to h1", "exec real")),
    "a shell that prints and takes its time": Mistake(
        (), ssh("echo 'no quota' >&2; sleep 2; echo Welcome", "exec real")
    ),
    # What is on a host.
    "no Open MPI": Mistake(("h1", "prted", "next: "), hide(PYTHON.parent / "prted")),
    "no Python": Mistake(("h1", re.escape(str(PYTHON)), "next: "), hide(PYTHON)),
    "no Whale": Mistake(("h1", "No module named 'whale", "next: "), both(*map(hide, WHALES))),
    "no compiled library": Mistake(("h1", "is not built", "next: "), hide(ROOT / "whale_ops" / "lib"), script=_INIT),
    "no TensorFlow": Mistake(("h1", "tensorflow", "next: "), hide(PACKAGES / "tensorflow"), script=_INIT),
    "another Whale": Mistake(
        ("h1", r"Whale 0\.0\.1 on h1", "next: "),
        replace_on_h1(ROOT / "whale" / "__init__.py", f'__version__ = "{whale.__version__}"', '__version__ = "0.0.1"'),
        script=_INIT,
    ),
    "another TensorFlow": Mistake(
        ("h1", r"TensorFlow 2\.20\.1 on h1", "next: "),
        replace_on_h1(
            PACKAGES / "tensorflow" / "python" / "framework" / "versions.py", "\nVERSION = ", "\nVERSION = '2.20.1'  # "
        ),
        script=_INIT,
    ),
    "no script": Mistake(("h1", _OWN, "next: "), write_own("h0", _UP), path=_OWN),
    "another script": Mistake(
        ("ranks? 1", "first difference", "next: "),
        both(write_own("h0", _STEP.replace("RATE", "0.1")), write_own("h1", _STEP.replace("RATE", "0.2"))),
        path=_OWN,
    ),
    # What a host has.
    "1 MiB of /dev/shm": Mistake(
        (), script=_INIT, hosts="h0:1,h1:2", options=("-np", "3"), machines={"h1": Machine(shm_bytes=1 << 20)}
    ),
    "a full /dev/shm": Mistake(
        (),
        on_h1("head -c 2G /dev/zero > /dev/shm/full || true"),
        script=_INIT,
        hosts="h0:1,h1:2",
        options=("-np", "3"),
    ),
    "a /dev/shm that is read-only": Mistake(
        (), script=_INIT, hosts="h0:1,h1:2", options=("-np", "3"), machines={"h1": Machine(shm_read_only=True)}
    ),
    "a /tmp that is read-only": Mistake(
        ("h1", "/tmp", "[Rr]ead-only", "next: "), on_h1("mount -o remount,ro /tmp"), script=_INIT
    ),
    "a full /tmp": Mistake(
        ("h1", "/tmp", "next: "),
        on_h1("mount -o remount,size=64k /tmp", "head -c 1M /dev/zero > /tmp/full || true"),
        script=_INIT,
    ),
    "too little memory": Mistake(
        ("h1 limits the memory of its control group to 100 MiB", "raise the limit"),
        script=_INIT,
        machines={"h1": Machine(memory_bytes=100 << 20)},
    ),
    "few open files": Mistake((), ssh("ulimit -n 24; exec real"), script=_INIT),
    # The network, and clocks.
    "ports that are closed": Mistake(
        ("h1 cannot connect to h0, though ssh from here to there works", "next: open TCP ports"),
        lambda hosts, launcher: hosts.let_through("h1", 22),
    ),
    "a wall clock an hour ahead": Mistake(
        (),
        both(
            on_h1(
                "mkdir /tmp/skew",
                "echo 'import time; real = time.time; time.time = lambda: real() + 3600' > /tmp/skew/sitecustomize.py",
            ),
            lambda hosts, launcher: launcher.environment.update(PYTHONPATH=f"/tmp/skew:{ROOT}"),
        ),
        script=_INIT,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_when_a_run_starts_is_said(make_hosts: Callable[..., Hosts], name: str) -> None:
    mistake = MISTAKES[name]
    hosts = make_hosts(2, **mistake.machines)
    launcher = HostLauncher(hosts)
    mistake.prepare(hosts, launcher)
    where = ("--hosts", mistake.hosts) if mistake.hosts else ()
    line = (*mistake.options, *where, mistake.path or launcher.script(mistake.script))
    begins = mistake.script == _INIT or mistake.path == _OWN  # and with that imports TensorFlow
    started_s = time.monotonic()
    hosts.run("h0", sys.executable, "-c", "import whale.cli, tensorflow" if begins else "import whale.cli")
    usual_s = 2 * (time.monotonic() - started_s)  # on a machine that is as busy, of both hosts
    started_s = time.monotonic()
    if mistake.goes_on:
        with launcher.start(*line) as process:
            assert process.stderr is not None
            said = next(text for text in process.stderr if re.search(mistake.says[0], text))
            took_s = time.monotonic() - started_s
            for number, text in hosts.processes("h0").items():
                if " -m whale run " in text:
                    os.kill(number, signal.SIGTERM)
            said += process.communicate(timeout=PATIENCE_S)[1]
        code = process.returncode
    else:
        done = launcher.run(*line)
        took_s, said, code = time.monotonic() - started_s, done.stdout + done.stderr, done.returncode
    if not mistake.says:
        assert code == 0 and said.count("] up") == int(line[line.index("-np") + 1]), said
    else:
        assert code != 0, said
    for pattern in mistake.says:
        assert re.search(pattern, said), f"{pattern!r} is not in:\n{said}"
    assert mistake.script == _INIT or mistake.path or "Traceback" not in said, said
    assert not mistake.says or took_s < LIMIT_S + usual_s, f"{took_s:.1f} s: {said}"
    left = {host: hosts.await_none(host, 2.0 + usual_s) for host in hosts.names}
    assert not any(left.values()), left
