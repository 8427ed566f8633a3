"""Predicts a step of a captured program under a strategy: plans, lowers and simulates it just as it would run.

apply        applies a strategy to a program and its settings
Plans        caches the plans of one search
predict      predicts the seconds of a step, and whether it fits into memory

Decision: 0055.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from cost_model.graph.machine import Machine
from cost_model.graph.machine_profile import MachineProfile
from cost_model.graph.predict import PricedStep, step_seconds
from cost_model.graph.traffic import exchange
from whale.errors import AcrossMicroBatchesError, WhaleError
from whale.ir.mesh import CONTEXT, DATA, EXPERT, TENSOR, Axis
from whale.ir.ops import EXCHANGES
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.ir.strategy import Offload, ParallelStrategy, Recompute
from whale.kernels.substitute import substitute_kernels
from whale.partition.lower import lower_ranks, make_any_plan
from whale.partition.mesh import complete_candidate
from whale.passes.memory.step_bytes import predict_at_most_bytes, predict_taken_bytes
from whale.passes.normalize.inline import inline
from whale.passes.plan_builder import FirstLayouts, expand
from whale.passes.resharding.on_devices import mark_device_exchanges
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.environment import SearchEnvironment, unequal
from whale.planner.graph_search.pipelines import chain, make_staged
from whale.planner.graph_search.strategies import add_scopes, divide_over_all, put_on_first_rank, trains

AUTO = "auto"  # recompute by bytes (see whale.passes.memory.recompute)


@dataclass(frozen=True, slots=True)
class Made:
    """Holds a strategy applied to a program: the program with the strategy's scopes, the settings to plan it with, and
    the plan.
    """

    program: Program
    settings: PlanSettings
    plan: Plan


@dataclass(frozen=True)
class Candidate:
    """Holds a strategy with the prediction of its step.

    Attributes:
      seconds: predicted seconds of a step.
      lacking_bytes: by how much the fullest rank exceeds its memory; 0 or less: all ranks fit, or memory was not
          predicted because a faster candidate fits.
      made: the plan; None: it is made again if the strategy is chosen.
      held: rank -> predicted peak bytes of a step; empty: not predicted.
      programs: rank -> its program, kept if the step fits even with all its tensors in memory at once.
      by: number of the team member that predicted the strategy and has its plan (see
          `whale.planner.graph_search.team`).
      is_bound: `seconds` is a lower bound, and as long as what the strategy had to beat.
    """

    strategy: ParallelStrategy
    seconds: float
    lacking_bytes: float = 0.0
    made: Made | None = None
    held: Mapping[int, int] = field(default_factory=dict)
    programs: Mapping[int, Program] = field(default_factory=dict)
    by: int = 0
    is_bound: bool = False

    @cached_property
    def bytes(self) -> int:
        """Returns the predicted peak bytes of the fullest rank; 0: memory was not predicted."""
        held = self.held if self.made is None else self.held or _predict_held(self.programs, self.made.settings)
        return max(held.values(), default=0)

    @property
    def fits(self) -> bool:
        """Returns True if the step fits into every rank's memory."""
        return self.lacking_bytes <= 0


