"""Caches stage costs during a planner's search.

Decision: 0188.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from cost_model.analytic.layer_costs import Model, costs_of, move_to_alike
from cost_model.analytic.memory import Footprint
from cost_model.analytic.stage_costs import Passes, StageCost, lacking_bytes, passes_of, stage_cost, stage_memory
from cost_model.cluster.pools import Machines
from cost_model.kernels.compute import round_ranks
from whale.ir.strategy import ParallelStrategy, Recompute, Stage, count_live_chunks


class StageCosts:
    """Caches stage costs during a search, in which most strategies differ from earlier ones in one or two stages only.

    Stages whose layers differ only in position share one entry: moving a layer from one end of the model to the other
    shifts the layers of all stages in between, but does not change their costs.

    Args:
        model, machines: the model, and the cluster's devices, that costs are computed for (see `stage_cost`).
    """

    MOST = 50_000  # entries, of about a kilobyte each; a full cache is emptied

    def __init__(self, model: Model, machines: Machines) -> None:
        self._model, self._machines = model, machines
        self._known: dict[tuple[object, ...], StageCost] = {}
        self._timed: dict[tuple[object, ...], StageCost] = {}  # the seconds of which hold for any memory
        self._passes: dict[tuple[object, ...], Passes] = {}
        self._memory: dict[tuple[object, ...], tuple[tuple[Footprint, ...], float]] = {}
        self._alike: dict[tuple[int, int], tuple[int, int]] = {}
        self.computed = self.passes_computed = self.memory_computed = 0  # costs that were not cached, of each kind

    def find_alike(self, stage: Stage) -> tuple[tuple[int, int], ...]:
        """Returns the first ranges of layers in the model that cost the same as a stage's, one per chunk."""
        known = self._alike
        try:
            return tuple([known[one] for one in stage.layers])
        except KeyError:
            known.update((one, move_to_alike(self._model.alike, *one)) for one in stage.layers)
            return tuple([known[one] for one in stage.layers])

    def list_passes(self, strategy: ParallelStrategy, how: Recompute, most_s: float) -> list[Passes]:
        """Returns the passes of each stage, or only one stage's, if its passes over one micro-batch take `most_s`.

        Stages whose passes are known are looked at first, so that next to nothing is computed for a strategy in which
        one of them takes too long.

        Args:
            how: what every stage recomputes, whatever the strategy says.
        """
        ranks, known, found = round_ranks(strategy.ranks), self._passes, list[Passes]()
        settings, lacking = key_settings(strategy, ranks), list[tuple[int, tuple[Any, ...]]]()
        for index, stage in enumerate(strategy.stages):
            key = self.make_key(stage, how, settings)
            if (passes := known.get(key)) is None:
                lacking.append((index, key))
            elif passes.both_s >= most_s:
                return [passes]
            else:
                found.append(passes)
        for index, key in lacking:
            passes = self._find_passes(strategy, key, ranks)
            if passes.both_s >= most_s:
                return [passes]
            found.insert(index, passes)
        return found

    def make_key(self, stage: Stage, how: Recompute, settings: tuple[object, ...]) -> tuple[Any, ...]:
        """Returns what the passes of a stage depend on, if it recomputes `how`, as a key.

        Args:
            settings: of the stage's strategy, from `key_settings`.
        """
        return self.find_alike(stage), stage.parts, how, settings

    def _find_passes(self, strategy: ParallelStrategy, key: tuple[Any, ...], ranks: int) -> Passes:
        if (passes := self._passes.get(key)) is None:
            self._make_room()
            self.passes_computed += 1
            passes = passes_of(self._model, self._machines, strategy, Stage(*key[:3]), ranks)
            self._passes[key] = passes
        return passes

    def _make_room(self) -> None:
        if max(len(self._known), len(self._passes), len(self._memory)) >= self.MOST:
            self._known.clear()
            self._timed.clear()
            self._passes.clear()
            self._memory.clear()

    def find_memory(
        self, strategy: ParallelStrategy, key: tuple[Any, ...], live: int, ranks: int
    ) -> tuple[tuple[Footprint, ...], float]:
        """Returns the memory of a rank of each device group of a stage, and the bytes that the worst one lacks.

        Args:
            key: of the stage, from `make_key`.
            live: number of micro-batch chunks whose activations the stage holds at its peak.
            ranks: number of ranks of the whole strategy, rounded (`round_ranks`).
        """
        stages = len(strategy.stages)
        own = key, live, stages > 1, strategy.micro_batches < 2 * stages
        if (found := self._memory.get(own)) is None:
            self._make_room()
            stage = Stage(*key[:3])
            costs = [costs_of(self._model, strategy, part, ranks, stage.replicas, key[2]) for part in stage.parts]
            memory = stage_memory(strategy, stage, costs, live, stages)
            found = memory, lacking_bytes(self._machines, strategy, stage, costs, memory)
            self._memory[own] = found
            self.memory_computed += 1
        return found

    def list_costs(self, strategy: ParallelStrategy, fitting: bool = False) -> list[StageCost]:
        """Returns `stage_cost` of each stage, from the cache where an equivalent stage was costed before.

        Args:
            fitting: the last stage returned is the first one that does not fit into memory.
        """
        stages, micro_batches, known = strategy.stages, strategy.micro_batches, self._known
        count, ranks, found = len(stages), round_ranks(strategy.ranks), list[StageCost]()
        settings, lives = key_settings(strategy, ranks), count_lives(strategy)
        pools = [tuple([part.pool for part in stage.parts]) for stage in stages]
        behind = min(count, micro_batches), micro_batches < 2 * count
        for index, stage in enumerate(stages):
            own = self.make_key(stage, strategy.find_recompute(stage), settings)
            # A stage's cost depends on other stages only by whether there are any before and after it, by their
            # devices, by the number of passes behind which its reduction hides, and by whether all forward passes come
            # first.
            after = pools[index + 1] if index < count - 1 else pools[0]
            key = own, index == 0, index == count - 1, behind, pools[index - 1], after
            if (cost := known.get((key, lives[index]))) is None:
                self._make_room()
                memory = self.find_memory(strategy, own, lives[index], ranks)
                if (like := self._timed.get(key)) is None:
                    passes = self._find_passes(strategy, own, ranks)
                    self.computed += 1
                    cost = stage_cost(
                        self._model, self._machines, strategy, index, lives[index], ranks, passes, memory,
                        Stage(*own[:3]),
                    )  # fmt: skip
                    self._timed[key] = cost
                else:  # how many micro-batches a stage holds changes its memory, and no seconds
                    cost = msgspec.structs.replace(like, memory=memory[0], lacking_bytes=memory[1])
                known[key, lives[index]] = cost
            found.append(cost)
            if fitting and cost.lacking_bytes > 0:
                break
        return found


def key_settings(strategy: ParallelStrategy, ranks: int) -> tuple[object, ...]:
    """Returns the settings of a strategy that the passes of its stages depend on, for `StageCosts.make_key`.

    Args:
        ranks: number of ranks of the whole strategy, rounded (`round_ranks`).
    """
    return (
        ranks,
        strategy.sequence_parallel,
        strategy.zero,
        strategy.offload,
        strategy.context,
        strategy.shard_ranks,
        strategy.expert_ranks,
    )


def count_lives(strategy: ParallelStrategy) -> tuple[int, ...]:
    """Returns the largest number of micro-batch chunks whose activations each stage holds at one time."""
    return _count_lives(strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches)


@lru_cache(maxsize=1 << 12)
def _count_lives(schedule: str, stages: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    return tuple([count_live_chunks(schedule, stages, chunks, micro_batches, stage) for stage in range(stages)])
