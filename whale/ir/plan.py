"""Defines Plan: every decision about how a program is divided, as plain data (printed, saved, compared, replayed)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TypeVar

import msgspec

from whale.ir.layout import Placement, Shard, Strategy, parse_placement
from whale.ir.prediction import Prediction
from whale.ir.program import Ref
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage

KIND, FORMAT_VERSION = "whale-plan", "1.0"  # of a file: a new major number is refused; unknown fields are ignored

# Nodes of a stage's program that stand for tensors of other stages: a source with its producer's name, and a sink.
STAGE_INPUT, STAGE_OUTPUT = "WhaleStageInput", "WhaleStageOutput"


@dataclass(frozen=True, slots=True)
class Reshard:
    """One change of layout: tensor ``ref`` of graph ``graph`` ("" is the program) goes from ``source`` to ``target``.

    ``key`` is equal on all ranks and unique in the plan; ``bytes`` are the logical bytes moved in total; ``group`` is
    the number of the fused collective it belongs to, -1 when it travels alone; ``backend`` is who carries it out:
    ``"whale"`` (through the host, or from device to device) or ``"horovod"``. ``wire_dtype`` is what elements are
    rounded to before they are sent; "" is their own.
    """

    graph: str
    ref: Ref
    source: Placement
    target: Placement
    key: str
    bytes: int
    group: int = -1
    origin: str = ""
    backend: str = "whale"
    wire_dtype: str = ""


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The nodes of one scope: how many there are, and the virtual device that they are bound to."""

    scope: str
    kind: str
    devices: tuple[int, ...]
    nodes: int


@dataclass(frozen=True, slots=True)
class StageGroup:
    """A group of ranks that runs some of the stages: position c of the mesh of plan number ``plan`` is ``ranks[c]``."""

    name: str
    ranks: tuple[int, ...]
    stages: tuple[str, ...]
    plan: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor sent from stage group number ``source`` to number ``target``, and its bytes in a step."""

    ref: Ref
    source: int
    target: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that is divided over the mesh: its name, the rows of each coordinate, and who chose it.

    ``local``: a rank passes its own rows only; otherwise it passes the whole batch, from which it takes its rows.
    """

    name: str
    placement: Placement
    origin: str
    local: bool = False


