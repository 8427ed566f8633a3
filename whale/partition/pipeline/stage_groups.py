"""Plans and lowers pipelines: each stage group is planned as if it ran the whole program, and runs its own stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod

from whale.errors import PlanError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.layout import Partial, Shard
from whale.ir.mesh import DATA, STAGE, Axis, Tiles, iterate_levels
from whale.ir.plan import BatchInput, Plan, StageGroup
from whale.ir.program import Program, Ref
from whale.partition.axis_partitioner import change_sizes, list_sizes
from whale.partition.mesh import make_micro_batches_even, plan_program, wants_same_rows
from whale.partition.pipeline.stage_exchanges import connect_stages
from whale.partition.pipeline.stage_programs import Cut
from whale.partition.pipeline.stage_schedule import AgreedPhases, WholeSchedule
from whale.partition.pipeline.stages import Stages
from whale.passes.analysis.axes import data_coordinates
from whale.passes.analysis.batch import batch_inputs, rows_of_ranks
from whale.passes.analysis.rank_groups import in_positions
from whale.passes.analysis.stages import stage_of
from whale.passes.normalize.annotate import task_graphs
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings


def plan_stage_groups(program: Program, settings: PlanSettings, groups: tuple[StageGroup, ...]) -> Plan:
    """Plans a program with stages: the whole program for the mesh of a group, and the tensors sent between groups.

    Raises:
      PlanError: see ``plan_program``; or a setting that pipelines do not support.
    """
    _refuse(settings, groups)
    plan, groups = _plan_kinds(program, settings, groups)
    expanded = expand(program, plan.expanded, settings)
    at = {stage: group.ranks for group in groups for stage in group.stages}
    graphs = tuple(replace(t, devices=at.get(stage_of(t.scope), ())) for t in task_graphs(expanded, ()))
    size = plan.mesh_size
    whose = ["+".join(str(p.ranks[i]) for p in groups if i < len(p.ranks)) for i in range(size)]
    each = size // plan.size
    devices = tuple(
        f"rank {whose[i]}" if each == 1 else f"ranks {', '.join(whose[i : i + each])}" for i in range(0, size, each)
    )
    plan = replace(
        plan,
        schedule=settings.time.schedule if plan.micro_batches > 1 else "",
        stage_groups=groups,
        task_graphs=graphs,
        devices=devices,
    )
    stages = Stages(expanded, plan, settings, {})
    plan = _keep_own_variables(plan, groups, stages.cuts)
    return replace(plan, edges=stages.list_edges(), lent_threads=settings.lent_threads)


@dataclass(frozen=True, slots=True)
class _GroupKind:
    """Describes stage groups that can share a plan: those of equal size, mesh and shares.

    Attributes:
      size: number of ranks.
      mesh: the axes of the group's mesh.
      shares: the ranks' shares of the batch's rows; (): rows are divided evenly.
    """

    size: int
    mesh: tuple[Axis, ...]
    shares: tuple[int, ...]


def _find_kind(group: StageGroup, settings: PlanSettings) -> _GroupKind:
    """Returns the kind of a stage group; of the shares in the settings it takes those of the group's ranks."""
    shares, size = settings.batch.shares, len(group.ranks)
    mesh = settings.stage_meshes.get(group.ranks) or make_mesh_of_size(settings, size)
    if len(shares) != settings.size:
        return _GroupKind(size, mesh, shares)
    mine = tuple(shares[rank] for rank in group.ranks)
    if not any(mine):
        raise PlanError(
            "no rank of a stage has a share of the batch",
            op=group.name,
            given=f"batch.shares={list(shares)}, ranks {list(group.ranks)}",
            expected="at least one rank with rows in each stage",
            action="change batch.shares, or the devices of the wh.stage scopes",
        )
    return _GroupKind(size, mesh, mine)


