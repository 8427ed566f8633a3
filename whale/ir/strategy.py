"""Defines ParallelStrategy: how one training step is divided over devices, for any kind of model and planner.

Planners choose a strategy, for models described by hyper-parameters and for captured programs. Plan files contain it,
reports show it, the cost model evaluates it, and compilation implements it.

    Recompute, Offload   what is recomputed, and what is offloaded to the hosts' memory
    DeviceGroup          equal devices of a stage: replicas, and the tensor-parallel ranks of each
    Stage                consecutive layers on some devices
    ParallelStrategy     stages, micro-batches, ZeRO, recompute, offload: the whole decision
    ChosenStrategy       the strategy of a program, with the prediction made when it was chosen
    Degrees              a strategy with equal stages, as a job file writes it

Layers are those of a described model; of a captured program they are the weights in the order of the forward pass
(`chain` of `whale.planner.graph_search.pipelines`).

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

# What is recomputed for the backward pass. none: nothing; selective: attention scores; full: every layer; auto:
# activations chosen by their bytes; marked: all activations but those that the program marks to be stored; stage: all
# but the tensors that stages send to each other. A captured program has no layers: there selective and full mean auto.
Recompute = Literal["none", "selective", "full", "auto", "marked", "stage"]
# What is stored and updated in the hosts' memory. none: nothing; optimizer: the optimizer's state; parameters: weights
# and gradients as well; tables: tables of which a step reads rows, with their optimizer state.
Offload = Literal["none", "optimizer", "parameters", "tables"]

Count = Annotated[int, Meta(ge=1)]  # msgspec checks files by this bound; __post_init__ checks objects made in code
Zero = Annotated[int, Meta(ge=0, le=3)]
MOST_MICRO_BATCHES = 100_000  # per replica and step; a schedule lists all of them

# How summaries of one line name each kind of offload.
_OFFLOADED = {
    "none": "",
    "optimizer": ", state offloaded",
    "parameters": ", weights and state offloaded",
    "tables": ", tables offloaded",
}


class DeviceGroup(msgspec.Struct, frozen=True):
    """Represents equal devices of a stage: `replicas` data-parallel replicas of `tensor` tensor-parallel devices each.

    Attributes:
        pool: which kind of device of the cluster these are, by its number; 0 also if no cluster is known.
        tensor: devices of one replica, which shard its tensors.
        replicas: number of replicas.
        rows: rows of a micro-batch for each replica; 0: the batch is divided evenly.
    """

    pool: int = 0
    tensor: int = 1
    replicas: int = 1
    rows: int = 0

    @property
    def ranks(self) -> int:
        """Returns the number of devices: tensor-parallel degree times replicas."""
        return self.tensor * self.replicas


class Stage(msgspec.Struct, frozen=True):
    """Represents consecutive layers of a model on some devices; several ranges of layers if the schedule interleaves
    chunks.

    Attributes:
        layers: one range [low, high) of layers per chunk; (): all layers of a program.
        parts: the devices, in groups of equal ones.
        recompute: what this stage recomputes; None: as the strategy says.
        bound_ranks: the ranks that run the stage, tensor-parallel ranks next to each other; (): not decided yet.
    """

    layers: tuple[tuple[int, int], ...] = ()
    parts: tuple[DeviceGroup, ...] = (DeviceGroup(),)
    recompute: Recompute | None = None
    bound_ranks: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Returns the number of layers of the stage, over all chunks."""
        return sum(high - low for low, high in self.layers)

    @property
    def ranks(self) -> int:
        """Returns the number of devices of the stage."""
        return sum([part.tensor * part.replicas for part in self.parts])

    @property
    def replicas(self) -> int:
        """Returns the number of data-parallel replicas of the stage's layers, over all device groups."""
        return sum([part.replicas for part in self.parts])

    @property
    def rows(self) -> int:
        """Returns the rows of one micro-batch, over all replicas of the stage."""
        return sum(part.replicas * part.rows for part in self.parts)


