"""Compares the workers in ``TF_CONFIG``, which tf.distribute reads, and the tasks of a SLURM job with the ranks that
were started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from whale.errors import ClusterError, ConfigError
from whale.log import log

VARIABLE = "TF_CONFIG"
_WORKERS = ("chief", "worker")  # in the order of ranks


def read_tf_config(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns ``TF_CONFIG`` as ``{"cluster": ..., "task": ...}``; {} if it is not set.

    Args:
      environment: environment variables; None: this process's.

    Raises:
      ConfigError: it is not such JSON, or has tasks that are not workers.
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
            f"{VARIABLE} has tasks that are not workers",
            given=", ".join(others),
            expected="workers, of which one may be the chief: every rank trains",
            action="leave out parameter servers and evaluators, and evaluate in the script of the workers",
        )
    return {"cluster": cluster, "task": task}


def check_tf_config(said: Mapping[str, Any], rank: int, size: int, launcher: str) -> None:
    """Raises an error if ``TF_CONFIG`` does not describe the ranks of this run.

    Args:
      said: as ``read_tf_config`` returns it.
      launcher: what started the ranks, for messages.

    Raises:
      ClusterError: the number of workers is not ``size``, or this process's index is not ``rank``.
    """
    addresses = _list_addresses(said)
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


def check_alone(environment: Mapping[str, str] | None = None) -> None:
    """Raises an error if a process that no launcher started finds other workers in ``TF_CONFIG``: it would train
    without them.

    Warns if SLURM gave the job several tasks.

    Raises:
      ClusterError: ``TF_CONFIG`` names several workers.
      ConfigError: ``TF_CONFIG`` cannot be read, or has tasks that are not workers.
    """
    environment = os.environ if environment is None else environment
    check_tf_config(read_tf_config(environment), 0, 1, "none")
    tasks = environment.get("SLURM_NTASKS", "1")
    if tasks not in ("", "1") and "SLURM_JOB_ID" in environment:
        log.warning(
            f"SLURM gave this job {tasks} tasks (SLURM_NTASKS), and the script runs as a single rank: start it with "
            "`srun python script.py`, or with `whale run`"
        )


def _list_addresses(said: Mapping[str, Any]) -> list[str]:
    cluster = said.get("cluster") or {}
    return [address for kind in _WORKERS for address in cluster.get(kind, ())]
