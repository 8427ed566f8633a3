"""Rolls a rank's stages up into micro-batches that run in the order of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale.errors import PlanError
from whale.ir.layout import Split, parse_placement, split
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref
from whale.ir.schedule import count_credits, count_live_micro_batches, make_schedule
from whale.partition.identical_ranks import is_alike
from whale.partition.pipeline.hoist_sends import hoist_sends
from whale.partition.pipeline.microbatch_loop import Call, outline
from whale.partition.pipeline.microbatches import MicrobatchProgram, find_batch_rows
from whale.partition.pipeline.stages import Stages
from whale.passes.analysis.stages import stage_of, stages_of
from whale.passes.in_time.micro_batches import EACH, time_plan
from whale.passes.in_time.phases import in_stages_of_readers, kinds, phases_of_rank
from whale.passes.in_time.preparing import prepared
from whale.passes.settings import PlanSettings

_TRAVELS = ("WhaleRecv", "WhaleSend", "Const")


@dataclass(frozen=True, slots=True)
class AgreedPhases:
    """The phase and stage of what is computed for each micro-batch, as coordinates with rows know them.

    A coordinate without rows reads nothing of what it sends, so it cannot tell by itself.

    Attributes:
      kinds: of what is computed for each micro-batch, F, B or W (see ``whale.passes.in_time.phases``).
      stages: the stage that it belongs to.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def merge(coordinates: Sequence[WholeSchedule]) -> AgreedPhases:
        """Merges what some coordinates know: each node's earliest kind, and the stage that the first of them names."""
        kinds = {name: k for kind in "WBF" for one in coordinates for name, k in one.kinds.items() if k == kind}
        return AgreedPhases(kinds, {name: stage for one in reversed(coordinates) for name, stage in one.stages.items()})


class WholeSchedule:
    """The program of one coordinate as if it had all stages, in micro-batches: what all its ranks have to agree on.

    Attributes:
      rows: tensors of the program that have the rows of the batch -> how these are cut into micro-batches.
      kinds: of what is computed for each micro-batch, F, B or W; stages: the stage that it belongs to.
    """

    def __init__(
        self,
        expanded: Program,
        stages: Stages,
        number: int,
        at: tuple[int, ...],
        settings: PlanSettings,
        agreed: AgreedPhases = AgreedPhases(),
    ):
        """Plans the micro-batches of the whole program at one coordinate.

        Args:
          number: of the stage group; at: coordinates in its mesh, () for the first ones.
          agreed: what other coordinates know.
        """
        plan = self.plan = stages.plan
        levels, mesh = stages.make_level_partitioner(number), stages.meshes[number]
        at = at or (0,) * len(mesh.axes)
        self.mine, self.position, self.settings = (
            plan.find_group_plan(plan.stage_groups[number]),
            levels.position(at),
            settings,
        )
        self.numbers, self.agreed = {stage: i for i, stage in enumerate(stages_of(expanded))}, agreed
        self._known: list[MicrobatchProgram] = []
        whole = self._prepare(levels.cut_own_rows(levels.program(at), expanded, at))
        time, regions = self._plan(whole, {})
        each = {name for name, region in regions.items() if region == EACH}
        strategies = time.strategies[""]
        self.rows: dict[Ref, Split] = {}
        for node in expanded.nodes:
            if node.name in each:
                for ref, placement in zip(node.list_refs(), strategies[node.name].outputs):
                    if isinstance(placement, Split):
                        self.rows[ref] = placement
        self.kinds = kinds(whole, each, self.numbers, plan.schedule == "zb-h1", agreed.kinds)
        self.stages = {n.name: stage for n in whole.nodes if n.name in each and (stage := stage_of(n.scope))}

    def pipeline(self, program: Program, number: int) -> Program:
        """Rolls up the program of this coordinate's rank in stage group ``number``, in the schedule's order.

        Args:
          program: what it runs on all its rows.

        Raises:
          PlanError: a value of all micro-batches is needed before the last one is through; the chunks of the groups
            are not alike; a tensor is cut otherwise by its sender than by its receiver.
        """
        program = self._prepare(program)
        travels = (node for node in program.nodes if node.op in _TRAVELS and node.marks.micro_batch_rows)
        cuts = {node.name: _find_split(node) for node in travels}
        # Ranks of a stage mostly run the same but for values.
        one = next((one for one in self._known if one.rows == cuts and is_alike(one.program, program)), None)
        if one is None:
            received = {name: cut for name, cut in cuts.items() if program.by_name[name].op != "WhaleSend"}
            one = MicrobatchProgram(program, cuts, *self._plan(program, received))
            self._known.append(one)
        time, regions = one.plan, one.regions
        for node in program.nodes:
            if node.op == "WhaleSend" and node.marks.micro_batch_rows:
                wanted, found = _find_split(node), time.strategies[""][node.name].inputs[1]
                if found != wanted:
                    raise PlanError(
                        "two stages cut a tensor into micro-batches in two ways",
                        op=node.name,
                        given=f"{found}, {wanted}",
                        expected="the same",
                        action="set pipeline.num_micro_batch=1",
                    )
        each = {name for name, region in regions.items() if region == EACH}
        groups = self.plan.stage_groups
        if len({len(group.stages) for group in groups}) > 1:
            raise PlanError(
                "some ranks have more stages than others",
                given="; ".join(f"{list(group.ranks)}: {group.name}" for group in groups),
                expected="as many stages on each, for a schedule of micro-batches",
                action="change the devices of the stages",
            )
        chunks = {stage: i for i, stage in enumerate(groups[number].stages)}
        phases = phases_of_rank(program, each, self.kinds, chunks)
        rows = make_schedule(self.plan.schedule, len(groups), len(chunks), self.plan.micro_batches)
        here = set(phases.values())
        named = [(f"{p.kind.name}{p.chunk}", p.micro_batch) for p in rows[number]]
        calls = [Call(phase, micro_batch) for phase, micro_batch in named if phase in here]
        waiting = count_credits(rows)

        def count_room(edge: tuple[int, int]) -> int:
            """Returns how many results of one kind may be under way between two stage groups.

            That is one that is read and those that may wait; past other stages, no more is sent than is alive.
            """
            return 1 + waiting.get(edge, count_live_micro_batches(rows[edge[0]]))

        return hoist_sends(outline(program, time, each, calls, phases), count_room)

    def _prepare(self, program: Program) -> Program:
        return prepared(in_stages_of_readers(program, self.numbers, self.agreed.stages))

    def _plan(self, program: Program, received: dict[str, Split]) -> tuple[Plan, dict[str, str]]:
        rows = {**find_batch_rows(program, self.mine, self.position, self.plan.micro_batches), **received}
        streams, statistics = self.settings.batch.local_streams, self.settings.time.local_statistics
        return time_plan(program, self.plan.micro_batches, rows, streams, statistics)


def _find_split(node: Node) -> Split:
    """Returns how micro-batches cut what ``node`` sends or receives for each of them."""
    placement = parse_placement(node.marks.micro_batch_rows)
    assert isinstance(placement, Split)
    return split(placement.dim, placement.sizes, placement.blocks)
