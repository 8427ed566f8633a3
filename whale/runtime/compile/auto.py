"""`auto_parallel`: rank 0 predicts every way to spread the first training step, and all ranks take the fastest.

What is predicted is what would run: each way is planned and lowered for rank 0, and the nodes of that program are
counted with the speed that was measured while all ranks computed and exchanged at the same time. Later programs of the
run are spread in the same way, because the variables lie so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from cost_model.captured import table as tables
from cost_model.captured.predict import measured_machine, predict_ranks
from cost_model.captured.table import Table
from whale.errors import ClusterError, PlanError, WhaleError
from whale.ir.collector import no_garbage_collection
from whale.ir.fingerprint import fingerprint
from whale.ir.layout import Split, proportional_sizes
from whale.ir.program import Program
from whale.lowering.local import localise
from whale.passes.facts.batch import batch_inputs
from whale.passes.facts.stages import places_of
from whale.passes.memory.zero import state_at_rest
from whale.passes.order import expand
from whale.passes.settings import PlanSettings
from whale.planner.captured.balance import balanced
from whale.planner.captured.pipelines import chain, pipelines, staged, work_of_chain
from whale.planner.captured.play import step_seconds
from whale.planner.captured.ways import (
    Choice,
    Rates,
    choices,
    has_scopes,
    node_seconds,
    rank_bytes,
    rank_seconds,
    scoped,
    trains,
)
from whale.runtime.compile.mesh import lower_mesh, plan_program
from whale.runtime.compile.stage_groups import lower_places, plan_places
from whale.runtime.measure.rates import measured_rates as _measured
from whale.runtime.measure.rates import unequal
from whale.runtime.run.context import Context

BUDGET_S = 30.0
# A way that is less than that faster is not taken: the prediction is no better.
LEAST_GAIN = 0.03
RECOMPUTE = "auto"  # which activations, where memory is too small for all (see whale.passes.memory.recompute)
FEW_PLAYS = 6  # orders of a step that are played for a way's memory


Again = Callable[[PlanSettings], Program]


def spread_program(
    program: Program,
    settings: PlanSettings,
    context: Context,
    number: int,
    again: Again | None,
    options: Callable[[float], str],
    dry: bool = False,
) -> tuple[Program, PlanSettings]:
    """The program and the settings with which it is to be planned; collective between processes.

    Args:
      settings: for all ranks, or for the ranks of a dry run.
      number: of the program in this run.
      again: normalises the program as it was captured under other settings; None: its gradients are not marked.
      options: which settings would make the step fit into so many bytes of a rank.
    """
    if settings.size == 1 or has_scopes(program):
        return program, settings
    chosen = context.auto
    if chosen is None:
        if not trains(program):
            return program, settings
        chosen = _agreed(program, settings, context, number, again, options, dry)
        context.auto = chosen
    if chosen.recompute and again is not None and trains(program):
        settings = settings.but(memory__recompute=chosen.recompute)
        program = again(settings)
    return apply(program, settings, chosen)


def apply(program: Program, settings: PlanSettings, chosen: Choice) -> tuple[Program, PlanSettings]:
    """What a choice makes of a program and of the settings for planning it."""
    if chosen.alone and not settings.batch.local:
        return program, settings.but(batch__inputs=())
    if chosen.weights:
        return scoped(program, chosen), settings.but(split__ranks=chosen.group)
    if chosen.stages:
        # What does not train is sent the values that it reads.
        if not trains(program) or len(chain(program)) <= chosen.cuts[-1]:
            return program, settings
        return staged(program, chosen), settings.but(time__micro_batches=chosen.micro_batches)
    if chosen.zero:
        return program, settings.but(zero__level=chosen.zero)
    if chosen.shares and not settings.batch.local:
        return program, settings.but(batch__shares=chosen.shares)
    return program, settings


def _agreed(
    program: Program,
    settings: PlanSettings,
    context: Context,
    number: int,
    again: Again | None,
    options: Callable[[float], str],
    dry: bool,
) -> Choice:
    """Rank 0's choice on every rank."""
    rates = _measured(context, dry, program)
    if dry or not context.between_processes:
        return _best(program, settings, context, rates, again, options)
    comm, key = context.comms[0], f"whale/auto/{number}"
    if context.rank == 0:
        try:
            chosen = _best(program, settings, context, rates, again, options)
        except Exception as error:
            comm.broadcast_bytes(key, b"E" + str(error).encode())
            raise
        comm.broadcast_bytes(key, b"C" + msgspec.json.encode(chosen))
        return chosen
    data = comm.broadcast_bytes(key, None, 0, 600.0)
    if data[:1] == b"E":
        raise PlanError(f"rank 0 could not choose a plan: {data[1:].decode()}")
    return msgspec.json.decode(data[1:], type=Choice)


