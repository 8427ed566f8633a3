"""Defines ``Plan``: every decision about how a program is divided over ranks, as plain data.

A plan can be printed (``whale.ir.plan_text``), saved to a plan file, compared with another, and lowered again.
"""

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

KIND, FORMAT_VERSION = "whale-plan", "1.0"  # of plan files; another major number is refused, unknown fields are ignored

# Nodes in a stage's program for tensors of other stages: an input, with the name of the tensor's producer, and a sink.
STAGE_INPUT, STAGE_OUTPUT = "WhaleStageInput", "WhaleStageOutput"


@dataclass(frozen=True, slots=True)
class Reshard:
    """Represents one change of a tensor's placement over one mesh axis, usually a collective.

    Attributes:
      graph: name of the function whose graph has the tensor; "" for the main program.
      ref: the tensor.
      source: the placement that the producer yields.
      target: the placement that a consumer needs.
      key: name of the operation, equal on all ranks and unique in the plan.
      bytes: logical bytes that all ranks together move.
      group: number of the fused collective that the reshard is part of; -1 if it is not fused.
      origin: why the reshard is needed, in words, for ``whale explain``.
      backend: what carries it out: "whale" (through the host, or from device to device) or "horovod".
      wire_dtype: the dtype to which elements are rounded before they are sent; "" keeps their own.
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
    """Describes the nodes under one scope of the user.

    Attributes:
      scope: path of the scope; "(default)" for nodes outside of all scopes.
      kind: what the innermost scope does: "replica", "split" or "stage".
      devices: the ranks that run the nodes; on a mesh of several axes, coordinates on the outermost axis.
      nodes: number of nodes.
    """

    scope: str
    kind: str
    devices: tuple[int, ...]
    nodes: int


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Represents a group of ranks that runs some of the pipeline stages.

    Attributes:
      name: name for reports.
      ranks: the group's ranks; ``ranks[c]`` is at position c of its mesh.
      stages: names of the stages that the group runs.
      plan: which plan the group runs: 0 is the main plan, k > 0 is ``Plan.others[k - 1]``.
    """

    name: str
    ranks: tuple[int, ...]
    stages: tuple[str, ...]
    plan: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """Represents a tensor that one stage group sends to another.

    Attributes:
      ref: the tensor.
      source: number of the sending stage group.
      target: number of the receiving stage group.
      bytes: logical bytes sent in one step, over all ranks.
    """

    ref: Ref
    source: int
    target: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Represents an input of the program whose rows are divided over the ranks.

    Attributes:
      name: name of the Placeholder node.
      placement: the shard that says how many rows each coordinate gets.
      origin: what chose these rows, in words, for reports.
      local: True if each rank passes only its own rows; False if each rank passes the whole batch and slices its rows
        out of it.
    """

    name: str
    placement: Placement
    origin: str
    local: bool = False


@dataclass(frozen=True)
class Plan:
    """Holds everything that lowering needs beside the program, for one mesh axis and, nested, for the axes inside it.

    Attributes:
      program: name of the program.
      fingerprint: fingerprint of the program for which the plan was made (``whale.ir.fingerprint``).
      size: number of coordinates of the plan's mesh axis.
      devices: a name for each coordinate, for reports.
      task_graphs: the nodes of each of the user's scopes.
      batch_inputs: the inputs whose rows are divided over the ranks.
      strategies: graph name -> node name -> strategy. The program itself is graph "".
      returned: graph name -> placements of the graph's outputs.
      reshards: all changes of placement in a step.
      unruled: nodes whose op has no sharding rule -> logical bytes that their replication costs.
      split_flops: FLOPs of matrix products and convolutions that are divided over ranks.
      total_flops: FLOPs of all matrix products and convolutions.
      exceptions: in words, how results differ from those of a run on one device.
      variables: handle nodes of variables that the axis shards between steps -> placement (see ``ir.mesh.find_tiles``).
      expanded: names of composite nodes that the plan contains in their decomposed form.
      inner: on a mesh of several axes, the plan of the next axis, for the program at this axis' first coordinate.
      repeats: with an inner plan, key of a reshard -> how often it happens in a step: by as many inner coordinates as
        hold the whole tensor; shards of one tensor count once together.
      inner_bytes: logical bytes that a step moves along the inner axes, in all groups together.
      memory: category -> predicted peak bytes of each rank in a step; empty if not predicted.
      stage_groups: the groups of ranks that run a pipeline's stages; empty: all ranks run the whole program.
      others: plans number 1, 2, ... of stage groups with another number of ranks or other rows; this plan is number 0.
      edges: tensors sent between stage groups.
      schedule: name of the pipeline schedule; "" without stages or with only one micro-batch.
      micro_batches: number of micro-batches into which each rank cuts its rows.
      microbatched: True if the plan's axis is time: its coordinates are the micro-batches of one rank. Such plans are
        made on each rank and never saved.
      offloaded: handle nodes of variables that stay in the host's memory beside an accelerator.
      script: path and arguments of the script whose first step was planned by `whale plan`; empty if made otherwise.
      strategy: the parallel strategy of the plan, with its settings; None if it was not recorded.
      searched: True if ``auto_parallel`` found the strategy, which is then applied to the program before it is planned;
        False if the user's scopes and settings say how to divide the program.
      predicted: predicted seconds and bytes of a step; None if `whale plan` did not know the machine.
      axis: name of the mesh axis.
      routed: nodes that exchange rows of a table by their ids -> bytes that they are expected to move.
      updates: (number of fused updates on the first rank, number of variables that they write), if requested.
      declined: kernels of Whale that ranks do not use, as they measured slower (see ``whale.kernels.choices``).
      rank_order: the rank at each position of the mesh; () if positions and ranks have the same numbers. Stage groups
        list their own ranks.
      lent_threads: number of threads with which rank 0 alone computes, on the cores of all ranks of its host; 0: every
        rank computes on its own cores.
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
        """Returns the number of ranks that run the plan, over all stage groups."""
        if self.stage_groups:
            return sum(len(group.ranks) for group in self.stage_groups)
        return self.mesh_size

    @property
    def mesh_size(self) -> int:
        """Returns the number of ranks on this axis and all inner axes together; in a pipeline, those of one stage
        group.
        """
        return self.size if self.inner is None else self.size * self.inner.mesh_size

    @property
    def mesh_ranks(self) -> tuple[int, ...]:
        """Returns the rank at each position of the mesh, for a plan without stages."""
        return self.rank_order or tuple(range(self.mesh_size))

    @property
    def own_bytes(self) -> int:
        """Returns the logical bytes that a step moves along the plan's own axis, over all ranks.

        Exchanges of table rows count with their expected bytes.
        """
        return sum(r.bytes * self.repeats.get(r.key, 1) for r in self.reshards) + sum(self.routed.values())

    @property
    def logical_bytes(self) -> int:
        """Returns the logical bytes that a step moves between ranks in total; a reshard in a loop counts once."""
        return self.own_bytes + self.inner_bytes + sum(e.bytes for e in self.edges)

    def find_group_plan(self, group: StageGroup) -> Plan:
        """Returns the plan that a stage group runs."""
        return (self, *self.others)[group.plan]

    @property
    def split_flops_fraction(self) -> float:
        """Returns the fraction of the FLOPs of matrix products and convolutions that is divided over ranks; 1.0 if it
        has none.

        On several axes it is the smallest fraction over the axes.
        """
        if self.inner is not None and self.inner.split_flops_fraction < 1.0:
            return min(self.inner.split_flops_fraction, self.split_flops / self.total_flops if self.total_flops else 1)
        return self.split_flops / self.total_flops if self.total_flops else 1.0

    @cached_property
    def reshard_of(self) -> dict[tuple[str, Ref, Placement], Reshard]:
        """Maps (graph, tensor, wanted placement) to the reshard that yields the tensor in that placement."""
        return {(r.graph, r.ref, r.target): r for r in self.reshards if r.source != r.target}

    @cached_property
    def groups(self) -> dict[int, tuple[Reshard, ...]]:
        """Maps the number of each fused collective to the reshards fused in it, in order."""
        table: dict[int, list[Reshard]] = {}
        for r in self.reshards:
            if r.group >= 0:
                table.setdefault(r.group, []).append(r)
        return {g: tuple(members) for g, members in table.items()}

    @cached_property
    def place_in_group(self) -> dict[tuple[int, str], int]:
        """Maps (number of a fused collective, key of a reshard) to the reshard's position among those fused."""
        return {(g, member.key): i for g, members in self.groups.items() for i, member in enumerate(members)}

    def save(self, path: str | Path) -> None:
        """Writes the plan to a plan file, which ``load_plan`` reads."""
        Path(path).write_bytes(file_text(self.record()))

    def record(self) -> PlanRecord:
        """Returns the content of the plan file: strategy, prediction and script at the top level, the layouts under
        "program".
        """
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
        """Encodes the plan as one JSON object, which ``plan_from_json`` decodes; equal strategies of nodes are written
        once.
        """
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
    """Holds the JSON form of a plan: the layouts of all tensors of a program.

    ``strategy_table`` stores each distinct node strategy once; ``graphs`` refers to it by number, since most nodes
    share a few strategies.
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
    """Holds the content of a plan file, for a captured program or for a model described by hyper-parameters.

    Attributes:
      kind: always "whale-plan".
      format_version: version of the file format, as major.minor.
      strategy: how a step is divided over devices.
      planner: who chose the strategy: ``auto_parallel``, ``scopes`` (with the settings of the script), or the name of a
        search for a described model.
      batch: rows of a step; 0 if no input's rows are divided.
      predicted: the prediction of a step; None if there is none.
      script: path of the script relative to the plan's folder, and its arguments; () without a script.
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
        """Returns the plan of a captured program; None if the file holds only the strategy of a model described by
        hyper-parameters.

        Raises:
          ValueError: the layouts in the file do not form a plan.
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
    """Encodes a plan file as indented, sorted JSON: equal plans give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n"