@dataclass(frozen=True)
class Plan:
    """All inputs of lowering beside the program.

    Attributes:
      program: name of the program; fingerprint: of the program it was made for.
      size: number of coordinates of the plan's mesh axis; devices: a name for each. axis: its name.
      strategies: graph name -> node name -> strategy. The program itself is graph "".
      reshards: all changes of layout in a step.
      returned: graph name -> placements of the graph's outputs.
      routed: nodes that exchange rows of a table by their ids, with the bytes that they are expected to move.
      unruled: nodes whose op has no rule, with the logical bytes that their replication costs.
      split_flops, total_flops: matrix-product and convolution FLOPs that are divided, and all of them.
      exceptions: describes how results differ from those of one device.
      variables: handle nodes of variables that the axis divides between steps, with placements (see
          ``ir.mesh.tiles_of``).
      offloaded: handle nodes of variables that are kept in the host's memory, beside an accelerator.
      expanded: composite nodes that the plan contains in their decomposed form.
      inner: on a mesh of more axes, the plan of the next one, for the program of this axis' first coordinate.
      repeats: with an inner plan, key of a reshard -> number of times it happens: once in each group with the whole
          tensor.
      inner_bytes: bytes moved along the inner axes, in all groups together.
      memory: category -> predicted peak bytes of each rank in a step; empty if not predicted.
      updates: number of fused updates of the first rank, and of their variables; if requested.
      stage_groups: the groups of ranks that run the stages of a pipeline; empty: all ranks run all.
      others: plans number 1, 2, ... for stage groups with other numbers of ranks, or other rows; this one is number 0.
      edges: tensors sent between stage groups; schedule: name of the pipeline schedule, "" with one micro-batch only.
      micro_batches: number of parts into which each rank cuts its rows, to compute them one after the other.
      microbatched: its axis is that of a rank's micro-batches. Made on each rank; never saved.
      script: the script whose first step it is, and its arguments; empty where it was not made by `whale plan`.
      strategy: the strategy of the plan, with its settings; None if it was not recorded.
      rank_order: the rank at each position of the mesh; (): position and rank are the same number. Of stage groups
          each has its own.
      searched: ``auto_parallel`` found the strategy, which is applied to the program before it is planned; otherwise
        its scopes and settings say how it is divided.
      predicted: seconds and bytes of a step, if `whale plan` knew the machine.
      declined: kernels that ranks do not take, since they measured slower (see ``whale.kernels.choices``).
      lent_threads: of rank 0, which alone computes, on the cores of all ranks of its host; 0: ranks lend nothing.
    """

    program: str
    fingerprint: str
    size: int
    devices: tuple[str, ...] = ()
    task_graphs: tuple[TaskGraph, ...] = ()
    batch_inputs: tuple[BatchInput, ...] = ()
    strategies: Mapping[str, Mapping[str, Strategy]] = field(default_factory=dict)
    returned: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    reshards: tuple[Reshard, ...] = ()
    unruled: Mapping[str, int] = field(default_factory=dict)
    split_flops: int = 0
    total_flops: int = 0
    exceptions: tuple[str, ...] = ()
    variables: Mapping[str, Placement] = field(default_factory=dict)
    expanded: tuple[str, ...] = ()
    inner: Plan | None = None
    repeats: Mapping[str, int] = field(default_factory=dict)
    inner_bytes: int = 0
    memory: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stage_groups: tuple[StageGroup, ...] = ()
    others: tuple[Plan, ...] = ()
    edges: tuple[Edge, ...] = ()
    schedule: str = ""
    micro_batches: int = 1
    microbatched: bool = False
    offloaded: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    strategy: ParallelStrategy | None = None
    searched: bool = False
    predicted: Prediction | None = None
    axis: str = ""
    routed: Mapping[str, int] = field(default_factory=dict)
    updates: tuple[int, int] = (0, 0)
    declined: tuple[str, ...] = ()
    rank_order: tuple[int, ...] = ()
    lent_threads: int = 0

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of the plan."""
        if self.stage_groups:
            return sum(len(group.ranks) for group in self.stage_groups)
        return self.mesh_size

    @property
    def mesh_size(self) -> int:
        """Returns the number of ranks of all axes together; in a pipeline, those of a stage group."""
        return self.size if self.inner is None else self.size * self.inner.mesh_size

    @property
    def mesh_ranks(self) -> tuple[int, ...]:
        """Returns the rank at each position of the mesh of a plan without stages."""
        return self.rank_order or tuple(range(self.mesh_size))

    @property
    def own_bytes(self) -> int:
        """Returns the bytes that a step moves along the plan's own axis; for exchanged rows of tables, the expected
        ones.
        """
        return sum(r.bytes * self.repeats.get(r.key, 1) for r in self.reshards) + sum(self.routed.values())

    @property
    def logical_bytes(self) -> int:
        """Returns the bytes that a step moves between ranks in total (a reshard inside a loop is counted once)."""
        return self.own_bytes + self.inner_bytes + sum(e.bytes for e in self.edges)

    def find_group_plan(self, group: StageGroup) -> Plan:
        """Returns the plan that a stage group runs."""
        return (self, *self.others)[group.plan]

    @property
    def split_flops_fraction(self) -> float:
        """Returns the share of the FLOPs of matrix products and convolutions that is divided over the ranks; 1.0
        without any.
        """
        if self.inner is not None and self.inner.split_flops_fraction < 1.0:
            return min(self.inner.split_flops_fraction, self.split_flops / self.total_flops if self.total_flops else 1)
        return self.split_flops / self.total_flops if self.total_flops else 1.0

    @cached_property
    def reshard_of(self) -> dict[tuple[str, Ref, Placement], Reshard]:
        """Maps (graph, tensor, placement) to the reshard that yields it, if one is needed."""
        return {(r.graph, r.ref, r.target): r for r in self.reshards if r.source != r.target}

    @cached_property
    def groups(self) -> dict[int, tuple[Reshard, ...]]:
        """Maps the number of each fused collective to its members, in order."""
        table: dict[int, list[Reshard]] = {}
        for r in self.reshards:
            if r.group >= 0:
                table.setdefault(r.group, []).append(r)
        return {g: tuple(members) for g, members in table.items()}

    @cached_property
    def place_in_group(self) -> dict[tuple[int, str], int]:
        """Maps (group, key) to the position of the reshard of this key in the group's collective."""
        return {(g, member.key): i for g, members in self.groups.items() for i, member in enumerate(members)}

    def save(self, path: str | Path) -> None:
        """Writes the plan as a plan file (see ``load_plan``)."""
        Path(path).write_bytes(file_text(self.record()))

    def record(self) -> PlanRecord:
        """Returns the plan's fields in a plan file: its strategy and prediction beside the layouts of its program."""
        sizes = next((b.placement.sizes for b in self.batch_inputs if isinstance(b.placement, Shard)), ())
        return PlanRecord(
            kind=KIND,
            format_version=FORMAT_VERSION,
            strategy=self.strategy or strategy_of(self),
            planner="auto_parallel" if self.searched else "scopes",
            batch=sum(sizes),
            predicted=self.predicted,
            script=self.script,
            program=_encode(replace(self, strategy=None, searched=False, predicted=None, script=())),
        )

    def to_json(self) -> bytes:
        """Encodes the plan as one JSON object, which ``plan_from_json`` reads; equal strategies are written once."""
        return msgspec.json.encode(_encode(self))


