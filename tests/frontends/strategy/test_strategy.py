"""What a strategy is told by TF_CONFIG, and what it does on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.helpers import Launcher
from whale.errors import ClusterError, ConfigError
from whale.frontends.strategy.workers import Resolver, check, tf_config

TWO = {"worker": ["host1:12345", "host2:23456"]}


def said(**parts: Any) -> dict[str, Any]:
    return tf_config({"TF_CONFIG": json.dumps(parts)})


def test_strategy(launcher: Launcher) -> None:
    script = Path(__file__).parent / "strategy_on_ranks.py"
    done = launcher.run("-np", "2", str(script), timeout_s=300)
    assert done.returncode == 0 and done.stdout.count("all of the strategy") == 2, done.stdout + done.stderr


def test_no_config_is_no_workers() -> None:
    assert tf_config({}) == tf_config({"TF_CONFIG": " "}) == {}
    check({}, 1, 4, "whale run")
    resolver = Resolver({}, 1, 2)
    assert (resolver.task_type, resolver.task_id, len(resolver.cluster_spec().as_dict()["worker"])) == ("worker", 1, 2)


def test_workers_are_ranks() -> None:
    for rank in range(2):
        check(said(cluster=TWO, task={"type": "worker", "index": rank}), rank, 2, "whale run")
        check(said(cluster=TWO), rank, 2, "whale run")
    chief = said(cluster={"chief": ["a:1"], "worker": ["b:1"]}, task={"type": "worker", "index": 0})
    check(chief, 1, 2, "whale run")
    assert [(Resolver(chief, r, 2).task_type, Resolver(chief, r, 2).task_id) for r in range(2)] == [
        ("chief", 0),
        ("worker", 0),
    ]


def test_another_number_of_workers_says_how_to_start_them() -> None:
    with pytest.raises(ClusterError, match=r"whale run -np 2 --hosts host1:1,host2:1 script.py"):
        check(said(cluster=TWO, task={"type": "worker", "index": 0}), 0, 1, "none")
    one_host = {"worker": ["localhost:1", "localhost:2"]}
    with pytest.raises(ClusterError, match=r"`whale run -np 2 script.py`"):
        check(said(cluster=one_host), 0, 4, "whale run")


def test_another_place_than_the_launcher_says() -> None:
    with pytest.raises(ClusterError, match='leave "task" out'):
        check(said(cluster=TWO, task={"type": "worker", "index": 0}), 1, 2, "whale run")


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
        tf_config({"TF_CONFIG": text})
