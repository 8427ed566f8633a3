"""Runs on hosts that have nothing in common but a network: they compute what one process does."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cost_model.graph.machine_profile import HostLink, read, write
from tests.cost_model.test_captured import TABLE
from tests.forkserver import warm_python
from tests.hosts.hosts import HERE, ROOT, HostLauncher, Hosts, Machine, python_environment
from tests.hosts.results import TRAIN, read_result, train_alone
from tests.launcher.helpers import PATIENCE_S, wait_for_line


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """The same figures, but for the order in which they were added up."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_hosts_compute_what_one_process_does(make_hosts: Callable[..., Hosts], tmp_path: Path, each: int) -> None:
    hosts = make_hosts(2)
    launcher = HostLauncher(hosts, python=warm_python())
    done = launcher.run("-np", str(2 * each), "--hosts", f"h0:{each},h1:{each}", TRAIN, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(read_result(tmp_path), train_alone(tmp_path))
    assert hosts.await_none("h0", 10.0) == {} and hosts.await_none("h1", 10.0) == {}


CONNECT = """
import socket, sys
try:
    socket.create_connection(("h1", int(sys.argv[1])), timeout=float(sys.argv[2]))
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


def test_links_and_machines_are_as_asked(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2, h1=Machine(shm_bytes=1 << 20, shm_read_only=True))

    def connect(port: int = 22, within_s: float = 20.0) -> str:
        return hosts.run("h0", sys.executable, "-I", "-S", "-c", CONNECT, str(port), str(within_s)).stdout.strip()

    def seconds(mib: int) -> float:
        started_s = time.monotonic()
        said = hosts.run("h0", "ssh", "h1", f"head -c {mib << 20} /dev/zero")
        assert len(said.stdout) == mib << 20, said.stderr
        return time.monotonic() - started_s

    assert hosts.run("h0", "ssh", "h1", "hostname; exit 3").stdout == "h1\n"
    assert hosts.run("h0", "ssh", "h1", "exit 3").returncode == 3
    assert "Read-only" in hosts.run("h1", "touch", "/dev/shm/file").stderr
    assert connect() == "connected" and connect(23) == "ConnectionRefusedError"
    hosts.let_through("h1", 22)
    assert connect() == "connected" and connect(23, 0.5) == "TimeoutError"
    hosts.cut("h1")
    assert connect(22, 0.5) == "TimeoutError"
    hosts.mend("h1")
    assert connect() == "connected"
    hosts.shape("h1", 20)
    assert seconds(2) > 0.7  # 0.84, but for what the shaper lets through at once
    hosts.shape("h1", None)
    hosts.delay(60)
    started_s = time.monotonic()
    assert connect() == "connected"
    assert time.monotonic() - started_s > 0.12  # a way there and back
    hosts.delay(0)
    hosts.lose("h1", 1.0)
    assert connect(22, 0.5) == "TimeoutError"


def test_memory_is_limited(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(1, h0=Machine(memory_bytes=64 << 20))
    for line in (["h0", sys.executable], ["h0", "ssh", "h0", sys.executable]):
        done = hosts.run(*line, "-c", "'x' * (100 << 20)" if len(line) == 2 else "'\"x\" * (100 << 20)'")
        assert done.returncode in (-9, 137), done


MAKE = """
import signal, sys, time
from pathlib import Path
from tests.hosts.hosts import Hosts, Machine
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests may ignore it
with Hosts(Path(sys.argv[1]), 1) as hosts:
    print(hosts.mark, flush=True)
    hosts.run("h0", "sleep", "600", timeout_s=600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_hosts_end_with_who_has_made_them(make_hosts: Callable[..., Hosts], tmp_path: Path, number: int) -> None:
    line = [sys.executable, "-c", MAKE, str(tmp_path)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as maker:
        assert maker.stdout is not None
        hosts = Hosts(tmp_path, 0)
        hosts.mark = maker.stdout.readline().strip()
        assert hosts.mark and hosts.find_left()
        maker.send_signal(number)
        maker.wait(PATIENCE_S)
    until_s = time.monotonic() + PATIENCE_S
    while hosts.find_left() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert hosts.find_left() == []


@pytest.mark.long
def test_an_unplugged_host_ends_the_run_and_its_own_ranks(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    launcher = HostLauncher(hosts)
    script = launcher.script("import time\nprint('up')\ntime.sleep(600)")
    with launcher.start("-np", "2", "--hosts", "h0:1,h1:1", script) as process:
        for _ in range(2):
            wait_for_line(process, "up")
        hosts.cut("h1")
        cut_s = time.monotonic()
        assert process.stderr is not None
        said = next(line for line in process.stderr if "nothing was heard from h1" in line)
        said_s = time.monotonic()
        assert "rank 1 is frozen" in said and process.wait(PATIENCE_S) == 1
        ended_s = time.monotonic()
    left = hosts.await_none("h1", PATIENCE_S)
    assert left == {} and hosts.await_none("h0", PATIENCE_S) == {}
    assert ended_s - said_s < 3 and time.monotonic() - cut_s < 12, (said_s - cut_s, ended_s - said_s)


@pytest.mark.long
def test_a_cut_that_is_mended_soon_is_survived(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    launcher = HostLauncher(hosts, python=warm_python())
    with launcher.start("-np", "2", "--hosts", "h0:1,h1:1", TRAIN, str(tmp_path), "60", "0.05") as process:
        wait_for_line(process, "rank 0 has begun")
        for what in (lambda: hosts.cut("h1"), lambda: hosts.lose("h0", 0.3)):
            what()
            time.sleep(2.0)
            hosts.mend("h0"), hosts.mend("h1")
            time.sleep(2.0)  # what was lost is sent again a second later, at most
        said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
    assert_same(read_result(tmp_path), train_alone(tmp_path, 60))


SAVE = """
import sys, tensorflow as tf, whale as wh
wh.init(solo=True)
checkpoint = tf.train.Checkpoint(w=tf.Variable([1.0, 2.0]))
manager = wh.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2)
manager.save()
print("saved")
"""


@pytest.mark.long
def test_a_folder_of_checkpoints_that_each_host_has_for_itself(
    make_hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    launcher = HostLauncher(make_hosts(2), python=warm_python())
    command = ("-np", "2", "--hosts", "h0:1,h1:1", launcher.script(SAVE))
    done = launcher.run(*command, "/tmp/checkpoints")
    assert done.returncode == 1 and "saved" not in done.stdout
    assert "CheckpointError: the folder of checkpoints is not the same folder on h1 (exit code 1)" in done.stderr
    assert "/tmp/checkpoints: a file that rank 0 has written there on h0 does not exist on h1" in done.stderr, (
        done.stderr
    )
    done = launcher.run(*command, str(tmp_path / "checkpoints"))
    assert done.returncode == 0 and done.stdout.count("saved") == 2, done.stderr


@pytest.mark.long
def test_a_firewall_that_lets_only_ssh_through_is_said(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    launcher = HostLauncher(hosts)
    hosts.let_through("h1", 22)
    started_s = time.monotonic()
    done = launcher.run("-np", "2", "--hosts", "h0:1,h1:1", launcher.script("print('up')"))
    took_s = time.monotonic() - started_s
    assert done.returncode == 2 and done.stdout == ""
    assert "h1 cannot connect to h0, though ssh from here to there works" in done.stderr, done.stderr
    assert re.search(r"given: h1 to 10\.77\.0\.10, TCP port \d+: timed out", done.stderr)
    assert re.search(r"next: open TCP ports \d+ to \d+ between h0 and h1 in their firewalls", done.stderr)
    assert hosts.await_none("h0", 2.0) == {} and hosts.await_none("h1", 2.0) == {}
    assert took_s < 15, took_s


@pytest.mark.long
def test_who_is_out_of_memory_is_told_the_limit(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2, h1=Machine(memory_bytes=200 << 20))
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['WHALE_RANK'] == '1': b'x' * (300 << 20)\ntime.sleep(600)")
    done = HostLauncher(hosts).run("-np", "2", "--hosts", "h0:1,h1:1", str(script))
    assert done.returncode == 137
    said = "rank 1 was killed by the kernel (SIGKILL), since h1 limits the memory of its control group to 200 MiB; its "
    found = re.search(re.escape(said) + r"process held up to (\d+) MiB: raise the limit", done.stderr)
    assert found and 100 < int(found[1]) <= 200, done.stderr


@pytest.mark.long
def test_what_was_chosen_over_another_link_is_looked_for_anew(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    launcher = HostLauncher(hosts, python=warm_python())
    launcher.environment["WHALE_MESH_AUTO_PARALLEL"] = "1"
    # A host may keep its plans on a disk of its own.
    launcher.environment["WHALE_MESH_PLAN_CACHE"] = "/tmp/cache"

    def said() -> str:
        started_s = time.monotonic()
        done = launcher.run("-np", "2", "--hosts", "h0:1,h1:1", TRAIN, str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert time.monotonic() - started_s < PATIENCE_S
        return done.stdout + done.stderr

    hosts.shape("h1", 200)  # so that the link is what takes time, on a busy machine, too
    assert "as in an earlier run" not in said()
    assert "as in an earlier run" in said()
    hosts.shape("h1", 10)
    over_slow = said()
    assert "when an earlier run chose a strategy: the search is repeated" in over_slow
    assert "as in an earlier run" not in over_slow
    assert "as in an earlier run" in said()
    assert_same(read_result(tmp_path), train_alone(tmp_path))


@pytest.mark.long
def test_steps_that_take_far_longer_than_predicted_are_said(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    hosts.delay(5)  # so that the link is what takes time, on a busy machine, too
    launcher = HostLauncher(hosts, python=warm_python())
    launcher.environment["WHALE_MESH_AUTO_PARALLEL"] = "1"
    launcher.environment["WHALE_MESH_PLAN_CACHE"] = "/tmp/cache"
    command = (
        "-np",
        "2",
        "--hosts",
        "h0:1,h1:1",
        TRAIN,
        str(tmp_path),
        "20",
        "0.5",
        "200000",
        "16",
    )  # rows are divided; a pause is longer than it takes to change a link on a loaded machine
    with launcher.start(*command) as process:
        wait_for_line(process, "step 4")
        hosts.delay(500)
        wait_for_line(process, "step 10")
        hosts.delay(5)  # before speeds and links are measured again
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0 and "ms were predicted; exchanges go on during" in said, said
    done = launcher.run(*command)
    assert done.returncode == 0 and "(as in an earlier run)" in done.stderr, done.stderr  # with what its steps took


@pytest.mark.long
def test_exchanges_between_hosts_are_measured_and_used(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    for name in hosts.names:
        hosts.shape(name, 10)
    launcher = HostLauncher(hosts, python=warm_python())
    profile = str(tmp_path / "profile.json")
    started_s = time.monotonic()
    done = hosts.run("h0", warm_python(), "-m", "whale", "profile", "--hosts", "h0,h1", "-o", profile, timeout_s=400.0)
    took_s = time.monotonic() - started_s
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(profile)
    sums = dict(next(curve for curve in found.curves if curve.kind == "all_reduce").samples)
    largest_bytes = max(sums)
    assert found.hosts == 2 and largest_bytes >= 32 << 10
    assert 0.5 < sums[largest_bytes] / (largest_bytes / 1.2e6) < 2.0  # both directions of 10 Mbit/s at once
    assert took_s < 240.0, took_s  # on a busy machine, too
    launcher.environment |= {"WHALE_MESH_AUTO_PARALLEL": "1", "WHALE_MESH_PROFILE": profile}
    done = launcher.run("-np", "2", "--hosts", "h0:1,h1:1", TRAIN, str(tmp_path))
    assert done.returncode == 0, done.stderr
    done = launcher.run("-np", "3", "--hosts", "h0:2,h1:1", TRAIN, str(tmp_path))  # its link, and measured processors
    assert done.returncode == 0, done.stderr
    done = launcher.run("-np", "2", "--hosts", "h0:2", TRAIN, str(tmp_path))
    assert done.returncode == 1 and "a profile describes other hosts than those of the ranks" in done.stderr


@pytest.mark.long
def test_ranks_are_laid_by_the_links_of_a_profile(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """Four hosts of one rank: tensors are divided between the two pairs whose link is fast, and nothing is measured."""
    near = {("h0", "h1"), ("h2", "h3")}
    pairs = [(f"h{i}", f"h{j}") for j in range(4) for i in range(j)]
    links = [HostLink(*pair, 1e-4, 1e9 if pair in near else 1e6) for pair in pairs]
    write(msgspec.structs.replace(TABLE, hosts=4, links=links), tmp_path / "profile.json")
    launcher = HostLauncher(make_hosts(4), python=warm_python())
    launcher.environment |= {"WHALE_MESH_PROFILE": str(tmp_path / "profile.json"), "WHALE_DEBUG_LOG": "debug"}
    script = str(HERE / "meshes.py")
    done = launcher.run("-np", "4", "--hosts", "h0:1,h1:1,h2:1,h3:1", script, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks lie 0 2 1 3" in done.stdout, done.stdout
    assert "between h0 and h1: " not in done.stderr, done.stderr
    assert_same(read_result(tmp_path), train_alone(tmp_path, script=script))


@pytest.mark.long
def test_ranks_are_laid_by_their_hosts(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """Groups that divide tensors are within hosts, and datasets, rows of results and weights are one process's."""
    launcher, script = HostLauncher(make_hosts(3), python=warm_python()), str(HERE / "meshes.py")
    for hosts, order in (("h0:2,h1:2", "0 2 1 3"), ("h0:1,h1:2,h2:1", "0 1 3 2")):
        done = launcher.run("-np", "4", "--hosts", hosts, script, str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"ranks lie {order}" in done.stdout, done.stdout
        assert_same(read_result(tmp_path), train_alone(tmp_path, script=script))


@pytest.mark.long
def test_what_is_exchanged_crosses_to_a_host_once(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    launcher = HostLauncher(make_hosts(2), python=warm_python())
    kinds = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")
    where = ["-np", "4", "--hosts", "h0:2,h1:2"]
    done = launcher.run(*where, str(HERE / "exchanges.py"), ",".join(kinds), "4096")
    assert done.returncode == 0, done.stderr
    found = {line.split()[1]: float(line.split()[-1]) for line in done.stdout.splitlines()}
    # Of 4 MB in all; a ring would have 1.5 and 0.75 leave a host, and TCP adds its headers.
    for kind, times in zip(kinds, (1.0, 0.5, 0.5, 1.0)):
        assert times <= found[kind] < 1.1 * times, found


SRUN = """#!/bin/bash
# Stands for srun: mpirun gives the tasks what slurmd gives them for --mpi=pmix, and `task` has SLURM's variables.
while [[ $1 == --* ]]; do shift; done
exec mpirun --allow-run-as-root --oversubscribe --bind-to none --host h0:1,h1:1 -np 2 "$(dirname "$0")/task" "$@"
"""
TASK = """#!/bin/bash
# A task of a job step on its node, as slurmd starts it.
for name in $(compgen -e OMPI_) $(compgen -e WHALE_); do unset "$name"; done
export SLURM_PROCID=$PMIX_RANK SLURM_NODEID=$PMIX_RANK SLURM_LOCALID=0
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE='1(x2)'
{environment}
exec "$@"
"""


@pytest.mark.long
@pytest.mark.parametrize("starts", ["srun", "whale"])
def test_the_batch_script_of_slurm_starts_a_job(make_hosts: Callable[..., Hosts], tmp_path: Path, starts: str) -> None:
    """The guide's file, as it is, with stand-ins for srun and scontrol on two nodes."""
    hosts = make_hosts(2)
    launcher = HostLauncher(hosts, python=warm_python())  # makes what hosts find of Python
    programs = tmp_path / "bin"
    own = Path(sys.executable).parent
    told = "\n".join(f"export {name}={shlex.quote(text)}" for name, text in python_environment().items())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"export PATH={programs}:$PATH:{own}\n")
    for name, text in {
        "srun": SRUN,
        "task": TASK.replace("{environment}", told),
        "scontrol": "#!/bin/sh\nprintf 'h0\\nh1\\n'\n",
        "python": f'#!/bin/sh\nexec {warm_python()} "$@"\n',
        "whale": f'#!/bin/sh\nexec {warm_python()} -m whale "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_NODELIST": "h[0-1]",
    }
    more = {**launcher.environment, **job, "LAUNCHER": starts}
    done = hosts.run("h0", "bash", str(ROOT / "examples" / "deploy" / "slurm.sh"), TRAIN, str(tmp_path), more=more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(read_result(tmp_path), train_alone(tmp_path))


@pytest.mark.long
def test_an_elastic_run_follows_the_pods_of_a_set(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """The guide's `pods.sh`, as it is, where the name service has the names of two pods."""
    hosts = make_hosts(2)
    with (tmp_path / "etc_hosts").open("a") as names:
        names.writelines(f"{hosts.address(name)} whale-{number}.whale\n" for number, name in enumerate(hosts.names))
    launcher = HostLauncher(hosts, python=warm_python())
    launcher.environment["WHALE_FAULT_ELASTIC"] = "memory"
    done = launcher.run("--hosts-from", str(ROOT / "examples" / "deploy" / "pods.sh"), TRAIN, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(read_result(tmp_path), train_alone(tmp_path))
