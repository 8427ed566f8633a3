"""Caches stage costs during a planner's search."""

from __future__ import annotations

from cost_model.analytic.layer_costs import Model, move_to_alike
from cost_model.analytic.stage_costs import Passes, StageCost, passes_of, stage_cost
from cost_model.cluster.pools import Machines
from cost_model.kernels.compute import round_ranks
from whale.ir.strategy import ParallelStrategy, Stage


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
        self._passes: dict[tuple[object, ...], Passes] = {}
        self._alike: dict[tuple[int, int], tuple[int, int]] = {}
        self.computed = 0  # costs that were not cached

    def find_alike(self, stage: Stage) -> tuple[tuple[int, int], ...]:
        """Returns the first ranges of layers in the model that cost the same as a stage's, one per chunk."""
        known = self._alike
        try:
            return tuple([known[one] for one in stage.layers])
        except KeyError:
            known.update((one, move_to_alike(self._model.alike, *one)) for one in stage.layers)
            return tuple([known[one] for one in stage.layers])

    def __call__(self, strategy: ParallelStrategy, index: int, live: int, ranks: int) -> StageCost:
        """Returns `stage_cost` of stage `index`, from the cache if an equivalent stage was costed before.

        Args:
            live: number of micro-batch chunks whose activations the stage holds at its peak.
            ranks: number of ranks of the whole strategy.
        """
        stages, count, ranks = strategy.stages, len(strategy.stages), round_ranks(ranks)
        stage, before, after = stages[index], stages[index - 1].parts, stages[(index + 1) % count].parts
        layers = self.find_alike(stage)
        own: tuple[object, ...] = (
            layers,
            stage.parts,
            strategy.find_recompute(stage),
            ranks,
            strategy.sequence_parallel,
            strategy.zero,
            strategy.offload,
            strategy.context,
            strategy.shard_ranks,
            strategy.expert_ranks,
        )
        # A stage's cost depends on other stages only by whether there are any before and after it, by their devices, by
        # the number of passes behind which its reduction hides, and by whether all forward passes come first.
        key = (
            own,
            index == 0,
            index == count - 1,
            min(count, strategy.micro_batches),
            strategy.micro_batches < 2 * count,
            tuple([part.pool for part in before]),
            tuple([part.pool for part in after]),
            live,
        )
        if (cost := self._known.get(key)) is None:
            if max(len(self._known), len(self._passes)) >= self.MOST:
                self._known.clear()
                self._passes.clear()
            alike = Stage(layers, stage.parts, strategy.find_recompute(stage))
            if (passes := self._passes.get(own)) is None:
                passes = self._passes[own] = passes_of(self._model, self._machines, strategy, alike, ranks)
            self.computed += 1
            cost = stage_cost(self._model, self._machines, strategy, index, live, ranks, passes, alike)
            self._known[key] = cost
        return cost