@dataclass(frozen=True)
class Plans:
    """Makes the plans of one search, and caches those of strategies that only divide rows, by the shares of rows.

    Other strategies' plans are made again if they are needed again, as plans are large.

    Attributes:
      computing_s: name of a strategy -> lower bound of its computation in seconds, where the search has found one.
    """

    program: Program
    settings: PlanSettings
    environment: SearchEnvironment
    computing_s: dict[str, float] = field(default_factory=dict)
    _of_rows: dict[tuple[int, ...], Made] = field(default_factory=dict)
    _scoped: dict[tuple[str, ...], Program] = field(default_factory=dict)
    _first: FirstLayouts = field(default_factory=FirstLayouts)

    def scope(self, strategy: ParallelStrategy) -> Program:
        """Returns the program with a split scope on the nodes that a strategy shards; the number of ranks does not
        matter.
        """
        if strategy.split not in self._scoped:
            self._scoped[strategy.split] = add_scopes(self.program, strategy)
        return self._scoped[strategy.split]

    def make(self, strategy: ParallelStrategy) -> Made:
        """Returns the plan of a strategy, from the cache if the strategy only divides rows.

        Raises:
          WhaleError: the program cannot be distributed that way.
        """
        by_rows = strategy == divide_over_all(strategy.name, self.settings.size, shares=strategy.shares)
        found = self._of_rows.get(strategy.shares) if by_rows else None
        if found is None:
            found = self.apply(strategy)
            if by_rows:
                self._of_rows[strategy.shares] = found
        return found

    def apply(self, strategy: ParallelStrategy, plan: Plan | None = None) -> Made:
        """Applies a strategy to program and settings; plans the result unless `plan` is given.

        Raises:
          WhaleError: the program cannot be distributed that way.
        """
        inside = self.scope(strategy) if strategy.split else None
        program, settings = apply(self.program, self.settings, strategy, inside)
        if plan is None:
            staged = strategy.is_pipelined or strategy.tensor > 1 or bool(strategy.lent_threads)
            same = bool(strategy.split) or not staged  # the same program as before, except for its scopes
            plan = make_any_plan(program, settings, self._first if same else None)
        return Made(program, settings, plan)

    def complete(self, made: Made) -> Made:
        """Returns the strategy that is taken with its plan proved legal, which those of other candidates are not.

        Raises:
          PlanError: the plan is not legal.
        """
        return replace(made, plan=complete_candidate(made.program, made.plan, made.settings))

    def expand(self, strategy: ParallelStrategy) -> Program:
        """Returns the program in which composite ops are replaced by simple ones, as far as the plan of `strategy`
        needs that.

        Examples are batch normalisation and softmax. All strategies that only divide rows need the
        same replacements. If the strategy cannot be planned, the program is returned unchanged.
        """
        try:
            return expand(self.program, frozenset(self.make(strategy).plan.expanded), self.settings)
        except WhaleError:
            return self.program

    def refuse_across(self) -> None:
        """Raises the error that every pipeline would raise, if the data-parallel plan in the cache shows it.

        Example: a statistic of the whole batch needs all micro-batches, whatever their number and wherever stages
        begin.

        Raises:
          AcrossMicroBatchesError: a value of all micro-batches is needed before the last one is finished.
        """
        rows = self._of_rows.get(())
        if rows is None:
            return
        count = max(2, rows.plan.micro_batches)
        plan, settings = replace(rows.plan, micro_batches=count), rows.settings.but(time__micro_batches=count)
        try:
            lower_ranks(rows.program, plan, settings, (0,))
        except AcrossMicroBatchesError:
            raise
        except WhaleError:
            return  # with another number of rows a pipeline may be possible

    def lower(self, made: Made, ranks: Sequence[int]) -> list[Program]:
        """Returns the programs of the given ranks."""
        return substitute_kernels(lower_ranks(made.program, made.plan, made.settings, ranks), made.settings)


def apply(
    program: Program, settings: PlanSettings, strategy: ParallelStrategy, inside: Program | None = None
) -> tuple[Program, PlanSettings]:
    """Applies a strategy to a program, by scopes, and to the settings for planning it.

    A program that does not train is returned unchanged for strategies with stages or sharded tensors.

    Args:
      inside: the program with a split scope on the nodes that the strategy shards, if made already.
    """
    if strategy.replicated and not settings.batch.local:
        return program, settings.but(batch__inputs=())
    if strategy.lent_threads:
        # A program that does not train stays data parallel and is sent the weights that it reads, as with stages.
        alone = settings.but(lent_threads=strategy.lent_threads, rank_order=())
        return (put_on_first_rank(program), alone) if trains(program) else (program, settings)
    if strategy.split:
        in_groups = strategy.tensor < settings.size and not settings.mesh
        mesh = (Axis(TENSOR, strategy.tensor),) if in_groups else settings.mesh
        order = strategy.stages[0].bound_ranks if in_groups else settings.rank_order
        return inside or add_scopes(program, strategy), settings.but(mesh=mesh, rank_order=order)
    changed = settings.but(zero__level=strategy.zero) if strategy.zero else settings
    if strategy.offload != "none":
        changed = changed.but(memory__offload=strategy.offload)
    if strategy.is_pipelined or strategy.tensor > 1 or strategy.context > 1 or strategy.expert_ranks > 1:
        # A program that does not train is not divided into stages: it is sent the weights that it reads.
        last = strategy.ordered_layers[-1][1] if strategy.is_pipelined else 0
        if not trains(program) or len(chain(program)) <= last:
            return program, settings
        program, changed = make_staged(program, strategy), changed.but(**_in_stages(strategy, settings))
    elif strategy.micro_batches:
        changed = changed.but(time__micro_batches=strategy.micro_batches)
    if strategy.shares and not settings.batch.local:
        changed = changed.but(batch__shares=strategy.shares)
    return program, changed