def _encode(plan: Plan) -> ProgramLayouts:
    table: dict[Strategy, int] = {}
    graphs = {
        graph: {name: table.setdefault(s, len(table)) for name, s in nodes.items()}
        for graph, nodes in plan.strategies.items()
    }
    return ProgramLayouts(
        program=plan.program,
        fingerprint=plan.fingerprint,
        size=plan.size,
        devices=list(plan.devices),
        axis=plan.axis,
        task_graphs=[(t.scope, t.kind, list(t.devices), t.nodes) for t in plan.task_graphs],
        batch_inputs=[(b.name, str(b.placement), b.origin) for b in plan.batch_inputs],
        local_inputs=[b.name for b in plan.batch_inputs if b.local],
        strategy_table=[([*map(str, s.inputs)], [*map(str, s.outputs)], s.why, s.once) for s in table],
        graphs=graphs,
        returned={g: [str(p) for p in placements] for g, placements in plan.returned.items()},
        reshards=[
            (r.graph, r.ref.node, r.ref.index, str(r.source), str(r.target), r.key, r.bytes, r.group, r.origin)
            for r in plan.reshards
        ],
        backends={r.key: r.backend for r in plan.reshards if r.backend != "whale"},
        wire_dtypes={r.key: r.wire_dtype for r in plan.reshards if r.wire_dtype},
        variables={name: str(p) for name, p in plan.variables.items()},
        expanded=list(plan.expanded),
        inner=_encode(plan.inner) if plan.inner is not None else None,
        repeats=dict(plan.repeats),
        inner_bytes=plan.inner_bytes,
        memory=dict(plan.memory),
        schedule=plan.schedule,
        places=[(p.name, list(p.ranks), list(p.stages), p.plan) for p in plan.stage_groups],
        others=[_encode(other) for other in plan.others],
        edges=[(e.ref.node, e.ref.index, e.source, e.target, e.bytes) for e in plan.edges],
        micro_batches=plan.micro_batches,
        offloaded=list(plan.offloaded),
        updates=plan.updates,
        rank_order=plan.rank_order,
        routed=dict(plan.routed),
        unruled=dict(plan.unruled),
        exceptions=list(plan.exceptions),
        split_flops=plan.split_flops,
        total_flops=plan.total_flops,
        script=list(plan.script),
        strategy=plan.strategy,
        searched=plan.searched,
        predicted=plan.predicted,
        declined=list(plan.declined),
        lent_threads=plan.lent_threads,
    )