def _plan_kinds(
    program: Program, settings: PlanSettings, groups: Sequence[StageGroup]
) -> tuple[Plan, tuple[StageGroup, ...]]:
    """Plans the program once for each kind of stage groups.

    Returns:
      (the plan of the largest groups, with the plans of the other kinds in ``others``; the groups, each with the number
        of its plan).
    """
    kinds = sorted({_find_kind(group, settings): None for group in groups}, key=lambda kind: -kind.size)
    numbered = tuple(replace(group, plan=kinds.index(_find_kind(group, settings))) for group in groups)
    first, *rest = kinds
    inside = settings.but(devices=(), exchange__backend="whale", rank_order=())
    of_kind = {
        kind: inside.but(
            size=kind.size,
            mesh=kind.mesh,
            split__tiles=_find_known_layouts(program, settings, kind, numbered, number),
            batch__inputs=_find_shared_inputs(program, settings, kind),
            batch__shares=kind.shares,
        )
        for number, kind in enumerate(kinds)
    }
    same_rows = rest or wants_same_rows(in_positions(program, numbered, 0), of_kind[first])
    if same_rows and settings.time.micro_batches > 1:
        of_kind = {kind: make_micro_batches_even(program, of_one) for kind, of_one in of_kind.items()}
    plans = {kind: _plan_kind(program, of_kind[kind], numbered, kinds.index(kind)) for kind in kinds}
    several = any(p.expanded for p in iterate_levels(plans[first]) if p is not plans[first])
    if not rest and not several:
        return plans[first], numbered
    # All plans have to be of one program, so each is made again with the composite ops that any of them decomposes.
    names: set[str] = set()
    known = {n.name for n in program.nodes}
    while (
        more := {name for p in plans.values() for level in iterate_levels(p) for name in level.expanded} & known - names
    ):
        names |= more
        expanded = expand(program, names, inside)
        plans = {kind: _plan_kind(expanded, of_kind[kind], numbered, kinds.index(kind)) for kind in kinds}
    mark, kept = compute_fingerprint(program), tuple(n.name for n in program.nodes if n.name in names)
    others = tuple(replace(plans[kind], fingerprint=mark, expanded=kept) for kind in rest)
    return replace(plans[first], fingerprint=mark, expanded=kept, others=others), numbered


def _plan_kind(program: Program, settings: PlanSettings, groups: Sequence[StageGroup], plan: int) -> Plan:
    """Makes plan number ``plan``: that of the whole program on the mesh of the groups that use it."""
    found = plan_program(in_positions(program, groups, plan), settings)
    return replace(found, fingerprint=compute_fingerprint(program))


def _find_shared_inputs(program: Program, settings: PlanSettings, kind: _GroupKind) -> tuple[BatchInput, ...] | None:
    """Returns the batch inputs with the rows of each rank of a group, by the group's shares; without shares, as in
    settings.
    """
    asked = settings.batch
    if not kind.shares:
        return asked.inputs
    mesh = {a.name: a.size for a in kind.mesh}
    found = []
    for b in batch_inputs(program, len(asked.shares), asked.shares, asked.marked):
        rows = rows_of_ranks(sum(list_sizes(b)), kind.size, kind.shares, data_coordinates(mesh, kind.size))
        found.append(replace(b, placement=change_sizes(b, rows)))
    return tuple(found)


def make_mesh_of_size(settings: PlanSettings, size: int) -> tuple[Axis, ...]:
    """Returns the axes of a stage group of ``size`` ranks: those of the settings' mesh, with the first one resized to
    fit.

    An inner axis that does not fit gets the largest size that divides both the axis and the ranks.
    """
    given = [a for a in settings.mesh if a.name != STAGE and a.size > 1]
    if prod(a.size for a in given) == size or not given:
        return tuple(given)
    left, found = size, []
    for axis in reversed(given if given[0].name == DATA else [Axis(DATA, 1), *given]):
        fits = left if axis.name == DATA else gcd(axis.size, left)
        found.append(Axis(axis.name, fits))
        left //= fits
    return tuple(a for a in reversed(found) if a.size > 1) or (Axis(DATA, 1),)


def _find_known_layouts(
    program: Program, settings: PlanSettings, kind: _GroupKind, groups: Sequence[StageGroup], plan: int
) -> dict[str, Tiles]:
    """Returns the variables' shards that earlier programs of the run have fixed, by variable, for groups of a kind.

    Shards over axes of sizes that the groups do not have are left out. So are variables of stages whose groups are of
    another kind: one that is whole on a single rank says nothing of what several ranks would do with it.

    Args:
      groups: the stage groups, each with the number of its plan.
      plan: number of the kind's plan.
    """
    sizes = {kind.size, *(a.size for a in kind.mesh)}
    elsewhere = {stage for group in groups if group.plan != plan for stage in group.stages}
    of_others = {
        ref.node for node in program.nodes if stage_of(node.scope) in elsewhere for ref in node.inputs
    } & program.variable_of.keys()
    known = settings.split.tiles.items()
    return {name: t for name, t in known if sizes.issuperset(t.sizes) and name not in of_others}


