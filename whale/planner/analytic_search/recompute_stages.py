"""Chooses the kind of recompute of each stage: the fastest kind with which the stage fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cost_model.analytic.layer_costs import Model, costs_of, slowest_passes_s
from cost_model.analytic.stage_cache import StageCosts
from cost_model.analytic.stage_costs import lacking_bytes, stage_memory
from cost_model.cluster.pools import Machines
from whale.ir.strategy import ParallelStrategy, Recompute, Stage


class RecomputeChoice:
    """Chooses a kind of recompute for each stage, and caches the choices.

    The choice is optimal for given stages and schedule: faster passes of any stage shorten the step, and a stage's
    memory depends on no other stage's recompute.
    """

    def __init__(self, model: Model, machines: Machines, ranks: int, stage_costs: StageCosts) -> None:
        self.model, self.machines, self.ranks, self.find_alike = model, machines, ranks, stage_costs.find_alike
        self.known: dict[tuple[object, ...], Recompute] = {}

    def fit(
        self, strategy: ParallelStrategy, kinds: Sequence[Recompute], live: Callable[[int], int]
    ) -> ParallelStrategy:
        """Returns the strategy with each stage's recompute chosen; where no kind fits, the kind that lacks the least
        memory.

        Args:
            kinds: the kinds of recompute allowed, "none" for no recompute.
            live: stage index -> micro-batch chunks whose activations the stage holds at its peak.
        """
        if len(kinds) < 2:
            return strategy
        return strategy.replace_recompute(
            [self._choose(strategy, stage, live(i), kinds) for i, stage in enumerate(strategy.stages)]
        )

    def _choose(self, strategy: ParallelStrategy, stage: Stage, live: int, kinds: Sequence[Recompute]) -> Recompute:
        count = len(strategy.stages)
        settings = strategy.zero, strategy.offload, strategy.sequence_parallel, strategy.expert_ranks
        forward_first = strategy.micro_batches < 2 * count  # see `stage_memory`
        key = (self.find_alike(stage), stage.parts, live, count, forward_first, settings)
        if (known := self.known.get(key)) is None:
            known = self.known[key] = self._find_fastest(strategy, Stage(key[0], stage.parts), live, kinds)
        return known

    def _find_fastest(
        self, strategy: ParallelStrategy, stage: Stage, live: int, kinds: Sequence[Recompute]
    ) -> Recompute:
        """Returns the fastest kind of recompute with which a stage fits, else the kind that lacks the least memory."""
        timed = []
        for how in kinds:
            costs = [costs_of(self.model, strategy, p, self.ranks, stage.replicas, how) for p in stage.parts]
            timed.append((sum([slowest_passes_s(costs, low, high) for low, high in stage.layers]), how, costs))
        lacking: list[tuple[float, Recompute]] = []
        for _, how, costs in sorted(timed, key=lambda one: one[:2]):
            memory = stage_memory(strategy, stage, costs, live, len(strategy.stages))
            lacking.append((lacking_bytes(self.machines, strategy, stage, costs, memory), how))
            if lacking[-1][0] <= 0:
                return how
        return min(lacking, key=lambda one: one[0])[1]