class ProgramLayouts(msgspec.Struct, omit_defaults=True):
    """The layouts of all tensors of a program: the JSON form of a plan.

    Strategies of nodes are stored once and referred to by number, since most nodes share a few.
    """

    program: str
    fingerprint: str
    size: int
    devices: list[str]
    task_graphs: list[tuple[str, str, list[int], int]]
    batch_inputs: list[tuple[str, str, str]]
    strategy_table: list[tuple[list[str], list[str], str, bool]]
    graphs: dict[str, dict[str, int]]
    returned: dict[str, list[str]]
    reshards: list[tuple[str, str, int, str, str, str, int, int, str]]
    unruled: dict[str, int]
    split_flops: int
    total_flops: int
    exceptions: list[str] = []
    routed: dict[str, int] = {}
    axis: str = ""
    local_inputs: list[str] = []
    variables: dict[str, str] = {}
    expanded: list[str] = []
    inner: ProgramLayouts | None = None
    repeats: dict[str, int] = {}
    inner_bytes: int = 0
    memory: dict[str, tuple[int, ...]] = {}
    places: list[tuple[str, list[int], list[str], int]] = []
    others: list[ProgramLayouts] = []
    edges: list[tuple[str, int, int, int, int]] = []
    schedule: str = ""
    micro_batches: int = 1
    offloaded: list[str] = []
    updates: tuple[int, int] = (0, 0)
    rank_order: tuple[int, ...] = ()
    backends: dict[str, str] = {}  # reshards that are not Whale's own
    wire_dtypes: dict[str, str] = {}  # reshards that are rounded before they are sent
    script: list[str] = []
    strategy: ParallelStrategy | None = None
    searched: bool = False
    predicted: Prediction | None = None
    declined: list[str] = []
    lent_threads: int = 0


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan file that plans of programs and of described models share.

    Attributes:
      strategy: how a step is divided over devices; planner: who chose it: ``auto_parallel``, ``scopes`` (with the
        settings of the script), or a search for a described model.
      batch: rows of a step; 0: it has none that are divided.
      predicted: the prediction of a step; None: there is none.
      script: path from the plan's folder, and arguments, of the script whose first step it is; () without one.
      program: the layouts of all tensors of a program; None for a described model.
    """

    kind: str
    format_version: str
    strategy: ParallelStrategy
    planner: str
    batch: int = 0
    predicted: Prediction | None = None
    script: tuple[str, ...] = ()
    program: ProgramLayouts | None = None

    @property
    def plan(self) -> Plan | None:
        """Returns the plan of a program; None for a described model.

        Raises:
          ValueError: the layouts are not those of a plan.
        """
        if self.program is None:
            return None
        found = _decode(self.program)
        return replace(
            found,
            strategy=self.strategy,
            searched=self.planner == "auto_parallel",
            predicted=self.predicted,
            script=self.script,
        )


def file_text(record: PlanRecord) -> bytes:
    """Serialises a plan file: the same bytes for the same plan."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n"


_Record = TypeVar("_Record", bound=PlanRecord)


def record_from_text(data: bytes, kind: type[_Record]) -> _Record:
    """Parses the text of a plan file.

    Raises:
      ValueError: it is not a plan file, or has another format version.
    """
    try:
        head = msgspec.json.decode(data, type=_PlanHead)
    except (msgspec.DecodeError, RecursionError) as e:
        raise ValueError(f"not a plan file: {e}; expected JSON written by `whale plan -o FILE`") from e
    if (head.kind, head.format_version.split(".")[0]) != (KIND, major := FORMAT_VERSION.split(".")[0]):
        found = f"{head.kind!r}, format_version {head.format_version}"
        raise ValueError(f"{found}; this build reads {KIND!r}, {major}.x: make it again with `whale plan`")
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, OverflowError, RecursionError) as e:
        raise ValueError(f"not a plan file: {e}; expected what `whale plan -o FILE` wrote: make the plan again") from e


def plan_from_json(data: bytes) -> Plan:
    """Inverse of ``Plan.to_json``; raises ValueError if the data are not a plan."""
    try:
        return _decode(msgspec.json.decode(data, type=ProgramLayouts))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not a plan: {e}") from e


def _decode(f: ProgramLayouts) -> Plan:
    try:
        return _decode_plan(f)
    except (ValueError, IndexError, RecursionError) as e:
        raise ValueError(f"not a plan: {e}; expected what `whale plan -o FILE` wrote: make the plan again") from e


