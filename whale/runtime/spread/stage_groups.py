"""Pipelines: each group of ranks runs its stages, planned as one group would run the whole program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whale.errors import PlanError
from whale.ir.fingerprint import fingerprint
from whale.ir.layout import Placement, Split, split
from whale.ir.ops import READS
from whale.ir.plan import BatchInput, Plan, StageGroup
from whale.ir.program import Program
from whale.lowering.local import localise
from whale.lowering.stage_exchanges import Connector
from whale.passes.facts.batch import rows_of_ranks
from whale.passes.facts.scopes import has_split_scopes
from whale.passes.facts.stages import stage_of
from whale.passes.in_time.stage_groups import Cut, crossings, cut, edges_of, plan_of_part
from whale.passes.lay_out import expand
from whale.passes.normalise.annotate import task_graphs
from whale.passes.order import make_plan
from whale.passes.settings import PlanSettings
from whale.runtime.spread.stages_in_time import WholeInTime
from whale.runtime.variables.stage_variables import Use


def plan_stage_groups(program: Program, settings: PlanSettings, groups: tuple[StageGroup, ...]) -> Plan:
    """The plan of a program with stages: that of one group for all of it, and what travels between the groups.

    Raises:
      PlanError: see ``make_plan`` and ``in_each_micro_batch``; an option that pipelines lack.
    """
    _refuse(settings, groups)
    plan = _of_sizes(program, settings, groups)
    expanded = expand(program, plan.expanded, settings)
    at = {stage: group.ranks for group in groups for stage in group.stages}
    graphs = tuple(replace(t, devices=at.get(stage_of(t.scope), ())) for t in task_graphs(expanded, ()))
    devices = tuple("rank " + "+".join(str(p.ranks[i]) for p in groups if i < len(p.ranks)) for i in range(plan.size))
    plan = replace(
        plan,
        schedule=settings.time.schedule if plan.micro_batches > 1 else "",
        stage_groups=groups,
        task_graphs=graphs,
        devices=devices,
    )
    cuts = cut(expanded, groups)
    plan = replace(plan, variables=_variables_of(plan, cuts))
    return replace(plan, edges=edges_of(expanded, cuts, plan, crossings(expanded, cuts, plan, {})))


def _of_sizes(program: Program, settings: PlanSettings, groups: Sequence[StageGroup]) -> Plan:
    """The plan for the largest stage groups, with those for the others."""
    first, *rest = sorted({len(group.ranks) for group in groups}, reverse=True)
    inside = settings.but(devices=(), split__state_only=True, split__ranks=0)
    of_size = {size: inside.but(size=size, split__known=_known(settings, size)) for size in (first, *rest)}
    plan = make_plan(program, of_size[first])
    if not rest and (settings.time.micro_batches == 1 or first == 1 or not has_split_scopes(program)):
        return plan
    # All have to speak of one program, and of the same rows in each micro-batch. A split scope wants the rows of all
    # ranks, of one micro-batch at a time.
    names: set[str] = set()
    plans = {size: make_plan(program, of_size[size]) for size in rest} | {first: plan}
    while True:
        more = {name for p in plans.values() for name in p.expanded} - names
        names |= more
        expanded = expand(program, names, inside)
        for size, p in plans.items():
            batch = in_each_micro_batch(p.batch_inputs, settings.time.micro_batches)
            plans[size] = make_plan(expanded, of_size[size].but(batch__inputs=batch))
        if not {name for p in plans.values() for name in p.expanded} - names:
            break
    mark, kept = fingerprint(program), tuple(n.name for n in program.nodes if n.name in names)
    others = tuple(replace(plans[size], fingerprint=mark, expanded=kept) for size in rest)
    return replace(plans[first], fingerprint=mark, expanded=kept, others=others)


def _known(settings: PlanSettings, size: int) -> dict[str, Placement]:
    """The layouts of variables that earlier programs have fixed, as far as they are those of so many ranks."""
    return {name: p for name, p in settings.split.known.items() if not isinstance(p, Split) or len(p.sizes) == size}


def in_each_micro_batch(batch: Sequence[BatchInput], micro_batches: int) -> tuple[BatchInput, ...]:
    """Batch inputs of which each rank computes some rows of each micro-batch, whatever the number of ranks.

    Raises:
      PlanError: the rows are no multiple of the micro-batches, or fewer than the ranks.
    """
    found = []
    for b in batch:
        assert isinstance(b.placement, Split)
        size, ranks = b.placement.run, len(b.placement.sizes)
        if b.local or size % micro_batches or size < micro_batches * ranks:
            raise PlanError(
                "stages of unequal numbers of ranks, or with wh.split inside, need the same rows in each micro-batch",
                op=b.name,
                given=f"{size} rows in {micro_batches} micro-batches for {ranks} ranks"
                + ", of which each passes its own" * b.local,
                expected="rows in multiples of the micro-batches, one at least for each rank, passed whole on each",
                action="change the batch, pipeline.num_micro_batch or the devices of the stages",
            )
        of_one = rows_of_ranks(size // micro_batches, ranks)
        found.append(replace(b, placement=split(0, of_one, micro_batches)))
    return tuple(found)


def lower_stage_groups(
    expanded: Program, plan: Plan, ranks: Sequence[int], comm: str, what: str, settings: PlanSettings
) -> list[Program]:
    """What each of ``ranks`` runs under a plan of ``plan_stage_groups``.

    Raises:
      PlanError: the stages cannot be gone through in micro-batches as the schedule asks.
    """
    cuts = cut(expanded, plan.stage_groups)
    where = {rank: (k, c) for k, group in enumerate(plan.stage_groups) for c, rank in enumerate(group.ranks)}
    agreed: WholeInTime | None = None  # on what stages of different numbers of ranks exchange for each micro-batch
    if plan.others and plan.micro_batches > 1:
        agreed = WholeInTime(expanded, plan, plan, 0, settings)
    programs = []
    for rank in ranks:
        number, coordinate = where[rank]
        whole: WholeInTime | None = None
        if plan.micro_batches > 1:
            whole = WholeInTime(expanded, plan, plan.of(len(plan.stage_groups[number].ranks)), coordinate, settings)
        rows = agreed.rows if agreed else whole.rows if whole else {}
        found = crossings(expanded, cuts, plan, rows)
        part = cuts[number]
        lowered = localise(part.program, plan_of_part(plan, part, number, found), coordinate, comm, None)
        by_key = {str(ref): by for ref, by in rows.items()}
        connector = Connector(lowered, plan.stage_groups, number, coordinate, comm, found, by_key, plan.micro_batches)
        connected = connector.run((plan.fingerprint, what))
        programs.append(whole.pipelined(connected, number) if whole else connected)
    return programs


def _refuse(settings: PlanSettings, groups: Sequence[StageGroup]) -> None:
    used = sum(len(group.ranks) for group in groups)
    if used != settings.size:
        raise PlanError(
            "some ranks have no stage",
            given=f"{settings.size} ranks, of which the stages use {used}",
            expected="a stage for every rank",
            action="start fewer ranks or change the devices of the stages",
        )
    divided = f"split.ranks={settings.split.ranks}"
    unable = {
        f'communication.backend="{settings.exchange.backend}"': (
            settings.exchange.backend != "whale",
            "sums over the ranks of a stage, which are not all ranks",
            'set communication.backend="whale"',
        ),
        divided: (
            0 < settings.split.ranks < max(len(group.ranks) for group in groups),
            "tensors under wh.split that all ranks of their stage divide",
            "leave it out, or give the stages fewer ranks (wh.stage(devices=...))",
        ),
        "a batch of which every rank passes its own rows (wh.shard, batch.mode)": (
            bool(settings.batch.local),
            "the whole batch on every rank, of which the stages take what they compute",
            "pass the whole batch",
        ),
    }
    for given, (wanted, expected, action) in unable.items():
        if wanted:
            raise PlanError(
                "a pipeline cannot be combined with an option yet", given=given, expected=expected, action=action
            )


def uses_of_stage_groups(expanded: Program, plan: Plan) -> dict[str, Use]:
    """Which ranks use each variable, and whether it is written, by handle node; nothing for a plan without stages."""
    found: dict[str, list[StageGroup]] = {}
    for group, part in zip(plan.stage_groups, cut(expanded, plan.stage_groups) if plan.stage_groups else ()):
        for variable in part.program.variables:
            found.setdefault(variable.node, []).append(group)
    written = {r.node for n in expanded.nodes if n.op not in READS for r in n.inputs if r.node in expanded.variable_of}
    return {
        name: Use(
            frozenset(r for p in groups for r in p.ranks), name in written, groups[0].ranks if len(groups) == 1 else ()
        )
        for name, groups in found.items()
    }


def _variables_of(plan: Plan, cuts: Sequence[Cut]) -> dict[str, Placement]:
    """How the variables that lie split between steps lie over the ranks of their stage."""
    found: dict[str, Placement] = {}
    for group, part in zip(plan.stage_groups, cuts):
        mine = plan.of(len(group.ranks)).variables
        found.update((v.node, mine[v.node]) for v in part.program.variables if v.node in mine)
    return found
