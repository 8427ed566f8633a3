"""Plans and lowers a program over a mesh of any number of axes, one axis at a time: program -> program.

A sharding rule covers one mesh axis; several axes apply their rules one after the other. The program is planned and
lowered for the outermost axis. What the ranks at one coordinate then run is again a program, with local shapes and
communication ops, and it is planned and lowered for the next axis like any other. Communication ops of earlier axes
have sharding rules too: each rank of a group exchanges its shard with the ranks of the same place in the other groups.

An axis shards tensors under the ``wh.split`` scopes that name it, and rows of the batch elsewhere
(``whale.passes.analysis.axes``).

plan_program    plans a normalised program over the mesh axes that affect it
lower_mesh      returns the program of each rank under a plan

Decision: 0064.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, prod

from whale.ir.fingerprint import compute_fingerprint
from whale.ir.layout import Shard, divide_evenly, shard
from whale.ir.mesh import Axis, make_mesh
from whale.ir.plan import BatchInput, Plan
from whale.ir.program import Program
from whale.partition.axis_partitioner import AxisPartitioner, change_sizes, list_sizes, make_partitioner, sum_sizes
from whale.partition.rank_mapping import add_check, map_to_ranks
from whale.passes.analysis.axes import axes_of, batch_of, list_named_axes, project_to_axis, select_known_along
from whale.passes.analysis.batch import rows_of_ranks
from whale.passes.analysis.rank_groups import in_mesh_positions, map_named_ranks
from whale.passes.analysis.scopes import context_of, has_split_scopes
from whale.passes.pass_manager import CANDIDATE, make_plan
from whale.passes.plan_builder import FirstLayouts, expand
from whale.passes.settings import PlanSettings
from whale.passes.verify.check import check


def plan_program(program: Program, settings: PlanSettings, first: FirstLayouts | None = None) -> Plan:
    """Plans a normalised program over the mesh axes that affect it.

    Args:
      first: cache of layouts from earlier plans of the program over one axis, which may have had other split scopes.
        A plan over one axis that is made with it is a candidate (see ``complete_candidate``).

    Raises:
      PlanError: see ``make_plan`` and ``axes_of``.
    """
    axes, whole = axes_of(program, settings), program
    order = settings.rank_order
    program = in_mesh_positions(program, order)
    of_rows = _find_row_axes(program, axes)
    settings = _share_rows_in_micro_batches(program, settings, of_rows)
    if len(axes) == 1:
        return _note_order(_plan_one_axis(program, settings, axes[0], first), whole, order)
    rows = _share_rows(program, settings, [a.size for a in of_rows])
    if settings.zero.level and has_split_scopes(program):
        scopes = AxisPartitioner(program, settings.but(zero__level=0), axes, rows)
        settings = settings.but(zero__avoid=scopes.find_divided_dims())
    return _note_order(AxisPartitioner(program, settings, axes, rows).make_plan(), whole, order)


def _note_order(plan: Plan, program: Program, order: tuple[int, ...]) -> Plan:
    """Returns ``plan`` with the order of its ranks, and with the fingerprint of the program with its real rank numbers.

    The plan was made for a program in which positions of the mesh stand for ranks. Without an order nothing changes.
    """
    if not order:
        return plan
    mark = CANDIDATE if plan.fingerprint == CANDIDATE else compute_fingerprint(program)
    return replace(plan, fingerprint=mark, rank_order=order)


def complete_candidate(program: Program, plan: Plan, settings: PlanSettings) -> Plan:
    """Proves that the plan that a search has taken is legal, and returns it with its program's fingerprint.

    Of all candidates only the one that is taken needs this. A plan that is no candidate is returned unchanged.

    Args:
      program, settings: as given to ``plan_program``.

    Raises:
      PlanError: the plan is not legal.
    """
    if plan.fingerprint != CANDIDATE:
        return plan
    seen = project_to_axis(in_mesh_positions(program, settings.rank_order), plan.axis)
    check(expand(seen, frozenset(plan.expanded), settings), plan)
    return replace(plan, fingerprint=compute_fingerprint(program))


def _plan_one_axis(program: Program, settings: PlanSettings, axis: Axis, first: FirstLayouts | None) -> Plan:
    """Plans a normalised program over a mesh of a single axis."""
    seen = project_to_axis(program, axis.name)
    settings = _remove_rows(seen, settings)
    known = select_known_along(settings.split.tiles, axis.name, alone=True)
    mark = compute_fingerprint(program) if first is None else CANDIDATE
    plan = make_plan(seen, settings.but(split__known=known), mark, first)
    return replace(plan, axis=axis.name)


def lower_mesh(
    program: Program, plan: Plan, settings: PlanSettings, ranks: Sequence[int], comm: str, what: str
) -> list[Program]:
    """Lowers a program under a plan of several axes, and returns the program of each rank of ``ranks``.

    Args:
      comm: name of the communicator.
      what: description of the program, for the error if ranks run different programs.
    """
    program, mesh = in_mesh_positions(program, plan.rank_order), make_mesh(plan, plan.mesh_ranks)
    levels = make_partitioner(program, plan, settings)
    found = []
    for rank in ranks:
        at = mesh.find_coordinates(rank)
        lowered = map_to_ranks(levels.lower_program(at), mesh, rank, comm)
        lowered = add_check(lowered, rank, comm, plan.fingerprint, what)
        found.append(levels.cut_own_rows(lowered, program, at))
    return found


def _find_row_axes(program: Program, axes: Sequence[Axis]) -> Sequence[Axis]:
    """Returns ``axes`` without the innermost ones along which all ranks have the same rows.

    Ranks have the same rows along an axis if every op that reads an input is in a scope that shards tensors over this
    axis. As in Megatron-LM, ranks along such an axis also repeat the computation outside of the scopes.
    """
    arrives = _find_arriving(program)
    count = len(axes)
    while count > 1 and arrives and all(axes[count - 1].name in list_named_axes([path]) for path in arrives):
        count -= 1
    return axes[:count]


def _find_arriving(program: Program) -> set[str]:
    """Returns the scopes of the nodes that read an input of the program."""
    inputs = {ref for name in program.inputs for ref in program.by_name[name].list_refs()}
    return {node.scope for node in program.nodes if not inputs.isdisjoint(node.inputs)}


def _remove_rows(seen: Program, settings: PlanSettings) -> PlanSettings:
    """Returns settings that do not divide rows, if the only mesh axis divides every input along its sequence.

    A batch of long sequences may have one row only. The settings stay unchanged if the user asks for micro-batches,
    which are cut from rows, or says how rows are divided.

    Args:
      seen: the program with the scopes of that axis.
    """
    batch = settings.batch
    if settings.time.micro_batches > 1 or batch.inputs is not None or batch.local or batch.shares or batch.marked:
        return settings
    arrives = _find_arriving(seen)
    whole = arrives and all(context_of(path) is not None for path in arrives)
    return settings.but(batch__inputs=()) if whole else settings


def wants_same_rows(program: Program, settings: PlanSettings) -> bool:
    """Returns True if ranks read other ranks' rows of each micro-batch, so that all need rows of the same micro-batch.

    That is so if scopes are limited to some ranks, or shard tensors along an axis that also divides rows.
    """
    axes = axes_of(program, settings)
    of_rows = [axis.name for axis in _find_row_axes(program, axes) if axis.size > 1]
    return bool(of_rows and map_named_ranks(program)) or any(
        has_split_scopes(project_to_axis(program, name, axes)) for name in of_rows
    )


def make_micro_batches_even(program: Program, settings: PlanSettings) -> PlanSettings:
    """Returns settings in which every batch divides evenly into micro-batches.

    Their number of micro-batches is the smallest one that divides the rows of all batches, and is at least the one
    asked for. Each rank then exchanges rows in the same way in every micro-batch.
    """
    asked = settings.batch.inputs
    rows = gcd(*(sum(list_sizes(b)) for b in (batch_of(program, settings) if asked is None else asked)))
    count = next((n for n in range(settings.time.micro_batches, rows) if rows % n == 0), max(1, rows))
    return settings.but(time__micro_batches=count, time__same_rows=True)


def _share_rows_in_micro_batches(program: Program, settings: PlanSettings, axes: Sequence[Axis]) -> PlanSettings:
    """Returns settings in which each rank has equally many rows of every micro-batch, where ranks need each other's
    rows.

    Args:
      axes: the mesh axes that divide rows.
    """
    if settings.time.micro_batches == 1 or settings.batch.local:
        return settings
    if not settings.time.same_rows:
        if not wants_same_rows(program, settings):
            return settings
        settings = make_micro_batches_even(program, settings)
    count, sizes = settings.time.micro_batches, [a.size for a in axes]
    of_one = [
        _make_micro_batch_input(b, count, sizes, bool(settings.batch.shares))
        for b in _share_rows(program, settings, sizes)
    ]
    return settings.but(batch__inputs=tuple(of_one))


def _make_micro_batch_input(b: BatchInput, count: int, sizes: Sequence[int], shared: bool) -> BatchInput:
    """Returns ``b`` with a placement in which every micro-batch has its own rows on each rank.

    The batch is seen as ``count`` runs of rows, one run per micro-batch, and each run is divided over the ranks.

    Args:
      b: the batch input, with the rows of each rank.
      count: number of micro-batches.
      sizes: sizes of the mesh axes that divide rows.
      shared: True if the user gave the ranks' shares of the batch, which then also divide each run; False: as evenly as
        possible.
    """
    assert isinstance(b.placement, Shard)
    rows = sum(list_sizes(b)) // count
    of_ranks = _share_at_least_one(rows, list_sizes(b)) if shared else _divide_nested(rows, sizes)
    return replace(b, placement=shard(b.placement.dim, of_ranks, count))


def _share_at_least_one(rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Divides ``rows`` in proportion to ``shares``, with at least one row for each rank whose share is not zero.

    If there are fewer rows than such ranks, some ranks get none.
    """
    some = [min(share, 1) for share in shares]
    if rows < sum(some):
        return rows_of_ranks(rows, len(shares), shares)
    found = list(rows_of_ranks(rows, len(shares), shares))
    while lacking := [i for i, n in enumerate(some) if found[i] < n]:
        found[found.index(max(found))] -= 1
        found[lacking[0]] += 1
    return tuple(found)


def _share_rows(program: Program, settings: PlanSettings, sizes: Sequence[int]) -> tuple[BatchInput, ...]:
    """Returns the batch inputs with the rows of all ranks: by the user's shares, or as evenly as possible axis by axis.

    Args:
      sizes: sizes of the axes that divide rows; ranks along the other axes have the same rows.
    """
    asked = settings.batch
    found = batch_of(program, settings) if asked.inputs is None else asked.inputs
    if asked.local:
        return found
    if asked.shares:
        inside = settings.size // prod(sizes)
        return tuple(
            replace(b, placement=sum_sizes(b, inside)) if len(list_sizes(b)) == settings.size else b for b in found
        )
    if asked.inputs is not None:
        return found
    return tuple(replace(b, placement=change_sizes(b, _divide_nested(sum(list_sizes(b)), sizes))) for b in found)


def _divide_nested(rows: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Divides rows over ranks: as evenly as possible over the first axis, then each part over the next axis, etc."""
    if not sizes:
        return (rows,)
    return tuple(n for part in divide_evenly(rows, sizes[0]) for n in _divide_nested(part, sizes[1:]))