def _best(
    program: Program,
    settings: PlanSettings,
    context: Context,
    rates: Sequence[Rates],
    again: Again | None,
    options: Callable[[float], str],
) -> Choice:
    """The fastest choice by prediction, of those that fit into memory; says on standard error what it found.

    What does not fit, and is faster than all that fits, is also looked at with its activations computed again.
    """
    limit = _memory_bytes(context, settings.size)
    profile = _profile(context)
    end_s = time.monotonic() + BUDGET_S
    found: list[tuple[float, int, Choice]] = []
    lost: list[str] = []

    def look(program: Program, settings: PlanSettings, choice: Choice) -> None:
        if found and time.monotonic() > end_s:
            lost.append(f"{choice.name}: not looked at, the time is over")
            return
        try:
            seconds, size = _predicted(program, settings, choice, profile or rates)
        except WhaleError as error:
            lost.append(f"{choice.name}: cannot run: {error.message}")
            return
        found.append((seconds, size, choice))

    for choice in _looked_at(program, settings, rates, context.config["pipeline.num_stages"]):
        if choice.alone and settings.batch.local:
            lost.append(f"{choice.name}: every rank is given its own rows only")
        else:
            look(program, settings, choice)
    least_s = min((one[0] for one in found if one[1] <= limit), default=float("inf"))
    full = sorted((one for one in found if one[1] > limit and one[0] < least_s), key=lambda e: e[0])
    if full and again is not None and not settings.memory.recompute:
        changed = settings.but(memory__recompute=RECOMPUTE)
        less = again(changed)
        for _, _, choice in full:
            name = f"{choice.name}, activations computed again"
            look(less, changed, msgspec.structs.replace(choice, name=name, recompute=RECOMPUTE))
    if not found:
        raise PlanError("no way to spread the program was found", reason="; ".join(lost))
    fitting = [one for one in found if one[1] <= limit]
    if not fitting:
        _, size, choice = min(found, key=lambda e: e[1])
        raise PlanError(
            "the program fits into the ranks' memory in no way",
            given=f"{size / 1e9:.3g} GB per rank, {choice.name}, which takes the least",
            expected=f"at most {limit / 1e9:.3g} GB, {(size - limit) / 1e9:.3g} GB less",
            action=options(limit),
        )
    first = fitting[0]
    best = min(fitting, key=lambda e: e[0])
    if best[0] > first[0] * (1 - LEAST_GAIN):
        best = first
    origin = f"{profile.host} as `whale profile` measured it" if profile else rates[0].origin
    _say(best, found, lost, limit, origin)
    return msgspec.structs.replace(best[2], predicted_s=best[0])


def _say(
    best: tuple[float, int, Choice], found: list[tuple[float, int, Choice]], lost: list[str], limit: float, origin: str
) -> None:
    lines = [f"whale: auto_parallel: {best[2].name}, predicted {1e3 * best[0]:.2f} ms a step ({origin})"]
    for seconds, size, choice in sorted(found, key=lambda e: e[0]):
        if choice is not best[2]:
            fits = "" if size <= limit else f", does not fit: {size / 1e9:.2f} of {limit / 1e9:.2f} GB"
            lines.append(f"whale:   {choice.name}: {1e3 * seconds:.2f} ms{fits}")
    lines += [f"whale:   {one}" for one in lost]
    if best[2].alone:
        lines.append(
            "whale: one process with all of the host's cores may be faster: a rank cannot take the others' cores, as "
            "TensorFlow counts its threads when a process starts; try `whale run -np 1`"
        )
    sys.stderr.write("\n".join(lines) + "\n")


def _profile(context: Context) -> Table | None:
    """What `cost_model.profile` names, if anything; it describes one host, so all ranks have to be there."""
    path = context.config["cost_model.profile"]
    if not path:
        return None
    if context.between_processes and context.place.local_size != context.size:
        raise ClusterError(
            "a profile describes one host, and the ranks are on several",
            given=f"cost_model.profile: {path}",
            action="leave cost_model.profile out: the ranks are then measured for a moment",
        )
    return tables.read(path)


