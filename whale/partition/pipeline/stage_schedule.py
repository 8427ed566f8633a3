"""Turns a rank's stages into micro-batches that run in the order of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale.errors import REPORT_FAULT, PlanError
from whale.ir.emitter import COMMUNICATOR
from whale.ir.layout import LEGEND, Shard, parse_placement, shard
from whale.ir.ops import POINT_TO_POINT
from whale.ir.pipeline_schedule import count_credits, count_live_micro_batches, make_schedule
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref, sort_nodes
from whale.ir.values import DType, Func, Shape
from whale.partition.pipeline.microbatch_loop import CALL, Call, outline
from whale.partition.pipeline.microbatches import MicrobatchProgram, find_batch_rows
from whale.partition.pipeline.phases import give_stages, kinds, phases_of_rank
from whale.partition.pipeline.plan_microbatches import EACH, time_plan, untie_microbatches
from whale.partition.pipeline.stages import Stages
from whale.partition.spmd import is_alike
from whale.passes.analysis.stages import stage_of, stages_of
from whale.passes.settings import PlanSettings

_TRAVELS = ("WhaleRecv", "WhaleSend", "Const")


@dataclass(frozen=True, slots=True)
class AgreedPhases:
    """Holds the phase and stage of nodes computed per micro-batch, as found on coordinates that have rows.

    A coordinate without rows does not read what it sends to others, so it cannot find them by itself.

    Attributes:
      kinds: node -> F, B or W (see ``whale.partition.pipeline.phases``).
      stages: node -> its stage.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def merge(coordinates: Sequence[WholeSchedule]) -> AgreedPhases:
        """Merges what several coordinates found: each node's earliest kind (F before B before W), and its stage on the
        first one.
        """
        kinds = {name: k for kind in "WBF" for one in coordinates for name, k in one.kinds.items() if k == kind}
        return AgreedPhases(kinds, {name: stage for one in reversed(coordinates) for name, stage in one.stages.items()})


