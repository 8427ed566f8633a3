"""Caches lowered steps for later runs of the same program: the key ``mesh.plan_cache``.

The cache key of a step covers all inputs of a rank's compilation: its trace, the configuration, the layouts of
variables and batches, the rank, and the code. Cached are the TensorFlow functions, and what Whale does with them at
each call, so that a later run neither reads, plans nor lowers the trace. Ranks use cached steps only if all of them
have one, made from the same plan.

Decision: 0096.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from hashlib import blake2b
from typing import Any

import msgspec
from tensorflow.core.framework import function_pb2

from whale.capture.function import Trace
from whale.ir.mesh import Tiles
from whale.ir.plan import Plan, plan_from_json
from whale.ir.plan_text import format_plan
from whale.ir.strategy import ChosenStrategy
from whale.log import log
from whale.partition.variable_use import VariableUse
from whale.passes.run_passes import PassObserver
from whale.runtime.annotate import find_variable_names
from whale.runtime.compile.auto import say_kept
from whale.runtime.compile.memory_plan import limit_bytes
from whale.runtime.compile.plan_cache import (
    code_digest,
    files_of,
    get_kept,
    is_same_link,
    know_machines,
    put_kept,
)
from whale.runtime.compile.settings import settings_of
from whale.runtime.compile.tensorflow_functions import LoweredFunction
from whale.runtime.context import Context, make_unique_name

# Configuration keys that do not change what ranks run, and so are no part of the cache key.
_NO_MATTER = frozenset({"mesh.plan_cache", "debug.log", "debug.trace", "batch.prefetch", "debug.check_timeout_s"})


class Ready(msgspec.Struct, frozen=True):
    """Represents a lowered step, with all that is needed to call it and to cache it.

    Attributes:
      program: name of the program.
      inputs: its inputs in words.
      main: name of the function to call.
      passed, handles, outputs: see ``LoweredFunction``.
      variables: names of the handle nodes of its variables.
      uses: name of a variable's handle node -> how the step uses a variable that not all ranks hold alike.
      kinds: name of a variable's handle node -> parameters, optimizer state or buffers.
      offloaded: names of the handle nodes of variables in the host's memory.
      communicates: whether it needs the op library.
      rolled: whether it has micro-batches.
      trains: whether it updates variables.
      most_bytes: predicted peak bytes.
      crossing_bytes: bytes that a step copies to the host's memory, and from it; None: nothing is offloaded.
      whole: warning about a program that is not divided; "": none.
      on_device: message about embedding tables that are not in the host's memory; "": none.
      matched: annotations that matched names in this program or an earlier one.
      chosen: the strategy that `auto_parallel` found, as JSON; empty: it did not run.
      gathers: whether the step needs the whole batch even if each rank has read its own rows.
      staged: whether it has pipeline stages.
      lends: whether ranks lend their cores to the first one, which computes the step.
      connects: groups of ranks whose GPUs exchange data in the step.
      tag: prefix of the names of its functions.
      streams: prefix of the names of its random streams.
      exchange_s: seconds of a small exchange between hosts when it was made; 0: all ranks were on one host.
      strategy_name: name under which the strategy is cached; "": it is not.
      agreed: digest that is equal on ranks that lowered the step together, and on no others.
      plan: as JSON; set in the cached form only.
      definitions: serialised FunctionDefs, callees first; set in the cached form only.
    """

    program: str
    inputs: str
    main: str
    passed: tuple[str, ...]
    handles: tuple[tuple[str, ...], ...]
    outputs: int
    variables: tuple[str, ...]
    uses: dict[str, VariableUse]
    kinds: dict[str, str]
    offloaded: tuple[str, ...]
    communicates: bool
    rolled: bool
    trains: bool
    most_bytes: float
    crossing_bytes: tuple[int, int] | None
    whole: str
    matched: tuple[str, ...]
    chosen: bytes
    on_device: str = ""
    gathers: bool = False
    staged: bool = False
    lends: bool = False
    connects: tuple[tuple[int, ...], ...] = ()
    tag: str = ""
    streams: str = ""
    exchange_s: float = 0.0
    strategy_name: str = ""
    agreed: str = ""
    plan: bytes = b""
    definitions: tuple[bytes, ...] = ()

    def function(self, streams: str) -> LoweredFunction:
        """Returns the cached TensorFlow functions, renamed so that their names are unique in this process.

        Args:
          streams: prefix of the names of the trace's random streams in this process.
        """
        tag = new_tag(self.tag[: -_DIGITS - 1])
        changes = [(self.tag.encode(), tag.encode()), (self.streams.encode(), streams.encode())]
        definitions = []
        for text in self.definitions:
            for old, new in changes if self.streams else changes[:1]:
                text = text.replace(old, new)
            definitions.append(function_pb2.FunctionDef.FromString(text))
        return LoweredFunction(
            self.main.replace(self.tag, tag), tuple(definitions), self.passed, self.handles, self.outputs
        )

    def read_plan(self) -> Plan:
        """Returns the plan, decoded from its JSON."""
        return plan_from_json(self.plan)


_DIGITS = 8


def new_tag(name: str) -> str:
    """Returns a unique prefix for the names of a step's functions; its number has a fixed width, so that renaming keeps
    lengths.
    """
    return make_unique_name(name, _DIGITS)


def find(
    trace: Trace, local: Mapping[str, tuple[int, ...]], layouts: Mapping[str, Tiles], number: int, context: Context
) -> tuple[str, Ready | None]:
    """Returns the name under which this rank caches a step ("": it does not), and the cached step if it can be used,
    else None.

    Collective between processes under `auto_parallel`.

    Args:
      local: name of each input of which this rank gets only its own rows -> number of rows on every rank.
      layouts: name of a variable's handle node -> layout of the variables that earlier programs have fixed.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
    """
    if _is_auto(context):
        know_machines(context)  # collective, so all ranks call it, even one that caches nothing
    files = files_of(context, settings_of(context)) if _may_keep(context) else None
    if files is None:
        return "", None
    name = f"{_digest(trace, local, layouts, number, context)}.step"
    data = get_kept(files, name, f"the lowered step of `{trace.name}`")
    if data is None:
        return name, None
    try:
        found = msgspec.msgpack.decode(data, type=Ready)
    except (ValueError, TypeError) as error:
        log.warning(f"the lowered step of `{trace.name}` in the cache cannot be read ({error}), and is made anew")
        return name, None
    limit, _ = limit_bytes(context)
    same = found.most_bytes <= limit and (not _is_auto(context) or is_same_link(found.exchange_s, context))
    return name, found if same else None


def keep(name: str, ready: Ready, function: LoweredFunction, plan: Plan, context: Context) -> None:
    """Caches a lowered step for later runs, unless the search of `auto_parallel` ran out of time.

    Args:
      name: as ``find`` returned it; "": nothing is cached.
    """
    files = files_of(context, settings_of(context)) if name else None
    if files is None or not context.planning.searched_all:
        return
    text = plan.to_json()
    agreed = blake2b(repr((text, ready.chosen, ready.gathers, ready.program)).encode(), digest_size=16).hexdigest()
    definitions = tuple(one.SerializeToString() for one in function.definitions)
    exchange_s = know_machines(context).exchange_s if _is_auto(context) else 0.0
    marks = {"exchange_s": exchange_s, "strategy_name": context.planning.kept_as}
    whole = msgspec.structs.replace(ready, agreed=agreed, plan=text, definitions=definitions, **marks)
    put_kept(files, context, name, msgspec.msgpack.encode(whole))


def correct(name: str, chosen: ChosenStrategy, context: Context) -> None:
    """Changes the predicted figures of the strategy in a cached step; the step itself stays the same.

    Args:
      name: as ``find`` returned it.
    """
    files = files_of(context, settings_of(context)) if name else None
    if files is None or (data := get_kept(files, name, "the lowered step")) is None:
        return
    kept = msgspec.msgpack.decode(data, type=Ready)
    put_kept(
        files, context, name, msgspec.msgpack.encode(msgspec.structs.replace(kept, chosen=msgspec.json.encode(chosen)))
    )


def remember(ready: Ready, plan: Callable[[], Plan], predicted: Callable[[], dict[str, int]], context: Context) -> None:
    """Records in the run's context what compiling a step would have recorded, for a step that comes from the cache;
    logs its messages.

    Args:
      predicted: returns the bytes by category that the step needs on this process's first rank.
    """
    first = context.rank == 0
    if ready.chosen and context.planning.auto is None:
        context.planning.auto = msgspec.json.decode(ready.chosen, type=ChosenStrategy)
        context.planning.kept_as = ready.strategy_name
        if first:
            say_kept(context.planning.auto)
    if ready.whole and ready.program not in context.reports.whole:
        context.reports.whole.add(ready.program)
        log.warning(ready.whole)
    if ready.on_device and ready.on_device not in context.reports.on_device:
        context.reports.on_device.add(ready.on_device)
        log.info(ready.on_device)
    context.scoping.annotated.update(ready.matched)
    context.reports.predicted[ready.program] = cache(predicted)
    if ready.crossing_bytes is not None:
        context.reports.offloaded[ready.program] = ready.crossing_bytes
    if context.watch is not None and first:
        context.watch.tell_plan(ready.program, lambda: format_plan(plan()))
    context.distributed = context.distributed or ready.trains
    log.debug(f"the step `{ready.program}` runs the rank's program that an earlier run has compiled and cached")


def _is_auto(context: Context) -> bool:
    return bool(context.config["mesh.auto_parallel"])


def _may_keep(context: Context) -> bool:
    """Returns True if a rank's lowered step depends only on what ``_digest`` covers, and nothing needs the program
    itself (a dry run, a meter).
    """
    others = (
        context.planning.dry,
        context.planning.saved,
        context.planning.described,
        context.planning.meter,
        context.planning.own_programs,
        context.elastic,
    )
    return all(one is None for one in others) and not context.config["debug.dump"]


def _digest(
    trace: Trace, local: Mapping[str, tuple[int, ...]], layouts: Mapping[str, Tiles], number: int, context: Context
) -> str:
    config = {key: value for key, value in context.config.items() if key not in _NO_MATTER}
    named: list[Any] = [
        context.scoping.annotations,
        find_variable_names(trace.variables) if context.scoping.annotations else {},
    ]
    strategy = None if context.planning.auto is None else context.planning.auto.strategy
    auto = strategy, know_machines(context).machines if _is_auto(context) else ()
    run = (
        context.size, context.ranks, context.comm_name, context.local_ranks, context.scoping.scopes[-1:],
        context.scoping.split_everything, context.solo, number,
    )  # fmt: skip
    settings = settings_of(context).but(observer=PassObserver())
    parts = (trace.compute_digest(), dict(local), dict(layouts), config, settings, named, auto, run)
    return blake2b(repr((*parts, code_digest())).encode(), digest_size=16).hexdigest()
