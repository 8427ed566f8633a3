"""Defines ParallelStrategy: how one training step is divided over devices, for any kind of model and planner.

The planner chooses it, for models described by hyper-parameters and for captured programs; plan files contain
it, reports show it, the cost model evaluates it, and compilation implements it.

    Recompute, Offload   what is recomputed, and what is offloaded to the hosts' memory
    DeviceGroup          equal devices of a stage: replicas, and the ranks that divide tensors in each
    Stage                consecutive layers on some devices
    ParallelStrategy     stages, micro-batches, ZeRO, recompute, offload: the whole decision
    ChosenStrategy       the strategy of a program, with the prediction made when it was chosen
    Degrees              a strategy with equal stages, as a job file says it

Layers are those of a described model, or the weights of a program in the order of its forward pass (`chain` of
`whale.planner.graph_search.pipelines`).

Decision: 0145.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from whale.errors import PlanError

# What is computed again for the backward pass: nothing; the scores of attentions; each layer; what is chosen by bytes;
# all but what the program marks; what stages do not send to each other. A program that is to compute scores or layers
# again has that chosen by bytes, as it has no layers.
Recompute = Literal["none", "selective", "full", "auto", "marked", "stage"]
# What lies in the hosts' memory and is updated there: nothing; the optimizer's state; weights and gradients as well;
# tables of which a step reads rows, with their state.
Offload = Literal["none", "optimizer", "parameters", "tables"]

Count = Annotated[int, Meta(ge=1)]  # files are checked by it, values made by hand in __post_init__
Zero = Annotated[int, Meta(ge=0, le=3)]
MOST_MICRO_BATCHES = 100_000  # of a replica, whose schedule is written out

# As a line of text says it.
_OFFLOADED = {
    "none": "",
    "optimizer": ", state offloaded",
    "parameters": ", weights and state offloaded",
    "tables": ", tables offloaded",
}


class DeviceGroup(msgspec.Struct, frozen=True):
    """Equal devices of a stage: `replicas` groups of `tensor` devices that divide tensors, with `rows` for each group.

    Attributes:
        pool: number of the cluster's kind of devices; 0 also where no cluster is known.
        rows: of a micro-batch, for each replica; 0: as the batch divides.
    """

    pool: int = 0
    tensor: int = 1
    replicas: int = 1
    rows: int = 0

    @property
    def ranks(self) -> int:
        """Returns the number of the group's devices."""
        return self.tensor * self.replicas


class Stage(msgspec.Struct, frozen=True):
    """Consecutive layers (several ranges when the schedule interleaves chunks) on some devices.

    Attributes:
        layers: [low, high) by chunk; (): all layers of a program.
        recompute: this stage's kind of recompute; None: the strategy's.
        bound_ranks: the stage's ranks, of which neighbours divide tensors; (): devices are not bound yet.
    """

    layers: tuple[tuple[int, int], ...] = ()
    parts: tuple[DeviceGroup, ...] = (DeviceGroup(),)
    recompute: Recompute | None = None
    bound_ranks: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Returns the number of the stage's layers, all chunks."""
        return sum(high - low for low, high in self.layers)

    @property
    def ranks(self) -> int:
        """Returns the number of the stage's devices."""
        return sum(part.ranks for part in self.parts)

    @property
    def replicas(self) -> int:
        """Returns the number of data-parallel replicas of the stage's layers, over all parts."""
        return sum(part.replicas for part in self.parts)

    @property
    def rows(self) -> int:
        """Returns the rows of one micro-batch, over all replicas."""
        return sum(part.replicas * part.rows for part in self.parts)


