"""What a strategy is told by TF_CONFIG, and what it does on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import whale as wh
from tests.launcher.helpers import Launcher
from whale.errors import ClusterError, ConfigError
from whale.frontends.tf_distribute.strategy import Resolver
from whale.runtime.tf_config import check_alone, check_tf_config, read_tf_config

TWO = {"worker": ["host1:12345", "host2:23456"]}


def said(**parts: Any) -> dict[str, Any]:
    return read_tf_config({"TF_CONFIG": json.dumps(parts)})


def test_strategy(launcher: Launcher) -> None:
    script = Path(__file__).parent / "strategy_on_ranks.py"
    done = launcher.run("-np", "2", str(script), timeout_s=300)
    assert done.returncode == 0 and done.stdout.count("all of the strategy") == 2, done.stdout + done.stderr


def test_no_config_is_no_workers() -> None:
    assert read_tf_config({}) == read_tf_config({"TF_CONFIG": " "}) == {}
    check_tf_config({}, 1, 4, "whale run")
    resolver = Resolver({}, 1, 2)
    assert (resolver.task_type, resolver.task_id, len(resolver.cluster_spec().as_dict()["worker"])) == ("worker", 1, 2)


def test_workers_are_ranks() -> None:
    for rank in range(2):
        check_tf_config(said(cluster=TWO, task={"type": "worker", "index": rank}), rank, 2, "whale run")
        check_tf_config(said(cluster=TWO), rank, 2, "whale run")
    chief = said(cluster={"chief": ["a:1"], "worker": ["b:1"]}, task={"type": "worker", "index": 0})
    check_tf_config(chief, 1, 2, "whale run")
    assert [(Resolver(chief, r, 2).task_type, Resolver(chief, r, 2).task_id) for r in range(2)] == [
        ("chief", 0),
        ("worker", 0),
    ]


def test_another_number_of_workers_says_how_to_start_them() -> None:
    with pytest.raises(ClusterError, match=r"whale run -np 2 --hosts host1:1,host2:1 script.py"):
        check_tf_config(said(cluster=TWO, task={"type": "worker", "index": 0}), 0, 1, "none")
    one_host = {"worker": ["localhost:1", "localhost:2"]}
    with pytest.raises(ClusterError, match=r"`whale run -np 2 script.py`"):
        check_tf_config(said(cluster=one_host), 0, 4, "whale run")


def test_a_process_that_nothing_started_does_not_train_without_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    alone = {"cluster": {"worker": ["host1:1"]}, "task": {"type": "worker", "index": 0}}
    for environment in ({}, {"TF_CONFIG": json.dumps(alone)}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}):
        check_alone(environment)
    assert capsys.readouterr().err == ""
    with pytest.raises(ClusterError, match=r"whale run -np 2 --hosts host1:1,host2:1 script.py"):
        check_alone({"TF_CONFIG": json.dumps({"cluster": TWO, "task": {"type": "worker", "index": 1}})})
    check_alone({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert (
        "SLURM gave this job 8 tasks (SLURM_NTASKS), and the script runs as a single rank: start it with `srun"
        in capsys.readouterr().err
    )


def test_wh_init_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO}))
    with pytest.raises(ClusterError, match="TF_CONFIG names other workers"):
        wh.init()
    wh.init(solo=True)
    wh.shutdown()
    wh.init(ranks=2)  # of this process
    wh.shutdown()


def test_another_place_than_the_launcher_says() -> None:
    with pytest.raises(ClusterError, match='leave "task" out'):
        check_tf_config(said(cluster=TWO, task={"type": "worker", "index": 0}), 1, 2, "whale run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (json.dumps({"cluster": {"ps": ["a:1"], "worker": ["b:1"]}}), "given: ps"),
        (json.dumps({"cluster": TWO, "task": {"type": "evaluator", "index": 0}}), "given: evaluator"),
    ],
)
def test_what_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tf_config({"TF_CONFIG": text})
