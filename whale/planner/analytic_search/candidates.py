"""Defines the input of a search (``Constraints``), its candidates, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from cost_model.analytic.evaluate import Evaluation
from cost_model.cluster.cluster_file import Cluster
from whale.ir.strategy import DeviceGroup, Offload, ParallelStrategy, Stage, divide_chunks

# Fields of `Limits` that a plan is asked for by, and may be told to leave free.
FIXED = (
    "stages", "tensor", "data", "micro_batch", "micro_batches", "recompute", "zero", "chunks", "offload", "context",
    "experts",
)  # fmt: skip


@dataclass(frozen=True)
class Constraints:
    """The choices that the user has fixed; None: free.

    Attributes:
        budget_s: seconds of work (see `work`); then the best strategy so far is returned.
        data: replicas of each stage that have rows of their own.
        context: ranks that divide the tokens of a row; experts: replicas that divide a layer's experts.
        faster_than_s: only strategies with a lower estimate are tried.
        exact_devices: up to so many devices, every assignment of devices to stages is tried.
        runnable: the replicas of a stage have equal tensor-parallel degrees, as the runtime's meshes require.
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
    """A strategy before its layers are cut: estimated step time, the ranks of its stages, its settings.

    Attributes:
        kinds: (parts of a stage, number of such equal stages), in order.
        settings: the strategy without its stages.
        chunks: number of model chunks of each stage (interleaved schedule).
    """

    estimate_s: float
    kinds: tuple[tuple[tuple[DeviceGroup, ...], int], ...]
    settings: ParallelStrategy
    chunks: int = 1

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return sum(count for _, count in self.kinds)

    @property
    def ranks(self) -> list[tuple[DeviceGroup, ...]]:
        """Returns the parts of each stage, in order of stages."""
        return [parts for parts, count in self.kinds for _ in range(count)]

    @property
    def shape(self) -> tuple[object, ...]:
        """Returns the shape of a candidate: the pools it uses, its number of stages, and its tensor-parallel
        degrees.
        """
        parts = [part for parts, _ in self.kinds for part in parts]
        return frozenset(part.pool for part in parts), self.stages.bit_length(), max(part.tensor for part in parts)

    def even(self, layers: int) -> ParallelStrategy:
        """Returns the strategy with the layers divided evenly over stages and chunks, whether it fits into memory or
        not.
        """
        chunks = divide_chunks(layers, self.stages, self.chunks)
        stages = tuple(Stage(ranges, parts) for ranges, parts in zip(chunks, self.ranks))
        return msgspec.structs.replace(self.settings, stages=stages)


@dataclass
class SearchResult:
    """The result of a search, with statistics of the search.

    Attributes:
        strategy, evaluation: the best strategy, and its predicted cost: the simplest of those that are about as fast.
        others: other strategies that fit, fastest first; misfits: some that do not.
        estimated, simulated: number of strategies that were estimated, and simulated.
        seconds: wall-clock time; work_s: of work.
        cluster: the cluster of the strategy: the search's, or the same with fewer devices of each host.
        bound_s: a lower bound of the step time of any strategy of the model on these devices.
        fastest_s: the shortest step that was found; that of `strategy` may be longer by a tie (see `simplicity`).
        simpler: strategies that are simpler, fastest first, each simpler than what is as fast.
        cut: what ended the search before all was looked at, the budget or the clock; empty: nothing.
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
