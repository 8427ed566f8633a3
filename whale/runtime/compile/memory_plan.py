"""Predicts the memory of a step before it runs, by rank and category, and refuses a step that exceeds the devices'
memory.

The prediction uses the ranks' programs (see cost_model.graph.peak_memory), which already contain the schedule,
micro-batches, recomputation, mixed precision and `memory.zero`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from cost_model.cluster.discover import find_host_memory_bytes
from cost_model.kernels.gpu_memory import tensorflow_bytes
from whale.cgroup import memory_limit_bytes
from whale.config import Config
from whale.distributed.device_exchange import OwnGpu, count_device_buffer_bytes, list_visible_gpus
from whale.distributed.gpus import has_gpu
from whale.distributed.ranks import PLAN_TIMEOUT_S
from whale.errors import PlanError, WhaleError
from whale.ir.plan_text import format_bytes
from whale.ir.program import Program
from whale.ir.values import TensorType
from whale.partition.lower import lower_first_ranks
from whale.passes.memory.step_bytes import predict_at_most_bytes, predict_taken_bytes
from whale.passes.run_passes import PassObserver
from whale.passes.settings import PlanSettings
from whale.runtime.context import Context

_MOST_MICRO_BATCHES = 64

# Finds the settings that would make the step fit into so many bytes of each rank, in words; called only for an error.
Options = Callable[[Sequence[float]], str]


def limit_bytes(context: Context) -> tuple[float, str]:
    """Returns the bytes that a rank of this process may use, and where the limit comes from in words; infinity if
    unknown.

    On GPUs it is the memory of the rank's own GPU. For the ranks of a dry run, use ``limits_bytes``.
    """
    config, gpu, local_ranks = context.config, context.own_gpu, context.local_ranks
    if config["memory.limit_bytes"]:
        return float(config["memory.limit_bytes"]), "memory.limit_bytes"
    if gpu is not None:
        return _gpu_limit_bytes(config, gpu)
    if has_gpu():
        return _limits_by_turns(context)[0]
    if context.host_bytes is None:  # looked up once: files of the kernel are slow to read, and every step asks
        context.host_bytes = find_host_memory_bytes(memory_limit_bytes())
    return context.host_bytes / local_ranks, f"the host's memory, divided by its {local_ranks} ranks"


def limits_bytes(context: Context, number: int) -> list[float]:
    """Returns the memory limit in bytes of each rank that programs are planned for; collective between processes.

    Args:
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
    """
    if context.has_other_processes and context.planning.dry is None:
        mine = _Rank.make(*limit_bytes(context))
        comm, timeout_s = context.comms[0], context.config["debug.check_timeout_s"]
        said = comm.allgather_bytes(f"whale/memory/{number}/limits", msgspec.json.encode(mine), timeout_s)
        return [msgspec.json.decode(one, type=_Rank).limit_bytes for one in said]
    if not context.config["memory.limit_bytes"] and has_gpu():
        return [limit for limit, _ in _limits_by_turns(context)]
    return [limit_bytes(context)[0]] * context.planned_size


def _limits_by_turns(context: Context) -> list[tuple[float, str]]:
    """Returns the limit of each rank of this host, in the form of ``limit_bytes``, where it is not known which rank has
    which GPU.

    In a dry run the GPUs are assigned to ranks round-robin, as a run of processes would do
    (`device_exchange.claim_gpu`); ranks that are threads all compute on the first GPU.
    """
    gpus = list_visible_gpus()
    if not gpus:
        return [(math.inf, "no limit is known; memory.limit_bytes sets one")] * context.local_ranks
    count = 1 if context.planning.dry is None else len(gpus)
    turns = [rank % count for rank in range(context.local_ranks)]
    shared = [msgspec.structs.replace(gpu, sharing=turns.count(place)) for place, gpu in enumerate(gpus[:count])]
    limits = [_gpu_limit_bytes(context.config, gpu) for gpu in shared]
    return [limits[turn] for turn in turns]


def _gpu_limit_bytes(config: Config, gpu: OwnGpu) -> tuple[float, str]:
    """Returns the limit of each rank that shares a GPU, as in ``limit_bytes``: its share of the memory that other
    programs leave, without CUDA's and Whale's own buffers.
    """
    held = {"CUDA": tensorflow_bytes(gpu.memory_bytes, gpu.capability), "exchanges": count_device_buffer_bytes(config)}
    others = f" without {format_bytes(gpu.used_bytes)} that other programs have of it" if gpu.used_bytes else ""
    among = f", divided by the {gpu.sharing} ranks that share it" if gpu.sharing > 1 else ""
    without = " and ".join(f"{format_bytes(size)} for {what}" for what, size in held.items() if size)
    limit = (gpu.memory_bytes - gpu.used_bytes) / max(1, gpu.sharing) - sum(held.values())
    return limit, f"memory of the GPU, {gpu.name}{others}{among}, without {without}"


class _Rank(msgspec.Struct):
    """Represents a rank's message about the memory of its program.

    Attributes:
      limit: bytes that it may use; None: unlimited or unknown.
      source: where the limit comes from, in words.
      memory: category -> predicted bytes; empty if the program surely fits.
    """

    limit: float | None
    source: str
    memory: dict[str, int] = {}

    @classmethod
    def make(cls, limit_bytes: float, source: str, memory: Mapping[str, int] = MappingProxyType({})) -> _Rank:
        return cls(limit_bytes if math.isfinite(limit_bytes) else None, source, dict(memory))

    @property
    def limit_bytes(self) -> float:
        return math.inf if self.limit is None else self.limit

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit_bytes


def drop_files(program: Program, in_files: Collection[str]) -> Program:
    """Returns a rank's program in which variables in files (by handle node) take no memory."""
    variables = (replace(v, type=TensorType(v.type.dtype, ())) if v.node in in_files else v for v in program.variables)
    return replace(program, variables=tuple(variables)) if in_files else program


