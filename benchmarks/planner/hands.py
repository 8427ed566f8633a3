"""Tries to beat plans by hand: by random legal changes of each, and by searches with random choices fixed.

The changes are made and checked here, independently of the search and its own moves.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cost_model.analytic.evaluate import evaluate
from cost_model.analytic.stacks import stack
from cost_model.analytic.stage_cache import StageCosts
from cost_model.analytic.stage_costs import fully_sharded
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster.cluster_file import Cluster, parse
from cost_model.cluster.pools import Machines
from cost_model.simulator import least_end_s
from whale.errors import PlanError
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage, divide_chunks
from whale.planner import ask
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.analytic_search.estimate import divisors
from whale.planner.analytic_search.plan_check import check
from whale.planner.analytic_search.search_sequence import find_best

KINDS = (
    "v100-sxm2-32gb", "p100-pcie-16gb", "t4", "rtx-3090", "rtx-4090", "a100-sxm-40gb", "a100-sxm-80gb",
    "h100-sxm-80gb", "h200", "b200", "l4",
)  # fmt: skip
NETWORKS = ("ethernet-10g", "ethernet-25g", "ethernet-100g", "infiniband-hdr-200", "infiniband-ndr-400")
STACKS = ("megatron-2022", "megatron-core-bf16")
BEATEN = 0.01  # part of a step by which another is faster that counts as beaten
SETS = 50  # choices fixed, for each plan


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a batch."""

    cluster: Cluster
    transformer: Transformer
    batch: int
    stack: str

    def model(self) -> TransformerModel:
        """Returns the model on the cluster's machines."""
        return TransformerModel(self.transformer, stack(self.stack), Machines(self.cluster))


def case(seed: int) -> Case:
    """Draws up to four kinds of hosts, from two devices to some thousands, and a transformer of a size for them."""
    r = random.Random(f"hands {seed}")
    stack_name = r.choice(STACKS)
    able = [k for k in KINDS if stack_name == "megatron-2022" or k[0] not in "vpt"]  # bfloat16 came with Ampere
    kinds = r.sample(able, r.choice((1, 1, 2, 2, 3, 4)))
    hosts = r.choice((1, 2, 4, 8, 16, 64, 256))
    network = r.choice(NETWORKS)
    rows = "".join(
        f"- {{name: {kind}, count: {r.randint(1, hosts)}, memory_gb: 512, devices: [{{type: {kind}, "
        f"count: {r.choice((1, 2, 4, 8, 8, 8))}}}], networks: {{f: {{nics: {r.choice((1, 1, 2, 4, 8))}}}}}}}\n"
        for kind in kinds
    )
    cluster = parse(f"name: drawn\nnetworks: {{f: {{type: {network}}}}}\nhosts:\n{rows}")
    devices = Machines(cluster).devices
    width = r.choice((64, 128))
    heads = r.choice([n for n in (8, 12, 16, 20, 32, 40, 64, 96) if n <= 8 + devices])
    experts = r.choice((0, 0, 0, 8, 64)) if devices >= 8 else 0
    transformer = Transformer(
        layers=r.choice((12, 18, 24, 32, 36, 40, 48, 61, 80, 96, 126)),
        hidden=width * heads,
        heads=heads,
        sequence=r.choice((512, 1024, 2048, 4096)),
        vocabulary=r.choice((32000, 51200, 128256)),
        experts=experts,
        top=min(2, experts) or 1,
        feed_forward=width * heads if experts else 0,
    )
    return Case(cluster, transformer, r.choice((1, 2, 4, 6, 12)) * max(8, min(1024, devices)), stack_name)