def _in_stages(strategy: ParallelStrategy, settings: PlanSettings) -> dict[str, Any]:
    """Returns the settings that a strategy with stages, or with tensor, context or expert parallelism changes, by
    name.
    """
    found: dict[str, Any] = {"time__micro_batches": max(1, strategy.micro_batches)}
    divided = (Axis(EXPERT, strategy.expert_ranks), Axis(CONTEXT, strategy.context))
    inner = [axis for axis in divided if axis.size > 1]
    if strategy.tensor > 1 or inner:
        each = math.prod(axis.size for axis in inner)
        meshes = {
            stage.bound_ranks or tuple(range(settings.size)): (
                Axis(DATA, stage.replicas // each),
                *inner,
                *([Axis(TENSOR, stage.parts[0].tensor)] if strategy.tensor > 1 else []),
            )
            for stage in strategy.stages
        }
        found["mesh"] = max(meshes.values(), key=lambda axes: math.prod(axis.size for axis in axes))
        found["stage_meshes"] = meshes if len(set(meshes.values())) > 1 else {}
    if strategy.is_pipelined:
        found["time__schedule"] = strategy.schedule
    return found


def complete(strategy: ParallelStrategy, settings: PlanSettings) -> ParallelStrategy:
    """Returns the strategy with the fields that it leaves open filled in from the program's settings."""
    recompute: Recompute = settings.memory.recompute or "none"  # type: ignore[assignment]
    offload: Offload = settings.memory.offload or "none"  # type: ignore[assignment]
    return msgspec.structs.replace(
        strategy,
        micro_batches=strategy.micro_batches or settings.time.micro_batches,
        schedule=strategy.schedule if strategy.is_pipelined else settings.time.schedule,
        zero=strategy.zero or settings.zero.level,
        recompute=recompute if strategy.recompute == "none" else strategy.recompute,
        offload=offload if strategy.offload == "none" else strategy.offload,
    )


def recompute_of(strategy: ParallelStrategy) -> str:
    """Returns the value of the setting `memory.recompute` for a strategy of a program; "": none.

    A program has no layers, so that it cannot recompute "selective" or "full" per layer (see `Recompute`); what it
    recomputes is then chosen by bytes.
    """
    how = next((one for one in strategy.recomputes if one != "none"), "none")
    return AUTO if how in ("selective", "full") else how.replace("none", "")


def predict(
    plans: Plans, strategy: ParallelStrategy, needed_s: float = float("inf"), computing_s: float = 0.0
) -> Candidate:
    """Predicts a strategy's step time, on the slowest rank, and memory, on the fullest rank.

    Args:
      needed_s: if the step takes at least this long, the strategy is rejected and its memory is not predicted.
      computing_s: lower bound of the seconds of its computation; 0: none. With it, a strategy whose exchanges show that
          it takes ``needed_s`` is rejected before kernels are substituted and its step is simulated.

    Raises:
      WhaleError: the program cannot be distributed that way.
    """
    settings, environment = plans.settings, plans.environment
    unlike = bool(strategy.is_pipelined or strategy.shares or settings.batch.shares) or unequal(environment.rates)
    ranks, made = _simulate(settings, strategy, environment), plans.make(strategy)
    lowered = lower_ranks(made.program, made.plan, made.settings, ranks)
    if computing_s and math.isfinite(needed_s):
        machine = environment.machine(plans.program)
        if machine.sharing.exchanges_compute:
            least_s = computing_s + _exchanges_s(plans, dict(zip(ranks, lowered)), machine)
            if least_s >= needed_s:
                return Candidate(strategy, least_s, is_bound=True)
    programs = dict(zip(ranks, substitute_kernels(lowered, made.settings)))
    seconds = step_seconds(_list_played(plans, programs), settings.size, environment.machine(plans.program))
    if seconds >= needed_s:
        return Candidate(strategy, seconds)
    asked = programs if unlike else {0: programs[0]}
    at_most = {rank: predict_at_most_bytes(one, rank, made.settings) for rank, one in asked.items()}
    on_hosts = environment.lacking_on_hosts(asked) if made.settings.memory.offload else 0.0
    if environment.lacking_bytes(at_most) <= 0 and on_hosts <= 0:
        return Candidate(strategy, seconds, made=made, programs=asked)
    held = _predict_held(asked, made.settings)
    return Candidate(strategy, seconds, max(environment.lacking_bytes(held), on_hosts), made, held)


def price_step(plans: Plans, strategy: ParallelStrategy) -> PricedStep:
    """Returns a strategy's step with all operations and exchanges priced, to predict it again with slower figures.

    Raises:
      WhaleError: the program cannot be distributed that way.
    """
    _, programs = _lower_simulated(plans, strategy)
    machine = plans.environment.machine(plans.program)
    return PricedStep(_list_played(plans, programs), plans.settings.size, machine)


def _lower_simulated(plans: Plans, strategy: ParallelStrategy) -> tuple[Made, dict[int, Program]]:
    """Returns a strategy's plan, and the programs of the ranks whose simulation represents all ranks."""
    ranks, made = _simulate(plans.settings, strategy, plans.environment), plans.make(strategy)
    return made, dict(zip(ranks, plans.lower(made, ranks)))


def _exchanges_s(plans: Plans, programs: Mapping[int, Program], machine: Machine) -> float:
    """Returns the seconds of exchanges in ranks' programs, without those of functions, on the rank with the most."""
    size, backend = plans.settings.size, plans.settings.exchange.backend
    found = [0.0]
    for rank, program in programs.items():
        marked = mark_device_exchanges(program, backend)
        nodes = [node for node in marked.nodes if node.op in EXCHANGES]
        found.append(
            sum(machine.exchange_s(exchange(n, [marked.find_type(r) for r in n.inputs], rank, size)) for n in nodes)
        )
    return max(found)


def _list_played(plans: Plans, programs: Mapping[int, Program]) -> dict[int, Program]:
    """Returns ranks' programs as the simulator needs them: with calls of micro-batch functions inlined."""
    backend = plans.settings.exchange.backend
    return {rank: mark_device_exchanges(inline(one), backend) for rank, one in programs.items()}


def _predict_held(programs: Mapping[int, Program], settings: PlanSettings) -> dict[int, int]:
    return {rank: sum(predict_taken_bytes(one, rank, settings).values()) for rank, one in programs.items()}


def _simulate(settings: PlanSettings, strategy: ParallelStrategy, environment: SearchEnvironment) -> Sequence[int]:
    """Returns the ranks to simulate: the first rank of each group of equal ranks, which stands for the others."""
    shares = strategy.shares or settings.batch.shares or (0,) * settings.size
    kinds: list[Hashable] = list(zip(environment.rates, environment.limits_bytes, shares))
    # The ranks of a profile share one host's cores.
    if (
        isinstance(environment.prices, MachineProfile)
        or strategy.lent_threads
        or (strategy.tensor > 1 and not strategy.split)
        or len({stage.ranks for stage in strategy.stages}) > 1
    ):
        return range(settings.size)
    first: dict[Hashable, Sequence[int]] = {}
    if strategy.is_pipelined:
        # A pipeline replica waits only for its own ranks in the other stages, so that equal replicas take equally long.
        for replica in zip(*(stage.bound_ranks for stage in strategy.stages)):
            first.setdefault(tuple(kinds[rank] for rank in replica), replica)
        return sorted(rank for replica in first.values() for rank in replica)
    if environment.prices_links and strategy.split:
        return range(settings.size)  # groups are on one host, or on several
    # The ranks of a tensor-parallel group wait for each other, but not for those of other groups.
    within = strategy.tensor if strategy.split else settings.size
    for rank, kind in enumerate(kinds):
        at = rank // within * within
        first.setdefault((kind, tuple(kinds[at : at + within])), (rank,))
    return [rank for (rank,) in first.values()]
