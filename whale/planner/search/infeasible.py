"""When nothing fits: which memory is too small, by how much, and the cheapest change after which something fits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cost_model.described.evaluate import Evaluation, evaluate
from cost_model.described.spread import Part, Spread, Stage, live_chunks
from cost_model.described.stage_costs import stage_cost
from whale.errors import PlanError
from whale.ir.plan_text import human_bytes
from whale.planner.search.candidates import Candidate
from whale.planner.search.estimate import Estimates

MOST_PASSES = 20_000


def nothing_fits(search: Estimates, candidates: Sequence[Candidate]) -> PlanError:
    """The error that says so, from the spread that lacks the least memory."""
    if not candidates:
        return PlanError(
            "no spread is possible",
            given=f"a batch of {search.batch}, {search.machines.devices} devices",
            reason="what was fixed, the batch's divisors or the measured sizes leave nothing",
            action="fix less, measure more sizes, or change the batch",
        )
    tried: list[tuple[float, Spread, Evaluation]] = []
    # A schedule of many passes takes long to play, and needs no less memory than its like with fewer.
    short = [one for one in candidates if one.stages * one.settings.micro_batches <= MOST_PASSES]
    for one in _least_memory(short or candidates[:1])[:40]:
        spread = one.even(search.model.count)
        found = evaluate(search.model, search.machines, spread)
        tried.append((found.lacking_bytes, spread, found))
    lacking, spread, found = min(tried, key=lambda e: e[0])
    stage = max(range(len(found.stages)), key=lambda s: found.stages[s].lacking_bytes)
    parts, memory = spread.stages[stage].parts, found.stages[stage].memory
    worst = max(
        range(len(parts)),
        key=lambda i: memory[i].total_bytes - search.machines.pools[parts[i].pool].memory_bytes,
    )
    pool, used = search.machines.pools[parts[worst].pool], memory[worst]
    held = {
        "parameters": used.parameters_bytes,
        "gradients": used.gradients_bytes,
        "optimizer state": used.optimizer_bytes,
        "activations": used.activations_bytes,
    }
    most = max(held, key=lambda name: held[name])
    return PlanError(
        "nothing fits into the devices' memory",
        given=f"{search.model.name} on {search.machines.devices} devices of {search.machines.cluster.name}",
        nearest=f"{spread.summary()}: stage {stage} needs {human_bytes(used.total_bytes)} per {pool.device.name}, "
        f"which has {human_bytes(pool.memory_bytes)}; it lacks {human_bytes(lacking)}",
        binds=f"{most}, {human_bytes(held[most])}",
        action=_cheapest(search, spread, lacking, pool.memory_bytes),
    )


def _least_memory(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates in the order of what their ranks roughly hold: first by the state's part, then by what is kept."""

    def size(one: Candidate) -> tuple[float, float]:
        ranks = sum(count * sum(p.ranks for p in parts) for parts, count in one.kinds)
        recompute = {"full": 0, "selective": 1, "none": 2}[one.settings.recompute]
        part = one.kinds[0][0][0]
        return (1.0 / (one.stages * part.tensor) + recompute * 1e-3 + part.rows * 1e-4, -ranks)

    return sorted(candidates, key=size)


def _cheapest(search: Estimates, spread: Spread, lacking: float, memory_bytes: float) -> str:
    """Changes in the order of their price: a stage's free ranks, fewer layers, more memory per device."""
    layers = _layers_that_fit(search, spread)
    need = 1.0 + lacking / memory_bytes
    more = f"devices with {human_bytes(memory_bytes + lacking)} ({need:.2f} times as much)"
    fewer = f", or {layers} layers instead of {search.model.count}" if layers else ""
    hosts = -(-search.machines.devices * (memory_bytes + lacking) // memory_bytes)
    known = all(pool.host.memory_gb for pool in search.machines.pools)
    host = "" if known else ", or say memory_gb of the hosts in the cluster file: state and weights can lie there"
    return f"take about {hosts:.0f} such devices{fewer}, or {more}, or a smaller micro-batch or sequence{host}"


def _layers_that_fit(search: Estimates, spread: Spread) -> int:
    """How many of the model's layers this spread's stages could hold."""
    total = 0
    for index, stage in enumerate(spread.stages):
        low, high = stage.layers[0]
        taken = 0
        for end in range(low + 1, high + 1):
            ranges = ((low, end), *((a, a) for a, _ in stage.layers[1:]))
            shorter = list(spread.stages)
            shorter[index] = Stage(ranges, tuple(Part(p.pool, p.tensor, p.replicas, p.rows) for p in stage.parts))
            cost = evaluate_stage(search, spread, tuple(shorter), index)
            if cost > 0:
                break
            taken = end - low
        total += taken
    return total


def evaluate_stage(search: Estimates, spread: Spread, stages: tuple[Stage, ...], index: int) -> float:
    """By how many bytes one stage does not fit."""
    live = live_chunks(spread.schedule, len(stages), 1, spread.micro_batches, index)
    changed = msgspec.structs.replace(spread, stages=stages)
    return stage_cost(search.model, search.machines, changed, index, live, search.ranks).lacking_bytes