_Record = TypeVar("_Record", bound=PlanRecord)


def record_from_text(data: bytes, kind: type[_Record]) -> _Record:
    """Decodes the bytes of a plan file into a record of type ``kind``.

    Raises:
      ValueError: the bytes are not a plan file, or one of another major format version.
    """
    try:
        head = msgspec.json.decode(data, type=_PlanHead)
    except (msgspec.DecodeError, RecursionError) as e:
        raise ValueError(f"the data are not a plan file: {e}; expected JSON that `whale plan -o FILE` wrote") from e
    if (head.kind, head.format_version.split(".")[0]) != (KIND, major := FORMAT_VERSION.split(".")[0]):
        found = f"the file is of kind {head.kind!r} and format_version {head.format_version}"
        raise ValueError(f"{found}; this version of Whale reads {KIND!r} of {major}.x: make it again with `whale plan`")
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, OverflowError, RecursionError) as e:
        raise ValueError(f"the data are not a plan file: {e}; make the plan again with `whale plan -o FILE`") from e


def plan_from_json(data: bytes) -> Plan:
    """Decodes the JSON of ``Plan.to_json``.

    Raises:
      ValueError: the data are not a plan.
    """
    try:
        return _decode(msgspec.json.decode(data, type=ProgramLayouts))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"the data are not a plan: {e}; expected the JSON that Plan.to_json writes") from e


