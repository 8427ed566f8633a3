"""Hosts that a scheduler gave: SLURM's short form, Kubernetes' TF_CONFIG, and a cluster of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_model.cluster import allocation, cluster_file
from cost_model.cluster.cluster_file import Cluster, DeviceEntry, HostEntry
from whale.cli import main
from whale.errors import ClusterError
from whale.planner.report import planfile

LOCAL = Cluster("local", [HostEntry("here", [DeviceEntry("a100", 4)])])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ("login",)),
        ("a,b7", ("a", "b7")),
        ("gpu[01-03,07],login", ("gpu01", "gpu02", "gpu03", "gpu07", "login")),
        ("r[8-10]-ib", ("r8-ib", "r9-ib", "r10-ib")),
    ],
)
def test_node_lists(text: str, names: tuple[str, ...]) -> None:
    assert allocation.list_hosts({"SLURM_JOB_NODELIST": text}) == names


@pytest.mark.parametrize("text", ["", "a[", "a[3-1]", "a[x]", "a,a", ","])
def test_node_lists_that_are_none(text: str) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        allocation.list_hosts({"SLURM_JOB_NODELIST": text})


def test_kubernetes_and_neither() -> None:
    config = '{"cluster": {"chief": ["job-0:2222"], "worker": ["job-1:2222", "job-2:2222"], "ps": ["p:1"]}}'
    assert allocation.list_hosts({"TF_CONFIG": config}) == ("job-0", "job-1", "job-2")
    assert allocation.list_hosts({}) == ()
    for broken in ("{", "[]", '{"task": 1}', '{"cluster": 3}'):
        with pytest.raises(ClusterError, match="TF_CONFIG"):
            allocation.list_hosts({"TF_CONFIG": broken})


def test_all_hosts_are_like_the_one_at_hand() -> None:
    assert allocation.repeat_cluster(LOCAL, ("here",), None) is LOCAL
    found = allocation.repeat_cluster(LOCAL, ("n1", "n2", "n3"), "infiniband-hdr-200")
    assert found.device_count == 12 and cluster_file.parse(cluster_file.to_yaml(found)) == found
    with pytest.raises(ClusterError, match="--network"):
        allocation.repeat_cluster(LOCAL, ("n1", "n2"), None)
    with pytest.raises(ClusterError, match="no such network"):
        allocation.repeat_cluster(LOCAL, ("n1", "n2"), "token-ring")


def test_a_command_that_is_told_local_takes_the_hosts_of_its_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(allocation.discover, "discover_local", lambda quota: LOCAL)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    assert allocation.read_named_cluster("local", "infiniband-hdr-200").device_count == 3 * LOCAL.device_count
    out = str(tmp_path / "plan.json")
    model = "gpt:layers=3,hidden=64,heads=2,sequence=64,vocabulary=512,batch=12"
    given = ["plan", "--describe", model, "--cluster", "local", "--budget", "0.2", "-o", out, "--set", "data=12"]
    assert main([*given, "--network", "infiniband-hdr-200"]) == 0
    assert planfile.load(out).cluster.device_count == 3 * LOCAL.device_count
    assert main(given) == 2
