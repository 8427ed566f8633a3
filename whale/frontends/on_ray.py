"""Implements ``whale.ray.run``: calls a function on every rank of a run whose processes a Ray cluster places.

Decision: 0084.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whale.errors import ClusterError, InstallError
from whale.frontends.launch import launch_pickled, pickle_call


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    *,
    cpus_per_rank: int = 1,
    timeout_s: float = 600.0,
    verbose: bool = False,
) -> list[Any]:
    """Calls a function on every rank of a new run, on CPUs that a placement group of Ray holds for it.

    Connects to the cluster that ``RAY_ADDRESS`` names, or starts Ray on this machine, unless ``ray.init`` was called.
    Ranks of one node are started there by a task; those of several nodes by ssh from the first one, as by `whale run
    --hosts`: the nodes need ssh without a password, this Python at one path, and a temporary folder that all see. The
    function calls ``wh.init()`` itself. What the ranks print comes through Ray.

    Args:
      fn, args, kwargs: the call, the same on every rank.
      np: number of ranks.
      cpus_per_rank: CPUs, and threads, of each.
      timeout_s: how long the cluster may take to find room.
      verbose: as `whale run -v`.

    Returns:
      What each rank returned, by rank, as ``wh.launch`` does.

    Raises:
      InstallError: ray or cloudpickle is not installed.
      ClusterError: the cluster has no room for the ranks, or the run failed.
    """
    ray, placement, scheduling = _import_ray()
    if not ray.is_initialized():
        ray.init()
    group = placement.placement_group([{"CPU": cpus_per_rank}] * np, strategy="PACK")
    try:
        if not group.wait(timeout_s):
            raise ClusterError(
                "the Ray cluster has no room for the ranks",
                given=f"{np} ranks of {cpus_per_rank} CPUs each, after {timeout_s:g} s",
                found=f"{ray.cluster_resources().get('CPU', 0):g} CPUs, free or not",
                expected="room for all of them at once",
                action="start fewer ranks, or wait for what else runs there",
            )
        at = scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        task = ray.remote(num_cpus=cpus_per_rank, max_retries=0, scheduling_strategy=at)(launch_pickled)
        hosts = _list_hosts(ray, placement.placement_group_table(group)["bundles_to_node_id"], np)
        # Ray's own pickles leave out a function's source, which AutoGraph wants to read.
        call = task.remote(pickle_call(fn, args, kwargs), np, hosts, cpus_per_rank, verbose)
        try:
            return list(ray.get(call))
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ClusterError) else error from None
    finally:
        placement.remove_placement_group(group)


def _list_hosts(ray: Any, nodes: Mapping[int, str], np: int) -> str | None:
    """Returns ``address:ranks,...`` of the nodes that hold the group, in order of ranks; None where there is one."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    counts = Counter(addresses[nodes[bundle]] for bundle in range(np))
    return None if len(counts) == 1 else ",".join(f"{address}:{count}" for address, count in counts.items())


def _import_ray() -> tuple[Any, ...]:
    try:
        names = ("ray", "ray.util.placement_group", "ray.util.scheduling_strategies")
        return tuple(map(importlib.import_module, names))
    except ModuleNotFoundError:
        raise InstallError(
            "whale.ray needs Ray, which places the ranks",
            given=f"none in {sys.executable}",
            expected="ray 2.9 or newer",
            action="pip install ray cloudpickle",
        ) from None
