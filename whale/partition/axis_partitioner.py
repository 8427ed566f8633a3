"""Partitions a program over several mesh axes, one axis after the other: program -> program.

The result is what the ranks with equal first coordinates run, and the plan of the next axis. Groups with different
first coordinates run almost the same program: only the first coordinate has the nodes that run once, and groups may
have unequal rows. The plan made for the first coordinates is therefore the model for the plans of the others.

Decision: 0036.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from whale.errors import PlanError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.layout import B, Partial, Placement, Shard, Strategy, shard
from whale.ir.mesh import Axis, adapt_cut, iterate_levels
from whale.ir.ops import EXCHANGES
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
    """Returns the prefix of the names of the nodes that lowering for the axis number ``level`` adds."""
    return "whale" if level == 0 else f"whale/axis_{level}"


class AxisPartitioner:
    """Partitions a program over the axes of a mesh, one after the other.

    It returns the program of the ranks with equal first coordinates, and the plan of the axis after these. Coordinates
    (``at``) are a tuple with one number for each axis that the program is already lowered for.
    """

    def __init__(
        self,
        program: Program,
        settings: PlanSettings,
        axes: Sequence[Axis],
        rows: Sequence[BatchInput],
        models: Sequence[Plan] = (),
    ):
        """Takes a program and the mesh axes; nothing is planned or lowered yet.

        Args:
          rows: the batch inputs with the rows of every rank; or of every group of ranks along the last axes, which
            have the same rows.
          models: the plan of each axis for the first coordinates; (): they are made when needed.
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
        """Returns how many axes, from the first on, divide the batch's rows; along later ones all ranks have the same
        rows.
        """
        return count_axes_with_rows(self.sizes, prod(self.sizes) // self.shared)

    def make_plan(self) -> Plan:
        """Makes the plans of all axes, each as the ``inner`` one of the axis before; returns the outermost."""
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
        """Returns the dimensions of variables that the axes divide, by handle node (at the first coordinates)."""
        found: dict[str, set[int]] = {}
        for level in range(len(self.axes)):
            for name, placement in self.plan((0,) * level).variables.items():
                if isinstance(placement, Shard):
                    found.setdefault(name, set()).add(placement.dim)
        return {name: frozenset(dims) for name, dims in found.items()}

    def program(self, at: tuple[int, ...]) -> Program:
        """Returns the program that the ranks with these first coordinates run, its nodes in their scopes."""
        if at not in self._programs:
            scopes = self.expand_program(at[:-1]).by_name
            self._programs[at] = _restore_scopes(
                self.lower_program(at), {name: node.scope for name, node in scopes.items()}
            )
        return self._programs[at]

    def lower_program(self, at: tuple[int, ...]) -> Program:
        """Lowers the program for these coordinates, and marks the exchanges along their last axis with its name."""
        *before, coordinate = at
        level, outer, axis = len(before), tuple(before), self.axes[len(before)].name
        plan = replace(self.plan(outer), micro_batches=self.settings.time.micro_batches)
        lowered = mark_axis(
            partition_for_rank(self.expand_program(outer), plan, coordinate, "", None, make_prefix(level)), axis
        )
        return join_sums(lowered, self._find_joined_sums(outer), axis)

    def _find_joined_sums(self, at: tuple[int, ...]) -> dict[str, tuple[Reshard, Node]]:
        """Finds the sums along earlier axes that are merged with those along the next axis (see ``sums_to_join``).

        If all ranks run the same program but for values, the result for the first coordinates is used, so that all
        agree.
        """
        at = at if self.is_like_first(at) else (0,) * len(at)
        if at not in self._sums:
            alike = bool(at) and self.is_computing_everywhere() and self._is_adding_everywhere(len(at))
            self._sums[at] = sums_to_join(self.expand_program(at), self.plan(at)) if alike else {}
        return self._sums[at]

    def is_computing_everywhere(self) -> bool:
        """Tells whether every rank computes: no scope is on some ranks only, and no group is without rows.

        Ranks without work have constants instead of results.
        """
        depth = len(self.axes) - (self.settings.time.micro_batches == 1)  # how much smaller than all ranks groups are
        counts = [max(1, prod(self.sizes[level:]) // self.shared) for level in range(1, depth + 1)]
        rows = [
            sum(list_sizes(b)[i : i + n]) for b in self.rows for n in counts for i in range(0, len(list_sizes(b)), n)
        ]
        return all(rows) and not map_named_ranks(self._programs[()])

    def _is_adding_everywhere(self, level: int) -> bool:
        """Tells whether each coordinate of the axes before ``level`` contributes to all sums along them."""
        outer = (self.plan((0,) * before).strategies[""].values() for before in range(level))
        adds = (s.inputs for one in outer for s in one if any(isinstance(p, Partial) for p in s.outputs))
        return all(all(p.sizes) for inputs in adds for p in inputs if isinstance(p, Shard))

    def expand_program(self, at: tuple[int, ...]) -> Program:
        """Returns ``program(at)`` with the composite ops expanded for the next axis's plan."""
        if at not in self._expanded:
            self._expanded[at] = expand(self.program(at), self.plan(at).expanded, self.settings_at(at))
        return self._expanded[at]

    def plan(self, at: tuple[int, ...]) -> Plan:
        """Returns the plan of the axis after these coordinates, which is made at the first call."""
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
        """Returns the program as seen along axis number ``level``."""
        return project_to_axis(program, self.axes[level].name, self.axes)

    def position(self, at: tuple[int, ...]) -> int:
        """Returns the position in the mesh of the first rank with these coordinates."""
        return sum(c * prod(self.sizes[i + 1 :]) for i, c in enumerate(at))

    def _complete_plan(self, at: tuple[int, ...], settings: PlanSettings) -> Plan:
        """Adapts the model plan, that of the first coordinates, to the program of the ranks at other coordinates."""
        level = len(at)
        model = self.plan((0,) * level)
        if self.is_like_first(at):
            return replace(model, batch_inputs=settings.batch.inputs or ())
        program = self.view_program(self.program(at), level)
        model = _shrink_variables(model, program)
        # Where the first coordinates exchange nothing, the others all have to do alike: they take whole tensors.
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
        """Raises PlanError where groups of ranks would exchange a tensor of which they hold different parts."""
        if not same_kind(mine, first):
            raise PlanError(
                "groups of ranks would exchange a tensor of which they hold different parts",
                op=name,
                given=f"{mine} in the group at {at}, {first} in the first one",
                expected="the same parts in every group",
                action=f"give each group of the axis {self.axes[len(at) - 1].name} the same number of rows",
            )

    def settings_at(self, at: tuple[int, ...]) -> PlanSettings:
        """Returns the settings for planning the axis after these coordinates.

        Statistics and random numbers are then those of a group of ranks.
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
        """Returns the batch inputs with the rows of each rank that has these first coordinates."""
        if len(at) >= self.row_axes:
            return ()
        first, count = self.position(at) // self.shared, prod(self.sizes[len(at) :]) // self.shared
        return tuple(replace(b, placement=change_sizes(b, list_sizes(b)[first : first + count])) for b in self.rows)

    def has_rows_of_first(self, at: tuple[int, ...]) -> bool:
        """Tells whether the ranks with these first coordinates have as many rows as those with the first ones."""
        return [list_sizes(b) for b in self._list_rank_inputs(at)] == [
            list_sizes(b) for b in self._list_rank_inputs((0,) * len(at))
        ]

    def is_like_first(self, at: tuple[int, ...]) -> bool:
        """Tells whether the ranks with these coordinates run the same program as the first ones, but for values."""
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
        """Makes ``lower_program``, the program of the rank at ``at``, take whole batches and cut its group's rows from
        them.

        The last axis that divides rows cuts a coordinate's rows by itself.

        Args:
          program: the program whose inputs are whole.
        """
        outer = at[: self.row_axes - 1]
        for b in self.rows:
            if not b.local and outer:
                inside = self.sizes[self.row_axes - 1]
                group = self.position(outer) // self.shared // inside
                lowered = cut_rows(lowered, program, b, sum_sizes(b, inside), group)
        return lowered

    def _list_groups(self, at: tuple[int, ...]) -> list[range]:
        """Returns the mesh positions of the ranks at each coordinate of the axis after ``at``."""
        first, count = self.position(at), prod(self.sizes[len(at) + 1 :])
        return [range(first + c * count, first + (c + 1) * count) for c in range(self.sizes[len(at)])]

    def _name_ranks(self, positions: Sequence[int]) -> Sequence[int]:
        """Returns the ranks at positions of the mesh."""
        order = self.settings.rank_order
        return [order[i] for i in positions] if order else positions

    def _group_coordinates(self, at: tuple[int, ...]) -> list[tuple[int, int]]:
        """Groups the coordinates of the axis after ``at`` into the first one, and the others by their rows.

        Returns:
          (a coordinate, number of coordinates like it) for each class.
        """
        found: dict[tuple, list[int]] = {}
        for c, group in enumerate(self._list_groups(at)):
            rows = tuple(tuple(list_sizes(b)[i // self.shared] for i in group) for b in self.rows)
            found.setdefault((c == 0, rows), []).append(c)
        return [(members[0], len(members)) for members in found.values()]

    def _count_bytes(self, at: tuple[int, ...]) -> int:
        """Returns the logical bytes that move along the axes after these coordinates."""
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
        """Returns the keys of sums that were merged with those along earlier axes, and are counted in their first
        group.
        """
        here = {a.name for a, c in zip(self.axes, at) if c}
        return {
            r.key for r, node in self._find_joined_sums((0,) * len(at)).values() if here.intersection(axes_of_sum(node))
        }

    def _count_repeats(self, at: tuple[int, ...], plan: Plan) -> dict[str, int]:
        """Counts the occurrences of each reshard, by its key: once in each group that has the whole tensor."""
        found: dict[str, int] = dict.fromkeys((r.key for r in plan.reshards if r.bytes), 1)
        below = at
        for level in range(len(at) + 1, len(self.axes)):
            below = (*below, 0)
            for key in self._find_whole_exchanges(below, found):
                found[key] *= self.sizes[level]
        return found

    def _find_whole_exchanges(self, at: tuple[int, ...], keys: Collection[str]) -> set[str]:
        """Returns those of the exchanges ``keys`` of an earlier axis that the next axis does not divide."""
        strategies, program = self.plan(at).strategies, self.expand_program(at)
        found = set()
        for graph, body in (("", program), *program.functions.items()):
            for node in body.nodes if graph in strategies else ():
                key = str(node.attrs.get("key", "")) if node.op in EXCHANGES else ""
                key = key if key in keys else key.rpartition("/")[0]  # sends and receives say who
                strategy = strategies[graph].get(node.name)
                if key in keys and strategy is not None:
                    if not any(isinstance(p, Shard) for p in strategy.inputs + strategy.outputs):
                        found.add(key)
        return found


def make_partitioner(program: Program, plan: Plan, settings: PlanSettings) -> AxisPartitioner:
    """Creates the partitioner of a normalised program under a plan of one or several axes."""
    axes = [Axis(p.axis or f"axis_{i}", p.size) for i, p in enumerate(iterate_levels(plan))]
    handles = [v.node for v in program.variables]
    models = []
    for level in iterate_levels(plan):
        # A plan of stages names the variables of its own groups; what others hold is in the whole program as well.
        lying = {n: s.outputs[0] for n in handles if (s := level.strategies[""].get(n)) is not None}
        models.append(replace(level, variables={n: p for n, p in lying.items() if isinstance(p, Shard)}))
    return AxisPartitioner(program, settings, axes, plan.batch_inputs, models)


def list_sizes(b: BatchInput) -> tuple[int, ...]:
    """Returns the rows of each rank."""
    assert isinstance(b.placement, Shard)
    return b.placement.sizes


def change_sizes(b: BatchInput, sizes: tuple[int, ...]) -> Shard:
    """Returns the batch input's placement with other numbers of rows."""
    assert isinstance(b.placement, Shard)
    return shard(b.placement.dim, sizes, b.placement.blocks)


def sum_sizes(b: BatchInput, group: int) -> Shard:
    """Returns the batch input's placement over groups of ``group`` ranks: the rows of each group."""
    sizes = list_sizes(b)
    return change_sizes(b, tuple(sum(sizes[i : i + group]) for i in range(0, len(sizes), group)))


def count_axes_with_rows(sizes: Sequence[int], groups: int) -> int:
    """Counts the first axes that together have ``groups`` coordinates, each with its own rows."""
    return next(n for n in range(len(sizes) + 1) if prod(sizes[:n]) >= groups)


def _shrink_variables(model: Plan, program: Program) -> Plan:
    """Returns ``model`` with variables cut to their sizes in ``program``, which may be smaller than those at the first
    coordinates.
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
    """Restores the scopes of the nodes of ``lower_program``; nodes added by lowering get their operand's scope."""
    scope: dict[str, str] = {}
    for node in lowered.nodes:
        found = [scope[r.node] for r in node.inputs if scope[r.node]]
        scope[node.name] = known.get(node.name, node.scope) or (found[0] if found and node.name not in known else "")
    return lowered.replace_nodes(
        tuple(n if n.scope == scope[n.name] else replace(n, scope=scope[n.name]) for n in lowered.nodes)
    )
