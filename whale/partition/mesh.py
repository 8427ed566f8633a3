"""Plans and lowers a program over a mesh of any number of axes, one axis at a time: program -> program.

A rule says what one axis may do, and several axes do it one after the other. The program is planned and lowered for the
outermost axis; what the ranks of one coordinate then run is a program again, with local shapes and communication ops,
and is planned and lowered for the next axis like any other. Communication ops of earlier axes have rules like other
ops: each rank of a group sends the part that it holds to the ranks of equal place in the other groups.

An axis divides tensors under the ``wh.split`` scopes that name it and rows elsewhere (``whale.passes.analysis.axes``).

  plan_program    the plan of a normalised program over the axes that make a difference
  lower_mesh      what each rank runs under a plan

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
from whale.passes.pass_manager import make_plan
from whale.passes.plan_builder import FirstLayouts
from whale.passes.settings import PlanSettings


def plan_program(program: Program, settings: PlanSettings, first: FirstLayouts | None = None) -> Plan:
    """Plans a normalised program over the axes that make a difference to it.

    Args:
      first: cached layouts from other plans of the program over one axis, which may have other split scopes.

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
    """Returns the plan of ranks in an order of their own, which was made of the program with positions for ranks."""
    return replace(plan, fingerprint=compute_fingerprint(program), rank_order=order) if order else plan


def _plan_one_axis(program: Program, settings: PlanSettings, axis: Axis, first: FirstLayouts | None) -> Plan:
    """Plans a normalised program whose ranks are all on one axis."""
    seen = project_to_axis(program, axis.name)
    settings = _remove_rows(seen, settings)
    known = select_known_along(settings.split.tiles, axis.name, alone=True)
    plan = make_plan(seen, settings.but(split__known=known), compute_fingerprint(program), first)
    return replace(plan, axis=axis.name)


def lower_mesh(
    program: Program, plan: Plan, settings: PlanSettings, ranks: Sequence[int], comm: str, what: str
) -> list[Program]:
    """Lowers a program under a plan of several axes to the program of each of ``ranks``."""
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
    """Returns ``axes`` without the last ones over which the program divides tensors wherever it reads an input.

    All ranks along such an axis have the same rows, as in Megatron-LM: each of them computes what stands outside of the
    scopes, and a batch needs no rows for every rank.
    """
    arrives = {n.scope for n in program.nodes if any(r.node in program.inputs for r in n.inputs)}
    count = len(axes)
    while count > 1 and arrives and all(axes[count - 1].name in list_named_axes([path]) for path in arrives):
        count -= 1
    return axes[:count]


def _remove_rows(seen: Program, settings: PlanSettings) -> PlanSettings:
    """Returns settings without division of rows, if the only axis divides every input along a sequence.

    A batch of long sequences may have one row only. If the user asks for micro-batches, which are cut from rows, or for
    unequal shares of rows, the settings stay unchanged.

    Args:
      seen: the program as that axis sees it.
    """
    batch = settings.batch
    if settings.time.micro_batches > 1 or batch.inputs is not None or batch.local or batch.shares or batch.marked:
        return settings
    arrives = {n.scope for n in seen.nodes if any(r.node in seen.inputs for r in n.inputs)}
    whole = arrives and all(context_of(path) is not None for path in arrives)
    return settings.but(batch__inputs=()) if whole else settings


def wants_same_rows(program: Program, settings: PlanSettings) -> bool:
    """Tells whether ranks need rows of others in each micro-batch: scopes are on some ranks, or divide along an axis of
    rows.
    """
    axes = axes_of(program, settings)
    of_rows = [axis.name for axis in _find_row_axes(program, axes) if axis.size > 1]
    return bool(of_rows and map_named_ranks(program)) or any(
        has_split_scopes(project_to_axis(program, name, axes)) for name in of_rows
    )


def make_micro_batches_even(program: Program, settings: PlanSettings) -> PlanSettings:
    """Returns settings with equally many rows in all micro-batches: as many micro-batches as asked, or more.

    Each rank then has as many rows of every micro-batch, and exchanges them in the same way for all of them.
    """
    asked = settings.batch.inputs
    rows = gcd(*(sum(list_sizes(b)) for b in (batch_of(program, settings) if asked is None else asked)))
    count = next((n for n in range(settings.time.micro_batches, rows) if rows % n == 0), max(1, rows))
    return settings.but(time__micro_batches=count, time__same_rows=True)


def _share_rows_in_micro_batches(program: Program, settings: PlanSettings, axes: Sequence[Axis]) -> PlanSettings:
    """Returns settings by which each rank has the same number of rows of each micro-batch, or none.

    Args:
      axes: those that divide rows.
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
    """Returns ``b`` with the rows that each rank has of one of ``count`` micro-batches, interleaved in ``count``
    runs.
    """
    assert isinstance(b.placement, Shard)
    rows = sum(list_sizes(b)) // count
    of_ranks = _share_at_least_one(rows, list_sizes(b)) if shared else _divide_nested(rows, sizes)
    return replace(b, placement=shard(b.placement.dim, of_ranks, count))


def _share_at_least_one(rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Divides ``rows`` in proportion to the shares, in whole rows, at least one for each rank with a non-zero share.

    If there are fewer rows than shares, some ranks get none.
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
    """Returns the batch inputs with the rows of all ranks: by the user's shares, or evenly over each axis in turn.

    Args:
      sizes: of the axes that divide rows; ranks along the others have the same.
    """
    asked = settings.batch
    found = batch_of(program, settings) if asked.inputs is None else asked.inputs
    if asked.local or len(asked.shares) == settings.size:
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
    """Divides rows over the ranks: as evenly as possible over the first axis, then each part over the next one."""
    if not sizes:
        return (rows,)
    return tuple(n for part in divide_evenly(rows, sizes[0]) for n in _divide_nested(part, sizes[1:]))