def refuse_what_does_not_fit(
    programs: Mapping[int, Program],
    context: Context,
    number: int,
    settings: PlanSettings,
    options: Callable[[Sequence[float]], str],
) -> float:
    """Returns the predicted bytes of the rank of this process with most; raises an error if the step does not fit.
    Collective.

    Args:
      programs: rank of this process -> its program.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
      options: describes settings with which the step would fit into the ranks' limits; called on the first rank, and
        only if the step does not fit.

    Raises:
      PlanError: on every rank, if one of them would exceed its device's memory.
    """
    mine, most_bytes = [], 0.0
    for rank, program in programs.items():
        limit, source = limit_bytes(context)
        bound_bytes = predict_at_most_bytes(program, rank, settings)
        found = _Rank.make(limit, source, {} if bound_bytes <= limit else predict_taken_bytes(program, rank, settings))
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
        text = options([one.limit_bytes for one in said.values()])
    if context.has_other_processes:
        comm = context.comms[0]
        key = f"whale/memory/{number}/options"
        text = comm.broadcast_bytes(key, text.encode() if context.rank == 0 else None, 0, PLAN_TIMEOUT_S).decode()
    raise _refusal(next(iter(programs.values())).name, said, text)


def _refusal(name: str, said: Mapping[int, _Rank], options: str) -> PlanError:
    rank, most = max(said.items(), key=lambda item: item[1].bytes - item[1].limit_bytes)
    others = sum(not one.fits for one in said.values()) - 1
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in most.memory.items() if n)
    return PlanError(
        "the step does not fit into memory",
        op=name,
        device=f"rank {rank}" + (f", and {others} other ranks" if others else ""),
        given=f"predicted {format_bytes(most.bytes)} at most ({parts})",
        expected=f"{format_bytes(most.limit_bytes)} ({most.source}), "
        f"{format_bytes(most.bytes - most.limit_bytes)} less",
        action=options,
    )


def refusal_of_plan(name: str, memory: Mapping[str, Sequence[int]], limits: Sequence[float], options: str) -> PlanError:
    """Creates the error for a plan whose ranks would exceed ``limits``.

    Args:
      name: of the program.
      memory: category -> bytes on each rank.
      limits: bytes of each rank's device.
      options: settings with which it would fit, in words.
    """
    said = {
        rank: _Rank.make(limit, "the device's memory", {kind: sizes[rank] for kind, sizes in memory.items()})
        for rank, limit in enumerate(limits[: len(next(iter(memory.values())))])
    }
    return _refusal(name, said, options)


@dataclass(frozen=True)
class _Option:
    """Represents another value of a configuration key, such as ``memory.zero=1``, and its changes of the planner's
    settings.
    """

    name: str
    changes: Mapping[str, Any]

    def combine(self, other: _Option) -> _Option:
        return _Option(f"{self.name} with {other.name}", {**self.changes, **other.changes})


def options_text(
    settings: PlanSettings,
    limits: Sequence[float],
    program: Program,
    marked: Callable[[], Program] | None,
    beside_host: bool,
) -> str:
    """Returns, in words, other settings with which a step would fit into ``limits``, with the bytes predicted for each.

    Args:
      settings: with which the step does not fit.
      limits: bytes of each rank; for options with another number of ranks the smallest one counts.
      program: as captured.
      marked: returns the program captured again with the nodes of its backward pass marked, which recomputation needs;
        None: it cannot be captured that way.
      beside_host: whether the computing device has memory of its own, separate from the host's.
    """

    limit = min(limits)

    # Returns the bytes of the rank with the least room left, compared as if every rank had the smallest limit.
    def size_of(option: _Option) -> float | None:
        other = settings.but(observer=PassObserver(), **option.changes)
        try:
            source = marked() if marked is not None and "recompute" in option.changes else program
            programs = lower_first_ranks(other, source)
            sizes_bytes = {rank: sum(predict_taken_bytes(one, rank, other).values()) for rank, one in programs.items()}
            if len(programs) != len(limits):
                return max(sizes_bytes.values())
            return max(size - (limits[rank] - limit) for rank, size in sizes_bytes.items())
        except WhaleError:
            return None  # this program cannot run so

    def sizes(options: Sequence[_Option]) -> list[tuple[float, _Option]]:
        return sorted(((n, o) for o in options if (n := size_of(o)) is not None), key=lambda found: found[0])

    found = sizes(_options(settings, marked is not None, beside_host))
    if found and found[0][0] > limit:
        least = found[0][1]
        apart = [o for _, o in found if o.changes.keys().isdisjoint(least.changes)]
        found = sorted([*found, *sizes([least.combine(o) for o in apart])], key=lambda one: one[0])
    fitting = [f"{option.name} ({format_bytes(n)})" for n, option in found if n <= limit]
    if fitting:
        return "set " + ", or ".join(fitting) + "; in parentheses the bytes that are predicted with it"
    best = f" (the least is {format_bytes(found[0][0])}, {found[0][1].name})" if found else ""
    return f"no setting that was tried makes it fit{best}; use more ranks or a smaller batch"


def _options(settings: PlanSettings, recomputes: bool, beside_host: bool) -> list[_Option]:
    """Returns changes of ``settings`` that may need less memory.

    Args:
      recomputes: whether recomputation is possible.
      beside_host: whether memory can be offloaded to the host.
    """
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
