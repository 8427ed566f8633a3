"""Predicts the memory of a step before it runs, by rank and category, and compares it with the devices' memory.

The prediction uses the ranks' programs (see cost_model.graph.peak_memory), which already contain the schedule,
micro-batches, recomputation, mixed precision and `memory.zero`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from cost_model.cluster.discover import find_host_resources
from cost_model.kernels.gpu_memory import tensorflow_bytes
from whale.cgroup import memory_limit_bytes
from whale.config import Config
from whale.distributed.device_exchange import count_device_buffer_bytes
from whale.distributed.ranks import PLAN_TIMEOUT_S
from whale.errors import PlanError, WhaleError
from whale.ir.plan_text import format_bytes
from whale.ir.program import Program
from whale.ir.values import TensorType
from whale.partition.lower import lower_first_ranks
from whale.passes.memory.step_bytes import at_most_bytes, taken_bytes
from whale.passes.run_passes import PassObserver
from whale.passes.settings import PlanSettings
from whale.runtime.context import Context
from whale_ops import gpu_driver

_MOST_MICRO_BATCHES = 64

# Finds the settings that would make the step fit into so many bytes of a rank, in words; called only for an error.
Options = Callable[[float], str]


def limit_bytes(config: Config, local_ranks: int) -> tuple[float, str]:
    """Returns (bytes that each of ``local_ranks`` ranks of this host may use, the source of the limit); infinite if
    unknown.
    """
    import tensorflow as tf

    if config["memory.limit_bytes"]:
        return float(config["memory.limit_bytes"]), "memory.limit_bytes"
    if gpus := tf.config.list_physical_devices("GPU"):
        return _gpu_limit_bytes(config, gpu_driver.look(), math.ceil(local_ranks / len(gpus)))
    _, host_bytes = find_host_resources(memory_limit_bytes=memory_limit_bytes())
    return host_bytes / local_ranks, f"the host's memory, divided by its {local_ranks} ranks"


def _gpu_limit_bytes(config: Config, driver: gpu_driver.Driver | None, sharing: int) -> tuple[float, str]:
    """Returns the limit as `limit_bytes` does, for the smallest GPU of this process, shared by ``sharing`` ranks."""
    if driver is None or not driver.gpus:
        return math.inf, "no limit is known; memory.limit_bytes sets one"
    gpu = min(driver.gpus, key=lambda one: one.memory_bytes)
    held = {"CUDA": tensorflow_bytes(gpu.memory_bytes, gpu.capability), "exchanges": count_device_buffer_bytes(config)}
    among = f", divided by the {sharing} ranks that share it" if sharing > 1 else ""
    without = " and ".join(f"{format_bytes(size)} for {what}" for what, size in held.items() if size)
    limit = gpu.memory_bytes / sharing - sum(held.values())
    return limit, f"memory of the GPU, {gpu.name}{among}, without {without}"


class _Rank(msgspec.Struct):
    """A rank's message about its program: only the limit if the program fits."""

    limit: float
    source: str
    memory: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit


def beside_files(program: Program, in_files: Collection[str]) -> Program:
    """Returns a rank's program without the memory of variables in files (by handle node)."""
    variables = (replace(v, type=TensorType(v.type.dtype, ())) if v.node in in_files else v for v in program.variables)
    return replace(program, variables=tuple(variables)) if in_files else program


def refuse_what_does_not_fit(
    programs: Mapping[int, Program], context: Context, number: int, settings: PlanSettings, options: Callable[[], str]
) -> float:
    """Raises an error if the step does not fit; else returns the largest bytes of a rank of this process. Collective.

    Args:
      programs: of this process's ranks.
      number: of the program in this run.
      options: describes settings with which it would fit; called on the first rank, and only if it does not fit.

    Raises:
      PlanError: on every rank, if one of them would exceed its device's memory.
    """
    mine, most_bytes = [], 0.0
    for rank, program in programs.items():
        limit, source = limit_bytes(context.config, context.local_ranks)
        bound_bytes = at_most_bytes(program, rank, settings)
        found = _Rank(limit, source, {} if bound_bytes <= limit else taken_bytes(program, rank, settings))
        most_bytes = max(most_bytes, found.bytes or bound_bytes)
        mine.append(found)
    said = dict(zip(programs, mine))
    if context.has_other_processes:
        comm, timeout_s = context.comms[0], context.config["debug.check_timeout_s"]
        each = comm.allgather_bytes(f"whale/memory/{number}", msgspec.json.encode(mine[0]), timeout_s)
        said = {rank: msgspec.json.decode(one, type=_Rank) for rank, one in enumerate(each)}
    if all(one.fits for one in said.values()):
        return most_bytes
    text = ""
    if context.rank == 0:
        text = options()
    if context.has_other_processes:
        comm = context.comms[0]
        key = f"whale/memory/{number}/options"
        text = comm.broadcast_bytes(key, text.encode() if context.rank == 0 else None, 0, PLAN_TIMEOUT_S).decode()
    raise _refusal(next(iter(programs.values())).name, said, text)


