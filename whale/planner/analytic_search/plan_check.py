"""Checks that a strategy is valid for a model and a cluster, independently of the search that made it."""

from __future__ import annotations

from cost_model.analytic.layer_costs import Model
from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, ParallelStrategy

MOST_HOSTS = 64  # groups are placed on hosts one by one up to this many hosts; larger pools are not checked so


def check(model: Model, machines: Machines, strategy: ParallelStrategy, batch: int) -> list[str]:
    """Returns one sentence for each error in a strategy's layers, devices, rows and degrees; an empty list: it is
    valid.

    Args:
        batch: global batch in rows.
    """
    wrong = []
    pools = {part.pool for stage in strategy.stages for part in stage.parts}
    if most := [pool for pool in pools if not 0 <= pool < len(machines.pools)]:
        there = ", ".join(f"{pool.devices} {pool.name}" for pool in machines.pools)
        wrong.append(f"the plan has {max(most) + 1} kinds of devices, the cluster {len(machines.pools)}: {there}")
        return wrong
    known = {kind for kind, _ in model.recomputes()}
    for index, kind in enumerate(strategy.recomputes):
        if kind not in known:
            wrong.append(f"stage {index}: {kind} recompute; of the model is known: {', '.join(sorted(known))}")
    if wrong:
        return wrong
    ranges = [strategy.stages[s].layers[c] for c in range(strategy.chunks) for s in range(len(strategy.stages))]
    if [low for low, _ in ranges] + [model.count] != [0] + [high for _, high in ranges]:
        wrong.append(f"the stages' layers {ranges} do not make up the model's {model.count}")
    if any(high <= low for low, high in ranges):
        wrong.append(f"a stage has no layer: {ranges}")
    for index, stage in enumerate(strategy.stages):
        if stage.rows * strategy.micro_batches != batch * strategy.context:
            rows = f"{stage.rows} rows x {strategy.micro_batches} micro-batches"
            wrong.append(f"stage {index} has {rows} instead of the rows of a batch of {batch}")
        if any(part.rows < 1 or part.replicas < 1 for part in stage.parts):
            wrong.append(f"stage {index} has a group of devices without rows or replicas")
        if any(part.replicas % strategy.context for part in stage.parts):
            wrong.append(f"stage {index} has replicas that are no multiple of {strategy.context}, the context degree")
        if strategy.expert_ranks and (not model.experts or stage.replicas % strategy.expert_ranks):
            wrong.append(
                f"stage {index} has {stage.replicas} replicas for {model.experts} experts per layer,"
                f" which {strategy.expert_ranks} expert-parallel ranks do not divide"
            )
    if len(strategy.stages) == 1 < strategy.chunks:
        wrong.append(f"a strategy of one stage has {strategy.chunks} chunks: interleaving needs 2 stages or more")
    if strategy.context > 1 and (not model.sequence or model.sequence % strategy.context):
        tokens = model.sequence or "an unknown number of"
        wrong.append(f"{strategy.context} context-parallel ranks do not divide a row of {tokens} tokens")
    if model.experts and strategy.expert_ranks and model.experts % strategy.expert_ranks:
        wrong.append(f"{strategy.expert_ranks} expert-parallel ranks do not divide {model.experts} experts per layer")
    for pool in machines.pools:
        used = [part for stage in strategy.stages for part in stage.parts if part.pool == pool.number]
        if sum(part.ranks for part in used) > pool.devices:
            wrong.append(f"the plan uses {sum(p.ranks for p in used)} devices of {pool.name}, which has {pool.devices}")
        free = [pool.per_host] * pool.hosts if pool.hosts <= MOST_HOSTS else None
        for part in sorted(used, key=lambda p: -p.tensor):
            if part.tensor > pool.per_host:
                wrong.append(
                    f"a tensor-parallel group of {part.tensor} devices on {pool.name}, whose hosts have {pool.per_host}"
                )
            elif free is not None and not _take(free, part):
                wrong.append(
                    f"the hosts of {pool.name} have no room for {part.replicas} tensor-parallel groups of {part.tensor}"
                )
    return wrong


def _take(free: list[int], part: DeviceGroup) -> bool:
    left = part.replicas
    for host, room in enumerate(free):
        taken = min(left, room // part.tensor)
        free[host] -= taken * part.tensor
        left -= taken
    return left == 0
