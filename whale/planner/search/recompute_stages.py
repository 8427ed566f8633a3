"""Which stages of a spread compute activations again: each the fastest way with which it fits into its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cost_model.described.layer_costs import Model, costs_of
from cost_model.described.memory import offloaded_bytes, part_memory
from cost_model.described.spread import Recompute, Spread, Stage
from cost_model.machines.pools import Machines


class Again:
    """Chooses for stages, of ways to compute activations again; what was chosen is remembered.

    With the cuts and the schedule given, no other choice is faster: a step is the shorter the shorter each stage's
    passes are, and what a stage holds is its own.
    """

    def __init__(self, model: Model, machines: Machines, ranks: int) -> None:
        self.model, self.machines, self.ranks = model, machines, ranks
        self.known: dict[tuple[Stage, int, int, int, str, bool], Recompute] = {}

    def fitted(self, spread: Spread, ways: Sequence[Recompute], live: Callable[[int], int]) -> Spread:
        """The spread with what each stage computes again; where nothing fits, that which takes the least memory.

        Args:
            ways: what may be computed again, "none" for nothing.
            live: stage -> how many micro-batches' chunks it holds at the peak of the schedule.
        """
        if len(ways) < 2:
            return spread
        return spread.recomputing([self._of(spread, stage, live(i), ways) for i, stage in enumerate(spread.stages)])

    def _of(self, spread: Spread, stage: Stage, live: int, ways: Sequence[Recompute]) -> Recompute:
        plain = Stage(stage.layers, stage.parts)
        key = (plain, live, len(spread.stages), spread.zero, spread.offload, spread.sequence_parallel)
        if key not in self.known:
            found = [(*self._cost(spread, plain, live, how), how) for how in ways]
            fitting = [one for one in found if one[1] <= 0]
            self.known[key] = (min(fitting) if fitting else min(found, key=lambda one: one[1]))[2]
        return self.known[key]

    def _cost(self, spread: Spread, stage: Stage, live: int, how: Recompute) -> tuple[float, float]:
        """(seconds of both passes of a micro-batch, bytes by which the worst part does not fit)."""
        costs = [costs_of(self.model, spread, p, self.ranks, stage.replicas, how) for p in stage.parts]
        seconds = sum(
            max(c.forward(low, high) for c in costs) + max(c.backward(low, high) for c in costs)
            for low, high in stage.layers
        )
        s, lacking, stages = spread, float("-inf"), len(spread.stages)
        for part, one in zip(stage.parts, costs):
            pool = self.machines.pools[part.pool]
            used = part_memory(one, stage.layers, part, stage.replicas, live, s.zero, stages, s.offload)
            lacking = max(lacking, used.total_bytes - pool.memory_bytes)
            if s.offload != "none":
                away = offloaded_bytes(one, stage.layers, stage.replicas, s.zero, s.offload)
                lacking = max(lacking, away - pool.host_bytes)
        return seconds, lacking