class ParallelStrategy(msgspec.Struct, frozen=True):
    """One way to train on several devices: stages in order, micro-batches of a step, recompute, ZeRO level, offload.

    Experts, where a model has them, are divided over the replicas of their stage.

    Attributes:
        micro_batches: of a step; 0: for a program, as its settings say, which then also set the schedule.
        split: names of the weights of a program from whose product on tensors are divided; (): all are, where a stage's
            devices divide tensors.
        replicated: every rank computes everything, without communication.
        shares: rows of a step for each rank, if the ranks of a program have unequal ones.
        name: what a search calls it in its report.
        context: ranks that divide the tokens of each row; the replicas of a stage are `context` times those that have
            rows of their own, since all hold the same parameters.
        shard_ranks: replicas over which ZeRO divides what it divides, each such group having a copy (0: all of them).
        expert_ranks: replicas that divide a layer's experts (0: as many as divide them evenly).
        lent_threads: rank 0 alone computes a program, with so many threads on the cores of all ranks of its host; 0:
            each rank computes on its own.
    """

    stages: tuple[Stage, ...] = (Stage(),)
    micro_batches: int = 0
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    offload: Offload = "none"
    split: tuple[str, ...] = ()
    replicated: bool = False
    shares: tuple[int, ...] = ()
    name: str = ""
    context: int = 1
    shard_ranks: int = 0
    expert_ranks: int = 0
    lent_threads: int = 0

    def find_recompute(self, stage: Stage) -> Recompute:
        """Returns a stage's kind of recompute."""
        return stage.recompute or self.recompute

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Returns the kind of recompute of each stage."""
        return tuple(self.find_recompute(stage) for stage in self.stages)

    def replace_recompute(self, each: Sequence[Recompute]) -> ParallelStrategy:
        """Returns this strategy with each stage's recompute; stages equal to the first one inherit the strategy's."""
        stages = tuple(
            msgspec.structs.replace(stage, recompute=None if how == each[0] else how)
            for stage, how in zip(self.stages, each)
        )
        return msgspec.structs.replace(self, stages=stages, recompute=each[0])

    @property
    def is_pipelined(self) -> bool:
        """Tells whether there are several stages."""
        return len(self.stages) > 1

    @property
    def chunks(self) -> int:
        """Returns the number of ranges of layers that each stage holds: several where the schedule interleaves them."""
        return len(self.stages[0].layers) or 1

    @property
    def ordered_layers(self) -> list[tuple[Stage, int, int]]:
        """Returns (stage, low, high) for each range of layers, in the order of the model: chunk by chunk."""
        return [(stage, *stage.layers[chunk]) for chunk in range(self.chunks) for stage in self.stages]

    @property
    def tensor(self) -> int:
        """Returns the largest tensor-parallel degree of all stages."""
        return max(part.tensor for stage in self.stages for part in stage.parts)

    @property
    def ranks(self) -> int:
        """Returns the number of devices of all stages."""
        return sum(stage.ranks for stage in self.stages)

    @property
    def batch(self) -> int:
        """Returns the rows of a step."""
        return self.micro_batches * self.stages[0].rows // self.context

    def count_sharding(self, stage: Stage) -> int:
        """Returns the replicas of a stage over which ZeRO divides what it divides."""
        return min(self.shard_ranks, stage.replicas) if self.shard_ranks else stage.replicas

    def find_problem(self) -> str:
        """Describes an error that makes the strategy invalid for any model, as in an edited file; empty: none."""
        if not self.stages or not all(stage.parts for stage in self.stages):
            return "there are no stages, or some without devices"
        parts = [part for stage in self.stages for part in stage.parts]
        if any(min(part.tensor, part.replicas) < 1 or min(part.pool, part.rows) < 0 for part in parts):
            return "some devices are divided into no ranks, or have less than no rows"
        if not 0 <= self.micro_batches <= MOST_MICRO_BATCHES:
            return f"{self.micro_batches} micro-batches, of which there are {MOST_MICRO_BATCHES} at most"
        if any(len(stage.layers) != len(self.stages[0].layers) for stage in self.stages):
            return "some stages have more chunks than others"
        for name, ranks in (("tokens", self.context), ("states", self.shard_ranks), ("experts", self.expert_ranks)):
            if ranks < 0 or (name == "tokens" and not ranks) or any(s.replicas % (ranks or 1) for s in self.stages):
                return f"{ranks} ranks that divide {name} do not divide the replicas of each stage"
        return ""

    def format_summary(self) -> str:
        """Returns one line: 8 stages x 12 data x 8 tensor, 2 chunks, 96 micro-batches of 2 rows, ..."""
        if self.lent_threads:
            return f"1 of {format_count(self.ranks, 'device')} computes, with {self.lent_threads} threads"
        if self.replicated:
            return f"{format_count(self.ranks, 'device')} that all compute everything"
        stages = self.stages
        tensors = sorted({part.tensor for stage in stages for part in stage.parts})
        datas = sorted({stage.replicas for stage in stages})
        rows = sorted({part.rows for stage in stages for part in stage.parts if part.rows})
        text = f"{len(stages)} pipeline x {_format_span(datas)} data x {_format_span(tensors)} tensor"
        text += f" on {format_count(self.ranks, 'device')}"
        if self.micro_batches:
            text += f", {format_count(self.micro_batches, 'micro-batch', 'es')}"
        if rows:
            text += f" of {_format_span(rows)} row{'s' * (rows != [1])}"
        elif self.shares:
            text += f", rows {'+'.join(map(str, self.shares))}"
        if self.split:
            text += f", tensors from {', '.join(self.split)} on"
        if self.chunks > 1:
            text += f", {self.chunks} chunks"
        text += "".join(f", {one} recompute{where}" for one, where in self._list_recompute())
        if self.sequence_parallel and tensors != [1]:
            text += ", sequence parallel"
        text += f", ZeRO {self.zero}" if self.zero else ""
        text += f" over {self.shard_ranks} each" if self.zero and self.shard_ranks else ""
        text += f", {self.context} context" if self.context > 1 else ""
        text += f", experts over {self.expert_ranks}" if self.expert_ranks else ""
        return text + _OFFLOADED[self.offload]

    def _list_recompute(self) -> list[tuple[str, str]]:
        """Returns the kinds of recompute, each with its stages if not all have it."""
        each = self.recomputes
        if len(set(each)) == 1:
            return [(each[0], "")] if each[0] != "none" else []
        found = []
        for kind in get_args(Recompute)[1:]:
            own = [s for s, one in enumerate(each) if one == kind]
            runs = [s for s in own if s - 1 not in own]  # where stages of that kind begin
            ends = [s for s in own if s + 1 not in own]
            if own:
                text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(runs, ends))
                found.append((kind, f" in stage{'s' * (len(own) > 1)} {text}"))
        return found


class Degrees(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strategy with equal stages, as a job file says it.

    Ranks: tensor innermost, then data, then stages, as Megatron-LM numbers them.

    Attributes:
        batch: rows of a step.
        experts: ranks that divide a layer's experts.
        context: ranks that divide the tokens of each row, beside those of `data` that have rows of their own.
        shard: ranks over which ZeRO divides states, of all with the same parameters (0: over all; hybrid sharding).
        stage_layers: of each stage, or of each chunk in the order of the model; (): as equal as they can be.
        selective: what selective recomputation repeats, where it is not what the software does.
    """

    tensor: Count = 1
    stages: Count = 1
    data: Count = 1
    chunks: Count = 1
    micro_batch: Count = 1
    batch: Count = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: Zero = 0
    schedule: str = "1f1b"
    experts: Count = 1
    context: Count = 1
    shard: Annotated[int, Meta(ge=0)] = 0
    stage_layers: tuple[Count, ...] = ()
    selective: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tensor", "stages", "data", "chunks", "micro_batch", "batch", "experts", "context"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be positive", given=getattr(self, name))
        if self.recompute not in ("none", "selective", "full"):
            raise PlanError("there is no such recompute", given=self.recompute, expected="none, selective or full")
        if self.batch % (self.data * self.micro_batch):
            raise PlanError(
                "the global batch is not a multiple of data-parallel ranks x micro-batch",
                given=f"{self.batch}, {self.data} x {self.micro_batch}",
                action="change the micro-batch size",
            )
        if self.stage_layers and len(self.stage_layers) != self.stages * self.chunks:
            raise PlanError(
                "layers are given for other stages",
                given=f"{len(self.stage_layers)} numbers of layers",
                expected=f"{self.stages * self.chunks}: one for each stage, or for each chunk of a stage",
            )
        if self.shard and self.data * self.context % self.shard:
            raise PlanError(
                "ZeRO's groups do not divide the ranks with the same parameters",
                given=f"shard={self.shard}, {self.data * self.context} ranks",
                expected=f"a divisor of {self.data * self.context} (data-parallel x context-parallel ranks)",
                action="change shard, the number of ranks over which ZeRO divides states",
            )
        if self.micro_batches > MOST_MICRO_BATCHES:
            raise PlanError(
                "a replica has more micro-batches in a step than a schedule can be made of",
                given=f"{self.micro_batches}: {self.batch} rows, {self.data} x {self.micro_batch} at a time",
                expected=f"{MOST_MICRO_BATCHES} at most",
                action="change the global batch or the micro-batch size",
            )

    @property
    def ranks(self) -> int:
        """Returns the number of the job's devices."""
        return self.tensor * self.stages * self.replicas

    @property
    def replicas(self) -> int:
        """Returns the ranks with the same parameters."""
        return self.data * self.context

    @property
    def micro_batches(self) -> int:
        """Returns the number of micro-batches of one replica in a step."""
        return self.batch // (self.data * self.micro_batch)


