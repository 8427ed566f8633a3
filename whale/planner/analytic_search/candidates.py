"""Defines the input of a search (``Constraints``), its candidates, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cost_model.analytic.evaluate import Evaluation
from cost_model.cluster.cluster_file import Cluster
from whale.ir.strategy import DeviceGroup, Offload, ParallelStrategy, Stage, divide_chunks

# Fields of `Limits` that a plan is asked for by, and may be told to leave free.
FIXED = ("stages", "tensor", "data", "micro_batch", "micro_batches", "recompute", "zero", "chunks", "offload")


@dataclass(frozen=True)
class Constraints:
    """The choices that the user has fixed; None: free.

    `budget_s`: seconds on the clock; the best strategy so far is returned. `hurried`: only powers of two of rows, and
    stages that divide the layers, are looked at. `faster_than_s`: only strategies that are estimated to be faster are
    looked at. `exact_devices`: with at most so many, every assignment of devices to stages is looked at. `runnable`:
    the replicas of a stage divide tensors over equally many ranks, as the runtime's meshes have them.
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
    budget_s: float = 8.0
    exact_devices: int = 8
    runnable: bool = True
    hurried: bool = False
    faster_than_s: float = float("inf")


@dataclass(slots=True)
class Candidate:
    """A strategy before its layers are cut: estimated seconds of a step, the ranks of its stages, its settings.

    Attributes:
        kinds: (parts of a stage, so many equal stages), in order.
        settings: the strategy without its stages.
        chunks: of layers that each stage holds.
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
        """Returns the parts of each stage, in order."""
        return [parts for parts, count in self.kinds for _ in range(count)]

    @property
    def shape(self) -> tuple[object, ...]:
        """Returns the shape: the pools that have a part in it, how deep it is, and how far tensors are divided."""
        parts = [part for parts, _ in self.kinds for part in parts]
        return frozenset(part.pool for part in parts), self.stages.bit_length(), max(part.tensor for part in parts)

    def even(self, layers: int) -> ParallelStrategy:
        """Returns the strategy with equally many of a model's layers per stage and chunk, whether it fits or not."""
        chunks = divide_chunks(layers, self.stages, self.chunks)
        stages = tuple(Stage(ranges, parts) for ranges, parts in zip(chunks, self.ranks))
        return msgspec.structs.replace(self.settings, stages=stages)


@dataclass
class SearchResult:
    """The result of a search, with figures of how it went.

    Attributes:
        strategy, evaluation: the best, and what it costs.
        others: strategies that fit as well, fastest first; misfits: some that do not.
        estimated, simulated: how many strategies were looked at.
        seconds: on the clock.
        cluster: that the strategy is one of: the search's, or the same with fewer devices of each host.
        bound_s: no strategy of the model on these devices takes less for a step.
        exhausted: whether the budget sufficed for all that was worth a look.
    """

    strategy: ParallelStrategy
    evaluation: Evaluation
    others: list[tuple[ParallelStrategy, Evaluation]]
    misfits: list[tuple[ParallelStrategy, Evaluation]]
    estimated: int
    simulated: int
    seconds: float
    bound_s: float
    exhausted: bool
    cluster: Cluster
