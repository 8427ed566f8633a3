"""Files for schedulers, run on hosts of namespaces: what starts ranks on a cluster starts them here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
import yaml

from tests.forkserver import warm_python
from tests.hosts.hosts import HostLauncher, Hosts
from tests.test_deploy import FOLDER, containers

pytestmark = pytest.mark.long
SAYS = """
import whale as wh
wh.init()
print("rank", wh.rank(), "of", wh.size(), flush=True)
"""


def _hosts_with_whale(make_hosts: Callable[..., Hosts], count: int, **programs: str) -> Hosts:
    """Hosts with `whale`, `python`, and stand-ins for a scheduler's programs on their PATH, and a script `train.py`."""
    hosts = make_hosts(count)
    HostLauncher(hosts, python=warm_python())  # its server has to be there before
    texts = {"whale": f'exec {warm_python()} -m whale "$@"', "python": f'exec {warm_python()} "$@"', **programs}
    for name, text in texts.items():
        path = hosts.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (hosts.folder / "train.py").write_text(SAYS)
    return hosts


def _require_four_ranks(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"rank (\d) of 4", done.stdout)
    assert sorted(said) == ["0", "1", "2", "3"], done.stdout + done.stderr


def test_the_launcher_pod_starts_ranks_by_the_operator_s_list(make_hosts: Callable[..., Hosts]) -> None:
    hosts = _hosts_with_whale(make_hosts, 2)
    (hosts.folder / "hostfile").write_text("h0 slots=2\nh1 slots=2\n")
    (launcher,) = [
        c
        for c in containers(list(yaml.safe_load_all((FOLDER / "mpijob.yaml").read_text())))
        if c["command"] == ["whale"]
    ]
    words = [str(hosts.folder / "hostfile") if word == "/etc/mpi/hostfile" else word for word in launcher["args"]]
    _require_four_ranks(hosts.run("h0", "whale", *words))


def test_the_first_pod_starts_ranks_on_all(make_hosts: Callable[..., Hosts]) -> None:
    hosts = _hosts_with_whale(make_hosts, 4)
    (pod,) = containers(list(yaml.safe_load_all((FOLDER / "statefulset.yaml").read_text())))
    keys = hosts.folder / "keys"
    keys.mkdir()
    (keys / "id_ed25519").write_text("a key")
    text = pod["args"][0].replace("/ssh/*", f"{keys}/*").replace("exec sleep infinity", "exit 0")
    text = text.replace("/usr/sbin/sshd -De", "echo answers").replace('"whale-$n.whale"', '"h$n"')
    text = re.sub(r"whale-(\d)(\.whale)?\b", r"h\1", text)
    _require_four_ranks(hosts.run("h0", *pod["command"], text))
    assert hosts.run("h1", *pod["command"], text).stdout == "answers\n"
