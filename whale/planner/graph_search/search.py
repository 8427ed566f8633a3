"""Searches for the fastest strategy of a captured program, for `auto_parallel`.

Each strategy is planned and lowered as in compilation, the cost model simulates its step, and its memory is checked as
compilation checks it (`predict.py`). So a prediction is one of the programs that would run. The fastest strategy that
fits wins, and the run uses the very plan that was predicted.

Decision: 0108.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from cost_model.graph.machine import make_rated_machine
from cost_model.graph.machine_profile import MachineProfile
from whale.errors import AcrossMicroBatchesError, DoesNotFitError, PlanError, WhaleError
from whale.ir.layout import Shard, divide_proportionally
from whale.ir.ops import PYTHON_FUNCTIONS
from whale.ir.plan_text import format_bytes
from whale.ir.program import Node, Program
from whale.ir.strategy import ChosenStrategy, ParallelStrategy
from whale.kernels.substitute import substitute_kernels
from whale.partition.lower import lower_planned_ranks
from whale.passes.analysis.axes import batch_of, select_known_along
from whale.passes.memory.offload import TABLES, find_offloaded
from whale.passes.memory.zero import state_at_rest
from whale.passes.normalize.inline import inline
from whale.passes.pass_manager import normalise
from whale.passes.run_passes import PassObserver
from whale.passes.settings import PlanSettings
from whale.planner.graph_search import lower_bounds
from whale.planner.graph_search.environment import SearchEnvironment, unequal
from whale.planner.graph_search.pipelines import pipelines, why_none, work_of_chain
from whale.planner.graph_search.predict import AUTO, Candidate, Made, Plans
from whale.planner.graph_search.strategies import choices, divide_over_all
from whale.planner.graph_search.team import Answer, Asked, Team, try_candidate

BUDGET_S = 30.0

# A strategy that is faster than the first one by less than this part is not chosen: predictions are no more exact.
LEAST_GAIN = 0.03
STATE_DIVIDED = ", optimizer's state divided"

# Ops with effects outside of the step, or that wait for the script: a step with one of them is not run to measure it.
_SEEN_BY_SCRIPTS = PYTHON_FUNCTIONS | frozenset("PyFuncStateless PrintV2 Print WriteFile SaveV2".split())


@dataclass(frozen=True, slots=True)
class Found:
    """Holds the result of a search.

    Attributes:
      chosen: the strategy chosen, with its prediction.
      made: its plan.
      lines: one line of text per strategy, for the user.
      is_whole: there was time to evaluate every strategy.
      others: the strategies not chosen: first those predicted, fastest first, then those rejected without a prediction.
    """

    chosen: ChosenStrategy
    made: Made
    lines: list[str]
    is_whole: bool
    others: tuple[Other, ...] = ()


@dataclass(frozen=True, slots=True)
class Other:
    """Holds a strategy that was not chosen: with predicted seconds and missing bytes, or with the reason for its
    rejection.
    """

    strategy: ParallelStrategy
    step_s: float = 0.0
    lacking_bytes: float = 0.0
    refused: str = ""


@dataclass
class Search:
    """Holds the state of a search: the strategies evaluated so far, and the rejected ones with reasons.

    Attributes:
      end_s: value of `time.monotonic()` after which no further strategy is evaluated, except the first one.
      team: processes that evaluate strategies in parallel; None: there are none.
      found: candidates in the order of evaluation.
      lost: rejected strategies.
      is_whole: there was time to evaluate every strategy.
      tried: lines of text about steps that were run to measure them.
      computing_s: name of a strategy -> lower bound of its computation in seconds, where there is one.
    """

    end_s: float
    team: Team | None = None
    found: list[Candidate] = field(default_factory=list)
    lost: list[Other] = field(default_factory=list)
    is_whole: bool = True
    tried: list[str] = field(default_factory=list)
    computing_s: Mapping[str, float] = field(default_factory=dict)
    # Name of a pipeline that needs a value of all micro-batches: so do all others, whatever their stages.
    _needs_all: str = ""
    _across: Answer | None = None
    _under_way: list[Asked] = field(default_factory=list)

    def to_beat_s(self) -> float:
        """Returns the step time that a further strategy has to beat; infinite: none fits so far."""
        fitting = [way.seconds for way in self.found if way.fits]
        return min([*fitting, fitting[0] * (1 - LEAST_GAIN)]) if fitting else float("inf")

    def best(self) -> Candidate | None:
        """Returns the fastest candidate that fits, or the first one if the fastest gains less than `LEAST_GAIN`; None:
        none fits.
        """
        fitting = [way for way in self.found if way.fits]
        if not fitting:
            return None
        best = min(fitting, key=lambda way: way.seconds)
        return fitting[0] if best.seconds > fitting[0].seconds * (1 - LEAST_GAIN) else best

    def begin(self, strategies: Sequence[ParallelStrategy]) -> None:
        """Assigns strategies to the other members of the team, which start at once; the next `look` collects their
        answers.
        """
        if self.team is not None and strategies:
            self._under_way = list(map(self._ask, strategies))
            self.team.ask(self._under_way)

    def begin_before_stages(self, plans: Plans, ready: list[ParallelStrategy]) -> list[ParallelStrategy]:
        """Assigns ``ready`` to the other members, and checks meanwhile whether pipelines are possible.

        Returns:
          the strategies that are still to be evaluated: all without a team, else none.
        """
        if self.team is None or not ready:
            return ready
        self.begin([one for one in ready if self._may_run(plans, one)])
        if self._under_way and not self._needs_all:
            self._refuse_across(plans)
        return []

    def look(self, plans: Plans, *strategies: ParallelStrategy) -> None:
        """Predicts strategies and records the results; members of the team predict some of them at the same time."""
        asked = [self._ask(one) for one in strategies if self._may_run(plans, one)]
        if not self._under_way:
            self.begin([one.strategy for one in asked[1:]])
        if asked:
            self.note(asked[0].strategy, *try_candidate(plans, asked[0]))
        others, self._under_way = self._under_way, []
        answers = self.team.answers() if self.team is not None and others else []
        for member, (one, answer) in enumerate(zip(others, answers), 1):
            way = Candidate(one.strategy, answer.seconds, answer.lacking_bytes, held=answer.held, by=member)
            self.note(one.strategy, answer, way)

    def _ask(self, strategy: ParallelStrategy) -> Asked:
        return Asked(strategy, self.to_beat_s(), self.computing_s.get(strategy.name, 0.0))

    def _may_run(self, plans: Plans, strategy: ParallelStrategy) -> bool:
        if self.found and time.monotonic() > self.end_s:
            self.lost.append(Other(strategy, refused="not looked at, the time is over"))
            self.is_whole = False
            return False
        if strategy.is_pipelined and not self._needs_all and (across := self._refuse_across(plans)).lost:
            self.note(strategy, across, None)
            return False
        if self._needs_all and strategy.is_pipelined:
            self.lost.append(Other(strategy, refused=f"cannot run: for the same reason as {self._needs_all}"))
            return False
        return True

    def _refuse_across(self, plans: Plans) -> Answer:
        """Checks once whether the data-parallel plan shows that pipelines are impossible; returns the answer for a
        pipeline.
        """
        if self._across is None:
            self._across = Answer()
            try:
                plans.refuse_across()
            except AcrossMicroBatchesError as error:
                self._across = Answer(lost=error.message, across=True)
        return self._across

    def note(self, strategy: ParallelStrategy, answer: Answer, way: Candidate | None) -> None:
        """Records the result of evaluating a strategy.

        Args:
            answer: the result, or the reason why the strategy cannot run.
            way: the strategy with its prediction; None: it cannot run.
        """
        if answer.across:
            self._needs_all = self._needs_all or strategy.name
        if answer.lost:
            self.lost.append(Other(strategy, refused=f"cannot run: {answer.lost}"))
        elif answer.is_bound:
            self.lost.append(Other(strategy, refused=_at_least(answer.seconds)))
        elif way is not None:
            self.found.append(way)
            best = self.best()
            # Plans are large, and only the best one will run: the others are made again if needed.
            self.found = [one if one is best else replace(one, made=None, programs={}) for one in self.found]

    def complete(self, plans: Plans, best: Candidate, made: Made) -> Made | None:
        """Returns the plan of the best candidate, proved legal; if it is not legal, None, and the candidate is lost."""
        try:
            return plans.complete(made)
        except PlanError as error:
            self.found = [way for way in self.found if way is not best]
            self.lost.append(Other(best.strategy, refused=f"cannot run: {error.message}"))
            return None

    def full(self) -> Iterator[ParallelStrategy]:
        """Yields the strategies that do not fit into memory but are faster than all that fit, fastest first."""
        full = [way for way in self.found if not way.fits]
        for way in sorted(full, key=lambda w: w.seconds):
            if way.seconds < self.to_beat_s():
                yield way.strategy


def best_way(
    program: Program,
    settings: PlanSettings,
    environment: SearchEnvironment,
    stages: int = 0,
    budget_s: float | None = None,
    team: Team | None = None,
    is_corrected: bool = False,
) -> Found:
    """Finds the strategy with the shortest predicted step among those that fit into memory.

    A strategy that does not fit, but is faster than all that do, is also tried with sharded optimizer state (and
    weights), and with recomputation.

    Args:
      stages: only pipelines with this number of stages; 0: any strategy.
      budget_s: seconds after which no further strategy is evaluated; None: `BUDGET_S`.
      team: processes that evaluate strategies in parallel.
      is_corrected: predictions were corrected by measured steps, so that they may be compared with a measured step of
          one rank on the cores of all.

    Raises:
      PlanError: no strategy can run.
      DoesNotFitError: no strategy fits into the ranks' memory; the error says by how much.
    """
    search = Search(time.monotonic() + (BUDGET_S if budget_s is None else budget_s), team)
    settings = settings.but(observer=PassObserver())  # which sees the passes of the plan that is taken
    plans = Plans(program, settings, environment)
    search.computing_s = plans.computing_s
    at_once = team.size if team is not None else 1
    # Bounds need the plan of the first strategy; the other members start on splits meanwhile, without bounds.
    begun = (
        []
        if stages
        else [one for one in choices(program, settings.size, environment.topology) if one.split][: at_once - 1]
    )
    search.begin(begun)
    looked_at = [one for one in _list_looked_at(plans, stages, begun) if one[0] not in begun]
    # Pipelines take the longest to plan, and a replicated program needs the most memory: they come last, when it is
    # known how fast they have to be.
    for last in (False, True):
        ready: list[ParallelStrategy] = []
        for strategy, bound_s in (one for one in looked_at if (one[0].replicated or one[0].is_pipelined) == last):
            if strategy.replicated and settings.batch.local:
                search.lost.append(Other(strategy, refused="cannot run: every rank has only its own rows of the batch"))
            elif bound_s >= search.to_beat_s():
                search.lost.append(Other(strategy, refused=_at_least(bound_s)))
            else:
                ready.append(strategy)
            if len(ready) == (at_once if search.found else 1):
                search.look(plans, *ready)
                ready = []
        if not last and any(one.is_pipelined and bound_s < search.to_beat_s() for one, bound_s in looked_at):
            ready = search.begin_before_stages(plans, ready)
        search.look(plans, *ready)
        _look_at_leaner(search, plans)
    if is_corrected and not stages:
        _look_at_lending(search, plans)
    made = None
    while made is None:
        best = _best(search, environment)
        if team is not None and best.by:
            plan, held_bytes = team.plan(best.by, best.strategy)
            made = plans.apply(best.strategy, plan)
        else:
            made, held_bytes = best.made or plans.make(best.strategy), best.bytes
        made = search.complete(plans, best, made)
    told = list(_describe_choice(best, search, environment))
    beaten = sorted((way for way in search.found if way is not best), key=lambda way: way.seconds)
    others = [Other(way.strategy, way.seconds, way.lacking_bytes) for way in beaten]
    chosen = ChosenStrategy(best.strategy, best.seconds, held_bytes)
    return Found(chosen, made, told, search.is_whole, (*others, *search.lost))


def way_or_lending(
    program: Program, settings: PlanSettings, environment: SearchEnvironment, present: ParallelStrategy, took_s: float
) -> Found:
    """Compares the running strategy with rank 0 computing alone on the cores of all ranks, by a measured step.

    Args:
      present: the strategy that runs.
      took_s: measured seconds of its step.

    Raises:
      PlanError: the strategy cannot run.
    """
    search, settings = Search(float("inf")), settings.but(observer=PassObserver())
    plans = Plans(program, settings, environment)
    search.look(plans, present)
    search.found = [replace(way, seconds=took_s) for way in search.found]
    _look_at_lending(search, plans)
    best = _best(search, environment)
    chosen = ChosenStrategy(best.strategy, best.seconds, best.bytes)
    told = list(_describe_choice(best, search, environment))
    return Found(
        chosen, plans.complete(best.made or plans.make(best.strategy)), told, search.is_whole, tuple(search.lost)
    )


def _at_least(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms at least"


def _look_at_lending(search: Search, plans: Plans) -> None:
    """Evaluates rank 0 computing alone on the cores of all ranks, by running a step, if that may be chosen at all."""
    lending, settings = plans.environment.lending, plans.settings
    if lending is None or not _may_lend(settings, plans.environment):
        return
    name = f"rank 0 alone, with {lending.threads} threads on the cores that the others lend"
    strategy = divide_over_all(name, settings.size, lent_threads=lending.threads)

    def lose(why: str) -> None:
        search.lost.append(Other(strategy, refused=why))

    alone = settings.but(size=1, mesh=(), hosts=(), rank_order=(), batch__shares=())
    try:
        program = inline(substitute_kernels(lower_planned_ranks(plans.program, alone, (0,)), alone)[0])
    except PlanError as error:
        return lose(f"cannot run: {error.message}")
    ops = {n.op for graph in (program, *program.functions.values()) for n in graph.nodes}
    if seen := sorted(ops & _SEEN_BY_SCRIPTS):
        return lose(f"not tried, since the step has effects that the script sees: {', '.join(seen)}")
    try:
        step_s = lending.measure_step(program)
    except WhaleError as error:
        return lose(f"not tried: {error.message}")
    if step_s >= search.to_beat_s():
        return lose(f"{1e3 * step_s:.2f} ms, measured")
    answer, way = try_candidate(plans, Asked(strategy, float("inf")))
    return search.note(strategy, answer, way and replace(way, seconds=step_s))


def _may_lend(settings: PlanSettings, environment: SearchEnvironment) -> bool:
    """Returns True if the plan may be that rank 0 computes alone, on the cores of all ranks.

    It may not if the user's settings divide the program (mesh, shares of rows, splits, ZeRO, offload, micro-batches),
    if variables are sharded by an earlier program, if ranks are unequal or were priced by a profile or a cluster file,
    or if exchanges go over another backend than Whale's own.
    """
    asked = settings.mesh or settings.batch.shares or settings.batch.local or settings.split.tiles
    divided = settings.zero.level or settings.memory.offload or settings.time.micro_batches > 1
    unlike = environment.prices is not None or unequal(environment.rates)
    return not (asked or divided or unlike or settings.exchange.backend != "whale")


def _look_at_leaner(search: Search, plans: Plans) -> None:
    """Evaluates fast strategies that do not fit again, in forms that need less memory.

    The optimizer's state is sharded (and the weights, without stages), activations are recomputed, and at last tables
    are offloaded.
    """
    program, settings, captured = plans.program, plans.settings, plans.environment.captured
    tried = list(search.full())
    for strategy in list(search.full()):
        replicas = strategy.stages[0].ranks
        level = 1 if strategy.is_pipelined else 3
        plain = not (strategy.replicated or strategy.split) and strategy.recompute == "none"
        if plain and strategy.zero < level and _more_divided(program, settings, replicas, level):
            what = "weights and optimizer's" if level == 3 else "optimizer's"
            name = f"{strategy.name.removesuffix(STATE_DIVIDED)}, {what} state divided"
            if name not in {way.strategy.name for way in search.found}:
                search.look(plans, msgspec.structs.replace(strategy, name=name, zero=level))
    if captured is None or settings.memory.recompute:
        return
    full = [strategy for strategy in search.full() if strategy.recompute == "none"]
    if full:
        changed = settings.but(memory__recompute=AUTO)
        less = Plans(normalise(captured, changed), changed, plans.environment)
        seen = {way.strategy.name for way in search.found}
        for strategy in full:
            name = f"{strategy.name}, activations computed again"
            if name not in seen and strategy in search.full():
                search.look(less, msgspec.structs.replace(strategy, name=name, recompute="auto"))
    if plans.environment.hosts_bytes and not settings.memory.offload and search.best() is None:
        _look_at_offloaded_tables(search, plans, captured, [one for one in tried if not one.is_pipelined])


def _look_at_offloaded_tables(
    search: Search, plans: Plans, captured: Program, strategies: Sequence[ParallelStrategy]
) -> None:
    """Evaluates strategies again with embedding tables in host memory; called if nothing fits without that."""
    changed = plans.settings.but(memory__offload=TABLES)
    program = normalise(captured, changed)
    try:
        offloaded = find_offloaded(program, TABLES)
    except PlanError as error:  # such as an optimizer that changes all rows of a table
        search.lost += [Other(one, refused=f"tables cannot be offloaded: {error.message}") for one in strategies[:1]]
        return
    if not offloaded:
        return
    hosted = Plans(program, changed, plans.environment)
    for strategy in strategies:
        name = f"{strategy.name}, tables in the hosts' memory"
        search.look(hosted, msgspec.structs.replace(strategy, name=name, offload=TABLES))


def _more_divided(program: Program, settings: PlanSettings, ranks: int, level: int) -> Collection[str]:
    """Returns the handles of variables that a ZeRO level shards over ``ranks`` ranks, if it shards more than lower
    levels.

    Returns () if it shards no more, or if the user has fixed how state is divided.
    """
    if settings.zero.level or settings.exchange.wire_dtype or ranks == 1:
        return ()
    known = select_known_along(settings.split.tiles, "", alone=True)

    def list_divided(weights: bool) -> Collection[str]:
        return state_at_rest(program, ranks, settings.zero.min_bytes, (), known, weights)

    more = list_divided(level == 3)
    return more if level == 1 or len(more) > len(list_divided(False)) else ()


def _best(search: Search, environment: SearchEnvironment) -> Candidate:
    if not search.found:
        raise PlanError(
            "no strategy for the program was found",
            reason="; ".join(f"{one.strategy.name}: {one.refused}" for one in search.lost),
            action="change in the script or its configuration what the reasons name, or divide the program by wh.split "
            "and wh.stage yourself",
        )
    best = search.best()
    if best is None:
        least, limit = min(search.found, key=lambda way: way.lacking_bytes), min(environment.limits_bytes)
        raise DoesNotFitError(
            "the program does not fit into the ranks' memory under any strategy",
            given=f"{format_bytes(least.bytes)} per rank, {least.strategy.name}, which takes the least",
            expected=f"at most {format_bytes(limit)}, {format_bytes(least.lacking_bytes)} less",
            action="start more ranks, or make the batch or the model smaller",
        )
    return best


def _describe_choice(best: Candidate, search: Search, environment: SearchEnvironment) -> Iterator[str]:
    yield f"{best.strategy.name}, predicted {1e3 * best.seconds:.2f} ms a step ({environment.origin})"
    for way in sorted(search.found, key=lambda w: w.seconds):
        if way is not best:
            limit = format_bytes(way.bytes - way.lacking_bytes)
            fits = "" if way.fits else f", does not fit: {format_bytes(way.bytes)} of {limit}"
            yield f"  {way.strategy.name}: {1e3 * way.seconds:.2f} ms{fits}"
    for one in search.lost:
        yield f"  {one.strategy.name}: {one.refused}"
    yield from search.tried


def _list_looked_at(
    plans: Plans, stages: int, begun: Collection[ParallelStrategy] = ()
) -> list[tuple[ParallelStrategy, float]]:
    """Returns (strategy, lower bound in seconds) for each strategy to try, data parallelism first, pipelines last.

    Notes bounds of computation alone in ``plans``.

    Args:
      stages: only pipelines with this number of stages; 0: any strategy.
      begun: strategies under evaluation, for which no bound is computed.
    """
    program, settings, environment = plans.program, plans.settings, plans.environment
    found = choices(program, settings.size, environment.topology)
    lasting: list[tuple[ParallelStrategy, float]] = []
    least_s = dict[str, float]()  # of other ways than pipelines, by name
    bounds = dict[str, lower_bounds.Bound]()
    try:
        batch = batch_of(program, settings)
    except PlanError:
        return [(one, 0.0) for one in found]
    rows = sum(batch[0].placement.sizes) if batch and isinstance(batch[0].placement, Shard) else 0
    speeds = [1.0] * settings.size
    if unequal(environment.rates):
        speeds = _speeds(plans)
        if not settings.batch.local and not settings.batch.shares:
            found[1:1] = _order_by_speed(plans, rows, speeds)
    state = _more_divided(program, settings, settings.size, 1)
    if state:
        found.append(divide_over_all(f"data parallel{STATE_DIVIDED}", settings.size, zero=1))
    if not settings.batch.local:
        # A profile's prices are of ranks that compute at the same time on the cores of one host, which they share.
        shared = isinstance(environment.prices, MachineProfile)
        operations = (make_rated_machine(environment.rates) if shared else environment.machine(program)).operations
        unpadded = settings.but(fuse__padding=False)  # whether shards are padded cannot be told from the whole program
        (whole,) = substitute_kernels([program], unpadded)
        kinds = {
            one: lower_bounds.speed_of((program, whole), operations[environment.rates.index(one)], one.start_s)
            for one in dict.fromkeys(environment.rates)
        }

        def seconds(node: Node) -> float:
            """Returns the seconds of a node on the fastest rank."""
            return min(kind.seconds(node) for kind in kinds.values())

        asked = settings.time.micro_batches
        work = work_of_chain(program, seconds)
        every = pipelines(program, settings.size, rows, work, speeds, asked, settings.time.schedule, settings.hosts)
        if every and not shared and not environment.prices_links:
            least = lower_bounds.bound_pipelines(
                program, whole, [kinds[one] for one in environment.rates], not settings.batch.shares
            )
            lasting = sorted(((one, least(one)) for one in every), key=lambda one: one[1])
        else:
            lasting = [(one, 0.0) for one in every]
        # The bounds assume links between hosts for every exchange; within a host they are faster.
        if not shared and not stages and not environment.prices_links:
            least_s = {one.name: lower_bounds.alone(whole, seconds) for one in found if one.replicated}
            as_divided, of_parts = plans.expand(found[0]), list(kinds.values())
            if as_divided is not program:
                (whole,) = substitute_kernels([as_divided], unpadded)
                of_parts = [
                    lower_bounds.speed_of((as_divided, whole), operations[environment.rates.index(one)], one.start_s)
                    for one in kinds
                ]
            sizes = batch[0].placement.sizes if rows and isinstance(batch[0].placement, Shard) else (0,)
            even = len(kinds) == 1 and not settings.batch.shares
            shares = lower_bounds.Shares(min(sizes) / max(rows, 1), settings.size, even)
            if state:
                bounds[found[-1].name] = lower_bounds.bound_divided_state(
                    program, whole, of_parts, shares, environment.rates, state
                )
            if rows >= settings.size and not (settings.zero.level or settings.split.tiles):
                least_of_split = lower_bounds.bound_splits(program, whole, of_parts, shares, environment.rates)
                splits = [one for one in found if one.split and one not in begun]
                bounds.update((one.name, least_of_split(one, plans.scope(one))) for one in splits)
            least_s.update((name, bound.step_s) for name, bound in bounds.items())
            plans.computing_s.update((name, bound.computing_s) for name, bound in bounds.items())
    lasting = [(one, least_s.get(one.name, 0.0)) for one in found] + lasting
    if not stages:
        return lasting
    if not (lasting := [one for one in lasting if one[0].is_pipelined and len(one[0].stages) == stages]):
        local = bool(settings.batch.local)
        why = why_none(program, settings.size, rows, local, stages, settings.time.micro_batches)
        raise PlanError(
            "no strategy for the program was found",
            given=f"pipeline.stages={stages}",
            reason=why,
            action="leave pipeline.stages out, or change the number of stages, micro-batches or rows",
        )
    return lasting


def _speeds(plans: Plans) -> list[float]:
    """Returns how fast each rank computes the program with equal rows, relative to the slowest rank, which has 1."""
    (first,) = plans.lower(plans.make(divide_over_all("equal rows", plans.settings.size)), (0,))
    times = plans.environment.seconds_of_each(inline(first), 0)
    return [max(times) / t for t in times]


def _order_by_speed(plans: Plans, rows: int, speeds: Sequence[float]) -> list[ParallelStrategy]:
    """Returns data parallelism with unequal rows, such that all ranks take equally long.

    Work that does not depend on rows (updates, exchanges), which takes longer on a slow rank, is counted. An empty
    list: there are so few rows that all ranks get equally many.
    """
    shares = tuple(round(1000 * speed) for speed in speeds)
    if rows >= len(speeds):
        shares = divide_proportionally(rows, shares)
        if min(shares) == max(shares):
            return []
        few, many = (shares.index(most) for most in (min(shares), max(shares)))
        lowered = plans.lower(plans.make(divide_over_all("rows by speed", len(speeds), shares=shares)), (few, many))
        least, most = (plans.environment.seconds_of_each(inline(one), at) for one, at in zip(lowered, (few, many)))
        per_row = [(more - less) / (shares[many] - shares[few]) for less, more in zip(least, most)]
        once = [less - shares[few] * row_s for less, row_s in zip(least, per_row)]
        if min(per_row) > 0:
            shares = balance_rows(rows, once, per_row)
    return [divide_over_all(f"data parallel, rows {'+'.join(map(str, shares))}", len(speeds), shares=shares)]


def balance_rows(rows: int, once_s: Sequence[float], row_s: Sequence[float]) -> tuple[int, ...]:
    """Returns rows per rank such that all ranks take equally long, as far as whole rows allow.

    A rank whose fixed work takes longer than all work of the others gets no rows.

    Args:
        rows: rows of the batch.
        once_s: seconds of each rank that do not depend on its rows.
        row_s: additional seconds of each rank per row.
    """
    working = list(range(len(once_s)))
    while True:
        end_s = (rows + sum(once_s[r] / row_s[r] for r in working)) / sum(1 / row_s[r] for r in working)
        still = [r for r in working if once_s[r] < end_s]
        if still == working:
            break
        working = still
    weights = [0] * len(once_s)
    for rank in working:
        weights[rank] = round(1e6 * (end_s - once_s[rank]) / (row_s[rank] * rows))
    return divide_proportionally(rows, tuple(weights))
