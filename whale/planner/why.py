"""Answers questions about a plan: where a layer is and why, and how the step changes with other choices or hardware.

An answer about a change comes from another search with that change; it lists how the parts of the step differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from cost_model.cluster import cluster_file as clusters
from cost_model.cluster.cluster_file import Cluster, NetworkEntry
from cost_model.hardware import catalogue
from whale.errors import PlanError, WhaleError
from whale.ir.plan_text import explain_operations, format_bytes, format_seconds
from whale.planner import ask, replan
from whale.planner.analytic_search.candidates import FIXED
from whale.planner.report.planfile import PlanFile
from whale.planner.report.show import against, explain_layer, is_faster, list_simpler

FORMS = (
    "a layer's number, simpler, stage=N, device=KIND, "
    + ", ".join(f"{name}=..." for name in FIXED)
    + ", batch=ROWS, HOST=COUNT, NETWORK=KIND, cluster=FILE"
)


def explain(plan: PlanFile, what: str, budget_s: float) -> str:
    """Answers `whale explain`: explains an operation of a script's plan, or a layer or question of a described model's
    plan.

    Args:
        what: name of an operation, number of a layer, or a question (see `answer`).
        budget_s: seconds of work for another search.

    Raises:
        PlanError: there is no such operation or layer, or the question cannot be answered.
    """
    if (program := plan.plan) is not None:
        return "\n".join(explain_operations(program, what))
    return explain_layer(plan, int(what)) if what.isdigit() else answer(plan, what, budget_s)


def answer(plan: PlanFile, question: str, budget_s: float) -> str:
    """Answers a question about a described model's plan in text.

    Questions are `simpler`, `stage=2`, `device=t4`, a constraint such as `tensor=4`, `batch=512`, `HOST=COUNT` (number
    of hosts of that name), `NETWORK=KIND`, and `cluster=FILE`.

    Raises:
        PlanError: the question has none of these forms.
    """
    if question == "simpler":
        return "\n".join(list_simpler(plan))
    name, equals, value = question.partition("=")
    hosts = {host.name for host in plan.machines.cluster.hosts}
    if not equals or not value:
        raise _unknown(plan, question)
    if name == "stage":
        return _stage(plan, question, value)
    if name == "cluster":
        return "\n".join(replan.compare(plan, clusters.read(value), budget_s))
    if name == "device":
        return _device(plan, value, budget_s)
    if name in FIXED or name.endswith(".split"):
        beats = f"`whale plan --set '{question}'` plans so"
        return _line(question, plan, lambda: _again(plan, budget_s, fixed=[question]), beats)
    if name == "batch" and value.isdigit():
        return _line(question, plan, lambda: _again(plan, budget_s, batch=int(value)))
    where: Cluster | None = None
    if name in hosts and value.isdigit() and int(value):
        where = _with_hosts(plan.machines.cluster, name, int(value))
    elif name in plan.machines.cluster.networks:
        where = _with_network(plan.machines.cluster, name, value)
    if where is not None:
        return _line(question, plan, lambda: _again(plan, budget_s, cluster=where))
    raise _unknown(plan, question)


def _unknown(plan: PlanFile, question: str) -> PlanError:
    names = [host.name for host in plan.machines.cluster.hosts] + list(plan.machines.cluster.networks)
    return PlanError(
        "the question cannot be answered for this plan",
        given=question,
        expected=f"{FORMS}; there are {', '.join(names)}",
        action="ask in one of these forms, with a host or network of the plan's cluster",
    )


def _again(
    plan: PlanFile,
    budget_s: float,
    fixed: list[str] | None = None,
    batch: int | None = None,
    cluster: Cluster | None = None,
) -> PlanFile:
    """Plans the same model again with fixed choices, another batch, or other devices."""
    limits = ask.limits(fixed or [], budget_s)
    where, rows = cluster or plan.machines.cluster, batch or plan.batch
    return ask.plan(where, rows, plan.transformer, plan.table, plan.software, limits)


def _line(words: str, plan: PlanFile, other: Callable[[], PlanFile], beats: str = "") -> str:
    """Describes in one line how the step changes with another plan, or why there is no such plan.

    Args:
        words: the change, as the line names it.
        other: makes the other plan.
        beats: what to do to get the other plan if it is faster; empty: it needs other hardware.
    """
    try:
        found = other()
    except WhaleError as error:
        reason = error.facts.get("reason") or "; ".join([error.message, *filter(None, [error.facts.get("nearest")])])
        return f"{words}: infeasible: {reason.removeprefix('infeasible: ')}"
    rows = ""
    if found.batch != plan.batch:
        before, after = (one.batch / one.step_s for one in (plan, found))
        rows = f"; {after:,.1f} rows/s instead of {before:,.1f} ({after / before - 1:+.1%})"
    if found.strategy == plan.strategy and found.cluster == plan.cluster:
        return f"{words}: the plan is already so{rows}"
    faster = beats and is_faster(found, plan)
    verdict = f"faster than the plan; {beats}; " if faster else ""
    change = against(found, plan).partition("; without")[0]
    return f"{words}: {verdict}{found.strategy.format_summary()}: {change}{rows}"


def _stage(plan: PlanFile, question: str, value: str) -> str:
    """Describes a stage: its layers, its devices with free memory, and its seconds compared to the slowest stage."""
    _, machines, found = plan.evaluate()
    stages = plan.strategy.stages
    if not value.isdigit() or int(value) >= len(stages):
        raise PlanError(
            "there is no such stage",
            given=question,
            expected=f"stage=0 to stage={len(stages) - 1}",
            action="give a stage of the plan (`whale show` lists them)",
        )
    index = int(value)
    each = [sum(cost.forward_s) + sum(cost.backward_s) for cost in found.stages]
    slowest = max(range(len(each)), key=lambda i: each[i])
    cost, stage = found.stages[index], stages[index]
    ranges = ", ".join(f"{low}-{high - 1}" for low, high in stage.layers)
    lines = [f"stage {index}: layers {ranges}, {plan.strategy.find_recompute(stage)} recompute"]
    for part, used in zip(stage.parts, cost.memory):
        pool = machines.pools[part.pool]
        room = pool.memory_bytes - used.total_bytes
        lines.append(
            f"  on {part.replicas} x {part.tensor} {pool.name}, {part.rows} rows each; {format_bytes(room)} left"
        )
    rest = f"{each[index] / each[slowest]:.0%} of stage {slowest}, the slowest" if index != slowest else "the slowest"
    lines.append(f"  a micro-batch: {format_seconds(each[index])}, {rest}; of it sends {format_seconds(cost.send_s)}")
    lines.append(
        f"  after the last one: sum of gradients {format_seconds(cost.reduce_s)}, "
        f"update {format_seconds(cost.update_s)}"
    )
    return "\n".join(lines)


def _device(plan: PlanFile, kind: str, budget_s: float) -> str:
    """Describes how many devices of a kind the plan uses, and what a plan without them, or with them alone, would
    cost.
    """
    pools = plan.machines.pools
    own = [pool for pool in pools if kind in (pool.device.name, pool.entry.type, pool.host.name, pool.name)]
    if not own:
        known = ", ".join(dict.fromkeys(pool.device.name for pool in pools))
        raise PlanError(
            "the cluster has no such device",
            given=f"device={kind}",
            expected=known,
            action="give a kind of device, or a host, of the plan's cluster",
        )
    numbers = {pool.number for pool in own}
    used = sum(part.ranks for stage in plan.strategy.stages for part in stage.parts if part.pool in numbers)
    lines = [f"{kind}: {used} of {sum(pool.devices for pool in own)} are used"]
    entries = {id(pool.entry) for pool in own}
    for words, keep in ((f"without {kind}", False), (f"{kind} alone", True)):
        hosts = []
        for host in plan.machines.cluster.hosts:
            left = [entry for entry in host.devices if (id(entry) in entries) == keep]
            hosts += [msgspec.structs.replace(host, devices=left)] if left else []
        if hosts and len(own) < len(pools):
            cluster = msgspec.structs.replace(plan.machines.cluster, hosts=hosts)
            beats = "`whale plan` finds it with a cluster file of these devices"
            lines.append("  " + _line(words, plan, partial(_again, plan, budget_s, cluster=cluster), beats))
    return "\n".join(lines)


def _with_hosts(cluster: Cluster, name: str, count: int) -> Cluster:
    hosts = [msgspec.structs.replace(h, count=count) if h.name == name else h for h in cluster.hosts]
    return msgspec.structs.replace(cluster, hosts=hosts)


def _with_network(cluster: Cluster, name: str, kind: str) -> Cluster:
    catalogue.find_network(kind)  # an unknown kind is an error that names the nearest one
    # The cluster file may override figures of the old network; they do not hold for the new one.
    other = NetworkEntry(kind, cluster.networks[name].oversubscription)
    return msgspec.structs.replace(cluster, networks={**cluster.networks, name: other})