class ChosenStrategy(msgspec.Struct, frozen=True):
    """A strategy that a program runs under, and what was predicted when it was chosen.

    Attributes:
        step_s: seconds of a step; 0: not known.
        held_bytes: of the rank that holds most; 0: not known.
        compared: its steps were compared with a measured one of one rank on the cores of all.
    """

    strategy: ParallelStrategy
    step_s: float = 0.0
    held_bytes: int = 0
    compared: bool = False


def count_expert_ranks(experts: int, replicas: int) -> int:
    """Returns how many of a stage's replicas divide a layer's experts: as many as divide them evenly; 1: none."""
    return math.gcd(experts, replicas) if experts else 1


def divide_chunks(layers: int, stages: int, chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns each stage's ranges of layers, [low, high) by chunk, as equal as possible; earlier chunks get the
    remainder.

    Chunk c of stage s is part c * stages + s of the model, as interleaved schedules require.

    Raises:
        PlanError: there are more chunks than layers.
    """
    count = stages * chunks
    if layers < count:
        raise PlanError("there are more stages than layers", given=f"{count} chunks, {layers} layers")
    each, more = divmod(layers, count)
    return place_chunks([each + (i < more) for i in range(count)], stages)


def place_chunks(sizes: Sequence[int], stages: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns each stage's ranges of layers, [low, high) by chunk, of chunks of these sizes in the model's order."""
    ends = list(accumulate(sizes, initial=0))
    of_stage = range(0, len(sizes), stages)
    return [tuple((ends[c + s], ends[c + s + 1]) for c in of_stage) for s in range(stages)]


def count_live_chunks(schedule: str, stages: int, chunks: int, micro_batches: int, stage: int) -> int:
    """Returns the most forward passes of chunks whose activations a stage keeps, as `live_micro_batches` does.

    1F1B keeps as many micro-batches as there are stages from this one on; interleaved as Narayanan et al. (SC 2021)
    order it, whose first passes are 2 (stages - 1 - stage) + (chunks - 1) stages before the first backward pass; GPipe
    keeps all.
    """
    if schedule == "gpipe":
        return micro_batches
    if chunks == 1:
        return min(micro_batches, stages - stage)
    groups = max(1, micro_batches // stages)  # as `schedule_interleaved` forms them
    if groups == 1:
        return micro_batches * chunks
    return min(micro_batches * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * -(-micro_batches // groups) + 1)


def format_count(count: int, name: str, plural: str = "s") -> str:
    """Returns a count with its noun: 1 stage, 2 stages."""
    return f"{count} {name}{plural if count != 1 else ''}"


def _format_span(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"
