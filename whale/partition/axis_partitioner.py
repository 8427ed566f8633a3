"""Partitions a program over several mesh axes, one axis after the other: program -> program.

Partitioning over one axis yields the program that all ranks with the same coordinate on that axis run; it is then
partitioned over the next axis like any program. Ranks at different coordinates run almost the same program: only
coordinate 0 has the nodes that run once, and rows may be unequal. So each axis is planned once, for the ranks at
coordinate 0 of all earlier axes; for ranks at other coordinates that plan is reused or adapted.

Decision: 0036.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from whale.errors import PlanError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.layout import LEGEND, B, Partial, Placement, Shard, Strategy, shard
from whale.ir.mesh import Axis, adapt_cut, iterate_levels
from whale.ir.ops import BRANCHES, EXCHANGES, HAS_BODIES
from whale.ir.plan import BatchInput, Plan, Reshard
from whale.ir.program import Node, Program
from whale.partition.rank_mapping import cut_rows, mark_axis
from whale.partition.spmd import is_alike, is_surely_identical, partition_for_rank
from whale.passes.analysis.axes import project_to_axis, select_known_along
from whale.passes.analysis.rank_groups import map_named_ranks
from whale.passes.pass_manager import complete_plan, make_plan
from whale.passes.plan_builder import expand
from whale.passes.propagation.reference_plan import same_kind
from whale.passes.resharding.fuse_all_reduces import axes_of_sum, join_sums, sums_to_join
from whale.passes.settings import PlanSettings


def make_prefix(level: int) -> str:
    """Returns the prefix of the names of nodes that lowering over axis number ``level`` (0 is the outermost) adds."""
    return "whale" if level == 0 else f"whale/axis_{level}"


class AxisPartitioner:
    """Partitions a program over the axes of a mesh, one after the other, and caches programs and plans by coordinates.

    Coordinates (``at``) are a tuple with one number for each axis over which the program is already lowered, outermost
    first; () stands for the program that is not lowered yet.
    """

    def __init__(
        self,
        program: Program,
        settings: PlanSettings,
        axes: Sequence[Axis],
        rows: Sequence[BatchInput],
        models: Sequence[Plan] = (),
    ):
        """Stores a program and the mesh axes; nothing is planned or lowered yet.

        Args:
          program: the normalised program of all ranks.
          axes: the mesh axes, outermost first.
          rows: the batch inputs with the rows of every rank. If ranks along the last axes have the same rows, there is
            one entry for each group of such ranks.
          models: the plan of each axis at the first coordinates; (): they are made when needed.
        """
        self.settings, self.axes, self.rows = settings, tuple(axes), tuple(rows)
        self.models = list(models)
        self.shared = prod(self.sizes) // len(list_sizes(self.rows[0])) if self.rows else 1
        self._programs: dict[tuple[int, ...], Program] = {(): program}
        self._expanded: dict[tuple[int, ...], Program] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._alike: dict[tuple[int, ...], bool] = {}
        self._sums: dict[tuple[int, ...], dict[str, tuple[Reshard, Node]]] = {}

    @property
    def sizes(self) -> list[int]:
        """Returns the number of coordinates of each axis."""
        return [a.size for a in self.axes]

    @property
    def row_axes(self) -> int:
        """Returns how many of the outermost axes divide the rows of the batch; ranks along the other axes have equal
        rows.
        """
        return count_axes_with_rows(self.sizes, prod(self.sizes) // self.shared)

    def make_plan(self) -> Plan:
        """Makes the plans of all axes and returns the outermost one, with each next axis's plan as ``inner``."""
        found: Plan | None = None
        for level in reversed(range(len(self.axes))):
            first = (0,) * level
            inner, own = found, self.plan(first)
            found = replace(own, axis=self.axes[level].name, batch_inputs=self._list_rank_inputs(first))
            if inner is not None:
                found = replace(
                    found,
                    inner=inner,
                    inner_bytes=sum(n * self._count_bytes((*first, c)) for c, n in self._group_coordinates(first)),
                    repeats=self._count_repeats(first, own),
                )
        assert found is not None
        return found

    def find_divided_dims(self) -> dict[str, frozenset[int]]:
        """Returns which dimensions of each variable some axis shards, by the variable's handle node."""
        found: dict[str, set[int]] = {}
        for level in range(len(self.axes)):
            for name, placement in self.plan((0,) * level).variables.items():
                if isinstance(placement, Shard):
                    found.setdefault(name, set()).add(placement.dim)
        return {name: frozenset(dims) for name, dims in found.items()}

    def program(self, at: tuple[int, ...]) -> Program:
        """Returns the program that the ranks at coordinates ``at`` run, with each node in its original scope."""
        if at not in self._programs:
            scopes = self.expand_program(at[:-1]).by_name
            self._programs[at] = _restore_scopes(
                self.lower_program(at), {name: node.scope for name, node in scopes.items()}
            )
        return self._programs[at]

    def lower_program(self, at: tuple[int, ...]) -> Program:
        """Returns the program of the ranks at coordinates ``at``, lowered from that of ``at[:-1]`` over one more axis.

        Each new exchange gets a mark with the name of this axis.
        """
        *before, coordinate = at
        level, outer, axis = len(before), tuple(before), self.axes[len(before)].name
        plan = replace(self.plan(outer), micro_batches=self.settings.time.micro_batches)
        lowered = mark_axis(
            partition_for_rank(self.expand_program(outer), plan, coordinate, "", None, make_prefix(level)), axis
        )
        return join_sums(lowered, self._find_joined_sums(outer), axis)

    def _find_joined_sums(self, at: tuple[int, ...]) -> dict[str, tuple[Reshard, Node]]:
        """Returns the all-reduces along earlier axes that can be merged with one along the next axis (see
        ``sums_to_join``).

        Such an all-reduce then runs once, over both axes. All ranks must merge the same ones, so only those are merged
        that every group of ranks would merge by its own plan, none of bodies that may meet branches, and none at all
        if some rank does not compute.

        Returns:
          key of the all-reduce along earlier axes -> (the reshard that is its all-reduce along the next axis, its
            node).
        """
        at = at if self.is_like_first(at) else (0,) * len(at)
        if at not in self._sums:
            alike = bool(at) and self.is_computing_everywhere() and self._is_adding_everywhere(len(at))
            found = sums_to_join(self.expand_program(at), self.plan(at)) if alike else {}
            # Where a body sums a tensor for itself and yet returns it partial, the sum is the first coordinate's part,
            # and all others' is a constant, which is no partial sum along the next axis.
            for other in self._list_unlike_groups(len(at)) if found else ():
                theirs = sums_to_join(self.expand_program(other), self.plan(other))
                found = {key: joined for key, joined in found.items() if key in theirs}
            self._sums[at] = {key: one for key, one in found.items() if not self._may_meet_branches(at, one[0])}
        return self._sums[at]

    def _may_meet_branches(self, at: tuple[int, ...], r: Reshard) -> bool:
        """Returns True if a reshard is of a tensor that a loop or branch computes, in its body or as its result, in a
        program with branches.

        What else a branch exchanges may differ between groups of ranks. Merged, its sum could wait on one rank for what
        waits for it on another.
        """
        program = self.expand_program(at)
        if not r.graph and program.by_name[r.ref.node].op not in HAS_BODIES:
            return False
        return any(node.op in BRANCHES for graph in (program, *program.functions.values()) for node in graph.nodes)

    def _list_unlike_groups(self, level: int) -> list[tuple[int, ...]]:
        """Returns coordinates along the axes before ``level`` that stand for all others: one of each kind of rows, and
        of these only those that run other nodes than the first.
        """
        found: list[tuple[int, ...]] = [()]
        for _ in range(level):
            found = [(*at, c) for at in found for c, _ in self._group_coordinates(at)]
        return [at for at in found if not self.is_like_first(at)]

    def is_computing_everywhere(self) -> bool:
        """Returns True if every rank computes: no scope is limited to some ranks, and no group of ranks is without
        rows.

        Otherwise some ranks hold constants in place of results, and all-reduces along two axes cannot be merged.
        """
        depth = len(self.axes) - (self.settings.time.micro_batches == 1)  # levels of groups that all need rows
        counts = [max(1, prod(self.sizes[level:]) // self.shared) for level in range(1, depth + 1)]
        rows = [
            sum(list_sizes(b)[i : i + n]) for b in self.rows for n in counts for i in range(0, len(list_sizes(b)), n)
        ]
        return all(rows) and not map_named_ranks(self._programs[()])

    def _is_adding_everywhere(self, level: int) -> bool:
        """Returns True if no coordinate of the axes before ``level`` has an empty shard where partial sums are made.

        A rank with an empty shard replaces its partial sum by a constant, so that all-reduces cannot be merged.
        """
        outer = (graph.values() for before in range(level) for graph in self.plan((0,) * before).strategies.values())
        adds = (s.inputs for one in outer for s in one if any(isinstance(p, Partial) for p in s.outputs))
        return all(all(p.sizes) for inputs in adds for p in inputs if isinstance(p, Shard))

    def expand_program(self, at: tuple[int, ...]) -> Program:
        """Returns ``program(at)`` with some composite ops decomposed: those that the plan of the next axis lists as
        ``expanded``.
        """
        if at not in self._expanded:
            self._expanded[at] = expand(self.program(at), self.plan(at).expanded, self.settings_at(at))
        return self._expanded[at]

    def plan(self, at: tuple[int, ...]) -> Plan:
        """Returns the plan of the next axis for the ranks at coordinates ``at``; makes it at the first call."""
        if at not in self._plans:
            level, settings = len(at), self.settings_at(at)
            if any(at):
                found = self._complete_plan(at, settings)
            elif level < len(self.models):
                found = self.models[level]
                found = replace(found, inner=None, batch_inputs=settings.batch.inputs or ())
            else:
                found = make_plan(
                    self.view_program(self.program(at), level), settings, compute_fingerprint(self._programs[()])
                )
                self.models.append(found)
            self._plans[at] = found
        return self._plans[at]

    def view_program(self, program: Program, level: int) -> Program:
        """Returns the program with only those scopes that concern axis number ``level``, for the planner of one
        axis.
        """
        return project_to_axis(program, self.axes[level].name, self.axes)

    def position(self, at: tuple[int, ...]) -> int:
        """Returns the position in the mesh of the first rank whose coordinates begin with ``at``."""
        return sum(c * prod(self.sizes[i + 1 :]) for i, c in enumerate(at))

    def _complete_plan(self, at: tuple[int, ...], settings: PlanSettings) -> Plan:
        """Adapts the plan made for the first coordinates to the program of the ranks at coordinates ``at``."""
        level = len(at)
        model = self.plan((0,) * level)
        if self.is_like_first(at):
            return replace(model, batch_inputs=settings.batch.inputs or ())
        program = self.view_program(self.program(at), level)
        model = _shrink_variables(model, program)
        # Exchanges that the model plan lacks must be alike in every group, so they take replicated tensors.
        known = model.strategies[""]
        whole = {
            n.name: Strategy((B,) * len(n.inputs), (B,) * len(n.outputs), "alike in every group")
            for n in program.nodes
            if n.marks.axis and n.name not in known
        }
        found = complete_plan(program, settings, model, whole)
        for graph, body in (("", program), *program.functions.items()):
            mine, theirs = found.strategies.get(graph, {}), model.strategies.get(graph, {})
            for node in body.nodes:
                if node.marks.axis and node.name in mine and node.name in theirs:
                    self._refuse_unlike(node.name, mine[node.name], theirs[node.name], at)
        return found

    def _refuse_unlike(self, name: str, mine: Strategy, first: Strategy, at: tuple[int, ...]) -> None:
        """Raises PlanError if groups of ranks would exchange a tensor of which they hold different parts.

        Args:
          name: the node that exchanges it.
          mine: the node's strategy in the group at ``at``.
          first: the node's strategy in the first group.
        """
        if not same_kind(mine, first):
            raise PlanError(
                "groups of ranks would exchange a tensor of which they hold different parts",
                op=name,
                given=f"{mine} in the group at coordinates {at} of the mesh, {first} in the first group",
                notation=LEGEND,
                expected="the same parts in every group",
                action=f"give each group of the axis {self.axes[len(at) - 1].name} the same number of rows (change the "
                "batch size, or batch.shares)",
            )

    def settings_at(self, at: tuple[int, ...]) -> PlanSettings:
        """Returns the settings with which the next axis is planned for the ranks at coordinates ``at``.

        They describe that axis alone: its size, and the rows of these ranks summed for each of its coordinates. Local
        batch statistics and local random streams are possible along the outermost axis only; ranks along inner axes
        share them.
        """
        level, sizes = len(at), self.sizes
        last = level == len(sizes) - 1
        known = select_known_along(self.settings.split.tiles, self.axes[level].name)
        for before in range(level):
            earlier = self.plan(at[:before]).variables
            known |= {n: B for n, p in earlier.items() if isinstance(p, Shard) and p.blocks > 1}
        inside = prod(sizes[level + 1 :])
        divides = level < self.row_axes
        cuts = level == self.row_axes - 1
        batch = tuple(
            replace(b, placement=sum_sizes(b, inside // self.shared), local=b.local or not cuts)
            for b in self._list_rank_inputs(at)
            if divides
        )
        changes: dict[str, Any] = {
            "size": sizes[level],
            "devices": () if last else tuple(_format_ranks(self._name_ranks(g)) for g in self._list_groups(at)),
            "batch__inputs": batch,
            "batch__shares": (),
            "batch__local": {},
            "split__known": known,
            "exchange__backend": "whale",
        }
        if level:
            changes |= {"batch__local_statistics": False, "batch__local_streams": False}
        if not last:
            changes |= {
                "zero__level": self.settings.zero.level if divides else 0,
                "exchange__group_bytes": 0,
                "split__tables": False,
            }
        return self.settings.but(**changes)

    def _list_rank_inputs(self, at: tuple[int, ...]) -> tuple[BatchInput, ...]:
        """Returns the batch inputs with the rows of only the ranks whose coordinates begin with ``at``."""
        if len(at) >= self.row_axes:
            return ()
        first, count = self.position(at) // self.shared, prod(self.sizes[len(at) :]) // self.shared
        return tuple(replace(b, placement=change_sizes(b, list_sizes(b)[first : first + count])) for b in self.rows)

    def has_rows_of_first(self, at: tuple[int, ...]) -> bool:
        """Returns True if the ranks at coordinates ``at`` have as many rows as those at the first coordinates."""
        return [list_sizes(b) for b in self._list_rank_inputs(at)] == [
            list_sizes(b) for b in self._list_rank_inputs((0,) * len(at))
        ]

    def is_like_first(self, at: tuple[int, ...]) -> bool:
        """Returns True if the ranks at ``at`` run the same nodes, with the same types, as those at the first
        coordinates.

        Values of constants may differ. Such ranks can use the first coordinates' plan.
        """
        if at not in self._alike:
            self._alike[at] = not any(at) or (self.has_rows_of_first(at) and self._is_running_as_first(at))
        return self._alike[at]

    def _is_running_as_first(self, at: tuple[int, ...]) -> bool:
        outer, first = at[:-1], (0,) * len(at)
        surely = self.is_like_first(outer) and (
            not at[-1] or is_surely_identical(self.expand_program(outer), self.plan(outer))
        )
        return surely or is_alike(self.program(at), self.program(first))

    def cut_own_rows(self, lowered: Program, program: Program, at: tuple[int, ...]) -> Program:
        """Changes a rank's lowered program to take whole batches, and to slice the rows of the rank's group out of
        them.

        Only groups along the earlier axes that divide rows need this slice: the last such axis is lowered with a slice
        of its own.

        Args:
          lowered: the result of ``lower_program`` for the rank's coordinates ``at``.
          program: the program whose inputs are whole batches.
        """
        outer = at[: self.row_axes - 1]
        for b in self.rows:
            if not b.local and outer:
                inside = self.sizes[self.row_axes - 1]
                group = self.position(outer) // self.shared // inside
                lowered = cut_rows(lowered, program, b, sum_sizes(b, inside), group)
        return lowered

    def _list_groups(self, at: tuple[int, ...]) -> list[range]:
        """Returns, for each coordinate of the next axis, the mesh positions of the ranks at that coordinate."""
        first, count = self.position(at), prod(self.sizes[len(at) + 1 :])
        return [range(first + c * count, first + (c + 1) * count) for c in range(self.sizes[len(at)])]

    def _name_ranks(self, positions: Sequence[int]) -> Sequence[int]:
        """Returns the ranks at these positions of the mesh."""
        order = self.settings.rank_order
        return [order[i] for i in positions] if order else positions

    def _group_coordinates(self, at: tuple[int, ...]) -> list[tuple[int, int]]:
        """Groups the coordinates of the next axis by the rows of their ranks; coordinate 0 forms a group of its own.

        Returns:
          (a coordinate, number of coordinates like it) for each group.
        """
        found: dict[tuple, list[int]] = {}
        for c, group in enumerate(self._list_groups(at)):
            rows = tuple(tuple(list_sizes(b)[i // self.shared] for i in group) for b in self.rows)
            found.setdefault((c == 0, rows), []).append(c)
        return [(members[0], len(members)) for members in found.values()]

    def _count_bytes(self, at: tuple[int, ...]) -> int:
        """Returns the logical bytes that a step moves along all axes after ``at``, within the ranks at these
        coordinates.
        """
        if len(at) == len(self.axes):
            return 0
        plan = self.plan(at)
        elsewhere = self._find_counted_elsewhere(at)
        if len(at) == len(self.axes) - 1:
            return replace(plan, repeats=dict.fromkeys(elsewhere, 0)).own_bytes
        repeats = self._count_repeats(at, plan)
        own = replace(plan, repeats={**repeats, **dict.fromkeys(elsewhere, 0)}).own_bytes
        return own + sum(n * self._count_bytes((*at, c)) for c, n in self._group_coordinates(at))

    def _find_counted_elsewhere(self, at: tuple[int, ...]) -> set[str]:
        """Returns the keys of merged all-reduces whose bytes must not be counted again for the ranks at coordinates
        ``at``.

        A merged all-reduce connects groups along an earlier axis; its bytes are counted at coordinate 0 of that axis.
        """
        here = {a.name for a, c in zip(self.axes, at) if c}
        return {
            r.key for r, node in self._find_joined_sums((0,) * len(at)).values() if here.intersection(axes_of_sum(node))
        }

    def _count_repeats(self, at: tuple[int, ...], plan: Plan) -> dict[str, int]:
        """Returns how often each reshard of ``plan`` happens in a step, by its key.

        A tensor that an inner axis replicates is resharded by each of its coordinates; one that it shards counts once,
        since each coordinate moves only its part.
        """
        found: dict[str, int] = dict.fromkeys((r.key for r in plan.reshards if r.bytes), 1)
        below = at
        for level in range(len(at) + 1, len(self.axes)):
            below = (*below, 0)
            for key in self._find_whole_exchanges(below, found):
                found[key] *= self.sizes[level]
        return found

    def _find_whole_exchanges(self, at: tuple[int, ...], keys: Collection[str]) -> set[str]:
        """Returns which exchanges along earlier axes, given by their keys, move a tensor that the next axis does not
        shard.
        """
        strategies, program = self.plan(at).strategies, self.expand_program(at)
        found = set()
        for graph, body in (("", program), *program.functions.items()):
            for node in body.nodes if graph in strategies else ():
                key = str(node.attrs.get("key", "")) if node.op in EXCHANGES else ""
                key = key if key in keys else key.rpartition("/")[0]  # keys of sends and receives end with their ranks
                strategy = strategies[graph].get(node.name)
                if key in keys and strategy is not None:
                    if not any(isinstance(p, Shard) for p in strategy.inputs + strategy.outputs):
                        found.add(key)
        return found


def make_partitioner(program: Program, plan: Plan, settings: PlanSettings) -> AxisPartitioner:
    """Creates the partitioner of a normalised program from a finished plan, of one or several axes."""
    axes = [Axis(p.axis or f"axis_{i}", p.size) for i, p in enumerate(iterate_levels(plan))]
    handles = [v.node for v in program.variables]
    models = []
    for level in iterate_levels(plan):
        # A plan of stages lists the variables of its own groups only, but the program has those of all groups.
        lying = {n: s.outputs[0] for n in handles if (s := level.strategies[""].get(n)) is not None}
        models.append(replace(level, variables={n: p for n, p in lying.items() if isinstance(p, Shard)}))
    return AxisPartitioner(program, settings, axes, plan.batch_inputs, models)


def list_sizes(b: BatchInput) -> tuple[int, ...]:
    """Returns the rows of each coordinate of a batch input."""
    assert isinstance(b.placement, Shard)
    return b.placement.sizes


def change_sizes(b: BatchInput, sizes: tuple[int, ...]) -> Shard:
    """Returns the placement of a batch input with ``sizes`` as the rows of each coordinate."""
    assert isinstance(b.placement, Shard)
    return shard(b.placement.dim, sizes, b.placement.blocks)


def sum_sizes(b: BatchInput, group: int) -> Shard:
    """Returns the placement of a batch input over groups of ``group`` consecutive ranks, with the rows of each
    group.
    """
    sizes = list_sizes(b)
    return change_sizes(b, tuple(sum(sizes[i : i + group]) for i in range(0, len(sizes), group)))


def count_axes_with_rows(sizes: Sequence[int], groups: int) -> int:
    """Returns how many of the outermost axes are needed to have at least ``groups`` coordinates together.

    Args:
      sizes: number of coordinates of each axis.
      groups: number of groups of ranks with rows of their own.
    """
    return next(n for n in range(len(sizes) + 1) if prod(sizes[:n]) >= groups)


def _shrink_variables(model: Plan, program: Program) -> Plan:
    """Returns the plan ``model`` with the shards of its variables adapted to the variables' sizes in ``program``.

    The sizes differ if an earlier axis divides a variable unevenly: then the ranks of ``program`` have less of it than
    those for which ``model`` was made.
    """
    cuts: dict[str, Placement] = {}
    for name, p in model.variables.items():
        shape = program.variable_of[name].type.shape if name in program.variable_of else None
        extent = shape[p.dim] if shape is not None and isinstance(p, Shard) else None
        if extent is not None and isinstance(p, Shard) and extent != p.extent:
            cuts[name] = adapt_cut(p, extent)
    if not cuts:
        return model
    here = {name: replace(model.strategies[""][name], outputs=(p,)) for name, p in cuts.items()}
    strategies = {**model.strategies, "": {**model.strategies[""], **here}}
    return replace(model, variables={**model.variables, **cuts}, strategies=strategies)


def _format_ranks(ranks: Sequence[int]) -> str:
    in_a_row = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"ranks {ranks[0]} to {ranks[-1]}" if in_a_row else f"ranks {'+'.join(map(str, ranks))}"


def _restore_scopes(lowered: Program, known: Mapping[str, str]) -> Program:
    """Returns a lowered program with the nodes' original scopes; nodes that lowering added get an operand's scope."""
    scope: dict[str, str] = {}
    for node in lowered.nodes:
        found = [scope[r.node] for r in node.inputs if scope[r.node]]
        scope[node.name] = known.get(node.name, node.scope) or (found[0] if found and node.name not in known else "")
    return lowered.replace_nodes(
        tuple(n if n.scope == scope[n.name] else replace(n, scope=scope[n.name]) for n in lowered.nodes)
    )
