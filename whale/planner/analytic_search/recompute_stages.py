"""Chooses the kind of recompute of each stage: the one that repeats the least of those with which the stage fits."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.analytic.stage_cache import StageCosts, key_settings
from cost_model.kernels.compute import round_ranks
from whale.ir.strategy import ParallelStrategy, Recompute, Stage


class RecomputeChoice:
    """Chooses a kind of recompute for each stage, and caches the choices.

    The choice is optimal for given stages and schedule: faster passes of any stage shorten the step, and a stage's
    memory depends on no other stage's recompute.
    """

    def __init__(self, stage_costs: StageCosts) -> None:
        self.stage_costs, self.find_alike = stage_costs, stage_costs.find_alike
        self.known: dict[tuple[object, ...], Recompute] = {}

    def fit(self, strategy: ParallelStrategy, kinds: Sequence[Recompute], live: Sequence[int]) -> ParallelStrategy:
        """Returns the strategy with each stage's recompute chosen; where no kind fits, the kind that lacks the least
        memory.

        Args:
            kinds: the kinds of recompute allowed, with the least recomputation, which is the fastest, first.
            live: micro-batch chunks whose activations each stage holds at its peak.
        """
        if len(kinds) < 2:
            return strategy
        return strategy.replace_recompute(
            [self._choose(strategy, stage, own, kinds) for stage, own in zip(strategy.stages, live)]
        )

    def _choose(self, strategy: ParallelStrategy, stage: Stage, live: int, kinds: Sequence[Recompute]) -> Recompute:
        count = len(strategy.stages)
        settings = strategy.zero, strategy.offload, strategy.sequence_parallel, strategy.expert_ranks
        forward_first = strategy.micro_batches < 2 * count  # see `stage_memory`
        key = (self.find_alike(stage), stage.parts, live, count, forward_first, settings)
        if (known := self.known.get(key)) is None:
            known = self.known[key] = self._find_least(strategy, stage, live, kinds)
        return known

    def _find_least(self, strategy: ParallelStrategy, stage: Stage, live: int, kinds: Sequence[Recompute]) -> Recompute:
        """Returns the first kind of recompute with which a stage fits, else the kind that lacks the least memory."""
        ranks, lacking = round_ranks(strategy.ranks), list[float]()
        settings = key_settings(strategy, ranks)
        for how in kinds:
            key = self.stage_costs.make_key(stage, how, settings)
            lacking.append(self.stage_costs.find_memory(strategy, key, live, ranks)[1])
            if lacking[-1] <= 0:
                return how
        return kinds[lacking.index(min(lacking))]
