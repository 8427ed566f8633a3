"""Finds how a program under a plan uses its variables: which ranks hold a part of each, and whether they write it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.ir.mesh import Tiles, find_tiles, make_mesh
from whale.ir.ops import READS
from whale.ir.plan import Plan, StageGroup
from whale.ir.program import Program
from whale.partition.pipeline.stage_programs import cut


@dataclass(frozen=True, slots=True)
class VariableUse:
    """Describes which ranks use one variable, and which part of it each of them holds.

    Attributes:
      ranks: the ranks that use the variable.
      writes: True if the program writes it.
      place: these ranks in an order in which each run of consecutive ranks, as long as there are tiles, holds all tiles
        in order; (): that is the order of the ranks' numbers.
      tiles: how the variable is sharded; None: it is not sharded.
    """

    ranks: frozenset[int]
    writes: bool
    place: tuple[int, ...] = ()
    tiles: Tiles | None = None


def find_variable_uses(expanded: Program, plan: Plan) -> dict[str, VariableUse]:
    """Returns how ranks use each variable that is sharded or belongs to a stage, keyed by the variable's handle node.

    Variables that are not listed are held whole by every rank.

    Args:
      expanded: the program with composite ops decomposed for the plan.
    """
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
    """Returns (tiles, ranks in the order of the tiles) of each variable that the axes of one plan shard, by handle
    node.

    The ranks are ordered so that each run of consecutive ranks holds all tiles of the variable.
    """
    mesh, found = make_mesh(plan, ranks), find_tiles(replace(plan, others=()))
    orders = {axes: mesh.order_with_last(*axes) for axes in dict.fromkeys(tiles.axes for tiles in found.values())}
    return {name: (tiles, orders[tiles.axes]) for name, tiles in found.items()}
