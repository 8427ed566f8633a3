"""Pipelines: each group of ranks runs its stages, planned as one group would run the whole program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whale.errors import PlanError
from whale.ir.layout import Split
from whale.ir.plan import Place, Plan
from whale.ir.program import Program, Ref
from whale.lowering.local import localise
from whale.lowering.places import Connector
from whale.passes.annotate import task_graphs
from whale.passes.pipeline import PlanContext, expand, make_plan
from whale.passes.places import FETCH_SENT, FETCHED, SENT, Cut, cut, edges_of, plan_of_part
from whale.passes.stages import stage_of
from whale.runtime.homes import Use
from whale.runtime.pipelined import WholeInTime


def plan_places(program: Program, context: PlanContext, places: tuple[Place, ...]) -> Plan:
    """The plan of a program with stages: that of one group for all of it, and what travels between the groups.

    Raises:
      PlanError: see ``make_plan``; the stages have different numbers of ranks; an option that pipelines lack.
    """
    _refuse(context, places)
    size = len(places[0].ranks)
    inside = replace(context, size=size, devices=(), split_variables=False, split_ranks=0)
    plan = make_plan(program, inside)
    expanded = expand(program, plan.expanded, inside)
    at = {stage: place.ranks for place in places for stage in place.stages}
    graphs = tuple(replace(t, devices=at.get(stage_of(t.scope), ())) for t in task_graphs(expanded, ()))
    devices = tuple("rank " + "+".join(str(place.ranks[i]) for place in places) for i in range(size))
    return replace(
        plan,
        schedule=context.schedule if plan.micro_batches > 1 else "",
        places=places,
        edges=edges_of(expanded, cut(expanded, places), plan),
        task_graphs=graphs,
        devices=devices,
    )


def lower_places(
    expanded: Program, plan: Plan, ranks: Sequence[int], comm: str, what: str, context: PlanContext
) -> list[Program]:
    """What each of ``ranks`` runs under a plan of ``plan_places``.

    Raises:
      PlanError: the stages cannot be gone through in micro-batches as the schedule asks.
    """
    cuts = cut(expanded, plan.places)
    where = {rank: (k, c) for k, place in enumerate(plan.places) for c, rank in enumerate(place.ranks)}
    found = []
    for rank in ranks:
        number, coordinate = where[rank]
        part = cuts[number]
        lowered = localise(part.program, plan_of_part(plan, part), coordinate, comm, None)
        if plan.micro_batches == 1:
            found.append(_connected(lowered, plan, cuts, number, coordinate, comm, what, {}))
            continue
        whole = WholeInTime(expanded, plan, coordinate, context)
        connected = _connected(lowered, plan, cuts, number, coordinate, comm, what, whole.rows)
        found.append(whole.pipelined(connected, number))
    return found


def _connected(
    lowered: Program,
    plan: Plan,
    cuts: Sequence[Cut],
    number: int,
    coordinate: int,
    comm: str,
    what: str,
    rows: Mapping[Ref, Split],
) -> Program:
    part = cuts[number]
    senders: dict[str, list[tuple[int, int, str]]] = {}
    for ref, source in part.taken.items():
        senders.setdefault(ref.node, []).append((ref.index, source, str(ref)))
    for i, source in part.fetched.items():
        senders[FETCHED.format(i)] = [(0, source, f"fetched {i}")]
    receivers = {SENT.format(ref.node, ref.index): (targets, str(ref)) for ref, targets in part.given.items()}
    for i in range(len(part.program.outputs)):
        readers = tuple(k for k, other in enumerate(cuts) if i in other.fetched)
        receivers[FETCH_SENT.format(i)] = (readers, f"fetched {i}")
    in_rows = {str(ref) for ref in rows}
    connector = Connector(lowered, plan.places, number, coordinate, comm, senders, receivers, in_rows)
    return connector.run((plan.fingerprint, what))


def _refuse(context: PlanContext, places: Sequence[Place]) -> None:
    if len({len(place.ranks) for place in places}) > 1:
        raise PlanError(
            "stages with different numbers of ranks are not there yet",
            given="; ".join(f"{place.name} on {list(place.ranks)}" for place in places),
            expected="as many ranks for each stage",
            action="change the devices of the stages",
        )
    used = sum(len(place.ranks) for place in places)
    if used != context.size:
        raise PlanError(
            "some ranks have no stage",
            given=f"{context.size} ranks, of which the stages use {used}",
            expected="a stage for every rank",
            action="start fewer ranks or change the devices of the stages",
        )
    unable = {
        "zero.level": context.zero_level > 0,
        'communication.backend="horovod"': context.backend != "whale",
        "split.ranks": 0 < context.split_ranks < len(places[0].ranks),
        "a batch of which every rank passes its own rows": bool(context.local),
    }
    for name, wanted in unable.items():
        if wanted:
            raise PlanError(
                "a pipeline cannot be combined with an option yet",
                given=name,
                expected="a pipeline without it",
                action="leave it out, or pass the whole batch on every rank",
            )


_READS = frozenset({"ReadVariableOp", "VariableShape", "VarIsInitializedOp", "ResourceGather", "ResourceGatherNd"})


def uses_of_places(expanded: Program, plan: Plan) -> dict[str, Use]:
    """Which ranks use each variable, and whether it is written, by handle node; nothing for a plan without places."""
    ranks: dict[str, frozenset[int]] = {}
    for place, part in zip(plan.places, cut(expanded, plan.places) if plan.places else ()):
        for variable in part.program.variables:
            ranks[variable.node] = ranks.get(variable.node, frozenset()) | frozenset(place.ranks)
    written = {r.node for n in expanded.nodes if n.op not in _READS for r in n.inputs if r.node in expanded.variable_of}
    return {name: Use(mine, name in written) for name, mine in ranks.items()}