def lower_stage_groups(
    expanded: Program, plan: Plan, ranks: Sequence[int], comm: str, what: str, settings: PlanSettings
) -> list[Program]:
    """Lowers a program under a plan of ``plan_stage_groups``, and returns the program of each rank of ``ranks``.

    Args:
      expanded: the program, with composite ops decomposed for the plan.
      comm: name of the communicator.
      what: description of the program, for the error if ranks run different programs.

    Raises:
      PlanError: the stages cannot run micro-batches in the order of the schedule.
    """
    rows: dict[Ref, Shard] = {}
    microbatched = plan.micro_batches > 1
    if plan.others and microbatched:  # groups with different meshes must agree on what each micro-batch exchanges
        whole_stages = Stages(expanded, plan, settings, {})
        for at in reversed(
            _find_first_readers(plan.find_group_plan(plan.stage_groups[0])) or [()]
        ):  # several, since the first coordinates may have no rows
            rows |= WholeSchedule(expanded, whole_stages, 0, at, settings).rows
    stages = Stages(expanded, plan, settings, rows)
    in_turns = _ScheduleCache(expanded, stages, settings)
    parts = {
        number: stages.make_part_partitioner(number) for number in sorted({stages.locate(rank)[0] for rank in ranks})
    }
    programs = []
    for rank in ranks:
        number, at = stages.locate(rank)
        whole = in_turns.find_whole(number, at) if microbatched else None
        mine = rows or (whole.rows if whole else {})
        connected = connect_stages(
            stages, stages.lower_part(parts[number], rank, comm), rank, comm, mine, (plan.fingerprint, what)
        )
        programs.append(whole.pipeline(connected, number) if whole else connected)
    return programs


class _ScheduleCache:
    """Caches ``WholeSchedule`` by coordinates; coordinates with the same program share an entry."""

    def __init__(self, expanded: Program, stages: Stages, settings: PlanSettings):
        self.expanded, self.stages, self.settings = expanded, stages, settings
        self._agreed: dict[int, AgreedPhases] = {}  # by the number of a plan
        self._known: dict[tuple[int, tuple[int, ...]], WholeSchedule] = {}

    def find_whole(self, number: int, at: tuple[int, ...]) -> WholeSchedule:
        """Returns the ``WholeSchedule`` of coordinates ``at`` in the mesh of stage group ``number``."""
        group = self.stages.plan.stage_groups[number]
        levels = self.stages.make_level_partitioner(number)
        readers = _find_first_readers(self.stages.plan.find_group_plan(group))
        one = (0,) * len(at) if levels.is_like_first(at) else at
        if (group.plan, one) not in self._known:
            agreed = AgreedPhases()
            if readers not in ([], [at]):
                if group.plan not in self._agreed:
                    some = [WholeSchedule(self.expanded, self.stages, number, r, self.settings) for r in readers]
                    self._agreed[group.plan] = AgreedPhases.merge(some)
                agreed = self._agreed[group.plan]
            self._known[group.plan, one] = WholeSchedule(self.expanded, self.stages, number, one, self.settings, agreed)
        return self._known[group.plan, one]


def _find_first_readers(plan: Plan) -> list[tuple[int, ...]]:
    """Returns coordinates of a stage group that together read every tensor that any rank of the group reads in a
    micro-batch.

    No single coordinate need read all: only coordinate 0 runs what runs once, and a coordinate without rows does not
    read what the others gather. The phases of nodes are found on these coordinates and then used on all.

    Returns:
      the coordinates; [] if every coordinate reads the same tensors, so that any one will do.
    """
    along: list[list[int]] = []
    more = False
    for level in iterate_levels(plan):
        more |= any(s.once for s in level.strategies[""].values())
        more |= any(isinstance(r.target, Partial) and not isinstance(r.source, Partial) for r in level.reshards)
        cuts = {p for s in level.strategies[""].values() for p in (*s.inputs, *s.outputs) if isinstance(p, Shard)}
        some_hold = {min(p.holders) for p in cuts if p.smallest == 0 < p.largest}
        more |= bool(some_hold)
        along.append(sorted({0, *some_hold}))
    return list(product(*along)) if more else []


def _refuse(settings: PlanSettings, groups: Sequence[StageGroup]) -> None:
    used = sum(len(group.ranks) for group in groups)
    if used != settings.size:
        raise PlanError(
            "some ranks have no stage",
            given=f"{settings.size} ranks, of which the stages use {used}",
            expected="a stage for every rank",
            action=f"start {used} ranks (`whale run -np {used}`), or change the devices of the wh.stage scopes",
        )
    if settings.batch.local:
        raise PlanError(
            "a program with pipeline stages cannot take a batch of which each rank passes only its own rows",
            given="each rank's own rows (wh.shard, or batch.mode=local)",
            expected="the whole batch on every rank, of which each stage takes the rows that it computes",
            action="pass the whole batch on every rank, without wh.shard and batch.mode=local",
        )


def _keep_own_variables(plan: Plan, groups: Sequence[StageGroup], cuts: Sequence[Cut]) -> Plan:
    """Returns ``plan`` in which each group's plan lists only the variables of that group's stages."""

    def reduce_plan(one: Plan, number: int) -> Plan:
        mine = {v.node for g, part in zip(groups, cuts) if g.plan == number for v in part.program.variables}

        def reduce_level(level: Plan) -> Plan:
            kept = {name: p for name, p in level.variables.items() if name in mine}
            return replace(level, variables=kept, inner=level.inner and reduce_level(level.inner))

        return reduce_level(one)

    return replace(reduce_plan(plan, 0), others=tuple(reduce_plan(other, i) for i, other in enumerate(plan.others, 1)))
