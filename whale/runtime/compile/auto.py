"""Runs `auto_parallel`: rank 0 searches the fastest strategy for the first training step, and all ranks use it.

This module measures speeds, shares the result and logs it; the search itself is `whale.planner.graph_search.search`, in
which other ranks help. Later programs of the run use the same strategy, because they share its variables. If measured
steps turn out to be far off their prediction, ``search_again`` searches with corrected figures, and
``whale.runtime.function`` changes to the strategy that it finds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import msgspec
from tensorflow.python.eager.context import eager_mode

from cost_model.graph import machine_profile as tables
from cost_model.graph.machine_profile import MachineProfile
from whale.distributed.links import measure_links
from whale.distributed.ranks import PLAN_TIMEOUT_S
from whale.errors import ClusterError, DoesNotFitError, PlanError, WhaleError
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.ir.strategy import ChosenStrategy
from whale.ir.topology import Topology
from whale.log import log, log_while_running
from whale.passes.pass_manager import normalise
from whale.passes.run_passes import PassObserver
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.environment import SearchEnvironment, Slowdown, find_slowdown
from whale.planner.graph_search.predict import Made, Plans, apply, predict, price_step, recompute_of
from whale.planner.graph_search.search import LEAST_GAIN, best_way, way_or_lending
from whale.planner.graph_search.strategies import drop_scopes, has_scopes, trains
from whale.planner.report.planfile import PlanFile
from whale.planner.run_described import bound
from whale.runtime.compile.lending import find_lending
from whale.runtime.compile.memory_plan import Options, limits_bytes
from whale.runtime.compile.microbenchmark import measure_rates
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.compile.plan_cache import keep_strategy, know_machines, load_strategy
from whale.runtime.compile.search_team import RankTeam, find_together
from whale.runtime.context import Context


@dataclass(frozen=True, slots=True)
class Applied:
    """Holds what ``spread_program`` returns: a program with the run's strategy applied, and the settings to plan it
    with.

    Attributes:
      plan: its plan, if the search has made it already; None: it must be made.
    """

    program: Program
    settings: PlanSettings
    plan: Plan | None = None


def spread_program(
    program: Program,
    settings: PlanSettings,
    context: Context,
    number: int,
    captured: Program | None,
    options: Options,
    lends: bool = False,
) -> Applied:
    """Chooses the run's strategy if there is none yet, and returns the program and settings with it applied; collective
    between processes.

    Returns them unchanged for one rank, for a program with scopes, and for programs before the first one that trains.

    Args:
      program: normalised.
      settings: for all ranks, or for the ranks of a dry run.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
      captured: the program as captured, with the nodes of its backward pass marked, to be normalised again if a
        strategy recomputes activations; None: they are not marked, so nothing is recomputed.
      options: called if no strategy fits into memory: takes the bytes that each rank has, and returns a text with
        settings under which the step would fit, for the error.
      lends: whether the search may choose that, once steps have run, the other ranks wait and the first one computes
        the whole step on the cores of all.

    Raises:
      PlanError: no strategy can run, or none fits into the ranks' memory.
      ClusterError: the profile that `mesh.profile` names cannot be read, or does not describe these ranks.
    """
    if settings.size == 1 or has_scopes(program):
        return Applied(program, settings)
    chosen, made = context.planning.auto, None
    if chosen is None:
        if not trains(program):
            return Applied(program, settings)
        if context.planning.described is not None:
            chosen = context.planning.auto = _as_described(program, settings, context, context.planning.described)
        else:
            chosen, made = _agree(program, settings, context, number, captured, options, lends)
            context.planning.auto = chosen
    if made is not None and not settings.observer.is_on:  # an observer has to see the passes run
        return Applied(made.program, made.settings, made.plan)
    if (how := recompute_of(chosen.strategy)) and captured is not None and trains(program):
        settings = settings.but(memory__recompute=how)
        program = normalise(captured, settings)
    return Applied(*apply(program, settings, chosen.strategy))


def project_for_plan(program: Program, context: Context) -> Program:
    """Returns a captured program with the scopes that the run's plan uses: without the user's scopes, if a described
    model's plan replaces them.
    """
    if context.planning.described is None or not has_scopes(program):
        return program
    if context.planning.auto is None and context.rank == 0:
        log.info(f"`{program.name}` follows the plan {context.planning.described[1]}, and not the script's own scopes")
    return drop_scopes(program)


def _as_described(
    program: Program, settings: PlanSettings, context: Context, described: tuple[PlanFile, str]
) -> ChosenStrategy:
    """Returns the strategy of a described model's plan, bound to the layers of this program; every rank derives the
    same one.
    """
    plan, path = described
    strategy = bound(plan, program, settings, path, has_compute_device())
    if context.rank == 0:
        log.info(f"the step is divided {strategy.name}; a step is predicted to take {1e3 * plan.step_s:.4g} ms")
    return ChosenStrategy(strategy, plan.step_s)


def _agree(
    program: Program,
    settings: PlanSettings,
    context: Context,
    number: int,
    captured: Program | None,
    options: Options,
    lends: bool,
) -> tuple[ChosenStrategy, Made | None]:
    """Returns the strategy that rank 0 has found, now or in an earlier run, on every rank; collective between
    processes. The arguments are those of ``spread_program``.

    Returns:
      the strategy; and its plan on those ranks whose search has made it already, None on others.
    """
    dry = context.planning.dry is not None
    # If the ranks' speeds have changed within this run, the cached choice of an earlier run does not apply any more.
    changed = context.elastic is not None and context.elastic.divisions > 0
    kept = None if changed else _keep(program, settings, context, number)
    if kept is not None:
        return kept, None
    environment = _environment(program, context, number, captured)

    def look(team: RankTeam | None = None) -> tuple[ChosenStrategy, Made]:
        with log_while_running(f"searching a strategy for `{program.name}` ({len(program.nodes)} operations)"):
            try:
                found = best_way(program, settings, environment, context.config["pipeline.stages"], team=team)
            except DoesNotFitError as error:
                error.action = options(environment.limits_bytes)
                raise
        _say(found.chosen, found.lines, not lends)
        context.planning.searched_all = found.is_whole
        if found.is_whole and not changed:  # else a later run, with more time for the search, may find a faster one
            keep_strategy(program, context, settings, found.chosen)
        return found.chosen, found.made

    if dry or not context.has_other_processes:
        return look()
    purpose = f"the search for a strategy for program {number}, `{program.name}` (rank 0 is planning)"
    return find_together(context, f"whale/auto/{number}", purpose, lambda: Plans(program, settings, environment), look)


class SearchedAgain(msgspec.Struct, frozen=True):
    """Holds the result of a search within a run, made with figures that explain how long present steps took.

    Attributes:
      chosen: the fastest strategy; the present one, with its measured step time, if none is predicted to be faster.
      present_s: predicted seconds of a step of the present strategy; the measured ones if that is chosen.
      slower: the factors by which the machine's figures were corrected, for computing and for exchanges.
      is_whole: whether there was time for every strategy.
      least_bytes: the smallest memory limit of a rank.
      bytes_per_s: rate of exchanges of the slowest rank.
      took_s: seconds that the search took.
    """

    chosen: ChosenStrategy
    present_s: float
    slower: Slowdown
    is_whole: bool
    least_bytes: float
    bytes_per_s: float
    took_s: float


def search_again(
    program: Program,
    settings: PlanSettings,
    context: Context,
    number: int,
    captured: Program,
    took: tuple[float, float],
    is_near: bool = False,
) -> SearchedAgain:
    """Searches the fastest strategy anew for a program that runs and whose steps were measured; collective.

    Speeds and links are measured again, and corrected by the measured step time. The run is not changed except for
    ``planning.slower``.

    Args:
      program, settings, captured: as in ``spread_program``, with settings as if no variable had a layout yet.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
      took: measured seconds of a step, and of its exchanges without waits.
      is_near: True if the measured steps took about as long as predicted: the present strategy is then only compared
        with the one in which rank 0 computes the whole step on the cores of all ranks.

    Raises:
      PlanError: no strategy can run now, or the present one cannot be predicted.
    """
    started_s, present = time.perf_counter(), context.planning.auto
    assert present is not None
    comm, key = context.comms[0], f"whale/auto/{number}/again"
    purpose = f"another search for a strategy for program {number}, `{program.name}` (rank 0 is planning)"
    # Corrections of earlier searches stay in force: the present steps may not reveal them again.
    before = context.planning.slower
    environment = _environment(program, context, number, captured, again=True)
    bytes_per_s = min(one.exchanged_bytes_per_s for one in environment.rates)  # as measured now, whatever prices it
    if environment.prices is None and not present.strategy.lent_threads:
        environment = replace(environment, lending=find_lending(program, context))
    if is_near:
        return _compare_with_lending(program, settings, environment, context, key, took[0], bytes_per_s, started_s)
    environment = environment.slow_down(before)
    mine = None
    if context.rank == 0:
        try:
            priced = price_step(_plans_of(present, program, settings, environment), present.strategy)
            mine = msgspec.json.encode(find_slowdown(priced, *took))
        except WhaleError as error:
            mine = b"E" + str(error).encode()
    said = comm.broadcast_bytes(f"{key}/slowdown", mine, 0, PLAN_TIMEOUT_S, purpose)
    if said.startswith(b"E"):
        raise PlanError(
            f"rank 0 could not predict the present strategy: {said[1:].decode()}",
            action="none is needed in this run, which goes on with the present strategy",
        )
    now = msgspec.json.decode(said, type=Slowdown)
    environment = environment.slow_down(now)
    slower = context.planning.slower = Slowdown(before.computing * now.computing, before.exchanging * now.exchanging)
    stages, found = context.config["pipeline.stages"], list[SearchedAgain]()

    def look(team: RankTeam) -> tuple[ChosenStrategy, Made]:
        best = best_way(program, settings, environment, stages, team=team, is_corrected=True)
        chosen, least_bytes = best.chosen, min(environment.limits_bytes)
        plans = _plans_of(present, program, settings, environment)
        present_s = predict(plans, present.strategy, 0.0).seconds
        if chosen.step_s > present_s * (1 - LEAST_GAIN):
            present_s = took[0]
            chosen = msgspec.structs.replace(present, step_s=present_s)
        chosen = msgspec.structs.replace(chosen, compared=environment.lending is not None)
        took_s = time.perf_counter() - started_s
        found.append(SearchedAgain(chosen, present_s, slower, best.is_whole, least_bytes, bytes_per_s, took_s))
        return best.chosen, best.made

    find_together(context, key, purpose, lambda: Plans(program, settings, environment), look)
    mine = msgspec.msgpack.encode(found[0]) if context.rank == 0 else None
    return msgspec.msgpack.decode(comm.broadcast_bytes(f"{key}/found", mine, 0, PLAN_TIMEOUT_S), type=SearchedAgain)


def _compare_with_lending(
    program: Program,
    settings: PlanSettings,
    environment: SearchEnvironment,
    context: Context,
    key: str,
    took_s: float,
    bytes_per_s: float,
    started_s: float,
) -> SearchedAgain:
    """Returns the present strategy, or the one in which rank 0 computes on the cores of all ranks if its measured step
    is faster; collective.

    Args:
      key: prefix of the keys by which ranks match these messages.
      took_s: measured seconds of a step now.
      bytes_per_s: rate of exchanges, for the result.
      started_s: when the search began, by ``time.perf_counter``.
    """
    present, mine = context.planning.auto, None
    assert present is not None
    if context.rank == 0:
        try:
            with log_while_running(f"comparing steps of `{program.name}` with one rank on the cores of all"):
                found = way_or_lending(program, settings, environment, present.strategy, took_s)
            is_lent, least_bytes = bool(found.chosen.strategy.lent_threads), min(environment.limits_bytes)
            chosen = found.chosen if is_lent else msgspec.structs.replace(present, step_s=took_s, compared=True)
            spent_s = time.perf_counter() - started_s
            again = SearchedAgain(chosen, took_s, Slowdown(), True, least_bytes, bytes_per_s, spent_s)
            mine = msgspec.msgpack.encode(again)
        except WhaleError as error:
            mine = b"E" + str(error).encode()
    said = context.comms[0].broadcast_bytes(f"{key}/lending", mine, 0, PLAN_TIMEOUT_S)
    if said.startswith(b"E"):
        raise PlanError(
            f"rank 0 could not compare the present strategy with another one: {said[1:].decode()}",
            action="none is needed in this run, which goes on with the present strategy",
        )
    return msgspec.msgpack.decode(said, type=SearchedAgain)


def _plans_of(
    chosen: ChosenStrategy, program: Program, settings: PlanSettings, environment: SearchEnvironment
) -> Plans:
    """Returns the object that plans and prices a program under the strategy ``chosen``; the program is normalised again
    if that strategy recomputes activations.
    """
    if (how := recompute_of(chosen.strategy)) and environment.captured is not None:
        settings = settings.but(memory__recompute=how)
        program = normalise(environment.captured, settings)
    return Plans(program, settings.but(observer=PassObserver()), environment)


def _environment(
    program: Program, context: Context, number: int, captured: Program | None, again: bool = False
) -> SearchEnvironment:
    """Returns the figures from which the search predicts steps: the speeds, links and memory of the ranks, or of a dry
    run's cluster. Measures those that are not known yet; collective between processes.

    Args:
      again: whether to measure links even if they were measured before.
    """
    size, dry, profile = context.planned_size, context.planning.dry, _profile(context)
    if dry is not None and dry.cluster is not None and profile is None:
        environment = SearchEnvironment.read_cluster(dry.cluster, program, size, captured)
        asked = context.config["memory.limit_bytes"]
        return replace(environment, limits_bytes=[asked] * size) if asked else environment
    with eager_mode():  # in a session, the script's graph must not grow
        rates = measure_rates(context, dry is not None, program)
    topology = _measured_topology(context, again)
    return SearchEnvironment(rates, profile, limits_bytes(context, number), captured, topology=topology)


def _measured_topology(context: Context, again: bool) -> Topology | None:
    """Returns the hosts of the ranks with the measured speeds of the links between them, for predictions; measures them
    when first asked for. Collective between processes.

    Returns None if there is nothing to measure: on one host, on two hosts with one rank each (all exchanges use the
    same link), with ranks in one process, and in a dry run.

    Args:
      again: whether to measure the links now in any case; the ranks' places on the mesh stay as they were found before.
    """
    found = context.topology
    if found is None or not context.has_other_processes or context.planning.dry is not None:
        return None
    if len(found.hosts) == len(found.names) == 2:
        return None
    if again:
        return measure_links(context.comms[0], found)
    if not found.links or (found.inside is None and len(found.hosts) > len(found.names)):
        measured = measure_links(context.comms[0], found)
        found = context.topology = replace(measured, links=found.links or measured.links)
    return found


def _keep(program: Program, settings: PlanSettings, context: Context, number: int) -> ChosenStrategy | None:
    """Returns the strategy that rank 0 has cached in an earlier run, on every rank; None: there is none. Collective
    between processes.
    """
    chosen = None
    know_machines(context)
    if (
        context.rank == 0
        and context.planning.dry is None
        and (chosen := load_strategy(program, context, settings)) is not None
    ):
        say_kept(chosen)
    if context.planning.dry is not None or not context.has_other_processes:
        return chosen
    mine = msgspec.json.encode(chosen) if context.rank == 0 else None
    said = context.comms[0].broadcast_bytes(
        f"whale/auto/{number}/kept", mine, 0, context.config["debug.check_timeout_s"]
    )
    return msgspec.json.decode(said, type=ChosenStrategy | None)


def say_kept(chosen: ChosenStrategy) -> None:
    """Logs that a strategy which an earlier run found is used without a search; called on the first rank."""
    _say(chosen, [f"{chosen.strategy.name}, predicted {1e3 * chosen.step_s:.2f} ms a step (as in an earlier run)"])


def _say(chosen: ChosenStrategy, lines: list[str], advises: bool = False) -> None:
    lines = [f"auto_parallel: {lines[0]}", *lines[1:]]
    if chosen.strategy.replicated and advises:
        lines.append(
            "one process with all of the host's cores may be faster: a rank cannot take the others' cores, as "
            "TensorFlow counts its threads when a process starts; try `whale run -np 1`"
        )
    for line in lines:
        log.info(line)


def _profile(context: Context) -> MachineProfile | None:
    """Reads the profile that `mesh.profile` names; None: none is named, or it tells only links between hosts that ranks
    share, which this run measures itself.

    Raises:
      ClusterError: the profile cannot be read, or was measured on another number of hosts than the ranks are on.
    """
    path = context.config["mesh.profile"]
    if not path:
        return None
    profile, place, topology = tables.read(path), context.place, context.topology
    if profile.hosts > 1 and topology is not None and len(topology.hosts) > len(topology.names):
        if profile.find_links(topology.names):
            return None
    if not context.has_other_processes or place.local_size == (context.size if profile.hosts == 1 else 1):
        return profile
    raise ClusterError(
        "a profile describes other hosts than those of the ranks",
        given=f"mesh.profile: {path}, measured on {profile.hosts} host{'s' * (profile.hosts > 1)}; this host has "
        f"{place.local_size} of {context.size} ranks",
        expected="all ranks on one host, or with a profile of `whale profile --hosts` one on each",
        action="leave mesh.profile out: the ranks are then measured for a moment",
    )
