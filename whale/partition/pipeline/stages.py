"""Partitions the stage groups of a pipeline over the axes of their meshes, and finds how tensors go between groups.

Stages                        the parts of a program under a plan with stages
Stages.make_part_partitioner  partitions a group's part axis by axis
Stages.lower_part             lowers a group's part to the program of one rank
Stages.find_sent_layout       the placements in which a tensor is sent; find_received_layout: in which it arrives
Stages.list_edges             the tensors sent between groups in a step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from math import prod

from whale.ir.crossing import (
    Part,
    Span,
    can_cross,
    find_block,
    find_local_type,
    find_received_placement,
    find_sent_placement,
    list_coordinates,
    list_parts,
)  # fmt: skip
from whale.ir.layout import FIRST, B, Placement, Shard, Strategy
from whale.ir.mesh import Mesh, find_coordinates, make_mesh
from whale.ir.plan import STAGE_INPUT, STAGE_OUTPUT, Edge, Plan
from whale.ir.program import Program, Ref
from whale.ir.values import TensorType, require_static_shape
from whale.partition.axis_partitioner import AxisPartitioner, make_partitioner
from whale.partition.pipeline.stage_programs import FETCH_KEY, cut, drop_waits
from whale.partition.rank_mapping import map_to_ranks
from whale.passes.analysis.rank_groups import in_positions
from whale.passes.pass_manager import plan_of_part
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings

Layout = tuple[Placement, ...]
# A part as ranks with some first coordinates run it, and these -> how tensors come in and go out over the next axis.
Ends = Callable[[Program, tuple[int, ...]], Mapping[str, Strategy]]


class StagePartitioner(AxisPartitioner):
    """Partitions a stage group's part of a program, under the plans that were made for the whole program.

    Ranks whose part is the same as that of the first coordinates, but for values of constants, use the first
    coordinates' plan, even if their programs differ elsewhere.
    """

    def __init__(self, whole: AxisPartitioner, part: Program, ends: Ends):
        """Stores the partitioner of the whole program, and one group's part of that program.

        Args:
          whole: the partitioner of the whole program on a mesh like the group's.
          part: the group's part, before any axis has divided it.
          ends: returns the strategies of the part's inputs and outputs over the next axis.
        """
        super().__init__(part, whole.settings, whole.axes, whole.rows, whole.models)
        self.whole, self.ends = whole, ends

    def program(self, at: tuple[int, ...]) -> Program:
        """Returns the part's program for the ranks at coordinates ``at``."""
        if at not in self._programs:
            self._programs[at] = self.lower_program(at)
        return self._programs[at]

    def plan(self, at: tuple[int, ...]) -> Plan:
        """Returns the part's plan of the next axis, for the ranks at coordinates ``at``."""
        if at not in self._plans:
            one = (0,) * len(at) if self.is_like_first(at) else at
            model, settings = self.whole.plan(one), self.whole.settings_at(one)
            expanded = self._expanded[at] = expand(self.program(at), model.expanded, settings)
            self._plans[at] = plan_of_part(
                self.view_program(expanded, len(at)), settings, model, self.ends(expanded, at)
            )
        return self._plans[at]

    def is_computing_everywhere(self) -> bool:
        """Returns True if every rank computes something in every part of the program."""
        return self.whole.is_computing_everywhere()


