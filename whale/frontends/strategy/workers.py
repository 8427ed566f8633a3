"""``TF_CONFIG``, by which tf.distribute is told its workers, beside what the launcher of the ranks says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from whale.errors import ClusterError, ConfigError

VARIABLE = "TF_CONFIG"
_WORKERS = ("chief", "worker")  # in the order of ranks


def tf_config(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``TF_CONFIG`` says; {} where it is not set.

    Raises:
      ConfigError: it cannot be read, or has tasks that are no workers.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not text.strip():
        return {}
    expected = '{"cluster": {"worker": ["host1:port", "host2:port"]}, "task": {"type": "worker", "index": 0}}'
    try:
        said = json.loads(text)
        cluster, task = dict(said.get("cluster") or {}), dict(said.get("task") or {})
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(
            f"{VARIABLE} cannot be read", given=text, expected=expected, action=f"correct or unset {VARIABLE}"
        ) from None
    others = sorted(kind for kind in [*cluster, *([task["type"]] if "type" in task else [])] if kind not in _WORKERS)
    if others:
        raise ConfigError(
            f"{VARIABLE} has tasks that are no workers",
            given=", ".join(others),
            expected="workers, of which one may be the chief: every rank trains",
            action="leave out parameter servers and evaluators, and evaluate in the script of the workers",
        )
    return {"cluster": cluster, "task": task}


def check(said: Mapping[str, Any], rank: int, size: int, launcher: str) -> None:
    """Compares ``TF_CONFIG`` with the ranks that there are.

    Raises:
      ClusterError: it names other workers, or another place for this process.
    """
    addresses = _addresses(said)
    if not addresses:
        return
    hosts = [address.rpartition(":")[0] for address in addresses]
    if len(addresses) != size:
        counted = ",".join(f"{host}:{hosts.count(host)}" for host in dict.fromkeys(hosts))
        command = f"whale run -np {len(addresses)}" + (f" --hosts {counted}" if len(set(hosts)) > 1 else "")
        raise ClusterError(
            f"{VARIABLE} names other workers than there are ranks",
            given=f"{len(addresses)} workers ({', '.join(addresses)}), {size} ranks (started by: {launcher})",
            expected="a rank for each worker; the ranks are connected by what starts them",
            action=f"start all of them with one command, `{command} script.py`, or unset {VARIABLE}",
        )
    task = said["task"]
    if "index" not in task:
        return
    chiefs = len(said["cluster"].get("chief", ()))
    told = int(task["index"]) + (chiefs if task.get("type", "worker") == "worker" else 0)
    if told != rank:
        raise ClusterError(
            f"{VARIABLE} gives this process another place than its launcher",
            given=f"{task.get('type', 'worker')} {task['index']} in {VARIABLE}, rank {rank} ({launcher})",
            expected=f"task {told} as rank {told}",
            action=f'leave "task" out of {VARIABLE}: the launcher says which rank this is',
        )


class Resolver:
    """What ``strategy.cluster_resolver`` tells of the workers.

    Attributes:
      task_type: "worker", or "chief" where ``TF_CONFIG`` has one and this rank is it.
      task_id: its number among those of its type.
    """

    rpc_layer = "mpi"
    environment = ""

    def __init__(self, said: Mapping[str, Any], rank: int, size: int) -> None:
        cluster = dict(said.get("cluster") or {}) or {"worker": [f"rank{number}:0" for number in range(size)]}
        chiefs = len(cluster.get("chief", ()))
        self._cluster = cluster
        self.task_type = "chief" if rank < chiefs else "worker"
        self.task_id = rank if rank < chiefs else rank - chiefs

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """The workers."""
        return tf.train.ClusterSpec(self._cluster)

    def master(self, *_: Any, **__: Any) -> str:
        """No server listens."""
        return ""


def _addresses(said: Mapping[str, Any]) -> list[str]:
    cluster = said.get("cluster") or {}
    return [address for kind in _WORKERS for address in cluster.get(kind, ())]