def strategy_of(plan: Plan) -> ParallelStrategy:
    """Derives the strategy of a program's plan from its layouts.

    That is its stages, replicas, ranks that divide tensors, rows and micro-batches. The layers of a stage are numbers
    of stages of the program.
    """
    groups = plan.stage_groups or (StageGroup("", plan.mesh_ranks, ()),)
    divided = tuple(dict.fromkeys(t.scope for t in plan.task_graphs if t.kind == "split"))
    stages = []
    for number, group in enumerate(groups):
        own = plan.find_group_plan(group)
        levels = [own]
        while levels[-1].inner is not None:
            levels.append(levels[-1].inner)
        named = [level.size for level in levels if level.axis == "tensor"]
        tensor = prod(named) if named else levels[-1].size if divided else 1
        replicas = max(1, len(group.ranks) // tensor)
        sizes = next((b.placement.sizes for b in own.batch_inputs if isinstance(b.placement, Shard)), ())
        rows, left = divmod(sum(sizes), replicas * plan.micro_batches)
        layers = tuple((c * len(groups) + number, c * len(groups) + number + 1) for c in range(len(group.stages)))
        part = DeviceGroup(0, tensor, replicas, 0 if left or len(set(sizes)) > 1 else rows)
        stages.append(Stage(layers, (part,), bound_ranks=group.ranks))
    uneven = next((b.placement.sizes for b in plan.batch_inputs if isinstance(b.placement, Shard)), ())
    return ParallelStrategy(
        tuple(stages),
        plan.micro_batches,
        schedule=plan.schedule or "1f1b",
        split=divided if not any(level.axis == "tensor" for level in (plan, *filter(None, [plan.inner]))) else (),
        replicated=plan.ranks > 1 and not plan.batch_inputs,
        shares=tuple(uneven) if len(set(uneven)) > 1 and plan.inner is None else (),
        name="as scopes say",
        lent_threads=plan.lent_threads,
    )


def _decode_plan(f: ProgramLayouts) -> Plan:
    table = [
        Strategy(tuple(map(parse_placement, i)), tuple(map(parse_placement, o)), w, once)
        for i, o, w, once in f.strategy_table
    ]

    def split_key(key: str) -> tuple[str, str]:
        return f.backends.get(key, "whale"), f.wire_dtypes.get(key, "")

    return Plan(
        program=f.program,
        fingerprint=f.fingerprint,
        size=f.size,
        devices=tuple(f.devices),
        axis=f.axis,
        task_graphs=tuple(TaskGraph(s, k, tuple(d), n) for s, k, d, n in f.task_graphs),
        batch_inputs=tuple(BatchInput(n, parse_placement(p), o, n in f.local_inputs) for n, p, o in f.batch_inputs),
        strategies={g: {n: table[i] for n, i in nodes.items()} for g, nodes in f.graphs.items()},
        returned={g: tuple(map(parse_placement, placements)) for g, placements in f.returned.items()},
        reshards=tuple(
            Reshard(
                graph, Ref(node, i), parse_placement(s), parse_placement(t), key, moved, group, origin, *split_key(key)
            )
            for graph, node, i, s, t, key, moved, group, origin in f.reshards
        ),
        variables={name: parse_placement(p) for name, p in f.variables.items()},
        routed=f.routed,
        expanded=tuple(f.expanded),
        inner=_decode_plan(f.inner) if f.inner is not None else None,
        repeats=f.repeats,
        inner_bytes=f.inner_bytes,
        memory=f.memory,
        schedule=f.schedule,
        stage_groups=tuple(StageGroup(name, tuple(ranks), tuple(stages), k) for name, ranks, stages, k in f.places),
        others=tuple(map(_decode_plan, f.others)),
        edges=tuple(Edge(Ref(n, i), s, t, b) for n, i, s, t, b in f.edges),
        micro_batches=f.micro_batches,
        offloaded=tuple(f.offloaded),
        updates=f.updates,
        declined=tuple(f.declined),
        lent_threads=f.lent_threads,
        rank_order=f.rank_order,
        unruled=f.unruled,
        exceptions=tuple(f.exceptions),
        split_flops=f.split_flops,
        total_flops=f.total_flops,
        script=tuple(f.script),
        strategy=f.strategy,
        searched=f.searched,
        predicted=f.predicted,
    )


class _PlanHead(msgspec.Struct):
    kind: str
    format_version: str


def load_plan(path: str | Path) -> Plan:
    """Reads the plan of a program that ``Plan.save`` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a plan, of another format version, or of a described model.
    """
    plan = record_from_text(Path(path).read_bytes(), PlanRecord).plan
    if plan is None:
        raise ValueError("the plan is of a described model, not of a program")
    return plan
