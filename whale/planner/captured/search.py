"""`auto_parallel` for a captured program: every way to spread it is lowered and predicted; the fastest that fits wins.

What is predicted is what would run: each way is planned and lowered as compilation does it (`Ground.lower`), its step
is played by the cost model, and its memory is judged as compilation judges it (`whale.passes.memory.step_bytes`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cost_model.captured.graph import MAY_BE_FUSED
from cost_model.captured.machine import rated_machine
from cost_model.captured.predict import step_seconds
from cost_model.captured.table import Table
from cost_model.ops.work import work
from whale.errors import PlanError, WhaleError
from whale.ir.layout import Split, proportional_sizes
from whale.ir.mesh import Axis
from whale.ir.plan_text import human_bytes
from whale.ir.program import Node, Program
from whale.passes.facts.axes import batch_of, known_along
from whale.passes.facts.stages import DATA, TENSOR
from whale.passes.memory.step_bytes import step_bytes
from whale.passes.memory.zero import state_at_rest
from whale.passes.normalise.inline import inline
from whale.passes.settings import PlanSettings
from whale.planner.captured.balance import balanced
from whale.planner.captured.ground import Ground, unequal
from whale.planner.captured.pipelines import chain, least_seconds, pipelines, staged, why_none, work_of_chain
from whale.planner.captured.ways import Choice, choices, scoped, trains

BUDGET_S = 30.0
# A way that is less than that faster is not taken: the prediction is no better.
LEAST_GAIN = 0.03
STATE_DIVIDED = ", optimizer's state divided"
RECOMPUTE = "auto"  # which activations, where memory is too small for all (see whale.passes.memory.recompute)


@dataclass(frozen=True, slots=True)
class Way:
    """A choice with what a step of it is predicted to take: seconds, and bytes of the rank that holds most.

    ``lacking_bytes``: of the rank that lacks most memory; 0 or less: all have enough. Both are 0 where nobody asks,
    since something that fits is faster.
    """

    choice: Choice
    seconds: float
    bytes: int = 0
    lacking_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return self.lacking_bytes <= 0


@dataclass
class Search:
    """What was looked at, in the order of looking, and in words what cannot be, with the reason.

    Attributes:
      end_s: on the clock, after which only a first way is looked at.
      is_whole: whether there was time for every way.
    """

    ground: Ground
    end_s: float
    found: list[Way] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_whole: bool = True

    def to_beat_s(self) -> float:
        """What takes as long or longer is not taken."""
        fitting = [way.seconds for way in self.found if way.fits]
        return min([*fitting, fitting[0] * (1 - LEAST_GAIN)]) if fitting else float("inf")

    def look(self, program: Program, settings: PlanSettings, choice: Choice) -> None:
        """Predicts one way."""
        if self.found and time.monotonic() > self.end_s:
            self.lost.append(f"{choice.name}: not looked at, the time is over")
            self.is_whole = False
            return
        try:
            self.found.append(predicted(program, settings, choice, self.ground, self.to_beat_s()))
        except WhaleError as error:
            self.lost.append(f"{choice.name}: cannot run: {error.message}")

    def full(self) -> Iterator[Choice]:
        """What does not fit and is faster than all that fits, fastest first, while that is so."""
        full = [way for way in self.found if not way.fits]
        for way in sorted(full, key=lambda w: w.seconds):
            if way.seconds < self.to_beat_s():
                yield way.choice


def apply(program: Program, settings: PlanSettings, chosen: Choice) -> tuple[Program, PlanSettings]:
    """What a choice makes of a program and of the settings for planning it."""
    if chosen.alone and not settings.batch.local:
        return program, settings.but(batch__inputs=())
    if chosen.weights:
        return scoped(program, chosen), settings.but(split__ranks=chosen.group)
    changed = settings.but(zero__level=chosen.zero) if chosen.zero else settings
    if chosen.offload:
        changed = changed.but(memory__offload=chosen.offload)
    if chosen.stages or chosen.tensors:
        # What does not train is sent the values that it reads.
        if not trains(program) or len(chain(program)) <= max((0, *chosen.cuts)):
            return program, settings
        program, changed = staged(program, chosen), changed.but(**_in_stages(chosen, settings))
    elif chosen.micro_batches:
        changed = changed.but(time__micro_batches=chosen.micro_batches)
    if chosen.shares and not settings.batch.local:
        changed = changed.but(batch__shares=chosen.shares)
    return program, changed


def _in_stages(chosen: Choice, settings: PlanSettings) -> dict[str, Any]:
    """Settings of a choice that has stages, or divides tensors in all of the program."""
    found: dict[str, Any] = {"time__micro_batches": max(1, chosen.micro_batches)}
    if chosen.tensors:
        groups = chosen.stages or (tuple(range(settings.size)),)
        meshes = {
            ranks: (Axis(DATA, len(ranks) // tensor), Axis(TENSOR, tensor))
            for ranks, tensor in zip(groups, chosen.tensors)
        }
        found["mesh"] = max(meshes.values(), key=lambda axes: axes[0].size * axes[1].size)
        found["stage_meshes"] = meshes if len(set(meshes.values())) > 1 else {}
    if chosen.schedule:
        found["time__schedule"] = chosen.schedule
    return found


def best_way(
    program: Program, settings: PlanSettings, ground: Ground, stages: int = 0, budget_s: float | None = None
) -> tuple[Choice, list[str], bool]:
    """(the fastest choice by prediction, of those that fit into memory; what was found, line by line; whether there was
    time for every way).

    What does not fit, and is faster than all that fits, is also looked at with state and weights divided, and with its
    activations computed again.

    Args:
      stages: only pipelines of so many; 0: any way.
      budget_s: on the clock, after which no further way is looked at; None: as long as a run has.

    Raises:
      PlanError: no way can run, or none fits into the ranks' memory; says by how much, and what would make it fit.
    """
    search = Search(ground, time.monotonic() + (BUDGET_S if budget_s is None else budget_s))
    looked_at = _looked_at(program, settings, ground, stages)
    # Stages take longest to plan. What is found without them, with less held, says how fast they have to be.
    for staged_ones in (False, True):
        for choice, bound_s in (one for one in looked_at if bool(one[0].stages) == staged_ones):
            if choice.alone and settings.batch.local:
                search.lost.append(f"{choice.name}: every rank is given its own rows only")
            elif bound_s >= search.to_beat_s():
                search.lost.append(f"{choice.name}: {1e3 * bound_s:.2f} ms at least")
            else:
                search.look(program, settings, choice)
        _look_at_leaner(search, program, settings)
    best = _best(search, ground)
    chosen = msgspec.structs.replace(best.choice, predicted_s=best.seconds, predicted_bytes=best.bytes)
    return chosen, list(_told(best, search, ground)), search.is_whole


def _look_at_leaner(search: Search, program: Program, settings: PlanSettings) -> None:
    """Ways that do not fit, with state (and weights, where there are no stages) divided, and with activations computed
    again."""
    for choice in list(search.full()):
        replicas = len(choice.stages[0]) if choice.stages else settings.size
        level = 1 if choice.stages else 3
        plain = not (choice.alone or choice.weights or choice.recompute)
        if plain and choice.zero < level and _may_divide_state(program, settings, replicas, level):
            what = "weights and optimizer's" if level == 3 else "optimizer's"
            name = f"{choice.name.removesuffix(STATE_DIVIDED)}, {what} state divided"
            if name not in {way.choice.name for way in search.found}:
                search.look(program, settings, msgspec.structs.replace(choice, name=name, zero=level))
    if search.ground.again is None or settings.memory.recompute:
        return
    full = [choice for choice in search.full() if not choice.recompute]
    if full:
        changed = settings.but(memory__recompute=RECOMPUTE)
        less = search.ground.again(changed)
        seen = {way.choice.name for way in search.found}
        for choice in full:
            name = f"{choice.name}, activations computed again"
            if name not in seen and choice in search.full():
                search.look(less, changed, msgspec.structs.replace(choice, name=name, recompute=RECOMPUTE))


def _may_divide_state(program: Program, settings: PlanSettings, ranks: int, level: int) -> bool:
    """Whether the run leaves it free where state lies, and a level divides more over so many ranks than a lower one."""
    if settings.zero.level or settings.exchange.wire_dtype or ranks == 1:
        return False
    known = known_along(settings.split.tiles, "", alone=True)
    state, more = (
        state_at_rest(program, ranks, settings.zero.min_bytes, (), known, weights) for weights in (False, level == 3)
    )
    return bool(more) if level == 1 else len(more) > len(state)


def _best(search: Search, ground: Ground) -> Way:
    if not search.found:
        raise PlanError("no way to spread the program was found", reason="; ".join(search.lost))
    fitting = [way for way in search.found if way.fits]
    if not fitting:
        least, limit = min(search.found, key=lambda way: way.lacking_bytes), min(ground.limits_bytes)
        raise PlanError(
            "the program fits into the ranks' memory in no way",
            given=f"{human_bytes(least.bytes)} per rank, {least.choice.name}, which takes the least",
            expected=f"at most {human_bytes(limit)}, {human_bytes(least.lacking_bytes)} less",
            action=ground.options(limit),
        )
    best = min(fitting, key=lambda way: way.seconds)
    return fitting[0] if best.seconds > fitting[0].seconds * (1 - LEAST_GAIN) else best


def _told(best: Way, search: Search, ground: Ground) -> Iterator[str]:
    yield f"{best.choice.name}, predicted {1e3 * best.seconds:.2f} ms a step ({ground.origin})"
    for way in sorted(search.found, key=lambda w: w.seconds):
        if way is not best:
            limit = human_bytes(way.bytes - way.lacking_bytes)
            fits = "" if way.fits else f", does not fit: {human_bytes(way.bytes)} of {limit}"
            yield f"  {way.choice.name}: {1e3 * way.seconds:.2f} ms{fits}"
    for one in search.lost:
        yield f"  {one}"


def predicted(
    program: Program, settings: PlanSettings, choice: Choice, ground: Ground, needed_s: float = float("inf")
) -> Way:
    """What a step of a choice takes on the slowest rank, and holds on the fullest one.

    Args:
      needed_s: what takes as long or longer is not taken, whatever it holds.

    Raises:
      WhaleError: the program cannot be spread so.
    """
    unlike = bool(choice.stages or choice.shares or settings.batch.shares) or unequal(ground.rates)
    ranks = _played(settings, choice, ground)
    programs = dict(zip(ranks, _lowered(program, settings, choice, ground, ranks)))
    # Micro-batches are calls of a function; what they do counts as if it stood in their place.
    played = {rank: inline(one) for rank, one in programs.items()}
    seconds = step_seconds(played, settings.size, ground.machine(program))
    if seconds >= needed_s:
        return Way(choice, seconds)
    asked = programs if unlike else {0: programs[0]}
    held = {rank: sum(step_bytes(one, rank, settings.size).values()) for rank, one in asked.items()}
    return Way(choice, seconds, max(held.values()), ground.lacking_bytes(held))


def _played(settings: PlanSettings, choice: Choice, ground: Ground) -> Sequence[int]:
    """Ranks whose steps say what a step of all takes."""
    shares = choice.shares or settings.batch.shares or (0,) * settings.size
    unlike = len(set(zip(ground.rates, shares))) > 1
    # Those of a profile share one host's cores; those of a stage or group wait for each other, and not for all.
    if isinstance(ground.on, Table) or choice.stages or (unlike and (choice.tensors or choice.group)):
        return range(settings.size)
    first: dict[Any, int] = {}
    for rank, kind in enumerate(zip(ground.rates, shares)):
        first.setdefault(kind, rank)
    return list(first.values())


def _lowered(
    program: Program, settings: PlanSettings, choice: Choice, ground: Ground, ranks: Sequence[int]
) -> list[Program]:
    """The programs that these ranks run."""
    return ground.lower(*apply(program, settings.but(dump=""), choice), ranks)


def _looked_at(program: Program, settings: PlanSettings, ground: Ground, stages: int) -> list[tuple[Choice, float]]:
    """What to try, with seconds that it takes at least; data parallelism is first.

    With a number of stages only pipelines of so many.
    """
    found = choices(program, settings.size)
    lasting: list[tuple[Choice, float]] = []
    alone_s = 0.0  # that all of the step takes at least, in one rank's hands
    try:
        batch = batch_of(program, settings)
    except PlanError:
        return [(one, 0.0) for one in found]
    rows = sum(batch[0].placement.sizes) if batch and isinstance(batch[0].placement, Split) else 0
    speeds = [1.0] * settings.size
    if unequal(ground.rates):
        speeds = _speeds(program, settings, ground)
        if not settings.batch.local and not settings.batch.shares:
            found[1:1] = _by_speed(program, settings, ground, rows, speeds)
    if _may_divide_state(program, settings, settings.size, 1):
        found.append(Choice(f"data parallel{STATE_DIVIDED}", zero=1))
    if not settings.batch.local:
        # A table prices what ranks compute at the same time, on cores that they share.
        shared = isinstance(ground.on, Table)
        operations = (rated_machine(ground.rates) if shared else ground.machine(program)).operations
        prices = [operations[ground.rates.index(one)] for one in dict.fromkeys(ground.rates)]

        def seconds(node: Node) -> float:
            """On the fastest rank."""
            does = work(node, [program.type_of(r) for r in node.inputs])
            return min(price(program, node, does)[0] for price in prices) if does.kernels else 0.0

        asked = settings.time.micro_batches
        every = pipelines(program, settings.size, rows, work_of_chain(program, seconds), speeds, asked)
        start_s = min(one.start_s for one in ground.rates)
        least = least_seconds(program, seconds, start_s, settings.size) if every and not shared else lambda _: 0.0
        lasting = [(one, least(one)) for one in every]
        if not shared:
            alone_s = sum(seconds(node) for node in program.nodes if node.op not in MAY_BE_FUSED)
    lasting = [(one, alone_s if one.alone else 0.0) for one in found] + lasting
    if not stages:
        return lasting
    if not (lasting := [one for one in lasting if len(one[0].stages) == stages]):
        local = bool(settings.batch.local)
        why = why_none(program, settings.size, rows, local, stages, settings.time.micro_batches)
        raise PlanError(
            "no way to spread the program was found",
            given=f"pipeline.num_stages={stages}",
            reason=why,
            action="leave pipeline.num_stages out, or change the number of stages, micro-batches or rows",
        )
    return lasting


def _speeds(program: Program, settings: PlanSettings, ground: Ground) -> list[float]:
    """How much of the program each rank would compute in a second, had all the same rows; the slowest one has 1."""
    (first,) = _lowered(program, settings, Choice("equal rows"), ground, (0,))
    times = ground.seconds_of_each(inline(first), 0)
    return [max(times) / t for t in times]


def _by_speed(
    program: Program, settings: PlanSettings, ground: Ground, rows: int, speeds: Sequence[float]
) -> list[Choice]:
    """Rows such that all ranks take equally long; none where they are so few that unequal ranks have as many.

    What a rank does once in a step, whatever its rows (updates, exchanges), is more for a slow one.
    """
    shares = tuple(round(1000 * speed) for speed in speeds)
    if rows >= len(speeds):
        shares = proportional_sizes(rows, shares)
        if min(shares) == max(shares):
            return []
        few, many = (shares.index(most) for most in (min(shares), max(shares)))
        lowered = _lowered(program, settings, Choice("rows by speed", shares=shares), ground, (few, many))
        least, most = (ground.seconds_of_each(inline(one), at) for one, at in zip(lowered, (few, many)))
        per_row = [(more - less) / (shares[many] - shares[few]) for less, more in zip(least, most)]
        once = [less - shares[few] * row_s for less, row_s in zip(least, per_row)]
        if min(per_row) > 0:
            shares = balanced(rows, once, per_row)
    return [Choice(f"data parallel, rows {'+'.join(map(str, shares))}", shares=shares)]