class Stages:
    """Holds the parts of a program that stage groups run, and finds the layouts of tensors sent between groups.

    Attributes:
      expanded: the whole program, with composite ops decomposed for the plan.
      plan: the plan with stages.
      cuts: the part of each group.
      rows: tensors that are sent for each micro-batch -> how micro-batches cut them.
      meshes: the mesh of each group.
    """

    def __init__(self, expanded: Program, plan: Plan, settings: PlanSettings, rows: Mapping[Ref, Shard]):
        self.expanded, self.plan, self.rows = expanded, plan, rows
        self.cuts = cut(expanded, plan.stage_groups)
        groups = plan.stage_groups
        whole = drop_waits(expanded)  # as ``cut`` drops them: the same nodes then run in micro-batches
        self._of_plan = {
            g.plan: make_partitioner(
                in_positions(whole, groups, g.plan),
                plan.find_group_plan(g),
                settings.but(size=len(g.ranks), rank_order=()),
            )
            for g in {g.plan: g for g in groups}.values()
        }
        self.meshes = [make_mesh(plan.find_group_plan(g), g.ranks) for g in groups]

    def make_level_partitioner(self, number: int) -> AxisPartitioner:
        """Returns the partitioner of the whole program over the mesh of group ``number``, as if its ranks ran all
        stages.
        """
        return self._of_plan[self.plan.stage_groups[number].plan]

    def locate(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Returns (number of the stage group that ``rank`` belongs to, the rank's coordinates in that group's mesh)."""
        number = next(k for k, mesh in enumerate(self.meshes) if rank in mesh.ranks)
        return number, self.meshes[number].find_coordinates(rank)

    def make_part_partitioner(self, number: int) -> StagePartitioner:
        """Returns the partitioner of a group's part, whose inputs and outputs are not yet replaced by receives and
        sends.
        """
        program = in_positions(self.cuts[number].program, self.plan.stage_groups, self.plan.stage_groups[number].plan)
        return StagePartitioner(
            self.make_level_partitioner(number), program, partial(self._find_end_strategies, number)
        )

    def lower_part(self, part: StagePartitioner, rank: int, comm: str) -> Program:
        """Lowers a group's part to the program of one rank.

        Args:
          part: the result of ``make_part_partitioner`` for the rank's group.
          comm: name of the communicator.
        """
        number, at = self.locate(rank)
        program = map_to_ranks(part.lower_program(at), self.meshes[number], rank, comm)
        return self.make_level_partitioner(number).cut_own_rows(program, self.expanded, at)

    def _find_end_strategies(self, number: int, program: Program, at: tuple[int, ...]) -> dict[str, Strategy]:
        """Returns the strategies of the inputs and outputs of group ``number``'s part over the axis after ``at``."""
        travelling, found = self.cuts[number].keys, {}
        for node in program.nodes:
            if node.op == STAGE_INPUT:
                source = int(node.attrs["source"])
                lies = tuple(
                    self.find_received_layout(key, source, number, at)[-1] if key in travelling else B
                    for key in node.attrs["keys"]
                )
                found[node.name] = Strategy((), lies, "from another stage", FIRST in lies)
            elif node.op == STAGE_OUTPUT:
                wanted = self.find_sent_layout(str(node.attrs["key"]), number, int(node.attrs["target"]), at)[-1]
                found[node.name] = Strategy((wanted,), (), "to another stage", wanted == FIRST)
        return found

    # -- layouts of what travels

    def is_direct(self, source: int, target: int) -> bool:
        """Returns True if both groups have the same plan, so that each rank receives from the rank with its own
        coordinates.
        """
        return self.plan.stage_groups[source].plan == self.plan.stage_groups[target].plan

    def find_sent_layout(self, key: str, source: int, target: int, at: tuple[int, ...]) -> Layout:
        """Returns the placements in which the ranks of group ``source`` send a tensor to group ``target``.

        Args:
          key: name of the tensor.
          source: number of the sending stage group.
          target: number of the receiving stage group.
          at: coordinates of the sending ranks along the outer axes of their mesh.

        Returns:
          one placement for each axis that ``at`` covers, and one for the next axis.
        """
        made = self._find_made_layout(key, source, at)
        if self.is_direct(source, target):
            return made
        return self._change_layout(
            key, made, self.meshes[source], at, find_sent_placement, self._can_cross_in_parts(key, source, target)
        )

    def find_received_layout(self, key: str, source: int, target: int, at: tuple[int, ...]) -> Layout:
        """Returns the placements in which the ranks of group ``target`` receive a tensor from group ``source``.

        Arguments and result are as in ``find_sent_layout``, but ``at`` and the placements are those of the receiving
        mesh.
        """
        made = self._find_made_layout(key, target, at)
        if self.is_direct(source, target):
            return made
        return self._change_layout(key, made, self.meshes[target], at, find_received_placement, True)

    def list_parts_for(self, key: str, source: int, target: int, reader: int) -> list[Part]:
        """Lists the parts of a tensor that the rank at position ``reader`` of the target's mesh receives."""
        if self.is_direct(source, target):
            return [Part(reader, reader)] if self._has_some(key, source, reader) else []
        makers = self._find_blocks(key, source, target, source)
        return list_parts(makers, self._find_blocks(key, source, target, target), reader)

    def list_parts_from(self, key: str, source: int, target: int, maker: int) -> list[Part]:
        """Lists the parts of a tensor that the rank at position ``maker`` of the source's mesh sends."""
        if self.is_direct(source, target):
            return self.list_parts_for(key, source, target, maker)
        found = (self.list_parts_for(key, source, target, reader) for reader in range(len(self.meshes[target].ranks)))
        return [part for of_one in found for part in of_one if part.sender == maker]

    def _has_some(self, key: str, number: int, position: int) -> bool:
        """Returns True if the rank at ``position`` of group ``number``'s mesh produces a part of the tensor."""
        t, at = self.find_type(key), find_coordinates(position, [a.size for a in self.meshes[number].axes])
        return (
            not t.is_static
            or find_block(require_static_shape(t), self._find_made_layout(key, number, at[:-1]), at) is not None
        )

    def find_block(self, key: str, source: int, target: int, reader: int) -> tuple[Span, ...]:
        """Returns the block of a tensor that the rank at position ``reader`` of the target's mesh holds after
        receiving.
        """
        found = self._find_blocks(key, source, target, target)[reader]
        assert found is not None
        return found

    def _find_blocks(self, key: str, source: int, target: int, number: int) -> list[tuple[Span, ...] | None]:
        known = self._block_cache.setdefault((key, source, target, number), [])
        if not known:
            mesh, t = self.meshes[number], self.find_type(key)
            lies = self.find_sent_layout if number == source else self.find_received_layout
            for at in list_coordinates([a.size for a in mesh.axes]):
                known.append(find_block(require_static_shape(t), lies(key, source, target, at[:-1]), at))
        return known

    @cached_property
    def _block_cache(self) -> dict[tuple[str, int, int, int], list[tuple[Span, ...] | None]]:
        return {}

    def _can_cross_in_parts(self, key: str, source: int, target: int) -> bool:
        """Returns True if a tensor can be sent between the groups in shards; False if it has to be sent whole.

        It can if both meshes cut each dimension into runs of the same size (see ``whale.ir.crossing.can_cross``).
        """
        t = self.find_type(key)
        if not t.is_static:
            return True
        ends = []
        for number, change in ((source, find_sent_placement), (target, find_received_placement)):
            mesh = self.meshes[number]
            first = (0,) * (len(mesh.axes) - 1)
            lies = self._change_layout(key, self._find_made_layout(key, number, first), mesh, first, change, True)
            at = next(
                (
                    c
                    for c in list_coordinates([a.size for a in mesh.axes])
                    if find_block(require_static_shape(t), lies, c)
                ),
                None,
            )
            ends.append(find_block(require_static_shape(t), lies, at) if at is not None else None)
        return ends[0] is None or ends[1] is None or can_cross(ends[0], ends[1])

    def _change_layout(
        self, key: str, made: Layout, mesh: Mesh, at: tuple[int, ...], change: object, keeps: bool
    ) -> Layout:
        t, rows = self.find_type(key), self.rows.get(self._refs[key]) if key in self._refs else None
        found: list[Placement] = []
        for level, p in enumerate(made):
            here = find_local_type(t, found, at)
            if isinstance(p, Shard) and (not keeps or here.shape is None or here.shape[p.dim] != p.extent):
                p = B
            found.append(change(here, p, mesh.axes[level].size, rows.dim if rows else None))  # type: ignore[operator]
        return tuple(found)

    def _find_made_layout(self, key: str, number: int, at: tuple[int, ...]) -> Layout:
        """Returns the placements in which a tensor is produced on group ``number``'s mesh, for the axes of ``at`` and
        the next one.

        They are those of the first coordinates if the ranks at ``at`` have as many rows and these placements fit the
        tensor's size there; otherwise those of the plan for ``at``.
        """
        levels, t = self.make_level_partitioner(number), self.find_type(key)
        found: list[Placement] = []
        for level in range(len(at) + 1):
            p = self._find_made_placement(key, levels.plan((0,) * level))
            if any(at[:level]) and not (
                levels.has_rows_of_first(at[:level]) and _is_fitting(p, find_local_type(t, found, at))
            ):
                p = self._find_made_placement(key, levels.plan(at[:level]))
            found.append(p)
        return tuple(found)

    def _find_made_placement(self, key: str, plan: Plan) -> Placement:
        """Returns the placement in which a tensor is produced, over the axis of one plan of the whole program."""
        if key not in self._refs:
            return plan.returned[""][self._fetches[key]]
        ref = self._refs[key]
        strategy = plan.strategies[""].get(ref.node)
        return strategy.outputs[ref.index] if strategy is not None else B

    @cached_property
    def _refs(self) -> dict[str, Ref]:
        return {str(ref): ref for part in self.cuts for ref in part.taken}

    @cached_property
    def _fetches(self) -> dict[str, int]:
        return {FETCH_KEY.format(i): i for part in self.cuts for i in part.fetched}

    def find_type(self, key: str) -> TensorType:
        """Returns the global type of the tensor called ``key`` that is sent between groups."""
        if key in self._fetches:
            return self.expanded.find_type(self.expanded.outputs[self._fetches[key]])
        ref = self._refs[key]
        return next(part.program.find_type(ref) for part in self.cuts if ref in part.taken)

    # -- what is told

    def list_edges(self) -> tuple[Edge, ...]:
        """Lists the tensors sent between stage groups in one step, with the logical bytes of all ranks together."""
        found = []
        for target, part in enumerate(self.cuts):
            travelling = [(str(ref), ref, source) for ref, source in part.taken.items()]
            for i, source in part.fetched.items():
                travelling.append((FETCH_KEY.format(i), self.expanded.outputs[i], source))
            for key, ref, source in travelling:
                found.append(Edge(ref, source, target, self._count_bytes(key, source, target)))
        return tuple(found)

    def _count_bytes(self, key: str, source: int, target: int) -> int:
        t, axes = self.find_type(key), self.meshes[target].axes
        if not t.is_static:
            return 0
        lies = self.find_received_layout(key, source, target, (0,) * (len(axes) - 1))
        return t.bytes * prod(a.size for a, p in zip(axes, lies) if not isinstance(p, Shard) and p != FIRST)


def _is_fitting(p: Placement, t: TensorType) -> bool:
    """Returns True if the dimension that ``p`` shards has the size in ``t`` for which the shard was made."""
    return not isinstance(p, Shard) or (t.shape is not None and t.shape[p.dim] == p.extent)