class ParallelStrategy(msgspec.Struct, frozen=True):
    """Describes one way to train on several devices: stages, micro-batches, recompute, ZeRO, offload and more.

    Experts, if a model has any, are divided over the replicas of their stage.

    Attributes:
        stages: the pipeline stages in order; one stage if the model is not pipelined.
        micro_batches: micro-batches of a step; 0: the settings of the program decide (`pipeline.micro_batches`), and
          choose the schedule too.
        recompute: what is recomputed for the backward pass, in stages that do not say otherwise.
        sequence_parallel: tensor-parallel ranks also shard the sequence outside of the sharded products (Megatron-LM).
        zero: ZeRO stage, 0 to 3.
        schedule: name of the pipeline schedule (`whale.ir.pipeline_schedule`).
        offload: what is kept in the hosts' memory.
        split: names of weights of a program. Each begins a part of the program whose tensors are sharded, at the matrix
          product that reads the weight; (): all weights do, if the stage's devices shard tensors.
        replicated: every rank computes everything, without communication.
        shares: rows of a step for each rank, if the ranks of a program have unequal ones.
        name: what a search calls the strategy in its report.
        context: context-parallel degree: ranks that divide the tokens of each row. The replicas of a stage include
          these ranks, since all of them hold the same parameters.
        shard_ranks: size of the groups of replicas within which ZeRO shards states (hybrid sharding); 0: all replicas.
        expert_ranks: number of replicas that divide a layer's experts; 0: as many as divide them evenly.
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
        """Returns what a stage recomputes: its own setting, or else the strategy's."""
        return stage.recompute or self.recompute

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Returns what each stage recomputes, in the order of the stages."""
        return tuple(self.find_recompute(stage) for stage in self.stages)

    def replace_recompute(self, each: Sequence[Recompute]) -> ParallelStrategy:
        """Returns this strategy with ``each[i]`` as what stage i recomputes.

        The first stage's value becomes the strategy's own, which equal stages inherit.
        """
        own = [None if how == each[0] else how for how in each]
        stages = tuple([
            stage if stage.recompute == how else msgspec.structs.replace(stage, recompute=how)
            for stage, how in zip(self.stages, own)
        ])  # fmt: skip
        return msgspec.structs.replace(self, stages=stages, recompute=each[0])

    @property
    def is_pipelined(self) -> bool:
        """Returns True if there are several stages."""
        return len(self.stages) > 1

    @property
    def chunks(self) -> int:
        """Returns the number of chunks (ranges of layers) of each stage; more than 1 only in interleaved schedules."""
        return len(self.stages[0].layers) or 1

    @property
    def ordered_layers(self) -> list[tuple[Stage, int, int]]:
        """Returns (stage, low, high) for each range of layers, in the order in which the model runs them."""
        return [(stage, *stage.layers[chunk]) for chunk in range(self.chunks) for stage in self.stages]

    @property
    def tensor(self) -> int:
        """Returns the tensor-parallel degree, the largest one if stages differ."""
        return max(part.tensor for stage in self.stages for part in stage.parts)

    @property
    def ranks(self) -> int:
        """Returns the number of devices of all stages."""
        return sum([stage.ranks for stage in self.stages])

    @property
    def batch(self) -> int:
        """Returns the rows of one step: the global batch size."""
        return self.micro_batches * self.stages[0].rows // self.context

    def count_sharding(self, stage: Stage) -> int:
        """Returns the number of a stage's replicas over which ZeRO shards states."""
        return min(self.shard_ranks, stage.replicas) if self.shard_ranks else stage.replicas

    def find_problem(self) -> str:
        """Describes why the strategy is invalid for every model, as it may be in an edited plan file; "" if it is
        valid.
        """
        if not self.stages or not all(stage.parts for stage in self.stages):
            return "`stages` is empty, or a stage has no devices"
        parts = [part for stage in self.stages for part in stage.parts]
        if any(min(part.tensor, part.replicas) < 1 or min(part.pool, part.rows) < 0 for part in parts):
            return "a stage has devices with `tensor` or `replicas` below 1, or with a negative `pool` or `rows`"
        if not 0 <= self.micro_batches <= MOST_MICRO_BATCHES:
            return f"`micro_batches` is {self.micro_batches}; expected 0 to {MOST_MICRO_BATCHES}"
        if any(len(stage.layers) != len(self.stages[0].layers) for stage in self.stages):
            return "the stages have different numbers of chunks (ranges in `layers`)"
        for name, ranks in (("tokens", self.context), ("states", self.shard_ranks), ("experts", self.expert_ranks)):
            if ranks < 0 or (name == "tokens" and not ranks) or any(s.replicas % (ranks or 1) for s in self.stages):
                return f"{ranks} ranks that divide {name}: expected a divisor of the replicas of every stage"
        return ""

    def format_summary(self) -> str:
        """Returns one line such as ``8 pipeline x 12 data x 8 tensor on 768 devices, 96 micro-batches of 2 rows, 2
        chunks``.
        """
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
        """Returns (kind of recompute, text that names its stages) for each kind; the text is "" if all stages have one
        kind.
        """
        each = self.recomputes
        if len(set(each)) == 1:
            return [(each[0], "")] if each[0] != "none" else []
        found = []
        for kind in get_args(Recompute)[1:]:
            own = [s for s, one in enumerate(each) if one == kind]
            runs = [s for s in own if s - 1 not in own]  # first stage of each range of adjacent stages of that kind
            ends = [s for s in own if s + 1 not in own]
            if own:
                text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(runs, ends))
                found.append((kind, f" in stage{'s' * (len(own) > 1)} {text}"))
        return found