class WholeSchedule:
    """Plans the micro-batches of the whole program for one coordinate, as if its ranks ran all stages.

    Ranks of different stages follow this common plan, and so agree on what they exchange in each micro-batch.
    ``pipeline`` turns the program of one rank into calls per micro-batch under this plan.

    Attributes:
      rows: tensor with rows of the batch -> how micro-batches cut it.
      kinds: node computed per micro-batch -> F, B or W.
      stages: node computed per micro-batch -> its stage.
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
          expanded: the whole program, with composite ops decomposed for the plan.
          number: number of the stage group.
          at: coordinates in the group's mesh; () stands for the first ones.
          agreed: what coordinates with rows have found.
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
        self.rows: dict[Ref, Shard] = {}
        for node in expanded.nodes:
            if node.name in each:
                for ref, placement in zip(node.list_refs(), strategies[node.name].outputs):
                    if isinstance(placement, Shard):
                        self.rows[ref] = placement
        self.kinds = kinds(whole, each, self.numbers, plan.schedule == "zb-h1", agreed.kinds)
        self.stages = {n.name: stage for n in whole.nodes if n.name in each and (stage := stage_of(n.scope))}

    def pipeline(self, program: Program, number: int) -> Program:
        """Turns one rank's program into calls per micro-batch, in the order of the schedule.

        Args:
          program: the program of this coordinate's rank in stage group ``number``, for all its rows.

        Raises:
          PlanError: a value of all micro-batches is needed before the last one is finished; groups have different
            numbers of stages; or sender and receiver cut a tensor differently into micro-batches.
        """
        program = self._prepare(program)
        travels = (node for node in program.nodes if node.op in _TRAVELS and node.marks.micro_batch_rows)
        cuts = {node.name: _find_split(node) for node in travels}
        # Most ranks of a stage run the same program but for values.
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
                        given=f"{found} where it is sent, {wanted} where it is received",
                        notation=LEGEND,
                        expected="the same rows in each micro-batch",
                        action=f"set pipeline.micro_batches=1; {REPORT_FAULT}",
                    )
        each = {name for name, region in regions.items() if region == EACH}
        groups = self.plan.stage_groups
        if len({len(group.stages) for group in groups}) > 1:
            raise PlanError(
                "some ranks have more stages than others",
                given="; ".join(f"ranks {list(group.ranks)}: {group.name}" for group in groups),
                expected="the same number of stages on each rank, if the step runs in micro-batches",
                action="change the devices of the wh.stage scopes, or set pipeline.micro_batches=1",
            )
        chunks = {stage: i for i, stage in enumerate(groups[number].stages)}
        phases = phases_of_rank(program, each, self.kinds, chunks)
        rows = make_schedule(self.plan.schedule, len(groups), len(chunks), self.plan.micro_batches)
        here = set(phases.values())
        named = [(f"{p.kind.name}{p.chunk}", p.micro_batch) for p in rows[number]]
        calls = [Call(phase, micro_batch) for phase, micro_batch in named if phase in here]
        waiting = count_credits(rows)

        def count_room(edge: tuple[int, int]) -> int:
            """Returns how many messages of one tensor may be in flight on an edge (sending stage group, receiving one).

            That is the one that is being read, and those that may wait by ``count_credits``. An edge between groups
            that are not neighbours has none there; then as many may wait as the sender has live micro-batches.
            """
            return 1 + waiting.get(edge, count_live_micro_batches(rows[edge[0]]))

        return hoist_sends(outline(program, time, each, calls, phases), count_room)

    def _prepare(self, program: Program) -> Program:
        return untie_microbatches(give_stages(program, self.numbers, self.agreed.stages))

    def _plan(self, program: Program, received: dict[str, Shard]) -> tuple[Plan, dict[str, str]]:
        rows = {**find_batch_rows(program, self.mine, self.position, self.plan.micro_batches), **received}
        streams, statistics = self.settings.batch.local_streams, self.settings.time.local_statistics
        return time_plan(program, self.plan.micro_batches, rows, streams, statistics)


def _find_split(node: Node) -> Shard:
    """Returns how micro-batches cut the tensor that a send or receive moves for each of them."""
    placement = parse_placement(node.marks.micro_batch_rows)
    assert isinstance(placement, Shard)
    return shard(placement.dim, placement.sizes, placement.blocks)


# The functions below move sends and receives of micro-batches out of the functions that compute, into the main graph.
#
# Inside a function, a send would delay the function's end until the tensor has arrived, and a receive would begin only
# with the function that reads it. In the main graph receives wait from the beginning of the step, as far as there is
# room, and sends delay nothing. The number of tensors of each kind in flight is limited: a sender that is faster than
# its receiver waits, instead of filling memory.
@dataclass(frozen=True)
class _OutsideBody:
    """Holds a function's body after its sends and receives were moved out of it, to the graph that calls the function.

    Attributes:
      body: the body, in which received tensors have become arguments and sent tensors results.
      received: the removed receives, in the order of the added arguments.
      sent: the removed sends, in the order of the added results.
    """

    body: Program
    received: tuple[Node, ...]
    sent: tuple[Node, ...]


def hoist_sends(program: Program, room: Callable[[tuple[int, int]], int]) -> Program:
    """Moves sends and receives of rows out of the functions of a phase, into the main graph: one per call of the
    function.

    Args:
      program: the result of ``outline``.
      room: (number of the sending stage group, of the receiving one) -> how many messages of one tensor may be in
        flight between them.
    """
    taken = {name: _take_out(body) for name, body in program.functions.items()}
    if not any(o.received or o.sent for o in taken.values()):
        return program
    nodes: dict[str, Node] = {}
    effects = list(program.effects)
    readers: dict[str, list[str]] = {}  # a receive -> the calls so far that read it
    sends: dict[str, list[str]] = {}
    for node in program.nodes:
        function = node.attrs.get("f") if node.op == CALL else None
        outside = taken.get(function.name) if isinstance(function, Func) else None
        if outside is None or not (outside.received or outside.sent):
            nodes[node.name] = node
            continue
        number = node.name.rpartition("_")[2]  # of the micro-batch
        arguments = []
        for n in outside.received:
            name = f"{n.name}/{number}"
            waits = _find_latest(readers.setdefault(n.name, []), room(_find_edge(n)))
            nodes[name] = replace(_change_key(n, number), name=name, inputs=(Ref(COMMUNICATOR),), controls=waits)
            readers[n.name].append(node.name)
            arguments.append(Ref(name))
        results = tuple(outside.body.find_type(r) for r in outside.body.outputs[len(node.outputs) :])
        attrs = {
            **node.attrs,
            "Tin": (*node.attrs["Tin"], *(DType(n.outputs[0].dtype) for n in outside.received)),
            "Tout": (*node.attrs["Tout"], *(DType(t.dtype) for t in results)),
            "shapes": (*node.attrs["shapes"], *(Shape(t.shape) for t in results)),
        }
        outputs = (*node.outputs, *results)
        waits = tuple(w for n in outside.sent for w in _find_latest(sends.get(n.name, []), room(_find_edge(n))))
        nodes[node.name] = replace(
            node, inputs=(*node.inputs, *arguments), controls=(*node.controls, *waits), attrs=attrs, outputs=outputs
        )
        for i, n in enumerate(outside.sent):
            name = f"{n.name}/{number}"
            sends.setdefault(n.name, []).append(name)
            operands = (Ref(COMMUNICATOR), Ref(node.name, len(node.outputs) + i))
            nodes[name] = replace(_change_key(n, number), name=name, inputs=operands, controls=())
            effects.append(name)
    functions = {name: outside.body for name, outside in taken.items()}
    return replace(program, nodes=sort_nodes(nodes), effects=tuple(effects), functions=functions)


def _find_latest(before: Sequence[str], count: int) -> tuple[str, ...]:
    """Returns the operation that has to end before one more may start, if ``count`` may be in flight: the ``count``-th
    from the end of ``before``.

    The result is a tuple of control edges; () if fewer than ``count`` operations have started.

    Args:
      before: names of the operations started so far, in order.
    """
    return (before[-count],) if len(before) >= count else ()


def _take_out(body: Program) -> _OutsideBody:
    moves = [n for n in body.nodes if n.op in POINT_TO_POINT and n.marks.micro_batch_rows]
    received = tuple(n for n in moves if n.op == "WhaleRecv")
    sent = tuple(n for n in moves if n.op == "WhaleSend")
    names = {n.name for n in moves}
    nodes = []
    for node in body.nodes:
        if node.name not in names:
            nodes.append(replace(node, controls=tuple(c for c in node.controls if c not in names)))
        elif node.op == "WhaleRecv":
            (t,) = node.outputs
            nodes.append(Node(node.name, "Placeholder", attrs={"dtype": DType(t.dtype), "shape": Shape(t.shape)},
                              outputs=(t,)))  # fmt: skip
    without = replace(
        body,
        nodes=tuple(nodes),
        inputs=(*body.inputs, *(n.name for n in received)),
        outputs=(*body.outputs, *(n.inputs[1] for n in sent)),
        effects=tuple(n for n in body.effects if n not in names),
    )
    return _OutsideBody(without, received, sent)


def _find_edge(node: Node) -> tuple[int, int]:
    """Returns (number of the sending stage group, number of the receiving one) of a send or receive."""
    assert node.marks.edge is not None, node.name
    return node.marks.edge


def _change_key(node: Node, number: str) -> Node:
    """Returns a send or receive with a key of its own for micro-batch ``number``."""
    attrs = {**node.attrs, "key": f"{node.attrs['key']}/{number}"}
    return replace(node, attrs=attrs, marks=node.marks.replace_marks(micro_batch_rows="", edge=None))
