"""Defines what a search takes (``Constraints``), ranks (``Candidate``) and returns (``SearchResult``)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from cost_model.analytic.evaluate import Evaluation
from cost_model.cluster.cluster_file import Cluster
from whale.ir.strategy import DeviceGroup, Offload, ParallelStrategy, Stage, divide_chunks

# Fields of `Constraints` that the user may fix (`whale plan --set`), and that an error may advise to leave free.
FIXED = (
    "stages", "tensor", "data", "micro_batch", "micro_batches", "recompute", "zero", "chunks", "offload", "context",
    "experts",
)  # fmt: skip


@dataclass(frozen=True)
class Constraints:
    """Holds the choices that the user has fixed before a search (None: the search chooses), and the limits of the
    search.

    Attributes:
        stages: number of pipeline stages.
        tensor: tensor-parallel degree of every stage.
        data: data-parallel replicas of each stage that train on rows of their own.
        micro_batch: rows of one replica in one micro-batch.
        micro_batches: number of micro-batches of a step.
        recompute: kind of activation recomputation, "none" for no recomputation.
        zero: ZeRO level, 0 to 3.
        chunks: model chunks of a stage (interleaved 1F1B).
        offload: which state lies in the hosts' memory.
        context: context-parallel degree: ranks that divide the tokens of a row.
        experts: expert-parallel degree: replicas that divide the experts of a layer.
        budget_s: seconds of work (see `work`) after which the best strategy so far is returned.
        exact_devices: with at most this many devices, every assignment of devices to stages is tried.
        runnable: the replicas of a stage must have equal tensor-parallel degrees, as the runtime's meshes require.
        faster_than_s: only strategies whose estimated step is shorter than this are tried.
    """

    stages: int | None = None
    tensor: int | None = None
    data: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    recompute: str | None = None
    zero: int | None = None
    chunks: int | None = None
    offload: Offload | None = None
    context: int | None = None
    experts: int | None = None
    budget_s: float = 2.5
    exact_devices: int = 8
    runnable: bool = True
    faster_than_s: float = float("inf")


@dataclass(slots=True)
class Candidate:
    """Holds a strategy whose layers are not assigned to stages yet: its estimated step time, ranks of stages, and
    settings.

    Attributes:
        estimate_s: estimated seconds of a step.
        kinds: runs of equal stages in pipeline order, as (device groups of one such stage, number of such stages).
        settings: the strategy with an empty tuple of stages.
        chunks: model chunks of each stage (more than 1: interleaved schedule).
    """

    estimate_s: float
    kinds: tuple[tuple[tuple[DeviceGroup, ...], int], ...]
    settings: ParallelStrategy
    chunks: int = 1

    @property
    def stages(self) -> int:
        """Returns the number of pipeline stages."""
        return sum(count for _, count in self.kinds)

    @property
    def ranks(self) -> list[tuple[DeviceGroup, ...]]:
        """Returns the device groups of each stage, one tuple per stage in pipeline order."""
        return [parts for parts, count in self.kinds for _ in range(count)]

    @property
    def shape(self) -> tuple[object, ...]:
        """Returns the key by which the search groups similar candidates: pools used, bits of the number of stages,
        largest tensor-parallel degree. The best candidate of each shape is cut into stages even if its estimate ranks
        low.
        """
        parts = [part for parts, _ in self.kinds for part in parts]
        return frozenset(part.pool for part in parts), self.stages.bit_length(), max(part.tensor for part in parts)

    def even(self, layers: int) -> ParallelStrategy:
        """Returns the strategy with `layers` layers divided evenly over stages and chunks, without regard to memory."""
        chunks = divide_chunks(layers, self.stages, self.chunks)
        stages = tuple(Stage(ranges, parts) for ranges, parts in zip(chunks, self.ranks))
        return msgspec.structs.replace(self.settings, stages=stages)


@dataclass
class SearchResult:
    """Holds the strategy that a search chose, the alternatives to it, and statistics of the search.

    Attributes:
        strategy: the chosen strategy: the simplest one among those that are about as fast as the fastest.
        evaluation: the predicted cost of `strategy`.
        others: other strategies that fit into memory, fastest first.
        misfits: some strategies that do not fit into memory.
        estimated: number of strategies whose step was estimated.
        simulated: number of strategies whose step was simulated.
        seconds: wall-clock time of the search.
        work_s: seconds of work that the search counted (see `work`).
        bound_s: a lower bound of the step time of any strategy of this model on these devices.
        cluster: the cluster that `strategy` runs on: the given one, or the given one with fewer devices per host.
        cut: what ended the search early, "the budget" or "the processor's time"; empty: the search ran to its end.
        fastest_s: step time of the fastest strategy; `strategy` may be slower by at most a tie (see `simplicity`).
        simpler: strategies simpler than `strategy`, fastest first; none is slower than one that is as simple or
            simpler.
    """

    strategy: ParallelStrategy
    evaluation: Evaluation
    others: list[tuple[ParallelStrategy, Evaluation]]
    misfits: list[tuple[ParallelStrategy, Evaluation]]
    estimated: int
    simulated: int
    seconds: float
    work_s: float
    bound_s: float
    cluster: Cluster
    cut: str = ""
    fastest_s: float = 0.0
    simpler: list[tuple[ParallelStrategy, Evaluation]] = field(default_factory=list)