class Degrees(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a strategy with equal stages by its degrees of parallelism, as a job file writes it.

    Ranks are numbered as Megatron-LM numbers them: tensor innermost, then data, then stages.

    Attributes:
        tensor: tensor-parallel degree.
        stages: pipeline-parallel degree.
        data: data-parallel degree: replicas that have rows of their own.
        chunks: chunks of layers per stage, for interleaved schedules.
        micro_batch: rows of a micro-batch, for each replica.
        batch: rows of a step, over all replicas.
        recompute: what is recomputed for the backward pass.
        sequence_parallel: tensor-parallel ranks also shard the sequence outside of the sharded products (Megatron-LM).
        zero: ZeRO stage, 0 to 3.
        schedule: name of the pipeline schedule.
        experts: ranks that divide a layer's experts.
        context: context-parallel degree: ranks that divide the tokens of each row, in addition to `data`.
        shard: size of the groups within which ZeRO shards states (hybrid sharding); 0: all ranks with the same
          parameters.
        stage_layers: number of layers of each stage, or of each chunk in the order of the model; (): as equal as
          possible.
        selective: names of the modules that selective recomputation repeats; (): those that the simulated training
          software repeats by default.
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
                raise PlanError(
                    f"{name} must be positive",
                    given=getattr(self, name),
                    expected="1 or more",
                    action=f"correct {name} in the job file",
                )
        if self.recompute not in ("none", "selective", "full"):
            raise PlanError(
                "there is no such kind of recompute",
                given=self.recompute,
                expected="none, selective or full",
                action="correct recompute in the job file",
            )
        if self.batch % (self.data * self.micro_batch):
            raise PlanError(
                "the global batch is not a multiple of data-parallel ranks x micro-batch",
                given=f"batch={self.batch}, data={self.data}, micro_batch={self.micro_batch}",
                expected=f"batch as a multiple of {self.data * self.micro_batch}",
                action="change batch or micro_batch in the job file",
            )
        if self.stage_layers and len(self.stage_layers) != self.stages * self.chunks:
            raise PlanError(
                "stage_layers does not fit the number of stages",
                given=f"{len(self.stage_layers)} numbers of layers",
                expected=f"{self.stages * self.chunks}: one for each stage, or for each chunk of a stage",
                action="change stage_layers in the job file, or leave it out for stages of equal size",
            )
        if self.shard and self.data * self.context % self.shard:
            raise PlanError(
                "the ranks with the same parameters do not divide into groups of the size in which ZeRO shards states",
                given=f"shard={self.shard}, {self.data * self.context} ranks",
                expected=f"a divisor of {self.data * self.context} (data-parallel x context-parallel ranks)",
                action="change shard in the job file, the number of ranks over which ZeRO shards states",
            )
        if self.micro_batches > MOST_MICRO_BATCHES:
            raise PlanError(
                "a replica has more micro-batches in a step than a schedule can hold",
                given=f"{self.micro_batches} (batch={self.batch}, data={self.data}, micro_batch={self.micro_batch})",
                expected=f"{MOST_MICRO_BATCHES} at most",
                action="make batch smaller or micro_batch larger in the job file",
            )

    @property
    def ranks(self) -> int:
        """Returns the number of the job's devices."""
        return self.tensor * self.stages * self.replicas

    @property
    def replicas(self) -> int:
        """Returns the number of ranks that hold the same parameters: data-parallel times context-parallel degree."""
        return self.data * self.context

    @property
    def micro_batches(self) -> int:
        """Returns the number of micro-batches that one replica runs in a step."""
        return self.batch // (self.data * self.micro_batch)


class ChosenStrategy(msgspec.Struct, frozen=True):
    """Holds the strategy that a program runs under, and what was predicted when it was chosen.

    Attributes:
        strategy: the strategy.
        step_s: predicted seconds of a step; 0 if unknown.
        held_bytes: predicted bytes of the rank that holds most; 0 if unknown.
        compared: True if its measured steps were compared with a step in which one rank computes on the cores of all
          ranks.
    """

    strategy: ParallelStrategy
    step_s: float = 0.0
    held_bytes: int = 0
    compared: bool = False


def count_expert_ranks(experts: int, replicas: int) -> int:
    """Returns how many of a stage's replicas divide a layer's experts: the largest number that divides both evenly.

    The result is 1 if the model has no experts.
    """
    return math.gcd(experts, replicas) if experts else 1


def divide_chunks(layers: int, stages: int, chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Divides ``layers`` layers evenly over the chunks of all stages; earlier chunks get the remainder.

    Chunk c of stage s is part c * stages + s of the model, as interleaved schedules require.

    Returns:
        for each stage one range [low, high) of layers per chunk.

    Raises:
        PlanError: there are more chunks than layers.
    """
    count = stages * chunks
    if layers < count:
        raise PlanError(
            "there are more stages than layers",
            given=f"{layers} layers, {stages} stages of {chunks} chunks",
            expected=f"at least {count} layers: one for each chunk of each stage",
            action="use fewer stages, or fewer chunks per stage",
        )
    each, more = divmod(layers, count)
    return place_chunks([each + (i < more) for i in range(count)], stages)


def place_chunks(sizes: Sequence[int], stages: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns each stage's ranges [low, high) of layers, given the number of layers of each chunk in model order."""
    ends = list(accumulate(sizes, initial=0))
    of_stage = range(0, len(sizes), stages)
    return [tuple((ends[c + s], ends[c + s + 1]) for c in of_stage) for s in range(stages)]


def count_live_chunks(schedule: str, stages: int, chunks: int, micro_batches: int, stage: int) -> int:
    """Returns for how many forward passes of chunks stage number ``stage`` keeps the activations at once, by formula.

    The number equals ``count_live_micro_batches`` of the schedule. GPipe keeps all micro-batches. 1F1B keeps as many as
    there are stages from this one to the last. Interleaved 1F1B (Narayanan et al., SC 2021) begins with 2 (stages - 1 -
    stage) + (chunks - 1) g forward passes before its first backward pass, where g is the number of micro-batches in a
    group.
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