def _looked_at(program: Program, settings: PlanSettings, rates: Sequence[Rates], stages: int = 0) -> list[Choice]:
    """What to try; data parallelism is first. With a number of stages only pipelines of so many."""
    found = choices(program, settings.size)
    try:
        batch = batch_inputs(program, settings.size, settings.batch.shares, settings.batch.marked, settings.batch.local)
    except PlanError:
        return found
    rows = sum(batch[0].placement.sizes) if batch and isinstance(batch[0].placement, Split) else 0
    speeds = [1.0] * settings.size
    if unequal(rates):
        speeds = _speeds(program, settings, rates)
        if not settings.batch.local and not settings.batch.shares:
            found.insert(1, _by_speed(program, settings, rates, rows, speeds))
    if settings.zero.level == 0 and settings.split.at_rest and not settings.exchange.wire_dtype:
        if state_at_rest(program, settings.size, settings.zero.min_bytes, (), settings.split.known, False):
            found.append(Choice("data parallel, optimizer's state divided", zero=1))
    if not settings.batch.local:
        work = work_of_chain(program, lambda node: node_seconds(program, node, rates[0], settings.size))
        found += [
            one
            for one in pipelines(program, settings.size, rows, work, speeds)
            if settings.time.micro_batches in (1, one.micro_batches)
        ]
    return [one for one in found if len(one.stages) == stages] if stages else found


def _without_waiting(rates: Sequence[Rates]) -> list[Rates]:
    """Of exchanges, what is work of the rank's own core: all that it sends is read, added and written."""
    return [
        replace(one, exchange_s=0.0, exchanged_bytes_per_s=max(one.exchanged_bytes_per_s, one.bytes_per_s / 3))
        for one in rates
    ]


def _speeds(program: Program, settings: PlanSettings, rates: Sequence[Rates]) -> list[float]:
    """How much of the program each rank would compute in a second, had all the same rows; the slowest one has 1."""
    (first,) = _lowered(program, settings, Choice("equal rows"), (0,))
    times = [rank_seconds(first, speed, settings.size) for speed in _without_waiting(rates)]
    return [max(times) / t for t in times]


def _by_speed(
    program: Program, settings: PlanSettings, rates: Sequence[Rates], rows: int, speeds: Sequence[float]
) -> Choice:
    """Rows such that all ranks take equally long.

    What a rank does once in a step, whatever its rows (updates, exchanges), is more for a slow one.
    """
    shares = tuple(round(1000 * speed) for speed in speeds)
    if rows >= len(speeds):
        shares = proportional_sizes(rows, shares)
        few, many = (shares.index(most) for most in (min(shares), max(shares)))
        programs = _lowered(program, settings, Choice("rows by speed", shares=shares), (few, many))
        times = [[rank_seconds(one, speed, settings.size) for one in programs] for speed in _without_waiting(rates)]
        per_row = [(most - least) / (shares[many] - shares[few]) for least, most in times]
        once = [least - shares[few] * row_s for (least, _), row_s in zip(times, per_row)]
        if min(per_row) > 0:
            shares = balanced(rows, once, per_row)
    return Choice(f"data parallel, rows {'+'.join(map(str, shares))}", shares=shares)


def _lowered(program: Program, settings: PlanSettings, choice: Choice, ranks: Sequence[int]) -> list[Program]:
    """The programs that these ranks run."""
    divided, settings = apply(program, settings.but(dump=""), choice)
    places = places_of(divided, settings.size) if choice.stages else ()
    plan = plan_places(divided, settings, places) if places else plan_program(divided, settings)
    with no_garbage_collection():
        if plan.inner is not None:
            return lower_mesh(divided, plan, settings, ranks, "predicted", "")
        expanded = expand(divided, plan.expanded, settings)
        if places:
            return lower_places(expanded, plan, ranks, "predicted", "", settings)
        return [localise(expanded, plan, rank, "predicted", None) for rank in ranks]


def _predicted(
    program: Program, settings: PlanSettings, choice: Choice, rates: Sequence[Rates] | Table
) -> tuple[float, int]:
    """(seconds, bytes) of a step on the slowest rank.

    With a profile all ranks are played, as `whale plan` does; with rates the first of equal ranks stands for all.
    """
    if isinstance(rates, Table):
        machine = measured_machine(rates, settings.size, [fingerprint(program)])
        played = predict_ranks(_lowered(program, settings, choice, range(settings.size)), machine, plays=FEW_PLAYS)
        return played.step_s, played.peak_bytes
    unlike = choice.stages or choice.shares or settings.batch.shares or unequal(rates)
    locals_ = _lowered(program, settings, choice, range(settings.size if unlike else 1))
    if unlike:
        return step_seconds(locals_, rates), max(map(rank_bytes, locals_))
    seconds = max(rank_seconds(one, speed, settings.size) for one, speed in zip(locals_, rates))
    return seconds, max(map(rank_bytes, locals_))


def _memory_bytes(context: Context, size: int) -> float:
    """What a rank on this host may use: its part of the memory; unlimited on a GPU, whose driver is not asked."""
    import os

    import tensorflow as tf

    if tf.config.list_logical_devices("GPU"):
        return float("inf")
    local = max(1, context.place.local_size if context.between_processes else size)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