def _refusal(name: str, said: Mapping[int, _Rank], options: str) -> PlanError:
    rank, most = max(said.items(), key=lambda item: item[1].bytes - item[1].limit)
    others = sum(not one.fits for one in said.values()) - 1
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in most.memory.items() if n)
    return PlanError(
        "the step does not fit into memory",
        op=name,
        device=f"rank {rank}" + (f", and {others} other ranks" if others else ""),
        given=f"predicted {format_bytes(most.bytes)} at most ({parts})",
        expected=f"{format_bytes(most.limit)} ({most.source}), {format_bytes(most.bytes - most.limit)} less",
        action=options,
    )


def refusal_of_plan(name: str, memory: Mapping[str, Sequence[int]], limits: Sequence[float], options: str) -> PlanError:
    """Creates the error for a plan whose ranks would exceed ``limits``."""
    said = {
        rank: _Rank(limit, "the device's memory", {kind: sizes[rank] for kind, sizes in memory.items()})
        for rank, limit in enumerate(limits[: len(next(iter(memory.values())))])
    }
    return _refusal(name, said, options)


@dataclass(frozen=True)
class _Option:
    """A key of the configuration with another value, and its effect on the planner's settings."""

    name: str
    changes: Mapping[str, Any]

    def and_also(self, other: _Option) -> _Option:
        return _Option(f"{self.name} with {other.name}", {**self.changes, **other.changes})


def options_text(
    settings: PlanSettings,
    limit: float,
    program: Program,
    marked: Callable[[], Program] | None,
    beside_host: bool,
) -> str:
    """Lists other settings with which a step would fit into ``limit`` bytes, with their predicted bytes.

    Args:
      settings, program: with which it does not fit; the program is as captured.
      marked: captures it with its gradients marked, which recomputation needs; None: it cannot.
      beside_host: whether the computing device has memory of its own, separate from the host's.
    """

    def size_of(option: _Option) -> int | None:
        other = settings.but(observer=PassObserver(), **option.changes)
        try:
            source = marked() if marked is not None and "recompute" in option.changes else program
            return max(sum(taken_bytes(p, r, other).values()) for r, p in lower_first_ranks(other, source).items())
        except WhaleError:
            return None  # this program cannot run so

    def sizes(options: Sequence[_Option]) -> list[tuple[int, _Option]]:
        return sorted(((n, o) for o in options if (n := size_of(o)) is not None), key=lambda found: found[0])

    found = sizes(_options(settings, marked is not None, beside_host))
    if found and found[0][0] > limit:
        least = found[0][1]
        apart = [o for _, o in found if o.changes.keys().isdisjoint(least.changes)]
        found = sorted([*found, *sizes([least.and_also(o) for o in apart])], key=lambda one: one[0])
    fitting = [f"{option.name} ({format_bytes(n)})" for n, option in found if n <= limit]
    if fitting:
        return "set " + ", or ".join(fitting) + "; in parentheses what is predicted then"
    best = f" (the least is {format_bytes(found[0][0])}, {found[0][1].name})" if found else ""
    return f"nothing that was tried makes it fit{best}; use more ranks or a smaller batch"


def _options(settings: PlanSettings, recomputes: bool, beside_host: bool) -> list[_Option]:
    """Returns settings that may need less memory than ``settings``."""
    found = []
    if settings.size > 1:
        levels = (level for level in (1, 3) if level > settings.zero.level)
        found += [_Option(f"memory.zero={level}", {"zero__level": level}) for level in levels]
    if recomputes and settings.memory.recompute != "auto":
        found.append(_Option("memory.recompute=auto", {"memory__recompute": "auto"}))
    if beside_host:
        levels_above = {"": ("tables", "optimizer", "parameters"), "optimizer": ("parameters",)}.get(
            settings.memory.offload, ()
        )
        found += [_Option(f"memory.offload={level}", {"memory__offload": level}) for level in levels_above]
    count = max(2, 2 * settings.time.micro_batches)
    while count <= _MOST_MICRO_BATCHES:
        found.append(_Option(f"pipeline.micro_batches={count}", {"time__micro_batches": count}))
        count *= 4
    if not settings.precision.matmul_dtype:
        found.append(_Option("precision.compute_dtype=bfloat16", {"precision__matmul_dtype": "bfloat16"}))
    if not settings.batch.local and not settings.batch.shares:
        found.append(_Option(f"{2 * settings.size} ranks", {"size": 2 * settings.size}))
    return found