class Attack:
    """Random legal changes of a plan, kept where they make the step shorter.

    Attributes:
        strategy, step_s: the fastest so far.
        tried: changes whose devices and rows were legal; seen: these.
        won: part of the step that each kept change gained, with the names of what it changed.
    """

    def __init__(self, one: Case, strategy: ParallelStrategy, step_s: float, cluster: Cluster, seed: int) -> None:
        self.machines = Machines(cluster)
        self.model = TransformerModel(one.transformer, stack(one.stack), self.machines)
        self.batch, self.r = one.batch, random.Random(seed)
        self.costs = StageCosts(self.model, self.machines)
        self.strategy, self.step_s, self.tried = strategy, step_s, 0
        self.seen = {strategy}
        self.won: list[tuple[float, str]] = []

    def run(self, moves: int, processor_s: float) -> None:
        """Tries so many legal changes, for at most so long."""
        until_s = time.process_time() + processor_s
        while self.tried < moves and time.process_time() < until_s:
            other, names = self.strategy, []
            for _ in range(self.r.choice((1, 1, 2, 3))):
                change = self.r.choice(CHANGES)
                if changed := change(self, other):
                    other = changed
                    names.append(change.__name__)
            if other in self.seen or not self._may_be_legal(other):
                continue
            self.seen.add(other)
            self.tried += 1
            # What takes longest is asked last: most changes make the step longer, by the slowest stage alone.
            if self._at_least_s(other) >= self.step_s:
                continue
            found = evaluate(self.model, self.machines, other, self.costs)
            if found.step_s < self.step_s and found.fits and not check(self.model, self.machines, other, self.batch):
                self.won.append((1 - found.step_s / self.step_s, "+".join(names)))
                self.strategy, self.step_s = other, found.step_s

    def _may_be_legal(self, strategy: ParallelStrategy) -> bool:
        """Tells whether parts, rows and numbers of devices are legal; `check` also lays groups on hosts."""
        used = [0] * len(self.machines.pools)
        for stage in strategy.stages:
            if len({part.tensor for part in stage.parts}) > 1:
                return False
            if stage.rows * strategy.micro_batches != self.batch * strategy.context:
                return False
            if min(part.rows for part in stage.parts) < 1 or any(p.replicas % strategy.context for p in stage.parts):
                return False
            if strategy.context > 1 and len({part.rows for part in stage.parts}) > 1:
                return False  # a run has no such mesh
            if strategy.expert_ranks and stage.replicas % strategy.expert_ranks:
                return False
            for part in stage.parts:
                used[part.pool] += part.ranks
        if len(strategy.stages) == 1 < strategy.chunks:
            return False
        if any(devices > pool.devices for devices, pool in zip(used, self.machines.pools)):
            return False
        parts = {part for stage in strategy.stages for part in stage.parts}
        return all(part.tensor in self.model.tensor_degrees(part.pool) for part in parts)

    def _at_least_s(self, strategy: ParallelStrategy) -> float:
        """Returns a lower bound of a step, by the stages' passes and updates; infinite if a stage does not fit."""
        if fully_sharded(self.model, strategy):
            return 0.0
        costs = self.costs.list_costs(strategy, fitting=True)
        if costs[-1].lacking_bytes > 0:
            return math.inf
        passes_s = least_end_s([c.forward_s for c in costs], [c.backward_s for c in costs], strategy.micro_batches)
        return passes_s + costs[0].reduce_s + max(cost.update_s for cost in costs)

    def _some(self, strategy: ParallelStrategy) -> set[int]:
        """Returns the numbers of some stages: one, both ends, all equal to one, all."""
        count, at = len(strategy.stages), self.r.randrange(len(strategy.stages))
        alike = {i for i, stage in enumerate(strategy.stages) if stage.parts == strategy.stages[at].parts}
        return self.r.choice(({at}, {0, count - 1}, alike, set(range(count))))

    def _with_parts(
        self, strategy: ParallelStrategy, some: set[int], parts: tuple[DeviceGroup, ...]
    ) -> ParallelStrategy:
        stages = [
            msgspec.structs.replace(stage, parts=parts) if i in some else stage
            for i, stage in enumerate(strategy.stages)
        ]
        return msgspec.structs.replace(strategy, stages=tuple(stages))

    def tensor(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Divides tensors over more or fewer devices, with as many replicas or on as many devices."""
        some = self._some(strategy)
        own = strategy.stages[min(some)].parts
        part = self.r.choice(own)
        tensor = self.r.choice(self.model.tensor_degrees(part.pool))
        if self.r.random() < 0.5 or len(own) > 1:
            return self._with_parts(strategy, some, tuple(msgspec.structs.replace(p, tensor=tensor) for p in own))
        return self._replaced(strategy, some, part.pool, tensor, max(1, part.ranks // tensor))

    def replicas(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Takes more or fewer replicas for some stages."""
        some = self._some(strategy)
        part = self.r.choice(strategy.stages[min(some)].parts)
        return self._replaced(strategy, some, part.pool, part.tensor, self.r.choice(divisors(strategy.stages[0].rows)))

    def pool(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Moves some stages to other devices."""
        some = self._some(strategy)
        part = self.r.choice(strategy.stages[min(some)].parts)
        return self._replaced(
            strategy, some, self.r.randrange(len(self.machines.pools)), part.tensor, strategy.stages[min(some)].replicas
        )

    def _replaced(
        self, strategy: ParallelStrategy, some: set[int], pool: int, tensor: int, replicas: int
    ) -> ParallelStrategy | None:
        rows, odd = divmod(strategy.stages[0].rows, replicas)
        return None if odd else self._with_parts(strategy, some, (DeviceGroup(pool, tensor, replicas, rows),))

    def rows(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Moves a row between replicas, or changes the number of micro-batches."""
        at = self.r.randrange(len(strategy.stages))
        parts = list(strategy.stages[at].parts)
        if len(parts) > 1 and self.r.random() < 0.7:
            giver, taker = self.r.sample(range(len(parts)), 2)
            give, take = parts[giver], parts[taker]
            # As many rows as there are replicas of the other one, so that all of a part have as many.
            parts[giver] = msgspec.structs.replace(give, rows=give.rows - take.replicas)
            parts[taker] = msgspec.structs.replace(take, rows=take.rows + give.replicas)
            alike = {i for i, stage in enumerate(strategy.stages) if stage.parts == strategy.stages[at].parts}
            return self._with_parts(strategy, alike, tuple(parts))
        count = self.r.choice(divisors(self.batch * strategy.context))
        stages = []
        for stage in strategy.stages:
            each = [part.rows * strategy.micro_batches for part in stage.parts]
            if any(rows % count for rows in each):
                return None
            new = tuple(msgspec.structs.replace(p, rows=rows // count) for p, rows in zip(stage.parts, each))
            stages.append(msgspec.structs.replace(stage, parts=new))
        return msgspec.structs.replace(strategy, micro_batches=count, stages=tuple(stages))

    def mix(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Divides the replicas of all stages between two kinds of devices, at any ratio of rows."""
        if len(self.machines.pools) < 2:
            return None
        pools = self.r.sample(range(len(self.machines.pools)), 2)
        total, some = strategy.stages[0].rows, self._some(strategy)
        tensor = strategy.stages[min(some)].parts[0].tensor
        first = self.r.randint(1, max(1, self.machines.pools[pools[0]].devices // tensor // len(some)))
        other = self.r.randint(1, max(1, self.machines.pools[pools[1]].devices // tensor // len(some)))
        rows = self.r.randint(1, max(1, total // first))
        left = total - rows * first
        if left <= 0 or left % other:
            return None
        return self._with_parts(
            strategy,
            some,
            (DeviceGroup(pools[0], tensor, first, rows), DeviceGroup(pools[1], tensor, other, left // other)),
        )

    def layers(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Moves a layer or some from one range to another."""
        counts = [high - low for _, low, high in strategy.ordered_layers]
        if len(counts) == 1:
            return None
        giver, taker = self.r.sample(range(len(counts)), 2)
        moved = self.r.choice((1, 1, 2, 3))
        counts[giver], counts[taker] = counts[giver] - moved, counts[taker] + moved
        return _with_counts(strategy, counts) if min(counts) > 0 else None

    def stages(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Adds a stage like one of the others, or takes one away; layers are divided evenly or stay."""
        at = self.r.randrange(len(strategy.stages))
        ranks = [stage.parts for stage in strategy.stages]
        if self.r.random() < 0.5 and len(ranks) > 1:
            del ranks[at]
        else:
            ranks.insert(self.r.randint(0, len(ranks)), ranks[at])
        return self._evenly(strategy, ranks, 1 if self.r.random() < 0.5 else strategy.chunks)

    def order(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Exchanges the devices of two stages."""
        if len(strategy.stages) == 1:
            return None
        one, other = self.r.sample(range(len(strategy.stages)), 2)
        parts = [stage.parts for stage in strategy.stages]
        first = self._with_parts(strategy, {one}, parts[other])
        return self._with_parts(first, {other}, parts[one])

    def chunks(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Interleaves the stages in another number of chunks."""
        most = self.model.count // len(strategy.stages)
        ranks = [stage.parts for stage in strategy.stages]
        return self._evenly(strategy, ranks, self.r.randint(1, most)) if len(ranks) > 1 and most else None

    def tokens(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Divides the tokens of rows over twice or half as many ranks, which are more replicas, or take turns."""
        more = self.r.random() < 0.5
        context = 2 * strategy.context if more else strategy.context // 2
        if not context or self.model.sequence % context:
            return None
        how, micro_batches, stages = self.r.choice(("replicas", "tensor", "turns")), strategy.micro_batches, []
        if how == "turns":
            micro_batches = 2 * micro_batches if more else micro_batches // 2
        for stage in strategy.stages:
            parts = []
            for part in stage.parts:
                replicas, tensor = part.replicas, part.tensor
                if how != "turns":
                    replicas = 2 * replicas if more else replicas // 2
                if how == "tensor":
                    tensor = tensor // 2 if more else 2 * tensor
                if not replicas or not tensor:
                    return None
                parts.append(DeviceGroup(part.pool, tensor, replicas, part.rows))
            stages.append(msgspec.structs.replace(stage, parts=tuple(parts)))
        return msgspec.structs.replace(
            strategy, context=context, micro_batches=max(1, micro_batches), stages=tuple(stages)
        )

    def settings(self, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Changes the level of ZeRO, the ranks of experts, or what is computed again, in one stage or in all."""
        if self.r.random() < 0.4:
            return msgspec.structs.replace(strategy, zero=self.r.randint(0, 3))
        if self.model.experts and self.r.random() < 0.5:
            return msgspec.structs.replace(strategy, expert_ranks=self.r.choice((0, *divisors(self.model.experts))))
        kinds = list(strategy.recomputes)
        how = self.r.choice([kind for kind, _ in self.model.recomputes()])
        for stage in self._some(strategy):
            kinds[stage] = how
        return strategy.replace_recompute(kinds)

    def _evenly(
        self, strategy: ParallelStrategy, ranks: list[tuple[DeviceGroup, ...]], chunks: int
    ) -> ParallelStrategy | None:
        if len(ranks) * chunks > self.model.count:
            return None
        layers = divide_chunks(self.model.count, len(ranks), chunks)
        stages = tuple(Stage(ranges, parts, strategy.recomputes[0]) for ranges, parts in zip(layers, ranks))
        return msgspec.structs.replace(strategy, stages=stages)


CHANGES = (
    Attack.tensor, Attack.replicas, Attack.pool, Attack.rows, Attack.mix, Attack.layers, Attack.layers, Attack.stages,
    Attack.order, Attack.chunks, Attack.settings, Attack.tokens,
)  # fmt: skip


def _with_counts(strategy: ParallelStrategy, counts: list[int]) -> ParallelStrategy:
    ends = [0, *itertools.accumulate(counts)]
    stages = tuple(
        msgspec.structs.replace(
            stage,
            layers=tuple((ends[i], ends[i + 1]) for i in range(number, len(counts), len(strategy.stages))),
        )
        for number, stage in enumerate(strategy.stages)
    )
    return msgspec.structs.replace(strategy, stages=stages)


def sets(one: Case, r: random.Random) -> Iterator[list[str]]:
    """Draws choices to fix, one to three at a time."""
    choices = {
        "tensor": (1, 2, 4, 8),
        "stages": (1, 2, 3, 4, 6, 8, 12, 16),
        "data": (1, 2, 4, 8, 16, 32, 64),
        "micro_batch": (1, 2, 4, 8),
        "zero": (0, 1, 2, 3),
        "chunks": (1, 2, 3, 4),
        "context": (1, 2, 4),
        "recompute": ("none", "full"),
    }
    while True:
        yield [f"{name}={r.choice(choices[name])}" for name in r.sample(sorted(choices), r.choice((1, 1, 2, 3)))]


@dataclass(frozen=True)
class Beaten:
    """A plan beside what hands found: by changes, and by fixing choices; the plan's seconds and theirs.

    Attributes:
        searched_s, attacked_s: processor's seconds of the search, and of hands.
        tried: legal changes.
    """

    seed: int
    plan_s: float
    changed_s: float
    fixed_s: float
    by: str
    searched_s: float
    attacked_s: float
    tried: int

    @property
    def gain(self) -> float:
        """Returns the part of the step by which hands are faster."""
        return 1 - min(self.changed_s, self.fixed_s) / self.plan_s


def attack(seed: int, moves: int, choices: int, budget_s: float | None = None) -> Beaten | None:
    """Plans a case and attacks the plan; None: nothing fits.

    `budget_s`: of the search; None: as `whale plan` has it for so many devices.
    """
    one = case(seed)
    budget_s = budget_s or ask.find_budget_s(one.cluster)
    model, start_s = one.model(), time.process_time()
    found = find_best(model, model.machines, one.batch, Constraints(budget_s=budget_s))
    if found is None:
        return None
    searched_s = time.process_time() - start_s
    wrong = check(model.on(Machines(found.cluster)), Machines(found.cluster), found.strategy, one.batch)
    if wrong:
        raise PlanError("a plan is illegal", given=f"case {seed}", found="; ".join(wrong))
    hand = Attack(one, found.strategy, found.evaluation.step_s, found.cluster, seed)
    hand.run(moves, max(searched_s, 1.0))
    won = ", ".join(f"{names} {gain:.2%}" for gain, names in hand.won)
    by = f"{hand.strategy.format_summary()} ({won or 'nothing'})"
    fixed_s = found.evaluation.step_s
    r = random.Random(seed)
    until_s = time.process_time() + searched_s
    for fixed in itertools.islice(sets(one, r), choices):
        if time.process_time() > until_s:
            break
        limits = ask.limits(fixed, max(0.05, budget_s / SETS))
        if (other := find_best(model, model.machines, one.batch, limits)) is None:
            continue
        if other.evaluation.step_s < min(fixed_s, hand.step_s):
            by = f"--set {' '.join(fixed)}: {other.strategy.format_summary()}"
        fixed_s = min(fixed_s, other.evaluation.step_s)
    attacked_s = time.process_time() - start_s - searched_s
    return Beaten(seed, found.evaluation.step_s, hand.step_s, fixed_s, by, searched_s, attacked_s, hand.tried)


def hands(options: argparse.Namespace) -> None:
    """Counts the plans that hands beat by more than 1 %."""
    seeds, found = itertools.count(options.first), list[Beaten]()
    while len(found) < options.count:
        one = attack(next(seeds), options.moves, options.sets, options.budget)
        if one is None:
            continue
        found.append(one)
        if one.gain > BEATEN or options.verbose:
            print(
                f"case {one.seed}: {one.plan_s:.4g} s, beaten by {one.gain:.2%} (changes {one.changed_s:.4g} s, fixed "
                f"choices {one.fixed_s:.4g} s; searched {one.searched_s:.1f} s, {one.tried} legal changes): {one.by}",
                flush=True,
            )
    beaten = [one for one in found if one.gain > BEATEN]
    print(
        f"{len(found)} plans (cases {options.first} to {found[-1].seed}), {sum(one.tried for one in found)} legal "
        f"changes of them: {len(beaten)} beaten by more than 1 %, the worst by {max(one.gain for one in found):.1%}; "
        f"searched for {sum(one.searched_s for one in found):.0f} s of a processor, attacked for "
        f"{sum(one.attacked_s for one in found):.0f} s"
    )
