"""Finds how a program under a plan uses its variables: which ranks use, write and hold parts of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.ir.mesh import Tiles, find_tiles, make_mesh
from whale.ir.ops import READS
from whale.ir.plan import Plan, StageGroup
from whale.ir.program import Program
from whale.partition.pipeline.stage_programs import cut


@dataclass(frozen=True, slots=True)
class VariableUse:
    """The ranks that use one variable, and whether the program writes it.

    ``place`` lists the ranks in the order of the variable's stage, or of the mesh axes over which it is split:
    groups that hold all parts, in order of the parts. Empty: all ranks in their own order.
    ``tiles`` is the variable's split; None: it is not split.
    """

    ranks: frozenset[int]
    writes: bool
    place: tuple[int, ...] = ()
    tiles: Tiles | None = None


def find_variable_uses(expanded: Program, plan: Plan) -> dict[str, VariableUse]:
    """Returns the use of each variable that differs between ranks, by handle node."""
    written = {r.node for n in expanded.nodes if n.op not in READS for r in n.inputs if r.node in expanded.variable_of}
    uses = {}
    if not plan.stage_groups:
        everyone = tuple(range(plan.ranks))
        for name, (tiles, order) in _find_divided_variables(plan, plan.mesh_ranks).items():
            place = order if order != everyone else ()
            uses[name] = VariableUse(frozenset(everyone), name in written, place, tiles)
        return uses
    found: dict[str, list[StageGroup]] = {}
    for group, part in zip(plan.stage_groups, cut(expanded, plan.stage_groups)):
        for variable in part.program.variables:
            found.setdefault(variable.node, []).append(group)
    lying = {group: _find_divided_variables(plan.find_group_plan(group), group.ranks) for group in plan.stage_groups}
    for name, groups in found.items():
        one = groups[0] if len(groups) == 1 else None
        divided, place = lying[one].get(name, (None, one.ranks)) if one else (None, ())
        uses[name] = VariableUse(frozenset(r for g in groups for r in g.ranks), name in written, place, divided)
    return uses


def _find_divided_variables(plan: Plan, ranks: tuple[int, ...]) -> dict[str, tuple[Tiles, tuple[int, ...]]]:
    """Returns the tiles of the variables that a plan's own axes divide over ranks, by handle node, each with the ranks
    ordered so that those with all of the variable's tiles are adjacent.
    """
    mesh, found = make_mesh(plan, ranks), find_tiles(replace(plan, others=()))
    orders = {axes: mesh.order_with_last(*axes) for axes in dict.fromkeys(tiles.axes for tiles in found.values())}
    return {name: (tiles, orders[tiles.axes]) for name, tiles in found.items()}