def _decode(f: ProgramLayouts) -> Plan:
    try:
        return _decode_plan(f)
    except (ValueError, IndexError, RecursionError) as e:
        raise ValueError(
            f"the layouts of a plan cannot be read: {e}; make the plan again with `whale plan -o FILE`"
        ) from e


def strategy_of(plan: Plan) -> ParallelStrategy:
    """Derives the parallel strategy of a plan from its layouts, for plans whose strategy was not recorded.

    The result has the plan's stages, replicas, tensor-parallel ranks, rows and micro-batches. A stage of the program
    counts as one layer, so layer ranges are numbers of stages.
    """
    groups = plan.stage_groups or (StageGroup("", plan.mesh_ranks, ()),)
    divided = tuple(dict.fromkeys(t.scope for t in plan.task_graphs if t.kind == "split"))
    stages, has_tensor_axis = [], False
    for number, group in enumerate(groups):
        own = plan.find_group_plan(group)
        levels = [own]
        while levels[-1].inner is not None:
            levels.append(levels[-1].inner)
        named = [level.size for level in levels if level.axis == "tensor"]
        has_tensor_axis |= bool(named)
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
        split=() if has_tensor_axis else divided,
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
    """Reads the plan of a program from a plan file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not a plan, has another major format version, or is of a described model.
    """
    plan = record_from_text(Path(path).read_bytes(), PlanRecord).plan
    if plan is None:
        raise ValueError(
            f"{path} is the plan of a model described by hyper-parameters; "
            "expected the plan of a program, as `whale plan SCRIPT -o FILE` writes it"
        )
    return plan
